//! `P_theta` as a mixture of Gaussians: points of the support, one Gaussian, or nodes on a sphere.
//!
//! Given a component with mean `mu` (and the common covariance `Sigma`), the scores of the relevant token
//! are Gaussian with mean `b + m mu` and covariance `r + m Sigma m^T`.

use headflow_model::{Error, Theta, larger, largest, largest_size};
use nalgebra::{DMatrix, DVector};

use super::lattice::Precision;

/// Most points of a support.
pub(crate) const MAX_SUPPORT: usize = 4096;

/// Largest Gauss rule, and most nodes on a sphere.
const MAX_RULE: usize = 300;
const MAX_NODES: f64 = 4000.0;

/// One component of the mixture.
#[derive(Debug, Clone)]
pub(crate) struct Component {
    pub weight: f64,
    /// Length `F`.
    pub mean: DVector<f64>,
}

/// Points and weights of a finite support, without points of weight zero and with equal points merged.
///
/// # Errors
/// When there are more than [`MAX_SUPPORT`] points.
pub(crate) fn support(theta: &Theta) -> Result<Option<Vec<Component>>, Error> {
    let mut points: Vec<Component> = match theta {
        Theta::Flip { nu } => {
            let free = nu.iter().filter(|v| **v != 0.0).count();
            if free >= usize::BITS as usize || 1usize << free > MAX_SUPPORT {
                return Err(Error::invalid(
                    "theta.nu",
                    format!(
                        "{free} flipping features have 2^{free} support points, above the limit of {MAX_SUPPORT}: use evaluator qmc"
                    ),
                ));
            }
            let signs = |index: usize| {
                let mut bit = 0;
                DVector::from_iterator(
                    nu.len(),
                    nu.iter().map(|&v| {
                        if v == 0.0 {
                            return 0.0;
                        }
                        bit += 1;
                        if index >> (bit - 1) & 1 == 0 { v } else { -v }
                    }),
                )
            };
            (0..1usize << free).map(|i| Component { weight: 1.0 / (1u64 << free) as f64, mean: signs(i) }).collect()
        }
        Theta::Discrete { points, weights } => points
            .iter()
            .zip(weights)
            .filter(|(_, w)| **w > 0.0)
            .map(|(point, &weight)| Component { weight, mean: DVector::from_column_slice(point) })
            .collect(),
        Theta::Sphere { nu, features: 1 } => {
            [1.0, -1.0].map(|s| Component { weight: 0.5, mean: DVector::from_element(1, s * nu) }).to_vec()
        }
        Theta::Sphere { nu, features } if *nu == 0.0 => {
            vec![Component { weight: 1.0, mean: DVector::zeros(*features) }]
        }
        _ => return Ok(None),
    };
    if points.len() > MAX_SUPPORT {
        return Err(Error::invalid(
            "theta.points",
            format!("{} support points are above the limit of {MAX_SUPPORT}: use evaluator qmc", points.len()),
        ));
    }
    // Weights that were given sum to 1 but for what a few digits leave.
    let total: f64 = points.iter().map(|point| point.weight).sum();
    if (total - 1.0).abs() > f64::EPSILON * points.len() as f64 {
        points.iter_mut().for_each(|point| point.weight /= total);
    }
    // -0 is 0.
    points.iter_mut().for_each(|point| point.mean.add_scalar_mut(0.0));
    points.sort_by(|a, b| {
        a.mean.iter().zip(&b.mean).map(|(x, y)| x.total_cmp(y)).find(|o| o.is_ne()).unwrap_or(std::cmp::Ordering::Equal)
    });
    let mut merged: Vec<Component> = Vec::with_capacity(points.len());
    for point in points {
        match merged.last_mut() {
            Some(last) if last.mean == point.mean => last.weight += point.weight,
            _ => merged.push(point),
        }
    }
    Ok(Some(merged))
}

