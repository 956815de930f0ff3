//! The Bayes risk (`theory/README.md` section 15; model.md section 8).
//!
//! ```text
//! p_l = w(x_l) / sum_l' w(x_l'),   w(x) = E_theta e^{theta . x - |theta|^2 / 2}
//! risk = 1 - E[p_eps],             identity: E[sum_l p_l^2] = E[p_eps]
//! ```
//!
//! The relevant token's `x_eps` has the density `w(x)` times that of the others, so only the law of
//! `lambda = ln w(x)` under a standard normal is needed. For a finite support it is that of bayes-softmax with one
//! head for each point; for flips and Gaussians `lambda` is a sum over independent coordinates; for the sphere
//! and isotropic Gaussians of mean zero it depends on `|x|` alone. All of these are summed on grids, to the
//! tolerance; a finite support that spans more than three directions by quasi-Monte Carlo, with its standard error.

use std::f64::consts::PI;

use headflow_model::{Error, Task, Theta, Unwatched, mean_and_error};
use nalgebra::{DMatrix, DVector};
use statrs::function::gamma::ln_gamma;

use crate::quadrature::lattice::Precision;
use crate::quadrature::shared::{self, Law, Rule};
use crate::quadrature::signals::{Component, gaussian, support};
use crate::quadrature::{POINTS_PER_TOKEN, SCRAMBLES, STANDARD_ERRORS, check_tolerance, refined};

/// Points of a quasi-Monte Carlo rule.
const POINTS: usize = 1 << 14;

/// Width of the bins in which a law of `lambda` is condensed, and nodes that a bin keeps: what is averaged is analytic for
/// `|Im lambda| < pi/2`, so that a Gauss rule in a bin is off by about `(2 pi / BIN)^{-2 KEPT} = 1e-14`.
const BIN: f64 = 0.25;
const KEPT: usize = 5;

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
    let distance = |a: &[f64; 2], b: &[f64; 2]| [(a[0] - b[0]).abs(), (a[1] - b[1]).abs()];
    let on_grid = refined(tolerance, |lambda| weight.moments(Precision { lambda, tokens }), distance);
    if let Some(([relevant, square], [error, _])) = on_grid {
        // The identity holds exactly, so what it is off by is an error too.
        let identity = square - relevant;
        return Ok(BayesRisk { risk: 1.0 - relevant, identity, error_estimate: error.max(identity.abs()) + 1e-15 });
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
    let precision = Precision { lambda: 20.0, tokens };
    let all: Vec<[f64; 2]> =
        (0..SCRAMBLES).filter_map(|scramble| weight.sampled_moments(precision, scramble)).collect();
    if all.len() < 2 {
        return Err(Error::invalid(
            "theta",
            "has signals too large, or too many support points, for the work that the Bayes risk may take",
        ));
    }
    let (relevant, error) = mean_and_error(all.iter().map(|m| m[0]));
    let (square, _) = mean_and_error(all.iter().map(|m| m[1]));
    let identity = square - relevant;
    let error_estimate = STANDARD_ERRORS * error + identity.abs();
    Ok(BayesRisk { risk: (1.0 - relevant).clamp(0.0, task.uniform_loss()), identity, error_estimate })
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
    /// `N(mean, variance)`.
    Gaussian { mean: f64, variance: f64 },
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
            Self::Gaussian { mean, variance } => {
                (mean * x - 0.5 * mean * mean + 0.5 * variance * x * x) / (1.0 + variance) - 0.5 * variance.ln_1p()
            }
        }
    }

    fn slope(self, x: f64) -> f64 {
        match self {
            Self::Flip(nu) => nu * (nu * x).tanh(),
            Self::Gaussian { mean, variance } => (mean + variance * x) / (1.0 + variance),
        }
    }

    fn symmetric(self) -> bool {
        match self {
            Self::Flip(_) => true,
            Self::Gaussian { mean, .. } => mean == 0.0,
        }
    }

    /// Where `x` lies, for the relevant token and the others.
    fn ends(self, precision: Precision) -> (f64, f64) {
        let reach = precision.reach();
        match self {
            Self::Flip(nu) => (-reach - nu.abs(), reach + nu.abs()),
            Self::Gaussian { mean, variance } => {
                let wide = reach * (1.0 + variance).sqrt();
                ((mean - wide).min(-reach), (mean + wide).max(reach))
            }
        }
    }

    /// `(ln of weight, lambda)` of a trapezoid rule; the right half alone, doubled, where that is all there is.
    fn rule(self, precision: Precision) -> Vec<(f64, f64)> {
        let (from, to) = self.ends(precision);
        let from = if self.symmetric() { 0.0 } else { from };
        let step = step(precision, from, to, |x| (self.slope(x), -0.5 * x * x + self.lambda(x).max(0.0)));
        let (first, last) = ((from / step).floor() as i64, (to / step).ceil() as i64);
        (first..=last)
            .map(|i| {
                let x = i as f64 * step;
                let copies: f64 = if self.symmetric() && i > 0 { 2.0 } else { 1.0 };
                ((copies * step / (2.0 * PI).sqrt()).ln() - 0.5 * x * x, self.lambda(x))
            })
            .collect()
    }
}

