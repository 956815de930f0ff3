//! Independent replicas of a simulation, in parallel, recorded on a time grid.

use headflow_model::{Error, Estimate, Shape, StopReason, Trajectory, Watch};
use rayon::prelude::*;

use crate::direct::{Sgd, Start};
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

/// Steps between two looks at the watch.
const STRIDE: u64 = 256;

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
    let runs: Vec<Run> = (0..options.replicas)
        .into_par_iter()
        .map(|index| run(sgd, start, options, index, watch))
        .collect::<Result<_, _>>()?;
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

fn run(sgd: &Sgd, start: &Start, options: &Options, index: u32, watch: &dyn Watch) -> Result<Run, Error> {
    let mut replica = sgd.replica(start, index)?;
    let shape = Shape { heads: start.heads(), features: sgd.task.features() };
    let mut trajectory = Trajectory::new(shape);
    let mut stop = StopReason::Completed;
    let mut last_finite = None;
    'times: for &time in &options.times {
        let target = sgd.step_at(time);
        while replica.steps() < target {
            if watch.interrupted() {
                stop = StopReason::Interrupted { time: replica.steps() as f64 * sgd.time_step() };
                break 'times;
            }
            let chunk = STRIDE.min(target - replica.steps());
            for done in 0..chunk {
                if let Err(diverged) = replica.advance() {
                    watch.advance(done);
                    let time = diverged.step as f64 * sgd.time_step();
                    let (m, r, b) = replica.overlaps();
                    last_finite = Some((time, shape.row(f64::NAN, &m, &r, &b)));
                    stop = StopReason::Diverged { step: diverged.step, time, replica: index };
                    break 'times;
                }
            }
            watch.advance(chunk);
        }
        let (m, r, b) = replica.overlaps();
        let (loss, _) = population_loss(
            &sgd.task,
            &sgd.attention,
            sgd.dimension,
            (&m, &r, &b),
            options.test_samples,
            sgd.seed,
            index,
        )?;
        trajectory.times.push(time);
        trajectory.rows.push(shape.row(loss, &m, &r, &b));
    }
    Ok(Run { trajectory, stop, steps: replica.steps(), last_finite })
}
