//! `headflow flow`: the theory's trajectory.

use headflow::model::series::Series;
use headflow::model::{Error, OrderParameters};
use headflow::spec::Spec;
use headflow::theory::flow::{self, Flow, Options};
use headflow::theory::moments::Evaluator;
use serde_json::json;

use super::{Clock, document, drawn, exit_code, folder, last_state, missed, print, theory_route};
use crate::cli::Request;
use crate::progress::{Progress, writing_result};

/// Integrates with a progress bar.
pub fn integrate<E: Evaluator>(
    points: &[E],
    start: &OrderParameters,
    options: &Options,
    label: &str,
    quiet: bool,
) -> Result<Flow, Error> {
    let progress = Progress::new(label, points.len() as u64 * flow::PROGRESS, false, quiet);
    flow::average(points, start, options, &progress)
}

pub fn run(request: &Request, spec: &Spec) -> Result<u8, Error> {
    let clock = Clock::start();
    let mut folder = folder(request, "flow")?;
    let evaluators = spec.evaluators()?;
    let flow = integrate(&evaluators, &spec.start()?, &spec.flow_options(), "flow", request.quiet)?;
    let missed = missed(spec, &evaluators);
    let writing = writing_result();
    let series = [Series::of_estimate("theory", &flow.estimate, &flow.trace)];
    folder.write_series(&series, &[])?;
    let route = theory_route("theory", &flow.estimate, &flow.stop, flow.solutions.len(), flow.statistics);
    let result =
        document("flow", spec, &clock, json!({"stop": flow.stop, "routes": [route], "note": missed.trim_end()}))?;
    folder.write_document(&result)?;
    drop(writing);
    let figure = drawn(folder.path(), &result);
    let text = format!(
        "{}{}\n{missed}{} steps ({} rejected), {} evaluations in {:.2} s\n{}: result.json, series.csv, series.npz{figure}\n",
        last_state(&flow.estimate.mean, flow.estimate.standard_error.as_ref()),
        flow.stop.describe(),
        flow.statistics.steps,
        flow.statistics.rejected,
        flow.statistics.evaluations,
        clock.seconds(),
        folder.path().display(),
    );
    print(request, &result, &text);
    Ok(exit_code(&flow.stop))
}
