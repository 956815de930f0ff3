//! The Bayes risk (`theory/README.md` section 15; model.md section 8).
//!
//! ```text
//! p_l = w(x_l) / sum_l' w(x_l'),   w(x) = E_theta e^{theta . x - |theta|^2 / 2}
//! risk = 1 - E[p_eps] = E[sum_{l != eps} p_l],   identity: E[sum_l p_l^2] = E[p_eps]
//! ```
//!
//! The second form of the risk is what is computed: it does not cancel.
//!
//! The relevant token's `x_eps` has the density `w(x)` times that of the others, so only the law of
//! `lambda = ln w(x)` under a standard normal is needed. For a finite support it is that of bayes-softmax with one
//! head for each point; for flips and Gaussians `lambda` is a sum over independent coordinates; for the sphere
//! and isotropic Gaussians of mean zero it depends on `|x|` alone. All of these are summed on grids, to the
//! tolerance; a finite support that spans more than three directions by quasi-Monte Carlo, with its standard error.
//!
//! Nodes that only one kind of token meets tell it from all others, and are left out: of a part `W` of the law of the other
//! tokens, with `lambda`, and so a part `W e^lambda` of the relevant one's, the risk depends by
//!
//! ```text
//! at most (L-1) W E_eps[min(1, e^lambda / w_eps)] <= (L-1) W min(1, e^lambda),     since E_eps[1 / w_eps] <= 1,
//! and     W e^lambda min(1, (L-1) E[w] / e^lambda) <= (L-1) W min(1, e^lambda),    since E[w] = 1
//! ```
//!
//! so that grids stay as they are however large the signal, and `lambda`, with its rounding, stays below `Lambda + ln L`.
//! Likewise a support point `theta_h` matters by at most `(L-1) sqrt(p_h) e^{-|theta_h|^2/8}` (with `min(1, x) <= sqrt(x)` and
//! `E[sqrt(w)] <= 1`): far ones are left out. All together, as `x / (1 + x) <= sqrt(x) / 2`,
//!
//! ```text
//! risk <= (L-1) E[w_l / (w_l + w_eps)] <= (L-1)/2 E[sqrt(w)]^2 <= (L-1)/2 (sum_h sqrt(p_h) e^{-|theta_h|^2/8})^2
//! ```
//!
//! which is all there is to say where it is below the tolerance and a grid is too costly.

use std::f64::consts::PI;

use headflow_model::{Budget, Cost, Error, Task, Theta, larger, largest, largest_size, mean_and_error, smallest};
use nalgebra::{DMatrix, DVector};
use statrs::function::gamma::ln_gamma;

use crate::quadrature::lattice::Precision;
use crate::quadrature::shared::{self, Law, Rule};
use crate::quadrature::signals::{Component, gaussian, support};
use crate::quadrature::{POINTS_PER_TOKEN, PREFACTORS, SCRAMBLES, STANDARD_ERRORS, budgeted, check_tolerance, refined};

/// Points of a quasi-Monte Carlo rule.
const POINTS: usize = 1 << 14;

/// Width of the bins in which a law of `lambda` is condensed, and nodes that a bin keeps: what is averaged is analytic for
/// `|Im lambda| < pi/2`, so that a Gauss rule in a bin is off by about `(2 pi / BIN)^{-2 KEPT} = 1e-14`.
const BIN: f64 = 0.25;
const KEPT: usize = 5;

/// Added to `Lambda + ln L` for what is left out.
const MORE: f64 = 10.0;

/// `Lambda` where points are sampled.
const SAMPLED: f64 = 20.0;

/// Operations of a node that is put into its bin, and, on average, for each of its nodes that a bin is condensed with.
const BINNING: f64 = 100.0;

/// `-lambda` of a token that no other is mistaken for.
const NOTHING: f64 = 650.0;

/// Most nodes that are binned at once.
const MOST_BINNED: f64 = 1e7;

/// The Bayes risk of a task.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BayesRisk {
    /// `1 - E[p_eps]`: no attention has a smaller loss.
    pub risk: f64,
    /// `E[sum_l p_l^2] - E[p_eps]`, zero but for the error of the quadrature.
    pub identity: f64,
    /// Estimated error of the risk.
    pub error_estimate: f64,
}

