//! Direct online SGD in `D` dimensions (`theory/README.md` section 5), with the exact finite-`D` gradient.
//!
//! ```text
//! loss = d^T G d,  G = X X^T / D,  d_l = a_l - 1{l = eps}     (fresh X every step)
//! g_hl = d loss / d s_hl   from  d loss / d a = 2 G d
//! k_h <- k_h - (eta / B) sum_{samples, l} g_hl X_l            eta = gamma / D
//! half-norm:  k_h += (eta / B) (sum g_hl) k_h                 trained:  b_h <- b_h - (eta / B) sum g_hl
//! tau = gamma steps / D
//! ```
//!
//! The spikes are the first `F` basis vectors: the noise is rotation invariant, so this is no
//! restriction. Tokens and keys are single precision; scores, gradients in score space and overlaps
//! are double. A replica holds its keys and the tokens of one sample, never the data.

use std::ops::Range;

use aligned_vec::{AVec, avec};
use headflow_model::random::{Purpose, Stream};
use headflow_model::{Bias, Error, Unwatched, Watch, biases};
use nalgebra::DMatrix;

use crate::kernels::{self, BLOCK, WIDTH};
use crate::sgd::{Diverged, Engine, Halt, Sgd, Start, in_range, look};

/// One run of direct SGD.
#[derive(Debug, Clone)]
pub struct Replica {
    sgd: Sgd,
    index: u32,
    heads: usize,
    stride: usize,
    /// `H x stride`, zero beyond `D`.
    keys: AVec<f32>,
    /// Trained biases, or zeros.
    b: Vec<f64>,
    step: u64,
    noise: Stream,
    hidden: Stream,
    space: Workspace,
}

#[derive(Debug, Clone)]
struct Workspace {
    /// One sample, `L x stride`, zero beyond `D`.
    tokens: AVec<f32>,
    /// Sum of the updates of a batch, `H x stride`; empty for single samples.
    update: AVec<f32>,
    scores: Vec<f64>,
    combined: Vec<f64>,
    d: Vec<f32>,
    q: Vec<f64>,
    weights: Vec<f32>,
    scale: Vec<f32>,
    /// As scores have them.
    biases: Vec<f64>,
    gradient_of_biases: Vec<f64>,
    uniforms: Vec<f64>,
    theta: Vec<f64>,
    sums: AVec<f32>,
}

impl Replica {
    /// Replica number `index` at its start.
    ///
    /// # Errors
    /// As [`Sgd::validate`].
    pub fn new(sgd: &Sgd, start: &Start, index: u32) -> Result<Self, Error> {
        let sgd = Sgd { engine: Engine::Direct, ..sgd.clone() };
        sgd.validate(start)?;
        let (heads, length, features) = (start.heads(), sgd.task.length(), sgd.task.features());
        let stride = kernels::stride(sgd.dimension);
        let mut keys = avec![0.0f32; heads * stride];
        let b = match (start.point(index)?, start) {
            (Some(point), _) => {
                let c = point.residual_factor();
                for (h, key) in keys.chunks_exact_mut(stride).enumerate() {
                    for f in 0..features {
                        key[f] = point.m()[(h, f)] as f32;
                    }
                    for j in 0..heads {
                        key[features + j] = c[(h, j)] as f32;
                    }
                }
                point.b().to_vec()
            }
            (None, Start::Random { scale, b, .. }) => {
                let stream = Stream::new(sgd.seed, Purpose::Keys, index);
                let sd = (scale / (sgd.dimension as f64).sqrt()) as f32;
                for (h, key) in keys.chunks_exact_mut(stride).enumerate() {
                    stream.normals(0, h as u32, 0, &mut key[..sgd.dimension]);
                    key.iter_mut().for_each(|k| *k *= sd);
                }
                b.clone()
            }
            (None, _) => vec![0.0; heads],
        };
        // Only trained biases are parameters; the others follow from their rule.
        let b = if sgd.attention.bias == Bias::Trained { b } else { vec![0.0; heads] };
        Ok(Self {
            index,
            heads,
            stride,
            keys,
            b,
            step: 0,
            noise: Stream::new(sgd.seed, Purpose::Tokens, index),
            hidden: Stream::new(sgd.seed, Purpose::Task, index),
            space: Workspace {
                tokens: avec![0.0f32; length * stride],
                update: if sgd.batch > 1 { avec![0.0f32; heads * stride] } else { avec![] },
                scores: vec![0.0; heads * length],
                combined: vec![0.0; length],
                d: vec![0.0; length],
                q: vec![0.0; length],
                weights: vec![0.0; heads * length],
                scale: vec![1.0; heads],
                biases: vec![0.0; heads],
                gradient_of_biases: vec![0.0; heads],
                uniforms: vec![0.0; 1 + sgd.task.sampler().uniforms()],
                theta: vec![0.0; features],
                sums: avec![0.0; length * WIDTH],
            },
            sgd,
        })
    }

