//! Grids of the trapezoid rule, their steps from a wanted precision, and the functions summed on them.
//!
//! With `a = u e^s` and `t = ln u`, everything that is summed is one of the kernels
//!
//! ```text
//! X = 1 - e^{-a},   G_k = d^k/ds^k e^{-a}:   G_1 = -a e^{-a},   G_2 = (a^2 - a) e^{-a},   ...
//! ```
//!
//! functions of `t + s`, analytic and bounded in the strip `|Im (t + s)| < pi/2`. A trapezoid sum of step
//! `h` over a function whose Fourier transform falls like `e^{-pi k/2 - v k^2/2}` is off by that value at
//! `k = 2 pi/h`; the steps below solve this for an error `e^{-Lambda}`.

use std::f64::consts::PI;
use std::ops::Range;

use headflow_model::exponential::{exp, exp_and_complement};
use headflow_model::{Budget, largest, smallest};
use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

/// Lattice points that are handled side by side.
pub(crate) const LANES: usize = 8;

/// Longest stretch of `t` on which `e^{t - center}` is kept without overflow.
const SEGMENT: f64 = 600.0;

/// Logarithms beyond this size saturate every kernel.
const SATURATED: f64 = 690.0;

/// `a` below `e^-350` counts as 0, as no kernel feels it: products with it would be subnormal numbers, which are slow.
const VANISHED: f64 = 350.0;

/// `a` beyond which every kernel counts as vanished: products of two are still no subnormal numbers, which are slow.
const LARGEST: f64 = 300.0;

/// Steps in `t` are this much smaller than they need be: equal to those of the scores, the two grids would resonate.
const DETUNED: f64 = 0.88;

/// Longest step in `t`: a segment of [`LANES`] of them keeps its exponentials.
const LONGEST: f64 = 60.0;

/// How precise a sum is to be.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Precision {
    /// `Lambda = -ln(error)`.
    pub lambda: f64,
    /// Number of tokens `L`.
    pub tokens: f64,
}

impl Precision {
    /// `Lambda` of averages over one token, which are raised to the power `L - 1`.
    pub fn of_token(self) -> f64 {
        self.lambda + self.tokens.ln()
    }

    /// How far out a normal variable is followed, so that one of `L` rarely lies beyond.
    pub fn reach(self) -> f64 {
        (2.0 * self.of_token()).sqrt()
    }

    /// The step in a standard normal variable that enters the scores with a factor `slope`.
    pub fn normal_step(self, slope: f64) -> f64 {
        let (slope, lambda) = (slope.abs(), self.of_token());
        let gaussian = PI * (2.0 / lambda).sqrt();
        if 4.0 * slope <= gaussian {
            return gaussian;
        }
        PI * PI / (slope * (lambda + PI * PI / (8.0 * slope * slope)))
    }

    /// The steps in `t = ln u` and `t' = ln v` for a pair of scores. What depends on both is narrow across the line on which
    /// correlated scores lie, however wide along it: aliases `(2 pi/h, -+2 pi/h')` of steps in the ratio of the deviations
    /// are damped by `e^{-pi (k + k')/2}` and the rest of the variance alone.
    pub fn laplace_steps(self, sigma: [f64; 2], covariance: f64) -> [f64; 2] {
        let steps = sigma.map(|s| self.laplace_step(s));
        if sigma[0].min(sigma[1]) <= 0.0 {
            return steps;
        }
        let correlation = (covariance.abs() / (sigma[0] * sigma[1])).min(1.0);
        let a = (1.0 - correlation) / self.tokens;
        let b = 0.5 * PI * (1.0 / sigma[0] + 1.0 / sigma[1]);
        // a f^2 + b f = Lambda, with k = f / sigma.
        let f = 2.0 * self.lambda / (b + (b * b + 4.0 * a * self.lambda).sqrt());
        std::array::from_fn(|i| steps[i].min(DETUNED * 2.0 * PI * sigma[i] / f))
    }

