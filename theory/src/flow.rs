//! The flow of the order parameters (`theory/README.md` sections 5 and 6).
//!
//! With the moments of [`crate::moments`] and `U = m E[g x^T]^T + C E[g c^T]^T`,
//!
//! ```text
//! dm/dtau = -E[g x^T]
//! dr/dtau = -(U + U^T) + (gamma / B) E[g g^T]
//! half-norm:  dm_h += gb_h m_h,  dr_hh' += (gb_h + gb_h') r_hh'
//! trained:    db_h/dtau = -gb_h,     gb_h = E[sum_l g_hl]
//! ```
//!
//! At `gamma = 0` the state is `(m, C, b)` with `dC/dtau = -E[g c^T]` (half-norm: `+ gb_h C_h`):
//! nothing is factored and `r - m m^T = C C^T` stays positive semi-definite. At `gamma > 0` the
//! state is `(m, r, b)`, and `C` is the Cholesky factor of `r - m m^T` at every evaluation; a trial
//! step that leaves the cone is rejected.
//!
//! The state at which an event ends a flow is its last record, at the exact time of the event. With [`Options::until`] a flow
//! goes on until it has settled ([`crate::settled`]), looking at times that double, up to its last time.

use std::cell::{Cell, RefCell};

use diffsol::error::OdeSolverError;
use diffsol::{
    DiffsolError, NalgebraLU, NalgebraMat, NalgebraVec, OdeBuilder, OdeEquations, OdeSolverMethod, OdeSolverStopReason,
};
use headflow_model::{
    Bias, Error, Estimate, OrderParameters, Shape, StopReason, Trajectory, Watch, biases, largest, lower_factor,
    mean_and_error,
};
use nalgebra::DMatrix;
use rayon::prelude::*;

use crate::moments::{Coordinates, Evaluator, Moments, Watched, check_noise};
use crate::settled::settled;
use crate::stability::unit_of_rates;

/// How much of `tr r` a pivot may be off before a point counts as outside the cone.
const CONE: f64 = 1e-6;

/// Progress that one solve reports, however long its time span.
pub const PROGRESS: u64 = 1000;

/// So many steps must advance the time by [`PROGRESSES`], or grow.
const CRAWL: usize = 100;

/// The part of the last time, or of the flow's own time `1 / omega` if that is shorter, that [`CRAWL`] steps must make: at the pace of
/// less, it would take `1e11` steps.
const PROGRESSES: f64 = 1e-9;

/// The integrator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Method {
    /// Explicit Runge-Kutta of order 5 (Tsitouras 2011): the default.
    #[default]
    Tsit45,
    /// Backward differentiation of variable order, for stiff flows.
    Bdf,
    /// Singly diagonally implicit Runge-Kutta of order 2.
    TrBdf2,
    /// Singly diagonally implicit Runge-Kutta of order 3.
    Esdirk34,
}

impl Method {
    /// All methods.
    pub const ALL: [Self; 4] = [Self::Tsit45, Self::Bdf, Self::TrBdf2, Self::Esdirk34];

    /// The name in specs and help texts.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tsit45 => "tsit45",
            Self::Bdf => "bdf",
            Self::TrBdf2 => "tr-bdf2",
            Self::Esdirk34 => "esdirk34",
        }
    }
}

/// Something at which a flow should stop.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Event {
    /// The loss falls below the value.
    LossBelow(f64),
    /// The alignment `m_hf` crosses the value, in either direction.
    AlignmentCrosses {
        /// Head `h`.
        head: usize,
        /// Feature `f`.
        feature: usize,
        /// The value.
        value: f64,
    },
}

/// When a flow is looked at, and what counts as settled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Until {
    /// The time of the first look; each later one is at twice the time, the last at the last time of all.
    pub first: f64,
    /// The drift and the growth that a settled flow may have left, in units of [`unit_of_rates`].
    pub tolerance: f64,
}

/// How a flow is integrated.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// `gamma / B`: the weight of the noise term of `r`. Zero is gradient flow.
    pub noise: f64,
    /// Times at which the state is recorded, increasing, from `tau = 0` on.
    pub times: Vec<f64>,
    /// The integrator.
    pub method: Method,
    /// Relative tolerance of a step (default `1e-6`).
    pub relative_tolerance: f64,
    /// Absolute tolerance of a step (default `1e-8`).
    pub absolute_tolerance: f64,
    /// Most steps before the solver gives up (default `100_000`).
    pub max_steps: usize,
    /// Events at which to stop; the first one ends the flow.
    pub events: Vec<Event>,
    /// Stop when the flow has settled, and say so when it has not by the last of `times` (default: the last of `times` is the
    /// end).
    pub until: Option<Until>,
    /// Take steps of this size whatever the tolerances: for measuring orders (default: adaptive).
    pub fixed_step: Option<f64>,
}

impl Options {
    /// Default tolerances and method, no events.
    pub fn new(noise: f64, times: Vec<f64>) -> Self {
        Self {
            noise,
            times,
            method: Method::default(),
            relative_tolerance: 1e-6,
            absolute_tolerance: 1e-8,
            max_steps: 100_000,
            events: Vec::new(),
            until: None,
            fixed_step: None,
        }
    }

