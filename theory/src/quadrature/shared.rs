//! bayes-softmax, and the Bayes posterior: one weight a token, one Laplace variable (`theory/README.md`
//! section 14).
//!
//! A token weighs `e^lambda`; for bayes-softmax `lambda = ln sum_h e^{s_h}`. With `Phi_k(t) = E[G_k(t + lambda)]`,
//! `Q = Phi_2 - Phi_1` and `a_l = g e^{lambda_l} / sum_l' e^{lambda_l'}`,
//!
//! ```text
//! E[a_eps]       = g   int dt (-Phi^eps_1) Phi_0^{L-1}
//! E[sum_l a_l^2] = g^2 int dt { Q^eps Phi_0^{L-1} + (L-1) Q Phi^eps_0 Phi_0^{L-2} }
//! ```
//!
//! The gradient goes back through the nodes of the law of `lambda`: with `h(lambda)` the derivative of the
//! objective in the weight of a node, `d/db_h = E[h' pi_h]` and
//! `d/dr_hh' = E[h'' pi_h pi_h' + h' (pi_h 1{h = h'} - pi_h pi_h')] / 2`, `pi_h = e^{s_h - lambda}`.

use headflow_model::random::{Purpose, Stream, normal_quantile};
use headflow_model::{Budget, largest, largest_size};
use nalgebra::{DMatrix, DVector};
use rayon::prelude::*;

use super::lattice::{LANES, Laplace, Normal, Precision, crossing, derivatives, log_average, power, table};
use super::signals::Component;
use crate::quasi_monte_carlo::fill_uniforms;

/// Largest rank of a tensor grid.
pub(crate) const TENSOR_RANK: usize = 3;

/// Most nodes of a tensor grid.
pub(crate) const MOST_NODES: f64 = 8e6;

/// Operations, as [`headflow_model::Cost`] counts them, of the kernels at one place: of the moments, and of the contraction for the
/// gradient.
const MOMENTS: f64 = 2.5;
const CONTRACTION: f64 = 5.0;

/// And of the exponential of a score.
const EXPONENTIAL: f64 = 10.0;

/// Nodes that are summed by one task: fixed, so that the bits do not depend on the number of threads.
const NODES_PER_TASK: usize = 4096;

/// Directions with less than this fraction of the largest standard deviation are not followed.
const NEGLIGIBLE: f64 = 1e-11;

/// Nodes of a standard normal vector.
#[derive(Debug, Clone)]
pub(crate) struct Nodes {
    rank: usize,
    /// `rank` numbers a node.
    pub z: Vec<f64>,
    pub weights: Vec<f64>,
}

impl Nodes {
    /// The product of one rule for each direction, without nodes that together weigh less than the precision.
    pub fn tensor(rules: &[Normal], precision: Precision) -> Self {
        let negligible = (-precision.of_token() - 3.0).exp();
        let (mut z, mut weights) = (Vec::new(), vec![1.0]);
        for (dimension, rule) in rules.iter().enumerate() {
            // Relative to the peak of the density, whatever the steps.
            let least = negligible * largest_size(&rule.weights) * peak(&rules[..dimension]);
            let (mut next_z, mut next_weights) = (Vec::new(), Vec::new());
            for (k, &weight) in weights.iter().enumerate() {
                for (x, w) in rule.x.iter().zip(&rule.weights) {
                    if weight * w >= least {
                        next_z.extend_from_slice(&z[k * dimension..(k + 1) * dimension]);
                        next_z.push(*x);
                        next_weights.push(weight * w);
                    }
                }
            }
            (z, weights) = (next_z, next_weights);
        }
        Self { rank: rules.len(), z, weights }
    }

    /// `count` points (a power of two, at most 2^16) of scramble `scramble` of a Sobol sequence.
    pub fn quasi_random(rank: usize, count: usize, scramble: u32) -> Self {
        let stream = Stream::new(0, Purpose::Points, scramble);
        let seed = stream.words(0, 0, 0)[0];
        let mut z = vec![0.0; rank * count];
        z.par_chunks_mut(rank.max(1)).enumerate().for_each(|(point, z)| {
            fill_uniforms(z, point, seed, &stream, point);
            z.iter_mut().for_each(|z| *z = normal_quantile(*z));
        });
        Self { rank, z, weights: vec![1.0 / count as f64; count] }
    }

