//! `headflow simulate`: online SGD at dimension `D`, by either engine, from the start or from a
//! checkpoint.

use std::path::Path;
use std::time::{Duration, Instant};

use headflow::folder::{CHECKPOINT, Replicas};
use headflow::model::series::Series;
use headflow::model::{Error, StopReason};
use headflow::sims::ensemble::{self, Checkpoint, Ensemble, Keep};
use headflow::sims::sgd::{Engine, Sgd, Start};
use headflow::spec::{FIELDS, Purpose, Spec};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{Clock, document, drawn, ensemble_route, exit_code, folder, last_state, prepared, print};
use crate::cli::Request;
use crate::progress::{Progress, writing, writing_result};

/// Time between two checkpoints.
const BETWEEN_CHECKPOINTS: Duration = Duration::from_secs(20);

/// An unfinished run: what it is, and how far it has come.
#[derive(Debug, Serialize, Deserialize)]
struct Saved {
    format: String,
    version: String,
    spec: Value,
    checkpoint: Checkpoint,
}

/// What [`Saved::format`] says.
const FORMAT: &str = "headflow-checkpoint";

/// Runs all replicas with a progress bar.
pub fn simulate(spec: &Spec, sgd: &Sgd, start: &Start, quiet: bool) -> Result<Ensemble, Error> {
    resume(spec, sgd, start, None, &mut |_| Ok(()), quiet)
}

fn resume(
    spec: &Spec,
    sgd: &Sgd,
    start: &Start,
    from: Option<&Checkpoint>,
    keep: &mut Keep<'_>,
    quiet: bool,
) -> Result<Ensemble, Error> {
    let options = spec.ensemble_options();
    let last = options.times.last().copied().unwrap_or(0.0);
    let steps = sgd.step_at(last).saturating_mul(u64::from(spec.replicas));
    let label = match sgd.engine {
        Engine::Direct => format!("SGD D={}", sgd.dimension),
        Engine::Overlap => format!("chain D={}", sgd.dimension),
    };
    let progress = Progress::new(&label, steps, true, quiet);
    ensemble::resume(sgd, start, &options, from, keep, &progress)
}

/// The name of a simulation's route.
pub fn route_name(sgd: &Sgd) -> String {
    format!("{} D={}", sgd.engine.name(), sgd.dimension)
}

/// The mean of a simulation and its first replica.
pub fn series(name: &str, ensemble: &Ensemble) -> Vec<Series> {
    let mut series = vec![Series::of_estimate(name, &ensemble.estimate, &ensemble.trace)];
    if let (Some(run), true) = (ensemble.runs.first(), ensemble.runs.len() > 1) {
        series.push(Series::of_trajectory(format!("{name} replica=0"), &run.trajectory));
    }
    series
}

/// The replicas for the arrays.
pub fn replicas<'a>(name: &str, ensemble: &'a Ensemble) -> Replicas<'a> {
    Replicas { route: name.into(), trajectories: ensemble.runs.iter().map(|run| &run.trajectory).collect() }
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

/// The spec of the unfinished run in `folder`.
pub fn saved_spec(folder: &Path, request: &Request) -> Result<Spec, Error> {
    read(folder, request).map(|(spec, _)| spec)
}