/// The Bayes risk, to an absolute `tolerance` (1e-13 to 1e-2).
///
/// # Errors
/// When the tolerance is out of range, or cannot be met: says what was reached.
pub fn bayes_risk(task: &Task, tolerance: f64) -> Result<BayesRisk, Error> {
    let found = best_bayes_risk(task, tolerance)?;
    if found.error_estimate <= tolerance {
        return Ok(found);
    }
    Err(Error::invalid(
        "tolerance",
        format!(
            "{tolerance:.0e} cannot be met here: reached {:.1e} (Bayes risk {:.10}); ask for that",
            found.error_estimate, found.risk
        ),
    ))
}

/// The best that can be had, with its error, above the tolerance or not.
///
/// # Errors
/// When the tolerance is out of range.
pub fn best_bayes_risk(task: &Task, tolerance: f64) -> Result<BayesRisk, Error> {
    check_tolerance(tolerance)?;
    let weight = TokenWeight::of(task.theta());
    let tokens = task.length() as f64;
    let budget = Budget::new(Cost::MOST_OPERATIONS);
    let distance = |a: &Found, b: &Found| [(a.risk - b.risk).abs(), (a.identity - b.identity).abs()];
    let at = |lambda| budgeted(&budget, || weight.moments(Precision { lambda, tokens }, &budget));
    // Whatever rounding and quadrature did, a risk lies in its range, and may be put there where it is off by no more than its error.
    let found = |risk: f64, identity: f64, error_estimate: f64| {
        let nearest = risk.clamp(0.0, task.uniform_loss());
        let risk = if (risk - nearest).abs() <= error_estimate { nearest } else { risk };
        BayesRisk { risk, identity, error_estimate }
    };
    // The identity holds exactly, so what it is off by is an error too. Terms are positive, so that rounding is relative: half a unit
    // in the last place of the terms of lambda, and a few of the functions.
    let rounded = |(Found { risk, identity, size }, [error, _]): (Found, [f64; 2])| {
        let rounding = 1e-15 + f64::EPSILON * (size + 20.0) * risk;
        found(risk, identity, larger(error, identity.abs()) + rounding)
    };
    // Between 0 and a bound, in the middle.
    let half = 0.5 * weight.bound(tokens);
    let bounded = BayesRisk { risk: half, identity: 0.0, error_estimate: half };
    if let Some(best) = refined(tolerance, at, distance).map(rounded) {
        if best.error_estimate <= tolerance {
            return Ok(best);
        }
        if half <= tolerance {
            return Ok(bounded);
        }
        // Rounding needs a part of the tolerance.
        let finer = refined(0.5 * tolerance, at, distance).map(rounded);
        return Ok(finer.filter(|finer| finer.error_estimate < best.error_estimate).unwrap_or(best));
    }
    if half <= tolerance {
        return Ok(bounded);
    }
    if !weight.is_sampled() {
        budget.check(
            "theta",
            "use fewer features or support points, or a looser tolerance (each direction of theta multiplies the work)",
        )?;
    }
    // Fewer points than tokens do not hold the largest of those.
    if tokens * POINTS_PER_TOKEN > POINTS as f64 {
        return Err(Error::invalid(
            "theta",
            format!(
                "has too many support points in too many directions for the Bayes risk of {tokens} tokens: it is sampled above \
                 three directions, which needs at most {} tokens",
                POINTS as f64 / POINTS_PER_TOKEN
            ),
        ));
    }
    let precision = Precision { lambda: SAMPLED, tokens };
    let sampled = Budget::new(Cost::MOST_OPERATIONS);
    let all: Vec<Found> =
        (0..SCRAMBLES).map_while(|scramble| weight.sampled_moments(precision, scramble, &sampled)).collect();
    if all.len() < SCRAMBLES as usize {
        sampled.check("theta", "use fewer support points, or points in at most three directions")?;
        return Err(Error::invalid(
            "theta",
            "has signals too large, or too many support points, for the work that the Bayes risk may take",
        ));
    }
    let (risk, error) = mean_and_error(all.iter().map(|found| found.risk));
    let (identity, _) = mean_and_error(all.iter().map(|found| found.identity));
    let error_estimate = STANDARD_ERRORS * error + identity.abs() + PREFACTORS[0] * (-SAMPLED).exp();
    Ok(found(risk, identity, error_estimate))
}

/// What one rule gives.
#[derive(Debug, Clone, Copy)]
struct Found {
    risk: f64,
    identity: f64,
    /// Largest size of the terms of which a `lambda` is made.
    size: f64,
}

