//! What work will cost, estimated from all of its inputs before it begins, and the limits that it is held to.
//!
//! ```text
//! operations <= MOST_OPERATIONS   about ten seconds at 10^9 a second
//! bytes      <= MOST_BYTES        held at once, 1.5 GiB
//! ```
//!
//! In floating point: no count overflows, and a count that is not a number is refused like one that is too large.

use crate::Error;

/// The cost of a piece of work.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Cost {
    /// Elementary operations (one is a multiplication and an addition, or the like); an exponential counts as ten.
    pub operations: f64,
    /// Bytes held at once.
    pub bytes: f64,
}

impl Cost {
    /// Most operations of work that shows no progress and cannot be interrupted: about ten seconds of one core.
    pub const MOST_OPERATIONS: f64 = 1e10;

    /// Most operations of work that shows its progress and can be interrupted: a day of one core.
    pub const MOST_WATCHED_OPERATIONS: f64 = 1e14;

    /// Most bytes held at once: 1.5 GiB.
    pub const MOST_BYTES: f64 = 1.5 * (1u64 << 30) as f64;

    /// Refuses what is beyond the limits of work that shows no progress. `field` is what makes it so costly, `advice` what would be
    /// cheaper.
    ///
    /// # Errors
    /// [`Error::TooCostly`] above [`Cost::MOST_OPERATIONS`] or [`Cost::MOST_BYTES`], or where the cost is not a number.
    pub fn check(self, field: &str, advice: &str) -> Result<(), Error> {
        self.within(Self::MOST_OPERATIONS, Self::MOST_BYTES, field, advice)
    }

    /// The same for work that shows its progress and can be interrupted.
    ///
    /// # Errors
    /// [`Error::TooCostly`] above [`Cost::MOST_WATCHED_OPERATIONS`] or [`Cost::MOST_BYTES`], or where the cost is not a number.
    pub fn check_watched(self, field: &str, advice: &str) -> Result<(), Error> {
        self.within(Self::MOST_WATCHED_OPERATIONS, Self::MOST_BYTES, field, advice)
    }

    /// Refuses what is beyond the limits given.
    ///
    /// # Errors
    /// [`Error::TooCostly`].
    pub fn within(self, operations: f64, bytes: f64, field: &str, advice: &str) -> Result<(), Error> {
        for (needs, limit, unit) in [(self.bytes, bytes, "bytes"), (self.operations, operations, "operations")] {
            // Not `needs > limit`, which NaN passes.
            if !(needs <= limit) {
                return Err(Error::too_costly(
                    field,
                    format!("needs {needs:.1e} {unit}"),
                    format!("{limit:.1e}"),
                    advice,
                ));
            }
        }
        Ok(())
    }
}

/// One after the other: operations add, and so do the bytes, none of which are freed in between.
impl std::ops::Add for Cost {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { operations: self.operations + other.operations, bytes: self.bytes + other.bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limits_are_inclusive_and_nan_is_beyond_them() {
        let of = |operations, bytes| Cost { operations, bytes }.check("steps", "take fewer steps");
        assert_eq!(of(Cost::MOST_OPERATIONS, Cost::MOST_BYTES), Ok(()));
        for (operations, bytes) in
            [(2e10, 0.0), (0.0, 2.8e12), (f64::NAN, 0.0), (0.0, f64::NAN), (f64::INFINITY, 0.0), (0.0, f64::INFINITY)]
        {
            let error = of(operations, bytes).unwrap_err();
            assert!(matches!(error, Error::TooCostly { .. }), "{error}");
            assert!(!error.to_string().contains('\n'));
        }
        let message = of(0.0, 2.8e12).unwrap_err().to_string();
        assert_eq!(message, "steps: needs 2.8e12 bytes, above the limit of 1.6e9; take fewer steps");
    }

    #[test]
    fn watched_work_may_take_longer_but_not_more_memory() {
        let long = Cost { operations: 1e12, bytes: 0.0 };
        assert!(long.check("steps", "").is_err());
        assert_eq!(long.check_watched("steps", ""), Ok(()));
        assert!(Cost { operations: 0.0, bytes: 1e10 }.check_watched("steps", "").is_err());
        let sum = long + Cost { operations: 1.0, bytes: 2.0 };
        assert_eq!(sum, Cost { operations: 1e12 + 1.0, bytes: 2.0 });
    }
}
