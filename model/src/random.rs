//! Counter-based random streams: every number is a pure function of
//! `(seed, purpose, replica, step, token, coordinate)`.
//!
//! The generator is Philox4x32 with 7 rounds (Salmon, Moraes, Dror, Shaw, SC 2011: the fewest with
//! which it passes BigCrush; 10 would cost a quarter of the speed of SGD, see `benches/README.md`),
//!
//! ```text
//! (c0, c1, c2, c3) <- (hi(M1 c2) ^ c1 ^ k0, lo(M1 c2), hi(M0 c0) ^ c3 ^ k1, lo(M0 c0)),   k <- k + W
//! ```
//!
//! a bijection of the 128-bit counter under a 64-bit key. A [`Stream`] holds the key of one
//! `(seed, purpose, replica)`, itself a Philox output; the counter is
//! `(block of coordinates, token, step low, step high)`. No state is carried from one number to
//! the next, so results depend neither on threads nor on the order of evaluation, and a device
//! kernel that computes the same function draws the same numbers.
//!
//! Normals come in pairs by Box-Muller, `sqrt(-2 ln u) (cos, sin)(2 pi v)`, from 31 bits for `u`
//! (so `|z| <= 6.66`) and 32 bits for `v`. Only correctly rounded operations and fused
//! multiply-adds are used: the bits are the same at every SIMD level.

use multiversion::multiversion;

/// Multipliers and key increments of Philox4x32 (Salmon et al. 2011, table 2).
const M0: u64 = 0xD251_1F53;
const M1: u64 = 0xCD9E_8D57;
const W0: u32 = 0x9E37_79B9;
const W1: u32 = 0xBB67_AE85;

/// Rounds of Philox.
const ROUNDS: usize = 7;

/// Counters that are evaluated side by side; part of the definition of [`Stream::normals`].
const LANES: usize = 16;

/// Normals per group of counters: four words of each of the [`LANES`] counters.
const GROUP: usize = 4 * LANES;

/// Groups that are computed side by side.
const TOGETHER: usize = 4;

/// What a stream is used for; streams of different purposes are independent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Purpose {
    /// The noise `Z` of the tokens.
    Tokens = 0,
    /// The hidden index `eps` and the hidden weights `theta`.
    Task = 1,
    /// Random initial keys.
    Keys = 2,
    /// Fresh samples on which a loss is measured.
    Test = 3,
    /// Scrambles of quasi-random points and the coordinates beyond them.
    Points = 4,
    /// The overlap chain: its samples, and its random initial keys.
    Chain = 5,
    /// Starting points of a search for the best keys.
    Starts = 6,
    /// Random sets of heads to remove.
    Pruning = 7,
    /// Synthetic queries, keys and values.
    Values = 8,
}

/// One Philox4x32 block with `rounds` rounds: 128 random bits from a counter and a key.
///
/// Known answer (10 rounds, counter 0, key 0): `6627e8d5 e169c58d bc57ac4c 9b00dbd8`.
#[inline]
pub fn philox(counter: [u32; 4], key: [u32; 2], rounds: usize) -> [u32; 4] {
    let [mut c0, mut c1, mut c2, mut c3] = counter;
    let [mut k0, mut k1] = key;
    for _ in 0..rounds {
        let p0 = M0 * u64::from(c0);
        let p1 = M1 * u64::from(c2);
        (c0, c1, c2, c3) = ((p1 >> 32) as u32 ^ c1 ^ k0, p1 as u32, (p0 >> 32) as u32 ^ c3 ^ k1, p0 as u32);
        k0 = k0.wrapping_add(W0);
        k1 = k1.wrapping_add(W1);
    }
    [c0, c1, c2, c3]
}

/// The random numbers of one `(seed, purpose, replica)`, addressed by `(step, token, coordinate)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream {
    key: [u32; 2],
    /// The keys of all rounds, widened for the lanes.
    keys: [[u64; 2]; ROUNDS],
}

impl Stream {
    /// The stream of `(seed, purpose, replica)`.
    pub fn new(seed: u64, purpose: Purpose, replica: u32) -> Self {
        let words = philox([replica, purpose as u32, 0, 0], [seed as u32, (seed >> 32) as u32], 10);
        let key = [words[0], words[1]];
        Self { key, keys: round_keys(key) }
    }

    /// Four independent 32-bit words at `(step, token, block)`.
    #[inline]
    pub fn words(&self, step: u64, token: u32, block: u32) -> [u32; 4] {
        philox([block, token, step as u32, (step >> 32) as u32], self.key, ROUNDS)
    }