/// How `lambda = ln w(x)` is made.
enum TokenWeight {
    /// `lambda = ln sum_h p_h e^{theta_h . x - |theta_h|^2/2}`: points and probabilities.
    Points(Vec<(f64, DVector<f64>)>),
    /// A sum over coordinates.
    Separable(Vec<Factor>),
    /// A function of the radius in so many dimensions.
    Radial(usize, Radial),
}

/// One coordinate of `theta`, and its part of `lambda`.
#[derive(Debug, Clone, Copy)]
enum Factor {
    /// `+-nu`: `lambda = ln cosh(nu x) - nu^2/2`.
    Flip(f64),
    /// `N(mean, variance)`; mean and variance are known to rounding of numbers of the given sizes.
    Gaussian { mean: f64, variance: f64, sizes: [f64; 2] },
}

#[derive(Debug, Clone, Copy)]
enum Radial {
    /// The sphere of radius `nu`.
    Sphere(f64),
    /// `N(0, variance I)`.
    Gaussian(f64),
}

impl Factor {
    fn lambda(self, x: f64) -> f64 {
        match self {
            Self::Flip(nu) => {
                let a = (nu * x).abs();
                a + (-2.0 * a).exp().ln_1p() - std::f64::consts::LN_2 - 0.5 * nu * nu
            }
            Self::Gaussian { mean, variance, .. } => {
                (mean * x - 0.5 * mean * mean + 0.5 * variance * x * x) / (1.0 + variance) - 0.5 * variance.ln_1p()
            }
        }
    }

    fn slope(self, x: f64) -> f64 {
        match self {
            Self::Flip(nu) => nu * (nu * x).tanh(),
            Self::Gaussian { mean, variance, .. } => (mean + variance * x) / (1.0 + variance),
        }
    }

    fn symmetric(self) -> bool {
        match self {
            Self::Flip(_) => true,
            Self::Gaussian { mean, .. } => mean == 0.0,
        }
    }

    /// Largest size of the terms of a `lambda` that matters.
    fn size(self, reach: f64) -> f64 {
        match self {
            // Where it matters, nu x is about nu^2 / 2.
            Self::Flip(nu) => (nu * nu).min(nu.abs() * reach),
            Self::Gaussian { mean, variance, sizes } => {
                let terms = mean.abs() * reach + 0.5 * mean * mean + 0.5 * variance * reach * reach;
                (terms + sizes[0] * (reach + mean.abs()) + sizes[1] * reach * reach) / (1.0 + variance)
            }
        }
    }

    /// `(ln of weight, lambda)` of a trapezoid rule; the right half alone, doubled, where that is all there is. Only what matters:
    /// none where tokens are told apart for certain.
    fn rule(self, precision: Precision) -> Vec<(f64, f64)> {
        let to = farthest(precision);
        let from = if self.symmetric() { 0.0 } else { -to };
        let step = step(precision, from, to, |x| (self.slope(x), -0.5 * x * x + self.lambda(x).min(0.0)));
        let (first, last) = ((from / step).floor() as i64, (to / step).ceil() as i64);
        (first..=last)
            .map(|i| {
                let x = i as f64 * step;
                let copies: f64 = if self.symmetric() && i > 0 { 2.0 } else { 1.0 };
                ((copies * step / (2.0 * PI).sqrt()).ln() - 0.5 * x * x, self.lambda(x))
            })
            .filter(|node| matters(*node, precision))
            .collect()
    }
}

/// How far from 0 a coordinate may lie for its node to matter.
fn farthest(precision: Precision) -> f64 {
    (2.0 * (precision.of_token() + MORE)).sqrt()
}

/// Whether a node `(ln of weight, lambda)` matters to the risk, see above; at least for what other coordinates add.
fn matters((weight, lambda): (f64, f64), precision: Precision) -> bool {
    weight + lambda.min(0.0) > -precision.of_token() - MORE
}

/// The largest step that resolves `e^{-u e^lambda}` wherever it matters: `function` gives the slope of `lambda` and the logarithm
/// of the weight that a place has.
fn step(precision: Precision, from: f64, to: f64, function: impl Fn(f64) -> (f64, f64)) -> f64 {
    const PLACES: usize = 400;
    let steps =
        (0..=PLACES).map(|i| function(from + (to - from) * i as f64 / PLACES as f64)).filter_map(|(slope, weight)| {
            let left = precision.of_token() + weight;
            (left > 1.0).then(|| Precision { lambda: left, tokens: 1.0 }.normal_step(slope))
        });
    smallest(steps.chain([Precision { lambda: precision.of_token(), tokens: 1.0 }.normal_step(0.0)]))
}

