//! `headflow simulate`: online SGD in `D` dimensions.

use headflow::folder::{Replicas, RunFolder};
use headflow::model::series::Series;
use headflow::model::{Error, StopReason};
use headflow::sims::direct::{Sgd, Start};
use headflow::sims::ensemble::{self, Ensemble};
use headflow::spec::Spec;
use serde_json::json;

use super::{Clock, document, drawn, ensemble_route, exit_code, last_state, print};
use crate::cli::Request;
use crate::progress::Progress;

/// Runs all replicas with a progress bar.
pub fn simulate(spec: &Spec, sgd: &Sgd, start: &Start, quiet: bool) -> Result<Ensemble, Error> {
    let options = spec.ensemble_options();
    let last = options.times.last().copied().unwrap_or(0.0);
    let steps = sgd.step_at(last) * u64::from(spec.replicas);
    let progress = Progress::new(&format!("SGD D={}", sgd.dimension), steps, true, quiet);
    ensemble::simulate(sgd, start, &options, &progress)
}

/// The name of a simulation's route.
pub fn route_name(dimension: usize) -> String {
    format!("direct D={dimension}")
}

/// The mean of a simulation and its first replica.
pub fn series(dimension: usize, ensemble: &Ensemble) -> Vec<Series> {
    let name = route_name(dimension);
    let mut series = vec![Series::of_estimate(&name, &ensemble.estimate, &ensemble.trace)];
    if let (Some(run), true) = (ensemble.runs.first(), ensemble.runs.len() > 1) {
        series.push(Series::of_trajectory(format!("{name} replica=0"), &run.trajectory));
    }
    series
}

/// The replicas for the arrays.
pub fn replicas(dimension: usize, ensemble: &Ensemble) -> Replicas<'_> {
    Replicas { route: route_name(dimension), trajectories: ensemble.runs.iter().map(|run| &run.trajectory).collect() }
}

/// Says where a diverged replica was last finite.
pub fn last_finite(ensemble: &Ensemble) -> String {
    let StopReason::Diverged { replica, .. } = ensemble.stop else { return String::new() };
    let Some((time, row)) = ensemble.runs.get(replica as usize).and_then(|run| run.last_finite.as_ref()) else {
        return String::new();
    };
    let heads = ensemble.estimate.mean.shape.heads;
    let shape = ensemble.estimate.mean.shape;
    let norms: Vec<String> = (0..heads)
        .map(|h| format!("{:.3e}", row[shape.index(headflow::model::Quantity::Overlap { head: h, other: h })]))
        .collect();
    format!("last finite state at tau = {time:e}: |k_h|^2 = [{}]; what was recorded is kept\n", norms.join(", "))
}

pub fn run(request: &Request, spec: &Spec) -> Result<u8, Error> {
    let clock = Clock::start();
    let dimension = spec.dimension.ok_or_else(|| Error::invalid("dimension", "is missing"))?;
    let (sgd, start) = (spec.sgd(dimension)?, spec.simulation_start()?);
    sgd.validate(&start)?;
    let mut folder = RunFolder::prepare(request.out.as_deref(), "simulate", request.force)?;
    let ensemble = simulate(spec, &sgd, &start, request.quiet)?;
    folder.write_series(&series(dimension, &ensemble), &[replicas(dimension, &ensemble)])?;
    let route = ensemble_route(&route_name(dimension), dimension, &ensemble);
    let result = document("simulate", spec, &clock, json!({"stop": ensemble.stop, "routes": [route]}))?;
    folder.write_document(&result)?;
    let figure = drawn(folder.path(), &result);
    let text = format!(
        "{}{}\n{}{} steps in {:.2} s ({:.0} steps/s)\n{}: result.json, series.csv, series.npz{figure}\n",
        last_state(&ensemble.estimate.mean, ensemble.estimate.standard_error.as_ref()),
        ensemble.stop.describe(),
        last_finite(&ensemble),
        ensemble.steps,
        clock.seconds(),
        ensemble.steps as f64 / clock.seconds(),
        folder.path().display(),
    );
    print(request, &result, &text);
    Ok(exit_code(&ensemble.stop))
}
