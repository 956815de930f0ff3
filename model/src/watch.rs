//! How long work reports that it goes on, and learns that it should not.

/// Watches long work: counts its progress and may ask it to stop early.
///
/// Work that is asked to stop ends soon, with what it has so far and
/// [`StopReason::Interrupted`](crate::StopReason::Interrupted).
pub trait Watch: Sync {
    /// `amount` further units of work are done. The units are the caller's: SGD steps of a
    /// simulation, thousandths of a flow.
    fn advance(&self, amount: u64);

    /// Whether the work should stop.
    fn interrupted(&self) -> bool;
}

/// Two watches as one: work stops when either wants it to. Progress is that of the first.
#[derive(Clone, Copy)]
pub struct Either<'a>(pub &'a dyn Watch, pub &'a dyn Watch);

impl Watch for Either<'_> {
    fn advance(&self, amount: u64) {
        self.0.advance(amount);
    }

    fn interrupted(&self) -> bool {
        self.0.interrupted() || self.1.interrupted()
    }
}

/// Nobody watches.
#[derive(Debug, Clone, Copy, Default)]
pub struct Unwatched;

impl Watch for Unwatched {
    fn advance(&self, _: u64) {}

    fn interrupted(&self) -> bool {
        false
    }
}
