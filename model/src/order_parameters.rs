//! The order parameters of the keys (`theory/README.md` section 4).
//!
//! ```text
//! m_hf = k_h . k*_f  (H x F),   r_hh' = k_h . k_h'  (H x H),   b_h  (H)
//! r = r^T,   r - m m^T positive semi-definite
//! ```
//!
//! The part of the keys outside the spikes enters only through a factor `C C^T = r - m m^T`.

use nalgebra::DMatrix;

use crate::attention::Bias;
use crate::error::{Error, finite};
use crate::extremes::{largest_size, smallest};

/// Largest entry of `m` or `r`: scores of this size are beyond what the arithmetic resolves.
const LARGEST: f64 = 1e12;

/// Alignments, overlaps and biases of `H` heads with `F` features.
#[derive(Debug, Clone, PartialEq)]
pub struct OrderParameters {
    m: DMatrix<f64>,
    r: DMatrix<f64>,
    b: Vec<f64>,
}

/// Eigenvalues of `r - m m^T` down to this fraction of `tr r` below zero count as rounding.
const TOLERANCE: f64 = 1e-9;

impl OrderParameters {
    /// Checks shapes, finiteness, symmetry and positivity.
    ///
    /// # Errors
    /// When a shape does not fit, a number is not finite, `r` is not symmetric (to `1e-9` of its
    /// trace), or `r - m m^T` is not positive semi-definite (to the same).
    pub fn new(m: DMatrix<f64>, r: DMatrix<f64>, b: Vec<f64>) -> Result<Self, Error> {
        Self::named(["m", "r", "b"], m, r, b)
    }

    /// [`OrderParameters::new`] with the field names that an error should use.
    ///
    /// # Errors
    /// As [`OrderParameters::new`].
    pub fn named(names: [&str; 3], m: DMatrix<f64>, r: DMatrix<f64>, b: Vec<f64>) -> Result<Self, Error> {
        let heads = m.nrows();
        if heads == 0 || m.ncols() == 0 {
            return Err(Error::invalid(names[0], "needs at least one head and one feature"));
        }
        m.iter().try_for_each(|&v| finite(names[0], v))?;
        r.iter().try_for_each(|&v| finite(names[1], v))?;
        b.iter().try_for_each(|&v| finite(names[2], v))?;
        for (name, largest) in [(names[0], largest_size(m.iter())), (names[1], largest_size(r.iter()))] {
            if !(largest <= LARGEST) {
                return Err(Error::invalid(
                    name,
                    format!("has an entry of size {largest:.1e}, above the limit of {LARGEST:.0e}"),
                ));
            }
        }
        if r.shape() != (heads, heads) {
            return Err(Error::invalid(
                names[1],
                format!("is {} x {} but {} has {heads} heads", r.nrows(), r.ncols(), names[0]),
            ));
        }
        if b.len() != heads {
            return Err(Error::invalid(names[2], format!("has length {} but {} has {heads} heads", b.len(), names[0])));
        }
        let scale = r.trace().abs().max(f64::MIN_POSITIVE);
        if !(largest_size((&r - r.transpose()).iter()) <= TOLERANCE * scale) {
            return Err(Error::invalid(names[1], "is not symmetric"));
        }
        let r = (&r + r.transpose()) * 0.5;
        let eigenvalue = smallest((&r - &m * m.transpose()).symmetric_eigenvalues().iter());
        if !(eigenvalue >= -TOLERANCE * scale) {
            return Err(Error::ImpossibleOverlaps { field: format!("{}, {}", names[0], names[1]), eigenvalue });
        }
        Ok(Self { m, r, b })
    }

    /// Number of heads `H`.
    pub fn heads(&self) -> usize {
        self.m.nrows()
    }

    /// Number of features `F`.
    pub fn features(&self) -> usize {
        self.m.ncols()
    }

    /// Alignments, `H x F`.
    pub fn m(&self) -> &DMatrix<f64> {
        &self.m
    }

    /// Overlaps, `H x H`.
    pub fn r(&self) -> &DMatrix<f64> {
        &self.r
    }

    /// Biases, length `H`.
    pub fn b(&self) -> &[f64] {
        &self.b
    }

