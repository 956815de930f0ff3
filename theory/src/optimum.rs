//! The best population loss that keys of `H` heads can have, by descent from many starts.
//!
//! With `k_h = sum_f m_hf k*_f + sum_j C_hj e_j` and the moments of [`crate::moments`],
//!
//! ```text
//! E(m, C, b) = 1 - 2 E[a_eps] + E[sum_l a_l^2] -> min
//! dE/dm_h = gx_h,              dE/dC_h = gc_h                  b none (b_h = 0)
//! dE/dm_h = gx_h - gb_h m_h,   dE/dC_h = gc_h - gb_h C_h       b half-norm (b_h = -|k_h|^2 / 2)
//! dE/dm_h = gx_h,              dE/dC_h = gc_h,  dE/db_h = gb_h   b trained
//! ```
//!
//! (softmax: biases have no effect and are left at 0). The search starts in the span of the spikes, `C = 0`:
//! coordinates outside add noise to the scores, and mostly nothing else. Where [`lowest_curvature_outside`] finds
//! that they lower the loss (softmax's spare heads, which would do the same thing in the span, are better off with
//! different noise), the descent goes on with one more column of `C`, until no further one helps.
//!
//! Each start goes downhill by limited-memory BFGS (Liu, Nocedal 1989) with the line search of Moré and Thuente
//! (1994), both from the crate `argmin`. What comes of it is a local minimum, or a plateau that is one to the
//! tolerance: a head whose bias sinks without end is switched off, whatever its key. The lowest of many is the
//! best loss that was found, not a proof that there is none better.
//!
//! Minima with the same loss count as one. A finer rule would have to undo permutations of the heads, the
//! symmetries of `P_theta`, keys of heads that are off, and shares among heads with the same key, which
//! bayes-softmax leaves open; their common invariant is the loss. An evaluator that does not have the symmetries
//! of `P_theta` itself (quasi-Monte Carlo has them to its error only) tells mirror images apart.

use std::cell::RefCell;

use argmin::core::{CostFunction, Executor, Gradient, IterState};
use argmin::solver::linesearch::MoreThuenteLineSearch;
use argmin::solver::quasinewton::LBFGS;
use headflow_model::random::{Purpose, Stream, normal_quantile};
use headflow_model::{Activation, Bias, Cost, Error, Theta, Watch, biases, largest, largest_size};
use nalgebra::{DMatrix, DVector};
use rayon::prelude::*;

use crate::moments::{Coordinates, Evaluator, Watched};
use crate::stability::unit_of_rates;

/// Corrections that L-BFGS remembers: all there are, for the few parameters of most problems.
const CORRECTIONS: usize = 20;

/// How often a descent that the line search gave up is taken up again from its best point.
const RESTARTS: usize = 5;

/// Evaluations a descent may take per iteration it is allowed, on average: a line search takes one to three.
const EVALUATIONS_PER_ITERATION: usize = 10;

/// Gradients up to this many tolerances count as converged where the line search gives up: there the loss is flat
/// to rounding.
const NEARLY: f64 = 10.0;

/// Losses closer than this are equal up to rounding.
const ROUNDING: f64 = 1e-14;

/// Losses of one minimum agree to this, relatively and absolutely.
const SAME_RELATIVE: f64 = 1e-6;
const SAME_ABSOLUTE: f64 = 1e-9;

/// Range of the sizes of random keys, in units of the root mean square of `theta`; the lower end is divided by `1 + 0.3` times
/// that, since softmax's best keys shrink as the signal grows.
const SIZES: (f64, f64) = (0.3, 1.5);

/// Standard deviation of the biases about `-|k|^2/2` at the start.
const SPREAD_OF_BIASES: f64 = 0.5;

/// Standard deviation of a start about support points, in the same units.
const JITTER: f64 = 0.1;

/// Standard deviation about a start that is given: enough to leave a saddle with heads exactly alike.
const JITTER_OF_GIVEN: f64 = 1e-2;

/// Longest key that is looked at, in units of one more than the root mean square of `|theta|`: the key of a head that
/// is going off may run away along a plateau, to where an evaluator no longer resolves it.
const LONGEST: f64 = 4.0;

/// Largest component of the first step of a descent, and how short it becomes where longer ones fail.
const FIRST_STEP: f64 = 0.3;
const SHORTEST_FIRST_STEP: f64 = 1e-3;

/// Most support points at which heads are placed (`F = 6` flips).
const MAX_SUPPORT: usize = 64;

/// Starts that are worked on side by side: work that waits for a part of an evaluation takes up another start
/// meanwhile, on the same stack.
const TOGETHER: usize = 64;

/// How far a bias sinks to switch its head off.
const OFF: f64 = 1e3;

/// Curvature outside the spikes that counts as negative, in units of [`unit_of_rates`]. Where softmax's pairs of heads
/// gain outside it is about 5 times this, and they gain some 2e-5 of loss; what is missed below is less still. At
/// bayes-softmax's spare heads it is 0, and quasi-Monte Carlo on 2^14 points has errors of about this there.
const NEGATIVE: f64 = 1e-3;

