//! Population averages by randomised quasi-Monte Carlo over the Gaussians of `theory/README.md` section 4.
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
use headflow_model::{Attention, Cost, Error, Lanes, Task, Unwatched, Watch};
use nalgebra::DMatrix;
use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use crate::moments::{Coordinates, Evaluator, Loss, Moments};

/// Samples side by side in a block.
const LANES: usize = 64;

/// Blocks that are summed by one task. Fixed, and partial sums are added in order: the bits do not
/// depend on the number of threads.
const BLOCKS_PER_TASK: usize = 16;

/// Products of a block, about, from which on the watch is asked within it: some milliseconds.
const LONG_BLOCK: usize = 1 << 24;

/// Quasi-random dimensions; further ones are pseudo-random.
pub const SOBOL_DIMENSIONS: usize = sobol_burley::NUM_DIMENSIONS as usize;

/// Points of one net.
const NET: usize = 1 << 16;

/// Operations for a coordinate of a point: a scrambled uniform and a normal quantile.
const COORDINATE: f64 = 20.0;

/// Bytes that points may take, whoever asks: a program may hold its user to less.
const MEMORY_LIMIT: f64 = (8u64 << 30) as f64;

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
    /// When `heads` is zero, `points` is not such a power, or the points take more time or memory than [`Cost::check`] allows.
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
        Self::cost(task, heads, points).within(
            Cost::MOST_WATCHED_OPERATIONS,
            MEMORY_LIMIT,
            if length > points { "length" } else { "points" },
            &format!(
                "{points} points of {} coordinates: use fewer points, heads or tokens",
                rows as f64 * length as f64
            ),
        )?;
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

    /// What it takes to draw points, and to take their averages once.
    pub fn cost(task: &Task, heads: usize, points: usize) -> Cost {
        let (heads, length, points) = (heads as f64, task.length() as f64, points as f64);
        let rows = heads + task.features() as f64;
        let coordinates = rows * length * points;
        // Each task has a block in double precision, with scores and sums beside it.
        let tasks = (points / (LANES * BLOCKS_PER_TASK) as f64).ceil().min(rayon::current_num_threads() as f64);
        let scratch = (rows + heads + 2.0) * length * LANES as f64 * size_of::<f64>() as f64;
        Cost {
            operations: coordinates * (COORDINATE + 0.5 * heads),
            bytes: coordinates * size_of::<f32>() as f64 + tasks * scratch,
        }
    }

    /// `scrambles` independent sets of points.
    ///
    /// # Errors
    /// As [`QuasiMonteCarlo::new`]; when all of them would not fit in memory.
    pub fn scrambles(
        task: &Task,
        heads: usize,
        attention: Attention,
        points: usize,
        seed: u64,
        scrambles: usize,
    ) -> Result<Vec<Self>, Error> {
        let one = Self::cost(task, heads, points);
        let all = Cost { operations: one.operations, bytes: one.bytes * scrambles as f64 };
        let advice = format!("{scrambles} sets of {points} points are held at once: use fewer of either");
        all.within(Cost::MOST_WATCHED_OPERATIONS, MEMORY_LIMIT, "scrambles", &advice)?;
        (0..scrambles as u32).map(|s| Self::new(task, heads, attention, points, seed, s)).collect()
    }

    /// Number of points.
    pub fn points(&self) -> usize {
        self.points
    }

    fn shape(&self) -> Sizes {
        Sizes { heads: self.heads, length: self.task.length(), features: self.task.features() }
    }

    /// The averages; none once `watch` interrupts.
    fn sum<const GRADIENT: bool>(&self, at: &Coordinates, watch: &dyn Watch) -> Option<Vec<f64>> {
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
        let b = at.near_biases(&self.attention);
        let task_size = BLOCKS_PER_TASK * sizes.block();
        let partial: Vec<Vec<f64>> = self
            .blocks
            .par_chunks(task_size)
            .map_init(
                || Scratch::new(sizes),
                |scratch, blocks| {
                    scratch.sums.fill(0.0);
                    if watch.interrupted() {
                        return Vec::new();
                    }
                    Arch::new().dispatch(Accumulate::<GRADIENT> {
                        blocks,
                        sizes,
                        attention: &self.attention,
                        keys: &keys,
                        b: &b,
                        scratch,
                        watch,
                    });
                    scratch.sums.clone()
                },
            )
            .collect();
        if watch.interrupted() {
            return None;
        }
        let mut total = vec![0.0; sizes.sums()];
        for sums in partial {
            for (t, s) in total.iter_mut().zip(sums) {
                *t += s;
            }
        }
        let scale = 1.0 / self.points as f64;
        total.iter_mut().for_each(|t| *t *= scale);
        Some(total)
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
        self.moments_watched(at, &Unwatched)
    }

    fn loss(&self, at: &Coordinates) -> Loss {
        self.loss_watched(at, &Unwatched)
    }

    fn moments_watched(&self, at: &Coordinates, watch: &dyn Watch) -> Moments {
        let (h, f) = (self.heads, self.task.features());
        let Some(sums) = self.sum::<true>(at, watch) else { return Moments::none(h, f) };
        // Row h: g x, g c, g g, g.
        let products = &sums[2..];
        let width = f + h + h + 1;
        Moments {
            loss: Loss { attention_on_relevant: sums[0], second_moment: sums[1] },
            gx: DMatrix::from_fn(h, f, |i, j| products[i * width + j]),
            gc: DMatrix::from_fn(h, h, |i, j| products[i * width + f + j]),
            gg: Some(DMatrix::from_fn(h, h, |i, j| products[i.max(j) * width + f + h + i.min(j)])),
            gb: (0..h).map(|i| products[i * width + f + h + h]).collect(),
        }
    }

    fn loss_watched(&self, at: &Coordinates, watch: &dyn Watch) -> Loss {
        match self.sum::<false>(at, watch) {
            Some(sums) => Loss { attention_on_relevant: sums[0], second_moment: sums[1] },
            None => Loss::NONE,
        }
    }
}