    pub fn len(&self) -> usize {
        self.weights.len()
    }

    pub fn node(&self, index: usize) -> &[f64] {
        &self.z[index * self.rank..(index + 1) * self.rank]
    }
}

fn peak(rules: &[Normal]) -> f64 {
    rules.iter().map(|r| largest_size(&r.weights)).product()
}

/// The law of `lambda` for one token, on nodes.
#[derive(Debug, Clone)]
pub(crate) struct Law {
    pub lambda: Vec<f64>,
    pub weights: Vec<f64>,
    /// What the weights sum to: 1, but for a law of which only a part is asked for.
    pub mass: f64,
}

impl Law {
    /// `[X, G_1, ..]` averaged, each on the whole lattice; none once the budget's watch interrupts.
    fn averages<const KERNELS: usize>(&self, lattice: &Laplace, budget: &Budget) -> Option<Vec<f64>> {
        let parts: Vec<Vec<f64>> = self
            .lambda
            .par_chunks(NODES_PER_TASK)
            .zip(self.weights.par_chunks(NODES_PER_TASK))
            .map(|(lambda, weights)| {
                (!budget.interrupted()).then(|| table::<KERNELS>(lattice, &[0.0], None, (lambda, weights)))
            })
            .collect::<Option<_>>()?;
        let mut sum = vec![0.0; KERNELS * lattice.len()];
        for part in parts {
            sum.iter_mut().zip(part).for_each(|(s, p)| *s += p);
        }
        Some(sum)
    }

    /// The law on a few hundred bins, for finding where it lies.
    fn coarse(&self) -> (Vec<f64>, Vec<f64>) {
        const WIDTH: f64 = 0.5;
        let mut bins = std::collections::BTreeMap::<i64, f64>::new();
        for (l, w) in self.lambda.iter().zip(&self.weights) {
            *bins.entry((l / WIDTH).round() as i64).or_default() += w;
        }
        bins.into_iter().map(|(bin, w)| (bin as f64 * WIDTH, w)).unzip()
    }
}

/// Where `ln u` lies: see [`super::pairs`].
fn range(background: &(Vec<f64>, Vec<f64>), relevant: &(Vec<f64>, Vec<f64>), precision: Precision) -> (f64, f64) {
    let log_of_all = |t: f64| {
        let log = |(values, weights): &(Vec<f64>, Vec<f64>)| log_average(values, weights, t);
        log(relevant) + (precision.tokens - 1.0) * log(background)
    };
    let ends = |(values, _): &(Vec<f64>, Vec<f64>)| {
        (values.first().copied().unwrap_or(0.0), values.last().copied().unwrap_or(0.0))
    };
    let (one, two) = (ends(background), ends(relevant));
    let lambda = precision.lambda;
    let from = -(one.1.max(two.1) + precision.tokens.ln() + lambda + 1.0);
    let to = -one.0.min(two.0) + lambda.ln() + 1.0;
    let (first, _) = crossing(from, to, 0.5, |t| log_of_all(t) < -(-lambda).exp());
    let (_, last) = crossing(first, to, 0.5, |t| log_of_all(t) < -lambda);
    // Bins are half a unit wide.
    (first - 0.5, last + 0.5)
}

/// The two moments of `e^{lambda_l} / sum e^{lambda_l'}` (`g = 1`), and the adjoints for the gradient.
pub(crate) struct Shared {
    pub first: f64,
    pub second: f64,
    /// `E[sum_{l != eps} a_l] = (L-1) int dt (-Phi_1) Phi^eps_0 Phi_0^{L-2}`, a sum of positive terms: `1 - first` without
    /// cancellation.
    pub missed: f64,
    pub lattice: Laplace,
    /// Coefficients of `G_{k+1}` in `h'` for the relevant token, and for every other one.
    pub relevant: [Vec<f64>; 3],
    pub background: [Vec<f64>; 3],
}

