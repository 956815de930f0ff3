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

use aligned_vec::{AVec, avec};
use headflow_model::random::{Purpose, Stream};
use headflow_model::{Attention, Bias, Error, OrderParameters, Task, biases};
use nalgebra::DMatrix;

use crate::kernels::{self, BLOCK, WIDTH};

/// Beyond this size of a score, or of an update's coefficient, single precision no longer resolves
/// differences of scores of order 1: SGD has diverged.
const DIVERGED: f64 = 1e7;

/// Whether a score or coefficient is one to go on with; a NaN is not.
fn in_range(value: f64) -> bool {
    value.abs() < DIVERGED
}

/// Memory that the keys and tokens of all replicas may take, in bytes.
pub(crate) const MEMORY_LIMIT: usize = 8 << 30;

/// What all replicas of a simulation share.
#[derive(Debug, Clone)]
pub struct Sgd {
    /// The task.
    pub task: Task,
    /// The attention.
    pub attention: Attention,
    /// Token dimension `D`.
    pub dimension: usize,
    /// Learning rate in units of `1 / D`: `eta = gamma / D`.
    pub gamma: f64,
    /// Samples per step `B`.
    pub batch: usize,
    /// Seed of all random numbers.
    pub seed: u64,
}

/// Initial keys.
#[derive(Debug, Clone, PartialEq)]
pub enum Start {
    /// Keys with exactly these overlaps.
    Given(OrderParameters),
    /// Independent keys `N(0, scale^2 / D)`, different in every replica, with biases `b`.
    Random {
        /// Number of heads.
        heads: usize,
        /// Standard deviation of a key's norm per direction, times `sqrt(D)`.
        scale: f64,
        /// Initial biases, length `heads`.
        b: Vec<f64>,
    },
}

impl Start {
    /// Number of heads.
    pub fn heads(&self) -> usize {
        match self {
            Self::Given(point) => point.heads(),
            Self::Random { heads, .. } => *heads,
        }
    }
}

/// The step that a diverging replica could not take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Diverged {
    /// Steps taken before it.
    pub step: u64,
}

impl Sgd {
    /// Checks the parameters against each other and the start.
    ///
    /// # Errors
    /// When `D < H + F`, `gamma` is not positive and finite, the batch is empty, or shapes differ.
    pub fn validate(&self, start: &Start) -> Result<(), Error> {
        let (heads, features) = (start.heads(), self.task.features());
        if heads == 0 {
            return Err(Error::invalid("heads", "there must be at least one"));
        }
        if self.dimension < heads + features {
            return Err(Error::invalid(
                "dimension",
                format!(
                    "D = {} is too small: {heads} keys and {features} spikes need D >= H + F = {}",
                    self.dimension,
                    heads + features
                ),
            ));
        }
        if !(self.gamma.is_finite() && self.gamma > 0.0) {
            return Err(Error::invalid(
                "gamma",
                format!("SGD needs a positive learning rate, got {} (gamma = 0 is the flow's limit)", self.gamma),
            ));
        }
        let bytes = self.replica_bytes(heads);
        if bytes > MEMORY_LIMIT || self.dimension > 1 << 33 {
            return Err(Error::invalid(
                "dimension",
                format!(
                    "the keys and tokens of one replica at D = {} need {:.0} GiB, above the limit of {} GiB",
                    self.dimension,
                    self.dimension as f64 * 4.0 * (heads + self.task.length()) as f64 / (1u64 << 30) as f64,
                    MEMORY_LIMIT >> 30
                ),
            ));
        }
        if self.batch == 0 {
            return Err(Error::invalid("batch", "there must be at least one sample a step"));
        }
        match start {
            Start::Given(point) if point.features() != features => {
                Err(Error::invalid("m0", format!("has {} features but theta has {features}", point.features())))
            }
            Start::Random { scale, .. } if !(scale.is_finite() && *scale >= 0.0) => {
                Err(Error::invalid("key_scale", format!("must be finite and not negative, got {scale}")))
            }
            Start::Random { heads, b, .. } if b.len() != *heads => {
                Err(Error::invalid("b0", format!("has length {} but there are {heads} heads", b.len())))
            }
            _ => Ok(()),
        }
    }

    /// Memory that one replica takes: its keys, one sample, and the update of a batch.
    pub(crate) fn replica_bytes(&self, heads: usize) -> usize {
        (heads * if self.batch > 1 { 2 } else { 1 } + self.task.length())
            .saturating_mul(kernels::stride(self.dimension.min(1 << 33)))
            .saturating_mul(size_of::<f32>())
    }

    /// Time that one step advances: `gamma / D`.
    pub fn time_step(&self) -> f64 {
        self.gamma / self.dimension as f64
    }

    /// The step at which `time` is reached, to the nearest.
    pub fn step_at(&self, time: f64) -> u64 {
        (time / self.time_step()).round() as u64
    }

