//! Multi-head attention on an `H x L` score matrix, forward and backward (`theory/README.md` section 2).
//!
//! ```text
//! softmax        A_hl = e^{s_hl} / sum_l' e^{s_hl'}
//! softmax1       A_hl = e^{s_hl} / (1 + sum_l' e^{s_hl'})
//! bayes-softmax  A_hl = e^{s_hl} / sum_{h',l'} e^{s_h'l'}
//! a_l = g sum_h A_hl,   g = 1/H (mean) or 1 (sum)
//! ```
//!
//! With `q_l = d loss / d a_l`, all three have the same backward pass,
//!
//! ```text
//! d loss / d s_hl = g A_hl (q_l - sum A q),
//! ```
//!
//! the sum running over the entries that are normalised together: the head's own tokens, or for
//! bayes-softmax all heads and tokens. The largest score of each such group is subtracted first,
//! so scores of any finite size are safe.
//!
//! Matrices are row-major slices: entry `(h, l)` at `h L + l`. The `_lanes` functions treat several
//! independent samples side by side: entry `(h, l)` of sample `i` at `(h L + l) lanes + i`.

use aligned_vec::{AVec, avec};
use multiversion::multiversion;
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::exponential::exp;
use crate::extremes::{larger, largest};

/// Working space for `lanes` samples side by side.
#[derive(Debug, Clone)]
pub struct Lanes {
    largest: AVec<f64>,
    sum: AVec<f64>,
}

impl Lanes {
    /// Space for `lanes` samples.
    pub fn new(lanes: usize) -> Self {
        Self { largest: avec![0.0; lanes], sum: avec![0.0; lanes] }
    }

    /// Number of samples.
    #[inline(always)]
    pub fn count(&self) -> usize {
        self.sum.len()
    }
}

/// Tokens side by side in [`Attention::forward_padded`].
pub const PADDING: usize = 8;

/// The sum of a vector, in a fixed order.
#[inline(always)]
pub fn sum_of(v: &[f64; PADDING]) -> f64 {
    ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]))
}

/// How scores become attention weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Activation {
    /// Each head normalised over its tokens.
    Softmax,
    /// Softmax with an extra 1 in the denominator: a head may switch itself off.
    Softmax1,
    /// Heads normalised against each other, in context.
    BayesSoftmax,
}

impl Activation {
    /// All activations, in the papers' order.
    pub const ALL: [Self; 3] = [Self::Softmax, Self::Softmax1, Self::BayesSoftmax];

    /// The name in specs, files and help texts.
    pub fn name(self) -> &'static str {
        match self {
            Self::Softmax => "softmax",
            Self::Softmax1 => "softmax1",
            Self::BayesSoftmax => "bayes-softmax",
        }
    }
}

/// Where the biases `b_h` of the scores `s_hl = chi_hl + b_h` come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Bias {
    /// `b = 0`.
    None,
    /// `b_h = -|k_h|^2 / 2`, differentiated through.
    HalfNorm,
    /// Parameters of their own, learned with rate `gamma / D`.
    Trained,
}

/// How the heads' attentions are combined.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Aggregation {
    /// `g = 1 / H`.
    Mean,
    /// `g = 1`.
    Sum,
}

/// The attention of all heads: activation, bias rule and aggregation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Attention {
    /// How scores become attention weights.
    pub activation: Activation,
    /// Where the biases come from.
    pub bias: Bias,
    /// How the heads are combined.
    pub aggregation: Aggregation,
}

impl From<Activation> for Attention {
    /// The defaults of `theory/README.md` section 2: softmax with mean and no bias, the others with sum and
    /// trained biases.
    fn from(activation: Activation) -> Self {
        match activation {
            Activation::Softmax => Self { activation, bias: Bias::None, aggregation: Aggregation::Mean },
            Activation::Softmax1 | Activation::BayesSoftmax => {
                Self { activation, bias: Bias::Trained, aggregation: Aggregation::Sum }
            }
        }
    }
}

impl Attention {
    /// Every activation with every bias rule and aggregation.
    pub fn all() -> impl Iterator<Item = Self> {
        Activation::ALL.into_iter().flat_map(|activation| {
            [Bias::None, Bias::HalfNorm, Bias::Trained].into_iter().flat_map(move |bias| {
                [Aggregation::Mean, Aggregation::Sum].map(|aggregation| Self { activation, bias, aggregation })
            })
        })
    }