    fn validate(&self, shape: Shape) -> Result<(), Error> {
        if self.times.is_empty() {
            return Err(Error::invalid("times", "there must be at least one"));
        }
        if !self.times.iter().all(|t| t.is_finite() && *t >= 0.0) || !self.times.is_sorted_by(|a, b| a < b) {
            return Err(Error::invalid("times", "must be finite, not negative and strictly increasing"));
        }
        if self.times.last().is_some_and(|&last| last > 0.0 && last < 1e-9) {
            return Err(Error::invalid("times", "the last time must be 0 or at least 1e-9"));
        }
        for (field, value) in
            [("relative_tolerance", self.relative_tolerance), ("absolute_tolerance", self.absolute_tolerance)]
        {
            if !(value.is_finite() && value > 0.0) {
                return Err(Error::invalid(field, format!("must be positive, got {value}")));
            }
        }
        if let Some(step) = self.fixed_step.filter(|h| !(h.is_finite() && *h > 0.0)) {
            return Err(Error::invalid("fixed_step", format!("must be positive, got {step}")));
        }
        if let Some(until) = self.until {
            let positive = |value: f64| value.is_finite() && value > 0.0;
            if !(positive(until.first) && positive(until.tolerance)) {
                return Err(Error::invalid("until", "the first look and the tolerance must be positive"));
            }
        }
        for event in &self.events {
            match *event {
                Event::LossBelow(value) if !value.is_finite() => {
                    return Err(Error::invalid("stop_loss", format!("{value} is not a finite number")));
                }
                Event::AlignmentCrosses { head, feature, value } => {
                    if head >= shape.heads || feature >= shape.features || !value.is_finite() {
                        return Err(Error::invalid(
                            "stop_alignment",
                            format!(
                                "head {head}, feature {feature}, value {value}: there are {} heads and {} features, \
                                 counted from 0, and the value must be finite",
                                shape.heads, shape.features
                            ),
                        ));
                    }
                }
                Event::LossBelow(_) => {}
            }
        }
        Ok(())
    }
}

/// What a solve cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Statistics {
    /// Accepted steps.
    pub steps: usize,
    /// Rejected steps.
    pub rejected: usize,
    /// Evaluations of the right-hand side, Jacobian products included.
    pub evaluations: usize,
}

impl std::ops::AddAssign for Statistics {
    fn add_assign(&mut self, other: Self) {
        self.steps += other.steps;
        self.rejected += other.rejected;
        self.evaluations += other.evaluations;
    }
}

/// One solution of the flow.
#[derive(Debug, Clone, PartialEq)]
pub struct Solution {
    /// The state at the requested times, up to the stop; then, where an event or rest ended it, the state there.
    pub trajectory: Trajectory,
    /// The time and the state that it ended with, as the integrator has it; absent when that is no state.
    pub end: Option<(f64, Coordinates)>,
    /// Why it ended.
    pub stop: StopReason,
    /// What it cost.
    pub statistics: Statistics,
}

/// The flow averaged over independent evaluators.
#[derive(Debug, Clone, PartialEq)]
pub struct Flow {
    /// Mean and standard error over the evaluators.
    pub estimate: Estimate,
    /// `tr r` with its standard error, at the same times.
    pub trace: Vec<(f64, f64)>,
    /// The flow of each evaluator.
    pub solutions: Vec<Solution>,
    /// Why it ended: the evaluators' reason, with the mean time of an event.
    pub stop: StopReason,
    /// What all solves cost together.
    pub statistics: Statistics,
}

/// Integrates the flow from `start` once with each evaluator, in parallel, and averages.
///
/// # Errors
/// When the options, or the shapes of `start` and the evaluators, are invalid, or `watch` interrupts before anything
/// is recorded. What goes wrong on the way is a [`StopReason`], and keeps what was recorded.
pub fn average<E: Evaluator>(
    evaluators: &[E],
    start: &OrderParameters,
    options: &Options,
    watch: &dyn Watch,
) -> Result<Flow, Error> {
    let solve_with = |e: &E| attempt(e, start, options, watch);
    let mut solutions: Vec<Solution> = evaluators.par_iter().map(solve_with).collect::<Result<_, _>>()?;
    if options.until.is_some() {
        together(evaluators, start, options, watch, &mut solutions)?;
    }
    let stop = combine(solutions.iter().map(|s| &s.stop));
    // An interruption finds some solves done and others hardly begun: those that are done, or else
    // those that came furthest, make the average.
    let furthest = solutions.iter().map(|s| s.trajectory.times.len()).max().unwrap_or(0);
    let interrupted = matches!(stop, StopReason::Interrupted { .. });
    if interrupted && furthest == 0 {
        return Err(stop.error("flow"));
    }
    let trajectories: Vec<_> = match stop.event_time().filter(|_| solutions.len() > 1) {
        Some(time) => ended_by_events(&solutions, options, time),
        None => solutions
            .iter()
            .map(|s| s.trajectory.clone())
            .filter(|t| !interrupted || 2 * t.times.len() > furthest)
            .collect(),
    };
    let estimate =
        Estimate::over(&trajectories).ok_or_else(|| Error::invalid("scrambles", "there must be at least one"))?;
    let mut statistics = Statistics::default();
    solutions.iter().for_each(|s| statistics += s.statistics);
    Ok(Flow { estimate, trace: Estimate::trace_over(&trajectories), stop, statistics, solutions })
}

