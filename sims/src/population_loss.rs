//! The population loss at finite `D`, measured on fresh samples without drawing `D`-dimensional
//! tokens.
//!
//! Only the parts of a token along the spikes (`x`) and along the rest of the keys' span (`c`) enter
//! the attention; the remaining `D - F - H` directions are pure noise, with mean Gram matrix
//! `(D - F - H) I / D`. Averaging over them exactly,
//!
//! ```text
//! E[loss | x, c] = d^T (x^T x + c^T c) d / D + (1 - (F + H) / D) |d|^2
//! ```
//!
//! which is the loss `E[d^T G d]` of `theory/README.md` section 3 at this `D`, exactly in expectation.

use headflow_model::random::{Purpose, Stream};
use headflow_model::{Attention, Error, Task, Unwatched, Watch, lower_factor};
use nalgebra::DMatrix;

/// Mean loss of `samples` fresh samples at keys with overlaps `m`, `r` and biases `b`, with its
/// standard error. The samples depend on `(seed, replica)` alone: every call uses the same.
///
/// # Errors
/// When `r - m m^T` is not positive semi-definite, to rounding.
#[allow(clippy::too_many_arguments)]
pub fn population_loss(
    task: &Task,
    attention: &Attention,
    dimension: usize,
    (m, r, b): (&DMatrix<f64>, &DMatrix<f64>, &[f64]),
    samples: usize,
    seed: u64,
    replica: u32,
) -> Result<(f64, f64), Error> {
    population_loss_watched(task, attention, dimension, (m, r, b), samples, seed, replica, &Unwatched)
}

/// Products of scores between two looks at the watch: some milliseconds.
const PRODUCTS_BETWEEN_LOOKS: usize = 1 << 22;

/// [`population_loss`], stopping once `watch` interrupts.
///
/// # Errors
/// As [`population_loss`], and [`Error::Interrupted`].
#[allow(clippy::too_many_arguments)]
pub fn population_loss_watched(
    task: &Task,
    attention: &Attention,
    dimension: usize,
    (m, r, b): (&DMatrix<f64>, &DMatrix<f64>, &[f64]),
    samples: usize,
    seed: u64,
    replica: u32,
    watch: &dyn Watch,
) -> Result<(f64, f64), Error> {
    let (heads, features, length) = (m.nrows(), m.ncols(), task.length());
    let rows = features + heads;
    let c = lower_factor(&(r - m * m.transpose()), 1e-12 * r.trace())
        .map_err(|e| Error::ImpossibleOverlaps { field: "keys".into(), eigenvalue: e.pivot })?;
    let mut b = b.to_vec();
    attention.bring_near(&mut b, |h| r[(h, h)]);
    let stream = Stream::new(seed, Purpose::Test, replica);
    let sampler = task.sampler();
    let (mut uniforms, mut theta) = (vec![0.0; sampler.uniforms()], vec![0.0; features]);
    // Token l, coordinate j: x first, then c; the relevant token is token 0 by exchangeability.
    let mut values = vec![0.0f32; length * rows];
    let (mut scores, mut combined) = (vec![0.0; heads * length], vec![0.0; length]);
    let rest = 1.0 - rows as f64 / dimension as f64;
    let (mut mean, mut square) = (0.0, 0.0);
    // Between samples, and in long ones between heads.
    let products = length * rows;
    let between = (PRODUCTS_BETWEEN_LOOKS / (heads * products)).max(1) as u64;
    let within = products * heads > PRODUCTS_BETWEEN_LOOKS;
    let stop = || Error::interrupted("the loss of a simulation");
    for sample in 0..samples as u64 {
        if sample.is_multiple_of(between) && watch.interrupted() {
            return Err(stop());
        }
        stream.uniforms(sample, 1, &mut uniforms);
        sampler.sample(&uniforms, &mut theta);
        stream.normals(sample, 0, 0, &mut values);
        for (x, theta) in values.iter_mut().zip(&theta) {
            *x += *theta as f32;
        }
        for h in 0..heads {
            if within && watch.interrupted() {
                return Err(stop());
            }
            for (l, value) in values.chunks_exact(rows).enumerate() {
                let along = (0..features).map(|f| m[(h, f)] * f64::from(value[f])).sum::<f64>();
                let outside = (0..=h).map(|j| c[(h, j)] * f64::from(value[features + j])).sum::<f64>();
                scores[h * length + l] = along + outside + b[h];
            }
        }
        attention.forward_in_place(heads, length, &mut scores, &mut combined);
        combined[0] -= 1.0;
        let noise: f64 = combined.iter().map(|d| d * d).sum();
        let spanned: f64 = (0..rows)
            .map(|j| {
                let u: f64 = values.chunks_exact(rows).zip(&combined).map(|(v, d)| d * f64::from(v[j])).sum();
                u * u
            })
            .sum();
        let loss = spanned / dimension as f64 + rest * noise;
        // Welford's running mean and sum of squares.
        let difference = loss - mean;
        mean += difference / (sample + 1) as f64;
        square += difference * (loss - mean);
    }
    let n = samples as f64;
    Ok((mean, (square / (n - 1.0) / n).sqrt()))
}
