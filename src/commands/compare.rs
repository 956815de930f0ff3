//! `headflow compare`: theory against SGD by both engines, with a verdict.

use headflow::agreement::{Agreement, Measured, Outcome, Row, judge, judge_engines};
use headflow::folder::RunFolder;
use headflow::model::series::Series;
use headflow::model::{Error, Estimate, OrderParameters, StopReason, Trajectory};
use headflow::sims::ensemble::{Ensemble, Replica};
use headflow::sims::sgd::{Engine, Sgd, Start};
use headflow::spec::Spec;
use headflow::theory::evaluators::Averages;
use headflow::theory::flow::{Flow, Options, Statistics};
use serde_json::json;

use super::simulate::{last_finite, replicas, route_name, series, simulate};
use super::{Clock, document, drawn, ensemble_route, exit_code, flow, folder, print, theory_route};
use crate::cli::Request;
use crate::progress::{interrupted, writing, writing_result};

/// Theory for one dimension: one flow for all replicas, or one for each, with their mean.
struct Prediction {
    name: String,
    flows: Vec<Flow>,
    estimate: Estimate,
    trace: Vec<(f64, f64)>,
    trace_error: Vec<f64>,
    /// Whether flows are missing.
    interrupted: bool,
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
        Ok(Self { name, flows, estimate, trace, trace_error, interrupted: false })
    }

    fn trajectories(&self) -> Vec<&Trajectory> {
        self.flows.iter().map(|f| &f.estimate.mean).collect()
    }

    fn series(&self) -> Series {
        Series::of_estimate(&self.name, &self.estimate, &self.trace)
    }

    fn stop(&self) -> StopReason {
        let missing = self.interrupted.then_some(StopReason::Interrupted { time: 0.0 });
        first_failure(self.flows.iter().map(|f| &f.stop).chain(&missing))
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
    pub outcome: Outcome,
    pub summary: String,
    pub stop: StopReason,
    text: String,
}

/// One engine's simulations and theory's verdict on them.
struct Party {
    engine: Engine,
    ensembles: Vec<(Sgd, Ensemble)>,
}

impl Party {
    fn measured<'a>(&'a self, predictions: &'a [Prediction], scrambles: usize) -> Vec<Measured<'a>> {
        let shared = predictions.len() == 1;
        let ensembles = self.ensembles.iter().enumerate();
        ensembles
            .map(|(k, (sgd, ensemble))| {
                let prediction = &predictions[if shared { 0 } else { k }];
                Measured {
                    dimension: sgd.dimension,
                    simulated: ensemble.runs.iter().map(|run| &run.trajectory).collect(),
                    predicted: prediction.trajectories(),
                    predicted_error: prediction.estimate.standard_error.as_ref(),
                    predicted_trace_error: Some(&prediction.trace_error),
                    scrambles,
                }
            })
            .collect()
    }
}