    /// The step in `t = ln u` for scores of standard deviation `sigma`: what is summed is a density of `ln T - ln S`, with `T`
    /// exponential and `S` the sum of `L` weights. Its transform falls like `e^{-pi k/2}` for `T` alone, times
    /// `e^{-sigma^2 k^2 / (2 L)}` for the mean score, which is independent of the differences; and like `e^{-pi a k/2}`,
    /// `a = sigma / sqrt(2 ln L)`, where many scores are so wide that the largest makes the sum.
    pub fn laplace_step(self, sigma: f64) -> f64 {
        let half_variance = 0.5 * sigma * sigma / self.tokens;
        let slope = 0.5 * PI;
        // half_variance k^2 + slope k = Lambda, without cancellation.
        let of_mean = 2.0 * self.lambda / (slope + (slope * slope + 4.0 * half_variance * self.lambda).sqrt());
        let of_largest = self.lambda / (slope * (sigma / (2.0 * self.tokens.ln()).sqrt()).max(1.0));
        (DETUNED * 2.0 * PI / of_mean.min(of_largest)).min(LONGEST)
    }
}

/// Nodes and weights of a standard normal variable.
#[derive(Debug, Clone)]
pub(crate) struct Normal {
    pub x: Vec<f64>,
    pub weights: Vec<f64>,
}

impl Normal {
    /// The trapezoid rule for a function of `slope x`; one node when it is constant.
    pub fn new(precision: Precision, slope: f64) -> Self {
        if slope == 0.0 {
            return Self { x: vec![0.0], weights: vec![1.0] };
        }
        Self::with_step(precision.normal_step(slope), precision.reach())
    }

    /// How many nodes [`Normal::new`] has, at most: known before they are made.
    pub fn count(precision: Precision, slope: f64) -> f64 {
        if slope == 0.0 { 1.0 } else { 2.0 * (precision.reach() / precision.normal_step(slope)).ceil() + 1.0 }
    }

    /// Nodes at the multiples of `step` up to `reach`.
    pub fn with_step(step: f64, reach: f64) -> Self {
        let last = (reach / step).ceil() as i64;
        let x: Vec<f64> = (-last..=last).map(|i| i as f64 * step).collect();
        let weights = x.iter().map(|x| step / (2.0 * PI).sqrt() * (-0.5 * x * x).exp()).collect();
        Self { x, weights }
    }
}

/// Points `t`, a multiple of [`LANES`] of them: equally spaced, or graded, that is equally spaced in a smooth function of `t`.
#[derive(Debug, Clone)]
pub(crate) struct Laplace {
    pub t: Vec<f64>,
    /// Weights of an integral over `t`.
    pub weights: Vec<f64>,
    /// `e^{t - center}` of the segment a point lies in.
    relative: Vec<f64>,
    /// Points of a segment, a multiple of [`LANES`].
    segment: usize,
    centers: Vec<f64>,
}

impl Laplace {
    /// The multiples of `step` that cover `from ..= to`.
    pub fn new(step: f64, from: f64, to: f64) -> Self {
        let first = (from / step).floor();
        let count = ((to / step).ceil() - first) as usize + 1;
        let count = count.next_multiple_of(LANES);
        let t: Vec<f64> = (0..count).map(|i| (first + i as f64) * step).collect();
        Self::of(vec![step; count], t, step)
    }

    /// Steps for a factor `e^{-u}`: `fine` where it bends, `coarse` where `u` is so small that its bend is below `e^{-lambda}`.
    /// The points are `w(t) = 1, 2, ..`, with `w' = 1/coarse + (1/fine - 1/coarse) / (1 + e^{-(t + a)/d})`.
    pub fn graded(fine: f64, coarse: f64, lambda: f64, from: f64, to: f64) -> Self {
        let (a, d) = (0.65 * lambda, lambda / 8.0);
        // No longer than the stretch on which the steps change.
        let coarse = coarse.min(d);
        if coarse <= 1.2 * fine {
            return Self::new(fine, from, to);
        }
        let more = 1.0 / fine - 1.0 / coarse;
        let w = |t: f64| {
            let x = (t + a) / d;
            t / coarse + more * d * (x.max(0.0) + (-x.abs()).exp().ln_1p())
        };
        let slope = |t: f64| 1.0 / coarse + more / (1.0 + (-(t + a) / d).exp());
        let first = w(from).floor();
        let count = ((w(to).ceil() - first) as usize + 1).next_multiple_of(LANES);
        let mut at = from;
        let t: Vec<f64> = (0..count)
            .map(|i| {
                let goal = first + i as f64;
                // w is increasing and convex: Newton's method goes there from the right after one step.
                for _ in 0..50 {
                    let change = (w(at) - goal) / slope(at);
                    at -= change;
                    if change.abs() <= 1e-15 * at.abs().max(1.0) {
                        break;
                    }
                }
                at
            })
            .collect();
        let weights = t.iter().map(|&t| 1.0 / slope(t)).collect();
        Self::of(weights, t, coarse)
    }

