//! Population averages by randomised quasi-Monte Carlo over the Gaussians of model.md section 4.
//!
//! One point is `(theta, x, c)`: `F` or fewer uniforms for `theta`, then token by token, the
//! relevant one first, the normals `x_fl` and `c_jl`. The points are a Sobol sequence with
//! Owen scrambling (Burley 2020, crate `sobol_burley`), fixed once drawn, so that the averages are
//! smooth functions of the keys. Independent scrambles give independent estimates and with them
//! standard errors.
//!
//! Two limits of the sequence and what happens there:
//! - 256 dimensions: further coordinates are independent pseudo-random numbers (Philox). The first
//!   tokens, the relevant one among them, keep their quasi-random coordinates; the error then
//!   falls like `N^{-1/2}` in the rest, and the standard error over scrambles says what is left.
//! - 2^16 points: more are made of several independent scrambles of 2^16 points each.

use aligned_vec::{AVec, avec};
use headflow_model::random::{Purpose, Stream, normal_quantile};
use headflow_model::{Attention, Error, Lanes, Task};
use multiversion::multiversion;
use nalgebra::DMatrix;
use rayon::prelude::*;

use crate::moments::{Coordinates, Evaluator, Loss, Moments};

/// Samples side by side in a block.
const LANES: usize = 32;

/// Blocks that are summed by one task. Fixed, and partial sums are added in order: the bits do not
/// depend on the number of threads.
const BLOCKS_PER_TASK: usize = 16;

/// Quasi-random dimensions; further ones are pseudo-random.
pub const SOBOL_DIMENSIONS: usize = sobol_burley::NUM_DIMENSIONS as usize;

/// Points of one net.
const NET: usize = 1 << 16;

/// Memory that the points of one scramble may take, in bytes.
const MEMORY_LIMIT: usize = 8 << 30;

/// A fixed set of points and the attention whose averages it gives.
#[derive(Debug, Clone)]
pub struct QuasiMonteCarlo {
    task: Task,
    heads: usize,
    attention: Attention,
    points: usize,
    /// Block by block: rows `x_f` then `c_j`, each row `L x LANES`.
    blocks: AVec<f32>,
}

impl QuasiMonteCarlo {
    /// Draws scramble `scramble` of `seed`, with `points` points (a power of two, at least 64).
    ///
    /// # Errors
    /// When `heads` is zero, `points` is not such a power, or the points would not fit in memory
    /// (8 GiB a scramble).
    pub fn new(
        task: &Task,
        heads: usize,
        attention: Attention,
        points: usize,
        seed: u64,
        scramble: u32,
    ) -> Result<Self, Error> {
        if heads == 0 {
            return Err(Error::invalid("heads", "there must be at least one"));
        }
        if !points.is_power_of_two() || points < LANES {
            return Err(Error::invalid("points", format!("{points} is not a power of two from {LANES} on")));
        }
        let (length, features) = (task.length(), task.features());
        let rows = features + heads;
        let row = length * LANES;
        let bytes = (rows * row).saturating_mul(points / LANES).saturating_mul(size_of::<f32>());
        if bytes > MEMORY_LIMIT {
            return Err(Error::invalid(
                "points",
                format!(
                    "{points} points of {} coordinates need {} GiB a scramble, above the limit of {} GiB; use fewer",
                    rows * length,
                    bytes >> 30,
                    MEMORY_LIMIT >> 30
                ),
            ));
        }
        let stream = Stream::new(seed, Purpose::Points, scramble);
        let seeds: Vec<u32> = (0..points.div_ceil(NET)).map(|net| stream.words(0, 0, net as u32)[0]).collect();
        let sampler = task.sampler();
        let dimensions = sampler.uniforms() + rows * length;
        let mut blocks = avec![0.0f32; rows * row * (points / LANES)];
        blocks.par_chunks_exact_mut(rows * row).enumerate().for_each_init(
            || (vec![0.0; dimensions], vec![0.0; features]),
            |(uniforms, theta), (block, values)| {
                for lane in 0..LANES {
                    let point = block * LANES + lane;
                    fill_uniforms(uniforms, point % NET, seeds[point / NET], &stream, point);
                    let (for_theta, normals) = uniforms.split_at(sampler.uniforms());
                    sampler.sample(for_theta, theta);
                    for (l, token) in normals.chunks_exact(rows).enumerate() {
                        for (j, &u) in token.iter().enumerate() {
                            let signal = if l == 0 && j < features { theta[j] } else { 0.0 };
                            values[j * row + l * LANES + lane] = (normal_quantile(u) + signal) as f32;
                        }
                    }
                }
            },
        );
        Ok(Self { task: task.clone(), heads, attention, points, blocks })
    }

