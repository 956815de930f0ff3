//! The exact overlap chain: SGD at finite `D` through its order parameters alone
//! (`theory/README.md` section 12).
//!
//! Fresh Gaussian tokens are rotation invariant, so the order parameters under SGD are a Markov
//! chain of their own. With keys `k_h = sum_f m_hf k*_f + sum_j C_hj e_j`, a sample needs `x = k* X^T`
//! (`F x L`), `c = e X^T` (`H x L`) and, of the other `n = D - F - H` directions `Y` (`L x n`), what
//! the step sees of them:
//!
//! ```text
//! scores   s = m x + C c + b,   a = attention(s),   d_l = a_l - 1{l = eps}
//! gradient q = (2 / D) (x^T x d + c^T c d + Y Y^T d),   g = d loss / d s
//! update   m <- m - rate g x^T,   C <- C - rate g c^T,   new directions - rate g Y,   rate = gamma / (D B)
//! ```
//!
//! (half-norm: keys times `1 + rate sum g` first; trained: `b <- b - rate sum g`). `Y` is never drawn:
//!
//! ```text
//! u = Y^T d,  |u|^2 = |d|^2 chi^2_n:   Y Y^T d = |u| v,   v = d |u| / |d|^2 + P z,   z ~ N(0, I_L)
//! g Y (g Y)^T = (g v)(g v)^T + R T T^T R^T,   R R^T = g P g^T,   P = 1 - d d^T / |d|^2
//! ```
//!
//! where `v = Y u / |u|`, and `T` is the Bartlett factor (lower triangular, `T_jj ~ chi_{n-1-j}`, normals
//! below) of a Wishart matrix with `n - 1` degrees of freedom. The new factor is the lower-triangular
//! `L` of `[C, -rate g v, -rate R T] = L Q`: O(L H (F + H) + H^3) numbers a step, whatever `D`.
//! The state is the factor, never `r`: `r = m m^T + C C^T` is positive semi-definite by construction
//! after any number of steps. `L` comes from the products of the rows (Cholesky) where that is well
//! conditioned, else from reflections, whose rounding errors are relative to each row.
//!
//! Samples of a batch meet the directions that earlier ones brought in: those count as further
//! coordinates of the token, and `n` is smaller by their number.
//!
//! Random numbers are addressed by `(seed, replica, sample)`, so a chain that is resumed from its
//! [`State`] takes the same steps, bit for bit. Normals have single precision; all else is double.

use aligned_vec::{AVec, avec};
use headflow_model::attention::{PADDING, sum_of};
use headflow_model::random::{Purpose, Stream};
use headflow_model::{Bias, Error, Watch, biases, largest_size};
use multiversion::multiversion;
use nalgebra::DMatrix;
use serde::{Deserialize, Serialize};

use crate::sgd::{Diverged, Engine, Halt, Sgd, Start, in_range, look};

/// Normals that are drawn at a time, at least: a few samples' worth when sequences are short.
const NORMALS_AT_A_TIME: usize = 1024;

/// A sum of squares below this has lost digits to underflow, and its inverse may be infinite.
const UNDERFLOW: f64 = 1e-280;

/// Sub-streams of [`Purpose::Chain`], told apart by the token's number.
mod address {
    /// Normals of the samples.
    pub const NORMALS: u32 = 0;
    /// Uniforms of `theta`.
    pub const THETA: u32 = 1;
    /// Uniforms of the chi variables, first attempts.
    pub const UNIFORMS: u32 = 2;
    /// Random initial keys.
    pub const START: u32 = 3;
    /// Further attempts; chi variable `j` has token `FURTHER + j`.
    pub const FURTHER: u32 = 4;
}

/// Where a chain is: all that its future depends on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// Steps taken.
    pub step: u64,
    /// Alignments `m`, `H x F`, row by row.
    pub m: Vec<f64>,
    /// Factor `C` of `r - m m^T`, `H x H`, row by row.
    pub c: Vec<f64>,
    /// Trained biases, or zeros, length `H`.
    pub b: Vec<f64>,
}

/// One run of the overlap chain.
#[derive(Debug, Clone)]
pub struct Chain {
    sgd: Sgd,
    index: u32,
    heads: usize,
    features: usize,
    /// Row `h`: `m_h`, then `C_h`.
    keys: Vec<f64>,
    b: Vec<f64>,
    step: u64,
    stream: Stream,
    space: Workspace,
}

