//! Online SGD at finite dimension `D`.
//!
//! - [`direct`]: one replica, step by step, on `D`-dimensional tokens with the exact gradient;
//! - [`ensemble`]: independent replicas in parallel, recorded on a time grid;
//! - [`population_loss`]: the loss at finite `D`, measured without drawing `D`-dimensional tokens;
//! - [`kernels`]: the vector kernels of a step.
//!
//! Nothing here knows the theory that these simulations test.
#![warn(missing_docs)]

pub mod direct;
pub mod ensemble;
pub mod kernels;
pub mod population_loss;