impl Radial {
    /// `lambda` at radii, and the bound on its slope.
    fn lambda(self, dimension: usize, radius: f64) -> f64 {
        match self {
            Self::Gaussian(variance) => {
                0.5 * variance * radius * radius / (1.0 + variance) - 0.5 * dimension as f64 * variance.ln_1p()
            }
            Self::Sphere(nu) => log_average(dimension, nu * radius) - 0.5 * nu * nu,
        }
    }

    fn slope(self, radius: f64) -> f64 {
        match self {
            Self::Gaussian(variance) => variance * radius / (1.0 + variance),
            Self::Sphere(nu) => nu,
        }
    }

    /// Operations of a `lambda`: on a sphere two sums of a thousand exponentials, more where the density is narrow.
    fn operations(self, dimension: usize) -> f64 {
        match self {
            Self::Gaussian(_) => 100.0,
            Self::Sphere(_) => 2e4 * (dimension as f64 / 10.0).sqrt().max(1.0),
        }
    }

    /// Largest size of the terms of a `lambda` that matters.
    fn size(self, dimension: usize, reach: f64) -> f64 {
        match self {
            Self::Gaussian(variance) => {
                0.5 * variance * reach * reach / (1.0 + variance) + 0.5 * dimension as f64 * variance.ln_1p()
            }
            Self::Sphere(nu) => (nu * nu).min(nu * reach) + nu * reach,
        }
    }

    /// `(ln of weight, lambda)` on `radius = ln(1 + e^y)`, in `dimension` dimensions. Only what matters.
    fn rule(self, dimension: usize, precision: Precision, budget: &Budget) -> Option<Vec<(f64, f64)>> {
        let n = dimension as f64;
        let log_norm = (0.5 * n - 1.0) * std::f64::consts::LN_2 + ln_gamma(0.5 * n);
        let radius = |y: f64| if y > 30.0 { y } else { y.exp().ln_1p() };
        let log_density = |y: f64| {
            let radius = radius(y);
            (n - 1.0) * radius.ln() - 0.5 * radius * radius - log_norm - (-y).exp().ln_1p()
        };
        let (from, to) = (-precision.of_token() / n - 2.0, farthest(precision) + n.sqrt());
        let most = |y: f64| log_density(y) + self.lambda(dimension, radius(y)).min(0.0);
        // Softplus is analytic for |Im y| < pi, the density as narrow as a normal one.
        let step = step(precision, from, to, |y| (self.slope(radius(y)), most(y)))
            .min(2.0 * PI * PI / precision.of_token())
            .min(0.7 * Precision { lambda: precision.of_token(), tokens: 1.0 }.normal_step(0.0));
        budget.spend((to - from) / step * self.operations(dimension))?;
        let (first, last) = ((from / step).floor() as i64, (to / step).ceil() as i64);
        let nodes = (first..=last)
            .map(|i| i as f64 * step)
            .filter(|&y| matters((step.ln() + log_density(y), 0.0), precision))
            .map(|y| (step.ln() + log_density(y), self.lambda(dimension, radius(y))))
            .filter(|node| matters(*node, precision))
            .collect();
        Some(nodes)
    }
}

/// `ln E e^{kappa c}` for one coordinate `c` of the unit sphere in `R^dimension`, `c = tanh y` with the density
/// `sech^{dimension - 1} y`.
fn log_average(dimension: usize, kappa: f64) -> f64 {
    let power = dimension as f64 - 1.0;
    let step = 0.1 / (power / 10.0).sqrt().max(1.0);
    let reach = 40.0 / power.min(1.0).max(power.sqrt().min(1.0)) + 0.5 * (1.0 + kappa).ln();
    let last = (reach / step).ceil() as i64;
    let log_density = |y: f64| -power * (y.abs() + (-2.0 * y.abs()).exp().ln_1p() - std::f64::consts::LN_2);
    // tanh y - 1 without cancellation.
    let log_weight = |y: f64| log_density(y) - 2.0 * kappa / (1.0 + (2.0 * y).exp());
    let nodes = || (-last..=last).map(|i| i as f64 * step);
    let top = largest(nodes().map(log_weight));
    let above: f64 = nodes().map(|y| (log_weight(y) - top).exp()).sum();
    let below: f64 = nodes().map(|y| log_density(y).exp()).sum();
    kappa + top + (above / below).ln()
}

