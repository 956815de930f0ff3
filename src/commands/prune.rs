//! `headflow prune`: heads removed after training, and the figure `pruning`.
//!
//! ```text
//! E_S = E(m, r, b restricted to the heads outside S),   |S| = 0, 1, ..., most_removed
//! ```
//!
//! of one or more trained systems: flows, replicas of a simulation, or a given point. Losses are population
//! losses of the limit at the trained overlaps, for simulations as well: those at finite `D` are higher by order
//! `1 / D` (`theory/README.md` section 18).

use headflow::figures;
use headflow::model::series::Series;
use headflow::model::{
    Activation, Attention, Error, Estimate, OrderParameters, StopReason, Trajectory, larger, largest, mean_and_error,
};
use headflow::sims::ensemble::Replica;
use headflow::sims::sgd::{Engine, Sgd};
use headflow::spec::{EvaluatorKind, Initial, PRUNE_TOLERANCE, Purpose, Reader, Spec, overlay, rows};
use headflow::theory::evaluators::Averages;
use headflow::theory::flow::{self, Solution, Statistics};
use headflow::theory::moments::Coordinates;
use headflow::theory::pruning::{self, Pruning};
use headflow::theory::quadrature::{HeadMoments, Quadrature};
use headflow::theory::quasi_monte_carlo::QuasiMonteCarlo;
use headflow::theory::settled::Settled;
use rayon::prelude::*;
use serde_json::{Value, json};

use super::dynamics::{Place, draw, place};
use super::simulate::{route_name, series, simulate};
use super::{Clock, document, drawn, ensemble_route, exit_code, folder, missed_by, print, say, theory_route};
use crate::cli::Request;
use crate::progress::{Interruptible, Progress, writing_result};

/// The losses of one trained system with any set of its heads.
enum Losses {
    /// Moments of heads and pairs: a set is a sum.
    Pairs(HeadMoments),
    /// For each number of heads, from one on.
    Sets(Vec<Quadrature>, OrderParameters, Attention),
}

impl Losses {
    fn of(spec: &Spec, point: &OrderParameters) -> Result<Self, Error> {
        let (attention, task, heads) = (spec.attention(), spec.task()?, point.heads());
        let tolerance = spec.tolerance.unwrap_or(PRUNE_TOLERANCE);
        let quadrature = |heads| Quadrature::new(&task, heads, attention, tolerance);
        Ok(match quadrature(heads)?.head_moments(&Coordinates::of(point, &attention)) {
            Some(moments) => Self::Pairs(moments),
            None => Self::Sets((1..=heads).map(quadrature).collect::<Result<_, _>>()?, point.clone(), attention),
        })
    }

    /// The largest error estimate of the losses so far, where it is above the tolerance.
    fn missed(&self, tolerance: f64) -> Option<f64> {
        let worst = match self {
            // Sums of moments, divided by as many or not: of the moments themselves.
            Self::Pairs(moments) => moments.error_estimate,
            Self::Sets(quadratures, ..) => largest(quadratures.iter().map(Quadrature::worst_error)),
        };
        (!(worst <= tolerance)).then_some(worst)
    }

    fn loss(&self, kept: &[usize]) -> Result<f64, Error> {
        match self {
            Self::Pairs(moments) => Ok(moments.loss(kept).value()),
            Self::Sets(quadratures, point, attention) => {
                let at = Coordinates::of(&point.kept(kept)?, attention);
                Ok(quadratures[kept.len() - 1].evaluate_watched(&at, false, &Interruptible).loss.value())
            }
        }
    }
}

fn points(spec: &Spec) -> Result<usize, Error> {
    spec.points.ok_or_else(|| Error::invalid("points", "is missing"))
}

/// Systems after training, and what is kept of the training.
struct Trained {
    route: String,
    systems: Vec<OrderParameters>,
    /// Each system's path; none for a given point.
    paths: Vec<Trajectory>,
    series: Vec<Series>,
    routes: Vec<Value>,
    /// Whether each system's flow had settled; none without flows.
    settled: Vec<Option<Settled>>,
    /// Why the training ended.
    stop: StopReason,
}