#[derive(Debug, Clone)]
struct Workspace {
    /// Distance between rows of scores.
    stride: usize,
    /// Normals of the samples of one block.
    normals: AVec<f32>,
    /// The block that they belong to.
    block: Option<u64>,
    samples_per_block: u64,
    /// [`PADDING`] tokens by [`PADDING`]: the rows of the sample, then `z` (which becomes `v`), `d`, and ones.
    tokens: AVec<f64>,
    /// Scores, then weights, then `g`: `H x stride`.
    scores: AVec<f64>,
    /// `a`, then `q`.
    combined: AVec<f64>,
    /// Partial sums over tokens.
    partial: AVec<f64>,
    /// Their totals.
    totals: Vec<f64>,
    tops: Vec<f64>,
    /// As scores have them.
    biases: Vec<f64>,
    /// `g` times `x` and `c`, summed over the batch: `H x (F + H)`.
    products: Vec<f64>,
    /// `sum_l g_hl`, summed over the batch.
    gradient_of_biases: Vec<f64>,
    /// New directions: `H x (2 H + 1)`, of which the first `H` belong to earlier samples.
    fresh: Vec<f64>,
    /// `[C, new directions]`: `H x columns`.
    wide: Vec<f64>,
    /// `g P g^T`, then `R`: `H x H`.
    root: Vec<f64>,
    /// Bartlett's `T`: `H x H`.
    bartlett: Vec<f64>,
    /// The normals of a sample beyond its tokens: below the diagonal of `T`, then the chi variables'.
    extra: Vec<f64>,
    chi_uniforms: Vec<f64>,
    uniforms: Vec<f64>,
    theta: Vec<f64>,
}

impl Chain {
    /// Chain number `index` at its start.
    ///
    /// # Errors
    /// As [`Sgd::validate`].
    pub fn new(sgd: &Sgd, start: &Start, index: u32) -> Result<Self, Error> {
        let sgd = Sgd { engine: Engine::Overlap, ..sgd.clone() };
        sgd.validate(start)?;
        let (heads, features) = (start.heads(), sgd.task.features());
        let mut state =
            State { step: 0, m: vec![0.0; heads * features], c: vec![0.0; heads * heads], b: vec![0.0; heads] };
        match (start.point(index)?, start) {
            (Some(point), _) => {
                let c = point.residual_factor();
                state.m = (0..heads * features).map(|i| point.m()[(i / features, i % features)]).collect();
                state.c = (0..heads * heads).map(|i| c[(i / heads, i % heads)]).collect();
                state.b = point.b().to_vec();
            }
            (None, Start::Random { scale, b, .. }) => {
                let stream = Stream::new(sgd.seed, Purpose::Chain, index);
                let sd = scale / (sgd.dimension as f64).sqrt();
                let mut normals = vec![0.0f32; heads * features + heads * heads];
                stream.normals(0, address::START, 0, &mut normals);
                let (for_m, for_c) = normals.split_at(heads * features);
                for (m, &z) in state.m.iter_mut().zip(for_m) {
                    *m = sd * f64::from(z);
                }
                // Bartlett: the factor of a Wishart matrix with D - F degrees of freedom.
                for h in 0..heads {
                    for j in 0..h {
                        state.c[h * heads + j] = sd * f64::from(for_c[h * heads + j]);
                    }
                    let uniform = unit(stream.words(1, address::START, h as u32)[0]);
                    let attempt = Attempt { normal: f64::from(for_c[h * heads + h]), uniform };
                    let freedom = (sgd.dimension - features - h) as u64;
                    state.c[h * heads + h] = sd * chi_square(freedom, attempt, &stream, u64::MAX, h).sqrt();
                }
                state.b.clone_from(b);
            }
            (None, _) => {}
        }
        if sgd.attention.bias != Bias::Trained {
            state.b.fill(0.0);
        }
        Self::at(&sgd, heads, index, &state)
    }

