//! softmax and softmax1: heads one by one and in pairs (`theory/README.md` section 14).
//!
//! With `S_h = kappa + sum_l e^{s_hl}` (`kappa` 0 for softmax, 1 for softmax1), `1/S = int_0^inf e^{-uS} du`
//! makes the tokens independent:
//!
//! ```text
//! E[A_h,eps]          = int dt e^{-kappa u} (-Phi^eps_1) Phi_0^{L-1}
//! E[sum_l A_hl^2]     = int dt e^{-kappa u} { Q^eps Phi_0^{L-1} + (L-1) Q Phi^eps_0 Phi_0^{L-2} }
//! E[sum_l A_hl A_h'l] = int dt dt' e^{-kappa (u+v)} { Phi^eps_11 Phi_00^{L-1} + (L-1) Phi_11 Phi^eps_00 Phi_00^{L-2} }
//! ```
//!
//! with `t = ln u`, `t' = ln v`, `Phi_k = E[G_k]`, `Q = Phi_2 - Phi_1`, `Phi_kk'(t, t') = E[G_k(t + s_h) G_k'(t' + s_h')]`
//! and `^eps` for the relevant token. Derivatives in a Gaussian's mean raise an index by one, those in its
//! covariance are half of second derivatives. With `s_h = b_h + l_11 x`, `s_h' = b_h' + l_21 x + l_22 y` the
//! two-dimensional averages are products of matrices over `x`.

use std::f64::consts::PI;

use headflow_model::{Budget, larger};
use nalgebra::{DMatrix, DMatrixView, DVector};
use rayon::prelude::*;

use super::lattice::{
    Laplace, Normal, Precision, TAPS, X, column, crossing, log_average, power, smoothed, spacing, table,
};
use super::signals::{Component, Signals};

/// The Gaussian law of one token's scores under two heads.
#[derive(Debug, Clone, Copy)]
struct Scores {
    mean: [f64; 2],
    /// `(11, 12, 22)`.
    covariance: [f64; 3],
}

/// What is asked, beside the heads: weights of the two moments in the objective.
#[derive(Clone, Copy)]
pub(super) struct Question<'a> {
    pub m: &'a DMatrix<f64>,
    pub r: &'a DMatrix<f64>,
    pub b: &'a [f64],
    pub signals: &'a Signals,
    pub precision: Precision,
    /// Whether the attention sum of a head has the 1 of softmax1, length `H`.
    pub leaks: &'a [bool],
    /// Weights of `E[A_h,eps]` and `E[sum_l A_hl A_h'l]` in the objective.
    pub weights: [f64; 2],
    pub gradient: bool,
    /// Once it interrupts, contributions are incomplete, and soon there.
    pub budget: &'a Budget<'a>,
}

/// The contribution of one head, or of one pair of heads (each counted once, not twice).
#[derive(Debug, Clone)]
pub(super) struct Contribution {
    pub heads: [usize; 2],
    /// `E[A_h,eps]`, of a single head.
    pub first: f64,
    /// `E[sum_l A_hl A_h'l]`.
    pub second: f64,
    /// Derivatives of the objective in `b_h, b_h'`.
    pub b: [f64; 2],
    /// In `r_hh, r_hh', r_h'h'` (the middle one with `r_hh'` and `r_h'h` together).
    pub r: [f64; 3],
    /// In `m_h, m_h'`, length `F` each.
    pub m: [DVector<f64>; 2],
}

impl Contribution {
    /// That of a head which is off.
    pub fn zero(heads: [usize; 2], features: usize) -> Self {
        Self {
            heads,
            first: 0.0,
            second: 0.0,
            b: [0.0; 2],
            r: [0.0; 3],
            m: [DVector::zeros(features), DVector::zeros(features)],
        }
    }

    fn add(&mut self, other: &Self) {
        self.first += other.first;
        self.second += other.second;
        (0..2).for_each(|k| {
            self.b[k] += other.b[k];
            self.m[k] += &other.m[k];
        });
        (0..3).for_each(|k| self.r[k] += other.r[k]);
    }

    /// Adds derivatives in the law of the relevant token's scores.
    fn add_relevant(&mut self, question: &Question, component: &Component, mean: [f64; 2], covariance: [f64; 3]) {
        let [h, k] = self.heads;
        (0..2).for_each(|i| {
            self.b[i] += mean[i];
            self.m[i] += &component.mean * mean[i];
        });
        (0..3).for_each(|i| self.r[i] += covariance[i]);
        if let Some(sigma) = &question.signals.covariance {
            let (mh, mk) = (sigma * question.m.row(h).transpose(), sigma * question.m.row(k).transpose());
            self.m[0] += &mh * (2.0 * covariance[0]) + &mk * covariance[1];
            self.m[1] += &mh * covariance[1] + &mk * (2.0 * covariance[2]);
        }
    }
}