fn train(spec: &Spec, quiet: bool) -> Result<Trained, Error> {
    if spec.m.is_some() {
        let systems = vec![spec.point()?];
        return Ok(Trained {
            route: "point".into(),
            systems,
            paths: vec![],
            series: vec![],
            routes: vec![],
            settled: vec![],
            stop: StopReason::Completed,
        });
    }
    if spec.engine.is_some() { simulated(spec, quiet) } else { flows(spec, quiet) }
}

/// The last state of a path.
fn last(path: &Trajectory) -> Result<OrderParameters, Error> {
    let t = path.times.len().checked_sub(1).ok_or_else(|| Error::invalid("times", "nothing was recorded"))?;
    OrderParameters::new(path.m(t), path.r(t), path.b(t))
}

fn simulated(spec: &Spec, quiet: bool) -> Result<Trained, Error> {
    let dimension = spec.dimension.ok_or_else(|| Error::invalid("dimension", "is missing"))?;
    let sgd = spec.sgd(dimension, spec.engines()[0])?;
    let ensemble = simulate(spec, &sgd, &spec.simulation_start()?, quiet)?;
    if !ensemble.stop.as_requested() {
        return Err(ensemble.stop.error("simulation"));
    }
    let route = route_name(&sgd);
    let paths: Vec<Trajectory> = ensemble.runs.iter().map(|run| run.trajectory.clone()).collect();
    Ok(Trained {
        systems: paths.iter().map(last).collect::<Result<_, _>>()?,
        paths,
        series: series(&route, &ensemble),
        routes: vec![ensemble_route(&route, dimension, &ensemble)],
        settled: vec![],
        stop: ensemble.stop.clone(),
        route,
    })
}

/// One flow for each start, each with one set of points: a mean over scrambles that end with other heads
/// off would be no state at all.
fn flows(spec: &Spec, quiet: bool) -> Result<Trained, Error> {
    let starts = match spec.initial {
        Initial::Given => vec![spec.start()?],
        Initial::Random => {
            let dimension = spec.dimension.ok_or_else(|| Error::invalid("dimension", "is missing"))?;
            // The keys do not depend on the learning rate, which may be zero here.
            let sgd = Sgd { gamma: 1.0, ..spec.sgd(dimension, Engine::Direct)? };
            let start = spec.simulation_start()?;
            let draw = |index| {
                let (m, r, b) = Replica::new(&sgd, &start, index)?.overlaps();
                OrderParameters::new(m, r, b)
            };
            (0..spec.replicas).map(draw).collect::<Result<_, Error>>()?
        }
    };
    let set = match spec.evaluator {
        Some(EvaluatorKind::Quadrature) => Averages::Exact(spec.quadrature()?),
        _ => {
            let (task, heads) = (spec.task()?, spec.head_count());
            Averages::Sampled(QuasiMonteCarlo::new(&task, heads, spec.attention(), points(spec)?, spec.seed, 0)?)
        }
    };
    let options = spec.flow_options();
    let progress = Progress::new("flows", starts.len() as u64 * flow::PROGRESS, false, quiet);
    let mut solutions: Vec<Solution> = Vec::new();
    // As many at once as there are threads: a thread that waits within one flow may begin another, and so on.
    for together in starts.chunks(rayon::current_num_threads()) {
        let solved: Vec<Solution> = together
            .par_iter()
            .map(|start| flow::solve(&set, start, &options, &progress))
            .collect::<Result<_, Error>>()?;
        if let Some(failed) = solved.iter().find(|s| !s.stop.is_whole()) {
            return Err(failed.stop.error("flow"));
        }
        solutions.extend(solved);
    }
    drop(progress);
    let mut statistics = Statistics::default();
    solutions.iter().for_each(|s| statistics += s.statistics);
    let all = solutions.iter().map(|s| &s.stop);
    let stop = all.clone().find(|stop| !stop.as_requested()).or_else(|| all.clone().next());
    let stop = stop.cloned().unwrap_or(StopReason::Completed);
    let settled = solutions
        .par_iter()
        .map(|solution| spec.settled(std::slice::from_ref(&set), std::slice::from_ref(solution), &Interruptible))
        .collect();
    let paths: Vec<Trajectory> = solutions.into_iter().map(|s| s.trajectory).collect();
    let estimate = Estimate::over(&paths).ok_or_else(|| Error::invalid("replicas", "there must be at least one"))?;
    let series = vec![Series::of_estimate("theory", &estimate, &Estimate::trace_over(&paths))];
    Ok(Trained {
        route: "theory".into(),
        systems: paths.iter().map(last).collect::<Result<_, _>>()?,
        routes: vec![theory_route("theory", &estimate, &stop, 1, statistics)],
        paths,
        series,
        settled,
        stop,
    })
}