/// First length along a new direction outside the spikes, in units of the root mean square of `|theta|`.
const FIRST_OUTSIDE: f64 = 0.1;

/// Step of the central difference of [`lowest_curvature_outside`].
const STEP: f64 = 1e-4;

/// A search.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// Number of random starts (default 16).
    pub starts: usize,
    /// Seed of the starts (default 0).
    pub seed: u64,
    /// Largest component of the gradient at a minimum (default `1e-7`). Choose it above the evaluator's own error.
    pub gradient_tolerance: f64,
    /// Most iterations of a descent (default 500).
    pub max_iterations: usize,
    /// Starts that are tried first: alignments `H x F` and biases (length `H`, used where they are trained), say
    /// the optimum at neighbouring parameters. They are jittered by 1 percent of the size of `theta`, so that a
    /// symmetric one does not hold the descent on a saddle.
    pub extra_starts: Vec<(DMatrix<f64>, Vec<f64>)>,
}

impl Default for Options {
    fn default() -> Self {
        Self { starts: 16, seed: 0, gradient_tolerance: 1e-7, max_iterations: 500, extra_starts: Vec::new() }
    }
}

impl Options {
    fn validate(&self, heads: usize, features: usize) -> Result<(), Error> {
        let all = self.starts.saturating_add(self.extra_starts.len());
        if all == 0 || all > u32::MAX as usize {
            return Err(Error::invalid(
                "starts",
                format!("{all} in all, those given included; there must be 1 to 2^32 - 1"),
            ));
        }
        if !(self.gradient_tolerance.is_finite() && self.gradient_tolerance > 0.0) {
            return Err(Error::invalid(
                "gradient_tolerance",
                format!("must be positive and finite, got {}", self.gradient_tolerance),
            ));
        }
        if self.max_iterations == 0 {
            return Err(Error::invalid("max_iterations", "must be at least 1"));
        }
        for (i, (m, b)) in self.extra_starts.iter().enumerate() {
            if m.shape() != (heads, features) || b.len() != heads {
                return Err(Error::invalid(
                    "extra_starts",
                    format!(
                        "start {i} has {} x {} alignments and {} biases, but there are {heads} heads and {features} features",
                        m.nrows(),
                        m.ncols(),
                        b.len()
                    ),
                ));
            }
            if !m.iter().chain(b).all(|v| v.is_finite()) {
                return Err(Error::invalid("extra_starts", format!("start {i} holds a number that is not finite")));
            }
        }
        Ok(())
    }
}

/// A local minimum.
#[derive(Debug, Clone, PartialEq)]
pub struct Minimum {
    /// Where it is. `C = 0` if no direction outside the spikes lowers the loss. Trained biases of bayes-softmax, of
    /// which a common part has no effect, are given with `sum_h e^{b_h + |k_h|^2 / 2} = 1` over the heads that are
    /// on, as in the Bayes-optimal `b_h = -|k_h|^2 / 2 + ln p_h`.
    pub at: Coordinates,
    /// Its population loss.
    pub loss: f64,
    /// Largest component of the gradient over the parameters.
    pub gradient: f64,
    /// [`lowest_curvature_outside`] there.
    pub outside: f64,
    /// Whether a head has a part in it, length `H`. A head is off if the loss does not change (to the tolerance
    /// of equal losses) without it; only trained biases that have an effect can switch one off.
    pub on: Vec<bool>,
    /// How many starts ended there.
    pub found: usize,
    /// Evaluations of the moments that they took together, in the span of the spikes.
    pub evaluations: usize,
}

/// What a search found.
#[derive(Debug, Clone, PartialEq)]
pub struct Optimum {
    /// Distinct minima, lowest loss first; empty if no start converged.
    pub minima: Vec<Minimum>,
    /// Number of starts, those given included.
    pub starts: usize,
    /// Starts that did not converge: they ran out of iterations, or the line search gave up for good.
    pub unconverged: usize,
    /// Lowest loss that one of those came to. Where it is below the lowest minimum, more iterations are worth it.
    pub lowest_unconverged: Option<f64>,
    /// Evaluations of the moments, all starts together.
    pub evaluations: usize,
}

