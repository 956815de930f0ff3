//! Attention heads that specialise: the high-dimensional theory of multi-head attention in the
//! single-location model, and the SGD that it predicts.
//!
//! The library re-exports the crates it is made of ([`model`], [`theory`], [`sims`], [`xsa`], [`figures`])
//! and adds what needs both theory and simulation: experiments as documents ([`spec`]), the folder
//! that a run writes ([`folder`]), what it will cost ([`cost`]) and the statistical verdict on theory against
//! simulation ([`agreement`]). The program `headflow` only puts these together.
//!
//! ```
//! use headflow::model::Unwatched;
//! use headflow::spec::{Purpose, Spec};
//! use headflow::theory::flow;
//!
//! let spec = Spec { tau: Some(20.0), points: Some(1024), ..Spec::default() }.complete(Purpose::Flow)?;
//! let flow = flow::average(&spec.evaluators()?, &spec.start()?, &spec.flow_options(), &Unwatched)?;
//! let losses: Vec<f64> = flow.estimate.mean.path(headflow::model::Quantity::Loss).collect();
//! assert!(losses[100] < losses[0]);
//! # Ok::<(), headflow::model::Error>(())
//! ```
#![warn(missing_docs)]

pub use headflow_figures as figures;
pub use headflow_model as model;
pub use headflow_sims as sims;
pub use headflow_theory as theory;
pub use headflow_xsa as xsa;

pub mod agreement;
pub mod cost;
pub mod folder;
pub mod json;
pub mod phase;
mod reading;
pub mod spec;

/// The version of this package.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The git revision that this package was built from, or `unknown`.
pub const GIT_REVISION: &str = env!("HEADFLOW_GIT_REVISION");