    /// Chain number `index` at a state that [`Chain::state`] gave: it goes on with the same bits.
    ///
    /// # Errors
    /// When the state does not have the shape of `heads` and the task, or is not finite.
    pub fn at(sgd: &Sgd, heads: usize, index: u32, state: &State) -> Result<Self, Error> {
        let sgd = Sgd { engine: Engine::Overlap, ..sgd.clone() };
        let (features, length) = (sgd.task.features(), sgd.task.length());
        let lengths = (state.m.len(), state.c.len(), state.b.len());
        if lengths != (heads * features, heads * heads, heads) {
            return Err(Error::invalid(
                "checkpoint",
                format!(
                    "holds {lengths:?} numbers for m, C, b, which is not the shape of {heads} heads and {features} features"
                ),
            ));
        }
        if (0..heads).any(|h| state.c[h * heads..(h + 1) * heads].iter().skip(h + 1).any(|v| *v != 0.0)) {
            return Err(Error::invalid("checkpoint", "holds a factor C that is not lower triangular"));
        }
        if !state.m.iter().chain(&state.c).chain(&state.b).all(|v| v.is_finite()) {
            return Err(Error::invalid("checkpoint", "holds a number that is not finite"));
        }
        let keys = (0..heads)
            .flat_map(|h| state.m[h * features..][..features].iter().chain(&state.c[h * heads..][..heads]))
            .copied()
            .collect();
        let stride = length.next_multiple_of(PADDING);
        let rows = features + if sgd.batch > 1 { 2 * heads } else { heads };
        let extra = heads * (heads - 1) / 2 + heads + 1;
        let normals = (rows + 1) * stride + extra;
        let samples_per_block = (NORMALS_AT_A_TIME / normals).max(1);
        let totals = heads * (rows + 3) + heads * (heads + 1) / 2;
        let mut tokens = avec![0.0; (rows + 3) * stride];
        for block in tokens.chunks_exact_mut((rows + 3) * PADDING) {
            block[(rows + 2) * PADDING..].fill(1.0);
        }
        Ok(Self {
            index,
            heads,
            features,
            keys,
            b: state.b.clone(),
            step: state.step,
            stream: Stream::new(sgd.seed, Purpose::Chain, index),
            space: Workspace {
                stride,
                normals: avec![0.0; samples_per_block * normals],
                block: None,
                samples_per_block: samples_per_block as u64,
                tokens,
                scores: avec![0.0; heads * stride],
                combined: avec![0.0; stride],
                partial: avec![0.0; totals * PADDING],
                totals: vec![0.0; totals],
                tops: vec![0.0; heads],
                biases: vec![0.0; heads],
                products: vec![0.0; heads * (features + heads)],
                gradient_of_biases: vec![0.0; heads],
                fresh: vec![0.0; heads * (2 * heads + 1)],
                wide: vec![0.0; heads * (2 * heads + 1)],
                root: vec![0.0; heads * heads],
                bartlett: vec![0.0; heads * heads],
                extra: vec![0.0; extra],
                chi_uniforms: vec![0.0; heads + 1],
                uniforms: vec![0.0; sgd.task.sampler().uniforms()],
                theta: vec![0.0; features],
            },
            sgd,
        })
    }

    /// Where it is.
    pub fn state(&self) -> State {
        let (heads, features) = (self.heads, self.features);
        let rows = self.keys.chunks_exact(features + heads);
        State {
            step: self.step,
            m: rows.clone().flat_map(|key| &key[..features]).copied().collect(),
            c: rows.flat_map(|key| &key[features..]).copied().collect(),
            b: self.b.clone(),
        }
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

    /// The order parameters now, and the biases that enter the scores.
    pub fn overlaps(&self) -> (DMatrix<f64>, DMatrix<f64>, Vec<f64>) {
        let keys = DMatrix::from_row_slice(self.heads, self.features + self.heads, &self.keys);
        let r = &keys * keys.transpose();
        let b = biases(self.sgd.attention.bias, &r, &self.b);
        (keys.columns(0, self.features).into_owned(), r, b)
    }

    /// Takes one step.
    ///
    /// # Errors
    /// When a score, or the step itself, is beyond what attention resolves; the replica is left as
    /// it was.
    pub fn advance(&mut self) -> Result<(), Diverged> {
        match step(self, None) {
            Ok(()) => {
                self.step += 1;
                Ok(())
            }
            Err(_) => Err(Diverged { step: self.step }),
        }
    }

    /// [`Chain::advance`], stopping within the step once `watch` interrupts.
    ///
    /// # Errors
    /// When it diverges or is interrupted; the replica is left as it was.
    pub fn advance_watched(&mut self, watch: &dyn Watch) -> Result<(), Halt> {
        if !self.sgd.steps_are_long(self.heads) {
            return self.advance().map_err(Halt::Diverged);
        }
        // Keys change on the way.
        let before = self.keys.clone();
        match step(self, Some(watch)) {
            Ok(()) => {
                self.step += 1;
                Ok(())
            }
            Err(halt) => {
                self.keys = before;
                Err(halt)
            }
        }
    }

    /// Draws the normals of `sample`, a block of samples at a time, and says where they are.
    #[inline(always)]
    fn draw(&mut self, sample: u64) -> std::ops::Range<usize> {
        let space = &mut self.space;
        let size = space.normals.len() / space.samples_per_block as usize;
        let block = sample / space.samples_per_block;
        if space.block != Some(block) {
            self.stream.normals(block, address::NORMALS, 0, &mut space.normals);
            space.block = Some(block);
        }
        let at = (sample % space.samples_per_block) as usize * size;
        self.stream.uniforms(sample, address::THETA, &mut space.uniforms);
        self.sgd.task.sampler().sample(&space.uniforms, &mut space.theta);
        for (block, four) in space.chi_uniforms.chunks_mut(4).enumerate() {
            let words = self.stream.words(sample, address::UNIFORMS, block as u32);
            for (u, w) in four.iter_mut().zip(words) {
                *u = unit(w);
            }
        }
        at..at + size
    }
}

/// A uniform on (0, 1) from 32 bits.
#[inline(always)]
fn unit(word: u32) -> f64 {
    (f64::from(word) + 0.5) * (1.0 / 4_294_967_296.0)
}

/// The random numbers of one attempt at a chi-square variable.
#[derive(Debug, Clone, Copy)]
struct Attempt {
    normal: f64,
    uniform: f64,
}

/// A chi-square variable with `freedom` degrees of freedom, exactly in law: a squared normal for
/// one, else twice a gamma variable by rejection (Marsaglia & Tsang, ACM TOMS 26, 363 (2000)). A
/// first attempt fails rarely; further ones have numbers of their own at `(sample, number)`.
#[inline(always)]
fn chi_square(freedom: u64, first: Attempt, stream: &Stream, sample: u64, number: usize) -> f64 {
    match freedom {
        0 => 0.0,
        1 => first.normal * first.normal,
        _ => {
            let shape = 0.5 * freedom as f64;
            let d = shape - 1.0 / 3.0;
            let c = 1.0 / (9.0 * d).sqrt();
            let root = c.mul_add(first.normal, 1.0);
            let cube = root * root * root;
            let square = first.normal * first.normal;
            if root > 0.0 && first.uniform < 1.0 - 0.0331 * square * square {
                return 2.0 * d * cube;
            }
            rejection(d, c, first, stream, sample, number)
        }
    }
}

#[cold]
fn rejection(d: f64, c: f64, first: Attempt, stream: &Stream, sample: u64, number: usize) -> f64 {
    let mut attempt = first;
    for further in 0u32.. {
        let root = 1.0 + c * attempt.normal;
        if root > 0.0 {
            let cube = root * root * root;
            if attempt.uniform.ln() < 0.5 * attempt.normal * attempt.normal + d * (1.0 - cube + cube.ln()) {
                return 2.0 * d * cube;
            }
        }
        let words = stream.words(sample, address::FURTHER + number as u32, further);
        let radius = (-2.0 * unit(words[0]).ln()).sqrt();
        attempt = Attempt { normal: radius * (std::f64::consts::TAU * unit(words[1])).cos(), uniform: unit(words[2]) };
    }
    d
}

/// Adds `factor * from` to partial sums.
#[inline(always)]
fn accumulate(sums: &mut [f64; PADDING], factor: &[f64; PADDING], from: &[f64; PADDING]) {
    for i in 0..PADDING {
        sums[i] = factor[i].mul_add(from[i], sums[i]);
    }
}

/// `to += factor * from`.
#[inline(always)]
fn add(to: &mut [f64], factor: f64, from: &[f64]) {
    for (to, &from) in to.iter_mut().zip(from) {
        *to = factor.mul_add(from, *to);
    }
}

/// One step. When a number is out of range nothing is changed; when `watch` interrupts, which it is asked on the way, the keys
/// may be.
#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl+avx2+fma+bmi1+bmi2",
    "x86_64+avx2+fma+bmi1+bmi2"
))]
fn step(chain: &mut Chain, watch: Option<&dyn Watch>) -> Result<(), Halt> {
    // Small shapes that are run most, compiled with their sizes known: a sixth faster.
    match (chain.heads, chain.features, chain.sgd.batch) {
        (2, 1, 1) => step_of(chain, 2, 1, 1, watch),
        (4, 2, 1) => step_of(chain, 4, 2, 1, watch),
        (heads, features, batch) => step_of(chain, heads, features, batch, watch),
    }
}