/// `e^{-u}` for softmax1, 1 for softmax.
fn leaks(lattice: &Laplace, leak: bool) -> Vec<f64> {
    lattice.u().map(|u| if leak { (-u).exp() } else { 1.0 }).collect()
}

impl Question<'_> {
    fn others(&self) -> f64 {
        self.precision.tokens - 1.0
    }

    fn deviation(&self, h: usize) -> f64 {
        self.r[(h, h)].max(0.0).sqrt()
    }

    /// Points `t` of a given step, for head `h`.
    fn lattice(&self, h: usize, step: f64, (from, to): (f64, f64)) -> Laplace {
        let precision = self.precision;
        if self.leaks[h] {
            // Nothing makes the 1 of softmax1 smoother.
            Laplace::graded(precision.laplace_step(0.0).min(step), step, precision.lambda, from, to)
        } else {
            Laplace::new(step, from, to)
        }
    }

    /// Points `t` and `t'` of a pair.
    fn lattices(&self, heads: [usize; 2], ranges: [(f64, f64); 2]) -> [Laplace; 2] {
        let steps = self.precision.laplace_steps(heads.map(|h| self.deviation(h)), self.r[(heads[0], heads[1])]);
        std::array::from_fn(|i| self.lattice(heads[i], steps[i], ranges[i]))
    }

    fn rows(&self, heads: [usize; 2]) -> DMatrix<f64> {
        DMatrix::from_fn(2, self.m.ncols(), |i, f| self.m[(heads[i], f)])
    }

    fn scores(&self, heads: [usize; 2]) -> Scores {
        let [h, k] = heads;
        Scores { mean: [self.b[h], self.b[k]], covariance: [self.r[(h, h)], self.r[(h, k)], self.r[(k, k)]] }
    }

    fn relevant(&self, heads: [usize; 2], component: &Component) -> Scores {
        let rows = self.rows(heads);
        let shift = &rows * &component.mean;
        let mut scores = self.scores(heads);
        (0..2).for_each(|i| scores.mean[i] += shift[i]);
        if let Some(sigma) = &self.signals.covariance {
            let extra = &rows * sigma * rows.transpose();
            scores.covariance[0] += extra[(0, 0)];
            scores.covariance[1] += extra[(0, 1)];
            scores.covariance[2] += extra[(1, 1)];
        }
        scores
    }

    /// Where `ln u` lies when the relevant token's score has this mean and variance: outside, the integrals
    /// hold less than the precision. `P(ln T - ln S < t) = 1 - E e^{-uS}` for `T` exponential. Without a law of the relevant token
    /// that token weighs nothing.
    fn range(&self, h: usize, background: (f64, f64), relevant: Option<(f64, f64)>) -> (f64, f64) {
        let leaks = self.leaks[h];
        let reach = self.precision.reach();
        let laws = [Some(background), relevant];
        let rules = laws.map(|law| {
            let (mean, variance) = law?;
            let sigma = variance.max(0.0).sqrt();
            // Steps may be coarse here, but the tails must be there.
            let coarse = Precision { lambda: 8.0, ..self.precision };
            let rule = if sigma == 0.0 {
                Normal::new(coarse, 0.0)
            } else {
                Normal::with_step(coarse.normal_step(sigma).max(2.0 * reach / MOST_COARSE), reach)
            };
            Some((rule.x.iter().map(|x| mean + sigma * x).collect::<Vec<f64>>(), rule.weights))
        });
        let log_of_all = |t: f64| -> f64 {
            let leak = if leaks { -t.min(700.0).exp() } else { 0.0 };
            let log = |rule: &Option<(Vec<f64>, Vec<f64>)>| {
                rule.as_ref().map_or(0.0, |(scores, weights)| log_average(scores, weights, t))
            };
            leak + log(&rules[1]) + self.others() * log(&rules[0])
        };
        let lambda = self.precision.lambda;
        let ends = [background, relevant.unwrap_or(background)].map(|(mean, variance)| {
            let spread = reach * variance.max(0.0).sqrt();
            (mean - spread, mean + spread)
        });
        let highest = ends[0].1.max(ends[1].1).max(0.0) + self.precision.tokens.ln();
        let lowest = if leaks { 0.0 } else { ends[0].0.min(ends[1].0) };
        let (from, to) = (-highest - lambda - 1.0, -lowest + lambda.ln() + 1.0);
        let small = (-lambda).exp();
        let (first, _) = crossing(from, to, 0.5, |t| log_of_all(t) < -small);
        let (_, last) = crossing(first, to, 0.5, |t| log_of_all(t) < -lambda);
        // Nodes that lie further apart than a kernel is wide find the ends to their distance.
        let widest = laws.iter().flatten().fold(0.0, |widest, (_, variance)| larger(widest, *variance));
        let apart = 2.0 * reach * widest.sqrt() / MOST_COARSE;
        if apart > 1.0 { (first - apart, last + apart) } else { (first, last) }
    }
}