/// Searches for the lowest loss over the keys in the span of the spikes, and the biases if they are trained.
///
/// The starts are half random directions with sizes from 0.3 to 1.5 times that of `theta`, half heads at support
/// points of `theta` (all random, where there are none or more than 64). Trained biases start about `-|k|^2/2`, or at 0
/// in a quarter of the starts. The bits of the result do not depend on the number of threads. `watch` advances by one a start.
///
/// # Errors
/// When an option is outside its domain, `watch` interrupts, or the evaluator has no finite value where a minimum is
/// looked at more closely: next to it outside the spikes, or with a head switched off.
pub fn optimum<E: Evaluator>(evaluator: &E, options: &Options, watch: &dyn Watch) -> Result<Optimum, Error> {
    // Averages of many heads take long: they stop on the way, and are NaN then.
    let evaluator = &Watched::new(evaluator, watch);
    let parameters = Parameters::of(evaluator);
    options.validate(parameters.heads, parameters.features)?;
    let starts = Starts::new(evaluator.task().theta(), parameters, options);
    let count = options.extra_starts.len() + options.starts;
    // Every end is held: parameters and gradient, in the span of the spikes.
    let of_end = (2 * size_of::<f64>() * parameters.heads * (parameters.features + 1) + size_of::<End>() + 64) as f64;
    let cost = Cost { operations: 0.0, bytes: count as f64 * of_end };
    cost.check("starts", "take fewer starts")?;
    let mut ends: Vec<End> = Vec::new();
    while ends.len() < count {
        let chunk: Vec<End> = (ends.len()..count.min(ends.len() + TOGETHER))
            .into_par_iter()
            .map(|start| {
                let end = descend(evaluator, parameters, starts.draw(start), options, watch);
                watch.advance(1);
                end
            })
            .collect();
        if watch.interrupted() {
            return Err(Error::interrupted("optimum"));
        }
        ends.extend(chunk);
    }
    let mut evaluations: usize = ends.iter().map(|end| end.evaluations).sum();
    let left: Vec<f64> = ends.iter().filter(|end| !end.converged).map(|end| end.point.loss).collect();
    let lowest_unconverged = left.iter().copied().filter(|loss| loss.is_finite()).min_by(f64::total_cmp);
    ends.retain(|end| end.converged);
    let same = Same { gradient: options.gradient_tolerance * parameters.heads as f64 };
    let ended = ends.into_iter().map(|end| Group {
        parameters,
        point: end.point,
        outside: 0.0,
        found: 1,
        evaluations: end.evaluations,
        outside_evaluations: 0,
    });
    let groups: Result<Vec<Group>, Error> =
        grouped(ended.collect(), same).into_par_iter().map(|group| widen(evaluator, group, options, watch)).collect();
    if watch.interrupted() {
        return Err(Error::interrupted("optimum"));
    }
    let groups = groups?;
    evaluations += groups.iter().map(|group| group.outside_evaluations).sum::<usize>();
    let minima =
        grouped(groups, same).into_iter().map(|group| describe(evaluator, group, same)).collect::<Result<_, Error>>();
    if watch.interrupted() {
        return Err(Error::interrupted("optimum"));
    }
    let minima = minima?;
    Ok(Optimum { minima, starts: count, unconverged: left.len(), lowest_unconverged, evaluations })
}

/// Whether keys gain by a part in a new direction outside the spikes: the smallest eigenvalue of `M = dE/dr` at
/// fixed `m`.
///
/// Parts `u_h` of the keys along a direction that none of them has a part in yet change `r` by `u u^T` and the loss
/// by `u . M u` to second order (half-norm: with the biases that follow the keys). All such directions are alike: where
/// `M` is positive semi-definite none lowers the loss. With a column `e u` for one that is empty in `C`,
///
/// ```text
/// gc(e u) = 2 e M u + O(e^3),    M = dE/dr  (half-norm: M - diag(gb) / 2)
/// ```
///
/// by central differences: `2 H` evaluations, and one more for half-norm. An evaluator with sampling errors has
/// them here too, and heads that are off give eigenvalues of 0. So does `C` without an empty column: there the
/// keys have `H` directions, and at a stationary point `M` vanishes. Where the evaluator has no value next to the point,
/// the answer is NaN.
pub fn lowest_curvature_outside<E: Evaluator>(evaluator: &E, at: &Coordinates) -> f64 {
    lowest_outside(evaluator, at).map_or(0.0, |(curvature, ..)| curvature)
}

/// The smallest eigenvalue of `M`, its eigenvector, and the empty column of `C` that was used; NaN and no direction where
/// the evaluator has no value.
fn lowest_outside<E: Evaluator>(evaluator: &E, at: &Coordinates) -> Option<(f64, DVector<f64>, usize)> {
    let heads = evaluator.heads();
    let column = (0..at.c.ncols()).find(|&j| largest_size(at.c.column(j).iter()) == 0.0)?;
    let gradient = |head: usize, offset: f64| {
        let mut moved = at.clone();
        moved.c[(head, column)] = offset;
        evaluator.moments(&moved).gc.column(column).into_owned()
    };
    let columns: Vec<_> =
        (0..heads).map(|head| (gradient(head, STEP) - gradient(head, -STEP)) / (4.0 * STEP)).collect();
    let mut curvature = DMatrix::from_columns(&columns);
    if evaluator.attention().bias == Bias::HalfNorm {
        for (head, gb) in evaluator.moments(at).gb.into_iter().enumerate() {
            curvature[(head, head)] -= gb / 2.0;
        }
    }
    if evaluator.interrupted() {
        return None;
    }
    if !curvature.iter().all(|v| v.is_finite()) {
        return Some((f64::NAN, DVector::from_element(heads, f64::NAN), column));
    }
    let eigen = ((&curvature + curvature.transpose()) * 0.5).symmetric_eigen();
    let lowest = (0..heads).min_by(|&i, &j| eigen.eigenvalues[i].total_cmp(&eigen.eigenvalues[j]))?;
    Some((eigen.eigenvalues[lowest], eigen.eigenvectors.column(lowest).into_owned(), column))
}

