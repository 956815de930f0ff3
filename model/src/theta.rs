//! The hidden weights `theta ~ P_theta` on `R^F` (`theory/README.md` section 1).
//!
//! Every distribution is given as a map from a fixed number of independent uniforms on (0, 1),
//! so that pseudo-random and quasi-random points draw from the same law by the same code.

use std::cmp::Ordering;

use nalgebra::DMatrix;
use serde::{Deserialize, Serialize};

use crate::error::{Error, finite};
use crate::extremes::{largest_size, smallest};
use crate::random::normal_quantile;

/// Most features.
const MAX_FEATURES: usize = 1024;

/// Largest root mean square of a feature.
const MAX_SIGNAL: f64 = 1e6;

/// The distribution `P_theta` of the hidden weights.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Theta {
    /// `theta_f = +-nu_f` with independent fair signs ("flipping spikes").
    Flip {
        /// Signal of each feature, length `F`.
        nu: Vec<f64>,
    },
    /// `theta ~ N(mean, cov)`, with either standard deviations `sd` (diagonal) or a full `cov`.
    Gaussian {
        /// Mean, length `F`.
        mean: Vec<f64>,
        /// Standard deviation of each feature, length `F`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        sd: Option<Vec<f64>>,
        /// Covariance, `F x F`, symmetric positive semi-definite.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cov: Option<Vec<Vec<f64>>>,
    },
    /// Finite support.
    Discrete {
        /// Support points, each of length `F`.
        points: Vec<Vec<f64>>,
        /// Probability of each point; they sum to 1.
        weights: Vec<f64>,
    },
    /// Uniform on the sphere of radius `nu` in `R^F`.
    Sphere {
        /// Radius.
        nu: f64,
        /// Number of features `F`.
        features: usize,
    },
}

impl Theta {
    /// Number of features `F`.
    pub fn features(&self) -> usize {
        match self {
            Self::Flip { nu } => nu.len(),
            Self::Gaussian { mean, .. } => mean.len(),
            Self::Discrete { points, .. } => points.first().map_or(0, Vec::len),
            Self::Sphere { features, .. } => *features,
        }
    }

    /// Checks shapes and domains.
    ///
    /// # Errors
    /// Names the field of `theta` that is wrong.
    pub fn validate(&self) -> Result<(), Error> {
        let f = self.features();
        if f == 0 {
            return Err(Error::invalid("theta", "needs at least one feature"));
        }
        if f > MAX_FEATURES {
            return Err(Error::invalid("theta", format!("has {f} features, above the limit of {MAX_FEATURES}")));
        }
        self.check_shape(f)?;
        let size = largest_size((0..f).map(|i| self.product(i, i))).sqrt();
        // Not `size > MAX_SIGNAL`, which NaN passes.
        if !(size <= MAX_SIGNAL) {
            return Err(Error::invalid(
                "theta",
                format!(
                    "has features of size {size:.1e}; tokens are held in single precision, which ends the sense of it at {MAX_SIGNAL:.0e}"
                ),
            ));
        }
        Ok(())
    }

    fn check_shape(&self, f: usize) -> Result<(), Error> {
        match self {
            Self::Flip { nu } => nu.iter().try_for_each(|&v| finite("theta.nu", v)),
            Self::Gaussian { mean, sd, cov } => {
                mean.iter().try_for_each(|&v| finite("theta.mean", v))?;
                match (sd, cov) {
                    (Some(sd), None) => {
                        same_length("theta.sd", sd.len(), "theta.mean", f)?;
                        sd.iter().try_for_each(|&v| {
                            finite("theta.sd", v)?;
                            if v < 0.0 {
                                return Err(Error::invalid("theta.sd", format!("{v} is negative")));
                            }
                            Ok(())
                        })
                    }
                    (None, Some(cov)) => covariance_factor(cov, f).map(|_| ()),
                    _ => Err(Error::invalid(
                        "theta",
                        "a gaussian needs exactly one of \"sd\" (standard deviations) and \"cov\" (full covariance)",
                    )),
                }
            }
            Self::Discrete { points, weights } => {
                same_length("theta.weights", weights.len(), "theta.points", points.len())?;
                for point in points {
                    same_length("theta.points", point.len(), "its first point", f)?;
                    point.iter().try_for_each(|&v| finite("theta.points", v))?;
                }
                for &w in weights {
                    finite("theta.weights", w)?;
                    if w < 0.0 {
                        return Err(Error::invalid("theta.weights", format!("{w} is negative")));
                    }
                }
                let sum: f64 = weights.iter().sum();
                if !((sum - 1.0).abs() <= 1e-9) {
                    return Err(Error::invalid("theta.weights", format!("sum to {sum}, not to 1")));
                }
                Ok(())
            }
            Self::Sphere { nu, .. } => {
                finite("theta.nu", *nu)?;
                if *nu < 0.0 {
                    return Err(Error::invalid("theta.nu", format!("the radius {nu} is negative")));
                }
                Ok(())
            }
        }
    }