/// Most nodes that look for the range of `ln u`.
const MOST_COARSE: f64 = 4096.0;

/// Both moments of one head.
pub(super) fn single(question: &Question, h: usize) -> Contribution {
    let m = DMatrix::from_fn(1, question.m.ncols(), |_, f| question.m[(h, f)]);
    let components = question.signals.components(&m, question.precision);
    let parts: Vec<Contribution> = components.par_iter().filter_map(|c| single_with(question, h, c)).collect();
    let mut sum = Contribution::zero([h, h], question.m.ncols());
    parts.iter().for_each(|p| sum.add(p));
    sum
}

/// The step in `ln u` of one head. A window ends at scores beside which those of the others, and their mean, make nothing smoother.
fn step(question: &Question, h: usize, window: Option<&Window>) -> f64 {
    let step = question.precision.laplace_step(question.deviation(h));
    if window.is_some() { step.min(question.precision.laplace_step(0.0)) } else { step }
}

/// None once the budget's watch interrupts.
fn single_with(question: &Question, h: usize, component: &Component) -> Option<Contribution> {
    let (background, relevant) = (question.scores([h, h]), question.relevant([h, h], component));
    let law = |s: &Scores| (s.mean[0], s.covariance[0]);
    let window = Window::of(question, h, law(&background), law(&relevant));
    let range = match &window {
        Some(window) => window.range,
        None => question.range(h, law(&background), Some(law(&relevant))),
    };
    let lattice = question.lattice(h, step(question, h, window.as_ref()), range);
    let n = lattice.len();
    let moments = |s: &Scores| -> Option<Vec<f64>> {
        let sigma = s.covariance[0].max(0.0).sqrt();
        let rule = Normal::new(question.precision, sigma);
        let scores: Vec<f64> = rule.x.iter().map(|x| sigma * x).collect();
        column::<5>(&lattice, s.mean[0], (&scores, &rule.weights), question.budget)
    };
    let plain = moments(&background)?;
    let signal = match &window {
        Some(window) => {
            let (scores, weights) = window.nodes();
            column::<5>(&lattice, 0.0, (&scores, &weights), question.budget)?
        }
        None => moments(&relevant)?,
    };
    let above = window.as_ref().map_or(0.0, Window::above);
    let leak = leaks(&lattice, question.leaks[h]);
    let others = question.others();
    let [first, second] = question.weights;
    let mut part = Contribution::zero([h, h], question.m.ncols());
    // Above the window all attention is on the relevant token.
    part.first += component.weight * above;
    part.second += component.weight * above;
    let (mut b, mut v, mut relevant_b, mut relevant_v) = (0.0, 0.0, 0.0, 0.0);
    for i in 0..n {
        let [x, g1, g2, g3, g4] = std::array::from_fn(|k| plain[k * n + i]);
        let [ex, e1, e2, e3, e4] = std::array::from_fn(|k| signal[k * n + i]);
        let ex = ex + above;
        let weight = leak[i] * lattice.weights[i] * component.weight;
        let (p, p1) = (weight * power(x, others), weight * others * power(x, others - 1.0));
        let p2 = if others > 1.0 { weight * others * (others - 1.0) * power(x, others - 2.0) } else { 0.0 };
        let (q, eq, ey) = (g2 - g1, e2 - e1, 1.0 - ex);
        part.first += -e1 * p;
        part.second += eq * p + q * ey * p1;
        if question.gradient {
            let of_power = first * -e1 * p1 + second * (eq * p1 + q * ey * p2);
            let of_q = second * ey * p1;
            b += of_power * g1 + of_q * (g3 - g2);
            v += 0.5 * (of_power * g2 + of_q * (g4 - g3));
            let (of_ey, of_e1, of_eq) = (second * q * p1, -first * p, second * p);
            relevant_b += of_ey * e1 + of_e1 * e2 + of_eq * (e3 - e2);
            relevant_v += 0.5 * (of_ey * e2 + of_e1 * e3 + of_eq * (e4 - e3));
        }
    }
    part.b[0] += b;
    part.r[0] += v;
    part.add_relevant(question, component, [relevant_b, 0.0], [relevant_v, 0.0, 0.0]);
    Some(part)
}

