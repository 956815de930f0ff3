//! The exclusive projection and its gradient (model.md section 11):
//!
//! ```text
//! u = v / |v|,  c = y . u,  z = y - c u;           z = y where v = 0
//! dy = dz - (dz . u) u,     dv = -((dz . u) z + c dy) / |v|;      dv = 0 where v = 0
//! ```

use crate::real::Real;

/// Writes `v / |v|` and returns `|v|`; none for zero, and for values all of whose entries are below the
/// smallest normal number, which count as zero.
pub(crate) fn unit<T: Real>(value: &[T], direction: &mut [T]) -> Option<T> {
    let square = T::dot(value, value);
    let (scale, square) = if square > T::SAFE_SQUARE && square.is_finite() {
        (T::one(), square)
    } else {
        // A NaN stays one.
        let largest = value.iter().fold(T::zero(), |a, v| if a.is_nan() || v.abs() <= a { a } else { v.abs() });
        if largest < T::min_positive_value() {
            return None;
        }
        (largest, value.iter().fold(T::zero(), |sum, &v| sum + (v / largest) * (v / largest)))
    };
    let norm = square.sqrt();
    if scale == T::one() {
        let factor = T::one() / norm;
        direction.iter_mut().zip(value).for_each(|(u, &v)| *u = v * factor);
    } else {
        direction.iter_mut().zip(value).for_each(|(u, &v)| *u = v / scale / norm);
    }
    Some((scale * norm).min(T::max_value()))
}

/// Turns `y` into `z` and returns `c`, given `u`.
pub(crate) fn exclude<T: Real>(output: &mut [T], direction: &[T]) -> T {
    let along = T::dot(output, direction);
    output.iter_mut().zip(direction).for_each(|(y, &u)| *y = *y - along * u);
    along
}

/// Turns `scale y` into `z` and returns `c`; the same in one pass where it can be.
pub(crate) fn exclude_scaled<T: Real>(output: &mut [T], value: &[T], scale: T, direction: &mut [T]) -> T {
    if let Some(along) = T::project(output, value, scale) {
        return along;
    }
    output.iter_mut().for_each(|y| *y = *y * scale);
    unit(value, direction).map_or(T::zero(), |_| exclude(output, direction))
}

/// Turns `dz` into `dy` and adds to `dv`, given `u`, `|v|`, `z` and `c`. Entries of `dv` beyond the range of
/// `T`, which tiny values can have, end at its bounds.
pub(crate) fn exclude_gradient<T: Real>(
    gradient: &mut [T],
    direction: &[T],
    norm: T,
    output: &[T],
    along: T,
    to_value: &mut [T],
) {
    let slope = exclude(gradient, direction);
    for ((to, &z), &dy) in to_value.iter_mut().zip(output).zip(gradient.iter()) {
        let sum = *to - (slope * z + along * dy) / norm;
        let most = T::max_value();
        // Not with `min` and `max`, which make a bound of NaN.
        *to = if sum > most {
            most
        } else if sum < -most {
            -most
        } else {
            sum
        };
    }
}
