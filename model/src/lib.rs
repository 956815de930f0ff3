//! The single-location model with multi-head attention: task, attention, order parameters and
//! random streams. Everything here is shared by the theory (`D -> infinity`) and the simulations
//! (finite `D`), which do not know each other.
//!
//! Equations and conventions: `theory/README.md`, which follows Sagitova, Duranthon and Zdeborova,
//! arXiv 2603.03993, and Duranthon et al., arXiv 2509.21936.
#![warn(missing_docs)]

pub mod attention;
mod cost;
mod error;
pub mod exponential;
mod extremes;
mod order_parameters;
pub mod random;
pub mod series;
mod stop;
mod task;
pub mod text;
mod theta;
mod trajectory;
mod watch;

pub use attention::{Activation, Aggregation, Attention, Bias, Lanes};
pub use cost::{Budget, Cost};
pub use error::Error;
pub use extremes::{larger, largest, largest_size, smallest};
pub use order_parameters::{NotPositive, OrderParameters, biases, lower_factor};
pub use stop::StopReason;
pub use task::Task;
pub use theta::{Theta, ThetaSampler};
pub use trajectory::{Estimate, Quantity, Shape, Trajectory, mean_and_error};
pub use watch::{Either, Unwatched, Watch};