/// Scores of the relevant token that are wider than this, and so many times wider than those of the others, have their law followed
/// only where they meet those.
const WIDE: f64 = 300.0;
const WIDER: f64 = 4.0;

/// Where a wide score of the relevant token meets the others' sum: below it has no weight, above it has all.
///
/// Its nodes are those of the trapezoid rule at the multiples of `step`, so that what lies above is not the integral of the density
/// but the rest of that sum, by Euler and Maclaurin, up to `(step / sigma)^4 / 720`.
struct Window {
    mean: f64,
    sigma: f64,
    step: f64,
    /// First and last multiple of the step.
    places: (f64, f64),
    /// Of `ln u`.
    range: (f64, f64),
}

impl Window {
    fn of(question: &Question, h: usize, background: (f64, f64), relevant: (f64, f64)) -> Option<Self> {
        let (mean, sigma) = (relevant.0, relevant.1.max(0.0).sqrt());
        if !(sigma > WIDE && sigma > WIDER * background.1.max(0.0).sqrt()) {
            return None;
        }
        let lambda = question.precision.lambda;
        let (from, to) = question.range(h, background, None);
        // e^{-a} is nothing at a = e^6, and 1 at e^{-lambda - 7}.
        let (low, high) = (-to - lambda - 7.0, 6.0 - from);
        let step = sigma * question.precision.normal_step(sigma);
        let places = ((low / step).ceil(), (high / step).floor());
        Some(Self { mean, sigma, step, places, range: (from - lambda - 6.0, to) })
    }

    fn count(&self) -> f64 {
        self.places.1 - self.places.0 + 1.0
    }

    /// Scores and weights.
    fn nodes(&self) -> (Vec<f64>, Vec<f64>) {
        let scores: Vec<f64> = (0..self.count() as usize).map(|i| (self.places.0 + i as f64) * self.step).collect();
        let weights = scores.iter().map(|s| self.step / self.sigma * density((s - self.mean) / self.sigma)).collect();
        (scores, weights)
    }

    /// The weight of all nodes above.
    fn above(&self) -> f64 {
        let x = (self.places.1 * self.step - self.mean) / self.sigma;
        let step = self.step / self.sigma;
        upper_tail(x) - density(x) * (0.5 * step - step * step * x / 12.0)
    }
}

/// The density of a standard normal variable.
fn density(x: f64) -> f64 {
    (-0.5 * x * x).exp() / (2.0 * PI).sqrt()
}

/// `P(z > x)` for a standard normal variable, to rounding of 1: by the series of positive terms
/// `1/2 - P = density(x) sum_n x^{2n+1} / (2n+1)!!`.
fn upper_tail(x: f64) -> f64 {
    if x < 0.0 {
        return 1.0 - upper_tail(-x);
    }
    if x > 9.0 {
        return 0.0;
    }
    let (mut term, mut sum, mut n) = (x, x, 1.0);
    while term > 1e-17 * sum {
        n += 2.0;
        term *= x * x / n;
        sum += term;
    }
    0.5 - density(x) * sum
}

/// Averages of products of kernels over the scores of two heads, on a lattice of `(t, t')`.
struct Fields {
    /// `1 - Phi_00`.
    x: DMatrix<f64>,
    /// `Phi_11`.
    f11: DMatrix<f64>,
    higher: Option<Higher>,
}

/// Those that only the gradient needs.
struct Higher {
    f10: DMatrix<f64>,
    f01: DMatrix<f64>,
    f20: DMatrix<f64>,
    f02: DMatrix<f64>,
    f21: DMatrix<f64>,
    f12: DMatrix<f64>,
    f31: DMatrix<f64>,
    f13: DMatrix<f64>,
    f22: DMatrix<f64>,
}

