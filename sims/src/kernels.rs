//! The three passes over the tokens of a step, in single precision with wide partial sums.
//!
//! Rows (keys or tokens) are [`stride`] numbers apart, a multiple of [`WIDTH`], and zero beyond the
//! dimension. Sums over coordinates are formed in vectors of single-precision partial sums over at
//! most [`BLOCK`] coordinates, then in double precision. The vectors are as wide as the machine's
//! (crate `pulp` chooses at run time), so a machine of another SIMD level may round differently.

use std::ops::Range;

use pulp::{Arch, Simd, WithSimd};

/// Rows are padded to a multiple of this many numbers, which every vector width divides.
pub const WIDTH: usize = 64;

/// Coordinates between two conversions to double precision; also what stays in the first-level
/// cache between drawing a token and using it.
pub const BLOCK: usize = 1024;

/// Distance between rows of `dimension` numbers.
pub fn stride(dimension: usize) -> usize {
    let stride = dimension.next_multiple_of(WIDTH);
    // Rows a multiple of a memory page apart would compete for the same places in the cache.
    if stride.is_multiple_of(1024) { stride + WIDTH } else { stride }
}

/// Row `index` as vectors.
#[inline(always)]
fn row<S: Simd>(rows: &[f32], stride: usize, index: usize, range: Range<usize>) -> &[S::f32s] {
    S::as_simd_f32s(&rows[index * stride + range.start..index * stride + range.end]).0
}

/// Adds `k_h . X_l` over the coordinates of `range`, a multiple of [`WIDTH`] long, to `scores`
/// (`H x L`).
pub fn add_scores(keys: &[f32], tokens: &[f32], stride: usize, length: usize, range: Range<usize>, scores: &mut [f64]) {
    Arch::new().dispatch(Scores { keys, tokens, stride, length, range, scores });
}

struct Scores<'a> {
    keys: &'a [f32],
    tokens: &'a [f32],
    stride: usize,
    length: usize,
    range: Range<usize>,
    scores: &'a mut [f64],
}

impl WithSimd for Scores<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let heads = self.keys.len() / self.stride;
        for h in (0..heads).step_by(2) {
            let pair = h + 1 < heads;
            let mut l = 0;
            while l < self.length {
                let triple = l + 2 < self.length;
                match (pair, triple) {
                    (true, true) => self.tile::<S, 2, 3>(simd, h, l),
                    (true, false) => self.tile::<S, 2, 1>(simd, h, l),
                    (false, true) => self.tile::<S, 1, 3>(simd, h, l),
                    (false, false) => self.tile::<S, 1, 1>(simd, h, l),
                }
                l += if triple { 3 } else { 1 };
            }
        }
    }
}

impl Scores<'_> {
    /// `A` keys and `B` tokens from `(h, l)` on: every number that is loaded serves several products.
    #[inline(always)]
    fn tile<S: Simd, const A: usize, const B: usize>(&mut self, simd: S, h: usize, l: usize) {
        let mut keys: [&[S::f32s]; A] = [&[]; A];
        for (a, key) in keys.iter_mut().enumerate() {
            *key = row::<S>(self.keys, self.stride, h + a, self.range.clone());
        }
        let mut tokens: [&[S::f32s]; B] = [&[]; B];
        for (b, token) in tokens.iter_mut().enumerate() {
            *token = row::<S>(self.tokens, self.stride, l + b, self.range.clone());
        }
        let mut sums = [[simd.splat_f32s(0.0); B]; A];
        let count = keys[0].len();
        for c in 0..count {
            for a in 0..A {
                for b in 0..B {
                    sums[a][b] = simd.mul_add_f32s(keys[a][..count][c], tokens[b][..count][c], sums[a][b]);
                }
            }
        }
        for (a, sums) in sums.iter().enumerate() {
            for (b, &sum) in sums.iter().enumerate() {
                self.scores[(h + a) * self.length + l + b] += f64::from(simd.reduce_sum_f32s(sum));
            }
        }
    }
}

/// Adds `X_l . sum_l' d_l' X_l'` over the coordinates of `range`, which begins at a multiple of [`BLOCK`], to `v`: over all
/// of them that is `D (G d)_l` with `G = X X^T / D`.
///
/// `sums` is working space of `L` times [`WIDTH`] numbers.
pub fn gram_times(tokens: &[f32], stride: usize, d: &[f32], range: Range<usize>, v: &mut [f64], sums: &mut [f32]) {
    Arch::new().dispatch(GramTimes { tokens, stride, d, range, v, sums });
}

struct GramTimes<'a> {
    tokens: &'a [f32],
    stride: usize,
    d: &'a [f32],
    range: Range<usize>,
    v: &'a mut [f64],
    sums: &'a mut [f32],
}