/// Goes on with the solves that had settled before the last one did, so that all end together.
fn together<E: Evaluator>(
    evaluators: &[E],
    start: &OrderParameters,
    options: &Options,
    watch: &dyn Watch,
    solutions: &mut [Solution],
) -> Result<(), Error> {
    let time = |stop: &StopReason| match stop {
        StopReason::Settled { time } | StopReason::NotSettled { time, .. } => Some(*time),
        _ => None,
    };
    let Some(times) = solutions.iter().map(|s| time(&s.stop)).collect::<Option<Vec<f64>>>() else { return Ok(()) };
    let end = largest(&times);
    let mut shared: Vec<f64> = options.times.iter().copied().filter(|&t| t < end).collect();
    shared.push(end);
    let options = Options { times: shared, until: None, ..options.clone() };
    let again = solutions.par_iter_mut().zip(evaluators).zip(&times).filter(|(_, time)| **time < end);
    again
        .map(|((solution, evaluator), _)| {
            let before = solution.statistics;
            *solution = attempt(evaluator, start, &options, watch)?;
            solution.statistics += before;
            if solution.stop == StopReason::Completed {
                solution.stop = StopReason::Settled { time: end };
            }
            Ok(())
        })
        .collect()
}

/// The trajectories of several solves, some of which an event ended, on one grid: the requested times that all reached and,
/// if all met an event, the state at each one's own, at their mean time.
fn ended_by_events(solutions: &[Solution], options: &Options, time: f64) -> Vec<Trajectory> {
    let requested = |solution: &Solution| {
        let recorded = &solution.trajectory.times;
        recorded.iter().zip(&options.times).take_while(|(a, b)| a == b).count()
    };
    let common = solutions.iter().map(requested).min().unwrap_or(0);
    let all = solutions.iter().all(|s| s.stop.event_time().is_some());
    let later = common == 0 || options.times[common - 1] < time;
    solutions
        .iter()
        .map(|solution| {
            let mut path = solution.trajectory.clone();
            let last = path.rows.last().cloned();
            path.truncate(common);
            if let (true, true, Some(row)) = (all, later, last) {
                path.times.push(time);
                path.rows.push(row);
            }
            path
        })
        .collect()
}

/// One reason for several solves: the first that is not as requested; else the first event, at the
/// mean time of all solves that met the same; else completion.
fn combine<'a>(reasons: impl Iterator<Item = &'a StopReason> + Clone) -> StopReason {
    if let Some(reason) = reasons.clone().find(|r| !r.as_requested()) {
        return reason.clone();
    }
    let scrambles = reasons.clone().count();
    let event = reasons.clone().find(|r| r.event_time().is_some());
    let Some(event) = event.or_else(|| reasons.clone().find(|r| **r != StopReason::Completed)) else {
        return StopReason::Completed;
    };
    let times = reasons.filter_map(|reason| match (reason, event) {
        (StopReason::LossBelow { time, .. }, StopReason::LossBelow { .. }) => Some(*time),
        (
            StopReason::AlignmentCrossed { head, feature, time, .. },
            StopReason::AlignmentCrossed { head: h, feature: f, .. },
        ) if (head, feature) == (h, f) => Some(*time),
        _ => None,
    });
    let count = times.clone().count();
    let (mean, error) = mean_and_error(times);
    let mut combined = event.clone();
    if let StopReason::LossBelow { time, standard_error, reached, scrambles: all, .. }
    | StopReason::AlignmentCrossed { time, standard_error, reached, scrambles: all, .. } = &mut combined
    {
        (*time, *standard_error) = (mean, error.is_finite().then_some(error));
        (*reached, *all) = (count, scrambles);
    }
    combined
}

/// Integrates the flow from `start` with one evaluator.
///
/// # Errors
/// As [`average`].
pub fn solve<E: Evaluator>(
    evaluator: &E,
    start: &OrderParameters,
    options: &Options,
    watch: &dyn Watch,
) -> Result<Solution, Error> {
    let solution = attempt(evaluator, start, options, watch)?;
    match solution.stop {
        StopReason::Interrupted { .. } if solution.trajectory.times.is_empty() => Err(solution.stop.error("flow")),
        _ => Ok(solution),
    }
}

/// [`solve`]; the trajectory is empty where `watch` interrupts before anything is recorded.
fn attempt<E: Evaluator>(
    evaluator: &E,
    start: &OrderParameters,
    options: &Options,
    watch: &dyn Watch,
) -> Result<Solution, Error> {
    // Averages of many heads take long: they stop on the way, and are NaN then.
    let evaluator = &Watched::new(evaluator, watch);
    let shape = Shape { heads: evaluator.heads(), features: evaluator.task().features() };
    if (start.heads(), start.features()) != (shape.heads, shape.features) {
        return Err(Error::invalid(
            "m0",
            format!(
                "is {} x {} but there are {} heads and {} features",
                start.heads(),
                start.features(),
                shape.heads,
                shape.features
            ),
        ));
    }
    check_noise(evaluator, options.noise)?;
    options.validate(shape)?;
    let state = State {
        shape,
        with_overlaps: options.noise > 0.0,
        bias: evaluator.attention().bias,
        tolerance: 10.0 * options.absolute_tolerance,
    };
    let system = System {
        evaluator,
        state,
        noise: options.noise,
        failure: RefCell::new(None),
        evaluations: Cell::new(0),
        given_up: Cell::new(false),
    };
    let y0 = state.pack(start);
    let end = options.times[options.times.len() - 1];
    let mut recorder = Recorder {
        system: &system,
        options,
        watch,
        trajectory: Trajectory::new(shape),
        reported: 0,
        end,
        missing: None,
    };
    recorder.record_until(0.0, |_| Ok(y0.clone()))?;
    if watch.interrupted() && recorder.trajectory.times.len() < options.times.len() {
        let spent = Statistics { evaluations: system.evaluations.get(), ..Default::default() };
        return Ok(recorder.finish(StopReason::Interrupted { time: 0.0 }, spent, (0.0, y0)));
    }
    if let Some(stop) = recorder.missing.take() {
        let spent = Statistics { evaluations: system.evaluations.get(), ..Default::default() };
        return Ok(recorder.finish(stop, spent, (0.0, y0)));
    }
    if let Some(stop) = system.event_at_start(&y0, &options.events) {
        recorder.record_end(0.0, &y0);
        let statistics = Statistics { evaluations: system.evaluations.get(), ..Default::default() };
        return Ok(recorder.finish(stop, statistics, (0.0, y0)));
    }
    if end == 0.0 {
        return Ok(recorder.finish(StopReason::Completed, Statistics::default(), (0.0, y0)));
    }
    let (stop, mut statistics, last) = match integrate(&system, &y0, options, &mut recorder) {
        // Without numbers the solver fails, in one way or another.
        Err(_) if watch.interrupted() => {
            let time = recorder.trajectory.times.last().copied().unwrap_or(0.0);
            (StopReason::Interrupted { time }, Statistics::default(), (time, vec![f64::NAN; y0.len()]))
        }
        ended => ended?,
    };
    statistics.evaluations = system.evaluations.get();
    Ok(recorder.finish(stop, statistics, last))
}

