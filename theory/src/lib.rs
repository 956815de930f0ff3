//! The limit of large dimension: population averages over the low-dimensional Gaussians that the
//! scores need, and the flow of the order parameters that they drive.
//!
//! - [`moments`]: what the flow needs to know about the data, and the interface [`moments::Evaluator`]
//!   of whatever computes it;
//! - [`quasi_monte_carlo`]: an evaluator on fixed, randomised quasi-random points;
//! - [`quadrature`]: an evaluator that is exact to a tolerance, at any sequence length;
//! - [`evaluators`]: one or the other;
//! - [`bayes`]: the Bayes risk; [`floor`]: losses that no keys can go below;
//! - [`optimum`]: the keys and biases of the lowest loss;
//! - [`flow`]: the right-hand side and its integration, with events and typed stop reasons;
//! - [`stability`]: growth rates at stationary points, which it finds, and what grows;
//! - [`settled`]: whether a flow has come to its end, or to a slow passage;
//! - [`escape`]: when a growing mode leaves, from its rate and its initial size;
//! - [`pruning`]: what the loss becomes when trained heads are removed;
//! - [`stages`]: plateaus, sign patterns and the order of learning, read off a trajectory.
//!
//! The derivation is in this crate's `README.md`.
#![warn(missing_docs)]

pub mod bayes;
pub mod escape;
pub mod evaluators;
pub mod floor;
pub mod flow;
pub mod moments;
pub mod optimum;
pub mod pruning;
pub mod quadrature;
pub mod quasi_monte_carlo;
pub mod settled;
pub mod stability;
pub mod stages;