/// The parameters of a search as one vector: for each head `m_h`, then for each the first columns of `C_h`, then the
/// biases that are trained to an effect.
#[derive(Debug, Clone, Copy)]
struct Parameters {
    heads: usize,
    features: usize,
    columns: usize,
    rule: Bias,
    activation: Activation,
}

impl Parameters {
    fn of<E: Evaluator>(evaluator: &E) -> Self {
        let attention = evaluator.attention();
        Self {
            heads: evaluator.heads(),
            features: evaluator.task().features(),
            columns: 0,
            rule: attention.bias,
            activation: attention.activation,
        }
    }

    /// Whether biases are among the parameters.
    fn with_biases(self) -> bool {
        self.rule == Bias::Trained && self.activation != Activation::Softmax
    }

    fn pack(self, m: &DMatrix<f64>, c: &DMatrix<f64>, b: &[f64]) -> Vec<f64> {
        let inside = (0..self.heads).flat_map(|h| (0..self.features).map(move |f| m[(h, f)]));
        let outside = (0..self.heads).flat_map(|h| (0..self.columns).map(move |j| c[(h, j)]));
        inside.chain(outside).chain(b.iter().copied().filter(|_| self.with_biases())).collect()
    }

    fn unpack(self, y: &[f64]) -> Coordinates {
        let heads = self.heads;
        let (inside, rest) = y.split_at(heads * self.features);
        let (outside, b) = rest.split_at(heads * self.columns);
        let m = DMatrix::from_row_slice(heads, self.features, inside);
        let c =
            DMatrix::from_fn(heads, heads, |h, j| if j < self.columns { outside[h * self.columns + j] } else { 0.0 });
        let stored = if self.with_biases() { b.to_vec() } else { vec![0.0; heads] };
        let b = biases(self.rule, &(&m * m.transpose() + &c * c.transpose()), &stored);
        Coordinates { m, c, b }
    }

    /// The loss and its gradient.
    fn evaluate<E: Evaluator>(self, evaluator: &E, y: &[f64]) -> (f64, Vec<f64>) {
        let at = self.unpack(y);
        let mut moments = evaluator.moments(&at);
        if self.rule == Bias::HalfNorm {
            for (h, gb) in moments.gb.iter().enumerate() {
                moments.gx.row_mut(h).zip_apply(&at.m.row(h), |g, m| *g -= gb * m);
                moments.gc.row_mut(h).zip_apply(&at.c.row(h), |g, c| *g -= gb * c);
            }
        }
        (moments.loss.value(), self.pack(&moments.gx, &moments.gc, &moments.gb))
    }
}

/// The starting points, each a function of its number.
struct Starts<'a> {
    parameters: Parameters,
    options: &'a Options,
    /// Root mean square of each `theta_f`.
    size: Vec<f64>,
    /// Support points, if there are few.
    support: Vec<Vec<f64>>,
}

impl<'a> Starts<'a> {
    fn new(theta: &Theta, parameters: Parameters, options: &'a Options) -> Self {
        let size = theta.second_moment().diagonal().iter().map(|v| v.max(0.0).sqrt()).collect();
        Self { parameters, options, size, support: support(theta) }
    }

    /// Start number `start`: those that are given come first.
    fn draw(&self, start: usize) -> Vec<f64> {
        let Parameters { heads, features, .. } = self.parameters;
        let given = self.options.extra_starts.len();
        let stream = Stream::new(self.options.seed, Purpose::Starts, start as u32);
        let mut uniforms = vec![0.0; 1 + heads * (features + 1) + heads.max(self.support.len())];
        stream.uniforms(0, 0, &mut uniforms);
        let (first, rest) = uniforms.split_at(1);
        let (for_keys, rest) = rest.split_at(heads * features);
        let (for_biases, for_support) = rest.split_at(heads);
        let none = DMatrix::zeros(heads, heads);
        let noise =
            DMatrix::from_fn(heads, features, |h, f| self.size[f] * normal_quantile(for_keys[h * features + f]));
        if let Some((m, b)) = self.options.extra_starts.get(start) {
            let jittered: Vec<f64> =
                b.iter().zip(for_biases).map(|(b, &u)| b + JITTER_OF_GIVEN * normal_quantile(u)).collect();
            return self.parameters.pack(&(m + noise * JITTER_OF_GIVEN), &none, &jittered);
        }
        let number = start - given;
        let m = if number % 2 == 1 && !self.support.is_empty() {
            let places = self.places(for_support);
            noise * JITTER + DMatrix::from_fn(heads, features, |h, f| self.support[places[h]][f])
        } else {
            let largest = largest_size(self.size.iter().copied());
            let (low, high) = (SIZES.0 / (1.0 + 0.3 * largest), SIZES.1);
            noise * (low * (high / low).powf(first[0]))
        };
        let at_zero = number % 4 == 2;
        let b: Vec<f64> = (0..heads)
            .map(|h| {
                let about = -m.row(h).norm_squared() / 2.0 + SPREAD_OF_BIASES * normal_quantile(for_biases[h]);
                if at_zero { 0.0 } else { about }
            })
            .collect();
        self.parameters.pack(&m, &none, &b)
    }

