//! Largest and smallest of many numbers, for decisions.
//!
//! ```text
//! max over nothing = -inf,   min over nothing = +inf,   any NaN among them: NaN
//! ```
//!
//! `f64::max` drops NaN: a maximum folded with it calls a drift that could not be computed "small", an
//! error estimate that is missing "converged". Here NaN stays NaN. A decision must then be a comparison that
//! NaN fails: `largest(drifts) <= tolerance` accepts, `!(largest(drifts) <= tolerance)` refuses; never
//! `largest(drifts) > tolerance` to refuse.

use std::borrow::Borrow;

/// The largest of `values`: NaN when one is NaN, `-inf` when there is none.
///
/// ```
/// use headflow_model::largest;
/// assert_eq!(largest([1.0, 3.0, 2.0]), 3.0);
/// assert!(largest([1.0, f64::NAN, 2.0]).is_nan());
/// assert_eq!(largest::<f64>([]), f64::NEG_INFINITY);
/// ```
#[inline]
pub fn largest<V: Borrow<f64>>(values: impl IntoIterator<Item = V>) -> f64 {
    values.into_iter().fold(f64::NEG_INFINITY, |a, b| larger(a, *b.borrow()))
}

/// The smallest of `values`: NaN when one is NaN, `+inf` when there is none.
///
/// ```
/// use headflow_model::smallest;
/// assert_eq!(smallest([1.0, 3.0, 2.0]), 1.0);
/// assert!(smallest([f64::NAN, 2.0]).is_nan());
/// ```
#[inline]
pub fn smallest<V: Borrow<f64>>(values: impl IntoIterator<Item = V>) -> f64 {
    -largest(values.into_iter().map(|v| -*v.borrow()))
}

/// The largest absolute value: NaN when one is NaN, 0 when there is none.
///
/// ```
/// use headflow_model::largest_size;
/// assert_eq!(largest_size([1.0, -3.0]), 3.0);
/// assert!(largest_size([f64::NAN, -3.0]).is_nan());
/// assert_eq!(largest_size::<f64>([]), 0.0);
/// ```
#[inline]
pub fn largest_size<V: Borrow<f64>>(values: impl IntoIterator<Item = V>) -> f64 {
    values.into_iter().fold(0.0, |a, b| larger(a, b.borrow().abs()))
}

/// The larger of two numbers, NaN when either is.
#[inline]
pub fn larger(a: f64, b: f64) -> f64 {
    // Nothing is above a NaN, so that `a` stays one.
    if b > a || b.is_nan() { b } else { a }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Wherever the NaN stands, it comes out; infinities are ordinary numbers.
    #[test]
    fn nan_is_never_dropped() {
        for place in 0..4 {
            let mut values = [1.0, -2.0, f64::INFINITY, f64::NEG_INFINITY];
            assert_eq!(largest(values), f64::INFINITY);
            assert_eq!(smallest(values), f64::NEG_INFINITY);
            assert_eq!(largest_size(&values[1..2]), 2.0);
            values[place] = f64::NAN;
            assert!(largest(values).is_nan() && smallest(values).is_nan() && largest_size(values).is_nan());
        }
        assert!(larger(f64::NAN, 1.0).is_nan() && larger(1.0, f64::NAN).is_nan());
        assert_eq!(smallest::<f64>([]), f64::INFINITY);
    }
}