    /// Fills `out` with uniforms on the open interval (0, 1), 53 bits each:
    /// coordinates `0..out.len()` of `(step, token)`.
    pub fn uniforms(&self, step: u64, token: u32, out: &mut [f64]) {
        for (block, pair) in out.chunks_mut(2).enumerate() {
            let w = self.words(step, token, block as u32);
            for (i, u) in pair.iter_mut().enumerate() {
                let bits = (u64::from(w[2 * i]) << 32 | u64::from(w[2 * i + 1])) >> 11;
                *u = (bits as f64 + 0.5) * (1.0 / (1u64 << 53) as f64);
            }
        }
    }

    /// Fills `out` with standard normals: coordinates `first..first + out.len()` of
    /// `(step, token)`, `first` a multiple of 64.
    ///
    /// Coordinate `j` comes from counter block `16 (j / 64) + j % 16`, words `2 k` and `2 k + 1`
    /// with `k = (j / 32) % 2`, the cosine for `j % 32 < 16` and the sine above.
    ///
    /// # Panics
    /// When `first` is not a multiple of 64, or a coordinate is beyond `2^33`.
    pub fn normals(&self, step: u64, token: u32, first: usize, out: &mut [f32]) {
        assert!(first.is_multiple_of(GROUP), "normals come in groups of 64 coordinates");
        assert!(first + out.len() <= 1 << 33, "a token has at most 2^33 coordinates");
        fill_normals(out, (first / GROUP * LANES) as u32, &self.keys, token, step);
    }
}

/// The keys of all rounds, widened for the lanes.
fn round_keys(key: [u32; 2]) -> [[u64; 2]; ROUNDS] {
    std::array::from_fn(|r| {
        let add = |k: u32, w: u32| u64::from(k.wrapping_add(w.wrapping_mul(r as u32)));
        [add(key[0], W0), add(key[1], W1)]
    })
}

/// [`LANES`] Philox blocks side by side, 32-bit words held in 64-bit lanes so that a product
/// needs no shuffle.
#[inline(always)]
fn philox_lanes<const N: usize>(block: u32, token: u32, step: u64, keys: &[[u64; 2]; ROUNDS]) -> [[u64; N]; 4] {
    const MASK: u64 = 0xffff_ffff;
    let mut c = [[0u64; N]; 4];
    for i in 0..N {
        c[0][i] = u64::from(block) + i as u64;
        c[1][i] = u64::from(token);
        c[2][i] = step & MASK;
        c[3][i] = step >> 32;
    }
    for &[k0, k1] in keys {
        for i in 0..N {
            let p0 = M0 * (c[0][i] & MASK);
            let p1 = M1 * (c[2][i] & MASK);
            // The upper halves are rubbish and are masked where they would matter.
            c[0][i] = (p1 >> 32) ^ c[1][i] ^ k0;
            c[1][i] = p1;
            c[2][i] = (p0 >> 32) ^ c[3][i] ^ k1;
            c[3][i] = p0;
        }
    }
    c
}

/// `ln u` for `u` in (0, 1], to about one unit in the last place (Cephes polynomial of `logf`).
#[inline(always)]
fn ln(u: f32) -> f32 {
    const SQRT_HALF: i32 = 0x3f35_04f3;
    let b = u.to_bits() as i32 - SQRT_HALF;
    let e = (b >> 23) as f32;
    let m = f32::from_bits(((b & 0x007f_ffff) + SQRT_HALF) as u32) - 1.0;
    let z = m * m;
    let mut p = 7.037_683_6e-2f32;
    for c in [
        -0.115_146_1f32,
        0.116_769_99,
        -0.124_201_41,
        0.142_493_23,
        -0.166_680_58,
        0.200_007_15,
        -0.249_999_94,
        0.333_333_3,
    ] {
        p = p.mul_add(m, c);
    }
    let mut y = m * z * p;
    y = e.mul_add(-2.121_944_4e-4, y);
    y = (-0.5f32).mul_add(z, y);
    e.mul_add(0.693_359_4, m + y)
}

/// `(cos, sin)` of `2 pi k / 2^32`: the quadrant is taken off the integer, exactly.
#[inline(always)]
fn cos_sin_turn(k: u32) -> (f32, f32) {
    let q = k.wrapping_add(1 << 29) >> 30;
    let r = k.wrapping_sub(q << 30) as i32 as f32 * (std::f32::consts::TAU / 4_294_967_296.0);
    let z = r * r;
    let s = ((-1.951_529_6e-4f32).mul_add(z, 8.332_161e-3).mul_add(z, -0.166_666_55) * z).mul_add(r, r);
    let c = (2.443_315_7e-5f32.mul_add(z, -1.388_731_6e-3).mul_add(z, 4.166_664_6e-2) * z)
        .mul_add(z, (-0.5f32).mul_add(z, 1.0));
    let swap = q & 1 == 1;
    let (a, b) = if swap { (s, c) } else { (c, s) };
    (f32::from_bits(a.to_bits() ^ (((q + 1) & 2) << 30)), f32::from_bits(b.to_bits() ^ ((q & 2) << 30)))
}