    /// The aggregation factor `g`.
    pub fn gain(&self, heads: usize) -> f64 {
        match self.aggregation {
            Aggregation::Mean => 1.0 / heads as f64,
            Aggregation::Sum => 1.0,
        }
    }

    /// Changes the biases `b` of heads with squares `|k_h|^2` to others with the same attention, which leave the scores
    /// `chi_hl + b_h` the digits of `chi_hl`: `1 + 1e20` has none of the 1.
    ///
    /// ```text
    /// softmax        A_hl does not depend on b_h:                            b_h -> 0
    /// bayes-softmax  it depends on differences alone:                        b_h -> b_h - max b
    /// softmax1       the 1 weighs e^-b_h, nothing beyond |chi_hl| < 40 |k_h|: b_h -> min(b_h, 800 + 40 |k_h|)
    /// ```
    ///
    /// Tokens without a signal have `chi ~ N(0, |k_h|^2)`, and every sequence has one. Biases within 800 stay, bit for bit.
    pub fn bring_near(&self, b: &mut [f64], square: impl Fn(usize) -> f64) {
        /// `e^-800` is zero.
        const NEAR: f64 = 800.0;
        if b.iter().all(|b| b.abs() <= NEAR) {
            return;
        }
        match self.activation {
            Activation::Softmax => b.fill(0.0),
            Activation::BayesSoftmax => {
                let top = largest(&*b);
                // Differences of numbers may be beyond them.
                b.iter_mut().for_each(|b| *b = larger(*b - top, f64::MIN));
            }
            Activation::Softmax1 => {
                for (h, b) in b.iter_mut().enumerate() {
                    let far = NEAR + 40.0 * square(h).sqrt();
                    *b = if *b > far { far } else { *b };
                }
            }
        }
    }

    /// Attention weights `A` (`H x L`) and their combination `a` (length `L`) from scores
    /// `s` (`H x L`, biases included).
    ///
    /// # Errors
    /// When `scores` is not `heads x length` with both positive, or holds a non-finite number.
    ///
    /// ```
    /// use headflow_model::{Activation, Attention};
    /// let attention = Attention::from(Activation::Softmax);
    /// let (weights, combined) = attention.forward(2, 3, &[0.0, 0.0, 0.0, 1e4, 0.0, -1e4])?;
    /// assert!((weights[3] - 1.0).abs() < 1e-15 && weights[4] < 1e-300);
    /// assert!((combined[0] - (1.0 / 3.0 + 1.0) / 2.0).abs() < 1e-15);
    /// # Ok::<(), headflow_model::Error>(())
    /// ```
    pub fn forward(&self, heads: usize, length: usize, scores: &[f64]) -> Result<(Vec<f64>, Vec<f64>), Error> {
        check_matrix("scores", heads, length, scores)?;
        let mut weights = scores.to_vec();
        let mut combined = vec![0.0; length];
        self.forward_in_place(heads, length, &mut weights, &mut combined);
        Ok((weights, combined))
    }

    /// `d loss / d s` (`H x L`) from the weights `A` (`H x L`) of [`Attention::forward`] and
    /// `q = d loss / d a` (length `L`).
    ///
    /// # Errors
    /// When a shape does not fit, or an entry is not finite.
    pub fn backward(&self, heads: usize, length: usize, weights: &[f64], q: &[f64]) -> Result<Vec<f64>, Error> {
        check_matrix("weights", heads, length, weights)?;
        check_matrix("q", 1, length, q)?;
        let mut gradient = weights.to_vec();
        self.backward_in_place(heads, length, &mut gradient, q);
        Ok(gradient)
    }

    /// [`Attention::forward`] on several samples side by side: `scores` turns into weights in place.
    /// Nothing is checked; non-finite scores give non-finite weights.
    #[inline(always)]
    pub fn forward_lanes(
        &self,
        heads: usize,
        length: usize,
        lanes: &mut Lanes,
        scores: &mut [f64],
        combined: &mut [f64],
    ) {
        self.forward_with(heads, length, &mut lanes.largest, &mut lanes.sum, scores, combined);
    }