/// The uniforms of one point: scrambled Sobol, then pseudo-random.
pub(crate) fn fill_uniforms(uniforms: &mut [f64], index: usize, seed: u32, stream: &Stream, point: usize) {
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
    /// Rows of `L x LANES`: `x` and `c` in double precision, then the scores, which become weights
    /// and then `g`, then ones.
    rows: AVec<f64>,
    /// `a`, then `q`: `L x LANES`.
    combined: AVec<f64>,
    /// Sums over the samples.
    sums: Vec<f64>,
    lanes: Lanes,
}

impl Scratch {
    fn new(sizes: Sizes) -> Self {
        let row = sizes.length * LANES;
        let mut rows = avec![0.0; (sizes.rows() + sizes.heads + 1) * row];
        rows[(sizes.rows() + sizes.heads) * row..].fill(1.0);
        Self { rows, combined: avec![0.0; row], sums: vec![0.0; sizes.sums()], lanes: Lanes::new(LANES) }
    }
}

/// Adds a run of blocks to the sums of the scratch space, or a part of it once the watch interrupts.
struct Accumulate<'a, const GRADIENT: bool> {
    blocks: &'a [f32],
    sizes: Sizes,
    attention: &'a Attention,
    keys: &'a [f64],
    b: &'a [f64],
    scratch: &'a mut Scratch,
    watch: &'a dyn Watch,
}