/// Each trained system's losses, in order, and a line where they are not known to the tolerance.
fn pruned(spec: &Spec, systems: &[OrderParameters], quiet: bool) -> Result<(Vec<Pruning>, String), Error> {
    let most = spec.most_removed.unwrap_or_else(|| spec.head_count() - 1);
    let sets = pruning::sets(spec.head_count(), spec.subsets, most);
    let progress = Progress::new("pruning", systems.len() as u64 * sets, false, quiet);
    let mut worst: Option<f64> = None;
    let all = systems
        .iter()
        .map(|point| {
            let losses = Losses::of(spec, point)?;
            let found =
                pruning::prune_sets(point.heads(), spec.subsets, most, spec.seed, &|kept| losses.loss(kept), &progress);
            let missed = losses.missed(spec.tolerance.unwrap_or(PRUNE_TOLERANCE));
            worst = worst.into_iter().chain(missed).reduce(larger);
            found
        })
        .collect::<Result<_, Error>>()?;
    Ok((all, missed_by(spec, worst)))
}

/// A mean over systems with its standard error; none for one system.
fn averaged(values: impl Iterator<Item = f64> + Clone) -> (f64, Option<f64>) {
    let (mean, error) = mean_and_error(values);
    (mean, error.is_finite().then_some(error))
}

/// The losses with one number of heads removed, over all systems.
struct Average {
    removed: usize,
    subsets: usize,
    exhaustive: bool,
    mean: (f64, Option<f64>),
    /// Over all sets of all systems, about their mean.
    standard_deviation: f64,
    best: (f64, Option<f64>),
    worst: (f64, Option<f64>),
}

/// Averages over systems, row by row: all have the same numbers of sets.
fn averages(all: &[Pruning]) -> Vec<Average> {
    let Some(first) = all.first() else { return Vec::new() };
    (0..first.rows.len())
        .map(|n| {
            let rows = || all.iter().map(move |p| &p.rows[n]);
            let mean = averaged(rows().map(|r| r.mean));
            let square = rows().map(|r| r.standard_deviation.powi(2) + (r.mean - mean.0).powi(2)).sum::<f64>();
            Average {
                removed: n,
                subsets: first.rows[n].subsets,
                exhaustive: first.rows[n].exhaustive,
                mean,
                standard_deviation: (square / all.len() as f64).sqrt(),
                best: averaged(rows().map(|r| r.best)),
                worst: averaged(rows().map(|r| r.worst)),
            }
        })
        .collect()
}

/// How many heads can go at a tolerance, over all systems.
struct CanGo {
    tolerance: f64,
    by_choice: (f64, Option<f64>),
    together: (f64, Option<f64>),
    at_random: (f64, Option<f64>),
}