/// The derivative of the order parameters at a point: `dm`, `dr`, `db`, and the loss there.
///
/// This is the right-hand side of the flow in the coordinates `(m, r, b)`, whatever `noise` is. Where the evaluator
/// has no value it is NaN, and so is `dr` where `noise > 0` and the evaluator does not give it
/// ([`check_noise`]).
pub fn derivative<E: Evaluator>(evaluator: &E, point: &OrderParameters, noise: f64) -> Derivative {
    let rule = evaluator.attention().bias;
    let at = Coordinates::of(point, evaluator.attention());
    let moments = evaluator.moments(&at);
    Derivative {
        m: derivative_of_alignments(&moments, &at, rule),
        r: derivative_of_overlaps(&moments, &at, rule, point.r(), noise),
        b: derivative_of_biases(&moments, rule),
        loss: moments.loss.value(),
    }
}

/// The derivative of `m`, `r` and `b` at coordinates with overlaps `r`: as [`derivative`], with a factor
/// of `r - m m^T` of the caller's choice.
pub(crate) fn derivative_at<E: Evaluator>(
    evaluator: &E,
    at: &Coordinates,
    r: &DMatrix<f64>,
    noise: f64,
) -> (DMatrix<f64>, DMatrix<f64>, Vec<f64>) {
    let rule = evaluator.attention().bias;
    let moments = evaluator.moments(at);
    (
        derivative_of_alignments(&moments, at, rule),
        derivative_of_overlaps(&moments, at, rule, r, noise),
        derivative_of_biases(&moments, rule),
    )
}

/// Gradient flow in coordinates: `dm`, `dC`, `db`.
pub(crate) fn gradient_flow<E: Evaluator>(evaluator: &E, at: &Coordinates) -> (DMatrix<f64>, DMatrix<f64>, Vec<f64>) {
    let rule = evaluator.attention().bias;
    let moments = evaluator.moments(at);
    (
        derivative_of_alignments(&moments, at, rule),
        derivative_of_residual(&moments, at, rule),
        derivative_of_biases(&moments, rule),
    )
}

/// What [`derivative`] returns.
#[derive(Debug, Clone, PartialEq)]
pub struct Derivative {
    /// `dm/dtau`, `H x F`.
    pub m: DMatrix<f64>,
    /// `dr/dtau`, `H x H`.
    pub r: DMatrix<f64>,
    /// `db/dtau`, length `H`; zero unless the biases are trained.
    pub b: Vec<f64>,
    /// The population loss at the point.
    pub loss: f64,
}

fn derivative_of_alignments(moments: &Moments, at: &Coordinates, rule: Bias) -> DMatrix<f64> {
    let mut dm = -&moments.gx;
    if rule == Bias::HalfNorm {
        add_scaled_rows(&mut dm, &moments.gb, &at.m);
    }
    dm
}

fn derivative_of_residual(moments: &Moments, at: &Coordinates, rule: Bias) -> DMatrix<f64> {
    let mut dc = -&moments.gc;
    if rule == Bias::HalfNorm {
        add_scaled_rows(&mut dc, &moments.gb, &at.c);
    }
    dc
}

fn derivative_of_overlaps(
    moments: &Moments,
    at: &Coordinates,
    rule: Bias,
    r: &DMatrix<f64>,
    noise: f64,
) -> DMatrix<f64> {
    let u = &at.m * moments.gx.transpose() + &at.c * moments.gc.transpose();
    let mut dr = -&u - u.transpose();
    // A noise of NaN is no noise of zero.
    if !(noise <= 0.0) {
        // Entries refuse an evaluator without gg (`check_noise`); whatever comes here all the same has no value.
        match &moments.gg {
            Some(gg) => dr += gg * noise,
            None => dr.fill(f64::NAN),
        }
    }
    if rule == Bias::HalfNorm {
        for ((h, k), d) in indexed(&mut dr) {
            *d += (moments.gb[h] + moments.gb[k]) * r[(h, k)];
        }
    }
    dr
}