    /// Number of steps taken.
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// What it shares with the other replicas.
    pub fn sgd(&self) -> &Sgd {
        &self.sgd
    }

    /// The replica's number.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// The overlaps of the keys now, and the biases that enter the scores.
    pub fn overlaps(&self) -> (DMatrix<f64>, DMatrix<f64>, Vec<f64>) {
        self.overlaps_watched(&Unwatched).unwrap_or_else(|| {
            let none = |columns| DMatrix::from_element(self.heads, columns, f64::NAN);
            (none(self.sgd.task.features()), none(self.heads), vec![f64::NAN; self.heads])
        })
    }

    /// [`Replica::overlaps`]; none once `watch` interrupts, which it may between two overlaps.
    pub fn overlaps_watched(&self, watch: &dyn Watch) -> Option<(DMatrix<f64>, DMatrix<f64>, Vec<f64>)> {
        let key = |h: usize| &self.keys[h * self.stride..(h + 1) * self.stride];
        let m = DMatrix::from_fn(self.heads, self.sgd.task.features(), |h, f| f64::from(key(h)[f]));
        let mut r = DMatrix::zeros(self.heads, self.heads);
        for h in 0..self.heads {
            for k in 0..=h {
                if watch.interrupted() {
                    return None;
                }
                r[(h, k)] = kernels::dot(key(h), key(k));
                r[(k, h)] = r[(h, k)];
            }
        }
        let b = biases(self.sgd.attention.bias, &r, &self.b);
        Some((m, r, b))
    }

    /// Takes one step.
    ///
    /// # Errors
    /// When a score, or the step itself, is too large for single precision to resolve; the replica
    /// is left as it was.
    pub fn advance(&mut self) -> Result<(), Diverged> {
        match self.step(None) {
            Err(Halt::Diverged(diverged)) => Err(diverged),
            _ => Ok(()),
        }
    }

    /// [`Replica::advance`], stopping within the step once `watch` interrupts.
    ///
    /// # Errors
    /// When it diverges, and the replica is left as it was; or is interrupted, when its keys may be between two steps:
    /// it is of no further use.
    pub fn advance_watched(&mut self, watch: &dyn Watch) -> Result<(), Halt> {
        self.step(self.sgd.steps_are_long(self.heads).then_some(watch))
    }

    /// One step; with a watch, for long ones, in pieces.
    fn step(&mut self, watch: Option<&dyn Watch>) -> Result<(), Halt> {
        let batch = self.sgd.batch;
        let rate = self.sgd.time_step() / batch as f64;
        let (heads, stride) = (self.heads, self.stride);
        self.space.gradient_of_biases.fill(0.0);
        self.space.update.fill(0.0);
        for sample in 0..batch as u64 {
            self.gradient(self.step * batch as u64 + sample, watch)?;
            let Workspace { scores, weights, scale, gradient_of_biases, update, tokens, .. } = &mut self.space;
            let length = scores.len() / heads;
            let mut largest = 0.0f64;
            for (w, &g) in weights.iter_mut().zip(&*scores) {
                largest = if g.abs() > largest || g.is_nan() { g.abs() } else { largest };
                *w = (-rate * g) as f32;
            }
            if !in_range(largest * rate) {
                return Err(Halt::Diverged(Diverged { step: self.step }));
            }
            for (sum, g) in gradient_of_biases.iter_mut().zip(scores.chunks_exact(length)) {
                *sum += g.iter().sum::<f64>();
            }
            if batch > 1 {
                scale.fill(1.0);
                for range in pieces(stride, weights.len(), watch) {
                    look(watch)?;
                    kernels::accumulate(update, tokens, stride, range, scale, weights);
                }
            }
        }
        let Workspace { scale, gradient_of_biases, update, tokens, weights, .. } = &mut self.space;
        let half_norm = self.sgd.attention.bias == Bias::HalfNorm;
        for (s, gb) in scale.iter_mut().zip(&*gradient_of_biases) {
            *s = if half_norm { (1.0 + rate * gb) as f32 } else { 1.0 };
        }
        if scale.iter().any(|s| !in_range(f64::from(*s))) {
            return Err(Halt::Diverged(Diverged { step: self.step }));
        }
        if batch > 1 {
            for ((key, update), &s) in self.keys.chunks_exact_mut(stride).zip(update.chunks_exact(stride)).zip(&*scale)
            {
                for (k, &u) in key.iter_mut().zip(update) {
                    *k = s.mul_add(*k, u);
                }
            }
        } else {
            for range in pieces(stride, weights.len(), watch) {
                look(watch)?;
                kernels::accumulate(&mut self.keys, tokens, stride, range, scale, weights);
            }
        }
        if self.sgd.attention.bias == Bias::Trained {
            for (b, gb) in self.b.iter_mut().zip(&*gradient_of_biases) {
                *b -= rate * gb;
            }
        }
        self.step += 1;
        Ok(())
    }

