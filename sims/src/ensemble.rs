//! Independent replicas of a simulation, in parallel, recorded on a time grid.
//!
//! All replicas advance together from one recorded time to the next. With the overlap chain the work
//! can be put down and taken up again: a [`Checkpoint`] holds each replica's state and record, and a
//! resumed ensemble has the same bits as an unbroken one.

use headflow_model::{Error, Estimate, Shape, StopReason, Trajectory, Watch};
use nalgebra::DMatrix;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::direct;
use crate::overlap_chain::{Chain, State};
use crate::population_loss::population_loss_watched;
use crate::sgd::{Diverged, Engine, Halt, MEMORY_LIMIT, NUMBERS_BETWEEN_LOOKS, Sgd, Start};

/// What to run and record.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// Times `tau` at which overlaps and loss are recorded, increasing, each at the nearest step.
    pub times: Vec<f64>,
    /// Number of replicas.
    pub replicas: u32,
    /// Fresh samples on which each loss is measured.
    pub test_samples: usize,
}

/// One replica's record.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    /// Overlaps, biases and loss at the recorded times.
    pub trajectory: Trajectory,
    /// Why it ended.
    pub stop: StopReason,
    /// Steps taken.
    pub steps: u64,
    /// The last finite state, where a run diverged: time and row.
    pub last_finite: Option<(f64, Vec<f64>)>,
}

/// All replicas' records and their average.
#[derive(Debug, Clone, PartialEq)]
pub struct Ensemble {
    /// Mean and standard error over the replicas.
    pub estimate: Estimate,
    /// `tr r` with its standard error, at the same times.
    pub trace: Vec<(f64, f64)>,
    /// Each replica's record, in order.
    pub runs: Vec<Run>,
    /// Completed, or the first replica's reason that is not.
    pub stop: StopReason,
    /// Steps of all replicas.
    pub steps: u64,
    /// Where an interrupted overlap chain can be taken up again.
    pub unfinished: Option<Checkpoint>,
}

/// Where each replica of an ensemble of overlap chains is, and what it has recorded.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Checkpoint {
    /// One for each replica.
    pub runs: Vec<Unfinished>,
}

/// One replica of a [`Checkpoint`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Unfinished {
    /// Where the chain is.
    pub state: State,
    /// The rows of the times that it has recorded, from the first on.
    pub rows: Vec<Vec<f64>>,
}

/// Steps of the overlap chain between two chances to keep a checkpoint: some seconds.
const STEPS_BETWEEN_CHECKPOINTS: u64 = 1 << 22;

/// The most steps of a replica: as many as whole numbers in double precision.
const MAX_STEPS: f64 = 9e15;

/// A replica of either engine.
#[derive(Debug, Clone)]
pub enum Replica {
    /// Keys and tokens in `D` dimensions.
    Direct(Box<direct::Replica>),
    /// The overlap chain.
    Overlap(Box<Chain>),
}

impl Replica {
    /// Replica number `index` of the engine that `sgd` names, at its start.
    ///
    /// # Errors
    /// As [`Sgd::validate`].
    pub fn new(sgd: &Sgd, start: &Start, index: u32) -> Result<Self, Error> {
        Ok(match sgd.engine {
            Engine::Direct => Self::Direct(Box::new(direct::Replica::new(sgd, start, index)?)),
            Engine::Overlap => Self::Overlap(Box::new(Chain::new(sgd, start, index)?)),
        })
    }

    /// Takes one step.
    ///
    /// # Errors
    /// When it diverges; the replica is left as it was.
    #[inline]
    pub fn advance(&mut self) -> Result<(), Diverged> {
        match self {
            Self::Direct(replica) => replica.advance(),
            Self::Overlap(chain) => chain.advance(),
        }
    }

    /// Takes one step, stopping on the way once `watch` interrupts.
    ///
    /// # Errors
    /// When it diverges or is interrupted. The overlap chain is left as it was; an interrupted direct replica is of no
    /// further use.
    #[inline]
    pub fn advance_watched(&mut self, watch: &dyn Watch) -> Result<(), Halt> {
        match self {
            Self::Direct(replica) => replica.advance_watched(watch),
            Self::Overlap(chain) => chain.advance_watched(watch),
        }
    }