fn derivative_of_biases(moments: &Moments, rule: Bias) -> Vec<f64> {
    match rule {
        Bias::Trained => moments.gb.iter().map(|g| -g).collect(),
        Bias::None | Bias::HalfNorm => vec![0.0; moments.gb.len()],
    }
}

fn add_scaled_rows(to: &mut DMatrix<f64>, scale: &[f64], rows: &DMatrix<f64>) {
    for ((h, j), v) in indexed(to) {
        *v += scale[h] * rows[(h, j)];
    }
}

/// Entries with their (row, column).
fn indexed(matrix: &mut DMatrix<f64>) -> impl Iterator<Item = ((usize, usize), &mut f64)> {
    let rows = matrix.nrows();
    matrix.iter_mut().enumerate().map(move |(i, v)| ((i % rows, i / rows), v))
}

/// How the solver's vector holds the order parameters: `m`, then `C` in full or `r` as its lower
/// triangle, then the trained biases.
#[derive(Debug, Clone, Copy)]
struct State {
    shape: Shape,
    with_overlaps: bool,
    bias: Bias,
    /// How negative a pivot of `r - m m^T` may be before the point counts as outside the cone: this,
    /// the error of a step, but never more than [`CONE`] of `tr r`.
    tolerance: f64,
}

impl State {
    fn second(&self) -> usize {
        let h = self.shape.heads;
        if self.with_overlaps { h * (h + 1) / 2 } else { h * h }
    }

    fn size(&self) -> usize {
        let Shape { heads, features } = self.shape;
        heads * features + self.second() + if self.bias == Bias::Trained { heads } else { 0 }
    }

    /// A name for the variable at `index`, for error messages.
    fn name(&self, index: usize) -> String {
        let Shape { heads, features } = self.shape;
        let second = heads * features;
        if index < second {
            format!("m[{}][{}]", index / features, index % features)
        } else if index < second + self.second() {
            let i = index - second;
            if self.with_overlaps {
                let h = (0..heads).rev().find(|h| h * (h + 1) / 2 <= i).unwrap_or(0);
                format!("r[{h}][{}]", i - h * (h + 1) / 2)
            } else {
                format!("C[{}][{}]", i / heads, i % heads)
            }
        } else {
            format!("b[{}]", index - second - self.second())
        }
    }

    fn write(&self, m: &DMatrix<f64>, second: &DMatrix<f64>, b: &[f64], y: &mut [f64]) {
        let Shape { heads, features } = self.shape;
        let mut values = y.iter_mut();
        let mut put = |v: f64| {
            if let Some(y) = values.next() {
                *y = v;
            }
        };
        for h in 0..heads {
            for f in 0..features {
                put(m[(h, f)]);
            }
        }
        for h in 0..heads {
            for k in 0..if self.with_overlaps { h + 1 } else { heads } {
                put(second[(h, k)]);
            }
        }
        if self.bias == Bias::Trained {
            b.iter().for_each(|&b| put(b));
        }
    }

    fn pack(&self, point: &OrderParameters) -> Vec<f64> {
        let mut y = vec![0.0; self.size()];
        let residual;
        let second = if self.with_overlaps {
            point.r()
        } else {
            residual = point.residual_factor();
            &residual
        };
        self.write(point.m(), second, point.b(), &mut y);
        y
    }

    /// The tolerance at overlaps `r`.
    fn cone(&self, r: &DMatrix<f64>) -> f64 {
        self.tolerance.min(CONE * r.trace().abs())
    }

    /// Coordinates and overlaps; fails where `r - m m^T` is not positive semi-definite.
    fn unpack(&self, y: &[f64]) -> Result<(Coordinates, DMatrix<f64>), Failure> {
        let (mut at, r) = self.unpack_anywhere(y)?;
        if self.with_overlaps {
            let residual = &r - &at.m * at.m.transpose();
            at.c = lower_factor(&residual, self.cone(&r)).map_err(|e| Failure::LeftCone(e.pivot))?;
        }
        Ok((at, r))
    }

    /// [`State::unpack`] without the factor `C` where it is not part of the state (it is zero then).
    fn unpack_anywhere(&self, y: &[f64]) -> Result<(Coordinates, DMatrix<f64>), Failure> {
        if let Some(index) = y.iter().position(|v| !v.is_finite()) {
            return Err(Failure::NotFinite(index));
        }
        let Shape { heads, features } = self.shape;
        let m = DMatrix::from_row_slice(heads, features, &y[..heads * features]);
        let rest = &y[heads * features..];
        let (c, r) = if self.with_overlaps {
            let r = DMatrix::from_fn(heads, heads, |h, k| rest[h.max(k) * (h.max(k) + 1) / 2 + h.min(k)]);
            let c = DMatrix::zeros(heads, heads);
            (c, r)
        } else {
            let c = DMatrix::from_row_slice(heads, heads, &rest[..heads * heads]);
            let r = &m * m.transpose() + &c * c.transpose();
            (c, r)
        };
        let b = match self.bias {
            Bias::Trained => rest[self.second()..].to_vec(),
            rule => biases(rule, &r, &vec![0.0; heads]),
        };
        Ok((Coordinates { m, c, b }, r))
    }
}

/// Why a right-hand side has no value.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Failure {
    NotFinite(usize),
    LeftCone(f64),
}