    /// A support point for each head: a random order of all of them, over and over.
    fn places(&self, uniforms: &[f64]) -> Vec<usize> {
        let count = self.support.len();
        let mut order: Vec<usize> = (0..count).collect();
        order.sort_by(|&i, &j| uniforms[i].total_cmp(&uniforms[j]));
        (0..self.parameters.heads).map(|h| order[h % count]).collect()
    }
}

/// The support points of `theta` that have weight, if there are at most 64 of them; else none.
fn support(theta: &Theta) -> Vec<Vec<f64>> {
    match theta {
        Theta::Flip { nu } if nu.len() <= MAX_SUPPORT.ilog2() as usize => (0..1usize << nu.len())
            .map(|signs| nu.iter().enumerate().map(|(f, &nu)| if signs >> f & 1 == 0 { nu } else { -nu }).collect())
            .collect(),
        Theta::Discrete { points, weights } => {
            let with_weight: Vec<_> =
                points.iter().zip(weights).filter(|(_, w)| **w > 0.0).map(|(p, _)| p.clone()).collect();
            if with_weight.len() <= MAX_SUPPORT { with_weight } else { Vec::new() }
        }
        _ => Vec::new(),
    }
}

/// The end of one descent.
#[derive(Debug, Clone)]
struct End {
    point: Point,
    converged: bool,
    evaluations: usize,
}

/// Parameters, their loss and its gradient.
#[derive(Debug, Clone)]
struct Point {
    y: Vec<f64>,
    loss: f64,
    gradient: Vec<f64>,
}

impl Point {
    /// The largest component of the gradient.
    fn slope(&self) -> f64 {
        largest_size(&self.gradient)
    }
}

/// The loss as `argmin` sees it, in units of [`unit_of_rates`]: so the first step, minus the gradient, is about
/// as long as the way to go.
struct Objective<'a, E> {
    evaluator: &'a E,
    parameters: Parameters,
    unit: f64,
    longest: f64,
    watch: &'a dyn Watch,
    memory: &'a RefCell<Memory>,
}

/// What an [`Objective`] remembers.
struct Memory {
    /// Where it was evaluated last: the loss and its gradient are asked for one after the other.
    last: Option<Point>,
    /// The lowest so far; among those equal to rounding, the flattest.
    best: Option<Point>,
    evaluations: usize,
    limit: usize,
}

impl<E: Evaluator> Objective<'_, E> {
    /// Sees to it that the last point is `y`. No borrow is held meanwhile.
    fn visit(&self, y: &[f64]) -> Result<(), argmin::core::Error> {
        let problem = |text: &'static str| Err(argmin::core::Error::msg(text));
        if self.memory.borrow().last.as_ref().is_some_and(|last| last.y == y) {
            return Ok(());
        }
        if self.watch.interrupted() {
            return problem("interrupted");
        }
        if self.memory.borrow().evaluations >= self.memory.borrow().limit {
            return problem("too many evaluations");
        }
        if !y.iter().all(|v| v.is_finite()) {
            return problem("the line search left the numbers");
        }
        let r = self.parameters.unpack(y).r();
        if !(largest(r.diagonal().iter()).sqrt() <= self.longest) {
            return problem("a key runs away");
        }
        let (loss, gradient) = self.parameters.evaluate(self.evaluator, y);
        let mut memory = self.memory.borrow_mut();
        memory.evaluations += 1;
        if !(loss.is_finite() && gradient.iter().all(|v| v.is_finite())) {
            return problem("the loss is not finite");
        }
        let point = Point { y: y.to_vec(), loss, gradient };
        let better = memory.best.as_ref().is_none_or(|best| {
            point.loss < best.loss - ROUNDING || point.loss < best.loss + ROUNDING && point.slope() < best.slope()
        });
        if better {
            memory.best = Some(point.clone());
        }
        memory.last = Some(point);
        Ok(())
    }

    fn last<T>(&self, of: impl Fn(&Point) -> T) -> Result<T, argmin::core::Error> {
        let memory = self.memory.borrow();
        memory.last.as_ref().map(of).ok_or_else(|| argmin::core::Error::msg("nothing was evaluated"))
    }
}

impl<E: Evaluator> CostFunction for Objective<'_, E> {
    type Param = Vec<f64>;
    type Output = f64;

    fn cost(&self, y: &Vec<f64>) -> Result<f64, argmin::core::Error> {
        self.visit(y)?;
        self.last(|point| point.loss / self.unit)
    }
}

impl<E: Evaluator> Gradient for Objective<'_, E> {
    type Param = Vec<f64>;
    type Gradient = Vec<f64>;

    fn gradient(&self, y: &Vec<f64>) -> Result<Vec<f64>, argmin::core::Error> {
        self.visit(y)?;
        self.last(|point| point.gradient.iter().map(|g| g / self.unit).collect())
    }
}