/// The factor `(l_11, l_21, l_22)` of a covariance.
fn factor(covariance: [f64; 3]) -> [f64; 3] {
    let [c11, c12, c22] = covariance;
    let l11 = c11.max(0.0).sqrt();
    let l21 = if l11 > 0.0 { c12 / l11 } else { 0.0 };
    [l11, l21, (c22 - l21 * l21).max(0.0).sqrt()]
}

/// Nodes that the average over a law of scores takes: along `x`, and along `y`.
fn sizes(scores: &Scores, precision: Precision) -> (f64, f64) {
    let [l11, l21, l22] = factor(scores.covariance);
    let count =
        |slope: f64| if slope == 0.0 { 1.0 } else { 2.0 * precision.reach() / precision.normal_step(slope) + 1.0 };
    (count(l11.max(l21.abs())), count(l22))
}

impl Fields {
    /// Zeros in part once the budget's watch interrupts.
    fn new(u: &Laplace, v: &Laplace, scores: &Scores, precision: Precision, gradient: bool, budget: &Budget) -> Self {
        if gradient {
            Self::of::<4>(u, v, scores, precision, budget)
        } else {
            Self::of::<2>(u, v, scores, precision, budget)
        }
    }

    /// `KERNELS` is 2 for the loss, 4 with its gradient.
    fn of<const KERNELS: usize>(
        u: &Laplace,
        v: &Laplace,
        scores: &Scores,
        precision: Precision,
        budget: &Budget,
    ) -> Self {
        let [l11, l21, l22] = factor(scores.covariance);
        let (along, across) = (Normal::new(precision, l11.max(l21.abs())), Normal::new(precision, l22));
        let (nu, nv, nx) = (u.len(), v.len(), along.x.len());
        let offsets = |mean: f64, slope: f64| -> Vec<f64> { along.x.iter().map(|x| mean + slope * x).collect() };
        let mut one = table::<KERNELS>(u, &offsets(scores.mean[0], l11), Some(&along.weights), (&[0.0], &[1.0]));
        let two = smoothed::<KERNELS>(v, &offsets(scores.mean[1], l21), l22, &across);
        // 1 - Phi_00 = E[X_h] + E[e^{-a_h} X_h']: sums of positive terms.
        let plain = DVector::from_fn(nu, |i, _| (0..nx).map(|p| one[(p * KERNELS + X) * nu + i]).sum::<f64>());
        // Head one: kernel k as an nu x nx matrix, with e^{-a} in place of X.
        for (block, weight) in one.chunks_exact_mut(KERNELS * nu).zip(&along.weights) {
            block[..nu].iter_mut().for_each(|value| *value = weight - *value);
        }
        let kernel = |k: usize| DMatrixView::from_slice_with_strides(&one[k * nu..], nu, nx, 1, KERNELS * nu);
        // Head two: kernels side by side, in the order X, G_1, G_2, e^{-a}, G_3, so that what is needed is adjacent.
        let order: &[usize] = if KERNELS == 2 { &[0, 1] } else { &[0, 1, 2, 4, 3] };
        let mut second = DMatrix::zeros(nx, order.len() * nv);
        for (place, &k) in order.iter().enumerate() {
            for p in 0..nx {
                let source = &two[(p * KERNELS + if k == 4 { X } else { k }) * nv..][..nv];
                for (j, value) in source.iter().enumerate() {
                    second[(p, place * nv + j)] = if k == 4 { 1.0 - value } else { *value };
                }
            }
        }
        // Each may take a second.
        let product = |k: usize, from: usize, count: usize| {
            if budget.interrupted() {
                return DMatrix::zeros(u.len(), count * nv);
            }
            kernel(k) * second.columns(from * nv, count * nv)
        };
        let part = |all: &DMatrix<f64>, place: usize| all.columns(place * nv, nv).into_owned();
        let add_plain = |mut x: DMatrix<f64>| {
            x.column_iter_mut().for_each(|mut column| column += &plain);
            x
        };
        if KERNELS == 2 {
            return Self { x: add_plain(product(X, 0, 1)), f11: product(1, 1, 1), higher: None };
        }
        let (zero, one, two, three) = (product(X, 0, 3), product(1, 1, 4), product(2, 1, 3), product(3, 1, 1));
        Self {
            x: add_plain(part(&zero, 0)),
            f11: part(&one, 0),
            higher: Some(Higher {
                f01: part(&zero, 1),
                f02: part(&zero, 2),
                f12: part(&one, 1),
                f10: part(&one, 2),
                f13: part(&one, 3),
                f21: part(&two, 0),
                f22: part(&two, 1),
                f20: part(&two, 2),
                f31: three,
            }),
        }
    }
}