    /// The same keys without the others: the rows and columns `heads` of `m`, `r` and `b`, in that order.
    ///
    /// ```
    /// use headflow_model::OrderParameters;
    /// use nalgebra::DMatrix;
    /// let m = DMatrix::from_row_slice(3, 1, &[1.0, 2.0, 3.0]);
    /// let point = OrderParameters::new(m.clone(), &m * m.transpose(), vec![0.1, 0.2, 0.3])?;
    /// let rest = point.kept(&[0, 2])?;
    /// assert_eq!((rest.m()[(1, 0)], rest.r()[(0, 1)], rest.b()), (3.0, 3.0, &[0.1, 0.3][..]));
    /// # Ok::<(), headflow_model::Error>(())
    /// ```
    ///
    /// # Errors
    /// When `heads` is empty, names a head that does not exist, or one twice.
    pub fn kept(&self, heads: &[usize]) -> Result<Self, Error> {
        if heads.is_empty() {
            return Err(Error::invalid("heads", "at least one head must be kept"));
        }
        for (i, &h) in heads.iter().enumerate() {
            if h >= self.heads() || heads[..i].contains(&h) {
                let problem = if h >= self.heads() { "does not exist" } else { "is named twice" };
                return Err(Error::invalid("heads", format!("head {h} of {} (from 0) {problem}", self.heads())));
            }
        }
        // A principal submatrix of a positive semi-definite matrix is one: nothing to check again.
        Ok(Self {
            m: self.m.select_rows(heads),
            r: self.r.select_rows(heads).select_columns(heads),
            b: heads.iter().map(|&h| self.b[h]).collect(),
        })
    }

    /// A factor `C` (`H x H`, lower triangular) with `C C^T = r - m m^T`; eigenvalues that are
    /// negative by rounding count as zero.
    pub fn residual_factor(&self) -> DMatrix<f64> {
        let residual = &self.r - &self.m * self.m.transpose();
        // Only rounding counts as zero here: small keys beside large ones are kept.
        lower_factor(&residual, 1e-14 * self.r.trace().abs()).unwrap_or_else(|_| {
            // Positive semi-definite only to within rounding: project on the cone first.
            let eigen = residual.symmetric_eigen();
            let roots = eigen.eigenvalues.map(|v| v.max(0.0).sqrt());
            let root = &eigen.eigenvectors * DMatrix::from_diagonal(&roots);
            // root root^T = q^T q with q = root^T, so its R factor, transposed, is lower triangular.
            root.transpose().qr().r().transpose()
        })
    }
}

/// The biases that a rule gives at overlaps `r`, from the stored `b`.
pub fn biases(rule: Bias, r: &DMatrix<f64>, b: &[f64]) -> Vec<f64> {
    match rule {
        Bias::None => vec![0.0; b.len()],
        Bias::HalfNorm => (0..b.len()).map(|h| -0.5 * r[(h, h)]).collect(),
        Bias::Trained => b.to_vec(),
    }
}

/// A matrix is not positive semi-definite: the pivot that shows it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NotPositive {
    /// Index of the pivot.
    pub index: usize,
    /// Its value: below minus the tolerance, or not finite.
    pub pivot: f64,
}

