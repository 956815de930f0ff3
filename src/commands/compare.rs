//! `headflow compare`: theory against SGD, with a verdict.

use headflow::agreement::{Agreement, Measured, Outcome, Row, judge};
use headflow::folder::RunFolder;
use headflow::model::series::Series;
use headflow::model::{Error, Estimate, OrderParameters, StopReason, Trajectory};
use headflow::sims::direct::{Sgd, Start};
use headflow::sims::ensemble::Ensemble;
use headflow::spec::Spec;
use headflow::theory::flow::{Flow, Options, Statistics};
use headflow::theory::quasi_monte_carlo::QuasiMonteCarlo;
use serde_json::json;

use super::simulate::{last_finite, replicas, route_name, series, simulate};
use super::{Clock, document, drawn, ensemble_route, exit_code, flow, print, theory_route};
use crate::cli::Request;

/// Theory for one dimension: one flow for all replicas, or one for each, with their mean.
struct Prediction {
    name: String,
    flows: Vec<Flow>,
    estimate: Estimate,
    trace: Vec<(f64, f64)>,
    trace_error: Vec<f64>,
}

impl Prediction {
    /// The mean over the flows, scramble by scramble: its error is that of the theory, not the spread
    /// of the starts.
    fn new(name: String, flows: Vec<Flow>) -> Result<Self, Error> {
        let scrambles = flows.iter().map(|f| f.solutions.len()).min().unwrap_or(0);
        let means: Vec<Trajectory> = (0..scrambles)
            .filter_map(|s| {
                let paths: Vec<_> = flows.iter().map(|f| f.solutions[s].trajectory.clone()).collect();
                Estimate::over(&paths).map(|estimate| estimate.mean)
            })
            .collect();
        let shared = if flows.len() == 1 { Some((flows[0].estimate.clone(), flows[0].trace.clone())) } else { None };
        let (estimate, trace) = match shared.or_else(|| Some((Estimate::over(&means)?, Estimate::trace_over(&means)))) {
            Some(both) => both,
            None => return Err(Error::invalid("scrambles", "there must be at least one")),
        };
        let trace_error = trace.iter().map(|(_, error)| *error).collect();
        Ok(Self { name, flows, estimate, trace, trace_error })
    }

    fn trajectories(&self) -> Vec<&Trajectory> {
        self.flows.iter().map(|f| &f.estimate.mean).collect()
    }

    fn series(&self) -> Series {
        Series::of_estimate(&self.name, &self.estimate, &self.trace)
    }

    fn stop(&self) -> StopReason {
        first_failure(self.flows.iter().map(|f| &f.stop))
    }

    /// The document's entry: the average, and what all flows cost.
    fn route(&self) -> serde_json::Value {
        let mut statistics = Statistics::default();
        self.flows.iter().for_each(|f| statistics += f.statistics);
        theory_route(
            &self.name,
            &self.estimate,
            &self.stop(),
            self.flows.first().map_or(0, |f| f.solutions.len()),
            statistics,
        )
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
        dimensions.iter().map(|&d| spec.sgd(d).map(|s| (d, s))).collect::<Result<_, _>>()?;
    for (_, sgd) in &simulations {
        sgd.validate(&start)?;
    }
    let (points, options) = (spec.evaluators()?, spec.flow_options());
    let predictions = predict(spec, &points, &options, &start, &simulations, quiet, label)?;
    let mut stop = first_failure(predictions.iter().flat_map(|p| p.flows.iter().map(|f| &f.stop)));
    let mut ensembles: Vec<(usize, Ensemble)> = Vec::new();
    for (dimension, sgd) in &simulations {
        if stop.as_requested() {
            let ensemble = simulate(spec, sgd, &start, quiet)?;
            stop = first_failure(std::iter::once(&ensemble.stop));
            ensembles.push((*dimension, ensemble));
        }
    }
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
                predicted_error: prediction.estimate.standard_error.as_ref(),
                predicted_trace_error: Some(&prediction.trace_error),
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
        .map(Prediction::route)
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
        return Ok(vec![Prediction::new("theory".into(), vec![solve(point, label)?])?]);
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
            Prediction::new(format!("theory D={dimension}"), flows)
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
    let figure = drawn(folder.path(), &result);
    let text = format!("{}{}: result.json, series.csv, series.npz{figure}\n", comparison.text, folder.path().display());
    print(request, &result, &text);
    Ok(code(&comparison))
}