    /// `scrambles` independent sets of points.
    ///
    /// # Errors
    /// As [`QuasiMonteCarlo::new`].
    pub fn scrambles(
        task: &Task,
        heads: usize,
        attention: Attention,
        points: usize,
        seed: u64,
        scrambles: usize,
    ) -> Result<Vec<Self>, Error> {
        (0..scrambles as u32).map(|s| Self::new(task, heads, attention, points, seed, s)).collect()
    }

    /// Number of points.
    pub fn points(&self) -> usize {
        self.points
    }

    fn shape(&self) -> Sizes {
        Sizes { heads: self.heads, length: self.task.length(), features: self.task.features() }
    }

    fn sum<const GRADIENT: bool>(&self, at: &Coordinates) -> Vec<f64> {
        let sizes = self.shape();
        assert_eq!((at.m.nrows(), at.m.ncols()), (sizes.heads, sizes.features), "m does not fit");
        assert_eq!(at.c.shape(), (sizes.heads, sizes.heads), "C does not fit");
        assert_eq!(at.b.len(), sizes.heads, "b does not fit");
        // Row h: m_h then C_h, the coefficients of the rows of a block.
        let rows = sizes.rows();
        let keys: Vec<f64> = (0..sizes.heads)
            .flat_map(|h| at.m.row(h).iter().chain(at.c.row(h).iter()).copied().collect::<Vec<_>>())
            .collect();
        debug_assert_eq!(keys.len(), sizes.heads * rows);
        let task_size = BLOCKS_PER_TASK * sizes.block();
        let partial: Vec<Vec<f64>> = self
            .blocks
            .par_chunks(task_size)
            .map_init(
                || Scratch::new(sizes),
                |scratch, blocks| {
                    scratch.sums.fill([0.0; LANES]);
                    if GRADIENT {
                        accumulate_moments(blocks, sizes, &self.attention, &keys, &at.b, scratch);
                    } else {
                        accumulate_loss(blocks, sizes, &self.attention, &keys, &at.b, scratch);
                    }
                    scratch.sums.iter().map(|lanes| lanes.iter().sum()).collect()
                },
            )
            .collect();
        let mut total = vec![0.0; sizes.sums()];
        for sums in partial {
            for (t, s) in total.iter_mut().zip(sums) {
                *t += s;
            }
        }
        let scale = 1.0 / self.points as f64;
        total.iter_mut().for_each(|t| *t *= scale);
        total
    }
}

impl Evaluator for QuasiMonteCarlo {
    fn task(&self) -> &Task {
        &self.task
    }

    fn heads(&self) -> usize {
        self.heads
    }

    fn attention(&self) -> &Attention {
        &self.attention
    }

    fn moments(&self, at: &Coordinates) -> Moments {
        let (h, f) = (self.heads, self.task.features());
        let sums = self.sum::<true>(at);
        let products = &sums[2..];
        let width = f + h + h + 1;
        Moments {
            loss: Loss { attention_on_relevant: sums[0], second_moment: sums[1] },
            gx: DMatrix::from_fn(h, f, |i, j| products[i * width + j]),
            gc: DMatrix::from_fn(h, h, |i, j| products[i * width + f + j]),
            gg: DMatrix::from_fn(h, h, |i, j| products[i.max(j) * width + f + h + i.min(j)]),
            gb: (0..h).map(|i| products[i * width + f + h + h]).collect(),
        }
    }

    fn loss(&self, at: &Coordinates) -> Loss {
        let sums = self.sum::<false>(at);
        Loss { attention_on_relevant: sums[0], second_moment: sums[1] }
    }
}

/// The uniforms of one point: scrambled Sobol, then pseudo-random.
fn fill_uniforms(uniforms: &mut [f64], index: usize, seed: u32, stream: &Stream, point: usize) {
    let split = uniforms.len().min(SOBOL_DIMENSIONS);
    let (quasi, pseudo) = uniforms.split_at_mut(split);
    for (set, values) in quasi.chunks_mut(4).enumerate() {
        let sample = sobol_burley::sample_4d(index as u32, set as u32, seed);
        for (u, s) in values.iter_mut().zip(sample) {
            // The sequence has 23 bits; the middle of each cell keeps the normals finite.
            *u = f64::from(s) + 0.5 / f64::from(1u32 << 23);
        }
    }
    if !pseudo.is_empty() {
        stream.uniforms(point as u64, 1, pseudo);
    }
}

#[derive(Debug, Clone, Copy)]
struct Sizes {
    heads: usize,
    length: usize,
    features: usize,
}

impl Sizes {
    /// Rows of a block: `x` then `c`.
    #[inline(always)]
    fn rows(self) -> usize {
        self.features + self.heads
    }

    /// Numbers in a block.
    #[inline(always)]
    fn block(self) -> usize {
        self.rows() * self.length * LANES
    }