fn can_go(all: &[Pruning], tolerances: &[f64]) -> Vec<CanGo> {
    tolerances
        .iter()
        .map(|&tolerance| CanGo {
            tolerance,
            by_choice: averaged(all.iter().map(|p| p.prunable(tolerance) as f64)),
            together: averaged(all.iter().map(|p| p.prunable_together(tolerance) as f64)),
            at_random: averaged(all.iter().map(|p| p.prunable_at_random(tolerance) as f64)),
        })
        .collect()
}

/// `H - F` and, for finite support, `H - |support|`; negative when there are fewer heads.
fn spare(spec: &Spec) -> (i64, Option<i64>) {
    let heads = spec.head_count() as i64;
    let beyond = |n: usize| heads.saturating_sub(i64::try_from(n).unwrap_or(i64::MAX));
    (beyond(spec.theta.features()), spec.theta.support().map(beyond))
}

fn entry(spec: &Spec, trained: &Trained, all: &[Pruning]) -> Value {
    let (by_features, by_support) = spare(spec);
    let averages = averages(all).into_iter().map(|row| {
        json!({
            "removed": row.removed, "subsets": row.subsets, "exhaustive": row.exhaustive,
            "mean": row.mean.0, "standard_error": row.mean.1, "standard_deviation": row.standard_deviation,
            "best": row.best.0, "best_standard_error": row.best.1,
            "worst": row.worst.0, "worst_standard_error": row.worst.1,
        })
    });
    let numbers = can_go(all, &spec.prune_tolerances).into_iter().map(|n| {
        json!({
            "tolerance": n.tolerance,
            "by_choice": {"mean": n.by_choice.0, "standard_error": n.by_choice.1},
            "together": {"mean": n.together.0, "standard_error": n.together.1},
            "at_random": {"mean": n.at_random.0, "standard_error": n.at_random.1},
        })
    });
    let systems = trained.systems.iter().zip(all).enumerate().map(|(index, (point, pruning))| {
        let each = |count: &dyn Fn(f64) -> usize| spec.prune_tolerances.iter().map(|&t| count(t)).collect::<Vec<_>>();
        let settled = trained.settled.get(index).cloned().flatten();
        json!({
            "replica": index, "settled": settled, "m": rows(point.m()), "r": rows(point.r()), "b": point.b(),
            "rows": pruning.rows,
            "by_choice": each(&|t| pruning.prunable(t)), "together": each(&|t| pruning.prunable_together(t)),
            "at_random": each(&|t| pruning.prunable_at_random(t)),
        })
    });
    json!({
        "route": trained.route, "heads": spec.head_count(), "features": spec.theta.features(),
        "support": spec.theta.support(), "heads_minus_features": by_features, "heads_minus_support": by_support,
        "rows": averages.collect::<Vec<_>>(), "can_go": numbers.collect::<Vec<_>>(),
        "systems": systems.collect::<Vec<_>>(),
    })
}

fn with_error((value, error): (f64, Option<f64>), digits: usize) -> String {
    match error {
        Some(error) => format!("{value:.digits$} +- {error:.digits$}"),
        None => format!("{value:.digits$}"),
    }
}

/// Lines of a table, about.
const MOST_LINES: usize = 32;

fn table(spec: &Spec, all: &[Pruning]) -> String {
    let mut text = format!("{:>7}  {:>6}  {:<19}  {:<9}  worst\n", "removed", "sets", "mean +- sd", "best");
    let rows = averages(all);
    // Long tables are thinned; the document has every row.
    let every = rows.len().div_ceil(MOST_LINES);
    for row in rows.iter().filter(|row| row.removed % every == 0 || row.removed + 1 == rows.len()) {
        let sets = if row.exhaustive { row.subsets.to_string() } else { format!("~{}", row.subsets) };
        let spread = format!("{:.5} +- {:.5}", row.mean.0, row.standard_deviation);
        text += &format!("{:>7}  {sets:>6}  {spread:<19}  {:<9.5}  {:.5}\n", row.removed, row.best.0, row.worst.0);
    }
    text + &numbers(spec, all)
}

