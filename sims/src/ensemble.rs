//! Independent replicas of a simulation, in parallel, recorded on a time grid.

use headflow_model::{Error, Estimate, Shape, StopReason, Trajectory, Watch};
use rayon::prelude::*;

use crate::direct::{MEMORY_LIMIT, Replica, Sgd, Start};
use crate::population_loss::population_loss;

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
}

/// The most steps of a replica: as many as whole numbers in double precision.
const MAX_STEPS: f64 = 9e15;

/// Random numbers drawn between two looks at the watch: about ten milliseconds.
const NUMBERS_BETWEEN_LOOKS: usize = 1 << 23;

/// Runs the replicas. A replica's numbers depend on the seed and its index alone.
///
/// # Errors
/// When the parameters are invalid. A divergence or an interruption is a [`StopReason`] and keeps
/// what was recorded.
pub fn simulate(sgd: &Sgd, start: &Start, options: &Options, watch: &dyn Watch) -> Result<Ensemble, Error> {
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
                "{} replicas at D = {} need {} GiB, above the limit of {} GiB: use fewer, and several seeds",
                options.replicas,
                sgd.dimension,
                bytes >> 30,
                MEMORY_LIMIT >> 30
            ),
        ));
    }
    let mut runs: Vec<Running> =
        (0..options.replicas).into_par_iter().map(|index| Running::new(sgd, start, index)).collect::<Result<_, _>>()?;
    // All replicas advance from one recorded time to the next: an interruption finds them together.
    for &time in times {
        runs.par_iter_mut().try_for_each(|run| run.advance(time, options.test_samples, watch))?;
        if runs.iter().any(|run| !run.stop.as_requested()) {
            break;
        }
    }
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
    })
}

/// A replica on its way.
struct Running {
    replica: Replica,
    trajectory: Trajectory,
    stop: StopReason,
    last_finite: Option<(f64, Vec<f64>)>,
}

impl Running {
    fn new(sgd: &Sgd, start: &Start, index: u32) -> Result<Self, Error> {
        Ok(Self {
            replica: sgd.replica(start, index)?,
            trajectory: Trajectory::new(Shape { heads: start.heads(), features: sgd.task.features() }),
            stop: StopReason::Completed,
            last_finite: None,
        })
    }

    /// Runs to `time` and records, unless something comes in between.
    fn advance(&mut self, time: f64, test_samples: usize, watch: &dyn Watch) -> Result<(), Error> {
        let sgd = self.replica.sgd();
        let (target, time_step) = (sgd.step_at(time), sgd.time_step());
        let numbers = sgd.batch.saturating_mul(sgd.task.length()).saturating_mul(sgd.dimension);
        let stride = (NUMBERS_BETWEEN_LOOKS / numbers).max(1) as u64;
        while self.replica.steps() < target {
            if watch.interrupted() {
                self.stop = StopReason::Interrupted { time: self.replica.steps() as f64 * time_step };
                return Ok(());
            }
            let chunk = stride.min(target - self.replica.steps());
            for done in 0..chunk {
                if let Err(diverged) = self.replica.advance() {
                    watch.advance(done);
                    let time = diverged.step as f64 * time_step;
                    let (m, r, b) = self.replica.overlaps();
                    self.last_finite = Some((time, self.trajectory.shape.row(f64::NAN, &m, &r, &b)));
                    self.stop = StopReason::Diverged { step: diverged.step, time, replica: self.replica.index() };
                    return Ok(());
                }
            }
            watch.advance(chunk);
        }
        let (m, r, b) = self.replica.overlaps();
        let sgd = self.replica.sgd();
        let (loss, _) = population_loss(
            &sgd.task,
            &sgd.attention,
            sgd.dimension,
            (&m, &r, &b),
            test_samples,
            sgd.seed,
            self.replica.index(),
        )?;
        self.trajectory.times.push(time);
        self.trajectory.rows.push(self.trajectory.shape.row(loss, &m, &r, &b));
        Ok(())
    }

    fn finish(self) -> Run {
        let steps = self.replica.steps();
        Run { trajectory: self.trajectory, stop: self.stop, steps, last_finite: self.last_finite }
    }
}