    fn of(weights: Vec<f64>, t: Vec<f64>, longest: f64) -> Self {
        let segment = ((SEGMENT / longest) as usize / LANES).max(1) * LANES;
        let centers: Vec<f64> = t.chunks(segment).map(|part| 0.5 * (part[0] + part[part.len() - 1])).collect();
        let relative = t.iter().enumerate().map(|(i, t)| (t - centers[i / segment]).exp()).collect();
        Self { t, weights, relative, segment, centers }
    }

    pub fn len(&self) -> usize {
        self.t.len()
    }

    /// `u = e^t` at every point; zero or infinite only beyond the range of numbers.
    pub fn u(&self) -> impl Iterator<Item = f64> + '_ {
        self.t.iter().map(|t| t.exp())
    }
}

/// Number of kernels in a table: `X`, then `G_1` and so on.
pub(crate) const X: usize = 0;

/// `table[(column, k, i)] = scale_column sum_q weight_q K_k(t_i + offset_column + inner_q)`, with `K_0 = X`
/// and `K_k = G_k` for `k < KERNELS`; the points `i` lie side by side.
pub(crate) fn table<const KERNELS: usize>(
    lattice: &Laplace,
    offsets: &[f64],
    scales: Option<&[f64]>,
    inner: (&[f64], &[f64]),
) -> Vec<f64> {
    let mut out = vec![0.0; offsets.len() * KERNELS * lattice.len()];
    let points = 0..lattice.len();
    Arch::new().dispatch(Fill::<KERNELS> { lattice, points, offsets, scales, inner, out: &mut out });
    out
}

/// [`table`] for one offset, bit for bit: a large one in parts side by side, and none once the budget's watch interrupts.
pub(crate) fn column<const KERNELS: usize>(
    lattice: &Laplace,
    offset: f64,
    inner: (&[f64], &[f64]),
    budget: &Budget,
) -> Option<Vec<f64>> {
    /// Kernels that take some milliseconds, and points of a part: each part takes the exponentials of its nodes again.
    const LARGE: usize = 1 << 20;
    const PART: usize = 64 * LANES;
    let n = lattice.len();
    if n * inner.0.len() <= LARGE {
        return (!budget.interrupted()).then(|| table::<KERNELS>(lattice, &[offset], None, inner));
    }
    let parts: Vec<Vec<f64>> = (0..n.div_ceil(PART))
        .into_par_iter()
        .map(|part| {
            let points = part * PART..((part + 1) * PART).min(n);
            let mut out = vec![0.0; KERNELS * points.len()];
            let fill = Fill::<KERNELS> { lattice, points, offsets: &[offset], scales: None, inner, out: &mut out };
            (!budget.interrupted()).then(|| Arch::new().dispatch(fill))?;
            Some(out)
        })
        .collect::<Option<_>>()?;
    let mut out = vec![0.0; KERNELS * n];
    for (kernel, out) in out.chunks_exact_mut(n).enumerate() {
        for (to, part) in out.chunks_mut(PART).zip(&parts) {
            to.copy_from_slice(&part[kernel * to.len()..(kernel + 1) * to.len()]);
        }
    }
    Some(out)
}

struct Fill<'a, const KERNELS: usize> {
    lattice: &'a Laplace,
    /// Those that are filled in: from and to a multiple of [`LANES`].
    points: Range<usize>,
    offsets: &'a [f64],
    scales: Option<&'a [f64]>,
    inner: (&'a [f64], &'a [f64]),
    out: &'a mut [f64],
}

