//! Online SGD at finite dimension `D`.
//!
//! - [`sgd`]: what is simulated, its start, and the two engines;
//! - [`direct`]: one replica, step by step, on `D`-dimensional tokens with the exact gradient;
//! - [`overlap_chain`]: the same in law, through the order parameters alone, at any `D`;
//! - [`ensemble`]: independent replicas in parallel, recorded on a time grid;
//! - [`first_passage`]: when replicas first reach a state;
//! - [`population_loss`]: the loss at finite `D`, measured without drawing `D`-dimensional tokens;
//! - [`kernels`]: the vector kernels of a step.
//!
//! Nothing here knows the theory that these simulations test.
#![warn(missing_docs)]

pub mod direct;
pub mod ensemble;
pub mod first_passage;
pub mod kernels;
pub mod overlap_chain;
pub mod population_loss;
pub mod sgd;