    /// Draws a fresh sample and leaves `g = d loss / d s` in `scores`, NaN where a score is too
    /// large to go on.
    fn gradient(&mut self, sample: u64, watch: Option<&dyn Watch>) -> Result<(), Halt> {
        let (stride, dimension) = (self.stride, self.sgd.dimension);
        let (length, features) = (self.sgd.task.length(), self.sgd.task.features());
        let space = &mut self.space;
        self.hidden.uniforms(sample, 0, &mut space.uniforms);
        let relevant = ((space.uniforms[0] * length as f64) as usize).min(length - 1);
        self.sgd.task.sampler().sample(&space.uniforms[1..], &mut space.theta);

        space.scores.fill(0.0);
        let used = dimension.next_multiple_of(WIDTH);
        for start in (0..used).step_by(BLOCK) {
            look(watch)?;
            let end = (start + BLOCK).min(used);
            for (l, token) in space.tokens.chunks_exact_mut(stride).enumerate() {
                self.noise.normals(sample, l as u32, start, &mut token[start..end.min(dimension)]);
                if l == relevant && start < features {
                    for (x, theta) in token[start..end].iter_mut().zip(&space.theta[start..]) {
                        *x += *theta as f32;
                    }
                }
            }
            kernels::add_scores(&self.keys, &space.tokens, stride, length, start..end, &mut space.scores);
        }

        let square = |h: usize| {
            let key = &self.keys[h * stride..(h + 1) * stride];
            kernels::dot(key, key)
        };
        match self.sgd.attention.bias {
            Bias::HalfNorm => (0..self.heads).for_each(|h| space.biases[h] = -0.5 * square(h)),
            Bias::None | Bias::Trained => space.biases.copy_from_slice(&self.b),
        }
        self.sgd.attention.bring_near(&mut space.biases, square);
        for (scores, b) in space.scores.chunks_exact_mut(length).zip(&space.biases) {
            for s in scores {
                *s += b;
                if !in_range(*s) {
                    *s = f64::NAN;
                }
            }
        }
        self.sgd.attention.forward_in_place(self.heads, length, &mut space.scores, &mut space.combined);
        for (l, (d, a)) in space.d.iter_mut().zip(&space.combined).enumerate() {
            *d = (a - if l == relevant { 1.0 } else { 0.0 }) as f32;
        }
        space.q.fill(0.0);
        for range in pieces(stride, length, watch) {
            look(watch)?;
            kernels::gram_times(&space.tokens, stride, &space.d, range, &mut space.q, &mut space.sums);
        }
        for q in &mut space.q {
            *q *= 2.0 / dimension as f64;
        }
        self.sgd.attention.backward_in_place(self.heads, length, &mut space.scores, &space.q);
        Ok(())
    }
}

/// Products of a pass between two looks at a watch: some ten milliseconds.
const PRODUCTS_BETWEEN_LOOKS: usize = 1 << 26;

/// The coordinates of rows of `stride` numbers, in pieces for a pass of `products` products each, so that a watch can be looked
/// at in between; all at once without one.
fn pieces(stride: usize, products: usize, watch: Option<&dyn Watch>) -> impl Iterator<Item = Range<usize>> {
    let size = match watch {
        Some(_) => (PRODUCTS_BETWEEN_LOOKS / products.max(1) / BLOCK).max(1) * BLOCK,
        None => stride,
    };
    (0..stride).step_by(size).map(move |start| start..(start + size).min(stride))
}
