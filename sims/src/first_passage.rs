//! When replicas first reach a state: escape times, measured.
//!
//! A measure of the alignments `m` is looked at every [`RESOLUTION`] of the time `tau` (or every step, where
//! steps are longer), and the crossing is placed between two looks by interpolating its logarithm, as
//! for exponential growth.

use headflow_model::{Error, Watch};
use nalgebra::DMatrix;
use rayon::prelude::*;

use crate::ensemble::Replica;
use crate::sgd::{Sgd, Start};

/// Time between two looks.
pub const RESOLUTION: f64 = 0.01;

/// A measure of the alignments (`H x F`), and the value that counts as having left.
pub struct Target<'a> {
    /// The measure, not negative.
    pub measure: &'a (dyn Fn(&DMatrix<f64>) -> f64 + Sync),
    /// Its value to reach.
    pub threshold: f64,
    /// The time at which to give up.
    pub last: f64,
}

/// The times `tau` at which replicas `0..count` reach the target; `None` for those that do not, by the
/// last time or because they diverged or were interrupted.
///
/// # Errors
/// When the parameters are invalid.
pub fn first_passage(
    sgd: &Sgd,
    start: &Start,
    count: u32,
    target: &Target<'_>,
    watch: &dyn Watch,
) -> Result<Vec<Option<f64>>, Error> {
    sgd.validate(start)?;
    if !(target.threshold.is_finite() && target.threshold > 0.0) {
        return Err(Error::invalid("on", format!("the threshold must be positive, got {}", target.threshold)));
    }
    (0..count).into_par_iter().map(|index| passage(Replica::new(sgd, start, index)?, target, watch)).collect()
}

fn passage(mut replica: Replica, target: &Target<'_>, watch: &dyn Watch) -> Result<Option<f64>, Error> {
    let time_step = replica.sgd().time_step();
    let stride = ((RESOLUTION / time_step) as u64).max(1);
    let look = replica.stride(replica.overlaps().0.nrows());
    let measure = |replica: &Replica| (target.measure)(&replica.overlaps().0);
    let (mut time, mut before) = (0.0, measure(&replica));
    if before >= target.threshold {
        return Ok(Some(0.0));
    }
    while time < target.last && !watch.interrupted() {
        let mut left = stride;
        while left > 0 && !watch.interrupted() {
            let chunk = left.min(look);
            for _ in 0..chunk {
                if replica.advance_watched(watch).is_err() {
                    return Ok(None);
                }
            }
            watch.advance(chunk);
            left -= chunk;
        }
        let (now, next) = (measure(&replica), replica.steps() as f64 * time_step);
        if now >= target.threshold {
            let share = if before > 0.0 { (target.threshold / before).ln() / (now / before).ln() } else { 1.0 };
            return Ok(Some(time + share.clamp(0.0, 1.0) * (next - time)));
        }
        (time, before) = (next, now);
    }
    Ok(None)
}