    /// Number of steps taken.
    pub fn steps(&self) -> u64 {
        match self {
            Self::Direct(replica) => replica.steps(),
            Self::Overlap(chain) => chain.steps(),
        }
    }

    /// The order parameters now: `m`, `r` and the biases that enter the scores.
    pub fn overlaps(&self) -> (DMatrix<f64>, DMatrix<f64>, Vec<f64>) {
        match self {
            Self::Direct(replica) => replica.overlaps(),
            Self::Overlap(chain) => chain.overlaps(),
        }
    }

    /// [`Replica::overlaps`]; none once `watch` interrupts.
    pub fn overlaps_watched(&self, watch: &dyn Watch) -> Option<(DMatrix<f64>, DMatrix<f64>, Vec<f64>)> {
        match self {
            Self::Direct(replica) => replica.overlaps_watched(watch),
            Self::Overlap(chain) => (!watch.interrupted()).then(|| chain.overlaps()),
        }
    }

    /// What it shares with the other replicas.
    pub fn sgd(&self) -> &Sgd {
        match self {
            Self::Direct(replica) => replica.sgd(),
            Self::Overlap(chain) => chain.sgd(),
        }
    }

    /// The replica's number.
    pub fn index(&self) -> u32 {
        match self {
            Self::Direct(replica) => replica.index(),
            Self::Overlap(chain) => chain.index(),
        }
    }

    /// Steps to take between two looks at the watch.
    pub(crate) fn stride(&self, heads: usize) -> u64 {
        (NUMBERS_BETWEEN_LOOKS / self.sgd().numbers_per_step(heads)).max(1) as u64
    }
}

/// Runs the replicas. A replica's numbers depend on the seed and its index alone.
///
/// # Errors
/// When the parameters are invalid, or `watch` interrupts before the replicas are at their start. Later a divergence or an
/// interruption is a [`StopReason`] and keeps what was recorded.
pub fn simulate(sgd: &Sgd, start: &Start, options: &Options, watch: &dyn Watch) -> Result<Ensemble, Error> {
    resume(sgd, start, options, None, &mut |_| Ok(()), watch)
}

/// Takes the chance to keep a checkpoint: it is called with a function that makes one.
pub type Keep<'a> = dyn FnMut(&dyn Fn() -> Checkpoint) -> Result<(), Error> + 'a;