    /// Numbers that are averaged: two for the loss; for each head `g x`, `g c`, `g g`, `g`.
    fn sums(self) -> usize {
        2 + self.heads * (self.rows() + self.heads + 1)
    }
}

/// Working space of one task.
struct Scratch {
    /// The block in double precision.
    values: AVec<f64>,
    /// Scores, then weights, then `g`: `H x L x LANES`.
    scores: AVec<f64>,
    /// `a`, then `q`: `L x LANES`.
    combined: AVec<f64>,
    /// Sums, lane by lane.
    sums: AVec<[f64; LANES]>,
    lanes: Lanes,
}

impl Scratch {
    fn new(sizes: Sizes) -> Self {
        Self {
            values: avec![0.0; sizes.block()],
            scores: avec![0.0; sizes.heads * sizes.length * LANES],
            combined: avec![0.0; sizes.length * LANES],
            sums: avec![[0.0; LANES]; sizes.sums()],
            lanes: Lanes::new(LANES),
        }
    }
}

/// Weights and loss of one block; leaves `q = 2 (a - 1{l = 0})` in `combined`.
#[inline(always)]
fn forward_block(block: &[f32], sizes: Sizes, attention: &Attention, keys: &[f64], b: &[f64], scratch: &mut Scratch) {
    let Sizes { heads, length, .. } = sizes;
    let Scratch { values, scores, combined, sums, lanes } = scratch;
    for (to, &from) in values.iter_mut().zip(block) {
        *to = f64::from(from);
    }
    let (values, _) = values.as_chunks::<LANES>();
    let (rows_of_scores, _) = scores.as_chunks_mut::<LANES>();
    for ((scores, key), &b) in rows_of_scores.chunks_exact_mut(length).zip(keys.chunks_exact(sizes.rows())).zip(b) {
        for (l, scores) in scores.iter_mut().enumerate() {
            let mut s = [b; LANES];
            for (&k, values) in key.iter().zip(values.chunks_exact(length)) {
                for i in 0..LANES {
                    s[i] = k.mul_add(values[l][i], s[i]);
                }
            }
            *scores = s;
        }
    }
    attention.forward_lanes(heads, length, lanes, scores, combined);
    let (of_relevant, _) = combined.split_at_mut(LANES);
    for (sum, a) in sums[0].iter_mut().zip(of_relevant) {
        *sum += *a;
    }
    add_products(combined, combined, &mut sums[1]);
    for a in &mut combined[..LANES] {
        *a -= 1.0;
    }
    for a in combined.iter_mut() {
        *a *= 2.0;
    }
}

/// Adds `sum_l a_l b_l` to `sum`, lane by lane.
#[inline(always)]
fn add_products(a: &[f64], b: &[f64], sum: &mut [f64; LANES]) {
    let mut total = *sum;
    for (a, b) in a.as_chunks::<LANES>().0.iter().zip(b.as_chunks::<LANES>().0) {
        for i in 0..LANES {
            total[i] = a[i].mul_add(b[i], total[i]);
        }
    }
    *sum = total;
}

#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl+avx2+fma+bmi1+bmi2",
    "x86_64+avx2+fma+bmi1+bmi2"
))]
fn accumulate_moments(
    blocks: &[f32],
    sizes: Sizes,
    attention: &Attention,
    keys: &[f64],
    b: &[f64],
    scratch: &mut Scratch,
) {
    let Sizes { heads, length, .. } = sizes;
    let rows = sizes.rows();
    let row = length * LANES;
    for block in blocks.chunks_exact(sizes.block()) {
        forward_block(block, sizes, attention, keys, b, scratch);
        let Scratch { values, scores, combined, sums, lanes } = &mut *scratch;
        attention.backward_lanes(heads, length, lanes, scores, combined);
        for (h, out) in sums[2..].chunks_exact_mut(rows + heads + 1).enumerate() {
            let g = &scores[h * row..(h + 1) * row];
            for (sum, values) in out.iter_mut().zip(values.chunks_exact(row)) {
                add_products(g, values, sum);
            }
            for (sum, other) in out[rows..].iter_mut().zip(scores.chunks_exact(row)).take(h + 1) {
                add_products(g, other, sum);
            }
            for g in g.as_chunks::<LANES>().0 {
                for (sum, g) in out[rows + heads].iter_mut().zip(g) {
                    *sum += g;
                }
            }
        }
    }
}

#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512cd+avx512dq+avx512vl+avx2+fma+bmi1+bmi2",
    "x86_64+avx2+fma+bmi1+bmi2"
))]
fn accumulate_loss(
    blocks: &[f32],
    sizes: Sizes,
    attention: &Attention,
    keys: &[f64],
    b: &[f64],
    scratch: &mut Scratch,
) {
    for block in blocks.chunks_exact(sizes.block()) {
        forward_block(block, sizes, attention, keys, b, scratch);
    }
}
