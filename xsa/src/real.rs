//! The two precisions, and `sum_j exp(s_j - shift)` on many lanes.

use std::fmt::{Debug, Display};

use headflow_model::exponential;
use multiversion::multiversion;
use num_traits::Float;

/// `f32` or `f64`.
pub trait Real: Float + Default + Debug + Display + Send + Sync + private::Sealed + 'static {
    /// Sums of squares above this lose no digits to numbers below the smallest normal one.
    const SAFE_SQUARE: Self;

    /// Replaces every score by `exp(score - shift)` and returns their sum. Scores are at most
    /// `shift`, up to rounding; minus infinity becomes zero.
    fn exponentials(scores: &mut [Self], shift: Self) -> Self;

    /// The largest of `scores`, minus infinity of none; NaNs may be passed over.
    fn largest(scores: &[Self]) -> Self;

    /// `sum_j a_j b_j`, by 16 partial sums at any vector width.
    fn dot(a: &[Self], b: &[Self]) -> Self;

    /// `y <- scale (y - (y . v / v . v) v)`; returns `scale y . v / |v|`. None, and nothing done, where a sum
    /// overflows, or `v . v` is so small that it loses digits.
    fn project(output: &mut [Self], value: &[Self], scale: Self) -> Option<Self>;

    /// The nearest number of this precision.
    fn of(value: f64) -> Self;

    /// The same number as `f64`.
    fn wide(self) -> f64;
}

mod private {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
}

/// Sums run over so many partial sums at every SIMD level, so that their bits do not depend on it.
const LANES: usize = 16;

/// `exp(x)` for `x <= 88`, to within 2 units in the last place; zero below -87, a NaN stays one.
#[inline(always)]
fn exp32(x: f32) -> f32 {
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Adding 1.5 * 2^23 leaves the nearest integer in the low bits of the mantissa.
    const ROUND: f32 = 12_582_912.0;
    const TAYLOR: [f32; 6] = [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0];
    let bounded = if x < -87.0 { -87.0 } else { x };
    let shifted = bounded.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, bounded));
    let mut q = 1.0 / 5040.0;
    for c in TAYLOR {
        q = r.mul_add(q, c);
    }
    let value = r.mul_add(q, 1.0) * f32::from_bits(shifted.to_bits().wrapping_add(127) << 23);
    if x < -87.0 { 0.0 } else { value }
}

/// As [`exponential::exp`], but zero at minus infinity.
#[inline(always)]
fn exp64(x: f64) -> f64 {
    let value = exponential::exp(x);
    if x < -708.0 { 0.0 } else { value }
}