impl<const GRADIENT: bool> WithSimd for Accumulate<'_, GRADIENT> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { blocks, sizes, attention, keys, b, scratch, watch } = self;
        let Sizes { heads, length, .. } = sizes;
        let row = length * LANES;
        // Asked between two blocks, and where one takes long between two of its heads.
        let within = (heads * sizes.block() > LONG_BLOCK).then_some(watch);
        let Scratch { rows, combined, sums, lanes } = scratch;
        for block in blocks.chunks_exact(sizes.block()) {
            if watch.interrupted() {
                return;
            }
            let (values, rest) = rows.split_at_mut(sizes.block());
            let (scores, _) = rest.split_at_mut(heads * row);
            for (to, &from) in values.iter_mut().zip(block) {
                *to = f64::from(from);
            }
            combine(simd, keys, b, values, scores, row, within);
            attention.forward_lanes(heads, length, lanes, scores, combined);
            sums[0] += total(simd, &combined[..LANES]);
            sums[1] += total_of_squares(simd, combined);
            if !GRADIENT {
                continue;
            }
            // q = d loss / d a = 2 (a - 1{l = 0})
            for a in &mut combined[..LANES] {
                *a -= 1.0;
            }
            for a in combined.iter_mut() {
                *a *= 2.0;
            }
            attention.backward_lanes(heads, length, lanes, scores, combined);
            add_products(simd, &rows[sizes.block()..][..heads * row], rows, row, &mut sums[2..], within);
        }
    }
}

/// `scores_h = b_h + sum_j keys_hj values_j`, row by row.
#[inline(always)]
fn combine<S: Simd>(
    simd: S,
    keys: &[f64],
    b: &[f64],
    values: &[f64],
    scores: &mut [f64],
    row: usize,
    watch: Option<&dyn Watch>,
) {
    let width = values.len() / row;
    for ((scores, key), &b) in scores.chunks_exact_mut(row).zip(keys.chunks_exact(width)).zip(b) {
        if watch.is_some_and(Watch::interrupted) {
            return;
        }
        let (scores, _) = S::as_mut_simd_f64s(scores);
        for (i, scores) in scores.chunks_exact_mut(8).enumerate() {
            let mut sum = [simd.splat_f64s(b); 8];
            for (&k, values) in key.iter().zip(values.chunks_exact(row)) {
                let values = &S::as_simd_f64s(values).0[8 * i..8 * i + 8];
                let k = simd.splat_f64s(k);
                for j in 0..8 {
                    sum[j] = simd.mul_add_f64s(k, values[j], sum[j]);
                }
            }
            scores.copy_from_slice(&sum);
        }
    }
}

#[inline(always)]
fn total<S: Simd>(simd: S, values: &[f64]) -> f64 {
    let mut sum = simd.splat_f64s(0.0);
    for &v in S::as_simd_f64s(values).0 {
        sum = simd.add_f64s(sum, v);
    }
    simd.reduce_sum_f64s(sum)
}

#[inline(always)]
fn total_of_squares<S: Simd>(simd: S, values: &[f64]) -> f64 {
    let mut sum = simd.splat_f64s(0.0);
    for &v in S::as_simd_f64s(values).0 {
        sum = simd.mul_add_f64s(v, v, sum);
    }
    simd.reduce_sum_f64s(sum)
}

/// Adds `left_h . right_j` for all rows to `sums` (row-major), tile by tile.
#[inline(always)]
fn add_products<S: Simd>(
    simd: S,
    left: &[f64],
    right: &[f64],
    row: usize,
    sums: &mut [f64],
    watch: Option<&dyn Watch>,
) {
    let (heads, columns) = (left.len() / row, right.len() / row);
    for h in (0..heads).step_by(2) {
        if watch.is_some_and(Watch::interrupted) {
            return;
        }
        let pair = h + 1 < heads;
        let mut j = 0;
        while j < columns {
            let triple = j + 2 < columns;
            let (left, right, sums) = (&left[h * row..], &right[j * row..], &mut sums[h * columns + j..]);
            match (pair, triple) {
                (true, true) => add_tile::<S, 2, 3>(simd, left, right, row, sums, columns),
                (true, false) => add_tile::<S, 2, 1>(simd, left, right, row, sums, columns),
                (false, true) => add_tile::<S, 1, 3>(simd, left, right, row, sums, columns),
                (false, false) => add_tile::<S, 1, 1>(simd, left, right, row, sums, columns),
            }
            j += if triple { 3 } else { 1 };
        }
    }
}

