//! Correlated Gaussian values under random attention with a tunable preference for oneself:
//!
//! ```text
//! v_j = sqrt(rho) u + sqrt(1 - rho) w_j,
//! s_ij = spread g_i . k_j / sqrt(d) + beta k_i . k_j / |k_i|^2,      g_i . k_i = 0,      so  s_ii = beta,
//! ```
//!
//! with `u`, `w_j`, `k_j` standard normal, `g_i` too but for its part along `k_i`, `d` the key size, and every
//! query seeing every key. Other scores are normal with variance `spread^2 + beta^2 / d`, and `beta` is such
//! that `a_ii` is close to what is asked for.

use headflow_model::random::{Purpose, Stream};
use headflow_model::{Unwatched, Watch, mean_and_error};

use crate::attention::{Inputs, Mask, SelfAttention, Shape, Sinks};
use crate::bias::Prediction;
use crate::error::Error;
use crate::measurement::Measurement;

/// A synthetic attention layer; every head is an independent sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct Synthetic {
    /// Tokens of a sequence, at least 2.
    pub tokens: usize,
    /// Independent sequences.
    pub sequences: usize,
    /// Numbers in a key.
    pub key_size: usize,
    /// Numbers in a value.
    pub value_size: usize,
    /// The correlation of values, from 0 to 1.
    pub rho: f64,
    /// What a token should give to itself, between 0 and 1.
    pub self_attention: f64,
    /// The standard deviation of the random part of scores.
    pub spread: f64,
    /// The seed.
    pub seed: u64,
}

/// A mean over sequences and its standard error.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Average {
    /// The mean.
    pub mean: f64,
    /// The standard error; NaN for a single sequence.
    pub standard_error: f64,
}

/// What was measured of a synthetic layer, position 0 left out.
#[derive(Debug, Clone, PartialEq)]
pub struct Bias {
    /// `cos(y_i, v_i)`.
    pub cosine: Average,
    /// `a_ii`.
    pub self_attention: Average,
    /// The closed form, at the measured `a_ii` and `sum_j a_ij^2` and the `rho` that was asked for.
    pub closed_form: Average,
    /// The closed form at the measured correlation of values.
    pub closed_form_measured_rho: Average,
    /// The measured correlation of values.
    pub rho: Average,
}

/// Tensors of a layer: queries, keys, values.
pub type Tensors = (Vec<f32>, Vec<f32>, Vec<f32>);

impl Synthetic {
    /// The sizes of the layer.
    pub fn shape(&self) -> Shape {
        Shape {
            tokens: self.tokens,
            heads: self.sequences,
            key_value_heads: self.sequences,
            key_size: self.key_size,
            value_size: self.value_size,
        }
    }

    fn validate(&self) -> Result<(), Error> {
        if self.tokens < 2 {
            return Err(Error::invalid("tokens", format!("{} is too few: give at least 2", self.tokens)));
        }
        if !(0.0..=1.0).contains(&self.rho) {
            return Err(Error::invalid("rho", format!("{} is not between 0 and 1", self.rho)));
        }
        if !(self.self_attention > 0.0 && self.self_attention < 1.0) {
            return Err(Error::invalid(
                "self_attention",
                format!("{} is not between 0 and 1, both excluded", self.self_attention),
            ));
        }
        if !(self.spread >= 0.0 && self.spread <= 10.0) {
            return Err(Error::invalid("spread", format!("{} is not between 0 and 10", self.spread)));
        }
        Ok(())
    }

    /// The preference for oneself: `ln(a / (1 - a))` beyond the logarithm of what the other keys sum to.
    pub fn beta(&self) -> f64 {
        let odds = (self.self_attention / (1.0 - self.self_attention)).ln() + (self.tokens as f64 - 1.0).ln();
        let size = self.key_size as f64;
        // beta = odds + (spread^2 + beta^2 / d) / 2, by iteration: beta / d is small.
        (0..100).fold(odds, |beta, _| odds + 0.5 * (self.spread.powi(2) + beta * beta / size))
    }

