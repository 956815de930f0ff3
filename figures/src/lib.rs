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
//! - [`map()`] draws phase diagrams, [`lines()`] curves against a parameter and [`pruning()`] losses
//!   against the number of removed heads, from `result.json` alone.
//! - [`xsa_model()`] draws the attention similarity bias of a language model, from `result.json` alone.
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
mod cells;
mod comparison;
mod contour;
mod curves;
mod error;
mod escape;
mod hierarchy;
mod lines;
mod map;
mod panel;
mod pruning;
mod record;
mod shade;
mod specialization;
mod spectrum;
mod stages;
mod style;
mod xsa_model;

pub use comparison::comparison;
pub use error::Error;
pub use escape::escape;
pub use hierarchy::hierarchy;
pub use lines::lines;
pub use map::map;
pub use pruning::pruning;
pub use record::ResultFolder;
pub use specialization::specialization;
pub use spectrum::spectrum;
pub use xsa_model::xsa_model;

#[cfg(test)]
mod fixture;
