//! `headflow compare`: theory against SGD, with a verdict.

use std::path::Path;

use headflow::agreement::{Agreement, Measured, Outcome, Row, judge};
use headflow::folder::RunFolder;
use headflow::model::series::Series;
use headflow::model::{Error, Estimate, OrderParameters, StopReason, Trajectory};
use headflow::sims::direct::{Sgd, Start};
use headflow::sims::ensemble::Ensemble;
use headflow::spec::{Initial, Spec};
use headflow::theory::flow::{Flow, Options};
use headflow::theory::quasi_monte_carlo::QuasiMonteCarlo;
use serde_json::json;

use super::simulate::{last_finite, replicas, route_name, series, sgd, simulate};
use super::{Clock, document, draw, ensemble_route, exit_code, flow, flow_route, print};
use crate::cli::Request;

/// Theory for one dimension: one flow for all replicas, or one for each.
struct Prediction {
    name: String,
    flows: Vec<Flow>,
}

impl Prediction {
    fn trajectories(&self) -> Vec<&Trajectory> {
        self.flows.iter().map(|f| &f.estimate.mean).collect()
    }

    fn error(&self) -> Option<&Trajectory> {
        self.flows[0].estimate.standard_error.as_ref()
    }

    /// The flow, or the mean over the replicas' flows.
    fn series(&self) -> Series {
        match &self.flows[..] {
            [flow] => Series::of_estimate(&self.name, &flow.estimate, &flow.trace),
            flows => {
                let paths: Vec<_> = flows.iter().map(|f| f.estimate.mean.clone()).collect();
                let trace = Estimate::trace_over(&paths);
                match Estimate::over(&paths) {
                    // The spread here is that of the starts, not an error of the theory.
                    Some(estimate) => Series { errors: None, ..Series::of_estimate(&self.name, &estimate, &trace) },
                    None => Series::of_estimate(&self.name, &flows[0].estimate, &flows[0].trace),
                }
            }
        }
    }
}

/// A comparison and all that it is made of.
pub struct Comparison {
    pub agreement: Agreement,
    pub stop: StopReason,
    text: String,
}

/// Runs both routes into `folder` and judges them.
pub fn compare(
    spec: &Spec,
    folder: &mut RunFolder,
    quiet: bool,
    label: &str,
) -> Result<(Comparison, serde_json::Value), Error> {
    let clock = Clock::start();
    let dimensions = spec.all_dimensions();
    let start = spec.simulation_start()?;
    let simulations: Vec<(usize, Sgd)> =
        dimensions.iter().map(|&d| sgd(spec, d).map(|s| (d, s))).collect::<Result<_, _>>()?;
    for (_, sgd) in &simulations {
        sgd.validate(&start)?;
    }
    let (points, options) = (flow::points(spec)?, flow::options(spec));
    let mut predictions = predict(spec, &points, &options, &start, &simulations, quiet, label)?;
    let mut stop = first_failure(predictions.iter().flat_map(|p| p.flows.iter().map(|f| &f.stop)));
    let mut ensembles: Vec<(usize, Ensemble)> = Vec::new();
    for (dimension, sgd) in &simulations {
        if stop.as_requested() {
            let ensemble = simulate(spec, sgd, &start, quiet)?;
            stop = first_failure(std::iter::once(&ensemble.stop));
            ensembles.push((*dimension, ensemble));
        }
    }
    predictions.truncate(ensembles.len().max(1));
    let shared = predictions.len() == 1;
    let measured: Vec<Measured<'_>> = ensembles
        .iter()
        .enumerate()
        .map(|(k, (dimension, ensemble))| {
            let prediction = &predictions[if shared { 0 } else { k }];
            Measured {
                dimension: *dimension,
                simulated: ensemble.runs.iter().map(|run| &run.trajectory).collect(),
                predicted: prediction.trajectories(),
                predicted_error: prediction.error(),
                scrambles: points.len(),
            }
        })
        .collect();
    let agreement = judge(&measured, stop.as_requested());

    let mut all: Vec<Series> = predictions.iter().map(Prediction::series).collect();
    all.extend(ensembles.iter().flat_map(|(d, e)| series(*d, e)));
    let arrays: Vec<_> = ensembles.iter().map(|(d, e)| replicas(*d, e)).collect();
    folder.write_series(&all, &arrays)?;
    let routes: Vec<_> = predictions
        .iter()
        .flat_map(|p| p.flows.iter().take(1).map(|f| flow_route(&p.name, f)))
        .chain(ensembles.iter().map(|(d, e)| ensemble_route(&route_name(*d), *d, e)))
        .collect();
    let result = document("compare", spec, &clock, json!({"stop": stop, "routes": routes, "verdict": agreement}))?;
    folder.write_document(&result)?;
    let lost: String = ensembles.iter().map(|(_, e)| last_finite(e)).collect();
    let text = format!("{}{lost}{}", table(&agreement), verdict(&agreement, clock.seconds()));
    Ok((Comparison { agreement, stop, text }, result))
}