#[inline(always)]
fn step_of(
    chain: &mut Chain,
    heads: usize,
    features: usize,
    batch: usize,
    watch: Option<&dyn Watch>,
) -> Result<(), Halt> {
    let diverged = Err(Halt::Diverged(Diverged { step: chain.step }));
    let rate = chain.sgd.time_step() / batch as f64;
    let width = features + heads;
    chain.space.products.fill(0.0);
    chain.space.gradient_of_biases.fill(0.0);
    // Directions outside the spikes and the keys that the batch has brought in so far.
    let mut directions = 0;
    for sample in 0..batch as u64 {
        if !gradient(chain, heads, features, batch, chain.step * batch as u64 + sample, rate, directions, watch)? {
            return diverged;
        }
        directions = heads.min(chain.sgd.dimension - width);
    }
    let space = &mut chain.space;
    let half_norm = chain.sgd.attention.bias == Bias::HalfNorm;
    if half_norm && space.gradient_of_biases.iter().any(|gb| !in_range(1.0 + rate * gb)) {
        return diverged;
    }
    // [C, -rate new directions], of which the factor is the new C; the sign does not matter.
    let columns = if batch > 1 { 2 * heads } else { 2 * heads + 1 };
    for h in 0..heads {
        let scale = if half_norm { rate.mul_add(space.gradient_of_biases[h], 1.0) } else { 1.0 };
        let key = &mut chain.keys[h * width..(h + 1) * width];
        for (k, g) in key.iter_mut().zip(&space.products[h * width..(h + 1) * width]) {
            *k = (-rate).mul_add(*g, scale * *k);
        }
        let (c, fresh) = space.wide[h * columns..(h + 1) * columns].split_at_mut(heads);
        c.copy_from_slice(&key[features..]);
        // In a batch the factor in the first H columns, else the columns that follow them.
        let from = h * (2 * heads + 1) + if batch > 1 { 0 } else { heads };
        for (to, from) in fresh.iter_mut().zip(&space.fresh[from..]) {
            *to = rate * from;
        }
    }
    lower_triangular(&mut space.wide[..heads * columns], heads, columns, watch)?;
    for h in 0..heads {
        chain.keys[h * width + features..(h + 1) * width]
            .copy_from_slice(&space.wide[h * columns..h * columns + heads]);
    }
    if chain.sgd.attention.bias == Bias::Trained {
        add(&mut chain.b, -rate, &space.gradient_of_biases);
    }
    Ok(())
}