fn numbers(spec: &Spec, all: &[Pruning]) -> String {
    let (by_features, by_support) = spare(spec);
    let beside = by_support.map(|n| format!(", H - |support| = {n}")).unwrap_or_default();
    let mut text = format!("heads that can go, of {} (H - F = {by_features}{beside})\n", spec.head_count());
    for n in can_go(all, &spec.prune_tolerances) {
        text += &format!(
            "  at {}% of the loss: {} by choice, {} together, {} at random\n",
            // Nine digits: 0.07 is 7%.
            (n.tolerance * 1e11).round() / 1e9,
            with_error(n.by_choice, 2),
            with_error(n.together, 2),
            with_error(n.at_random, 2)
        );
    }
    text
}

fn heading(trained: &Trained) -> String {
    let mut moving = trained.settled.iter().flatten().filter(|settled| !settled.settled);
    let unsettled = match (moving.clone().count(), moving.next()) {
        (n, Some(first)) => format!(
            "{n} of {} flows had not settled: use --until settled, or a larger --tau; the first {}\n",
            trained.systems.len(),
            first.describe()
        ),
        _ => String::new(),
    };
    let heading = match trained.systems.len() {
        1 => format!("{}, 1 system\n", trained.route),
        n => format!(
            "{}, {n} systems; +- sd over sets and systems, best and worst are means over systems\n",
            trained.route
        ),
    };
    heading + &unsettled
}

pub fn run(request: &Request, spec: &Spec) -> Result<u8, Error> {
    let clock = Clock::start();
    let mut folder = folder(request, "prune")?;
    // What cannot be had is said before the training.
    Quadrature::new(&spec.task()?, spec.head_count(), spec.attention(), spec.tolerance.unwrap_or(PRUNE_TOLERANCE))?;
    let trained = train(spec, request.quiet)?;
    let (all, missed) = pruned(spec, &trained.systems, request.quiet)?;
    let pruning = entry(spec, &trained, &all);
    let writing = writing_result();
    let rest = json!({
        "stop": trained.stop, "routes": trained.routes, "pruning": pruning, "note": missed.trim_end(),
    });
    let result = document("prune", spec, &clock, rest)?;
    let files = if trained.series.is_empty() {
        folder.write_document(&result)?;
        "result.json"
    } else {
        let replicas =
            headflow::folder::Replicas { route: trained.route.clone(), trajectories: trained.paths.iter().collect() };
        folder.write_run(&trained.series, &[replicas], &result)?;
        "result.json, series.csv, series.npz"
    };
    drop(writing);
    let figure = drawn(folder.path(), &result);
    let text =
        format!("{}{}{missed}{}: {files}{figure}\n", heading(&trained), table(spec, &all), folder.path().display());
    print(request, &result, &text);
    Ok(exit_code(&trained.stop))
}

/// Fields that the figure starts from, those of its first panel. The learning rate and
/// the time are such that the loss no longer falls: heads that are still moving are no redundant heads.
pub fn defaults() -> Value {
    json!({
        "initial": "random", "dimension": 300, "replicas": 20, "gamma": 0.5, "tau": 600.0, "records": 13,
        "points": 4096, "theta": {"kind": "gaussian", "mean": [0.0, 0.0], "sd": [2.0, 2.0]}, "heads": 6,
    })
}