/// Reads the checkpoint of an unfinished run in `folder`; fields that were given must be its own.
fn read(folder: &Path, request: &Request) -> Result<(Spec, Checkpoint), Error> {
    let path = folder.join(CHECKPOINT);
    let place = path.display().to_string();
    let wrong = |problem: String| Error::unreadable(&place, problem);
    let text = std::fs::read_to_string(&path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => wrong(
            "does not exist: there is nothing to resume (only runs of --engine overlap that were interrupted have one)"
                .into(),
        ),
        _ => wrong(format!("cannot be read: {e}")),
    })?;
    let header: Value =
        serde_json::from_str(&text).map_err(|e| wrong(format!("is not a checkpoint, or truncated: {e}")))?;
    if header["format"] != FORMAT {
        return Err(wrong(format!("is not a headflow checkpoint (\"format\" is not \"{FORMAT}\")")));
    }
    if header["version"] != headflow::VERSION {
        return Err(wrong(format!(
            "was written by headflow {}, this is {}: another version may take other steps; finish it with that one, or \
             start anew",
            header["version"].as_str().unwrap_or("?"),
            headflow::VERSION
        )));
    }
    let saved: Saved =
        serde_json::from_value(header).map_err(|e| wrong(format!("is not a complete checkpoint: {e}")))?;
    let Value::Object(fields) = saved.spec else { return Err(wrong("holds no spec".into())) };
    let spec = Spec::recorded(&fields, Purpose::Simulate)?;
    if !request.fields.is_empty() {
        // Fields that are given again must mean what they meant.
        let given = Spec::over(fields, &request.fields, Purpose::Simulate)?.document()?;
        let own = spec.document()?;
        if let Some(field) = FIELDS.iter().find(|f| own.get(f.name) != given.get(f.name)) {
            return Err(Error::invalid(
                field.name,
                format!(
                    "is {} here but {} in the checkpoint {place}: leave the fields out to resume it, or start anew with \
                     another --out",
                    given.get(field.name).unwrap_or(&Value::Null),
                    own.get(field.name).unwrap_or(&Value::Null)
                ),
            ));
        }
    }
    Ok((spec, saved.checkpoint))
}

pub fn run(request: &Request, spec: &Spec) -> Result<u8, Error> {
    let clock = Clock::start();
    let (spec, from, resumed) = match &request.resume {
        Some(path) => {
            // Ours before it is read: another process may be going on with it.
            let folder = prepared(Some(path), "simulate", true)?;
            let (spec, checkpoint) = read(path, request)?;
            (spec, Some(checkpoint), Some(folder))
        }
        None => (spec.clone(), None, None),
    };
    let dimension = spec.dimension.ok_or_else(|| Error::invalid("dimension", "is missing"))?;
    let engine = spec.engines()[0];
    let (sgd, start) = (spec.sgd(dimension, engine)?, spec.simulation_start()?);
    sgd.validate(&start)?;
    let mut folder = match resumed {
        Some(folder) => folder,
        None => folder(request, "simulate")?,
    };
    let own = Value::Object(spec.document()?);
    let saved = |checkpoint: Checkpoint| {
        serde_json::to_string(&Saved {
            format: FORMAT.into(),
            version: headflow::VERSION.into(),
            spec: own.clone(),
            checkpoint,
        })
        .map_err(|e| Error::unreadable(CHECKPOINT, e))
    };
    let mut last = Instant::now();
    let ensemble = resume(
        &spec,
        &sgd,
        &start,
        from.as_ref(),
        &mut |make| {
            if last.elapsed() >= BETWEEN_CHECKPOINTS {
                let _writing = writing();
                folder.write_text(CHECKPOINT, &saved(make())?)?;
                last = Instant::now();
            }
            Ok(())
        },
        request.quiet,
    )?;
    let writing = writing_result();
    if let Some(checkpoint) = &ensemble.unfinished {
        folder.write_text(CHECKPOINT, &saved(checkpoint.clone())?)?;
    }
    let name = route_name(&sgd);
    let route = ensemble_route(&name, dimension, &ensemble);
    let result = document("simulate", &spec, &clock, json!({"stop": ensemble.stop, "routes": [route]}))?;
    folder.write_run(&series(&name, &ensemble), &[replicas(&name, &ensemble)], &result)?;
    let resumable = match &ensemble.unfinished {
        Some(_) => format!("to go on: headflow simulate --resume {}\n", folder.path().display()),
        None => {
            // Not before the result is on the disk.
            folder.remove(CHECKPOINT)?;
            String::new()
        }
    };
    drop(writing);
    let figure = drawn(folder.path(), &result);
    let text = format!(
        "{}{}\n{}{} steps in {:.2} s ({:.0} steps/s)\n{}: result.json, series.csv, series.npz{figure}\n{resumable}",
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