/// Evaluates the moments; `weights` are those of the two in the objective, `sigma` the standard deviation of `lambda` if that is
/// normal, else 0: a sum over heads has an edge below however wide its terms are. None where that is beyond the budget.
pub(crate) fn shared(
    background: &Law,
    relevant: &Law,
    sigma: f64,
    weights: [f64; 2],
    precision: Precision,
    budget: &Budget,
) -> Option<Shared> {
    let (from, to) = range(&background.coarse(), &relevant.coarse(), precision);
    let step = precision.laplace_step(sigma);
    let nodes = (background.lambda.len() + relevant.lambda.len()) as f64;
    budget.spend(((to - from) / step + LANES as f64) * nodes * MOMENTS)?;
    let lattice = Laplace::new(step, from, to);
    let n = lattice.len();
    let (plain, signal) = (background.averages::<3>(&lattice, budget)?, relevant.averages::<3>(&lattice, budget)?);
    let others = precision.tokens - 1.0;
    let empty = || std::array::from_fn(|_| vec![0.0; n]);
    let mut answer = Shared { first: 0.0, second: 0.0, missed: 0.0, lattice, relevant: empty(), background: empty() };
    for i in 0..n {
        let [x, g1, g2] = std::array::from_fn(|k| plain[k * n + i]);
        let [ex, e1, e2] = std::array::from_fn(|k| signal[k * n + i]);
        let step = answer.lattice.weights[i];
        let (p, p1) = (step * power(x, others), step * others * power(x, others - 1.0));
        let p2 = if others > 1.0 { step * others * (others - 1.0) * power(x, others - 2.0) } else { 0.0 };
        let (q, eq, ey) = (g2 - g1, e2 - e1, relevant.mass - ex);
        answer.first += -e1 * p;
        answer.second += eq * p + q * ey * p1;
        // Rounding of a difference must not make a probability negative.
        answer.missed += -g1 * ey.max(0.0) * p1;
        let [first, second] = weights;
        let of_power = first * -e1 * p1 + second * (eq * p1 + q * ey * p2);
        let of_q = second * ey * p1;
        // d/ds of (of_power Y + of_q Q) is of_power G_1 + of_q (G_3 - G_2).
        answer.background[0][i] = of_power;
        answer.background[1][i] = -of_q;
        answer.background[2][i] = of_q;
        let (of_ey, of_e1, of_eq) = (second * q * p1, -first * p, second * p);
        answer.relevant[0][i] = of_ey;
        answer.relevant[1][i] = of_e1 - of_eq;
        answer.relevant[2][i] = of_eq;
    }
    Some(answer)
}

/// Scores of all heads on nodes: `s = mean + factor z`.
pub(crate) struct HeadScores {
    pub mean: DVector<f64>,
    /// `H x rank`.
    pub factor: DMatrix<f64>,
    /// Variance in the directions that are not followed: each has less than rounding leaves of the largest.
    pub dropped: f64,
}

impl HeadScores {
    /// Scores with the given mean and covariance, along its principal directions.
    pub fn new(mean: DVector<f64>, covariance: &DMatrix<f64>) -> Self {
        let heads = mean.len();
        let eigen = covariance.clone().symmetric_eigen();
        let mut order: Vec<usize> = (0..heads).collect();
        order.sort_by(|&i, &j| eigen.eigenvalues[j].total_cmp(&eigen.eigenvalues[i]));
        let size = |k: usize| eigen.eigenvalues[order[k]].max(0.0).sqrt();
        // Rounding of an eigenvalue is relative to the largest: its root is 1e-8 of the largest root.
        let noise = 4.0 * (heads as f64 * f64::EPSILON).sqrt();
        let rank = (0..heads).take_while(|&k| size(k) > size(0) * noise.max(NEGLIGIBLE) && size(k) > 0.0).count();
        let factor = DMatrix::from_fn(heads, rank, |h, k| eigen.eigenvectors[(h, order[k])] * size(k));
        let dropped = (rank..heads).map(|k| eigen.eigenvalues[order[k]].max(0.0)).sum();
        Self { mean, factor, dropped }
    }

