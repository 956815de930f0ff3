//! `exp` on several lanes at once, in plain arithmetic so that the compiler can vectorise it.
//!
//! `e^x = 2^n e^r` with `n = round(x / ln 2)`, `|r| <= ln 2 / 2`, and the Taylor polynomial of
//! degree 12 for `e^r` (remainder below `2e-16`). The bits are the same at every SIMD level.
//! [`exp_and_complement`] gives `1 - e^{-a}` beside `e^{-a}`, to full relative precision.

/// Below this argument `exp` returns `exp(-708)`, the last value before subnormal numbers.
const SMALLEST: f64 = -708.0;

const LOG2_E: f64 = std::f64::consts::LOG2_E;
const LN2_HIGH: f64 = 6.931_471_803_691_238e-1;
const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;

/// Adding 1.5 * 2^52 leaves the nearest integer in the low bits of the mantissa.
const ROUND: f64 = 6_755_399_441_055_744.0;

/// `e^x = scale (1 + r q)`: `(scale, r, q)`.
#[inline(always)]
fn reduced(x: f64) -> (f64, f64, f64) {
    // The polynomial of (e^r - 1) / r.
    const TAYLOR: [f64; 11] = [
        1.0 / 39_916_800.0,
        1.0 / 3_628_800.0,
        1.0 / 362_880.0,
        1.0 / 40_320.0,
        1.0 / 5_040.0,
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
    ];
    // Written so that a NaN passes through (f64::max would drop it).
    let x = if x < SMALLEST { SMALLEST } else { x };
    let shifted = x.mul_add(LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, x));
    let mut q = 1.0 / 479_001_600.0;
    for c in TAYLOR {
        q = r.mul_add(q, c);
    }
    (f64::from_bits(shifted.to_bits().wrapping_add(1023) << 52), r, q)
}

/// `e^x` for `x <= 709`, to within 2 units in the last place; a NaN stays one.
#[inline(always)]
pub fn exp(x: f64) -> f64 {
    let (scale, r, q) = reduced(x);
    r.mul_add(q, 1.0) * scale
}

/// `(e^{-a}, 1 - e^{-a})` for `a >= 0`, each to within a few units in its last place.
#[inline(always)]
pub fn exp_and_complement(a: f64) -> (f64, f64) {
    let (scale, r, q) = reduced(-a);
    let p = r * q;
    (scale.mul_add(p, scale), (-scale).mul_add(p, 1.0 - scale))
}

#[cfg(test)]
mod tests {
    use super::{exp, exp_and_complement};

    #[test]
    fn agrees_with_the_standard_library() {
        for k in -70_000..=70_000 {
            let x = k as f64 * 0.010_1;
            let (fast, slow) = (exp(x), x.exp());
            assert!((fast - slow).abs() <= 4.0 * f64::EPSILON * slow, "exp({x}) = {fast:e}, should be {slow:e}");
        }
    }

    #[test]
    fn the_complement_keeps_its_relative_precision() {
        for k in -4000..=800 {
            let a = (f64::from(k) * 0.01).exp();
            let (e, complement) = exp_and_complement(a);
            // Beyond 708 the last value before subnormal numbers stands for all.
            let (slow_e, bound) = ((-a).exp(), if a < 700.0 { 4.0 * f64::EPSILON * e } else { 1e-303 });
            assert!((e - slow_e).abs() <= bound, "exp(-{a}) = {e:e}");
            let slow = -(-a).exp_m1();
            assert!((complement - slow).abs() <= 4.0 * f64::EPSILON * slow, "1 - exp(-{a}) = {complement:e}");
        }
        assert_eq!(exp_and_complement(0.0), (1.0, 0.0));
        assert_eq!(exp_and_complement(1e5).1, 1.0);
    }

    #[test]
    fn the_ends_are_finite_and_a_nan_stays_one() {
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(-1e4) < 1e-300 && exp(-1e4) >= 0.0);
        assert!(exp(f64::NEG_INFINITY) < 1e-300);
        assert!(exp(f64::NAN).is_nan());
    }
}