/// [`simulate`] from a checkpoint on, if there is one. `keep` is offered a checkpoint every few
/// seconds (overlap chain only).
///
/// # Errors
/// As [`simulate`]; when the checkpoint does not fit `sgd` and `options`; and those of `keep`, which
/// end the work.
pub fn resume(
    sgd: &Sgd,
    start: &Start,
    options: &Options,
    checkpoint: Option<&Checkpoint>,
    keep: &mut Keep<'_>,
    watch: &dyn Watch,
) -> Result<Ensemble, Error> {
    sgd.validate(start)?;
    if options.replicas == 0 {
        return Err(Error::invalid("replicas", "there must be at least one"));
    }
    if options.test_samples < 2 {
        return Err(Error::invalid("test_samples", "a loss with an error needs at least 2"));
    }
    let times = &options.times;
    if times.is_empty() || !times.iter().all(|t| t.is_finite() && *t >= 0.0) || !times.is_sorted_by(|a, b| a < b) {
        return Err(Error::invalid("times", "must be finite, not negative and strictly increasing"));
    }
    if let Some(last) = times.last().filter(|&&last| last > 0.0 && sgd.step_at(last) == 0) {
        return Err(Error::invalid(
            "gamma",
            format!(
                "one step at D = {} advances tau by gamma / D = {:e}, beyond the last time {last}: lower --gamma, or raise --tau",
                sgd.dimension,
                sgd.time_step()
            ),
        ));
    }
    if let Some(last) = times.last().filter(|&&last| last / sgd.time_step() > MAX_STEPS) {
        return Err(Error::invalid(
            "tau",
            format!(
                "the last time {last:e} is {:e} steps away, above the limit of {MAX_STEPS:e}",
                last / sgd.time_step()
            ),
        ));
    }
    let bytes = sgd.replica_bytes(start.heads()).saturating_mul(options.replicas as usize);
    if bytes > MEMORY_LIMIT {
        return Err(Error::invalid(
            "replicas",
            format!(
                "{} replicas at D = {} need {} GiB, above the limit of {} GiB: use fewer, or a shorter sequence",
                options.replicas,
                sgd.dimension,
                bytes >> 30,
                MEMORY_LIMIT >> 30
            ),
        ));
    }
    let mut runs: Vec<Running> = match checkpoint {
        None => (0..options.replicas)
            .into_par_iter()
            .map(|index| match watch.interrupted() {
                true => Err(Error::interrupted("simulate")),
                false => Running::new(sgd, start, index),
            })
            .collect::<Result<_, _>>()?,
        Some(checkpoint) => Running::take_up(sgd, start.heads(), options, checkpoint)?,
    };
    watch.advance(runs.iter().map(|run| run.replica.steps()).sum());
    'times: for (record, &time) in times.iter().enumerate() {
        // All replicas advance from one recorded time to the next: an interruption finds them together.
        loop {
            runs.par_iter_mut().try_for_each(|run| run.advance(record, time, options.test_samples, watch))?;
            if runs.iter().any(|run| !run.stop.as_requested()) {
                break 'times;
            }
            if sgd.engine == Engine::Overlap {
                keep(&|| checkpoint_of(&runs))?;
            }
            if runs.iter().all(|run| run.trajectory.times.len() > record) {
                break;
            }
        }
    }
    let interrupted = runs.iter().any(|run| matches!(run.stop, StopReason::Interrupted { .. }));
    if interrupted && runs.iter().all(|run| run.trajectory.times.is_empty()) {
        return Err(Error::interrupted("simulate"));
    }
    let unfinished = (interrupted && sgd.engine == Engine::Overlap).then(|| checkpoint_of(&runs));
    let runs: Vec<Run> = runs.into_iter().map(Running::finish).collect();
    let trajectories: Vec<_> = runs.iter().map(|run| run.trajectory.clone()).collect();
    let Some(estimate) = Estimate::over(&trajectories) else {
        return Err(Error::invalid("replicas", "there must be at least one"));
    };
    Ok(Ensemble {
        estimate,
        trace: Estimate::trace_over(&trajectories),
        stop: runs.iter().map(|run| &run.stop).find(|s| !s.as_requested()).cloned().unwrap_or(StopReason::Completed),
        steps: runs.iter().map(|run| run.steps).sum(),
        runs,
        unfinished,
    })
}

/// A replica on its way.
struct Running {
    replica: Replica,
    trajectory: Trajectory,
    stop: StopReason,
    last_finite: Option<(f64, Vec<f64>)>,
}

fn checkpoint_of(runs: &[Running]) -> Checkpoint {
    let unfinished = |run: &Running| match &run.replica {
        Replica::Overlap(chain) => Some(Unfinished { state: chain.state(), rows: run.trajectory.rows.clone() }),
        Replica::Direct(_) => None,
    };
    Checkpoint { runs: runs.iter().filter_map(unfinished).collect() }
}

impl Running {
    fn new(sgd: &Sgd, start: &Start, index: u32) -> Result<Self, Error> {
        Ok(Self::of(Replica::new(sgd, start, index)?, start.heads()))
    }

    fn of(replica: Replica, heads: usize) -> Self {
        let features = replica.sgd().task.features();
        Self {
            replica,
            trajectory: Trajectory::new(Shape { heads, features }),
            stop: StopReason::Completed,
            last_finite: None,
        }
    }