/// The largest step that resolves `e^{-u e^lambda}` wherever it matters: `function` gives the slope of `lambda` and the logarithm
/// of the weight that a place has.
fn step(precision: Precision, from: f64, to: f64, function: impl Fn(f64) -> (f64, f64)) -> f64 {
    const PLACES: usize = 400;
    (0..=PLACES)
        .map(|i| function(from + (to - from) * i as f64 / PLACES as f64))
        .filter_map(|(slope, weight)| {
            let left = precision.of_token() + weight;
            (left > 1.0).then(|| Precision { lambda: left, tokens: 1.0 }.normal_step(slope))
        })
        .fold(Precision { lambda: precision.of_token(), tokens: 1.0 }.normal_step(0.0), f64::min)
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

    fn end(self, dimension: usize, precision: Precision) -> f64 {
        let reach = precision.reach() + (dimension as f64).sqrt();
        match self {
            Self::Gaussian(variance) => reach * (1.0 + variance).sqrt(),
            Self::Sphere(nu) => reach + nu,
        }
    }

    /// `(ln of weight, lambda)` on `radius = ln(1 + e^y)`, in `dimension` dimensions.
    fn rule(self, dimension: usize, precision: Precision) -> Vec<(f64, f64)> {
        let n = dimension as f64;
        let log_norm = (0.5 * n - 1.0) * std::f64::consts::LN_2 + ln_gamma(0.5 * n);
        let radius = |y: f64| if y > 30.0 { y } else { y.exp().ln_1p() };
        let log_density = |y: f64| {
            let radius = radius(y);
            (n - 1.0) * radius.ln() - 0.5 * radius * radius - log_norm - (-y).exp().ln_1p()
        };
        let (from, to) = (-precision.of_token() / n - 2.0, self.end(dimension, precision));
        let most = |y: f64| log_density(y) + self.lambda(dimension, radius(y)).max(0.0);
        // Softplus is analytic for |Im y| < pi, the density as narrow as a normal one.
        let step = step(precision, from, to, |y| (self.slope(radius(y)), most(y)))
            .min(2.0 * PI * PI / precision.of_token())
            .min(0.7 * Precision { lambda: precision.of_token(), tokens: 1.0 }.normal_step(0.0));
        let (first, last) = ((from / step).floor() as i64, (to / step).ceil() as i64);
        (first..=last)
            .map(|i| {
                let y = i as f64 * step;
                (step.ln() + log_density(y), self.lambda(dimension, radius(y)))
            })
            .collect()
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
    let top = nodes().map(log_weight).fold(f64::NEG_INFINITY, f64::max);
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
        let eigen = covariance.symmetric_eigen();
        let mean = eigen.eigenvectors.transpose() * mean;
        let largest = eigen.eigenvalues.amax();
        let factors: Vec<(f64, f64)> = mean
            .iter()
            .zip(&eigen.eigenvalues)
            .map(|(m, v)| (*m, if *v > 1e-15 * largest { *v } else { 0.0 }))
            .filter(|(m, v)| *m != 0.0 || *v > 0.0)
            .collect();
        let centered = factors.iter().all(|(m, _)| *m == 0.0);
        let equal = factors.iter().all(|(_, v)| (v - largest).abs() <= 1e-14 * largest);
        if centered && equal && factors.len() > 1 {
            return Self::Radial(factors.len(), Radial::Gaussian(largest));
        }
        Self::Separable(factors.into_iter().map(|(mean, variance)| Factor::Gaussian { mean, variance }).collect())
    }

    /// `[E p_eps, E sum_l p_l^2]` on a grid; none where that has too many nodes.
    fn moments(&self, precision: Precision) -> Option<[f64; 2]> {
        match self {
            Self::Points(points) => by_points(points, precision, &Rule::Tensor),
            Self::Separable(factors) => {
                // The law of a sum: one coordinate after the other, condensed in between.
                let mut nodes = vec![(0.0, 0.0)];
                for factor in factors {
                    let rule = factor.rule(precision);
                    let sums = nodes.iter().flat_map(|(w, l)| rule.iter().map(move |(a, b)| (w + a, l + b)));
                    // Without what neither kind of token ever meets.
                    nodes = condensed(sums.filter(|(w, l)| w + l.max(0.0) > -precision.of_token() - 10.0));
                }
                of_nodes(&nodes, precision)
            }
            Self::Radial(dimension, radial) => of_nodes(&radial.rule(*dimension, precision), precision),
        }
    }

    /// The same by scramble `scramble` of a quasi-random sequence.
    fn sampled_moments(&self, precision: Precision, scramble: u32) -> Option<[f64; 2]> {
        match self {
            Self::Points(points) => by_points(points, precision, &Rule::QuasiRandom(POINTS, scramble)),
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
    let top = nodes.iter().map(|n| n.0).fold(f64::NEG_INFINITY, f64::max);
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

/// A finite support, as bayes-softmax with one head for each point.
fn by_points(points: &[(f64, DVector<f64>)], precision: Precision, rule: &Rule) -> Option<[f64; 2]> {
    let features = points.first()?.1.len();
    let m = DMatrix::from_fn(points.len(), features, |h, f| points[h].1[f]);
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
        watch: &Unwatched,
    };
    shared::evaluate(&question, rule).map(|answer| [answer.first, answer.second])
}

/// The moments of a law of `lambda` on nodes `(ln of weight, lambda)` of a token that is not relevant.
fn of_nodes(nodes: &[(f64, f64)], precision: Precision) -> Option<[f64; 2]> {
    let lambda: Vec<f64> = nodes.iter().map(|(_, l)| *l).collect();
    let background = Law { lambda: lambda.clone(), weights: nodes.iter().map(|(w, _)| w.exp()).collect() };
    let relevant = Law { lambda, weights: nodes.iter().map(|(w, l)| (w + l).exp()).collect() };
    let found = shared::shared(&background, &relevant, 0.0, [0.0; 2], precision, &Unwatched)?;
    Some([found.first, found.second])
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