    /// The same scores with another mean.
    fn with_mean(&self, mean: DVector<f64>) -> Self {
        Self { mean, factor: self.factor.clone(), dropped: self.dropped }
    }

    /// Nodes and weights of a product of rules, or none where there would be too many.
    pub fn tensor(&self, precision: Precision) -> Option<Nodes> {
        if self.factor.ncols() > TENSOR_RANK {
            return None;
        }
        let slopes = || self.factor.column_iter().map(|column| largest_size(column.iter()));
        if !(slopes().map(|slope| Normal::count(precision, slope)).product::<f64>() <= MOST_NODES) {
            return None;
        }
        let rules: Vec<Normal> = slopes().map(|slope| Normal::new(precision, slope)).collect();
        Some(Nodes::tensor(&rules, precision))
    }

    fn scores(&self, z: &[f64], scores: &mut [f64]) -> f64 {
        let heads = scores.len();
        scores.copy_from_slice(self.mean.as_slice());
        for (k, z) in z.iter().enumerate() {
            for h in 0..heads {
                scores[h] += self.factor[(h, k)] * z;
            }
        }
        let highest = largest(scores.iter());
        highest + scores.iter().map(|s| (s - highest).exp()).sum::<f64>().ln()
    }

    pub fn law(&self, nodes: &Nodes) -> Law {
        let lambda = (0..nodes.len())
            .into_par_iter()
            .with_min_len(256)
            .map_init(|| vec![0.0; self.mean.len()], |scores, i| self.scores(nodes.node(i), scores))
            .collect();
        Law { lambda, weights: nodes.weights.clone(), mass: 1.0 }
    }

    /// Derivatives of the objective in the mean (length `H`) and the covariance (`H x H`) of the scores; none once the
    /// budget's watch interrupts.
    pub fn gradient(
        &self,
        nodes: &Nodes,
        law: &Law,
        lattice: &Laplace,
        coefficients: &[Vec<f64>; 3],
        budget: &Budget,
    ) -> Option<(DVector<f64>, DMatrix<f64>)> {
        let heads = self.mean.len();
        let parts: Vec<(DVector<f64>, DMatrix<f64>)> = (0..nodes.len().div_ceil(NODES_PER_TASK))
            .into_par_iter()
            .map(|task| {
                if budget.interrupted() {
                    return None;
                }
                let from = task * NODES_PER_TASK;
                let to = (from + NODES_PER_TASK).min(nodes.len());
                let slopes = derivatives(lattice, coefficients, &law.lambda[from..to]);
                let (mut of_mean, mut of_covariance) = (DVector::zeros(heads), DMatrix::zeros(heads, heads));
                let mut pi = vec![0.0; heads];
                for (i, [one, two]) in (from..to).zip(slopes) {
                    let lambda = self.scores(nodes.node(i), &mut pi);
                    pi.iter_mut().for_each(|s| *s = (*s - lambda).exp());
                    let weight = nodes.weights[i];
                    for h in 0..heads {
                        of_mean[h] += weight * one * pi[h];
                        of_covariance[(h, h)] += 0.5 * weight * one * pi[h];
                        for k in 0..=h {
                            of_covariance[(h, k)] += 0.5 * weight * (two - one) * pi[h] * pi[k];
                        }
                    }
                }
                Some((of_mean, of_covariance))
            })
            .collect::<Option<_>>()?;
        let (mut of_mean, mut of_covariance) = (DVector::zeros(heads), DMatrix::zeros(heads, heads));
        for (mean, covariance) in parts {
            of_mean += mean;
            of_covariance += covariance;
        }
        for h in 0..heads {
            for k in 0..h {
                of_covariance[(k, h)] = of_covariance[(h, k)];
            }
        }
        Some((of_mean, of_covariance))
    }
}