/// One sample: adds `g x^T`, `g c^T` and `sum g` to the sums, and its new directions, given the
/// `directions` that earlier samples brought in; `false` when a number is out of range.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn gradient(
    chain: &mut Chain,
    heads: usize,
    features: usize,
    batch: usize,
    sample: u64,
    rate: f64,
    directions: usize,
    watch: Option<&dyn Watch>,
) -> Result<bool, Halt> {
    let (dimension, length) = (chain.sgd.dimension, chain.sgd.task.length());
    let width = features + heads;
    let rows = width + directions;
    let drawn = chain.draw(sample);
    let space = &mut chain.space;
    let stride = space.stride;
    let v_row = features + if batch > 1 { 2 * heads } else { heads };
    let (d_row, all) = (v_row + 1, v_row + 3);
    let (for_tokens, for_extra) = space.normals[drawn].split_at((v_row + 1) * stride);
    for (to, from) in space.extra.iter_mut().zip(for_extra) {
        *to = f64::from(*from);
    }
    // Padding holds normals too: its attention is zero.
    let (tokens, _) = space.tokens.as_chunks_mut::<PADDING>();
    let (normals, _) = for_tokens.as_chunks::<PADDING>();
    for (block, normals) in tokens.chunks_exact_mut(all).zip(normals.chunks_exact(v_row + 1)) {
        for (to, from) in block.iter_mut().zip(normals) {
            for i in 0..PADDING {
                to[i] = f64::from(from[i]);
            }
        }
    }
    // The relevant token is token 0 by exchangeability.
    for (x, theta) in tokens.iter_mut().zip(&space.theta) {
        x[0] += theta;
    }

    // C is lower triangular.
    let key = |h: usize| &chain.keys[h * width..h * width + features + h + 1];
    let square = |h: usize| key(h).iter().map(|k| k * k).sum::<f64>();
    match chain.sgd.attention.bias {
        Bias::HalfNorm => (0..heads).for_each(|h| space.biases[h] = -0.5 * square(h)),
        Bias::None | Bias::Trained => space.biases.copy_from_slice(&chain.b),
    }
    chain.sgd.attention.bring_near(&mut space.biases, square);
    let mut fine = true;
    for h in 0..heads {
        look(watch)?;
        let (key, b) = (key(h), space.biases[h]);
        let (scores, _) = space.scores[h * stride..(h + 1) * stride].as_chunks_mut::<PADDING>();
        for (scores, block) in scores.iter_mut().zip(tokens.chunks_exact(all)) {
            let mut sum = [b; PADDING];
            for (&k, row) in key.iter().zip(block) {
                accumulate(&mut sum, &[k; PADDING], row);
            }
            for s in sum {
                fine &= in_range(s);
            }
            *scores = sum;
        }
    }
    if !fine {
        return Ok(false);
    }
    chain.sgd.attention.forward_padded(length, stride, &mut space.tops, &mut space.scores, &mut space.combined);
    space.combined[0] -= 1.0;

    // All rows times d: x d, c d, z . d and |d|^2.
    let (partial, _) = space.partial.as_chunks_mut::<PADDING>();
    partial[..all].fill([0.0; PADDING]);
    for (block, d) in tokens.chunks_exact_mut(all).zip(space.combined.as_chunks::<PADDING>().0) {
        block[d_row] = *d;
        for (sum, row) in partial.iter_mut().zip(&*block) {
            accumulate(sum, d, row);
        }
    }
    let weights = &mut space.totals[..all];
    for (w, sum) in weights.iter_mut().zip(&*partial) {
        *w = sum_of(sum);
    }
    // v = Y u / |u| and |u|, given d.
    let square = weights[d_row];
    let freedom = (dimension - rows) as u64;
    let (below, for_chi) = space.extra.split_at(heads * (heads - 1) / 2);
    let chi = |j: usize, freedom: u64| {
        let attempt = Attempt { normal: for_chi[j], uniform: space.chi_uniforms[j] };
        chi_square(freedom, attempt, &chain.stream, sample, j)
    };
    let inverse = if square > UNDERFLOW { 1.0 / square } else { 0.0 };
    let length_of_u = (chi(heads, freedom) * square).sqrt();
    let (keep, along_d) = if freedom == 0 { (0.0, 0.0) } else { (1.0, (length_of_u - weights[v_row]) * inverse) };
    // q = 2 G d: the rows weighted by their products with d, and |u| v.
    let scale = 2.0 / dimension as f64;
    weights[v_row] = length_of_u;
    weights[..v_row + 1].iter_mut().for_each(|w| *w *= scale);
    for (block, q) in tokens.chunks_exact_mut(all).zip(space.combined.as_chunks_mut::<PADDING>().0) {
        let d = *q;
        for i in 0..PADDING {
            block[v_row][i] = along_d.mul_add(d[i], keep * block[v_row][i]);
        }
        let mut sum = [0.0; PADDING];
        for (&w, row) in weights[..rows].iter().zip(&*block) {
            accumulate(&mut sum, &[w; PADDING], row);
        }
        accumulate(&mut sum, &[weights[v_row]; PADDING], &block[v_row]);
        *q = sum;
    }
    chain.sgd.attention.backward_padded(stride, &mut space.scores, &space.combined);

    // All rows times g, and g g^T.
    partial.fill([0.0; PADDING]);
    for h in 0..heads {
        look(watch)?;
        let (sums, squares) = partial.split_at_mut(heads * all);
        let sums = &mut sums[h * all..(h + 1) * all];
        let squares = &mut squares[h * (h + 1) / 2..(h + 1) * (h + 2) / 2];
        let (g, _) = space.scores.as_chunks::<PADDING>();
        let blocks = stride / PADDING;
        for (i, (block, own)) in tokens.chunks_exact(all).zip(&g[h * blocks..(h + 1) * blocks]).enumerate() {
            for (sum, row) in sums.iter_mut().zip(block) {
                accumulate(sum, own, row);
            }
            for (k, sum) in squares.iter_mut().enumerate() {
                accumulate(sum, own, &g[k * blocks + i]);
            }
            for g in own {
                fine &= in_range(g * rate);
            }
        }
    }
    if !fine {
        return Ok(false);
    }
    for (total, sum) in space.totals.iter_mut().zip(&*partial) {
        *total = sum_of(sum);
    }

    // What the sample adds.
    let columns = 2 * heads + 1;
    let (sums, squares) = space.totals.split_at(heads * all);
    for h in 0..heads {
        let own = &sums[h * all..(h + 1) * all];
        for (total, sum) in space.products[h * width..(h + 1) * width].iter_mut().zip(own) {
            *total += sum;
        }
        space.gradient_of_biases[h] += own[d_row + 1];
        for k in 0..=h {
            space.root[h * heads + k] =
                (-own[d_row] * inverse).mul_add(sums[k * all + d_row], squares[h * (h + 1) / 2 + k]);
        }
        let fresh = &mut space.fresh[h * columns..(h + 1) * columns];
        if directions == 0 {
            fresh.fill(0.0);
        }
        for (total, sum) in fresh.iter_mut().zip(&own[width..rows]) {
            *total += sum;
        }
        fresh[heads] = own[v_row];
    }

    // R, a column for each pivot that does not vanish, and R T.
    let rank = lower_factor(&mut space.root, heads, |h| squares[h * (h + 1) / 2 + h]);
    let columns_of_t = rank.min(freedom.saturating_sub(1) as usize);
    let mut at = 0;
    for j in 0..columns_of_t {
        space.bartlett[j * heads + j] = chi(j, freedom - 1 - j as u64).sqrt();
        for i in j + 1..heads {
            space.bartlett[i * heads + j] = below[at];
            at += 1;
        }
    }
    for h in 0..heads {
        look(watch)?;
        for j in 0..columns_of_t {
            let mut sum = 0.0;
            for k in j..rank {
                sum = space.root[h * heads + k].mul_add(space.bartlett[k * heads + j], sum);
            }
            space.fresh[h * columns + heads + 1 + j] = sum;
        }
        for j in columns_of_t..heads {
            space.fresh[h * columns + heads + 1 + j] = 0.0;
        }
    }
    if batch > 1 {
        lower_triangular(&mut space.fresh, heads, columns, watch)?;
    }
    Ok(true)
}