    /// The forward pass on as many samples as `largest` and `sum`, its working space, are long.
    #[inline(always)]
    fn forward_with(
        &self,
        heads: usize,
        length: usize,
        largest: &mut [f64],
        sum: &mut [f64],
        scores: &mut [f64],
        combined: &mut [f64],
    ) {
        let may_switch_off = self.activation == Activation::Softmax1;
        let count = sum.len();
        let size = self.group(heads, length) * count;
        for group in scores.chunks_exact_mut(size) {
            largest.fill(if may_switch_off { 0.0 } else { f64::NEG_INFINITY });
            for s in group.chunks_exact(count) {
                for (top, &s) in largest.iter_mut().zip(s) {
                    *top = if s > *top { s } else { *top };
                }
            }
            for s in group.chunks_exact_mut(count) {
                for (s, &top) in s.iter_mut().zip(&*largest) {
                    *s -= top;
                }
            }
            if may_switch_off {
                for (sum, &top) in sum.iter_mut().zip(&*largest) {
                    *sum = exp(-top);
                }
            } else {
                sum.fill(0.0);
            }
            for s in group.iter_mut() {
                *s = exp(*s);
            }
            for s in group.chunks_exact(count) {
                for (sum, &s) in sum.iter_mut().zip(s) {
                    *sum += s;
                }
            }
            for v in &mut *sum {
                *v = 1.0 / *v;
            }
            for s in group.chunks_exact_mut(count) {
                for (s, &scale) in s.iter_mut().zip(&*sum) {
                    *s *= scale;
                }
            }
        }
        combined.fill(0.0);
        for row in scores.chunks_exact(length * count) {
            for (a, &weight) in combined.iter_mut().zip(row) {
                *a += weight;
            }
        }
        let gain = self.gain(heads);
        for a in combined {
            *a *= gain;
        }
    }

    /// [`Attention::backward`] on several samples side by side: `weights` turns into
    /// `d loss / d s` in place. Nothing is checked.
    #[inline(always)]
    pub fn backward_lanes(&self, heads: usize, length: usize, lanes: &mut Lanes, weights: &mut [f64], q: &[f64]) {
        self.backward_with(heads, length, &mut lanes.sum, weights, q);
    }

    /// The backward pass on as many samples as `average`, its working space, is long.
    #[inline(always)]
    fn backward_with(&self, heads: usize, length: usize, average: &mut [f64], weights: &mut [f64], q: &[f64]) {
        let gain = self.gain(heads);
        let count = average.len();
        for group in weights.chunks_exact_mut(self.group(heads, length) * count) {
            average.fill(0.0);
            for row in group.chunks_exact(length * count) {
                for (a, q) in row.chunks_exact(count).zip(q.chunks_exact(count)) {
                    for ((sum, &a), &q) in average.iter_mut().zip(a).zip(q) {
                        *sum = a.mul_add(q, *sum);
                    }
                }
            }
            for row in group.chunks_exact_mut(length * count) {
                for (a, q) in row.chunks_exact_mut(count).zip(q.chunks_exact(count)) {
                    for ((a, &q), &average) in a.iter_mut().zip(q).zip(&*average) {
                        *a = gain * *a * (q - average);
                    }
                }
            }
        }
    }

