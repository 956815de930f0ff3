//! x
pub mod direct;
pub mod ensemble;
pub mod kernels;
pub mod population_loss;