/// Turns the lower triangle of a positive semi-definite `S` (`n x n`) into a factor `R` of
/// `S = R R^T` whose columns are those of the pivots that do not vanish, and returns their number. Entries
/// of `S` are differences of numbers of size `size(row)`: a pivot within their rounding is none.
#[inline(always)]
fn lower_factor(s: &mut [f64], n: usize, size: impl Fn(usize) -> f64) -> usize {
    let mut rank = 0;
    // Column j of S gives column `rank` of R, which is never to its right.
    for j in 0..n {
        let pivot = s[j * n + j] - (0..rank).map(|k| s[j * n + k] * s[j * n + k]).sum::<f64>();
        if pivot <= 1e-13 * size(j) {
            s[j * n + rank] = 0.0;
            continue;
        }
        let inverse = 1.0 / pivot.sqrt();
        for i in j + 1..n {
            let mut sum = s[i * n + j];
            for k in 0..rank {
                sum = (-s[i * n + k]).mul_add(s[j * n + k], sum);
            }
            s[i * n + rank] = sum * inverse;
        }
        s[j * n + rank] = pivot * inverse;
        rank += 1;
    }
    for h in 0..n {
        for k in (h + 1).min(rank)..rank {
            s[h * n + k] = 0.0;
        }
    }
    rank
}