/// The kernels at `a`.
#[inline(always)]
fn kernels<const KERNELS: usize>(a: f64) -> [f64; KERNELS] {
    let a = if a > LARGEST { LARGEST } else { a };
    let (e, x) = exp_and_complement(a);
    let mut values = [0.0; KERNELS];
    let g = [x, -a * e, (a - 1.0) * a * e, ((3.0 - a) * a - 1.0) * a * e, (((a - 6.0) * a + 7.0) * a - 1.0) * a * e];
    values.copy_from_slice(&g[..KERNELS]);
    values
}

/// `e^x` for a factor of at most `e^reach`.
#[inline(always)]
fn saturating_exp(x: f64, reach: f64) -> f64 {
    let e = exp(if x > SATURATED { SATURATED } else { x });
    if x + reach < -VANISHED { 0.0 } else { e }
}

impl<const KERNELS: usize> WithSimd for Fill<'_, KERNELS> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { lattice, points, offsets, scales, inner: (values, weights), out } = self;
        let (first, n) = (points.start, points.len());
        let mut e = vec![0.0; values.len()];
        for (column, &offset) in offsets.iter().enumerate() {
            let scale = scales.map_or(1.0, |s| s[column]);
            let out = &mut out[column * KERNELS * n..][..KERNELS * n];
            for (segment, &center) in lattice.centers.iter().enumerate() {
                let end = ((segment + 1) * lattice.segment).min(lattice.len());
                let (from, to) = ((segment * lattice.segment).max(first), end.min(points.end));
                if from >= to {
                    continue;
                }
                let reach = lattice.t[end - 1] - center;
                for (e, v) in e.iter_mut().zip(values) {
                    *e = saturating_exp(v + (offset + center), reach);
                }
                for block in (from..to).step_by(LANES) {
                    let mut u = [0.0; LANES];
                    u.copy_from_slice(&lattice.relative[block..block + LANES]);
                    let mut sums = [[0.0f64; LANES]; KERNELS];
                    for (&e, &weight) in e.iter().zip(weights) {
                        for lane in 0..LANES {
                            let k = kernels::<KERNELS>(u[lane] * e);
                            for kernel in 0..KERNELS {
                                sums[kernel][lane] = weight.mul_add(k[kernel], sums[kernel][lane]);
                            }
                        }
                    }
                    for kernel in 0..KERNELS {
                        for lane in 0..LANES {
                            out[kernel * n + block - first + lane] = scale * sums[kernel][lane];
                        }
                    }
                }
            }
        }
    }
}

/// Points of the interpolation of [`smoothed`].
pub(crate) const TAPS: usize = 16;

/// Distance of its nodes, in standard deviations, and at most: a function that wide, and the tail `e^t` of `X`, are interpolated to
/// 1e-12 of their size.
const NODES_APART: f64 = 0.15;
const MOST_APART: f64 = 0.3;

/// Distance of the nodes of an average over `slope` times a normal variable.
pub(crate) fn spacing(slope: f64) -> f64 {
    (NODES_APART * slope).min(MOST_APART)
}

/// [`table`] for an inner sum over `slope` times a normal variable. Wide averages are functions of `t_i + offset` alone, so
/// smooth that they are summed on nodes of their own, far fewer than places, and interpolated from there.
pub(crate) fn smoothed<const KERNELS: usize>(
    lattice: &Laplace,
    offsets: &[f64],
    slope: f64,
    rule: &Normal,
) -> Vec<f64> {
    let inner: Vec<f64> = rule.x.iter().map(|y| slope * y).collect();
    let inner = (&inner[..], &rule.weights[..]);
    let (low, high) = (smallest(offsets), largest(offsets));
    let step = spacing(slope);
    let (from, to) = (lattice.t[0] + low, lattice.t[lattice.len() - 1] + high);
    let places = (lattice.len() * offsets.len()) as f64;
    if slope < 1.0 || 3.0 * ((to - from) / step + 2.0 * TAPS as f64) > places {
        return table::<KERNELS>(lattice, offsets, None, inner);
    }
    let margin = TAPS as f64 * step;
    let nodes = Laplace::new(step, from - margin, to + margin);
    let values = table::<KERNELS>(&nodes, &[0.0], None, inner);
    let mut out = vec![0.0; offsets.len() * KERNELS * lattice.len()];
    Arch::new().dispatch(Interpolate::<KERNELS> {
        lattice,
        offsets,
        nodes: &nodes,
        step,
        values: &values,
        out: &mut out,
    });
    out
}