/// The theory's trajectories.
fn predict(
    spec: &Spec,
    points: &[QuasiMonteCarlo],
    options: &Options,
    start: &Start,
    simulations: &[(usize, Sgd)],
    quiet: bool,
    label: &str,
) -> Result<Vec<Prediction>, Error> {
    let solve = |from: &OrderParameters, label: &str| flow::integrate(points, from, options, label, quiet);
    if let Start::Given(point) = start {
        return Ok(vec![Prediction { name: "theory".into(), flows: vec![solve(point, label)?] }]);
    }
    simulations
        .iter()
        .map(|(dimension, sgd)| {
            let flows = (0..spec.replicas)
                .map(|index| {
                    let (m, r, b) = sgd.replica(start, index)?.overlaps();
                    let realised = OrderParameters::new(m, r, b)?;
                    solve(&realised, &format!("{label} {}/{}", index + 1, spec.replicas))
                })
                .collect::<Result<_, Error>>()?;
            Ok(Prediction { name: format!("theory D={dimension}"), flows })
        })
        .collect()
}

fn first_failure<'a>(mut reasons: impl Iterator<Item = &'a StopReason>) -> StopReason {
    reasons.find(|r| !r.as_requested()).cloned().unwrap_or(StopReason::Completed)
}

/// The largest deviation of each quantity over time; the overlaps share a line.
fn table(agreement: &Agreement) -> String {
    let mut text =
        String::from("largest deviation from theory over time, in standard errors (value +- standard error)\n");
    text += &format!("{:<10}", "");
    for d in &agreement.dimensions {
        text += &format!("{:>12}", format!("D={d}"));
    }
    text += &format!("{:>14}{:>26}{:>12}\n", "D -> inf", "value", "at tau");
    let mut rows: Vec<(String, &Row)> = Vec::new();
    for row in &agreement.rows {
        let size = |r: &Row| r.extrapolated.as_ref().map_or(0.0, |d| d.standard_errors.abs());
        if row.quantity == "r" {
            match rows.iter_mut().find(|(name, _)| name == "r") {
                Some((_, kept)) if size(row) > size(kept) => *kept = row,
                Some(_) => {}
                None => rows.push(("r".into(), row)),
            }
        } else if row.quantity != "b" || row.at_dimensions.iter().any(|d| d.standard_error > 1e-6) {
            rows.push((row.name(), row));
        }
    }
    for (name, row) in rows {
        let label = if name == "r" {
            format!("r, worst of {}", agreement.rows.iter().filter(|r| r.quantity == "r").count())
        } else {
            name
        };
        text += &format!("{label:<10}");
        for d in &row.at_dimensions {
            text += &format!("{:>12.1}", d.standard_errors);
        }
        if let Some(d) = &row.extrapolated {
            let value = format!("{:+.2e} +- {:.1e}", d.value, d.standard_error);
            text += &format!("{:>14.1}{value:>26}{:>12.1}", d.standard_errors, d.time);
        }
        text.push('\n');
    }
    text
}

fn verdict(agreement: &Agreement, seconds: f64) -> String {
    let word = match agreement.outcome {
        Outcome::Agree => "AGREE",
        Outcome::Disagree => "DISAGREE",
        Outcome::Undetermined => "UNDETERMINED",
    };
    format!("verdict: {word}: {}\nin {seconds:.1} s\n", agreement.summary)
}

/// The exit code that a comparison deserves.
pub fn code(comparison: &Comparison) -> u8 {
    match exit_code(&comparison.stop) {
        0 => u8::from(comparison.agreement.outcome == Outcome::Disagree),
        failed => failed,
    }
}

pub fn run(request: &Request, spec: &Spec) -> Result<u8, Error> {
    let mut folder = RunFolder::prepare(request.out.as_deref(), "compare", request.force)?;
    let (comparison, result) = compare(spec, &mut folder, request.quiet, "theory")?;
    let figure = draw_if_any(folder.path(), &result)?;
    let text =
        format!("{}{}: result.json, series.csv, series.npz, {figure}\n", comparison.text, folder.path().display());
    print(request, &result, &text);
    debug_assert!(spec.initial == Initial::Random || !result["routes"].is_null());
    Ok(code(&comparison))
}

/// Draws unless the run was stopped before anything was recorded.
fn draw_if_any(path: &Path, result: &serde_json::Value) -> Result<String, Error> {
    let recorded = |route: &serde_json::Value| route["times"].as_array().is_some_and(|t| !t.is_empty());
    if result["routes"].as_array().is_some_and(|routes| routes.iter().any(recorded)) {
        draw(path)
    } else {
        Ok(String::new())
    }
}