    /// Mean `E[theta]`, length `F`.
    pub fn mean(&self) -> Vec<f64> {
        match self {
            Self::Flip { nu } => vec![0.0; nu.len()],
            Self::Gaussian { mean, .. } => mean.clone(),
            Self::Discrete { points, weights } => {
                (0..self.features()).map(|f| points.iter().zip(weights).map(|(p, w)| w * p[f]).sum()).collect()
            }
            Self::Sphere { features, .. } => vec![0.0; *features],
        }
    }

    /// Second moment `E[theta theta^T]`, `F x F`.
    pub fn second_moment(&self) -> DMatrix<f64> {
        let f = self.features();
        DMatrix::from_fn(f, f, |i, j| self.product(i, j))
    }

    /// `E[theta_i theta_j]`.
    fn product(&self, i: usize, j: usize) -> f64 {
        match self {
            Self::Flip { nu } => {
                if i == j {
                    nu[i] * nu[i]
                } else {
                    0.0
                }
            }
            Self::Gaussian { mean, sd, cov } => {
                let spread = match (sd, cov) {
                    (_, Some(cov)) => cov[i][j],
                    (Some(sd), None) if i == j => sd[i] * sd[i],
                    _ => 0.0,
                };
                mean[i] * mean[j] + spread
            }
            // A point without weight adds nothing, however far away.
            Self::Discrete { points, weights } => {
                points.iter().zip(weights).filter(|(_, w)| **w > 0.0).map(|(p, w)| w * p[i] * p[j]).sum()
            }
            Self::Sphere { nu, features } => {
                if i == j {
                    nu * nu / *features as f64
                } else {
                    0.0
                }
            }
        }
    }

    /// Number of distinct points of positive probability, where it is finite: `2^F` for a flip with no zero signal.
    pub fn support(&self) -> Option<usize> {
        match self {
            Self::Flip { nu } => {
                let signs = nu.iter().filter(|v| **v != 0.0).count();
                u32::try_from(signs).ok().and_then(|signs| 2usize.checked_pow(signs))
            }
            Self::Discrete { points, weights } => {
                // Side by side when sorted; -0 is 0.
                let order = |a: &&[f64], b: &&[f64]| {
                    let pairs = a.iter().zip(*b).map(|(x, y)| (x + 0.0).total_cmp(&(y + 0.0)));
                    pairs.fold(Ordering::Equal, Ordering::then)
                };
                let mut distinct: Vec<&[f64]> =
                    points.iter().zip(weights).filter(|(_, w)| **w > 0.0).map(|(p, _)| &p[..]).collect();
                distinct.sort_unstable_by(order);
                distinct.dedup();
                Some(distinct.len())
            }
            Self::Gaussian { .. } | Self::Sphere { .. } => None,
        }
    }

    /// Prepares the map from uniforms to `theta`.
    ///
    /// # Errors
    /// As [`Theta::validate`].
    pub fn sampler(&self) -> Result<ThetaSampler, Error> {
        self.validate()?;
        let f = self.features();
        let map = match self {
            Self::Flip { nu } => Map::Flip(nu.clone()),
            Self::Gaussian { mean, sd, cov } => Map::Gaussian {
                mean: mean.clone(),
                factor: match (sd, cov) {
                    (_, Some(cov)) => covariance_factor(cov, f)?,
                    (sd, None) => DMatrix::from_fn(f, f, |i, j| match sd {
                        Some(sd) if i == j => sd[i],
                        _ => 0.0,
                    }),
                },
            },
            // The last point takes what rounding leaves of the weights: it must have some.
            Self::Discrete { points, weights } => {
                let with_weight = || points.iter().zip(weights).filter(|(_, w)| **w > 0.0);
                let mut sum = 0.0;
                Map::Discrete {
                    cumulative: with_weight()
                        .map(|(_, w)| {
                            sum += w;
                            sum
                        })
                        .collect(),
                    points: with_weight().map(|(p, _)| p.clone()).collect(),
                }
            }
            Self::Sphere { nu, .. } => Map::Sphere(*nu),
        };
        Ok(ThetaSampler { features: f, map })
    }
}