/// Turns the rows of `a` (`n x columns`, `columns >= n`) into `L` of `a = L Q`, `Q` orthogonal, by
/// Householder reflections from the right; entries right of the diagonal become zero.
#[inline(always)]
fn lower_triangular(a: &mut [f64], n: usize, columns: usize, watch: Option<&dyn Watch>) -> Result<(), Halt> {
    if factor_of_products(a, n, columns) { Ok(()) } else { reflect(a, n, columns, watch) }
}

/// The same by Cholesky from the products of the rows, at half the latency; `false`, and nothing changed, when a
/// pivot is a small part of its row's square, of which rounding would be a noticeable part.
#[inline(always)]
fn factor_of_products(a: &mut [f64], n: usize, columns: usize) -> bool {
    /// Rows of more heads gain nothing.
    const MOST: usize = 8;
    const SMALLEST_PIVOT: f64 = 1e-3;
    if n > MOST {
        return false;
    }
    let mut l = [[0.0; MOST]; MOST];
    for i in 0..n {
        for j in 0..=i {
            l[i][j] = short_dot(&a[i * columns..(i + 1) * columns], &a[j * columns..(j + 1) * columns]);
        }
    }
    for j in 0..n {
        let mut pivot = l[j][j];
        let square = pivot;
        for k in 0..j {
            pivot = (-l[j][k]).mul_add(l[j][k], pivot);
        }
        if pivot <= SMALLEST_PIVOT * square || !(square > UNDERFLOW) {
            return false;
        }
        let root = pivot.sqrt();
        let inverse = 1.0 / root;
        l[j][j] = root;
        for i in j + 1..n {
            let mut sum = l[i][j];
            for k in 0..j {
                sum = (-l[i][k]).mul_add(l[j][k], sum);
            }
            l[i][j] = sum * inverse;
        }
    }
    // The signs that a reflection would give: those of small updates, reversed.
    let mut signs = [1.0; MOST];
    for j in 0..n {
        signs[j] = if a[j * columns + j] < 0.0 { 1.0 } else { -1.0 };
    }
    for i in 0..n {
        a[i * columns..(i + 1) * columns].fill(0.0);
        for j in 0..=i {
            a[i * columns + j] = signs[j] * l[i][j];
        }
    }
    true
}

#[inline(always)]
fn reflect(a: &mut [f64], n: usize, columns: usize, watch: Option<&dyn Watch>) -> Result<(), Halt> {
    for h in 0..n {
        look(watch)?;
        let (done, below) = a.split_at_mut((h + 1) * columns);
        let row = &mut done[h * columns + h..];
        let mut first = row[0];
        let mut rest = short_dot(&row[1..], &row[1..]);
        // A reflection does not depend on the length of its vector: a power of two brings that near 1.
        let tiny = first.mul_add(first, rest) < UNDERFLOW;
        let scale = if tiny { (-largest_size(&*row).log2().floor()).min(1000.0).exp2() } else { 1.0 };
        if tiny {
            row.iter_mut().for_each(|v| *v *= scale);
            first = row[0];
            rest = short_dot(&row[1..], &row[1..]);
        }
        if rest > 0.0 {
            let norm = first.mul_add(first, rest).sqrt();
            // Of the sign that does not cancel; the reflecting vector is the row with it as first entry.
            let lead = first + if first < 0.0 { -norm } else { norm };
            let factor = 1.0 / (norm * (norm + first.abs()));
            for other in below.chunks_exact_mut(columns) {
                let other = &mut other[h..];
                // The product with the row does not wait for the root.
                let along = lead.mul_add(other[0], short_dot(&other[1..], &row[1..])) * -factor;
                other[0] = along.mul_add(lead, other[0]);
                add(&mut other[1..], along, &row[1..]);
            }
            row.fill(0.0);
            row[0] = if first < 0.0 { norm } else { -norm };
        }
        if tiny {
            row.iter_mut().for_each(|v| *v /= scale);
        }
    }
    Ok(())
}

/// `a . b` of short rows, in four interleaved sums.
#[inline(always)]
fn short_dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0; 4];
    let (a, a_tail) = a.as_chunks::<4>();
    let (b, b_tail) = b.as_chunks::<4>();
    for (a, b) in a.iter().zip(b) {
        for i in 0..4 {
            sums[i] = a[i].mul_add(b[i], sums[i]);
        }
    }
    for i in 0..a_tail.len().min(b_tail.len()) {
        sums[i] = a_tail[i].mul_add(b_tail[i], sums[i]);
    }
    (sums[0] + sums[2]) + (sums[1] + sums[3])
}

#[cfg(test)]
mod tests {
    use super::*;
    use nalgebra::DMatrix;

