//! A decoder of the llama architecture in single precision, so that its attention can be measured:
//!
//! ```text
//! x_0 = embedding(token),
//! x  <- x + W_o attention(W_q n(x), W_k n(x), W_v n(x)),      n(x) = w x / sqrt(mean(x^2) + epsilon),
//! x  <- x + W_down (silu(W_gate n(x)) * W_up n(x)),           silu(g) = g / (1 + exp(-g)),
//! logits = W n(x_last),
//! ```
//!
//! with rotary queries and keys, causal attention of grouped heads, and `1 / sqrt(head_size)` as scale. The four
//! maps of attention may have biases, `W x + b`.
//! Matrices are held `outputs x inputs`, row by row.

use rayon::prelude::*;

use crate::attention::{Inputs, SelfAttention, Shape, Sinks};
use crate::error::Error;
use crate::matrix::{Matrix, multiply};
use crate::real::Real;
use crate::rotary::Rotary;

/// Tokens whose logits are held at once.
pub(crate) const TOKENS_AT_ONCE: usize = 64;

/// The sizes of a model and its constants.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// Numbers in the state of a token.
    pub embedding: usize,
    /// Query heads.
    pub heads: usize,
    /// Key-value heads, a divisor of `heads`.
    pub key_value_heads: usize,
    /// Numbers in a query, key or value of a head.
    pub head_size: usize,
    /// Width of the feed-forward layers.
    pub feed_forward: usize,
    /// Number of tokens in the vocabulary.
    pub vocabulary: usize,
    /// The longest sequence the model was made for.
    pub context: usize,
    /// Rotary embeddings.
    pub rotary: Rotary,
    /// `epsilon` of the norms.
    pub epsilon: f64,
}

impl Settings {
    /// Whether a model can run over `tokens`.
    pub(crate) fn check_tokens(&self, tokens: &[u32]) -> Result<(), Error> {
        let Self { vocabulary, context, .. } = *self;
        if tokens.is_empty() {
            return Err(Error::invalid("tokens", "there is none: give a text or ids"));
        }
        if let Some((at, id)) = tokens.iter().enumerate().find(|(_, id)| **id as usize >= vocabulary) {
            return Err(Error::invalid(
                "tokens",
                format!(
                    "id {id} at position {at} is out of range: the vocabulary has {vocabulary} tokens, 0 to {}",
                    vocabulary - 1
                ),
            ));
        }
        if tokens.len() > context {
            return Err(Error::invalid(
                "tokens",
                format!("{} are more than the model's context of {context}: give a shorter text", tokens.len()),
            ));
        }
        Ok(())
    }
}

/// The weights of a layer.
#[derive(Debug, Clone, PartialEq)]
pub struct Layer {
    /// `embedding`.
    pub attention_norm: Vec<f32>,
    /// `heads head_size x embedding`.
    pub queries: Vec<f32>,
    /// `key_value_heads head_size x embedding`.
    pub keys: Vec<f32>,
    /// `key_value_heads head_size x embedding`.
    pub values: Vec<f32>,
    /// `embedding x heads head_size`.
    pub output: Vec<f32>,
    /// Biases of the four matrices above.
    pub biases: Biases,
    /// `embedding`.
    pub feed_forward_norm: Vec<f32>,
    /// `feed_forward x embedding`.
    pub gate: Vec<f32>,
    /// `feed_forward x embedding`.
    pub up: Vec<f32>,
    /// `embedding x feed_forward`.
    pub down: Vec<f32>,
}

/// The biases of a layer's attention; most models have none.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Biases {
    /// `heads head_size`.
    pub queries: Option<Vec<f32>>,
    /// `key_value_heads head_size`.
    pub keys: Option<Vec<f32>>,
    /// `key_value_heads head_size`.
    pub values: Option<Vec<f32>>,
    /// `embedding`.
    pub output: Option<Vec<f32>>,
}

/// A model.
#[derive(Debug, Clone, PartialEq)]
pub struct Llama {
    /// Its sizes.
    pub settings: Settings,
    /// `vocabulary x embedding`.
    pub embedding: Vec<f32>,
    /// Its layers, from the input on.
    pub layers: Vec<Layer>,
    /// `embedding`.
    pub final_norm: Vec<f32>,
    /// `vocabulary x embedding`; the embedding serves if none.
    pub logits: Option<Vec<f32>>,
}

/// How well the model predicts a text.
#[derive(Debug, Clone, PartialEq)]
pub struct Likelihood {
    /// `-ln p(token t + 1 | tokens 0..=t)`, one for each `t` but the last.
    pub negative_log_likelihoods: Vec<f64>,
    /// The logits after the last token.
    pub last_logits: Vec<f32>,
}

impl Likelihood {
    /// The mean negative log-likelihood, in nats a token; NaN for a single token.
    pub fn mean(&self) -> f64 {
        self.negative_log_likelihoods.iter().sum::<f64>() / self.negative_log_likelihoods.len() as f64
    }

    /// `exp` of [`Likelihood::mean`].
    pub fn perplexity(&self) -> f64 {
        self.mean().exp()
    }
}

/// What sees the attention of every layer: the layer, the attention, its shape and its inputs.
pub type Observer<'a> = dyn FnMut(usize, &SelfAttention, &Shape, &Inputs<'_, f32>) -> Result<(), Error> + 'a;

