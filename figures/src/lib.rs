//! Figures of runs, drawn from their result files alone.
//!
//! A result folder holds `series.csv` (the tidy table of [`headflow_model::series`]) and
//! `result.json` (whose header names the command and the spec). [`ResultFolder::open`] reads both.
//!
//! - [`comparison()`] draws one run: theory, direct SGD and the overlap chain.
//! - [`specialization()`] sets several runs side by side.
//! - [`hierarchy()`] draws one run in stages: plateaus, and when each feature is learned.
//! - [`spectrum()`] draws the growth rates along one run.
//! - [`escape()`] draws escape times against the dimension, from `result.json` alone.
//!
//! Every figure is written twice, as PNG and as SVG, for a width of 17 cm; each file appears whole
//! or not at all.
//!
//! Routes in `series.csv` are `theory`, `theory D=500` (with the start of that dimension),
//! `direct D=500` and `overlap D=500` (means over replicas of either simulation), the last two also
//! with `replica=0`. Heads and features are counted from zero, as in `series.csv` and on the command
//! line; directions that heads have learned are written s1, s2 and so on, where s1 belongs to
//! feature 0.
#![warn(missing_docs)]

mod canvas;
mod comparison;
mod curves;
mod error;
mod escape;
mod hierarchy;
mod panel;
mod record;
mod specialization;
mod spectrum;
mod stages;
mod style;

pub use comparison::comparison;
pub use error::Error;
pub use escape::escape;
pub use hierarchy::hierarchy;
pub use record::ResultFolder;
pub use specialization::specialization;
pub use spectrum::spectrum;

/// TODO: to be replaced by the figure of the losses against the number of removed heads.
pub fn pruning(_: &std::path::Path, _: &std::path::Path) -> Result<Vec<std::path::PathBuf>, Error> {
    Ok(Vec::new())
}

#[cfg(test)]
mod fixture;