/// The normals of counter blocks `block..block + N`: 64 for every 16 blocks.
#[inline(always)]
fn normal_groups<const N: usize>(
    block: u32,
    token: u32,
    step: u64,
    keys: &[[u64; 2]; ROUNDS],
    out: &mut [[f32; GROUP]],
) {
    let wide = philox_lanes::<N>(block, token, step, keys);
    let mut c = [[0u32; N]; 4];
    for j in 0..4 {
        for i in 0..N {
            c[j][i] = wide[j][i] as u32;
        }
    }
    for half in 0..2 {
        let mut pair = [[0.0f32; N]; 2];
        for i in 0..N {
            let u = ((c[2 * half][i] >> 1) as i32 as f32 + 0.5) * (1.0 / 2_147_483_648.0);
            let radius = (-2.0 * ln(u)).sqrt();
            let (cos, sin) = cos_sin_turn(c[2 * half + 1][i]);
            pair[0][i] = radius * cos;
            pair[1][i] = radius * sin;
        }
        for (g, out) in out.iter_mut().enumerate() {
            for (k, values) in pair.iter().enumerate() {
                let at = (2 * half + k) * LANES;
                out[at..at + LANES].copy_from_slice(&values[g * LANES..(g + 1) * LANES]);
            }
        }
    }
}

#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl+avx2+fma+bmi1+bmi2",
    "x86_64+avx2+fma+bmi1+bmi2"
))]
fn fill_normals(out: &mut [f32], mut block: u32, keys: &[[u64; 2]; ROUNDS], token: u32, step: u64) {
    // Several groups at once hide the latency of one.
    let (together, tail) = out.as_chunks_mut::<{ TOGETHER * GROUP }>();
    for groups in together {
        normal_groups::<{ TOGETHER * LANES }>(block, token, step, keys, groups.as_chunks_mut().0);
        block += (TOGETHER * LANES) as u32;
    }
    if !tail.is_empty() {
        let mut groups = [[0.0; GROUP]; TOGETHER];
        normal_groups::<{ TOGETHER * LANES }>(block, token, step, keys, &mut groups);
        tail.copy_from_slice(&groups.as_flattened()[..tail.len()]);
    }
}

