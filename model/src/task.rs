//! The single-location task (`theory/README.md` section 1).
//!
//! ```text
//! eps ~ Unif{1..L},  theta ~ P_theta,  X_l = Z_l + 1{l = eps} sum_f theta_f k*_f,  y = X_eps
//! ```

use crate::error::Error;
use crate::theta::{Theta, ThetaSampler};

/// One token of `length` carries a signal `theta` in `F` hidden directions.
#[derive(Debug, Clone)]
pub struct Task {
    length: usize,
    theta: Theta,
    sampler: ThetaSampler,
}

impl Task {
    /// A task with `length >= 2` tokens.
    ///
    /// # Errors
    /// When the length is below 2, or `theta` is invalid.
    pub fn new(length: usize, theta: Theta) -> Result<Self, Error> {
        if length < 2 {
            return Err(Error::invalid(
                "length",
                format!("a sequence needs at least 2 tokens to choose from, got {length}"),
            ));
        }
        if length > u32::MAX as usize {
            return Err(Error::invalid("length", format!("{length} is above the limit of 2^32 - 1 tokens")));
        }
        let sampler = theta.sampler()?;
        Ok(Self { length, theta, sampler })
    }

    /// Number of tokens `L`.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Number of features `F`.
    pub fn features(&self) -> usize {
        self.sampler.features()
    }

    /// The distribution of the hidden weights.
    pub fn theta(&self) -> &Theta {
        &self.theta
    }

    /// The map from uniforms to hidden weights.
    pub fn sampler(&self) -> &ThetaSampler {
        &self.sampler
    }

    /// Loss of uniform attention, `1 - 1/L`: the loss to beat.
    pub fn uniform_loss(&self) -> f64 {
        1.0 - 1.0 / self.length as f64
    }
}