/// Mean and covariance of a Gaussian `P_theta`.
pub(crate) fn gaussian(theta: &Theta) -> Option<(DVector<f64>, DMatrix<f64>)> {
    let Theta::Gaussian { mean, sd, cov } = theta else { return None };
    let f = mean.len();
    let covariance = match (sd, cov) {
        (_, Some(cov)) => DMatrix::from_fn(f, f, |i, j| 0.5 * (cov[i][j] + cov[j][i])),
        (Some(sd), None) => DMatrix::from_fn(f, f, |i, j| if i == j { sd[i] * sd[i] } else { 0.0 }),
        (None, None) => DMatrix::zeros(f, f),
    };
    Some((DVector::from_column_slice(mean), covariance))
}

/// What the scores of some heads see of `P_theta`: components, and their covariance if there is one.
#[derive(Debug, Clone)]
pub(crate) struct Signals {
    fixed: Option<Vec<Component>>,
    pub covariance: Option<DMatrix<f64>>,
    /// Radius and dimension, where nodes depend on the alignments.
    sphere: Option<(f64, usize)>,
}

impl Signals {
    /// # Errors
    /// When the support is too large.
    pub fn new(theta: &Theta) -> Result<Self, Error> {
        if let Some(fixed) = support(theta)? {
            return Ok(Self { fixed: Some(fixed), covariance: None, sphere: None });
        }
        if let Some((mean, covariance)) = gaussian(theta) {
            let covariance = Some(covariance).filter(|c| largest_size(c.iter()) > 0.0);
            return Ok(Self { fixed: Some(vec![Component { weight: 1.0, mean }]), covariance, sphere: None });
        }
        let Theta::Sphere { nu, features } = theta else {
            return Err(Error::invalid("theta", "is of a kind that the quadrature does not know"));
        };
        Ok(Self { fixed: None, covariance: None, sphere: Some((*nu, *features)) })
    }

    /// How many components there are, at most, for the two widest directions of `m`, or for all; none where a sphere needs more
    /// nodes than can be had.
    pub fn count(&self, m: &DMatrix<f64>, precision: Precision, all: bool) -> Option<f64> {
        let Some((nu, features)) = self.sphere else { return self.fixed.as_ref().map(|fixed| fixed.len() as f64) };
        let mut widths: Vec<f64> = m.transpose().svd(false, false).singular_values.iter().map(|s| nu * s).collect();
        widths.sort_by(|a, b| b.total_cmp(a));
        let directions = if all { features } else { features.min(2) };
        let mut total = 1.0;
        for (k, width) in widths.into_iter().take(directions).filter(|w| *w > 0.0).enumerate() {
            let nodes = nodes_for(width, precision);
            // Rules other than Chebyshev's take an eigenvalue problem of that size.
            if features - k != 2 && nodes > MAX_RULE {
                return None;
            }
            total *= nodes as f64;
        }
        (total <= MAX_NODES).then_some(total)
    }

    /// The law of the score of a key with alignments `m` to the signal alone: the largest size of its mean, and its variance.
    pub fn score(&self, m: &DVector<f64>) -> (f64, f64) {
        let mean = match (&self.fixed, self.sphere) {
            (_, Some((nu, _))) => nu * m.norm(),
            (Some(fixed), None) => fixed.iter().map(|c| m.dot(&c.mean).abs()).fold(0.0, larger),
            (None, None) => 0.0,
        };
        let variance = self.covariance.as_ref().map_or(0.0, |sigma| (m.transpose() * sigma * m)[(0, 0)]);
        (mean, variance)
    }