impl TokenWeight {
    fn of(theta: &Theta) -> Self {
        match theta {
            Theta::Flip { nu } => Self::Separable(nu.iter().filter(|v| **v != 0.0).map(|v| Factor::Flip(*v)).collect()),
            Theta::Sphere { nu, features: 1 } => Self::Separable(vec![Factor::Flip(*nu)]),
            Theta::Sphere { nu, features } if *features > 1 && *nu > 0.0 => {
                Self::Radial(*features, Radial::Sphere(*nu))
            }
            _ => match (gaussian(theta), support(theta)) {
                (Some((mean, covariance)), _) => Self::of_gaussian(&mean, covariance),
                (None, Ok(Some(points))) => Self::Points(points.into_iter().map(|c| (c.weight, c.mean)).collect()),
                // A support beyond the limit of a quadrature: every point, unmerged.
                _ => match theta {
                    Theta::Discrete { points, weights } => Self::Points(
                        points.iter().zip(weights).map(|(p, w)| (*w, DVector::from_column_slice(p))).collect(),
                    ),
                    _ => Self::Separable(Vec::new()),
                },
            },
        }
    }

    fn of_gaussian(mean: &DVector<f64>, covariance: DMatrix<f64>) -> Self {
        let independent = DMatrix::from_diagonal(&covariance.diagonal()) == covariance;
        let (mean, variances) = if independent {
            (mean.clone(), covariance.diagonal())
        } else {
            let eigen = covariance.symmetric_eigen();
            (eigen.eigenvectors.transpose() * mean, eigen.eigenvalues)
        };
        let largest = largest_size(variances.iter());
        // Smaller eigenvalues are rounding; variances that were given are not.
        let least = if independent { 0.0 } else { 1e-15 * largest };
        let factors: Vec<(f64, f64)> = mean
            .iter()
            .zip(&variances)
            .map(|(m, v)| (*m, if *v > least { *v } else { 0.0 }))
            .filter(|(m, v)| *m != 0.0 || *v > 0.0)
            .collect();
        let centered = factors.iter().all(|(m, _)| *m == 0.0);
        let equal = factors.iter().all(|(_, v)| (v - largest).abs() <= 1e-14 * largest);
        if centered && equal && factors.len() > 1 {
            return Self::Radial(factors.len(), Radial::Gaussian(largest));
        }
        // Of eigenvectors and eigenvalues, only what the largest leave is exact.
        let sizes = if independent { [0.0; 2] } else { [mean.norm(), largest] };
        let factor = |(mean, variance)| Factor::Gaussian { mean, variance, sizes };
        Self::Separable(factors.into_iter().map(factor).collect())
    }

    /// The bound on the risk of a finite support.
    fn bound(&self, tokens: f64) -> f64 {
        match self {
            Self::Points(points) => {
                let sum: f64 = points.iter().map(|(p, theta)| p.sqrt() * (-theta.norm_squared() / 8.0).exp()).sum();
                0.5 * (tokens - 1.0) * sum * sum
            }
            Self::Separable(_) | Self::Radial(..) => f64::INFINITY,
        }
    }

    /// Whether there is a rule of sampled points for what no grid can hold.
    fn is_sampled(&self) -> bool {
        matches!(self, Self::Points(_))
    }

    /// The risk on a grid; none where that has too many nodes.
    fn moments(&self, precision: Precision, budget: &Budget) -> Option<Found> {
        let reach = farthest(precision);
        match self {
            Self::Points(points) => by_points(points, precision, &Rule::Tensor, budget),
            Self::Separable(factors) => {
                // The law of a sum: one coordinate after the other, condensed in between.
                let mut nodes = vec![(0.0, 0.0)];
                for factor in factors {
                    let mut rule = factor.rule(precision);
                    let pairs = |rule: &[(f64, f64)]| nodes.len() as f64 * rule.len() as f64;
                    if pairs(&rule) > MOST_BINNED {
                        rule = condensed(rule.into_iter());
                    }
                    budget.spend(pairs(&rule) * BINNING)?;
                    let sums = nodes.iter().flat_map(|(w, l)| rule.iter().map(move |(a, b)| (w + a, l + b)));
                    nodes = condensed(sums.filter(|node| matters(*node, precision)));
                }
                let size = factors.iter().map(|factor| factor.size(reach)).sum();
                of_nodes(&nodes, size, precision, budget)
            }
            Self::Radial(dimension, radial) => {
                let size = radial.size(*dimension, reach + (*dimension as f64).sqrt());
                of_nodes(&radial.rule(*dimension, precision, budget)?, size, precision, budget)
            }
        }
    }

