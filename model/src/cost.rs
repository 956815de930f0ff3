//! What work will cost, estimated from all of its inputs before it begins, and the limits that it is held to.
//!
//! ```text
//! operations <= MOST_OPERATIONS   about ten seconds at 10^9 a second
//! bytes      <= MOST_BYTES        held at once, 1.5 GiB
//! ```
//!
//! In floating point: no count overflows, and a count that is not a number is refused like one that is too large.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::{Error, Unwatched, Watch};

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

/// What may still be spent on work whose cost shows only piece by piece.
///
/// Counts are whole operations, so that sums of pieces done in parallel do not depend on their order: where all pieces together fit,
/// none is refused, and where they do not, one is. Nothing more is spent once its watch interrupts.
pub struct Budget<'a> {
    watch: &'a dyn Watch,
    limit: f64,
    spent: AtomicU64,
    /// Bits of the most that was asked for in vain (bits of positive numbers are ordered like them).
    refused: AtomicU64,
}

impl Budget<'static> {
    /// A budget of so many operations.
    pub fn new(operations: f64) -> Self {
        Self::watched(operations, &Unwatched)
    }
}

impl<'a> Budget<'a> {
    /// The same for work that `watch` may interrupt.
    pub fn watched(operations: f64, watch: &'a dyn Watch) -> Self {
        Self { watch, limit: operations, spent: AtomicU64::new(0), refused: AtomicU64::new(0) }
    }

    /// Whether the work should stop: whatever it gives then is not looked at.
    pub fn interrupted(&self) -> bool {
        self.watch.interrupted()
    }

    /// Spends `operations`; none, and nothing is spent, where that is beyond what is left, or not a number, or the work should
    /// stop.
    pub fn spend(&self, operations: f64) -> Option<()> {
        if self.interrupted() {
            return None;
        }
        let whole = operations.ceil();
        let add = |spent: u64| {
            let sum = spent as f64 + whole;
            (whole >= 0.0 && sum <= self.limit).then(|| spent.saturating_add(whole as u64))
        };
        match self.spent.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add) {
            Ok(_) => Some(()),
            Err(spent) => {
                let needs = spent as f64 + whole;
                let needs = if needs.is_nan() { f64::INFINITY } else { needs.abs() };
                self.refused.fetch_max(needs.to_bits(), Ordering::Relaxed);
                None
            }
        }
    }

    /// What was spent so far.
    pub fn spent(&self) -> u64 {
        self.spent.load(Ordering::Relaxed)
    }

    /// Takes back what was spent since it was `spent`, for work that was given up.
    pub fn restore(&self, spent: u64) {
        self.spent.store(spent, Ordering::Relaxed);
    }

    /// Says what was refused, if anything was.
    ///
    /// # Errors
    /// [`Error::TooCostly`] with the most that was asked for.
    pub fn check(&self, field: &str, advice: &str) -> Result<(), Error> {
        match self.refused.load(Ordering::Relaxed) {
            0 => Ok(()),
            bits => {
                let needs = f64::from_bits(bits);
                let needs = if needs.is_finite() {
                    format!("needs at least {needs:.1e} operations")
                } else {
                    "needs more memory, or more operations than can be counted".into()
                };
                Err(Error::too_costly(
                    field,
                    needs,
                    format!("{:.1e} operations and {:.1e} bytes", self.limit, Cost::MOST_BYTES),
                    advice,
                ))
            }
        }
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

    #[test]
    fn a_budget_is_spent_to_its_end_and_not_beyond() {
        let budget = Budget::new(10.0);
        assert_eq!((budget.spend(6.5), budget.spent()), (Some(()), 7));
        assert_eq!(budget.check("theta", ""), Ok(()));
        for beyond in [3.5, f64::NAN, f64::INFINITY, -1.0] {
            assert_eq!((budget.spend(beyond), budget.spent()), (None, 7));
        }
        assert_eq!(budget.spend(3.0), Some(()));
        budget.restore(2);
        assert_eq!((budget.spend(7.0), budget.spent()), (Some(()), 9));
        let fresh = Budget::new(1e10);
        assert_eq!(fresh.spend(3e12), None);
        let message = fresh.check("theta", "weaken it").unwrap_err().to_string();
        assert_eq!(
            message,
            "theta: needs at least 3.0e12 operations, above the limit of 1.0e10 operations and 1.6e9 bytes; weaken it"
        );
        assert_eq!(fresh.spend(f64::INFINITY), None);
        assert!(!fresh.check("theta", "").unwrap_err().to_string().contains("inf"));
    }
}