/// The standard normal variable that has the distribution function value `u`, `0 < u < 1`.
#[inline]
pub fn normal_quantile(u: f64) -> f64 {
    -std::f64::consts::SQRT_2 * statrs::function::erf::erfc_inv(2.0 * u)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers of the Random123 distribution (Salmon et al. 2011), 10 and 7 rounds.
    #[test]
    fn philox_gives_the_known_answers() {
        let ones = u32::MAX;
        let cases = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([ones; 4], [ones; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, answer) in cases {
            assert_eq!(philox(counter, key, 10), answer);
        }
        assert_eq!(philox([0; 4], [0; 2], 7), [0x5f6f_b709, 0x0d89_3f64, 0x4f12_1f81, 0x4f73_0a48]);
    }

    #[test]
    fn lanes_are_philox() {
        let key = [0xdead_beef, 0x1234_5678];
        let wide = philox_lanes::<LANES>(48, 5, (7 << 32) | 9, &round_keys(key));
        for i in 0..LANES {
            let one = philox([48 + i as u32, 5, 9, 7], key, ROUNDS);
            for j in 0..4 {
                assert_eq!(wide[j][i] as u32, one[j]);
            }
        }
    }

    /// The slow twin: the documented address of coordinate `j`, in double precision.
    fn slow_normal(stream: &Stream, step: u64, token: u32, j: usize) -> f64 {
        let words = stream.words(step, token, (16 * (j / 64) + j % 16) as u32);
        let k = (j / 32) % 2;
        let u = (f64::from(words[2 * k] >> 1) + 0.5) / f64::from(1u32 << 31);
        let angle = std::f64::consts::TAU * f64::from(words[2 * k + 1]) / 4_294_967_296.0;
        (-2.0 * u.ln()).sqrt() * if j % 32 < 16 { angle.cos() } else { angle.sin() }
    }

    #[test]
    fn normals_are_box_muller_at_the_documented_address() {
        let stream = Stream::new(0x0123_4567_89ab_cdef, Purpose::Tokens, 3);
        let mut fast = vec![0.0f32; 1000];
        stream.normals(1 << 40, 2, 0, &mut fast);
        for (j, &z) in fast.iter().enumerate() {
            let slow = slow_normal(&stream, 1 << 40, 2, j);
            assert!((f64::from(z) - slow).abs() < 2e-6 * (1.0 + slow.abs()), "{j}: {z} {slow}");
        }
        let mut short = vec![0.0f32; 70];
        stream.normals(1 << 40, 2, 0, &mut short);
        assert_eq!(short, fast[..70], "a coordinate does not depend on how many are asked for");
        stream.normals(1 << 40, 2, 320, &mut short);
        assert_eq!(short, fast[320..390], "nor on where one starts");
    }

    /// All of `u` in (0, 1] gives a finite radius; the largest normal is `sqrt(2 ln 2^32)`.
    #[test]
    fn the_logarithm_is_right_at_its_ends() {
        assert_eq!(ln(1.0), 0.0);
        let smallest = 0.5f32 / 2_147_483_648.0;
        let largest = f64::from((-2.0 * ln(smallest)).sqrt());
        assert!((largest - (2.0 * 32.0 * std::f64::consts::LN_2).sqrt()).abs() < 1e-5);
        for k in 1..2_000_000u32 {
            let u = k as f32 * 5e-7;
            let exact = f64::from(u).ln();
            assert!((f64::from(ln(u)) - exact).abs() <= 2e-7 * exact.abs().max(0.3), "ln {u}");
        }
    }

    /// Moments 1 to 6, tail probabilities and neighbour correlations of 2^22 normals, each within
    /// 4 standard errors of the exact value.
    #[test]
    fn normals_are_normal() {
        let stream = Stream::new(1, Purpose::Tokens, 0);
        let n = 1 << 22;
        let mut z = vec![0.0f32; n];
        for (token, chunk) in z.chunks_mut(n / 64).enumerate() {
            stream.normals(12, token as u32, 0, chunk);
        }
        let check = |name: &str, exact: f64, statistic: &dyn Fn(usize) -> f64| {
            let (mut sum, mut square) = (0.0, 0.0);
            for i in 0..n {
                let v = statistic(i);
                sum += v;
                square += v * v;
            }
            let mean = sum / n as f64;
            let error = ((square / n as f64 - mean * mean) / n as f64).sqrt();
            assert!((mean - exact).abs() <= 4.0 * error, "{name}: {mean} against {exact} +- {error}");
        };
        for (k, exact) in [(1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0), (5, 0.0), (6, 15.0)] {
            check(&format!("moment {k}"), exact, &|i| f64::from(z[i]).powi(k));
        }
        for (x, exact) in
            [(1.0, 0.158_655_253_931), (2.0, 0.022_750_131_948), (3.0, 0.001_349_898_032), (4.0, 3.167_124_183e-5)]
        {
            check(&format!("P(z > {x})"), exact, &|i| f64::from(u8::from(f64::from(z[i]) > x)));
            check(&format!("P(z < -{x})"), exact, &|i| f64::from(u8::from(f64::from(z[i]) < -x)));
        }
        for lag in [1, 16, 32, 64, n / 64] {
            check(&format!("lag {lag}"), 0.0, &|i| f64::from(z[i]) * f64::from(z[(i + lag) % n]));
            check(&format!("squares, lag {lag}"), 1.0, &|i| (f64::from(z[i]) * f64::from(z[(i + lag) % n])).powi(2));
        }
    }

    #[test]
    fn uniforms_are_uniform_and_addressed() {
        let stream = Stream::new(5, Purpose::Task, 1);
        let mut u = vec![0.0; 5];
        let (mut sum, mut square, n) = (0.0, 0.0, 20_000);
        for k in 0..n {
            stream.uniforms(k, 0, &mut u);
            assert!(u.iter().all(|&v| v > 0.0 && v < 1.0));
            sum += u[3];
            square += u[3] * u[3];
        }
        let n = n as f64;
        assert!((sum / n - 0.5).abs() < 4.0 * (1.0 / 12.0 / n).sqrt());
        assert!((square / n - 1.0 / 3.0).abs() < 4.0 * (4.0 / 45.0 / n).sqrt());
        let other = Stream::new(5, Purpose::Task, 2);
        assert_ne!(stream.words(0, 0, 0), other.words(0, 0, 0));
        assert_ne!(stream.words(0, 0, 0), Stream::new(5, Purpose::Tokens, 1).words(0, 0, 0));
    }

    #[test]
    fn the_quantile_inverts_the_distribution() {
        assert!(normal_quantile(0.5).abs() < 1e-15);
        assert!((normal_quantile(0.977_249_868_051_820_8) - 2.0).abs() < 1e-12);
        assert!((normal_quantile(1e-10) + 6.361_340_902_404).abs() < 1e-9);
    }
}