    /// The same by scramble `scramble` of a quasi-random sequence.
    fn sampled_moments(&self, precision: Precision, scramble: u32, budget: &Budget) -> Option<Found> {
        match self {
            Self::Points(points) => by_points(points, precision, &Rule::QuasiRandom(POINTS, scramble), budget),
            Self::Separable(_) | Self::Radial(..) => None,
        }
    }
}

/// The same law of `lambda` on fewer nodes `(ln of weight, lambda)`: in every bin those of the Gauss rule of what lies in it.
fn condensed(nodes: impl Iterator<Item = (f64, f64)>) -> Vec<(f64, f64)> {
    let mut bins = std::collections::BTreeMap::<i64, Vec<(f64, f64)>>::new();
    for (weight, lambda) in nodes {
        bins.entry((lambda / BIN).floor() as i64).or_default().push((weight, lambda));
    }
    bins.into_iter().flat_map(|(bin, nodes)| gauss_rule(nodes, (bin as f64 + 0.5) * BIN)).collect()
}

/// The [`KEPT`] nodes with the moments of `nodes`, around `center` (Stieltjes' recurrence, then Golub and Welsch 1969).
fn gauss_rule(nodes: Vec<(f64, f64)>, center: f64) -> Vec<(f64, f64)> {
    if nodes.len() <= KEPT {
        return nodes;
    }
    let top = largest(nodes.iter().map(|n| n.0));
    let points: Vec<(f64, f64)> = nodes.iter().map(|(w, l)| ((w - top).exp(), (l - center) / BIN)).collect();
    let mut polynomials = [vec![0.0; points.len()], vec![1.0; points.len()]];
    let mut jacobi = DMatrix::zeros(KEPT, KEPT);
    let (mut total, mut before) = (0.0, 0.0);
    let mut kept = 0;
    for k in 0..KEPT {
        let [last, this] = &polynomials;
        let norm: f64 = points.iter().zip(this).map(|((w, _), p)| w * p * p).sum();
        if k == 0 {
            total = norm;
        } else {
            // Fewer distinct nodes than the rule has.
            if norm <= 1e-26 * total {
                break;
            }
            jacobi[(k, k - 1)] = (norm / before).sqrt();
            jacobi[(k - 1, k)] = jacobi[(k, k - 1)];
        }
        let alpha = points.iter().zip(this).map(|((w, x), p)| w * x * p * p).sum::<f64>() / norm;
        let beta = if k == 0 { 0.0 } else { norm / before };
        jacobi[(k, k)] = alpha;
        let next =
            points.iter().zip(this.iter().zip(last)).map(|((_, x), (p, q))| (x - alpha) * p - beta * q).collect();
        polynomials = [this.clone(), next];
        before = norm;
        kept = k + 1;
    }
    let eigen = jacobi.view((0, 0), (kept, kept)).into_owned().symmetric_eigen();
    (0..kept)
        .filter(|&k| eigen.eigenvectors[(0, k)] != 0.0)
        .map(|k| {
            let weight = total * eigen.eigenvectors[(0, k)] * eigen.eigenvectors[(0, k)];
            (top + weight.ln(), center + BIN * eigen.eigenvalues[k])
        })
        .collect()
}

