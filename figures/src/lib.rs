//! Figures of runs, drawn from their result files alone.
//!
//! A result folder holds `series.csv` (the tidy table of [`headflow_model::series`]) and
//! `result.json` (whose header names the command and the spec). [`ResultFolder::open`] reads both,
//! [`comparison`] draws one run, [`specialization`] sets several side by side. Every figure is
//! written twice, as PNG and as SVG, for a width of 17 cm; each file appears whole or not at all.
//!
//! Heads and features are counted from zero, as in `series.csv` and on the command line.
#![warn(missing_docs)]

mod canvas;
mod comparison;
mod curves;
mod error;
mod panel;
mod record;
mod specialization;
mod style;

pub use comparison::comparison;
pub use error::Error;
pub use record::ResultFolder;
pub use specialization::specialization;

#[cfg(test)]
mod fixture;