    /// Components as seen by heads with alignments `m` (`heads x F`), those with equal means of the scores
    /// merged.
    pub fn components(&self, m: &DMatrix<f64>, precision: Precision) -> Vec<Component> {
        let all = match (&self.fixed, self.sphere) {
            (Some(fixed), _) => fixed.clone(),
            (None, Some((nu, features))) => on_sphere(nu, features, m, precision),
            (None, None) => Vec::new(),
        };
        let mut keyed: Vec<(DVector<f64>, Component)> = all.into_iter().map(|c| (m * &c.mean, c)).collect();
        keyed.sort_by(|(a, _), (b, _)| {
            a.iter().zip(b).map(|(x, y)| x.total_cmp(y)).find(|o| o.is_ne()).unwrap_or(std::cmp::Ordering::Equal)
        });
        let mut merged: Vec<(DVector<f64>, Component)> = Vec::with_capacity(keyed.len());
        for (shift, component) in keyed {
            match merged.last_mut() {
                // Only the mean of theta enters the gradient, so merged components keep theirs.
                Some((last, into)) if *last == shift => {
                    let weight = into.weight + component.weight;
                    into.mean = (&into.mean * into.weight + component.mean * component.weight) / weight;
                    into.weight = weight;
                }
                _ => merged.push((shift, component)),
            }
        }
        merged.into_iter().map(|(_, c)| c).collect()
    }
}

/// Directions smaller than this fraction of the largest alignment are not followed on a sphere.
const NEGLIGIBLE: f64 = 1e-13;

/// Nodes on the sphere of radius `nu` in `R^F`, exact in the directions that the alignments span: the `k`-th
/// coordinate of what is left of the unit sphere, `F - k + 1` dimensional, has the density `(1 - c^2)^{(F - k - 2)/2}`.
fn on_sphere(nu: f64, features: usize, m: &DMatrix<f64>, precision: Precision) -> Vec<Component> {
    let svd = m.transpose().svd(true, false);
    let largest = largest(svd.singular_values.iter());
    let Some(u) = svd.u else { return Vec::new() };
    let mut order: Vec<usize> =
        (0..svd.singular_values.len()).filter(|&k| svd.singular_values[k] > NEGLIGIBLE * largest.max(1e-300)).collect();
    order.sort_by(|&i, &j| svd.singular_values[j].total_cmp(&svd.singular_values[i]));
    // (weight, what is left of the squared radius, direction)
    let mut nodes = vec![(1.0, 1.0f64, DVector::zeros(features))];
    for (k, &direction) in order.iter().enumerate() {
        let left = features - k;
        let axis = u.column(direction);
        let slope = nu * largest_size(m.row_iter().map(|row| (row * axis)[(0, 0)]));
        let rule = if left == 1 {
            vec![(-1.0, 0.5), (1.0, 0.5)]
        } else {
            gegenbauer((left as f64 - 3.0) / 2.0, nodes_for(slope, precision))
        };
        nodes = nodes
            .iter()
            .flat_map(|(weight, rest, vector)| {
                rule.iter().map(move |(c, w)| {
                    (weight * w, rest * (1.0 - c * c).max(0.0), vector + axis * (nu * c * rest.sqrt()))
                })
            })
            .collect();
    }
    nodes.into_iter().map(|(weight, _, mean)| Component { weight, mean }).collect()
}

/// Nodes of a Gauss rule for a function of `slope c`, analytic for `|Im slope c| < pi/2`.
fn nodes_for(slope: f64, precision: Precision) -> usize {
    // Narrower than numbers resolve beside 1, a function takes more nodes than anyone has.
    let width = (std::f64::consts::FRAC_PI_2 / slope.max(1e-3)).max(f64::EPSILON);
    let rate = 2.0 * (width + (1.0 + width * width).sqrt()).ln();
    (2.0 + precision.lambda / rate).ceil() as usize
}

