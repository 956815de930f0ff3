//! Exclusive self-attention.
#![warn(missing_docs)]

pub mod attention;
pub mod bias;
pub mod error;
mod exclusive;
#[cfg(feature = "gguf")]
pub mod gguf;
pub mod gradient;
pub mod llama;
mod matrix;
pub mod measurement;
mod real;
pub mod rotary;
pub mod synthetic;
#[cfg(feature = "gguf")]
pub mod tokenizer;

pub use attention::{Attended, Inputs, Mask, SelfAttention, Shape, SinkToken, Sinks};
pub use bias::Prediction;
pub use error::Error;
pub use gradient::Gradients;
pub use llama::Llama;
pub use measurement::Measurement;
pub use real::Real;
pub use rotary::{Pairing, Rotary};