fn same_length(field: &str, got: usize, other: &str, expected: usize) -> Result<(), Error> {
    if got == expected {
        Ok(())
    } else {
        Err(Error::invalid(field, format!("has length {got} but {other} has length {expected}")))
    }
}

fn covariance_factor(cov: &[Vec<f64>], f: usize) -> Result<DMatrix<f64>, Error> {
    same_length("theta.cov", cov.len(), "theta.mean", f)?;
    for row in cov {
        same_length("theta.cov", row.len(), "theta.mean", f)?;
        row.iter().try_for_each(|&v| finite("theta.cov", v))?;
    }
    let matrix = DMatrix::from_fn(f, f, |i, j| cov[i][j]);
    if !(largest_size((&matrix - matrix.transpose()).iter()) <= 1e-12 * largest_size(matrix.iter())) {
        return Err(Error::invalid("theta.cov", "is not symmetric"));
    }
    // Eigenvectors rather than Cholesky: a covariance may be singular.
    let eigen = matrix.symmetric_eigen();
    let smallest = smallest(eigen.eigenvalues.iter());
    if !(smallest >= -1e-10 * largest_size(eigen.eigenvalues.iter())) {
        return Err(Error::invalid(
            "theta.cov",
            format!("has the eigenvalue {smallest:.6e} but must be positive semi-definite"),
        ));
    }
    let roots = eigen.eigenvalues.map(|v| v.max(0.0).sqrt());
    Ok(&eigen.eigenvectors * DMatrix::from_diagonal(&roots))
}

/// The map from independent uniforms on (0, 1) to `theta`; see [`Theta::sampler`].
#[derive(Debug, Clone)]
pub struct ThetaSampler {
    features: usize,
    map: Map,
}

#[derive(Debug, Clone)]
enum Map {
    Flip(Vec<f64>),
    Gaussian { mean: Vec<f64>, factor: DMatrix<f64> },
    Discrete { cumulative: Vec<f64>, points: Vec<Vec<f64>> },
    Sphere(f64),
}

impl ThetaSampler {
    /// Number of features `F`.
    pub fn features(&self) -> usize {
        self.features
    }

    /// Number of uniforms that one draw consumes.
    pub fn uniforms(&self) -> usize {
        match self.map {
            Map::Discrete { .. } => 1,
            _ => self.features,
        }
    }