struct Interpolate<'a, const KERNELS: usize> {
    lattice: &'a Laplace,
    offsets: &'a [f64],
    nodes: &'a Laplace,
    step: f64,
    values: &'a [f64],
    out: &'a mut [f64],
}

/// `1 / prod_{j != i} (i - j)`, the denominators of Lagrange's polynomials on 0, 1, ..
fn denominators() -> [f64; TAPS] {
    std::array::from_fn(|i| 1.0 / (0..TAPS).filter(|j| *j != i).map(|j| i as f64 - j as f64).product::<f64>())
}

impl<const KERNELS: usize> WithSimd for Interpolate<'_, KERNELS> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { lattice, offsets, nodes, step, values, out } = self;
        let (n, count, origin) = (lattice.len(), nodes.len(), nodes.t[0]);
        let denominators = denominators();
        for (&offset, out) in offsets.iter().zip(out.chunks_exact_mut(KERNELS * n)) {
            for (i, t) in lattice.t.iter().enumerate() {
                let position = (t + offset - origin) / step;
                let base = position as usize - (TAPS / 2 - 1);
                let x = position - base as f64;
                // Products of (x - j) before and after each node.
                let mut coefficients = denominators;
                let (mut before, mut after) = (1.0, 1.0);
                for j in 0..TAPS {
                    coefficients[j] *= before;
                    before *= x - j as f64;
                    coefficients[TAPS - 1 - j] *= after;
                    after *= x - (TAPS - 1 - j) as f64;
                }
                for kernel in 0..KERNELS {
                    let values = &values[kernel * count + base..][..TAPS];
                    let mut sums = [0.0; LANES];
                    for (c, v) in coefficients.chunks_exact(LANES).zip(values.chunks_exact(LANES)) {
                        for lane in 0..LANES {
                            sums[lane] += c[lane] * v[lane];
                        }
                    }
                    out[kernel * n + i] = sums.iter().sum();
                }
            }
        }
    }
}

/// For each `offset`: `[sum_i sum_k first[k][i] G_{k+1}(t_i + offset), the same with G_{k+2}]`, `k = 0, 1, 2`:
/// the first two derivatives in the score of a function that is summed on the lattice.
pub(crate) fn derivatives(lattice: &Laplace, coefficients: &[Vec<f64>; 3], offsets: &[f64]) -> Vec<[f64; 2]> {
    let mut out = vec![[0.0; 2]; offsets.len()];
    Arch::new().dispatch(Contract { lattice, coefficients, offsets, out: &mut out });
    out
}

struct Contract<'a> {
    lattice: &'a Laplace,
    coefficients: &'a [Vec<f64>; 3],
    offsets: &'a [f64],
    out: &'a mut [[f64; 2]],
}

impl WithSimd for Contract<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { lattice, coefficients: [c0, c1, c2], offsets, out } = self;
        let n = lattice.len();
        for (offsets, out) in offsets.chunks(LANES).zip(out.chunks_mut(LANES)) {
            let mut sums = [[0.0f64; LANES]; 2];
            for (segment, &center) in lattice.centers.iter().enumerate() {
                let mut e = [0.0; LANES];
                let from = segment * lattice.segment;
                let to = (from + lattice.segment).min(n);
                let reach = lattice.t[to - 1] - center;
                for (e, o) in e.iter_mut().zip(offsets) {
                    *e = saturating_exp(o + center, reach);
                }
                for i in from..to {
                    let (u, c0, c1, c2) = (lattice.relative[i], c0[i], c1[i], c2[i]);
                    for lane in 0..LANES {
                        let [_, g1, g2, g3, g4] = kernels::<5>(u * e[lane]);
                        sums[0][lane] += c0 * g1 + c1 * g2 + c2 * g3;
                        sums[1][lane] += c0 * g2 + c1 * g3 + c2 * g4;
                    }
                }
            }
            for (lane, out) in out.iter_mut().enumerate() {
                *out = [sums[0][lane], sums[1][lane]];
            }
        }
    }
}

/// `(1 - x)^n`, for `n` a whole number.
pub(crate) fn power(x: f64, n: f64) -> f64 {
    if n == 0.0 {
        return 1.0;
    }
    (n * (-x.min(1.0)).ln_1p()).exp()
}