/// The flow as the solver sees it.
struct System<'a, E> {
    evaluator: &'a E,
    state: State,
    noise: f64,
    /// Why the last evaluation that failed did.
    failure: RefCell<Option<Failure>>,
    evaluations: Cell<usize>,
    /// Whether an interruption left the solver with numbers that mean nothing.
    given_up: Cell<bool>,
}

impl<E: Evaluator> System<'_, E> {
    fn try_derivative(&self, y: &[f64], dy: &mut [f64]) -> Result<(), Failure> {
        let (at, r) = self.state.unpack(y)?;
        self.evaluations.set(self.evaluations.get() + 1);
        let moments = self.evaluator.moments(&at);
        let rule = self.state.bias;
        let dm = derivative_of_alignments(&moments, &at, rule);
        let second = if self.state.with_overlaps {
            derivative_of_overlaps(&moments, &at, rule, &r, self.noise)
        } else {
            derivative_of_residual(&moments, &at, rule)
        };
        self.state.write(&dm, &second, &derivative_of_biases(&moments, rule), dy);
        match dy.iter().position(|v| !v.is_finite()) {
            Some(index) => Err(Failure::NotFinite(index)),
            None => Ok(()),
        }
    }

    /// The right-hand side; not a number where it has no value, so that the solver rejects the step.
    fn derivative(&self, y: &[f64], dy: &mut [f64]) {
        if self.evaluator.interrupted() {
            // A step of a flow at rest ends at once, and is thrown away; one without numbers is tried again and again, each time
            // with a matrix to factor.
            self.given_up.set(true);
            return dy.fill(0.0);
        }
        if let Err(failure) = self.try_derivative(y, dy) {
            // Later stages of a failed step only inherit the failure.
            self.failure.borrow_mut().get_or_insert(failure);
            dy.fill(f64::NAN);
        }
    }

    fn loss(&self, y: &[f64]) -> f64 {
        match self.state.unpack(y) {
            Ok((at, _)) => self.evaluator.loss(&at).value(),
            Err(_) => f64::NAN,
        }
    }

    /// A function that changes sign at each event.
    fn events(&self, y: &[f64], events: &[Event], g: &mut [f64]) {
        g.fill(1.0);
        for (g, event) in g.iter_mut().zip(events) {
            *g = match *event {
                Event::LossBelow(value) => self.loss(y) - value,
                Event::AlignmentCrosses { head, feature, value } => {
                    y[head * self.state.shape.features + feature] - value
                }
            };
        }
    }

    fn event_at_start(&self, y: &[f64], events: &[Event]) -> Option<StopReason> {
        events.iter().find_map(|event| match *event {
            Event::LossBelow(value) if self.loss(y) < value => Some(reached(event, 0.0)),
            _ => None,
        })
    }
}

fn reached(event: &Event, time: f64) -> StopReason {
    match *event {
        Event::LossBelow(value) => {
            StopReason::LossBelow { value, time, standard_error: None, reached: 1, scrambles: 1 }
        }
        Event::AlignmentCrosses { head, feature, value } => {
            StopReason::AlignmentCrossed { head, feature, value, time, standard_error: None, reached: 1, scrambles: 1 }
        }
    }
}

/// Writes down the states at the requested times.
struct Recorder<'a, E> {
    system: &'a System<'a, E>,
    options: &'a Options,
    watch: &'a dyn Watch,
    trajectory: Trajectory,
    reported: u64,
    end: f64,
    /// Why a state that was asked for is not there.
    missing: Option<StopReason>,
}

impl<E: Evaluator> Recorder<'_, E> {
    /// Records the requested times up to `time`, with the states that `at` interpolates.
    fn record_until(&mut self, time: f64, at: impl Fn(f64) -> Result<Vec<f64>, DiffsolError>) -> Result<(), Error> {
        while let Some(&next) = self.options.times.get(self.trajectory.times.len()).filter(|&&t| t <= time) {
            if self.watch.interrupted() {
                break;
            }
            let y = at(next).map_err(|e| solver_error(&e))?;
            if !self.push(next, &y) {
                break;
            }
        }
        let done = if self.end > 0.0 { (PROGRESS as f64 * (time / self.end).min(1.0)) as u64 } else { PROGRESS };
        self.watch.advance(done.saturating_sub(self.reported));
        self.reported = self.reported.max(done);
        Ok(())
    }

    /// Records a state; false if it is none, which is then what ends the flow, or its loss is not told any more.
    fn push(&mut self, time: f64, y: &[f64]) -> bool {
        let not_finite = |variable: String| StopReason::NotFinite { time, variable };
        // An interpolated state may lie outside the cone by the tolerance; it is recorded as it is.
        let (at, r) = match self.system.state.unpack_anywhere(y) {
            Ok(found) => found,
            Err(Failure::NotFinite(index)) => {
                self.missing = Some(not_finite(self.system.state.name(index)));
                return false;
            }
            Err(Failure::LeftCone(pivot)) => {
                self.missing = Some(StopReason::LeftCone { time, pivot });
                return false;
            }
        };
        let loss = self.system.evaluator.loss(&self.on_cone(&at, &r)).value();
        // Then the loss may be none.
        if self.watch.interrupted() {
            return false;
        }
        if !loss.is_finite() {
            self.missing = Some(not_finite("loss".into()));
            return false;
        }
        let b = biases(self.system.state.bias, &r, &at.b);
        self.trajectory.rows.push(self.trajectory.shape.row(loss, &at.m, &r, &b));
        self.trajectory.times.push(time);
        true
    }

    /// Records the state at which the flow ends before its last time, unless a requested time has it already.
    fn record_end(&mut self, time: f64, y: &[f64]) {
        if self.trajectory.times.last().is_none_or(|&last| last < time) {
            self.push(time, y);
        }
    }

    /// A state as coordinates; `None` if it is none.
    fn coordinates(&self, y: &[f64]) -> Option<Coordinates> {
        let (at, r) = self.system.state.unpack_anywhere(y).ok()?;
        Some(self.on_cone(&at, &r))
    }

    fn on_cone(&self, at: &Coordinates, r: &DMatrix<f64>) -> Coordinates {
        if !self.system.state.with_overlaps {
            return at.clone();
        }
        let residual = r - &at.m * at.m.transpose();
        let c = lower_factor(&residual, self.system.state.cone(r)).unwrap_or_else(|_| {
            let eigen = residual.symmetric_eigen();
            &eigen.eigenvectors * DMatrix::from_diagonal(&eigen.eigenvalues.map(|v| v.max(0.0).sqrt()))
        });
        Coordinates { c, ..at.clone() }
    }

    fn finish(self, stop: StopReason, statistics: Statistics, (time, y): (f64, Vec<f64>)) -> Solution {
        self.watch.advance(PROGRESS - self.reported);
        let end = self.coordinates(&y).map(|at| (time, at));
        Solution { trajectory: self.trajectory, end, stop, statistics }
    }
}