/// A finite support, as bayes-softmax with one head for each point that matters.
fn by_points(points: &[(f64, DVector<f64>)], precision: Precision, rule: &Rule, budget: &Budget) -> Option<Found> {
    let all = points.len() as f64;
    // ln of the bound on what a point matters to the risk, all of them together.
    let bound =
        |p: f64, theta: &DVector<f64>| precision.tokens.ln() + all.ln() + 0.5 * p.ln() - theta.norm_squared() / 8.0;
    let points: Vec<_> = points.iter().filter(|(p, theta)| bound(*p, theta) > -precision.lambda - MORE).collect();
    let Some((_, first)) = points.first() else { return Some(Found { risk: 0.0, identity: 0.0, size: 0.0 }) };
    let m = DMatrix::from_fn(points.len(), first.len(), |h, f| points[h].1[f]);
    budget.spend((points.len() * points.len() * first.len()) as f64)?;
    let r = &m * m.transpose();
    let b: Vec<f64> = points.iter().enumerate().map(|(h, (p, _))| p.ln() - 0.5 * r[(h, h)]).collect();
    let components: Vec<_> =
        points.iter().map(|(weight, mean)| Component { weight: *weight, mean: mean.clone() }).collect();
    let question = shared::Question {
        m: &m,
        r: &r,
        b: &b,
        components: &components,
        covariance: None,
        precision,
        weights: [0.0; 2],
        gradient: false,
    };
    let answer = shared::evaluate(&question, rule, budget)?;
    let longest = largest_size(r.diagonal().iter());
    let size = longest + longest.sqrt() * precision.reach() + b.iter().fold(0.0, |size, b| larger(size, b.abs()));
    Some(Found { risk: answer.missed, identity: answer.second - answer.first, size })
}