impl WithSimd for GramTimes<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { tokens, stride, d, range, v, sums } = self;
        let lanes = size_of::<S::f32s>() / size_of::<f32>();
        // Four vectors of coordinates at a time, for independent sums.
        let (sums, _) = S::as_mut_simd_f32s(&mut sums[..4 * lanes * d.len()]);
        for start in range.clone().step_by(BLOCK) {
            let end = (start + BLOCK).min(range.end);
            sums.fill(simd.splat_f32s(0.0));
            for at in (start..end).step_by(4 * lanes) {
                let mut u = [simd.splat_f32s(0.0); 4];
                for (l, &d) in d.iter().enumerate() {
                    let x = row::<S>(tokens, stride, l, at..at + 4 * lanes);
                    let d = simd.splat_f32s(d);
                    for i in 0..4 {
                        u[i] = simd.mul_add_f32s(d, x[i], u[i]);
                    }
                }
                for (l, sum) in sums.chunks_exact_mut(4).enumerate() {
                    let x = row::<S>(tokens, stride, l, at..at + 4 * lanes);
                    for i in 0..4 {
                        sum[i] = simd.mul_add_f32s(u[i], x[i], sum[i]);
                    }
                }
            }
            for (v, sum) in v.iter_mut().zip(sums.chunks_exact(4)) {
                let halves = (simd.add_f32s(sum[0], sum[1]), simd.add_f32s(sum[2], sum[3]));
                *v += f64::from(simd.reduce_sum_f32s(simd.add_f32s(halves.0, halves.1)));
            }
        }
    }
}

/// `target_h <- scale_h target_h + sum_l weights_hl X_l` for the coordinates of `range`, which begins at a multiple of
/// [`BLOCK`].
pub fn accumulate(
    target: &mut [f32],
    tokens: &[f32],
    stride: usize,
    range: Range<usize>,
    scale: &[f32],
    weights: &[f32],
) {
    let length = weights.len() / scale.len();
    Arch::new().dispatch(Accumulate { target, tokens, stride, length, range, scale, weights });
}

struct Accumulate<'a> {
    target: &'a mut [f32],
    tokens: &'a [f32],
    stride: usize,
    length: usize,
    range: Range<usize>,
    scale: &'a [f32],
    weights: &'a [f32],
}

impl WithSimd for Accumulate<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { target, tokens, stride, length, range, scale, weights } = self;
        let lanes = size_of::<S::f32s>() / size_of::<f32>();
        // Block by block, so that the tokens stay close while all heads use them.
        for start in range.clone().step_by(BLOCK) {
            let end = (start + BLOCK).min(range.end);
            for (h, (weights, &scale)) in weights.chunks_exact(length).zip(scale).enumerate() {
                let key = &mut target[h * stride..(h + 1) * stride];
                let scale = simd.splat_f32s(scale);
                for at in (start..end).step_by(4 * lanes) {
                    let (key, _) = S::as_mut_simd_f32s(&mut key[at..at + 4 * lanes]);
                    let mut sum = [simd.splat_f32s(0.0); 4];
                    for i in 0..4 {
                        sum[i] = simd.mul_f32s(scale, key[i]);
                    }
                    for (l, &w) in weights.iter().enumerate() {
                        let x = row::<S>(tokens, stride, l, at..at + 4 * lanes);
                        let w = simd.splat_f32s(w);
                        for i in 0..4 {
                            sum[i] = simd.mul_add_f32s(w, x[i], sum[i]);
                        }
                    }
                    key[..4].copy_from_slice(&sum);
                }
            }
        }
    }
}

/// `a . b` of two rows, in double precision.
pub fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use headflow_model::random::{Purpose, Stream};

    /// Each kernel against the plain sums in double precision.
    #[test]
    fn kernels_are_their_formulas() {
        let (heads, length, dimension) = (3, 5, 2500);
        let stride = stride(dimension);
        let rows = |count: usize, replica: u32| -> Vec<f32> {
            let stream = Stream::new(3, Purpose::Tokens, replica);
            let mut rows = vec![0.0f32; count * stride];
            for (l, row) in rows.chunks_exact_mut(stride).enumerate() {
                stream.normals(0, l as u32, 0, &mut row[..dimension]);
            }
            rows
        };
        let (keys, tokens) = (rows(heads, 0), rows(length, 1));
        let (key, token) =
            (|h: usize| &keys[h * stride..(h + 1) * stride], |l: usize| &tokens[l * stride..(l + 1) * stride]);

        let mut scores = vec![0.0; heads * length];
        for start in (0..stride).step_by(BLOCK) {
            add_scores(&keys, &tokens, stride, length, start..(start + BLOCK).min(stride), &mut scores);
        }
        for h in 0..heads {
            for l in 0..length {
                assert!((scores[h * length + l] - dot(key(h), token(l))).abs() < 2e-3);
            }
        }

        let d = [0.2f32, -0.9, 0.1, 0.3, 0.05];
        let (mut v, mut sums) = (vec![0.0; length], vec![0.0; length * WIDTH]);
        gram_times(&tokens, stride, &d, 0..stride, &mut v, &mut sums);
        for l in 0..length {
            let slow: f64 = (0..length).map(|k| f64::from(d[k]) * dot(token(k), token(l))).sum();
            assert!((v[l] - slow).abs() < 5e-3, "{} {slow}", v[l]);
        }

        let weights: Vec<f32> = (0..heads * length).map(|i| 0.1 * i as f32 - 0.5).collect();
        let scale = [1.0f32, 0.5, 2.0];
        let mut target = keys.clone();
        accumulate(&mut target, &tokens, stride, 0..stride, &scale, &weights);
        for h in 0..heads {
            for i in 0..stride {
                let slow =
                    scale[h] * key(h)[i] + (0..length).map(|l| weights[h * length + l] * token(l)[i]).sum::<f32>();
                assert!((target[h * stride + i] - slow).abs() < 1e-5);
            }
        }
    }
}