/// Value and derivatives of the objective for one law of `theta`.
pub(crate) struct Answer {
    pub first: f64,
    pub second: f64,
    /// See [`Shared::missed`].
    pub missed: f64,
    /// See [`HeadScores::dropped`].
    pub dropped: f64,
    pub b: DVector<f64>,
    pub m: DMatrix<f64>,
    pub r: DMatrix<f64>,
}

/// What is asked of bayes-softmax.
pub(crate) struct Question<'a> {
    pub m: &'a DMatrix<f64>,
    pub r: &'a DMatrix<f64>,
    pub b: &'a [f64],
    pub components: &'a [Component],
    pub covariance: Option<&'a DMatrix<f64>>,
    pub precision: Precision,
    pub weights: [f64; 2],
    pub gradient: bool,
}

/// Nodes for the scores of a token.
pub(crate) enum Rule {
    Tensor,
    /// Points and scramble.
    QuasiRandom(usize, u32),
}

/// The averages over all components, or nothing where the grid would be too large or the budget does not allow them.
pub(crate) fn evaluate(question: &Question, rule: &Rule, budget: &Budget) -> Option<Answer> {
    let Question { m, r, precision, .. } = *question;
    let (heads, features) = m.shape();
    let (size, laws) = (heads as f64, 1.0 + question.components.len() as f64);
    // Principal directions.
    budget.spend(10.0 * size * size * size)?;
    let plain = HeadScores::new(DVector::from_column_slice(question.b), r);
    let signal = match question.covariance {
        Some(sigma) => HeadScores::new(plain.mean.clone(), &(r + m * sigma * m.transpose())),
        None => plain.with_mean(plain.mean.clone()),
    };
    let nodes_of = |scores: &HeadScores| match *rule {
        Rule::Tensor => scores.tensor(precision),
        Rule::QuasiRandom(count, scramble) => Some(Nodes::quasi_random(scores.factor.ncols(), count, scramble)),
    };
    let plain_nodes = nodes_of(&plain)?;
    let signal_nodes = if question.covariance.is_some() { nodes_of(&signal)? } else { plain_nodes.clone() };
    let nodes = plain_nodes.len().max(signal_nodes.len()) as f64;
    // Scores are a product with the factor, and an exponential each; the gradient takes them again, and their products.
    let of_score = plain.factor.ncols() as f64 + EXPONENTIAL;
    let again = if question.gradient { 2.0 * (of_score + size) } else { 0.0 };
    budget.spend(nodes * size * laws * (of_score + again))?;
    let background = plain.law(&plain_nodes);
    let sigma = if heads == 1 { plain.factor.norm() } else { 0.0 };
    let parts: Option<Vec<Answer>> = question
        .components
        .par_iter()
        .map(|component| {
            let shifted = signal.with_mean(&signal.mean + m * &component.mean);
            let relevant = shifted.law(&signal_nodes);
            let scale = question.weights.map(|w| w * component.weight);
            let found = shared(&background, &relevant, sigma, scale, precision, budget)?;
            let mut part = Answer {
                first: component.weight * found.first,
                second: component.weight * found.second,
                missed: component.weight * found.missed,
                dropped: component.weight * plain.dropped.max(signal.dropped),
                b: DVector::zeros(heads),
                m: DMatrix::zeros(heads, features),
                r: DMatrix::zeros(heads, heads),
            };
            if question.gradient {
                budget.spend(found.lattice.len() as f64 * 2.0 * nodes * CONTRACTION)?;
                let (b, r) = plain.gradient(&plain_nodes, &background, &found.lattice, &found.background, budget)?;
                let (eb, er) = shifted.gradient(&signal_nodes, &relevant, &found.lattice, &found.relevant, budget)?;
                part.m += &eb * component.mean.transpose();
                if let Some(covariance) = question.covariance {
                    part.m += &er * m * covariance * 2.0;
                }
                part.b += b + eb;
                part.r += r + er;
            }
            Some(part)
        })
        .collect();
    parts?.into_iter().reduce(|mut sum, part| {
        sum.first += part.first;
        sum.second += part.second;
        sum.missed += part.missed;
        sum.dropped += part.dropped;
        sum.b += part.b;
        sum.m += part.m;
        sum.r += part.r;
        sum
    })
}