    /// Rows `[C, small]` with `C` lower triangular, entries from a stream.
    fn rows(n: usize, columns: usize, seed: u64, small: f64) -> Vec<f64> {
        let mut normals = vec![0.0f32; n * columns];
        Stream::new(seed, Purpose::Test, 0).normals(0, 0, 0, &mut normals);
        let entry = |i: usize, z: f32| {
            let (h, j) = (i / columns, i % columns);
            f64::from(z) * if j < h { 0.3 } else { small } + if j == h { 1.0 } else { 0.0 }
        };
        normals.iter().enumerate().map(|(i, &z)| entry(i, z)).collect()
    }

    fn products(a: &[f64], n: usize, columns: usize) -> DMatrix<f64> {
        let a = DMatrix::from_row_slice(n, columns, a);
        &a * a.transpose()
    }

    /// Both ways to the factor give the same lower-triangular matrix, with the same signs for small
    /// updates, and the products of the rows.
    #[test]
    fn both_ways_to_the_factor_agree() {
        for n in 1..=6 {
            for seed in 0..50 {
                let columns = 2 * n + 1;
                let given = rows(n, columns, seed, 0.01);
                let (mut short, mut long) = (given.clone(), given.clone());
                assert!(factor_of_products(&mut short, n, columns));
                reflect(&mut long, n, columns, None).unwrap();
                for (i, (s, l)) in short.iter().zip(&long).enumerate() {
                    assert!((s - l).abs() < 1e-12, "entry {i}: {s} {l}");
                    assert!(i % columns <= i / columns || *s == 0.0);
                }
                let error =
                    headflow_model::largest_size((products(&given, n, columns) - products(&short, n, columns)).iter());
                assert!(error < 1e-13, "{error}");
            }
        }
    }

    /// Rows whose squares underflow are turned like others: beside long ones, alone, and next to nothing.
    #[test]
    fn tiny_rows_are_turned() {
        let (n, columns) = (3, 7);
        for tiny in [1e-100, 1e-140, 1e-155, 1e-165, 1e-200, 1e-300] {
            for rows_that_are in [1, 3, 7] {
                let plain = rows(n, columns, 5, 0.5);
                let scale = |i: usize| if rows_that_are >> (i / columns) & 1 == 1 { tiny } else { 1.0 };
                let mut given: Vec<f64> = plain.iter().enumerate().map(|(i, v)| v * scale(i)).collect();
                lower_triangular(&mut given, n, columns, None).unwrap();
                for (i, v) in given.iter_mut().enumerate() {
                    *v /= scale(i);
                }
                let error =
                    headflow_model::largest_size((products(&given, n, columns) - products(&plain, n, columns)).iter());
                assert!(error < 1e-13, "{tiny} {rows_that_are}: {error}");
            }
        }
    }

    /// Nearly dependent rows take the long way, which keeps their difference to full precision.
    #[test]
    fn nearly_equal_rows_are_kept_apart() {
        let (n, columns, apart) = (2, 5, 1e-9);
        let mut given = rows(n, columns, 1, 0.5);
        for j in 0..columns {
            given[columns + j] = given[j] + if j == 1 { apart } else { 0.0 };
        }
        let before = given.clone();
        assert!(!factor_of_products(&mut given, n, columns));
        assert_eq!(given, before);
        lower_triangular(&mut given, n, columns, None).unwrap();
        let square: f64 = before[..columns].iter().map(|v| v * v).sum();
        let exact = apart * (1.0 - before[1] * before[1] / square).sqrt();
        assert!((given[columns + 1].abs() - exact).abs() < 1e-6 * exact, "{} {exact}", given[columns + 1]);
    }

    /// Known answers in law: mean and variance of chi-square at several degrees of freedom, within 4 standard
    /// errors, and at `10^9` in its own scale.
    #[test]
    fn chi_squares_have_their_moments() {
        let stream = Stream::new(1, Purpose::Test, 3);
        for freedom in [1u64, 2, 3, 10, 1_000_000_000] {
            let (mut mean, mut square, n) = (0.0, 0.0, 200_000);
            for k in 0..n {
                let mut normal = [0.0f32];
                stream.normals(k, 0, 0, &mut normal);
                let uniform = unit(stream.words(k, 1, 0)[0]);
                let attempt = Attempt { normal: f64::from(normal[0]), uniform };
                let z = (chi_square(freedom, attempt, &stream, k, 0) - freedom as f64) / (2.0 * freedom as f64).sqrt();
                mean += z / n as f64;
                square += z * z / n as f64;
            }
            // Variance of z^2 is 2 + 12 / freedom.
            let error = (1.0 / n as f64).sqrt();
            assert!(mean.abs() < 4.0 * error, "{freedom}: mean {mean}");
            assert!((square - 1.0).abs() < 4.0 * error * (2.0 + 12.0 / freedom as f64).sqrt(), "{freedom}: {square}");
        }
    }
}