fn solver_error(error: &DiffsolError) -> Error {
    Error::invalid("flow", format!("the ODE solver failed: {error}"))
}

/// Why a solve ended, what it cost, and the time and state that it ended with.
type Ended = (StopReason, Statistics, (f64, Vec<f64>));

/// The absolute tolerance of a solve with fixed steps.
const ACCEPT_ANYTHING: f64 = 1e10;

type Matrix = NalgebraMat<f64>;
type Lu = NalgebraLU<f64>;

fn integrate<E: Evaluator>(
    system: &System<'_, E>,
    y0: &[f64],
    options: &Options,
    recorder: &mut Recorder<'_, E>,
) -> Result<Ended, Error> {
    let rhs = |y: &[f64], _: &[f64], _: f64, dy: &mut [f64]| system.derivative(y, dy);
    // The implicit methods need J v: a forward difference about a remembered evaluation.
    let base: RefCell<(Vec<f64>, Vec<f64>)> = RefCell::new((Vec::new(), Vec::new()));
    let jacobian_times = |y: &[f64], _: &[f64], _: f64, v: &[f64], out: &mut [f64]| {
        let length = v.iter().map(|a| a * a).sum::<f64>().sqrt();
        if length == 0.0 {
            out.fill(0.0);
            return;
        }
        let (at, value) = &mut *base.borrow_mut();
        if at != y {
            *at = y.to_vec();
            value.resize(y.len(), 0.0);
            system.derivative(y, value);
        }
        let step = f64::EPSILON.sqrt() * (1.0 + y.iter().map(|a| a * a).sum::<f64>().sqrt()) / length;
        let shifted: Vec<f64> = y.iter().zip(v).map(|(a, b)| a + step * b).collect();
        system.derivative(&shifted, out);
        for (o, f) in out.iter_mut().zip(&*value) {
            *o = (*o - f) / step;
        }
    };
    let roots = |y: &[f64], _: &[f64], _: f64, g: &mut [f64]| system.events(y, &options.events, g);
    let mut problem = OdeBuilder::<Matrix>::new()
        .t0(0.0)
        .rtol(options.relative_tolerance)
        .atol([if options.fixed_step.is_some() { ACCEPT_ANYTHING } else { options.absolute_tolerance }])
        .rhs_implicit(rhs, jacobian_times)
        .init(|_: &[f64], _, y: &mut [f64]| y.copy_from_slice(y0), y0.len())
        .root(roots, options.events.len().max(1))
        .build()
        .map_err(|e| solver_error(&e))?;
    problem.ode_options.max_number_timesteps = options.max_steps;
    if options.fixed_step.is_some() {
        // Nothing is rejected and nothing grows, but the implicit stages are still solved.
        problem.ode_options.nonlinear_solver_tolerance = options.absolute_tolerance / ACCEPT_ANYTHING;
        problem.ode_options.max_nonlinear_solver_iterations = 50;
        problem.ode_options.max_timestep_growth = Some(1.0);
        problem.ode_options.min_timestep_growth = Some(1.0);
    }
    match options.method {
        Method::Tsit45 => drive(problem.tsit45().map_err(|e| solver_error(&e))?, system, recorder),
        Method::Bdf => drive(problem.bdf::<Lu>().map_err(|e| solver_error(&e))?, system, recorder),
        Method::TrBdf2 => drive(problem.tr_bdf2::<Lu>().map_err(|e| solver_error(&e))?, system, recorder),
        Method::Esdirk34 => drive(problem.esdirk34::<Lu>().map_err(|e| solver_error(&e))?, system, recorder),
    }
}

/// What a right-hand side without a value means for the flow that met it just after `time`.
fn failed<E>(system: &System<'_, E>, failure: Option<Failure>, time: f64) -> Option<StopReason> {
    failure.map(|failure| match failure {
        Failure::NotFinite(index) => StopReason::NotFinite { time, variable: system.state.name(index) },
        Failure::LeftCone(pivot) => StopReason::LeftCone { time, pivot },
    })
}