/// [`add_products`] for the first `A` and `B` rows: what is loaded serves several products.
#[inline(always)]
fn add_tile<S: Simd, const A: usize, const B: usize>(
    simd: S,
    left: &[f64],
    right: &[f64],
    row: usize,
    sums: &mut [f64],
    columns: usize,
) {
    let mut a_rows: [&[S::f64s]; A] = [&[]; A];
    for (vectors, values) in a_rows.iter_mut().zip(left.chunks_exact(row)) {
        *vectors = S::as_simd_f64s(values).0;
    }
    let mut b_rows: [&[S::f64s]; B] = [&[]; B];
    for (vectors, values) in b_rows.iter_mut().zip(right.chunks_exact(row)) {
        *vectors = S::as_simd_f64s(values).0;
    }
    let count = a_rows[0].len();
    let mut tile = [[simd.splat_f64s(0.0); B]; A];
    for c in 0..count {
        for a in 0..A {
            for b in 0..B {
                tile[a][b] = simd.mul_add_f64s(a_rows[a][..count][c], b_rows[b][..count][c], tile[a][b]);
            }
        }
    }
    for (a, tile) in tile.iter().enumerate() {
        for (b, &sum) in tile.iter().enumerate() {
            sums[a * columns + b] += simd.reduce_sum_f64s(sum);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use headflow_model::{Activation, Aggregation, Bias, Theta, largest_size};

    /// The slow twin: the definitions, sample by sample, on the evaluator's own points.
    fn plain(qmc: &QuasiMonteCarlo, at: &Coordinates) -> Moments {
        let (h, l, f) = (qmc.heads, qmc.task.length(), qmc.task.features());
        let mut moments = Moments {
            loss: Loss::default(),
            gx: DMatrix::zeros(h, f),
            gc: DMatrix::zeros(h, h),
            gb: vec![0.0; h],
            gg: None,
        };
        let mut gg = DMatrix::zeros(h, h);
        let weight = 1.0 / qmc.points as f64;
        for point in 0..qmc.points {
            let value = |j: usize, token: usize| {
                let block = point / LANES * (f + h) * l * LANES;
                f64::from(qmc.blocks[block + (j * l + token) * LANES + point % LANES])
            };
            let scores: Vec<f64> = (0..h * l)
                .map(|i| {
                    let (head, token) = (i / l, i % l);
                    let x: f64 = (0..f).map(|j| at.m[(head, j)] * value(j, token)).sum();
                    let c: f64 = (0..h).map(|j| at.c[(head, j)] * value(f + j, token)).sum();
                    x + c + at.b[head]
                })
                .collect();
            let (weights, a) = qmc.attention.forward(h, l, &scores).unwrap();
            let q: Vec<f64> = (0..l).map(|t| 2.0 * (a[t] - f64::from(u8::from(t == 0)))).collect();
            let g = qmc.attention.backward(h, l, &weights, &q).unwrap();
            moments.loss.attention_on_relevant += weight * a[0];
            moments.loss.second_moment += weight * a.iter().map(|a| a * a).sum::<f64>();
            for i in 0..h {
                for t in 0..l {
                    let g_it = weight * g[i * l + t];
                    (0..f).for_each(|j| moments.gx[(i, j)] += g_it * value(j, t));
                    (0..h).for_each(|j| moments.gc[(i, j)] += g_it * value(f + j, t));
                    (0..h).for_each(|j| gg[(i, j)] += g_it * g[j * l + t]);
                    moments.gb[i] += g_it;
                }
            }
        }
        Moments { gg: Some(gg), ..moments }
    }

    #[test]
    fn the_kernel_is_the_definition() {
        for heads in [1, 2, 3, 5] {
            for (activation, aggregation) in
                Activation::ALL.into_iter().zip([Aggregation::Mean, Aggregation::Sum, Aggregation::Sum])
            {
                let task = Task::new(4, Theta::Gaussian { mean: vec![1.0, -0.5], sd: Some(vec![0.5, 2.0]), cov: None })
                    .unwrap();
                let attention = Attention { activation, bias: Bias::Trained, aggregation };
                let qmc = QuasiMonteCarlo::new(&task, heads, attention, 256, 3, 1).unwrap();
                let at = Coordinates {
                    m: DMatrix::from_fn(heads, 2, |h, f| 0.7 - 0.4 * h as f64 + 0.3 * f as f64),
                    c: DMatrix::from_fn(heads, heads, |h, k| 0.5 / (1.0 + h as f64 + 2.0 * k as f64)),
                    b: (0..heads).map(|h| 0.2 - 0.3 * h as f64).collect(),
                };
                let (fast, slow) = (qmc.moments(&at), plain(&qmc, &at));
                assert!((fast.loss.value() - slow.loss.value()).abs() < 1e-13);
                assert!(largest_size((&fast.gx - &slow.gx).iter()) < 1e-13);
                assert!(largest_size((&fast.gc - &slow.gc).iter()) < 1e-13);
                assert!(largest_size((fast.gg.clone().unwrap() - slow.gg.unwrap()).iter()) < 1e-13);
                assert!(fast.gb.iter().zip(&slow.gb).all(|(a, b)| (a - b).abs() < 1e-13));
                assert_eq!(qmc.loss(&at), fast.loss);
            }
        }
    }

    /// The points have the moments of the model's Gaussians, also beyond 256 dimensions.
    #[test]
    fn points_are_standard_normal_with_a_signal_on_the_first_token() {
        let task = Task::new(120, Theta::Flip { nu: vec![2.0] }).unwrap();
        let attention = Attention::from(Activation::Softmax);
        let points = 1 << 12;
        let qmc = QuasiMonteCarlo::new(&task, 2, attention, points, 5, 0).unwrap();
        let (rows, length) = (3, 120);
        for row in 0..rows {
            for token in [0, 1, 60, 84, 85, 86, 119] {
                let (mut first, mut second) = (0.0, 0.0);
                for point in 0..points {
                    let at = point / LANES * rows * length * LANES + (row * length + token) * LANES + point % LANES;
                    first += f64::from(qmc.blocks[at]) / points as f64;
                    second += f64::from(qmc.blocks[at]).powi(2) / points as f64;
                }
                let variance = if row == 0 && token == 0 { 5.0 } else { 1.0 };
                let n = points as f64;
                assert!(first.abs() < 4.0 * (variance / n).sqrt(), "row {row} token {token}: mean {first}");
                assert!(
                    (second - variance).abs() < 4.0 * variance * (2.0 / n).sqrt() * 1.3,
                    "row {row} token {token}: {second}"
                );
            }
        }
    }

    #[test]
    fn scrambles_differ_and_repeat() {
        let task = Task::new(3, Theta::Sphere { nu: 1.0, features: 2 }).unwrap();
        let draw = |seed, scramble| {
            QuasiMonteCarlo::new(&task, 2, Activation::Softmax.into(), 64, seed, scramble).unwrap().blocks
        };
        assert_eq!(draw(1, 0), draw(1, 0));
        assert_ne!(draw(1, 0), draw(1, 1));
        assert_ne!(draw(1, 0), draw(2, 0));
    }

    #[test]
    fn impossible_sets_are_refused() {
        let task = Task::new(3, Theta::Flip { nu: vec![1.0] }).unwrap();
        let new = |heads, points| QuasiMonteCarlo::new(&task, heads, Activation::Softmax.into(), points, 1, 0);
        assert!(new(0, 64).is_err());
        assert!(new(1, 100).is_err());
        assert!(new(1, 32).is_err());
        assert!(new(64, 1 << 32).is_err(), "would need more than 8 GiB");
        // However long a sequence or a list of scrambles, it is counted before anything is allocated.
        let long = Task::new(u32::MAX as usize, Theta::Flip { nu: vec![1.0] }).unwrap();
        let error = QuasiMonteCarlo::new(&long, 1000, Activation::Softmax.into(), 64, 1, 0).unwrap_err();
        assert!(matches!(error, Error::TooCostly { .. }) && error.to_string().starts_with("length: "), "{error}");
        let error = QuasiMonteCarlo::scrambles(&task, 2, Activation::Softmax.into(), 64, 1, 1 << 40).unwrap_err();
        assert!(matches!(error, Error::TooCostly { .. }) && error.to_string().starts_with("scrambles: "), "{error}");
    }
}