impl Llama {
    /// Runs the model over `tokens`, with exclusive attention in every head if `exclusive`, and shows the
    /// attention of every layer to `observer`.
    ///
    /// # Errors
    /// [`Error::Invalid`] for no token, a token that is not in the vocabulary, or more tokens than the context
    /// holds; [`Error::NotFinite`], with its layer, where a number overflows; and what `observer` returns.
    pub fn run(&self, tokens: &[u32], exclusive: bool, observer: &mut Observer<'_>) -> Result<Likelihood, Error> {
        let settings = &self.settings;
        self.check_tokens(tokens)?;
        let shape = Shape {
            tokens: tokens.len(),
            heads: settings.heads,
            key_value_heads: settings.key_value_heads,
            key_size: settings.head_size,
            value_size: settings.head_size,
        };
        let attention = SelfAttention { exclusive, rotary: Some(settings.rotary.clone()), ..SelfAttention::default() };
        let width = settings.embedding;
        let mut states = Vec::with_capacity(tokens.len() * width);
        for &token in tokens {
            states.extend_from_slice(&self.embedding[token as usize * width..(token as usize + 1) * width]);
        }
        for (number, layer) in self.layers.iter().enumerate() {
            let normed = self.normed(&states, &layer.attention_norm);
            let map = |weights: &[f32], bias: &Option<Vec<f32>>| {
                let mut mapped = linear(&normed, weights, width);
                add_bias(&mut mapped, bias);
                mapped
            };
            let Biases { queries, keys, values, output } = &layer.biases;
            let (queries, keys, values) =
                (map(&layer.queries, queries), map(&layer.keys, keys), map(&layer.values, values));
            let inputs = Inputs { queries: &queries, keys: &keys, values: &values, sinks: Sinks::default() };
            let attended = attention.forward(&shape, &inputs).map_err(|error| error.in_layer(number))?;
            observer(number, &attention, &shape, &inputs).map_err(|error| error.in_layer(number))?;
            add_linear(&mut states, &attended.outputs, &layer.output, settings.heads * settings.head_size);
            add_bias(&mut states, output);
            let normed = self.normed(&states, &layer.feed_forward_norm);
            let mut hidden = linear(&normed, &layer.gate, width);
            let up = linear(&normed, &layer.up, width);
            hidden.par_iter_mut().zip(&up).for_each(|(gate, up)| *gate = *gate / (1.0 + (-*gate).exp()) * up);
            add_linear(&mut states, &hidden, &layer.down, settings.feed_forward);
        }
        self.likelihood(tokens, &self.normed(&states, &self.final_norm))
    }

    /// Whether the model can run over `tokens`.
    ///
    /// # Errors
    /// As [`Llama::run`].
    pub fn check_tokens(&self, tokens: &[u32]) -> Result<(), Error> {
        self.settings.check_tokens(tokens)
    }

    fn normed(&self, states: &[f32], weights: &[f32]) -> Vec<f32> {
        let mut normed = states.to_vec();
        normed.par_chunks_mut(weights.len()).for_each(|state| {
            let mean = f64::from(f32::dot(state, state)) / state.len() as f64;
            // A sum that overflows must not pass as zero: attention names where.
            let factor = if mean.is_finite() { (1.0 / (mean + self.settings.epsilon).sqrt()) as f32 } else { f32::NAN };
            state.iter_mut().zip(weights).for_each(|(x, w)| *x *= factor * w);
        });
        normed
    }

    fn likelihood(&self, tokens: &[u32], states: &[f32]) -> Result<Likelihood, Error> {
        let Settings { embedding, vocabulary, .. } = self.settings;
        let weights = self.logits.as_ref().unwrap_or(&self.embedding);
        let mut all = Vec::with_capacity(tokens.len());
        let mut last_logits = Vec::new();
        for (number, states) in states.chunks(TOKENS_AT_ONCE * embedding).enumerate() {
            let logits = linear(states, weights, embedding);
            let first = number * TOKENS_AT_ONCE;
            let of_token = |(n, logits): (usize, &[f32])| {
                // ln sum exp, in double precision.
                let largest = f64::from(f32::largest(logits));
                let sum: f64 = logits.iter().map(|&l| (f64::from(l) - largest).exp()).sum();
                let next = tokens.get(first + n + 1).map_or(largest, |&next| f64::from(logits[next as usize]));
                largest + sum.ln() - next
            };
            let values: Vec<f64> = logits.par_chunks(vocabulary).enumerate().map(of_token).collect();
            if let Some(n) = values.iter().position(|v| !v.is_finite()) {
                return Err(Error::invalid("logits", format!("are not finite at position {}", first + n)));
            }
            all.extend(values);
            last_logits = logits[logits.len() - vocabulary..].to_vec();
        }
        all.pop();
        Ok(Likelihood { negative_log_likelihoods: all, last_logits })
    }
}

/// `x W^T` for `x` of `inputs` numbers a row.
fn linear(x: &[f32], weights: &[f32], inputs: usize) -> Vec<f32> {
    let mut product = vec![0.0; x.len() / inputs * (weights.len() / inputs)];
    multiply_weights(&mut product, x, weights, inputs, false);
    product
}

/// `to += x W^T`.
fn add_linear(to: &mut [f32], x: &[f32], weights: &[f32], inputs: usize) {
    multiply_weights(to, x, weights, inputs, true);
}

/// `x + b`, for every row.
fn add_bias(x: &mut [f32], bias: &Option<Vec<f32>>) {
    if let Some(bias) = bias {
        x.par_chunks_mut(bias.len()).for_each(|row| row.iter_mut().zip(bias).for_each(|(x, b)| *x += b));
    }
}

fn multiply_weights(to: &mut [f32], x: &[f32], weights: &[f32], inputs: usize, add: bool) {
    let x = Matrix::new(x, x.len() / inputs, inputs, inputs);
    let weights = Matrix::new(weights, weights.len() / inputs, inputs, inputs).transposed();
    multiply(to, 1.0, x, weights, add, rayon::current_num_threads());
}