    /// Draws the tensors.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a field outside its domain.
    pub fn draw(&self) -> Result<Tensors, Error> {
        self.draw_watched(&Unwatched)
    }

    /// [`Synthetic::draw`], stopping between two tokens once `watch` interrupts.
    ///
    /// # Errors
    /// As [`Synthetic::draw`], and [`Error::Interrupted`].
    pub fn draw_watched(&self, watch: &dyn Watch) -> Result<Tensors, Error> {
        self.validate()?;
        let beta = self.beta();
        if !(beta.is_finite() && beta < self.key_size as f64) {
            return Err(Error::invalid(
                "key_size",
                format!("{} is too small for attention of {} to oneself", self.key_size, self.self_attention),
            ));
        }
        let Self { tokens, sequences, key_size, value_size, .. } = *self;
        let mut queries = vec![0.0; tokens * sequences * key_size];
        let mut keys = queries.clone();
        let mut values = vec![0.0; tokens * sequences * value_size];
        let root = (key_size as f64).sqrt();
        let (common_part, own_part) = (self.rho.sqrt() as f32, (1.0 - self.rho).sqrt() as f32);
        let mut common = vec![0.0; value_size];
        for sequence in 0..sequences {
            let stream = Stream::new(self.seed, Purpose::Values, sequence as u32);
            stream.normals(0, 0, 0, &mut common);
            for position in 0..tokens {
                if watch.interrupted() {
                    return Err(Error::Interrupted);
                }
                let at = position * sequences + sequence;
                let value = &mut values[at * value_size..(at + 1) * value_size];
                stream.normals(1, position as u32, 0, value);
                value.iter_mut().zip(&common).for_each(|(v, u)| *v = common_part * u + own_part * *v);
                let key = &mut keys[at * key_size..(at + 1) * key_size];
                stream.normals(2, position as u32, 0, key);
                let query = &mut queries[at * key_size..(at + 1) * key_size];
                stream.normals(3, position as u32, 0, query);
                let square: f64 = key.iter().map(|&k| f64::from(k).powi(2)).sum();
                let inner: f64 = query.iter().zip(&*key).map(|(&g, &k)| f64::from(g) * f64::from(k)).sum();
                let (spread, own) = (self.spread as f32, ((beta * root - self.spread * inner) / square) as f32);
                query.iter_mut().zip(&*key).for_each(|(q, k)| *q = spread * *q + own * k);
            }
        }
        Ok((queries, keys, values))
    }

    /// Draws and measures.
    ///
    /// # Errors
    /// As [`Synthetic::draw`] and [`SelfAttention::forward`].
    pub fn measure(&self) -> Result<Bias, Error> {
        self.measure_watched(&Unwatched)
    }

    /// [`Synthetic::measure`], stopping within the work once `watch` interrupts.
    ///
    /// # Errors
    /// As [`Synthetic::measure`], and [`Error::Interrupted`].
    pub fn measure_watched(&self, watch: &dyn Watch) -> Result<Bias, Error> {
        let (queries, keys, values) = self.draw_watched(watch)?;
        let attention = SelfAttention { mask: Mask::Bidirectional, ..SelfAttention::default() };
        let inputs = Inputs { queries: &queries, keys: &keys, values: &values, sinks: Sinks::default() };
        let measured = attention.measure_watched(&self.shape(), &inputs, watch)?;
        let over = |f: &dyn Fn(usize) -> f64| {
            let (mean, standard_error) = mean_and_error((0..self.sequences).map(f));
            Average { mean, standard_error }
        };
        let exact = Measurement { rho: vec![self.rho; self.sequences], ..measured.clone() };
        Ok(Bias {
            cosine: over(&|head| measured.mean(&measured.cosine, head)),
            self_attention: over(&|head| measured.mean(&measured.self_attention, head)),
            closed_form: over(&|head| Prediction::ClosedForm.of_head(&exact, head)),
            closed_form_measured_rho: over(&|head| Prediction::ClosedForm.of_head(&measured, head)),
            rho: over(&|head| measured.rho[head]),
        })
    }
}