/// Derivatives in the mean and covariance of a law, from the adjoints of `Phi_00` and `Phi_11`.
fn contract(fields: &Fields, of_00: &DMatrix<f64>, of_11: &DMatrix<f64>) -> ([f64; 2], [f64; 3]) {
    let Some(higher) = &fields.higher else { return ([0.0; 2], [0.0; 3]) };
    let sum = |zero: &DMatrix<f64>, one: &DMatrix<f64>| of_00.dot(zero) + of_11.dot(one);
    (
        [sum(&higher.f10, &higher.f21), sum(&higher.f01, &higher.f12)],
        [0.5 * sum(&higher.f20, &higher.f31), sum(&fields.f11, &higher.f22), 0.5 * sum(&higher.f02, &higher.f13)],
    )
}

/// Components whose integrals share a lattice.
struct Group {
    members: Vec<usize>,
    ranges: [(f64, f64); 2],
}

impl Group {
    fn area(ranges: &[(f64, f64); 2]) -> f64 {
        ranges.iter().map(|(from, to)| to - from).product()
    }

    /// Work, in averages over one token on a unit of area: one for each component, one in common.
    fn cost(&self) -> f64 {
        Self::area(&self.ranges) * (1 + self.members.len()) as f64
    }

    fn with(&self, other: &Self) -> Self {
        Self {
            members: self.members.iter().chain(&other.members).copied().collect(),
            ranges: std::array::from_fn(|i| {
                let ((a, b), (c, d)) = (self.ranges[i], other.ranges[i]);
                (a.min(c), b.max(d))
            }),
        }
    }
}

/// Components in groups whose ranges overlap enough.
fn groups(ranges: Vec<[(f64, f64); 2]>) -> Vec<Group> {
    let mut all: Vec<Group> = Vec::new();
    for (index, ranges) in ranges.into_iter().enumerate() {
        let single = Group { members: vec![index], ranges };
        let best = (0..all.len())
            .map(|k| (all[k].with(&single).cost() - all[k].cost() - single.cost(), k))
            .min_by(|a, b| a.0.total_cmp(&b.0));
        match best {
            Some((saved, k)) if saved <= 0.0 => all[k] = all[k].with(&single),
            _ => all.push(single),
        }
    }
    all
}

/// The heads of a pair in the order that takes fewer nodes.
fn ordered(question: &Question, h: usize, k: usize) -> [usize; 2] {
    let cost = |heads| {
        let (along, across) = sizes(&question.scores(heads), question.precision);
        along * (1.0 + 0.1 * across)
    };
    if cost([h, k]) <= cost([k, h]) { [h, k] } else { [k, h] }
}

/// Multiplications that take as long as the kernels at one place.
const KERNEL: f64 = 20.0;

/// Most nodes along one score.
const MOST_NODES: f64 = 1e6;

/// What [`single`] or [`pair`] will take.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Work {
    /// Multiplications.
    pub multiplications: f64,
    /// Points of the largest lattice.
    pub points: f64,
    /// Bytes.
    pub bytes: f64,
}

impl Work {
    /// Of more nodes along a score than are counted one by one: with as many points `t`.
    fn beyond(nodes: f64) -> Self {
        Self { multiplications: KERNEL * nodes * nodes, points: nodes, bytes: 0.0 }
    }

    fn with(self, other: Self) -> Self {
        Self {
            multiplications: self.multiplications + other.multiplications,
            points: self.points.max(other.points),
            bytes: self.bytes.max(other.bytes),
        }
    }
}