/// Root mean square of `|theta|`.
fn norm_of(theta: &Theta) -> f64 {
    theta.second_moment().trace().max(0.0).sqrt()
}

/// Goes downhill from `start`.
fn descend<E: Evaluator>(
    evaluator: &E,
    parameters: Parameters,
    start: Vec<f64>,
    options: &Options,
    watch: &dyn Watch,
) -> End {
    let limit = options.max_iterations.saturating_mul(EVALUATIONS_PER_ITERATION);
    let memory = RefCell::new(Memory { last: None, best: None, evaluations: 0, limit });
    // A start that is given may be longer still.
    let given = largest(parameters.unpack(&start).r().diagonal().iter()).sqrt();
    let longest = (LONGEST * (1.0 + norm_of(evaluator.task().theta()))).max(2.0 * given);
    let (tolerance, mut iterations) = (options.gradient_tolerance, 0);
    let mut from = start.clone();
    let mut converged = false;
    let mut first_step = FIRST_STEP;
    for _ in 0..=RESTARTS {
        // The first step is the gradient in these units: gradients at k = 0 are of order 1/L, elsewhere of order 1.
        let slope = {
            let known = memory.borrow().best.as_ref().map(Point::slope);
            known.unwrap_or_else(|| {
                let probe = Objective { evaluator, parameters, unit: 1.0, longest, watch, memory: &memory };
                // What it refuses it refuses again below.
                let _ = probe.visit(&from);
                memory.borrow().best.as_ref().map_or(1.0, Point::slope)
            })
        };
        let unit = (slope / first_step).max(f64::MIN_POSITIVE);
        let objective = Objective { evaluator, parameters, unit, longest, watch, memory: &memory };
        let before = memory.borrow().best.as_ref().map(|best| best.loss);
        iterations += run(objective, from, tolerance / unit, options.max_iterations - iterations);
        let memory = memory.borrow();
        let Some(best) = &memory.best else { break };
        // Whatever ended the run, the gradient decides.
        let spent = iterations >= options.max_iterations || memory.evaluations >= limit || watch.interrupted();
        let stuck = before.is_some_and(|before| best.loss >= before - ROUNDING);
        converged = best.slope() <= tolerance || (stuck && best.slope() <= NEARLY * tolerance);
        if converged || spent || (stuck && first_step < SHORTEST_FIRST_STEP) {
            break;
        }
        // A line search that was led astray, to a key that runs away say, is tried again with care.
        first_step /= if stuck { 8.0 } else { 1.0 };
        from = best.y.clone();
    }
    let memory = memory.into_inner();
    let nowhere = Point { y: start, loss: f64::NAN, gradient: Vec::new() };
    End { point: memory.best.unwrap_or(nowhere), converged, evaluations: memory.evaluations }
}

/// One run of the library's minimiser, at most `max_iterations` long; returns how long it was. Its errors are
/// those of a line search that finds nothing lower, and of an [`Objective`] that refuses: either way, what was
/// reached is in the objective's memory.
fn run<E: Evaluator>(objective: Objective<'_, E>, from: Vec<f64>, tolerance: f64, max_iterations: usize) -> usize {
    let solver = LBFGS::new(MoreThuenteLineSearch::new(), CORRECTIONS);
    // The change of the loss is no criterion: near a plateau it is small long before the gradient is.
    let solver = solver.with_tolerance_grad(tolerance).and_then(|solver| solver.with_tolerance_cost(0.0));
    let Ok(solver) = solver else { return max_iterations };
    let configure = |state: IterState<_, _, _, _, _, _>| state.param(from).max_iters(max_iterations as u64);
    let result = Executor::new(objective, solver).configure(configure).timer(false).ctrlc(false).run();
    result.map_or(1, |result| (result.state.iter as usize).max(1))
}

/// When two losses are the same.
#[derive(Debug, Clone, Copy)]
struct Same {
    /// The gradient's tolerance times the number of heads: a head that is going off still adds about the slope
    /// along its bias to the loss.
    gradient: f64,
}

impl Same {
    fn is(self, a: f64, b: f64) -> bool {
        (a - b).abs() <= SAME_RELATIVE * a.abs() + SAME_ABSOLUTE + NEARLY * self.gradient
    }
}

/// The starts that ended in one minimum.
struct Group {
    parameters: Parameters,
    point: Point,
    outside: f64,
    found: usize,
    evaluations: usize,
    outside_evaluations: usize,
}

/// Joins those with the same loss, lowest first.
fn grouped(mut groups: Vec<Group>, same: Same) -> Vec<Group> {
    // Stable: of equal losses, the first start's.
    groups.sort_by(|a, b| a.point.loss.total_cmp(&b.point.loss));
    let mut joined: Vec<Group> = Vec::new();
    for group in groups {
        match joined.last_mut().filter(|known| same.is(known.point.loss, group.point.loss)) {
            Some(known) => {
                known.found += group.found;
                known.evaluations += group.evaluations;
                known.outside_evaluations += group.outside_evaluations;
            }
            None => joined.push(group),
        }
    }
    joined
}