/// `ln E[e^{-u e^s}]` at `t = ln u` over nodes whose weights need not sum to 1 exactly, wherever it lies: from the complement where
/// it is near 0.
pub(crate) fn log_average(scores: &[f64], weights: &[f64], t: f64) -> f64 {
    let (mut sum, mut rest, mut total) = (0.0, 0.0, 0.0);
    for (s, w) in scores.iter().zip(weights) {
        let a = (t + s).min(700.0).exp();
        sum += w * (-a).exp();
        rest -= w * (-a).exp_m1();
        total += w;
    }
    if rest < 0.5 * total { (-rest / total).ln_1p() } else { (sum / total).ln() }
}

/// Where a decreasing function falls through `level`, to within `width`, or as near as numbers of that size lie: a point before
/// (`above`) or after it.
pub(crate) fn crossing(mut from: f64, mut to: f64, width: f64, falls_below: impl Fn(f64) -> bool) -> (f64, f64) {
    while to - from > width {
        let middle = 0.5 * (from + to);
        // Neighbours have no number between them.
        if !(from < middle && middle < to) {
            break;
        }
        if falls_below(middle) {
            to = middle;
        } else {
            from = middle;
        }
    }
    (from, to)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In parts or at once: the same bits; nothing once it is interrupted.
    #[test]
    fn columns_are_tables() {
        struct Now;
        impl headflow_model::Watch for Now {
            fn advance(&self, _: u64) {}
            fn interrupted(&self) -> bool {
                true
            }
        }
        // Several segments, ends of parts within them, and a rest.
        let lattice = Laplace::new(0.93, -1400.0, 900.0);
        assert!(
            lattice.centers.len() > 2 && lattice.len() > 2 * 64 * LANES && !lattice.len().is_multiple_of(64 * LANES)
        );
        for nodes in [3, 2000] {
            let scores: Vec<f64> = (0..nodes).map(|i| 700.0 * (i as f64).sin()).collect();
            let weights: Vec<f64> = (0..nodes).map(|i| (i as f64).cos()).collect();
            let inner = (&scores[..], &weights[..]);
            let column = |budget: &Budget| column::<5>(&lattice, 2.5, inner, budget);
            assert_eq!(column(&Budget::new(1.0)), Some(table::<5>(&lattice, &[2.5], None, inner)));
            assert_eq!(column(&Budget::watched(1.0, &Now)), None);
        }
    }

    /// The kernels are the derivatives of `e^{-u e^s}` in `s`, at any place of a long lattice.
    #[test]
    fn kernels_are_derivatives() {
        let lattice = Laplace::new(7.3, -1400.0, 900.0);
        for offset in [-850.0, -3.2, 0.0, 2.0, 1300.0] {
            let values = table::<5>(&lattice, &[offset], None, (&[0.0], &[1.0]));
            let n = lattice.len();
            for (i, t) in lattice.t.iter().enumerate() {
                let a = (t + offset).exp();
                let e = (-a).exp();
                let expected = if a > LARGEST {
                    [1.0, 0.0, 0.0, 0.0, 0.0]
                } else {
                    let (a2, a3, a4) = (a * a, a * a * a, a * a * a * a);
                    [-(-a).exp_m1(), -a * e, (a2 - a) * e, (-a3 + 3.0 * a2 - a) * e, (a4 - 6.0 * a3 + 7.0 * a2 - a) * e]
                };
                for k in 0..5 {
                    let got = values[k * n + i];
                    assert!((got - expected[k]).abs() <= 1e-12 * expected[k].abs() + 1e-120, "{k} {t} {offset}: {got}");
                }
            }
        }
        // And each is the derivative of the one before.
        let at = |s: f64| kernels::<5>(s.exp());
        for s in [-2.0, -0.3, 0.4, 1.5] {
            let (high, low) = (at(s + 1e-5), at(s - 1e-5));
            for k in 0..4 {
                let sign = if k == 0 { -1.0 } else { 1.0 };
                let slope = sign * (high[k] - low[k]) / 2e-5;
                assert!((slope - at(s)[k + 1]).abs() < 1e-8, "{k} at {s}");
            }
        }
    }

    /// Interpolated averages are those that are summed at every place, relative to their own size.
    #[test]
    fn interpolation_keeps_the_digits() {
        let precision = Precision { lambda: 28.0, tokens: 1e9 };
        let lattice = Laplace::graded(0.3, 1.1, 28.0, -60.0, 4.0);
        let offsets: Vec<f64> = (0..90).map(|i| -7.0 + 0.17 * f64::from(i)).collect();
        for slope in [1.0, 1.7, 4.0, 15.0] {
            let rule = Normal::new(precision, slope);
            let inner: Vec<f64> = rule.x.iter().map(|y| slope * y).collect();
            let fast = smoothed::<4>(&lattice, &offsets, slope, &rule);
            let slow = table::<4>(&lattice, &offsets, None, (&inner, &rule.weights));
            assert_ne!(fast, slow, "nothing was interpolated");
            for (i, (a, b)) in fast.iter().zip(&slow).enumerate() {
                // Derivatives change their signs: beside the sum of all, X keeps its own digits.
                let size = if i / lattice.len() % 4 == X { b.abs() } else { b.abs() + 0.1 };
                assert!((a - b).abs() < 2e-12 * size, "slope {slope}, {i}: {a:e} {b:e}");
            }
        }
    }

    /// The contracted derivatives are those of the table's own sum.
    #[test]
    fn contraction_is_the_sum() {
        let lattice = Laplace::new(0.4, -12.0, 9.0);
        let n = lattice.len();
        let c: [Vec<f64>; 3] = std::array::from_fn(|k| (0..n).map(|i| ((i * (k + 2)) as f64).sin()).collect());
        let offsets: Vec<f64> = (0..11).map(|i| -3.0 + 0.6 * i as f64).collect();
        let fast = derivatives(&lattice, &c, &offsets);
        for (offset, fast) in offsets.iter().zip(fast) {
            let values = table::<5>(&lattice, &[*offset], None, (&[0.0], &[1.0]));
            for d in 0..2 {
                let slow: f64 =
                    (0..3).map(|k| (0..n).map(|i| c[k][i] * values[(k + 1 + d) * n + i]).sum::<f64>()).sum();
                assert!((fast[d] - slow).abs() < 1e-11);
            }
        }
    }

    /// A bisection ends at numbers of any size, and at once where there are none.
    #[test]
    fn crossings_end() {
        assert_eq!(crossing(0.0, 8.0, 0.5, |t| t > 3.1), (3.0, 3.5));
        let (from, to) = crossing(-1e20, 1e20, 0.5, |t| t > 3e19);
        assert!(from <= 3e19 && 3e19 < to && to - from <= 8192.0, "{from} {to}");
        let (from, _) = crossing(f64::MIN, f64::MAX, 0.5, |t| t > 1.0);
        assert!(from.is_finite());
        crossing(f64::NAN, 1.0, 0.5, |_| true);
        crossing(f64::NEG_INFINITY, f64::INFINITY, 0.5, |t| t > 0.0);
    }

    #[test]
    fn nodes_are_counted_before_they_are_made() {
        for lambda in [12.0, 40.0] {
            let precision = Precision { lambda, tokens: 50.0 };
            for slope in [0.0, 0.01, 1.0, 300.0] {
                assert_eq!(Normal::count(precision, slope), Normal::new(precision, slope).x.len() as f64);
            }
        }
        assert!(Normal::count(Precision { lambda: 30.0, tokens: 2.0 }, 1e200) > 1e200);
    }

    /// The normal rule integrates a narrow feature to the precision that was asked for.
    #[test]
    fn steps_follow_narrow_features() {
        for lambda in [12.0, 20.0, 28.0] {
            let precision = Precision { lambda, tokens: 2.0 };
            for slope in [0.01, 0.3, 2.0, 30.0] {
                let sum = |grid: &Normal| -> f64 {
                    grid.x.iter().zip(&grid.weights).map(|(x, w)| w * (-(slope * x + 0.3).exp()).exp()).sum()
                };
                let rule = Normal::new(precision, slope);
                let fine = Normal::with_step(0.31 * precision.normal_step(slope), 9.0);
                let error = (sum(&rule) - sum(&fine)).abs();
                assert!(error < 10.0 * (-lambda).exp() + 1e-15, "Lambda {lambda}, slope {slope}: {error:e}");
            }
        }
    }
}