/// What [`pair`] takes, for bounds on what is tried.
pub(super) fn work(question: &Question, h: usize, k: usize) -> Work {
    let heads = ordered(question, h, k);
    let plain = sizes(&question.scores(heads), question.precision);
    if !(plain.0.max(plain.1) <= MOST_NODES) {
        return Work::beyond(plain.0.max(plain.1));
    }
    let components = question.signals.components(&question.rows(heads), question.precision);
    let (reach, kernels) = (question.precision.reach(), if question.gradient { 4.0 } else { 2.0 });
    // Products of matrices, and matrices that are held at once.
    let (products, fields, adjoints) = if question.gradient { (11.0, 24.0, 2.0) } else { (2.0, 6.0, 0.0) };
    let of = |scores: &Scores, [u, v]: [f64; 2], range: (f64, f64)| {
        let (along, across) = sizes(scores, question.precision);
        let [_, l21, l22] = factor(scores.covariance);
        let (apart, places) = (spacing(l22), v * along);
        let nodes = (range.1 - range.0 + 2.0 * reach * l21.abs()) / apart + 2.0 * TAPS as f64;
        let smooth = l22 >= 1.0 && 3.0 * nodes <= places;
        let averages =
            if smooth { KERNEL * nodes * across + kernels * TAPS as f64 * places } else { KERNEL * places * across };
        Work {
            multiplications: products * u * along * v + KERNEL * u * along + averages,
            points: u * v,
            // Fields of a component and those in common, those that wait for each other, and the tables that they are made of.
            bytes: 8.0
                * (u * v * (2.0 * fields + adjoints * components.len() as f64) + 4.0 * kernels * along * (u + v)),
        }
    };
    let mut sum = Work::default();
    let mut common = Work::default();
    for component in &components {
        let relevant = question.relevant(heads, component);
        let signal = sizes(&relevant, question.precision);
        if !(signal.0.max(signal.1) <= MOST_NODES) {
            return Work::beyond(signal.0.max(signal.1));
        }
        let ranges = ranges(question, heads, component);
        if let Some((from, to)) = ranges.iter().find(|(from, to)| !(to - from <= LONGEST)) {
            return Work::beyond(to - from);
        }
        let lengths = question.lattices(heads, ranges).map(|lattice| lattice.len() as f64);
        sum = sum.with(of(&relevant, lengths, ranges[1]));
        if lengths[0] * lengths[1] >= common.points {
            common = of(&question.scores(heads), lengths, ranges[1]);
        }
    }
    sum.with(common)
}

/// Longest range of `ln u` that a lattice is made for: numbers of that size still hold ten digits of a score.
const LONGEST: f64 = 1e6;

/// The same for [`single`].
pub(super) fn single_work(question: &Question, h: usize) -> Work {
    let precision = question.precision;
    let (plain, _) = sizes(&question.scores([h, h]), precision);
    if !(plain <= MOST_NODES) {
        return Work::beyond(plain);
    }
    let components = question.signals.components(&question.rows([h, h]), precision);
    let mut sum = Work::default();
    for component in &components {
        let (background, relevant) = (question.scores([h, h]), question.relevant([h, h], component));
        let law = |s: &Scores| (s.mean[0], s.covariance[0]);
        let window = Window::of(question, h, law(&background), law(&relevant));
        let (signal, (from, to)) = match &window {
            Some(window) => (window.count(), window.range),
            None => (sizes(&relevant, precision).0, question.range(h, law(&background), Some(law(&relevant)))),
        };
        let points = (to - from) / step(question, h, window.as_ref()) + 1.0;
        // Five kernels of either kind of token, beside the lattice.
        sum = sum.with(Work {
            multiplications: KERNEL * points * (signal + plain),
            points: signal,
            bytes: 8.0 * 14.0 * points,
        });
    }
    sum
}

fn ranges(question: &Question, heads: [usize; 2], component: &Component) -> [(f64, f64); 2] {
    let (background, relevant) = (question.scores(heads), question.relevant(heads, component));
    let law = |s: &Scores, i: usize| (s.mean[i], s.covariance[2 * i]);
    std::array::from_fn(|i| question.range(heads[i], law(&background, i), Some(law(&relevant, i))))
}

/// The cross moment of two heads.
pub(super) fn pair(question: &Question, h: usize, k: usize) -> Contribution {
    let heads = ordered(question, h, k);
    let components = question.signals.components(&question.rows(heads), question.precision);
    let groups = groups(components.iter().map(|c| ranges(question, heads, c)).collect());
    let parts: Vec<Contribution> =
        groups.par_iter().map(|group| pair_in_group(question, heads, group, &components)).collect();
    let mut sum = Contribution::zero(heads, question.m.ncols());
    parts.iter().for_each(|p| sum.add(p));
    sum
}