/// What to do where an evaluator has no value that a minimum needs.
const NO_VALUE: &str = "use fewer heads, a shorter length, a looser tolerance, or evaluator qmc";

/// Takes a minimum in the span of the spikes on into directions outside, as long as one lowers the loss.
///
/// # Errors
/// When the evaluator has no value outside: whether the minimum is one cannot be told.
fn widen<E: Evaluator>(evaluator: &E, mut group: Group, options: &Options, watch: &dyn Watch) -> Result<Group, Error> {
    let size = norm_of(evaluator.task().theta());
    let negative = -NEGATIVE * unit_of_rates(evaluator);
    loop {
        let at = group.parameters.unpack(&group.point.y);
        let Some((curvature, direction, column)) = lowest_outside(evaluator, &at) else {
            group.outside = 0.0;
            return Ok(group);
        };
        if !curvature.is_finite() {
            let reached = format!(
                "whether keys outside the spikes lower the loss {:.6} cannot be told: the loss has no finite value there",
                group.point.loss
            );
            return Err(Error::not_converged("optimum", reached, NO_VALUE));
        }
        group.outside = curvature;
        group.outside_evaluations += 2 * group.parameters.heads + usize::from(group.parameters.rule == Bias::HalfNorm);
        if !(curvature < negative) || watch.interrupted() {
            return Ok(group);
        }
        let mut moved = at.c;
        moved.set_column(column, &(direction * (FIRST_OUTSIDE * size)));
        let parameters = Parameters { columns: column + 1, ..group.parameters };
        let end = descend(evaluator, parameters, parameters.pack(&at.m, &moved, &at.b), options, watch);
        group.outside_evaluations += end.evaluations;
        // Otherwise the minimum in the span stands, and its curvature tells that it is none.
        if !(end.converged && end.point.loss < group.point.loss) {
            return Ok(group);
        }
        group.parameters = parameters;
        group.point = end.point;
    }
}

/// What there is to say about a minimum.
///
/// # Errors
/// When the evaluator has no value without one of the heads.
fn describe<E: Evaluator>(evaluator: &E, group: Group, same: Same) -> Result<Minimum, Error> {
    let Group { parameters, point, outside, found, evaluations, .. } = group;
    let mut at = parameters.unpack(&point.y);
    // One after the other: of two heads that do the same, only one can go.
    let mut rest = at.clone();
    let on: Vec<bool> = (0..parameters.heads)
        .map(|head| {
            if !parameters.with_biases() || parameters.heads == 1 {
                return Ok(true);
            }
            let before = rest.b[head];
            rest.b[head] -= OFF;
            let without = evaluator.loss(&rest).value();
            if !without.is_finite() {
                let reached = format!("whether head {head} is on cannot be told: the loss without it is {without}");
                return Err(Error::not_converged("optimum", reached, NO_VALUE));
            }
            let needed = !same.is(point.loss, without);
            if needed {
                rest.b[head] = before;
            }
            Ok(needed)
        })
        .collect::<Result<_, Error>>()?;
    if parameters.with_biases() && parameters.activation == Activation::BayesSoftmax {
        let r = at.r();
        let weights = (0..parameters.heads).filter(|&h| on[h]).map(|h| at.b[h] + r[(h, h)] / 2.0);
        let top = largest(weights.clone());
        let common = top + weights.map(|w| (w - top).exp()).sum::<f64>().ln();
        if common.is_finite() {
            at.b.iter_mut().for_each(|b| *b -= common);
        }
    }
    Ok(Minimum { at, loss: point.loss, gradient: point.slope(), outside, on, found, evaluations })
}

#[cfg(test)]
mod tests {
    use headflow_model::{Aggregation, Attention, Task, smallest};

    use super::*;
    use crate::quasi_monte_carlo::QuasiMonteCarlo;

    fn attentions() -> Vec<Attention> {
        let rules = [Bias::None, Bias::HalfNorm, Bias::Trained];
        let of = |activation: Activation| rules.map(|bias| Attention { bias, ..activation.into() });
        Activation::ALL.into_iter().flat_map(of).collect()
    }

    fn parameters(heads: usize, features: usize, columns: usize, attention: Attention) -> Parameters {
        Parameters { heads, features, columns, rule: attention.bias, activation: attention.activation }
    }

    /// Central differences of the loss, along every parameter.
    #[test]
    fn the_gradient_is_that_of_the_loss() {
        let task = Task::new(4, Theta::Flip { nu: vec![1.5, 1.0] }).unwrap();
        for attention in attentions() {
            let qmc = QuasiMonteCarlo::new(&task, 3, attention, 256, 1, 0).unwrap();
            let parameters = parameters(3, 2, 2, attention);
            let size = 12 + if parameters.with_biases() { 3 } else { 0 };
            let y: Vec<f64> = (0..size).map(|i| (1.7 * i as f64 + 0.4).sin()).collect();
            let (_, gradient) = parameters.evaluate(&qmc, &y);
            assert_eq!(gradient.len(), size);
            for i in 0..size {
                let loss = |offset: f64| {
                    let mut y = y.clone();
                    y[i] += offset;
                    parameters.evaluate(&qmc, &y).0
                };
                let slope = (loss(1e-5) - loss(-1e-5)) / 2e-5;
                assert!((slope - gradient[i]).abs() < 1e-9, "{attention:?} parameter {i}: {slope}, {}", gradient[i]);
            }
        }
    }