    /// Replica number `index` at its start.
    ///
    /// # Errors
    /// As [`Sgd::validate`].
    pub fn replica(&self, start: &Start, index: u32) -> Result<Replica, Error> {
        self.validate(start)?;
        let (heads, length, features) = (start.heads(), self.task.length(), self.task.features());
        let stride = kernels::stride(self.dimension);
        let mut keys = avec![0.0f32; heads * stride];
        let b = match start {
            Start::Given(point) => {
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
            Start::Random { scale, b, .. } => {
                let stream = Stream::new(self.seed, Purpose::Keys, index);
                let sd = (scale / (self.dimension as f64).sqrt()) as f32;
                for (h, key) in keys.chunks_exact_mut(stride).enumerate() {
                    stream.normals(0, h as u32, 0, &mut key[..self.dimension]);
                    key.iter_mut().for_each(|k| *k *= sd);
                }
                b.clone()
            }
        };
        // Only trained biases are parameters; the others follow from their rule.
        let b = if self.attention.bias == Bias::Trained { b } else { vec![0.0; heads] };
        Ok(Replica {
            sgd: self.clone(),
            index,
            heads,
            stride,
            keys,
            b,
            step: 0,
            noise: Stream::new(self.seed, Purpose::Tokens, index),
            hidden: Stream::new(self.seed, Purpose::Task, index),
            space: Workspace {
                tokens: avec![0.0f32; length * stride],
                update: if self.batch > 1 { avec![0.0f32; heads * stride] } else { avec![] },
                scores: vec![0.0; heads * length],
                combined: vec![0.0; length],
                d: vec![0.0; length],
                q: vec![0.0; length],
                weights: vec![0.0; heads * length],
                scale: vec![1.0; heads],
                gradient_of_biases: vec![0.0; heads],
                uniforms: vec![0.0; 1 + self.task.sampler().uniforms()],
                theta: vec![0.0; features],
                sums: avec![0.0; length * WIDTH],
            },
        })
    }
}

/// One run of SGD.
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
    gradient_of_biases: Vec<f64>,
    uniforms: Vec<f64>,
    theta: Vec<f64>,
    sums: AVec<f32>,
}

impl Replica {
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
        let key = |h: usize| &self.keys[h * self.stride..(h + 1) * self.stride];
        let m = DMatrix::from_fn(self.heads, self.sgd.task.features(), |h, f| f64::from(key(h)[f]));
        let r = DMatrix::from_fn(self.heads, self.heads, |h, k| kernels::dot(key(h.max(k)), key(h.min(k))));
        let b = biases(self.sgd.attention.bias, &r, &self.b);
        (m, r, b)
    }

    /// Takes one step.
    ///
    /// # Errors
    /// When a score, or the step itself, is too large for single precision to resolve; the replica
    /// is left as it was.
    pub fn advance(&mut self) -> Result<(), Diverged> {
        let batch = self.sgd.batch;
        let rate = self.sgd.time_step() / batch as f64;
        let (heads, stride) = (self.heads, self.stride);
        self.space.gradient_of_biases.fill(0.0);
        self.space.update.fill(0.0);
        for sample in 0..batch as u64 {
            self.gradient(self.step * batch as u64 + sample);
            let Workspace { scores, weights, scale, gradient_of_biases, update, tokens, .. } = &mut self.space;
            let length = scores.len() / heads;
            let mut largest = 0.0f64;
            for (w, &g) in weights.iter_mut().zip(&*scores) {
                largest = if g.abs() > largest || g.is_nan() { g.abs() } else { largest };
                *w = (-rate * g) as f32;
            }
            if !in_range(largest * rate) {
                return Err(Diverged { step: self.step });
            }
            for (sum, g) in gradient_of_biases.iter_mut().zip(scores.chunks_exact(length)) {
                *sum += g.iter().sum::<f64>();
            }
            if batch > 1 {
                scale.fill(1.0);
                kernels::accumulate(update, tokens, stride, length, scale, weights);
            }
        }
        let Workspace { scale, gradient_of_biases, update, tokens, weights, .. } = &mut self.space;
        let half_norm = self.sgd.attention.bias == Bias::HalfNorm;
        for (s, gb) in scale.iter_mut().zip(&*gradient_of_biases) {
            *s = if half_norm { (1.0 + rate * gb) as f32 } else { 1.0 };
        }
        if scale.iter().any(|s| !in_range(f64::from(*s))) {
            return Err(Diverged { step: self.step });
        }
        if batch > 1 {
            for ((key, update), &s) in self.keys.chunks_exact_mut(stride).zip(update.chunks_exact(stride)).zip(&*scale)
            {
                for (k, &u) in key.iter_mut().zip(update) {
                    *k = s.mul_add(*k, u);
                }
            }
        } else {
            let length = weights.len() / heads;
            kernels::accumulate(&mut self.keys, tokens, stride, length, scale, weights);
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
    fn gradient(&mut self, sample: u64) {
        let (stride, dimension) = (self.stride, self.sgd.dimension);
        let (length, features) = (self.sgd.task.length(), self.sgd.task.features());
        let space = &mut self.space;
        self.hidden.uniforms(sample, 0, &mut space.uniforms);
        let relevant = ((space.uniforms[0] * length as f64) as usize).min(length - 1);
        self.sgd.task.sampler().sample(&space.uniforms[1..], &mut space.theta);

        space.scores.fill(0.0);
        let used = dimension.next_multiple_of(WIDTH);
        for start in (0..used).step_by(BLOCK) {
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

        let half_norm = self.sgd.attention.bias == Bias::HalfNorm;
        for (h, scores) in space.scores.chunks_exact_mut(length).enumerate() {
            let b = if half_norm {
                let key = &self.keys[h * stride..(h + 1) * stride];
                -0.5 * kernels::dot(key, key)
            } else {
                self.b[h]
            };
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
        kernels::gram_times(&space.tokens, stride, &space.d, &mut space.q, &mut space.sums);
        for q in &mut space.q {
            *q *= 2.0 / dimension as f64;
        }
        self.sgd.attention.backward_in_place(self.heads, length, &mut space.scores, &space.q);
    }
}