fn pair_in_group(question: &Question, heads: [usize; 2], group: &Group, components: &[Component]) -> Contribution {
    let Question { precision, gradient, budget, .. } = *question;
    if budget.interrupted() {
        return Contribution::zero(heads, question.m.ncols());
    }
    let [u, v] = question.lattices(heads, group.ranges);
    let others = question.others();
    let plain = Fields::new(&u, &v, &question.scores(heads), precision, gradient, budget);
    let (leak_u, leak_v) = (leaks(&u, question.leaks[heads[0]]), leaks(&v, question.leaks[heads[1]]));
    // Weights of the sum times Phi_00^{L-1} and its first two derivatives: one logarithm and one exponential for all three.
    let [mut p, mut p1, mut p2] = [(); 3].map(|()| DMatrix::zeros(u.len(), v.len()));
    for j in 0..v.len() {
        for i in 0..u.len() {
            let x = plain.x[(i, j)];
            let (rest, scale) = (1.0 - x.min(1.0), u.weights[i] * v.weights[j] * leak_u[i] * leak_v[j]);
            if others > 1.0 {
                let base = scale * power(x, others - 2.0);
                p[(i, j)] = base * rest * rest;
                p1[(i, j)] = others * base * rest;
                p2[(i, j)] = others * (others - 1.0) * base;
            } else {
                p[(i, j)] = scale * rest;
                p1[(i, j)] = scale;
            }
        }
    }
    let weight = question.weights[1];
    let parts: Vec<(Contribution, Option<[DMatrix<f64>; 2]>)> = group
        .members
        .par_iter()
        .map(|&index| {
            if budget.interrupted() {
                return (Contribution::zero(heads, question.m.ncols()), None);
            }
            let component = &components[index];
            let signal = Fields::new(&u, &v, &question.relevant(heads, component), precision, gradient, budget);
            let absent = signal.x.map(|x| 1.0 - x);
            let mut part = Contribution::zero(heads, question.m.ncols());
            let relevant = p.component_mul(&signal.f11);
            let irrelevant = p1.component_mul(&absent);
            part.second = component.weight * (relevant.sum() + irrelevant.dot(&plain.f11));
            if !gradient {
                return (part, None);
            }
            let scale = component.weight * weight;
            let of_00 = p1.component_mul(&plain.f11) * scale;
            let (mean, covariance) = contract(&signal, &of_00, &(&p * scale));
            part.add_relevant(question, component, mean, covariance);
            let of_plain =
                (p1.component_mul(&signal.f11) + p2.component_mul(&plain.f11).component_mul(&absent)) * scale;
            (part, Some([of_plain, irrelevant * scale]))
        })
        .collect();
    let mut sum = Contribution::zero(heads, question.m.ncols());
    let mut adjoints: Option<[DMatrix<f64>; 2]> = None;
    for (part, [of_00, of_11]) in parts.iter().filter_map(|(p, a)| a.as_ref().map(|a| (p, a))) {
        sum.add(part);
        match &mut adjoints {
            Some([sum_00, sum_11]) => {
                *sum_00 += of_00;
                *sum_11 += of_11;
            }
            None => adjoints = Some([of_00.clone(), of_11.clone()]),
        }
    }
    if let Some([of_00, of_11]) = adjoints {
        let (mean, covariance) = contract(&plain, &of_00, &of_11);
        (0..2).for_each(|i| sum.b[i] += mean[i]);
        (0..3).for_each(|i| sum.r[i] += covariance[i]);
    } else {
        parts.iter().for_each(|(part, _)| sum.add(part));
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tails by the trapezoid rule, which is exact for a normal density; and known values.
    #[test]
    fn tails_of_the_normal_law() {
        assert_eq!((upper_tail(0.0), upper_tail(40.0), upper_tail(-40.0)), (0.5, 0.0, 1.0));
        // P(z > 1), P(z > 5) by 40-digit arithmetic.
        assert!((upper_tail(1.0) - 0.158_655_253_931_457_05).abs() < 2e-16);
        assert!((upper_tail(-1.0) - 0.841_344_746_068_542_9).abs() < 3e-16);
        assert!((upper_tail(5.0) - 2.866_515_718_791_939e-7).abs() < 2e-16);
    }

    /// What lies above a window is the rest of the same trapezoid sum, term by term.
    #[test]
    fn above_a_window_is_the_rest_of_the_sum() {
        for (mean, last) in [(0.0, 30.0), (-500.0, 4000.0), (900.0, -2100.0)] {
            let window = Window { mean, sigma: 1000.0, step: 0.3, places: (0.0, last), range: (0.0, 0.0) };
            // In parts, so that rounding of the sum stays below that of a few hundred terms.
            let part = |i: i32| -> f64 {
                let places = (1..=250).map(|k| last + f64::from(250 * i + k));
                places.map(|place| 0.3e-3 * density((place * 0.3 - mean) * 1e-3)).sum()
            };
            let rest: f64 = (0..240).map(part).sum();
            assert!((window.above() - rest).abs() < 1e-14, "{} {rest}", window.above());
        }
    }
}