    /// [`Attention::forward`] of one sample with vectors of tokens: rows are `stride` apart, a multiple
    /// of [`PADDING`], and zero beyond `length` afterwards, whatever stood there. Sums run in a fixed
    /// order: the bits are the same at every SIMD level. `tops` is working space, one number a head.
    /// Nothing is checked.
    #[inline(always)]
    pub fn forward_padded(
        &self,
        length: usize,
        stride: usize,
        tops: &mut [f64],
        scores: &mut [f64],
        combined: &mut [f64],
    ) {
        /// How far padding lies below the tokens: negligible, but far from subnormal numbers.
        const BELOW: f64 = 500.0;
        let heads = scores.len() / stride;
        for row in scores.chunks_exact_mut(stride) {
            let low = row[0] - BELOW;
            row[length..].fill(low);
        }
        // In passes over all heads: the latency of one group's exponentials and sums hides another's.
        let may_switch_off = self.activation == Activation::Softmax1;
        let size = self.group(heads, stride);
        for (group, kept) in scores.chunks_exact_mut(size).zip(&mut *tops) {
            let (group, _) = group.as_chunks_mut::<PADDING>();
            let mut largest = [if may_switch_off { 0.0 } else { f64::NEG_INFINITY }; PADDING];
            for s in &*group {
                for i in 0..PADDING {
                    largest[i] = if s[i] > largest[i] { s[i] } else { largest[i] };
                }
            }
            let mut half = [0.0; PADDING / 2];
            for i in 0..PADDING / 2 {
                half[i] = if largest[i] > largest[i + 4] { largest[i] } else { largest[i + 4] };
            }
            let larger = |a: f64, b: f64| if a > b { a } else { b };
            let top = larger(larger(half[0], half[2]), larger(half[1], half[3]));
            *kept = top;
            for s in group {
                for i in 0..PADDING {
                    s[i] -= top;
                }
            }
        }
        for s in scores.as_chunks_mut::<PADDING>().0 {
            for i in 0..PADDING {
                s[i] = exp(s[i]);
            }
        }
        if may_switch_off {
            for top in &mut *tops {
                *top = exp(-*top);
            }
        } else {
            tops.fill(0.0);
        }
        for (group, &off) in scores.chunks_exact_mut(size).zip(&*tops) {
            let (group, _) = group.as_chunks_mut::<PADDING>();
            let mut sums = [0.0; PADDING];
            for s in &*group {
                for i in 0..PADDING {
                    sums[i] += s[i];
                }
            }
            let scale = 1.0 / (sum_of(&sums) + off);
            for s in group {
                for i in 0..PADDING {
                    s[i] *= scale;
                }
            }
        }
        let gain = self.gain(heads);
        combined.fill(0.0);
        for row in scores.chunks_exact_mut(stride) {
            row[length..].fill(0.0);
            for (a, &weight) in combined.iter_mut().zip(&*row) {
                *a = gain.mul_add(weight, *a);
            }
        }
    }

    /// [`Attention::backward`] after [`Attention::forward_padded`].
    #[inline(always)]
    pub fn backward_padded(&self, stride: usize, weights: &mut [f64], q: &[f64]) {
        let heads = weights.len() / stride;
        let gain = self.gain(heads);
        let (q, _) = q.as_chunks::<PADDING>();
        for group in weights.chunks_exact_mut(self.group(heads, stride)) {
            let mut sums = [0.0; PADDING];
            for row in group.chunks_exact(stride) {
                for (a, q) in row.as_chunks::<PADDING>().0.iter().zip(q) {
                    for i in 0..PADDING {
                        sums[i] = a[i].mul_add(q[i], sums[i]);
                    }
                }
            }
            let average = sum_of(&sums);
            for row in group.chunks_exact_mut(stride) {
                for (a, q) in row.as_chunks_mut::<PADDING>().0.iter_mut().zip(q) {
                    for i in 0..PADDING {
                        a[i] = gain * a[i] * (q[i] - average);
                    }
                }
            }
        }
    }

    /// [`Attention::forward`] of one sample in place, compiled for the machine it runs on; nothing is
    /// checked.
    pub fn forward_in_place(&self, heads: usize, length: usize, scores: &mut [f64], combined: &mut [f64]) {
        forward_dispatched(self, heads, length, scores, combined);
    }

    /// [`Attention::backward`] of one sample in place, compiled for the machine it runs on; nothing
    /// is checked.
    pub fn backward_in_place(&self, heads: usize, length: usize, weights: &mut [f64], q: &[f64]) {
        backward_dispatched(self, heads, length, weights, q);
    }

    /// Number of entries that are normalised together.
    #[inline(always)]
    fn group(&self, heads: usize, length: usize) -> usize {
        match self.activation {
            Activation::Softmax | Activation::Softmax1 => length,
            Activation::BayesSoftmax => heads * length,
        }
    }
}

#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl+avx2+fma+bmi1+bmi2",
    "x86_64+avx2+fma+bmi1+bmi2"
))]
fn forward_dispatched(attention: &Attention, heads: usize, length: usize, scores: &mut [f64], combined: &mut [f64]) {
    attention.forward_with(heads, length, &mut [0.0], &mut [0.0], scores, combined);
}

#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl+avx2+fma+bmi1+bmi2",
    "x86_64+avx2+fma+bmi1+bmi2"
))]
fn backward_dispatched(attention: &Attention, heads: usize, length: usize, weights: &mut [f64], q: &[f64]) {
    attention.backward_with(heads, length, &mut [0.0], weights, q);
}