/// Steps the solver to the end, an event, a failure or an interruption.
fn drive<'a, E, Eqn, S>(mut solver: S, system: &System<'_, E>, recorder: &mut Recorder<'_, E>) -> Result<Ended, Error>
where
    E: Evaluator,
    Eqn: OdeEquations<T = f64, V = NalgebraVec<f64>> + 'a,
    S: OdeSolverMethod<'a, Eqn>,
{
    let until = recorder.options.until;
    let mut look = until.map_or(recorder.end, |until| until.first.min(recorder.end));
    solver.set_stop_time(look).map_err(|e| solver_error(&e))?;
    // Where the time was a number of steps ago, and half of them ago; what was wrong with steps that were rejected since.
    let (mut marks, mut crawled, mut trouble) = ([0.0; 2], 0, None);
    let progress = PROGRESSES * recorder.end.min(1.0 / unit_of_rates(system.evaluator));
    if let Some(step) = recorder.options.fixed_step {
        *solver.state_mut().h = step;
    }
    let counted = |solver: &S| {
        let statistics = solver.get_statistics();
        Statistics {
            steps: statistics.number_of_steps,
            rejected: statistics.number_of_error_test_failures + statistics.number_of_nonlinear_solver_fails,
            evaluations: 0,
        }
    };
    let state = |solver: &S| (solver.state().t, solver.state().y.batch_as_slice(0).to_vec());
    let mut last = None;
    let stop = loop {
        let before = solver.state().t;
        if recorder.watch.interrupted() {
            break StopReason::Interrupted { time: before };
        }
        *system.failure.borrow_mut() = None;
        let so_far = counted(&solver);
        let outcome = solver.step();
        let count = |s: &S| (s.get_statistics().number_of_steps, s.get_statistics().number_of_error_test_failures);
        let (steps, rejected) = count(&solver);
        if system.given_up.get() {
            return Ok((StopReason::Interrupted { time: before }, so_far, state(&solver)));
        }
        match outcome {
            Ok(reason) => {
                let reach = match reason {
                    OdeSolverStopReason::RootFound(time, _) => time,
                    _ => solver.state().t,
                };
                recorder.record_until(reach, |t| solver.interpolate(t).map(|y| y.batch_as_slice(0).to_vec()))?;
                if let Some(stop) = recorder.missing.take() {
                    break stop;
                }
                let recorded = &recorder.trajectory.times;
                if recorder.watch.interrupted() && recorded.len() < recorder.options.times.len() {
                    break StopReason::Interrupted { time: recorded.last().copied().unwrap_or(before) };
                }
                match reason {
                    OdeSolverStopReason::RootFound(time, index) => {
                        let y = solver.interpolate(time).map_err(|e| solver_error(&e))?.batch_as_slice(0).to_vec();
                        recorder.record_end(time, &y);
                        last = Some((time, y));
                        break reached(&recorder.options.events[index], time);
                    }
                    OdeSolverStopReason::TstopReached => {
                        let Some(until) = until else { break StopReason::Completed };
                        let y = solver.state().y.batch_as_slice(0).to_vec();
                        let found = recorder.coordinates(&y).map(|at| {
                            settled(system.evaluator, &at, system.noise, look, until.tolerance, recorder.watch)
                        });
                        if recorder.watch.interrupted() {
                            break StopReason::Interrupted { time: look };
                        }
                        let rests = found.as_ref().is_some_and(|found| found.settled);
                        if rests || look >= recorder.end {
                            recorder.record_end(look, &y);
                            break match found {
                                Some(found) if !rests => StopReason::NotSettled {
                                    time: look,
                                    drift: found.drift,
                                    growth_rate: found.growth_rate,
                                },
                                _ => StopReason::Settled { time: look },
                            };
                        }
                        look = (2.0 * look).min(recorder.end);
                        solver.set_stop_time(look).map_err(|e| solver_error(&e))?;
                    }
                    OdeSolverStopReason::InternalTimestep => {}
                }
                let now = solver.state().t;
                trouble = system.failure.borrow().or(trouble);
                crawled += 1;
                if crawled == CRAWL / 2 {
                    marks[1] = now;
                } else if crawled == CRAWL {
                    let (first, second) = (marks[1] - marks[0], now - marks[1]);
                    if recorder.options.fixed_step.is_none() && first + second < progress && second <= 2.0 * first {
                        break failed(system, trouble, now).unwrap_or(StopReason::NoProgress {
                            time: now,
                            steps,
                            rejected,
                        });
                    }
                    (marks, crawled, trouble) = ([now; 2], 0, None);
                }
            }
            Err(DiffsolError::OdeSolverError(OdeSolverError::TooManyTimesteps { .. })) => {
                break StopReason::StepBudget { time: before, steps, rejected };
            }
            // Without numbers it fails, in one way or another.
            Err(_) if recorder.watch.interrupted() => {
                // What was rejected for want of numbers does not count.
                return Ok((StopReason::Interrupted { time: before }, so_far, state(&solver)));
            }
            Err(error) => {
                let failure = *system.failure.borrow();
                break match (failed(system, failure, before), &error) {
                    (Some(reason), _) => reason,
                    (None, DiffsolError::OdeSolverError(_)) => {
                        StopReason::StepTooSmall { time: before, steps, rejected }
                    }
                    (None, _) => return Err(solver_error(&error)),
                };
            }
        }
    };
    let last = last.unwrap_or_else(|| state(&solver));
    Ok((stop, counted(&solver), last))
}