/// The lower-triangular factor `C` of `S = C C^T` for a positive semi-definite, possibly singular
/// `S`: Cholesky, in which a pivot within `tolerance` of zero ends its column.
///
/// # Errors
/// When a pivot is below `-tolerance` or not finite, or a column below a vanishing pivot does not vanish.
pub fn lower_factor(s: &DMatrix<f64>, tolerance: f64) -> Result<DMatrix<f64>, NotPositive> {
    let n = s.nrows();
    let mut c = DMatrix::zeros(n, n);
    for j in 0..n {
        let pivot = s[(j, j)] - (0..j).map(|k| c[(j, k)] * c[(j, k)]).sum::<f64>();
        if !(pivot >= -tolerance && pivot.is_finite()) {
            return Err(NotPositive { index: j, pivot });
        }
        let column = |c: &DMatrix<f64>, i: usize| s[(i, j)] - (0..j).map(|k| c[(i, k)] * c[(j, k)]).sum::<f64>();
        if pivot <= tolerance {
            for i in j + 1..n {
                let rest = column(&c, i);
                if !(rest * rest <= 4.0 * tolerance * (s[(i, i)].abs() + tolerance)) {
                    return Err(NotPositive { index: j, pivot });
                }
            }
            continue;
        }
        let root = pivot.sqrt();
        c[(j, j)] = root;
        for i in j + 1..n {
            c[(i, j)] = column(&c, i) / root;
        }
    }
    Ok(c)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Any keys have admissible overlaps, and the factor reproduces them, singular or not.
        #[test]
        fn keys_have_order_parameters(
            heads in 1usize..6, features in 1usize..4, extra in 0usize..6,
            entries in prop::collection::vec(-2.0f64..2.0, 60),
        ) {
            let dimension = features + extra;
            let keys = DMatrix::from_fn(heads, dimension, |h, i| entries[h * dimension + i]);
            let m = keys.columns(0, features).into_owned();
            let point = OrderParameters::new(m, &keys * keys.transpose(), vec![0.0; heads]).unwrap();
            let c = point.residual_factor();
            let rebuilt = &c * c.transpose() + point.m() * point.m().transpose();
            prop_assert!(largest_size((rebuilt - point.r()).iter()) < 1e-7 * point.r().trace());
            for i in 0..heads {
                for j in i + 1..heads {
                    prop_assert_eq!(c[(i, j)], 0.0);
                }
            }
        }

        /// Shrinking a diagonal entry of a regular `r` below its limit is refused.
        #[test]
        fn impossible_overlaps_are_refused(m in prop::collection::vec(-1.0f64..1.0, 6), h in 0usize..3, excess in 1e-3f64..1.0) {
            let m = DMatrix::from_row_slice(3, 2, &m);
            let mut r = &m * m.transpose() + DMatrix::identity(3, 3) * 0.3;
            r[(h, h)] -= 0.3 + excess;
            prop_assert!(OrderParameters::new(m, r, vec![0.0; 3]).is_err());
        }
    }

    #[test]
    fn shapes_and_numbers_are_checked() {
        let (m, r) = (DMatrix::zeros(2, 1), DMatrix::identity(2, 2));
        assert!(OrderParameters::new(m.clone(), r.clone(), vec![0.0; 2]).is_ok());
        assert!(OrderParameters::new(m.clone(), r.clone(), vec![0.0; 3]).is_err());
        assert!(OrderParameters::new(m.clone(), DMatrix::identity(3, 3), vec![0.0; 2]).is_err());
        let mut lopsided = r.clone();
        lopsided[(0, 1)] = 0.1;
        assert!(OrderParameters::new(m.clone(), lopsided, vec![0.0; 2]).is_err());
        assert!(OrderParameters::new(m, r * f64::NAN, vec![0.0; 2]).is_err());
    }

    /// What is kept of keys are the order parameters of the kept keys.
    #[test]
    fn kept_heads_are_keys_of_their_own() {
        let keys = DMatrix::from_fn(4, 6, |h, i| ((3 * h + 5 * i) as f64).sin());
        let of = |keys: &DMatrix<f64>, b: &[f64]| {
            OrderParameters::new(keys.columns(0, 2).into_owned(), keys * keys.transpose(), b.to_vec()).unwrap()
        };
        let point = of(&keys, &[0.1, 0.2, 0.3, 0.4]);
        let rest = point.kept(&[3, 1]).unwrap();
        let direct = of(&keys.select_rows(&[3, 1]), &[0.4, 0.2]);
        assert!(
            largest_size((rest.m() - direct.m()).iter()) == 0.0 && largest_size((rest.r() - direct.r()).iter()) < 1e-14
        );
        assert_eq!(rest.b(), direct.b());
        for wrong in [&[][..], &[4], &[1, 1]] {
            assert!(point.kept(wrong).is_err(), "{wrong:?}");
        }
    }

    /// A key that is nearly off, beside a large one, keeps its size and its correlation.
    #[test]
    fn small_keys_are_not_dropped() {
        let r = DMatrix::from_row_slice(2, 2, &[1e-9, 3e-5, 3e-5, 1.0]);
        let point = OrderParameters::new(DMatrix::zeros(2, 1), r.clone(), vec![0.0; 2]).unwrap();
        let c = point.residual_factor();
        assert!(largest_size((&c * c.transpose() - r).iter()) < 1e-15);
    }

    #[test]
    fn a_vanishing_pivot_with_a_column_is_not_positive() {
        let s = DMatrix::from_row_slice(2, 2, &[0.0, 1.0, 1.0, 1.0]);
        assert!(lower_factor(&s, 1e-12).is_err());
    }

    /// A matrix with a number that is none has no factor, wherever it stands, under a vanishing pivot too.
    #[test]
    fn factors_of_what_is_no_number_are_refused() {
        for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            for pivot in [0.0, 1.0] {
                for at in [(0, 0), (1, 0), (1, 1), (2, 1), (2, 2)] {
                    let mut s = DMatrix::from_diagonal(&nalgebra::DVector::from_vec(vec![pivot, 1.0, 2.0]));
                    lower_factor(&s, 1e-12).unwrap();
                    s[at] = value;
                    assert!(lower_factor(&s, 1e-12).is_err(), "{value} at {at:?}, first pivot {pivot}");
                }
            }
            let (zero, one) = (DMatrix::zeros(1, 1), DMatrix::identity(1, 1));
            let spoiled = DMatrix::from_element(1, 1, value);
            assert!(OrderParameters::new(spoiled.clone(), one.clone(), vec![0.0]).is_err());
            assert!(OrderParameters::new(zero.clone(), spoiled, vec![0.0]).is_err());
            assert!(OrderParameters::new(zero, one, vec![value]).is_err());
        }
    }
}