    /// Maps [`ThetaSampler::uniforms`] uniforms to one `theta` of length `F`.
    pub fn sample(&self, uniforms: &[f64], theta: &mut [f64]) {
        match &self.map {
            Map::Flip(nu) => {
                for ((t, &n), &u) in theta.iter_mut().zip(nu).zip(uniforms) {
                    *t = if u < 0.5 { n } else { -n };
                }
            }
            Map::Gaussian { mean, factor } => {
                theta.copy_from_slice(mean);
                for (j, &u) in uniforms.iter().enumerate().take(self.features) {
                    let z = normal_quantile(u);
                    for (i, t) in theta.iter_mut().enumerate() {
                        *t += factor[(i, j)] * z;
                    }
                }
            }
            Map::Discrete { cumulative, points } => {
                let i = cumulative.partition_point(|&c| c <= uniforms[0]).min(points.len() - 1);
                theta.copy_from_slice(&points[i]);
            }
            Map::Sphere(nu) => {
                let mut square = 0.0;
                for (t, &u) in theta.iter_mut().zip(uniforms) {
                    *t = normal_quantile(u);
                    square += *t * *t;
                }
                let scale = if square > 0.0 { nu / square.sqrt() } else { 0.0 };
                theta.iter_mut().for_each(|t| *t *= scale);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::{Purpose, Stream};

    fn cases() -> Vec<Theta> {
        vec![
            Theta::Flip { nu: vec![1.8, 1.5] },
            Theta::Gaussian { mean: vec![1.0, 0.0], sd: Some(vec![0.5, 1.5]), cov: None },
            Theta::Gaussian { mean: vec![0.5, -1.0], sd: None, cov: Some(vec![vec![2.0, 0.6], vec![0.6, 0.5]]) },
            Theta::Discrete {
                points: vec![vec![1.0, 2.0], vec![-2.0, 0.0], vec![0.0, 1.0]],
                weights: vec![0.2, 0.5, 0.3],
            },
            Theta::Sphere { nu: 2.0, features: 3 },
        ]
    }

    /// Sampled first and second moments agree with the formulas within 4 standard errors.
    #[test]
    fn samples_have_the_stated_moments() {
        let n = 40_000;
        for theta in cases() {
            let f = theta.features();
            let sampler = theta.sampler().unwrap();
            let stream = Stream::new(7, Purpose::Task, 0);
            let (mut u, mut t) = (vec![0.0; sampler.uniforms()], vec![0.0; f]);
            let mut sums = vec![(0.0, 0.0); f + f * f];
            for k in 0..n {
                stream.uniforms(k, 0, &mut u);
                sampler.sample(&u, &mut t);
                for i in 0..f + f * f {
                    let v = if i < f { t[i] } else { t[(i - f) / f] * t[(i - f) % f] };
                    sums[i].0 += v;
                    sums[i].1 += v * v;
                }
            }
            let (mean, second) = (theta.mean(), theta.second_moment());
            for (i, (s, s2)) in sums.into_iter().enumerate() {
                let average = s / n as f64;
                let error = ((s2 / n as f64 - average * average).max(0.0) / n as f64).sqrt();
                let exact = if i < f { mean[i] } else { second[((i - f) / f, (i - f) % f)] };
                assert!(
                    (average - exact).abs() <= 4.0 * error + 1e-10,
                    "{theta:?} moment {i}: {average} against {exact} +- {error}"
                );
            }
        }
    }

    #[test]
    fn the_sphere_has_its_radius() {
        let sampler = Theta::Sphere { nu: 2.5, features: 4 }.sampler().unwrap();
        let mut theta = [0.0; 4];
        sampler.sample(&[0.1, 0.7, 0.3, 0.9], &mut theta);
        assert!((theta.iter().map(|t| t * t).sum::<f64>() - 6.25).abs() < 1e-12);
    }

    #[test]
    fn wrong_lengths_and_domains_are_refused() {
        let refused = [
            Theta::Flip { nu: vec![] },
            Theta::Flip { nu: vec![f64::NAN] },
            Theta::Gaussian { mean: vec![0.0, 1.0], sd: Some(vec![1.0]), cov: None },
            Theta::Gaussian { mean: vec![0.0], sd: None, cov: None },
            Theta::Gaussian { mean: vec![0.0], sd: Some(vec![-1.0]), cov: None },
            Theta::Gaussian { mean: vec![0.0; 2], sd: None, cov: Some(vec![vec![1.0, 2.0], vec![2.0, 1.0]]) },
            Theta::Discrete { points: vec![vec![1.0]], weights: vec![0.9] },
            Theta::Discrete { points: vec![vec![1.0], vec![1.0, 2.0]], weights: vec![0.5, 0.5] },
            Theta::Sphere { nu: -1.0, features: 2 },
        ];
        for theta in refused {
            assert!(theta.validate().is_err(), "{theta:?} was accepted");
        }
    }

    #[test]
    fn the_support_counts_distinct_points() {
        let support = |theta: Theta| theta.support();
        assert_eq!(support(Theta::Flip { nu: vec![2.0, 1.0] }), Some(4));
        assert_eq!(support(Theta::Flip { nu: vec![2.0, 0.0, 1.0] }), Some(4));
        let points = vec![vec![1.0], vec![2.0], vec![1.0], vec![3.0]];
        assert_eq!(support(Theta::Discrete { points, weights: vec![0.5, 0.25, 0.25, 0.0] }), Some(2));
        assert_eq!(support(Theta::Sphere { nu: 1.0, features: 2 }), None);
        // Many at once: the time is that of sorting.
        let points: Vec<Vec<f64>> = (0..100_000).map(|i| vec![f64::from(i % 50_000), -0.0]).collect();
        assert_eq!(support(Theta::Discrete { points, weights: vec![1e-5; 100_000] }), Some(50_000));
        let points = vec![vec![0.0], vec![-0.0]];
        assert_eq!(support(Theta::Discrete { points, weights: vec![0.5; 2] }), Some(1));
    }

    /// A point without weight is not there, wherever it is said to be: not in the moments, not in the samples.
    #[test]
    fn points_without_weight_are_not_there() {
        let of = |weights: Vec<f64>| Theta::Discrete { points: vec![vec![1.0], vec![-1.0], vec![1e200]], weights };
        let theta = of(vec![0.5, 0.499_999_999_5, 0.0]);
        assert!((theta.second_moment()[(0, 0)] - 1.0).abs() < 1e-9);
        let mut drawn = [0.0];
        theta.sampler().unwrap().sample(&[0.999_999_999_9], &mut drawn);
        assert_eq!(drawn, [-1.0]);
        assert!(of(vec![0.5, 0.25, 0.25]).validate().is_err());
    }
}