/// Nodes and weights (sum 1) of the Gauss rule with weight `(1 - c^2)^exponent` on `[-1, 1]`, by the
/// eigenvalues of its recurrence (Golub and Welsch 1969).
pub(crate) fn gegenbauer(exponent: f64, count: usize) -> Vec<(f64, f64)> {
    let lambda = exponent + 0.5;
    let beta = |k: f64| k * (k + 2.0 * lambda - 1.0) / (4.0 * (k + lambda) * (k + lambda - 1.0));
    if lambda.abs() < 1e-12 {
        // Chebyshev's rule.
        let node = |k: usize| -((k as f64 + 0.5) * std::f64::consts::PI / count as f64).cos();
        return (0..count).map(|k| (node(k), 1.0 / count as f64)).collect();
    }
    let jacobi =
        DMatrix::from_fn(count, count, |i, j| if i.abs_diff(j) == 1 { beta(i.max(j) as f64).sqrt() } else { 0.0 });
    let eigen = jacobi.symmetric_eigen();
    let mut rule: Vec<(f64, f64)> =
        (0..count).map(|k| (eigen.eigenvalues[k], eigen.eigenvectors[(0, k)] * eigen.eigenvectors[(0, k)])).collect();
    rule.sort_by(|a, b| a.0.total_cmp(&b.0));
    rule
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRECISION: Precision = Precision { lambda: 28.0, tokens: 2.0 };

    #[test]
    fn gauss_rules_have_their_moments() {
        for exponent in [-0.5, 0.0, 0.5, 1.0, 3.5] {
            let rule = gegenbauer(exponent, 12);
            // E c^2 = 1 / (2 exponent + 3), E c^4 = 3 / ((2 exponent + 3) (2 exponent + 5)).
            let moment = |n: i32| rule.iter().map(|(c, w)| w * c.powi(n)).sum::<f64>();
            let n = 2.0 * exponent + 3.0;
            for (order, expected) in [(0, 1.0), (1, 0.0), (2, 1.0 / n), (4, 3.0 / (n * (n + 2.0)))] {
                assert!((moment(order) - expected).abs() < 1e-14, "exponent {exponent}, moment {order}");
            }
        }
    }

    /// `E e^{a . theta}` on the sphere depends on `|a|` alone, and is `sinh(x)/x` in three dimensions.
    #[test]
    fn spheres_have_their_characteristic_function() {
        let m = DMatrix::from_row_slice(2, 3, &[0.7, -0.3, 0.4, 0.2, 0.9, -0.5]);
        let theta = Theta::Sphere { nu: 1.7, features: 3 };
        let components = Signals::new(&theta).unwrap().components(&m, PRECISION);
        for a in [[1.0, 0.0], [0.0, 1.0], [0.6, -0.8]] {
            let a = m.transpose() * DVector::from_row_slice(&a);
            let average: f64 = components.iter().map(|c| c.weight * a.dot(&c.mean).exp()).sum();
            let x = 1.7 * a.norm();
            assert!((average - x.sinh() / x).abs() < 1e-12);
        }
        for features in [2, 3, 4, 7] {
            let theta = Theta::Sphere { nu: 1.3, features };
            let m = DMatrix::from_fn(2, features, |h, f| ((3 * h + 2 * f) as f64).sin());
            let components = Signals::new(&theta).unwrap().components(&m, PRECISION);
            let second = components.iter().fold(DMatrix::zeros(2, 2), |s, c| {
                let v = &m * &c.mean;
                s + &v * v.transpose() * c.weight
            });
            assert!(
                largest_size((second - &m * m.transpose() * (1.69 / features as f64)).iter()) < 1e-13,
                "{features}"
            );
        }
    }

    #[test]
    fn flips_merge_where_heads_do_not_see_them() {
        let theta = Theta::Flip { nu: vec![1.0, 2.0] };
        let signals = Signals::new(&theta).unwrap();
        let count = |m: &[f64]| signals.components(&DMatrix::from_row_slice(1, 2, m), PRECISION).len();
        assert_eq!((count(&[0.0, 0.0]), count(&[0.5, 0.0]), count(&[0.5, 0.3])), (1, 2, 4));
        assert!(Signals::new(&Theta::Flip { nu: vec![1.0; 40] }).is_err());
    }
}