    fn take_up(sgd: &Sgd, heads: usize, options: &Options, checkpoint: &Checkpoint) -> Result<Vec<Self>, Error> {
        let wrong = |problem: &str| Error::invalid("checkpoint", problem);
        if sgd.engine != Engine::Overlap {
            return Err(wrong("only the overlap chain can be taken up again: use --engine overlap"));
        }
        if checkpoint.runs.len() != options.replicas as usize {
            return Err(wrong("holds another number of replicas"));
        }
        let take_up = |(index, saved): (usize, &Unfinished)| -> Result<Self, Error> {
            let chain = Chain::at(sgd, heads, index as u32, &saved.state)?;
            let mut run = Self::of(Replica::Overlap(Box::new(chain)), heads);
            let width = run.trajectory.shape.width();
            let recorded = options.times.get(..saved.rows.len()).unwrap_or_default();
            if recorded.len() < saved.rows.len() || saved.rows.iter().any(|row| row.len() != width) {
                return Err(wrong("its records do not fit the recorded times, heads and features"));
            }
            let next = options.times.get(recorded.len());
            if recorded.last().is_some_and(|&t| sgd.step_at(t) > saved.state.step)
                || next.is_some_and(|&t| sgd.step_at(t) < saved.state.step)
            {
                return Err(wrong("its steps and its records are not of the same time"));
            }
            run.trajectory.times = recorded.to_vec();
            run.trajectory.rows.clone_from(&saved.rows);
            Ok(run)
        };
        checkpoint.runs.iter().enumerate().map(take_up).collect()
    }

    /// Runs towards `time`, and records there, unless something comes in between; the overlap chain
    /// stops on the way for checkpoints.
    fn advance(&mut self, record: usize, time: f64, test_samples: usize, watch: &dyn Watch) -> Result<(), Error> {
        if self.trajectory.times.len() > record {
            return Ok(());
        }
        let sgd = self.replica.sgd();
        let (engine, target, time_step) = (sgd.engine, sgd.step_at(time), sgd.time_step());
        let stride = self.replica.stride(self.trajectory.shape.heads);
        let pause = match engine {
            Engine::Direct => target,
            Engine::Overlap => target.min(self.replica.steps() + STEPS_BETWEEN_CHECKPOINTS),
        };
        while self.replica.steps() < pause {
            if watch.interrupted() {
                self.stop = StopReason::Interrupted { time: self.replica.steps() as f64 * time_step };
                return Ok(());
            }
            let chunk = stride.min(pause - self.replica.steps());
            for done in 0..chunk {
                let diverged = match self.replica.advance_watched(watch) {
                    Ok(()) => continue,
                    Err(Halt::Diverged(diverged)) => Some(diverged),
                    Err(Halt::Interrupted) => None,
                };
                watch.advance(done);
                let Some(diverged) = diverged else {
                    self.stop = StopReason::Interrupted { time: self.replica.steps() as f64 * time_step };
                    return Ok(());
                };
                let time = diverged.step as f64 * time_step;
                let (m, r, b) = self.replica.overlaps();
                self.last_finite = Some((time, self.trajectory.shape.row(f64::NAN, &m, &r, &b)));
                self.stop = StopReason::Diverged { step: diverged.step, time, replica: self.replica.index() };
                return Ok(());
            }
            watch.advance(chunk);
        }
        if pause < target {
            return Ok(());
        }
        let row = match self.trajectory.times.last() {
            // No step in between: the same state, and its loss on the same samples.
            Some(&before) if self.replica.sgd().step_at(before) == target => self.trajectory.rows.last().cloned(),
            _ => self.measure(test_samples, watch)?,
        };
        let Some(row) = row else {
            self.stop = StopReason::Interrupted { time: target as f64 * time_step };
            return Ok(());
        };
        self.trajectory.times.push(time);
        self.trajectory.rows.push(row);
        Ok(())
    }

    /// What is recorded of the state now; none once `watch` interrupts.
    fn measure(&self, test_samples: usize, watch: &dyn Watch) -> Result<Option<Vec<f64>>, Error> {
        let Some((m, r, b)) = self.replica.overlaps_watched(watch) else { return Ok(None) };
        let sgd = self.replica.sgd();
        let index = self.replica.index();
        let at = (&m, &r, &b[..]);
        match population_loss_watched(
            &sgd.task,
            &sgd.attention,
            sgd.dimension,
            at,
            test_samples,
            sgd.seed,
            index,
            watch,
        ) {
            Ok((loss, _)) => Ok(Some(self.trajectory.shape.row(loss, &m, &r, &b))),
            Err(Error::Interrupted { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn finish(self) -> Run {
        let steps = self.replica.steps();
        Run { trajectory: self.trajectory, stop: self.stop, steps, last_finite: self.last_finite }
    }
}
