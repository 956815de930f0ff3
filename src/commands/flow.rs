//! `headflow flow`: the theory's trajectory.

use headflow::model::series::Series;
use headflow::model::{Error, OrderParameters, StopReason};
use headflow::spec::Spec;
use headflow::theory::evaluators::Averages;
use headflow::theory::flow::{self, Flow, Options};
use headflow::theory::moments::Evaluator;
use headflow::theory::settled::Settled;
use serde_json::json;

use super::{Clock, document, drawn, exit_code, folder, last_state, missed, print, theory_route};
use crate::cli::Request;
use crate::progress::{Interruptible, Progress, writing_result};

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

/// Whether a flow had settled where it ended; nothing is said of one that broke off.
pub fn ended(spec: &Spec, evaluators: &[Averages], flow: &Flow) -> Option<Settled> {
    if !flow.stop.is_whole() {
        return None;
    }
    spec.settled(evaluators, &flow.solutions, &Interruptible)
}

/// A line on whether a flow had settled, with what to do where it ended with the time alone.
pub fn advised(settled: Option<&Settled>, stop: &StopReason) -> String {
    // An event was the end that was asked for.
    let Some(settled) = settled.filter(|_| stop.event_time().is_none()) else { return String::new() };
    let ends = !settled.settled && *stop == StopReason::Completed;
    format!("{}{}\n", settled.describe(), if ends { "; use --until settled, or a larger --tau" } else { "" })
}

pub fn run(request: &Request, spec: &Spec) -> Result<u8, Error> {
    let clock = Clock::start();
    let mut folder = folder(request, "flow")?;
    let evaluators = spec.evaluators()?;
    let flow = integrate(&evaluators, &spec.start()?, &spec.flow_options(), "flow", request.quiet)?;
    let missed = missed(spec, &evaluators);
    let settled = ended(spec, &evaluators, &flow);
    let writing = writing_result();
    let series = [Series::of_estimate("theory", &flow.estimate, &flow.trace)];
    let route = theory_route("theory", &flow.estimate, &flow.stop, flow.solutions.len(), flow.statistics);
    let result = document(
        "flow",
        spec,
        &clock,
        json!({"stop": flow.stop, "settled": settled, "routes": [route], "note": missed.trim_end()}),
    )?;
    folder.write_run(&series, &[], &result)?;
    drop(writing);
    let figure = drawn(folder.path(), &result);
    let text = format!(
        "{}{}\n{}{missed}{} steps ({} rejected), {} evaluations in {:.2} s\n{}: result.json, series.csv, series.npz{figure}\n",
        last_state(&flow.estimate.mean, flow.estimate.standard_error.as_ref()),
        flow.stop.describe(),
        advised(settled.as_ref(), &flow.stop),
        flow.statistics.steps,
        flow.statistics.rejected,
        flow.statistics.evaluations,
        clock.seconds(),
        folder.path().display(),
    );
    print(request, &result, &text);
    Ok(exit_code(&flow.stop))
}
