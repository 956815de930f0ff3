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

/// Nobody watches.
#[derive(Debug, Clone, Copy, Default)]
pub struct Unwatched;

impl Watch for Unwatched {
    fn advance(&self, _: u64) {}

    fn interrupted(&self) -> bool {
        false
    }
}