/// The risk of a law of `lambda` on nodes `(ln of weight, lambda)` of a token that is not relevant: those that matter.
fn of_nodes(nodes: &[(f64, f64)], size: f64, precision: Precision, budget: &Budget) -> Option<Found> {
    if nodes.is_empty() {
        return Some(Found { risk: 0.0, identity: 0.0, size: 0.0 });
    }
    let mut lambda: Vec<f64> = nodes.iter().map(|(_, l)| *l).collect();
    let weights: Vec<f64> = nodes.iter().map(|(w, l)| (w + l).exp()).collect();
    let relevant = Law { lambda: lambda.clone(), mass: weights.iter().sum(), weights };
    let mut weights: Vec<f64> = nodes.iter().map(|(w, _)| w.exp()).collect();
    // All other tokens weigh nothing beside the relevant one.
    lambda.push(-NOTHING);
    weights.push((1.0 - weights.iter().sum::<f64>()).max(0.0));
    let background = Law { lambda, weights, mass: 1.0 };
    let found = shared::shared(&background, &relevant, 0.0, [0.0; 2], precision, budget)?;
    Some(Found { risk: found.missed, identity: found.second - found.first, size })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(length: usize, theta: Theta) -> BayesRisk {
        bayes_risk(&Task::new(length, theta).unwrap(), 1e-11).unwrap()
    }

    /// The average over the sphere in closed form: cosh, Bessel's series, sinh.
    #[test]
    fn averages_on_spheres() {
        for kappa in [1e-3f64, 0.7, 5.0, 60.0] {
            let sinh = if kappa > 30.0 { kappa - (2.0 * kappa).ln() } else { (kappa.sinh() / kappa).ln() };
            assert!((log_average(3, kappa) - sinh).abs() < 1e-12 * kappa.max(1.0), "{kappa}");
            // I_0 by its power series.
            let mut term = 1.0;
            let mut sum = 1.0;
            for k in 1..200 {
                term *= kappa * kappa / 4.0 / f64::from(k * k);
                sum += term;
            }
            assert!((log_average(2, kappa) - sum.ln()).abs() < 1e-12 * kappa.max(1.0), "{kappa}");
        }
    }

    /// The same law written in different ways.
    #[test]
    fn different_routes_agree() {
        let flip = of(7, Theta::Flip { nu: vec![1.7, 0.9] });
        let points = [[1.7, 0.9], [1.7, -0.9], [-1.7, 0.9], [-1.7, -0.9]].map(|p| p.to_vec()).to_vec();
        let discrete = of(7, Theta::Discrete { points, weights: vec![0.25; 4] });
        assert!((flip.risk - discrete.risk).abs() < 1e-11, "{flip:?} {discrete:?}");
        let one = |theta| of(50, theta).risk;
        let sphere = one(Theta::Sphere { nu: 2.5, features: 1 });
        assert!((sphere - one(Theta::Flip { nu: vec![2.5] })).abs() < 1e-11);
        // A rotated covariance; nearly equal variances take the product grid, equal ones the radius.
        let radial = one(Theta::Gaussian { mean: vec![0.0; 2], sd: Some(vec![1.5; 2]), cov: None });
        let grid = one(Theta::Gaussian { mean: vec![0.0; 2], sd: Some(vec![1.5, 1.5 + 1e-12]), cov: None });
        assert!((radial - grid).abs() < 1e-10, "{radial} {grid}");
        let cov = vec![vec![2.0, 0.6], vec![0.6, 0.5]];
        let tilted = one(Theta::Gaussian { mean: vec![0.0; 2], sd: None, cov: Some(cov.clone()) });
        let eigen = DMatrix::from_fn(2, 2, |i, j| cov[i][j]).symmetric_eigenvalues();
        let straight =
            one(Theta::Gaussian { mean: vec![0.0; 2], sd: Some(vec![eigen[0].sqrt(), eigen[1].sqrt()]), cov: None });
        assert!((tilted - straight).abs() < 1e-11);
    }

    /// Without a signal every token is as likely; a known signal direction needs no features beyond it.
    #[test]
    fn limits() {
        assert!((of(8, Theta::Flip { nu: vec![0.0] }).risk - 0.875).abs() < 1e-12);
        assert!((of(8, Theta::Sphere { nu: 0.0, features: 3 }).risk - 0.875).abs() < 1e-12);
        assert!(of(8, Theta::Flip { nu: vec![12.0] }).risk < 1e-6);
        let one = of(8, Theta::Discrete { points: vec![vec![2.0]], weights: vec![1.0] }).risk;
        let padded = of(8, Theta::Discrete { points: vec![vec![0.0, 2.0]], weights: vec![1.0] }).risk;
        let narrow = of(8, Theta::Gaussian { mean: vec![2.0], sd: Some(vec![0.0]), cov: None }).risk;
        assert!((one - padded).abs() < 1e-12 && (one - narrow).abs() < 1e-11);
    }

    /// A support that spans many directions: quasi-Monte Carlo, against the flips that it is, and the tolerance is not missed in
    /// silence.
    #[test]
    fn sampling_agrees_with_the_grid() {
        let nu = [1.2, 1.0, 0.8, 0.9];
        let points: Vec<Vec<f64>> = (0..16)
            .map(|i| nu.iter().enumerate().map(|(f, v)| if i >> f & 1 == 0 { *v } else { -v }).collect())
            .collect();
        let exact = of(6, Theta::Flip { nu: nu.to_vec() }).risk;
        let task = Task::new(6, Theta::Discrete { points, weights: vec![1.0 / 16.0; 16] }).unwrap();
        let found = best_bayes_risk(&task, 1e-10).unwrap();
        assert!((found.risk - exact).abs() < 4.0 / 3.0 * found.error_estimate, "{found:?}, exactly {exact}");
        assert!(found.error_estimate < 1e-3);
        let message = bayes_risk(&task, 1e-12).unwrap_err().to_string();
        assert!(message.contains("reached") && !message.contains('\n'), "{message}");
        assert!(bayes_risk(&task, 5e-3).is_ok());
    }

    /// Condensing keeps the moments of every bin, and so any smooth average.
    #[test]
    fn condensing_keeps_averages() {
        let nodes: Vec<(f64, f64)> =
            (0..5000).map(|i| (-1e-3 * f64::from(i), (f64::from(i) * 0.37).sin() * 3.0)).collect();
        let few = condensed(nodes.iter().copied());
        assert!(few.len() < 150);
        for u in [0.01, 0.3, 2.0] {
            let sum = |nodes: &[(f64, f64)]| nodes.iter().map(|(w, l)| w.exp() * (-u * l.exp()).exp()).sum::<f64>();
            assert!((sum(&few) / sum(&nodes) - 1.0).abs() < 1e-13, "{u}");
        }
    }

    #[test]
    fn the_identity_holds_at_any_length() {
        for (length, theta) in [
            (2, Theta::Flip { nu: vec![1.0] }),
            (1_000_000_000, Theta::Flip { nu: vec![7.5] }),
            (100_000, Theta::Gaussian { mean: vec![1.0], sd: Some(vec![2.0]), cov: None }),
            (1000, Theta::Sphere { nu: 4.5, features: 4 }),
        ] {
            let found = of(length, theta);
            assert!(found.identity.abs() < 1e-11, "{found:?}");
            assert!(found.risk > 0.0 && found.risk < 1.0);
        }
    }
}