/// The panels: a title, and their fields.
fn panels() -> [(&'static str, Value); 2] {
    [
        (
            "isotropic Gaussian θ, F = 2, H = 6",
            json!({"theta": {"kind": "gaussian", "mean": [0.0, 0.0], "sd": [2.0, 2.0]}, "heads": 6}),
        ),
        ("flips, F = 2, H = 8", json!({"theta": {"kind": "flip", "nu": [2.5, 2.5]}, "heads": 8})),
    ]
}

/// What the figure reads: it shows two thetas with all three activations and their defaults, after flows and direct SGD
/// from random keys.
pub fn reader() -> Reader {
    Reader {
        figure: Some("pruning"),
        // Of the simulations beside the flows.
        also: &["test_samples"],
        own: &[
            "theta",
            "heads",
            "attention",
            "bias",
            "aggregation",
            "engine",
            "initial",
            "m0",
            "r0",
            "b0",
            "m",
            "r",
            "b",
            "most_removed",
        ],
        ..Purpose::Prune.into()
    }
}

pub fn figure(request: &Request, spec: &Spec) -> Result<u8, Error> {
    let clock = Clock::start();
    let from = match place(request, "pruning")? {
        Place::There(from) => from,
        Place::New(mut folder) => {
            let mut drawn_panels = Vec::new();
            for (title, fields) in panels() {
                let (mut curves, mut last) = (Vec::new(), None);
                for activation in Activation::ALL {
                    for engine in [None, Some("direct")] {
                        let Value::Object(mut own) = defaults() else { continue };
                        if let Value::Object(fields) = &fields {
                            own.extend(fields.clone());
                        }
                        own.insert("attention".into(), json!(activation.name()));
                        if let Some(engine) = engine {
                            own.insert("engine".into(), json!(engine));
                        }
                        // Each takes what it reads of the fields that were given.
                        overlay(&mut own, request.fields.clone(), Purpose::Prune);
                        let spec = Spec::recorded(&own, Purpose::Prune)?;
                        let trained = train(&spec, request.quiet)?;
                        let (all, missed) = pruned(&spec, &trained.systems, request.quiet)?;
                        if !request.quiet && !request.json {
                            say(&format!(
                                "{title}, {}: {}{}{missed}",
                                activation.name(),
                                heading(&trained),
                                table(&spec, &all)
                            ));
                        }
                        curves.push(curve(&spec, activation, &trained, &all));
                        last = Some(spec);
                    }
                }
                let Some(spec) = last else { continue };
                drawn_panels.push(json!({
                    "title": title, "heads": spec.head_count(), "features": spec.theta.features(),
                    "support": spec.theta.support(), "theta": spec.theta, "curves": curves,
                }));
            }
            let rest = json!({"figure": "pruning", "pruning": drawn_panels});
            let _writing = writing_result();
            folder.write_document(&document("figure", spec, &clock, rest)?)?;
            folder.path().to_path_buf()
        }
    };
    draw(request, spec, &clock, &from, &|from, out| figures::pruning(from, out))?;
    Ok(0)
}

/// One curve of a panel: arrays over the number of removed heads.
fn curve(spec: &Spec, activation: Activation, trained: &Trained, all: &[Pruning]) -> Value {
    let rows = averages(all);
    let array = |f: &dyn Fn(&Average) -> Value| rows.iter().map(f).collect::<Vec<_>>();
    let entry = entry(spec, trained, all);
    let each = |f: &dyn Fn(&Pruning, f64) -> usize| {
        all.iter().map(|p| spec.prune_tolerances.iter().map(|&t| f(p, t)).collect()).collect::<Vec<Vec<usize>>>()
    };
    let of_systems = json!({
        "unpruned": all.iter().map(Pruning::unpruned).collect::<Vec<_>>(),
        "by_choice": each(&|p, t| p.prunable(t)), "together": each(&|p, t| p.prunable_together(t)),
        "at_random": each(&|p, t| p.prunable_at_random(t)),
    });
    json!({
        "attention": activation.name(), "route": trained.route, "systems": trained.systems.len(),
        "removed": array(&|r| json!(r.removed)),
        "mean": array(&|r| json!(r.mean.0)), "standard_error": array(&|r| json!(r.mean.1)),
        "standard_deviation": array(&|r| json!(r.standard_deviation)),
        "best": array(&|r| json!(r.best.0)), "best_standard_error": array(&|r| json!(r.best.1)),
        "worst": array(&|r| json!(r.worst.0)), "worst_standard_error": array(&|r| json!(r.worst.1)),
        "unpruned": rows.first().map(|r| r.mean.0), "can_go": entry["can_go"], "of_systems": of_systems,
    })
}