/// Runs all routes into `folder` and judges them.
pub fn compare(
    spec: &Spec,
    folder: &mut RunFolder,
    quiet: bool,
    label: &str,
) -> Result<(Comparison, serde_json::Value), Error> {
    let clock = Clock::start();
    let dimensions = spec.all_dimensions();
    let start = spec.simulation_start()?;
    let engines = spec.engines();
    for &dimension in &dimensions {
        for &engine in engines {
            spec.sgd(dimension, engine)?.validate(&start)?;
        }
    }
    // Each replica's own start, where starts are random: the first engine draws it for all.
    let starts: Vec<Start> = dimensions
        .iter()
        .map(|&dimension| match &start {
            Start::Random { .. } => {
                let sgd = spec.sgd(dimension, engines[0])?;
                let points = (0..spec.replicas).map(|index| {
                    if interrupted() {
                        return Err(Error::interrupted("compare"));
                    }
                    let (m, r, b) = Replica::new(&sgd, &start, index)?.overlaps();
                    OrderParameters::new(m, r, b)
                });
                Ok(Start::Each(points.collect::<Result<_, Error>>()?))
            }
            given => Ok(given.clone()),
        })
        .collect::<Result<_, Error>>()?;
    let (points, options) = (spec.evaluators()?, spec.flow_options());
    let predictions = predict(spec, &points, &options, &starts, &dimensions, quiet, label)?;
    let mut stop = first_failure(predictions.iter().map(Prediction::stop).collect::<Vec<_>>().iter());
    let mut parties: Vec<Party> = Vec::new();
    for &engine in engines {
        let mut party = Party { engine, ensembles: Vec::new() };
        for (&dimension, own) in dimensions.iter().zip(&starts) {
            if stop.as_requested() {
                let sgd = spec.sgd(dimension, engine)?;
                // Direct SGD draws its random keys itself: overlaps alone would lose their digits.
                let start = if engine == Engine::Direct { &start } else { own };
                match simulate(spec, &sgd, start, quiet) {
                    Ok(ensemble) => {
                        stop = first_failure(std::iter::once(&ensemble.stop));
                        party.ensembles.push((sgd, ensemble));
                    }
                    // Before it had recorded anything: what others have is kept.
                    Err(Error::Interrupted { .. }) => stop = StopReason::Interrupted { time: 0.0 },
                    Err(error) => return Err(error),
                }
            }
        }
        parties.push(party);
    }
    let verdicts: Vec<(String, Agreement)> = verdicts(&parties, &predictions, points.len(), stop.as_requested());

    let mut all: Vec<Series> = predictions.iter().map(Prediction::series).collect();
    let simulated = || parties.iter().flat_map(|party| &party.ensembles);
    all.extend(simulated().flat_map(|(sgd, e)| series(&route_name(sgd), e)));
    let arrays: Vec<_> = simulated().map(|(sgd, e)| replicas(&route_name(sgd), e)).collect();
    let _writing = writing();
    let routes: Vec<_> = predictions
        .iter()
        .map(Prediction::route)
        .chain(simulated().map(|(sgd, e)| ensemble_route(&route_name(sgd), sgd.dimension, e)))
        .collect();
    let (name, deciding) = overall(&verdicts);
    let outcome = deciding.outcome;
    let summary = if verdicts.len() == 1 { deciding.summary.clone() } else { format!("{name}: {}", deciding.summary) };
    let mut verdict = serde_json::to_value(deciding).map_err(|e| Error::unreadable("verdict", e))?;
    verdict["summary"] = json!(summary);
    let by_name: serde_json::Map<_, _> = verdicts.iter().map(|(name, a)| (name.clone(), json!(a))).collect();
    let rest = json!({"stop": stop, "routes": routes, "verdict": verdict, "verdicts": by_name});
    let result = document("compare", spec, &clock, rest)?;
    folder.write_run(&all, &arrays, &result)?;
    let lost: String = simulated().map(|(_, e)| last_finite(e)).collect();
    let tables: String = verdicts
        .iter()
        .filter(|(_, a)| a.rows.iter().any(|r| r.extrapolated.is_some()) || verdicts.len() == 1)
        .map(|(name, a)| table(name, a))
        .collect();
    let mut text = format!("{tables}{lost}verdict: {}", word(outcome));
    if let [(_, only)] = &verdicts[..] {
        text += &format!(": {}\n", only.summary);
    } else {
        text.push('\n');
        for (name, agreement) in &verdicts {
            text += &format!("  {name}: {}: {}\n", word(agreement.outcome), agreement.summary);
        }
    }
    text += &format!("in {:.1} s\n", clock.seconds());
    Ok((Comparison { outcome, summary, stop, text }, result))
}

/// Theory against each engine, then the engines against each other.
fn verdicts(
    parties: &[Party],
    predictions: &[Prediction],
    scrambles: usize,
    complete: bool,
) -> Vec<(String, Agreement)> {
    let measured: Vec<_> = parties.iter().map(|party| party.measured(predictions, scrambles)).collect();
    let name = |engine: Engine| match engine {
        Engine::Direct => "direct SGD",
        Engine::Overlap => "overlap chain",
    };
    let mut verdicts: Vec<(String, Agreement)> = parties
        .iter()
        .zip(&measured)
        .map(|(party, measured)| (format!("{} against theory", name(party.engine)), judge(measured, complete)))
        .collect();
    if let [one, other] = &measured[..] {
        let title = format!("{} against {}", name(parties[0].engine), name(parties[1].engine));
        verdicts.push((title, judge_engines(one, other, complete)));
    }
    verdicts
}