macro_rules! kernels {
    ($real:ty, $exp:ident, $exponentials:ident, $largest:ident, $dot:ident, $project:ident) => {
        #[multiversion(targets(
            "x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl+avx2+fma+bmi1+bmi2",
            "x86_64+avx2+fma+bmi1+bmi2"
        ))]
        fn $exponentials(scores: &mut [$real], shift: $real) -> $real {
            let mut sums = [0.0; LANES];
            let (lanes, rest) = scores.as_chunks_mut::<LANES>();
            for lane in lanes {
                for k in 0..LANES {
                    lane[k] = $exp(lane[k] - shift);
                    sums[k] += lane[k];
                }
            }
            for (k, score) in rest.iter_mut().enumerate() {
                *score = $exp(*score - shift);
                sums[k] += *score;
            }
            sums.iter().sum()
        }

        #[multiversion(targets(
            "x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl+avx2+fma+bmi1+bmi2",
            "x86_64+avx2+fma+bmi1+bmi2"
        ))]
        fn $largest(scores: &[$real]) -> $real {
            let mut largest = [<$real>::NEG_INFINITY; LANES];
            let (lanes, rest) = scores.as_chunks::<LANES>();
            for lane in lanes {
                for k in 0..LANES {
                    largest[k] = if lane[k] > largest[k] { lane[k] } else { largest[k] };
                }
            }
            largest.iter().chain(rest).fold(<$real>::NEG_INFINITY, |a, &b| if b > a { b } else { a })
        }

        #[multiversion(targets(
            "x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl+avx2+fma+bmi1+bmi2",
            "x86_64+avx2+fma+bmi1+bmi2"
        ))]
        fn $dot(a: &[$real], b: &[$real]) -> $real {
            let mut sums = [0.0; LANES];
            let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
            for (a, b) in a.iter().zip(b) {
                for k in 0..LANES {
                    sums[k] = a[k].mul_add(b[k], sums[k]);
                }
            }
            for (k, (a, b)) in a_rest.iter().zip(b_rest).enumerate() {
                sums[k] = a.mul_add(*b, sums[k]);
            }
            sums.iter().sum()
        }

        #[multiversion(targets(
            "x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl+avx2+fma+bmi1+bmi2",
            "x86_64+avx2+fma+bmi1+bmi2"
        ))]
        fn $project(output: &mut [$real], value: &[$real], scale: $real) -> Option<$real> {
            let (mut squares, mut products) = ([0.0; LANES], [0.0; LANES]);
            let ((v, v_rest), (y, y_rest)) = (value.as_chunks::<LANES>(), output.as_chunks::<LANES>());
            for (v, y) in v.iter().zip(y) {
                for k in 0..LANES {
                    squares[k] = v[k].mul_add(v[k], squares[k]);
                    products[k] = v[k].mul_add(y[k], products[k]);
                }
            }
            for (k, (v, y)) in v_rest.iter().zip(y_rest).enumerate() {
                squares[k] = v.mul_add(*v, squares[k]);
                products[k] = v.mul_add(*y, products[k]);
            }
            let (square, product): ($real, $real) = (squares.iter().sum(), products.iter().sum());
            // Either sum can overflow, the second also where the first does not.
            if !(square > <$real>::SAFE_SQUARE && square.is_finite() && product.is_finite()) {
                return None;
            }
            let step = scale * (product / square);
            for (y, v) in output.iter_mut().zip(value) {
                *y = (-step).mul_add(*v, *y * scale);
            }
            Some(scale * product / square.sqrt())
        }

        impl Real for $real {
            const SAFE_SQUARE: Self = <$real>::MIN_POSITIVE / <$real>::EPSILON / <$real>::EPSILON;

            fn project(output: &mut [Self], value: &[Self], scale: Self) -> Option<Self> {
                $project(output, value, scale)
            }

            fn exponentials(scores: &mut [Self], shift: Self) -> Self {
                $exponentials(scores, shift)
            }

            fn largest(scores: &[Self]) -> Self {
                $largest(scores)
            }

            fn dot(a: &[Self], b: &[Self]) -> Self {
                $dot(a, b)
            }

            fn of(value: f64) -> Self {
                value as Self
            }

            fn wide(self) -> f64 {
                f64::from(self)
            }
        }
    };
}

kernels!(f32, exp32, exponentials32, largest32, dot32, project32);
kernels!(f64, exp64, exponentials64, largest64, dot64, project64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponentials_agree_with_the_standard_library() {
        for k in -870_000..=10_000 {
            let x = k as f32 * 1e-4;
            let exact = f64::from(x).exp();
            assert!((f64::from(exp32(x)) - exact).abs() <= 2.5e-7 * exact, "exp({x})");
        }
        assert_eq!(exp32(0.0), 1.0);
        assert_eq!((exp32(f32::NEG_INFINITY), exp64(f64::NEG_INFINITY)), (0.0, 0.0));
        assert!(exp32(f32::NAN).is_nan() && exp64(f64::NAN).is_nan());
    }

    #[test]
    fn rows_of_any_length() {
        for length in 0..70 {
            let scores: Vec<f64> = (0..length).map(|k| f64::from(k * 37 % 11) - 11.0).collect();
            let mut row = scores.clone();
            let sum = f64::exponentials(&mut row, 1.0);
            let slow: Vec<f64> = scores.iter().map(|s| (s - 1.0).exp()).collect();
            assert!((sum - slow.iter().sum::<f64>()).abs() < 1e-14, "{length}");
            assert!(row.iter().zip(&slow).all(|(a, b)| (a - b).abs() < 1e-15));
            let largest = headflow_model::largest(&scores);
            assert_eq!(f64::largest(&scores), largest);
            let dot: f64 = scores.iter().zip(&slow).map(|(a, b)| a * b).sum();
            assert!((f64::dot(&scores, &slow) - dot).abs() < 1e-13);
        }
    }
}
