//! Rotary position embeddings (arXiv 2104.09864): in the plane of pair `k`, the token at position `p` turns by
//!
//! ```text
//! p base^(-2 k / size) / factors[k],      k = 0 .. size / 2
//! ```

use crate::error::Error;
use crate::real::Real;

/// Which entries make a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pairing {
    /// Entries `2 k` and `2 k + 1`, as in the original and in GGUF files of llama models.
    Interleaved,
    /// Entries `k` and `k + size / 2`, as in Hugging Face's llama models.
    Halves,
}

/// Rotary embeddings of the first `size` entries of every query and key.
#[derive(Debug, Clone, PartialEq)]
pub struct Rotary {
    /// The base of the frequencies; 10000 in the paper.
    pub base: f64,
    /// How many entries of a head turn, an even number; all if none.
    pub size: Option<usize>,
    /// Which entries make a pair.
    pub pairing: Pairing,
    /// Divisors of the frequencies, one a pair: 1 if none (llama 3 stretches low frequencies with them).
    pub factors: Option<Vec<f64>>,
}

impl Default for Rotary {
    fn default() -> Self {
        Self { base: 10_000.0, size: None, pairing: Pairing::Interleaved, factors: None }
    }
}

/// Sines and cosines of all positions and pairs.
pub(crate) struct Turns<T> {
    head_size: usize,
    size: usize,
    pairing: Pairing,
    /// `(cos, sin)`, `tokens x size / 2`.
    turns: Vec<(T, T)>,
}

impl Rotary {
    pub(crate) fn turns<T: Real>(&self, tokens: usize, head_size: usize) -> Result<Turns<T>, Error> {
        let size = self.size.unwrap_or(head_size);
        if size > head_size || !size.is_multiple_of(2) {
            return Err(Error::invalid(
                "rotary",
                format!("{size} entries of a head cannot turn in pairs when it has {head_size}"),
            ));
        }
        if !(self.base.is_finite() && self.base > 0.0) {
            return Err(Error::invalid("rotary", format!("the base {} is not a positive number", self.base)));
        }
        if let Some(factors) = &self.factors
            && (factors.len() != size / 2 || factors.iter().any(|f| !(f.is_finite() && *f > 0.0)))
        {
            return Err(Error::invalid(
                "rotary",
                format!("{} factors, but {} positive ones are needed, one a pair", factors.len(), size / 2),
            ));
        }
        let frequency = |k: usize| {
            self.base.powf(-2.0 * k as f64 / size as f64) / self.factors.as_ref().map_or(1.0, |factors| factors[k])
        };
        let frequencies: Vec<f64> = (0..size / 2).map(frequency).collect();
        let turn = |position: usize, frequency: f64| {
            let (sin, cos) = (position as f64 * frequency).sin_cos();
            (T::of(cos), T::of(sin))
        };
        let turns = (0..tokens).flat_map(|p| frequencies.iter().map(move |&f| turn(p, f))).collect();
        Ok(Turns { head_size, size, pairing: self.pairing, turns })
    }
}

impl<T: Real> Turns<T> {
    /// Turns a tensor `tokens x heads x head_size`.
    pub fn apply(&self, data: &mut [T], heads: usize) {
        self.turn(data, heads, T::one());
    }

    /// Turns it back: the transposed map, for gradients.
    pub fn undo(&self, data: &mut [T], heads: usize) {
        self.turn(data, heads, -T::one());
    }

    fn turn(&self, data: &mut [T], heads: usize, direction: T) {
        let pairs = self.size / 2;
        if pairs == 0 {
            return;
        }
        for (token, turns) in data.chunks_mut(heads * self.head_size).zip(self.turns.chunks(pairs)) {
            for head in token.chunks_mut(self.head_size) {
                for (k, &(cos, sin)) in turns.iter().enumerate() {
                    let (first, second) = match self.pairing {
                        Pairing::Interleaved => (2 * k, 2 * k + 1),
                        Pairing::Halves => (k, k + pairs),
                    };
                    let (a, b, sin) = (head[first], head[second], sin * direction);
                    head[first] = a * cos - b * sin;
                    head[second] = a * sin + b * cos;
                }
            }
        }
    }
}