    #[test]
    fn packing_loses_nothing() {
        let attention = Attention { bias: Bias::Trained, ..Activation::BayesSoftmax.into() };
        let parameters = parameters(3, 2, 1, attention);
        let y: Vec<f64> = (0..12).map(|i| i as f64).collect();
        let at = parameters.unpack(&y);
        assert_eq!(parameters.pack(&at.m, &at.c, &at.b), y);
        assert_eq!((at.m[(1, 0)], at.c[(2, 0)], at.b[2]), (2.0, 8.0, 11.0));
    }

    #[test]
    fn starts_are_varied_and_repeat() {
        let attention = Attention { bias: Bias::Trained, ..Activation::BayesSoftmax.into() };
        let options = Options { seed: 4, ..Default::default() };
        let theta = Theta::Flip { nu: vec![2.0, 1.0] };
        let parameters = parameters(5, 2, 0, attention);
        let draw = |start| Starts::new(&theta, parameters, &options).draw(start);
        let all: Vec<Coordinates> = (0..400).map(|start| parameters.unpack(&draw(start))).collect();
        assert_eq!(draw(7), draw(7));
        for (number, at) in all.iter().enumerate() {
            let near = |h: usize, k: usize| (at.m.row(h) - at.m.row(k)).norm() < 1.0;
            if number % 2 == 1 {
                // Four support points for five heads: the fifth joins the first, the others are apart.
                assert!(near(0, 4) && !near(0, 1) && !near(1, 2) && !near(2, 3) && !near(0, 3), "{}", at.m);
            }
            assert_eq!(number % 4 == 2, at.b.iter().all(|&b| b == 0.0));
        }
        let sizes: Vec<f64> = all.iter().step_by(2).map(|at| (at.m.norm_squared() / (5.0 * 5.0)).sqrt()).collect();
        let (low, high) = (smallest(&sizes), largest(&sizes));
        assert!(low < 0.4 && high > 1.2 && high < 3.0, "sizes from {low} to {high}");
    }

    #[test]
    fn support_points_are_those_with_weight() {
        assert_eq!(support(&Theta::Flip { nu: vec![1.0; 6] }).len(), 64);
        assert!(support(&Theta::Flip { nu: vec![1.0; 7] }).is_empty());
        assert_eq!(support(&Theta::Flip { nu: vec![2.0] }), [[2.0], [-2.0]]);
        let theta = Theta::Discrete { points: vec![vec![1.0], vec![3.0], vec![2.0]], weights: vec![0.5, 0.0, 0.5] };
        assert_eq!(support(&theta), [[1.0], [2.0]]);
        assert!(support(&Theta::Sphere { nu: 1.0, features: 2 }).is_empty());
    }

    /// `M` by second differences of the loss: for one head all of it, for two the lowest of all directions.
    #[test]
    fn curvature_outside_is_that_of_the_loss() {
        let task = Task::new(4, Theta::Flip { nu: vec![1.5] }).unwrap();
        for attention in attentions() {
            let attention = Attention { aggregation: Aggregation::Sum, ..attention };
            for heads in [1, 2] {
                let qmc = QuasiMonteCarlo::new(&task, heads, attention, 1024, 1, 0).unwrap();
                // The column after one that is used: both are points that the search comes to.
                for used in [0, heads - 1] {
                    let parameters = parameters(heads, 1, used + 1, attention);
                    let biases = if parameters.with_biases() { heads } else { 0 };
                    let mut y: Vec<f64> = (0..heads).map(|h| 1.3 - 2.1 * h as f64).collect();
                    y.extend(
                        (0..heads).flat_map(|h| (0..=used).map(move |j| if j < used { 0.4 - h as f64 } else { 0.0 })),
                    );
                    y.extend((0..biases).map(|h| -0.8 + 0.5 * h as f64));
                    let loss = |angle: f64, e: f64| {
                        let mut y = y.clone();
                        let u = [angle.cos(), angle.sin()];
                        (0..heads).for_each(|h| y[heads + h * (used + 1) + used] = e * u[h]);
                        parameters.evaluate(&qmc, &y).0
                    };
                    let second =
                        |angle: f64| (loss(angle, 3e-3) + loss(angle, -3e-3) - 2.0 * loss(angle, 0.0)) / (2.0 * 9e-6);
                    let angles = if heads == 1 { 1 } else { 720 };
                    let lowest = smallest((0..angles).map(|i| second(std::f64::consts::PI * i as f64 / angles as f64)));
                    let found = lowest_curvature_outside(&qmc, &parameters.unpack(&y));
                    assert!((found - lowest).abs() < 2e-5, "{attention:?} H = {heads}: {found}, by the loss {lowest}");
                }
            }
        }
    }
}
