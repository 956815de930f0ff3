//! Exclusive self-attention (XSA, arXiv 2603.09078) and the attention similarity bias that it removes.
//!
//! The output `y_i` of an attention head resembles the token's own value `v_i`: `cos(y_i, v_i)` is the
//! attention similarity bias. XSA removes that part, `z_i = y_i - (y_i . v_i / |v_i|^2) v_i`.
//!
//! - [`attention`]: causal and bidirectional attention with grouped heads, sinks and rotary embeddings, XSA as
//!   a switch; [`gradient`]: its gradients. Any length in `O(T d)` memory, `f32` and `f64`.
//! - [`measurement`]: the bias, position by position, with its causes and controls.
//! - [`bias`]: the closed form that predicts it; [`synthetic`]: values and scores on which to check it.
//! - [`llama`]: a language model whose attention can be measured; with the feature `gguf`, `gguf` reads one
//!   from a GGUF file and `tokenizer` the tokenizer in it.
//!
//! ```
//! use headflow_xsa::{Inputs, SelfAttention, Shape, Sinks};
//!
//! // Two query heads that share one key-value head, three tokens.
//! let shape = Shape { tokens: 3, heads: 2, key_value_heads: 1, key_size: 2, value_size: 2 };
//! let queries = [1.0, 0.0, 0.0, 1.0, 0.5, 0.5, -1.0, 0.0, 2.0, 1.0, 0.0, 0.0_f32];
//! let keys = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0];
//! let values = [1.0, 2.0, -1.0, 0.5, 0.0, 3.0];
//! let inputs = Inputs { queries: &queries, keys: &keys, values: &values, sinks: Sinks::default() };
//!
//! let attention = SelfAttention { exclusive: true, ..SelfAttention::default() };
//! let attended = attention.forward(&shape, &inputs)?;
//! // z of token 2, head 1 is orthogonal to that token's value.
//! let z = &attended.outputs[10..12];
//! assert!((z[0] * values[4] + z[1] * values[5]).abs() < 1e-6);
//!
//! // The gradient of the sum of all outputs.
//! let gradients = attention.backward(&shape, &inputs, &attended, &[1.0; 12])?;
//! assert_eq!(gradients.values.len(), values.len());
//!
//! // How large was what it removed?
//! let measured = attention.measure(&shape, &inputs)?;
//! println!("bias of head 1: {}", measured.mean(&measured.cosine, 1));
//! # Ok::<(), headflow_xsa::Error>(())
//! ```
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