/// One verdict of several: the first that disagrees, else the first that cannot tell, else the first.
fn overall(verdicts: &[(String, Agreement)]) -> &(String, Agreement) {
    let find = |outcome: Outcome| verdicts.iter().find(|(_, a)| a.outcome == outcome);
    find(Outcome::Disagree).or_else(|| find(Outcome::Undetermined)).unwrap_or(&verdicts[0])
}

/// The theory's trajectories.
fn predict(
    spec: &Spec,
    points: &[Averages],
    options: &Options,
    starts: &[Start],
    dimensions: &[usize],
    quiet: bool,
    label: &str,
) -> Result<Vec<Prediction>, Error> {
    let solve = |from: &OrderParameters, label: &str| flow::integrate(points, from, options, label, quiet);
    if let Some(Start::Given(point)) = starts.first() {
        return Ok(vec![Prediction::new("theory".into(), vec![solve(point, label)?])?]);
    }
    let mut predictions: Vec<Prediction> = Vec::new();
    for (dimension, start) in dimensions.iter().zip(starts) {
        let own: &[OrderParameters] = if let Start::Each(own) = start { own } else { &[] };
        let (mut flows, mut interrupted) = (Vec::new(), false);
        for (index, point) in own.iter().enumerate() {
            match solve(point, &format!("{label} {}/{}", index + 1, spec.replicas)) {
                Ok(flow) => {
                    interrupted = matches!(flow.stop, StopReason::Interrupted { .. });
                    // One that was broken off would cut the mean short.
                    if !interrupted || flows.is_empty() {
                        flows.push(flow);
                    }
                }
                // Before it had recorded anything: what others have is kept.
                Err(Error::Interrupted { .. }) if !(flows.is_empty() && predictions.is_empty()) => interrupted = true,
                Err(error) => return Err(error),
            }
            if interrupted {
                break;
            }
        }
        if !flows.is_empty() {
            predictions.push(Prediction { interrupted, ..Prediction::new(format!("theory D={dimension}"), flows)? });
        } else if let Some(last) = predictions.last_mut() {
            last.interrupted = true;
        }
        if predictions.last().is_some_and(|last| last.interrupted) {
            break;
        }
    }
    Ok(predictions)
}

fn first_failure<'a>(mut reasons: impl Iterator<Item = &'a StopReason>) -> StopReason {
    reasons.find(|r| !r.as_requested()).cloned().unwrap_or(StopReason::Completed)
}

/// The largest deviation of each quantity over time; the overlaps share a line.
fn table(name: &str, agreement: &Agreement) -> String {
    let mut text = format!("{name}: largest deviation over time, in standard errors (value +- standard error)\n");
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

fn word(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Agree => "AGREE",
        Outcome::Disagree => "DISAGREE",
        Outcome::Undetermined => "UNDETERMINED",
    }
}

/// The exit code that a comparison deserves.
pub fn code(comparison: &Comparison) -> u8 {
    match exit_code(&comparison.stop) {
        0 => u8::from(comparison.outcome == Outcome::Disagree),
        failed => failed,
    }
}

pub fn run(request: &Request, spec: &Spec) -> Result<u8, Error> {
    let mut folder = folder(request, "compare")?;
    let (comparison, result) = compare(spec, &mut folder, request.quiet, "theory")?;
    // All is written: a signal need not wait for the figure.
    drop(writing_result());
    let figure = drawn(folder.path(), &result);
    let text = format!("{}{}: result.json, series.csv, series.npz{figure}\n", comparison.text, folder.path().display());
    print(request, &result, &text);
    Ok(code(&comparison))
}