fn check_matrix(field: &str, rows: usize, columns: usize, matrix: &[f64]) -> Result<(), Error> {
    if rows == 0 || columns == 0 || matrix.len() != rows * columns {
        return Err(Error::invalid(
            field,
            format!("has {} entries, expected {rows} x {columns} with both positive", matrix.len()),
        ));
    }
    match matrix.iter().position(|v| !v.is_finite()) {
        Some(i) => Err(Error::invalid(field, format!("entry ({}, {}) is {}", i / columns, i % columns, matrix[i]))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Rows padded to vectors give the weights and gradients of plain rows, whatever stands in the padding.
    #[test]
    fn padded_rows_are_plain_rows() {
        for attention in all() {
            for (heads, length) in [(1, 2), (3, 6), (2, 8), (4, 13)] {
                let value = |i: usize| 3.0 * (1.0 + (i * i % 17) as f64).sin() + if i == 1 { 40.0 } else { 0.0 };
                let scores: Vec<f64> = (0..heads * length).map(value).collect();
                let q: Vec<f64> = (0..length).map(|l| (0.7 * l as f64).cos()).collect();
                let (weights, combined) = attention.forward(heads, length, &scores).unwrap();
                let gradient = attention.backward(heads, length, &weights, &q).unwrap();

                let stride = length.next_multiple_of(PADDING);
                let padded = |v: &[f64], rubbish: f64| -> Vec<f64> {
                    let rest = stride - length;
                    v.chunks(length)
                        .flat_map(|row| row.iter().copied().chain(std::iter::repeat_n(rubbish, rest)))
                        .collect()
                };
                let (mut values, mut sums) = (padded(&scores, 1e5), vec![0.0; stride]);
                attention.forward_padded(length, stride, &mut vec![0.0; heads], &mut values, &mut sums);
                let close = |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-14);
                assert!(close(&values, &padded(&weights, 0.0)), "{attention:?} {heads} x {length}");
                assert!(close(&sums, &padded(&combined, 0.0)), "{attention:?} {heads} x {length}");
                attention.backward_padded(stride, &mut values, &padded(&q, 7.0));
                assert!(close(&values, &padded(&gradient, 0.0)), "{attention:?} {heads} x {length}");
            }
        }
    }

    fn all() -> impl Iterator<Item = Attention> {
        Activation::ALL.into_iter().flat_map(|activation| {
            [Aggregation::Mean, Aggregation::Sum].map(|aggregation| Attention {
                activation,
                bias: Bias::None,
                aggregation,
            })
        })
    }

    /// The definition, term by term, for scores small enough not to overflow.
    fn plain(attention: &Attention, heads: usize, length: usize, scores: &[f64]) -> Vec<f64> {
        let e: Vec<f64> = scores.iter().map(|s| s.exp()).collect();
        (0..heads * length)
            .map(|i| {
                let h = i / length;
                let own: f64 = e[h * length..(h + 1) * length].iter().sum();
                e[i] / match attention.activation {
                    Activation::Softmax => own,
                    Activation::Softmax1 => 1.0 + own,
                    Activation::BayesSoftmax => e.iter().sum(),
                }
            })
            .collect()
    }

    /// An arbitrary smooth loss of `a`, to differentiate.
    fn loss(attention: &Attention, heads: usize, length: usize, scores: &[f64]) -> f64 {
        let (_, a) = attention.forward(heads, length, scores).unwrap();
        a.iter().enumerate().map(|(l, a)| (l as f64 + 0.3) * a * a - (a * 2.0).sin()).sum()
    }

    proptest! {
        #[test]
        fn forward_is_the_definition(heads in 1usize..5, length in 1usize..7, seed in prop::collection::vec(-5.0f64..5.0, 40)) {
            let scores = &seed[..heads * length];
            for attention in all() {
                let (weights, combined) = attention.forward(heads, length, scores).unwrap();
                for (fast, slow) in weights.iter().zip(plain(&attention, heads, length, scores)) {
                    prop_assert!((fast - slow).abs() < 1e-14);
                }
                for l in 0..length {
                    let sum: f64 = (0..heads).map(|h| weights[h * length + l]).sum();
                    prop_assert!((combined[l] - attention.gain(heads) * sum).abs() < 1e-14);
                }
            }
        }

        #[test]
        fn backward_is_the_derivative(heads in 1usize..4, length in 1usize..5, seed in prop::collection::vec(-2.0f64..2.0, 20)) {
            let scores = seed[..heads * length].to_vec();
            for attention in all() {
                let (weights, a) = attention.forward(heads, length, &scores).unwrap();
                let q: Vec<f64> = a.iter().enumerate().map(|(l, a)| 2.0 * (l as f64 + 0.3) * a - 2.0 * (a * 2.0).cos()).collect();
                let gradient = attention.backward(heads, length, &weights, &q).unwrap();
                for i in 0..scores.len() {
                    let step = 1e-5;
                    let at = |d: f64| {
                        let mut s = scores.clone();
                        s[i] += d;
                        loss(&attention, heads, length, &s)
                    };
                    let numeric = (at(step) - at(-step)) / (2.0 * step);
                    prop_assert!((gradient[i] - numeric).abs() < 1e-8, "{attention:?} {i}: {} {numeric}", gradient[i]);
                }
            }
        }
    }

    #[test]
    fn scores_of_any_size_are_safe() {
        for attention in all() {
            for big in [1e4, 1e8, 1e300] {
                for scores in [[big, -big, 0.0, big], [-big; 4], [big; 4]] {
                    let (weights, a) = attention.forward(2, 2, &scores).unwrap();
                    assert!(weights.iter().chain(&a).all(|v| v.is_finite() && *v >= 0.0), "{attention:?} {scores:?}");
                    let gradient = attention.backward(2, 2, &weights, &[1.0, -2.0]).unwrap();
                    assert!(gradient.iter().all(|v| v.is_finite()));
                }
            }
        }
        let switched_off = Attention::from(Activation::Softmax1).forward(1, 2, &[-1e4, -1e4]).unwrap();
        assert!(switched_off.1.iter().all(|a| *a < 1e-300));
        let (_, shared) = Attention::from(Activation::BayesSoftmax).forward(2, 1, &[1e4, 1e4]).unwrap();
        assert_eq!(shared, [1.0]);
    }

    /// Scores with biases far beyond them give the weights of exact arithmetic, where the biases have been brought near.
    #[test]
    fn far_biases_leave_scores_their_digits() {
        let chi = [0.3, -1.2, 0.7, 0.1, 2.0, -0.4];
        let weights = |activation: Activation, b: [f64; 2]| {
            let attention = Attention::from(activation);
            let mut near = b;
            attention.bring_near(&mut near, |_| 1.0);
            let scores: Vec<f64> = chi.iter().enumerate().map(|(i, chi)| chi + near[i / 3]).collect();
            attention.forward(2, 3, &scores).unwrap().0
        };
        // softmax of a row, or of all, from the definition.
        let softmax = |chi: &[f64]| -> Vec<f64> {
            let sum: f64 = chi.iter().map(|c| c.exp()).sum();
            chi.iter().map(|c| c.exp() / sum).collect()
        };
        let rows = [softmax(&chi[..3]), softmax(&chi[3..])].concat();
        let close = |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-12);
        for size in [801.0, 1e5, 1e20, 1e300] {
            assert!(close(&weights(Activation::Softmax, [size, -size]), &rows), "{size}");
            assert!(close(&weights(Activation::Softmax1, [size, size]), &rows), "{size}");
            assert!(close(&weights(Activation::Softmax1, [size, -size])[..3], &rows[..3]), "{size}");
            assert!(weights(Activation::Softmax1, [size, -size])[3..].iter().all(|a| *a < 1e-300), "{size}");
            assert!(close(&weights(Activation::BayesSoftmax, [size; 2]), &softmax(&chi)), "{size}");
            assert!(close(&weights(Activation::BayesSoftmax, [-size; 2]), &softmax(&chi)), "{size}");
            assert!(close(&weights(Activation::BayesSoftmax, [size, -size])[..3], &rows[..3]), "{size}");
        }
        let mut farthest = [f64::MAX, f64::MIN];
        Attention::from(Activation::BayesSoftmax).bring_near(&mut farthest, |_| 1.0);
        assert_eq!(farthest, [0.0, f64::MIN]);
        let mut within = [800.0, -3.0];
        Attention::from(Activation::BayesSoftmax).bring_near(&mut within, |_| 1.0);
        assert_eq!(within, [800.0, -3.0]);
    }

    #[test]
    fn bad_matrices_are_refused() {
        let attention = Attention::from(Activation::Softmax);
        assert!(attention.forward(2, 2, &[0.0; 3]).is_err());
        assert!(attention.forward(0, 2, &[]).is_err());
        assert!(attention.forward(1, 2, &[0.0, f64::NAN]).is_err());
        assert!(attention.backward(1, 2, &[0.5, 0.5], &[1.0]).is_err());
    }
}
