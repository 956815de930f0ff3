//! The figures of the dynamics, `escape`, `hierarchy` and `spectrum`: each computes one run into a folder
//! and draws it from there.

use std::path::{Path, PathBuf};

use headflow::figures::{self, ResultFolder};
use headflow::folder::RunFolder;
use headflow::model::series::Series;
use headflow::model::text::{rounded, short};
use headflow::model::{Error, OrderParameters, Theta, Watch, larger, mean_and_error};
use headflow::sims::first_passage::{Target, first_passage};
use headflow::sims::sgd::Engine;
use headflow::spec::{Initial, Purpose, Reader, Spec};
use headflow::theory::escape::{Escape, Rates, departure};
use headflow::theory::moments::{Coordinates, Watched};
use headflow::theory::stability::{Kind, Mode, Stability, linearise, unspecialised, zero};
use headflow::theory::stages::stages;
use nalgebra::DMatrix;
use serde_json::{Map, Value, json};

use super::figure::{failed, finish};
use super::flow::integrate;
use super::simulate::{replicas, route_name, series, simulate};
use super::stages::entry;
use super::{Clock, document, ensemble_route, exit_code, folder, made, say, theory_route};
use crate::cli::Request;
use crate::progress::{Interruptible, Progress, writing_result};

/// What a figure of the dynamics reads.
pub fn reader(figure: &str) -> Option<Reader> {
    Some(match figure {
        "escape" => Reader {
            figure: Some("escape"),
            also: &["on"],
            // First passages: no flow, no records, no losses.
            own: &[
                "m0",
                "r0",
                "records",
                "test_samples",
                "method",
                "relative_tolerance",
                "absolute_tolerance",
                "max_steps",
            ],
            ..Purpose::Compare.into()
        },
        // A flow beside the simulation.
        "hierarchy" => Reader {
            figure: Some("hierarchy"),
            also: &[
                "evaluator",
                "points",
                "scrambles",
                "method",
                "relative_tolerance",
                "absolute_tolerance",
                "max_steps",
            ],
            ..Purpose::Stages.into()
        },
        // One flow with one set of points.
        "spectrum" => Reader { figure: Some("spectrum"), own: &["engine", "scrambles"], ..Purpose::Stages.into() },
        _ => return None,
    })
}

/// Fields that a figure starts from, where it has its own.
pub fn defaults(figure: &str) -> Option<Value> {
    // Three features of decreasing variance, small heads that prefer none.
    let hierarchy = json!({
        "theta": {"kind": "gaussian", "mean": [0.0, 0.0, 0.0], "sd": [2.5, 1.7, 1.1]},
        "attention": "bayes-softmax", "key_scale": 0.05, "tau": 500.0, "records": 501,
        "m0": [[0.021, -0.012, 0.005], [-0.016, 0.009, 0.013], [0.032, 0.011, -0.010],
               [-0.008, -0.019, 0.012], [0.010, -0.014, -0.011], [-0.030, 0.013, 0.008]],
    });
    match figure {
        "escape" => Some(json!({
            "length": 4, "theta": {"kind": "flip", "nu": [3.0]}, "heads": 2, "gamma": 4.0, "initial": "random", "key_scale": 0.2,
            "engine": "overlap", "on": 0.1, "dimensions": [100, 1000, 10_000, 100_000, 1_000_000, 10_000_000], "replicas": 24,
            "points": 16384, "scrambles": 4,
        })),
        "hierarchy" => {
            let mut fields = hierarchy;
            fields["engine"] = json!("overlap");
            fields["dimension"] = json!(50_000);
            fields["replicas"] = json!(2);
            Some(fields)
        }
        "spectrum" => {
            let mut fields = hierarchy;
            fields["gamma"] = json!(0.0);
            fields["records"] = json!(101);
            fields["points"] = json!(4096);
            Some(fields)
        }
        "pruning" => Some(super::prune::defaults()),
        _ => None,
    }
}

/// A figure's fields, without those that have no use beside what was given.
pub fn base(fields: Value, request: &Request) -> Map<String, Value> {
    let mut fields = fields.as_object().cloned().unwrap_or_default();
    // Another theta or number of heads has no use for these alignments.
    if ["theta", "heads", "initial"].iter().any(|name| request.fields.contains_key(*name)) {
        fields.remove("m0");
    }
    fields
}

/// A figure's fields under those that were given.
pub fn completed(fields: Value, reader: Reader, request: &Request) -> Result<Spec, Error> {
    Spec::over(base(fields, request), &request.fields, reader)
}

/// Where results lie and whether to make them.
pub enum Place {
    There(PathBuf),
    New(RunFolder),
}

pub fn place(request: &Request, name: &str) -> Result<Place, Error> {
    Ok(match &request.from {
        Some(from) => Place::There(from.clone()),
        None => Place::New(folder(request, name)?),
    })
}

/// Draws a result folder to files of a stem.
pub type Draw = dyn Fn(&Path, &Path) -> Result<Vec<PathBuf>, figures::Error>;

/// Draws into the output folder of a figure whose results lie in `from`.
pub fn draw(request: &Request, spec: &Spec, clock: &Clock, from: &Path, figure: &Draw) -> Result<(), Error> {
    let out = if request.from.is_some() { request.out.clone().unwrap_or_else(|| from.into()) } else { from.into() };
    let _made = made(&out)?;
    let name = request.figure.as_deref().unwrap_or_default();
    let files = figure(from, &out.join(name)).map_err(failed)?;
    finish(request, spec, clock, &out, &files, json!({}))
}

/// Below this dimension fluctuations are not small, and escape times not logarithmic.
const SMALLEST_FITTED: usize = 1000;

/// One curve of the escape figure.
struct Curve {
    label: String,
    dimensions: Vec<usize>,
    /// Replica by replica, for each dimension.
    times: Vec<Vec<f64>>,
    replicas: u32,
    slopes: Vec<Value>,
    predicted: Vec<Option<f64>>,
}

impl Curve {
    fn statistics(&self) -> Vec<(f64, f64)> {
        self.times.iter().map(|times| mean_and_error(times.iter().copied())).collect()
    }

    /// The slope of the times in `ln D` from [`SMALLEST_FITTED`] on, replica by replica: they share their random
    /// numbers across dimensions, so part of their spread is common to all.
    fn slope(&self) -> (f64, f64) {
        let fitted: Vec<usize> =
            (0..self.dimensions.len()).filter(|&k| self.dimensions[k] >= SMALLEST_FITTED).collect();
        let x: Vec<f64> = fitted.iter().map(|&k| (self.dimensions[k] as f64).ln()).collect();
        let mean = x.iter().sum::<f64>() / x.len() as f64;
        let square: f64 = x.iter().map(|x| (x - mean).powi(2)).sum();
        let complete = self.times.iter().map(Vec::len).min().unwrap_or(0);
        let slopes = (0..complete).map(|replica| {
            x.iter().zip(&fitted).map(|(x, &k)| (x - mean) * self.times[k][replica]).sum::<f64>() / square
        });
        mean_and_error(slopes.collect::<Vec<_>>().iter().copied())
    }

    fn json(&self) -> Value {
        let statistics = self.statistics();
        let (slope, slope_error) = self.slope();
        json!({
            "label": self.label, "dimensions": self.dimensions,
            "replicas": vec![self.replicas; self.dimensions.len()],
            "times": statistics.iter().map(|s| s.0).collect::<Vec<_>>(),
            "standard_errors": statistics.iter().map(|s| s.1).collect::<Vec<_>>(),
            "slopes": self.slopes, "slope": slope, "slope_standard_error": slope_error,
            "predicted_times": self.predicted, "all_times": self.times,
        })
    }

    fn text(&self) -> String {
        let mut text = format!("{}\n", self.label);
        for (k, (time, error)) in self.statistics().into_iter().enumerate() {
            text += &format!("  D = {:<10} tau* = {time:.3} +- {error:.3}", self.dimensions[k]);
            text +=
                &self.predicted.get(k).copied().flatten().map(|t| format!("   predicted {t:.3}")).unwrap_or_default();
            text.push('\n');
        }
        let (slope, error) = self.slope();
        if !(slope.is_finite() && error > 0.0) {
            return text + &format!("  no slope: it takes two dimensions from {SMALLEST_FITTED} on\n");
        }
        text += &format!("  slope in ln D, from D = {SMALLEST_FITTED}: {slope:.4} +- {error:.4}\n");
        for line in &self.slopes {
            let claimed = line["slope"].as_f64().unwrap_or(f64::NAN);
            text += &format!(
                "    {:.4} from {} ({:+.1} standard errors)\n",
                claimed,
                line["label"].as_str().unwrap_or_default(),
                (slope - claimed) / error
            );
        }
        text
    }
}

pub fn escape(request: &Request, spec: &Spec) -> Result<u8, Error> {
    let clock = Clock::start();
    let (from, code) = match place(request, "escape")? {
        Place::There(from) => (from, 0),
        Place::New(mut folder) => {
            let curves = escape_curves(spec, request.quiet)?;
            if Interruptible.interrupted() {
                return Err(Error::interrupted("figure escape"));
            }
            let text: String = curves.iter().map(Curve::text).collect();
            let escape = json!({
                "curves": curves.iter().map(Curve::json).collect::<Vec<_>>(),
                "threshold_label": format!("left: norm of m_h − mean m over heads = {} sd θ", short(spec.on)),
            });
            let writing = writing_result();
            folder.write_document(&document("figure", spec, &clock, json!({"figure": "escape", "escape": escape}))?)?;
            drop(writing);
            if !request.quiet && !request.json {
                say(&text);
            }
            (folder.path().to_path_buf(), 0)
        }
    };
    draw(request, spec, &clock, &from, &|from, out| figures::escape(from, out))?;
    Ok(code)
}

fn fastest(stability: &Stability, feature: usize) -> Option<&Mode> {
    stability.modes.iter().find(|m| m.kind == Kind::Specialising && m.feature_weights[feature] > 0.5)
}

fn escape_curves(spec: &Spec, quiet: bool) -> Result<Vec<Curve>, Error> {
    let wrong = |field: &str, problem: &str| Err(Error::invalid(field, problem));
    if spec.engines() != [Engine::Overlap] {
        return wrong("engine", "escape times are those of the overlap chain; leave it out");
    }
    if spec.initial != Initial::Random || spec.key_scale == 0.0 {
        return wrong("initial", "escape starts from random keys, with a key_scale above 0");
    }
    if spec.replicas < 2 || spec.head_count() < 2 {
        return wrong("replicas", "escape needs 2 replicas for an error, and 2 heads to come apart");
    }
    let evaluators = spec.evaluators()?;
    let evaluators = Watched::all(&evaluators, &Interruptible);
    let noise = spec.gamma / spec.batch as f64;
    let second = spec.theta.second_moment();
    let features = spec.theta.features();
    let feature = (0..features).max_by(|&i, &j| second[(i, i)].total_cmp(&second[(j, j)])).unwrap_or(0);
    if spec.theta.mean().iter().any(|m| m.abs() > 1e-12) {
        return wrong("theta", "escape needs a theta with mean 0; the curve with a mean is added beside it");
    }
    if (0..features).any(|f| f != feature && second[(f, feature)].abs() > 1e-9 * second[(feature, feature)]) {
        return wrong("theta", "escape follows one feature: give a theta without correlations between features");
    }
    let scale = second[(feature, feature)].sqrt();

    // The spectrum first: without growth there is nothing to wait for.
    let held = linearise(&evaluators, &unspecialised(&evaluators, noise)?, &Interruptible)?;
    let origin = linearise(&evaluators, &zero(&evaluators[0])?, &Interruptible)?;
    let mut slopes = Vec::new();
    for (stability, words) in [(&held, "stationary point with γ"), (&origin, "k = 0")] {
        let Some(rate) = fastest(stability, feature).map(|mode| mode.rate).filter(|rate| *rate > 0.0) else {
            return Err(Error::invalid("theta", format!("no specialising mode grows at the {words}: nothing escapes")));
        };
        slopes.push(json!({"label": format!("κ = {}: {words}", rounded(rate, 4)), "rate": rate, "slope": 0.5 / rate}));
    }

    // The specialising mode: alignments less their mean over heads.
    let apart = |m: &DMatrix<f64>| {
        let mean = m.column(feature).mean();
        m.column(feature).iter().map(|v| (v - mean).powi(2)).sum::<f64>().sqrt()
    };
    let label = format!("{}: specialisation", in_words(&spec.theta));
    let mut specialisation = measured(spec, &label, &apart, spec.on * scale, quiet)?;
    specialisation.slopes = slopes;
    // The constant as well: growth along the overlaps' own way to their stationary value.
    if let Some(mode) = fastest(&held, feature)
        && let Some(shape) = mode.basis.first()
        && let law = (spec.key_scale * spec.key_scale, noise, spec.on)
        && let Some(escape) = Escape::of_mode(&evaluators[0], &held, mode, law, spec.seed)?
    {
        let b0 = spec.b0.clone().unwrap_or_else(|| vec![0.0; spec.head_count()]);
        let rates = Rates::of_settling(&evaluators[0], &escape, shape, &b0, noise, &Interruptible)?;
        let predicted = |d: usize| Some(rates.time(&escape, d as f64)).filter(|t| t.is_finite());
        specialisation.predicted = specialisation.dimensions.iter().map(|&d| predicted(d)).collect();
    }

    // A mean of theta: all heads move together, at once.
    let mut mean = vec![0.0; spec.theta.features()];
    mean[feature] = 0.5 * scale;
    let sd: Vec<f64> = (0..mean.len()).map(|f| second[(f, f)].sqrt()).collect();
    let pushed = Spec { theta: Theta::Gaussian { mean, sd: Some(sd), cov: None }, ..spec.clone() };
    let points = pushed.evaluators()?;
    let goal = unspecialised(&Watched::all(&points[..1], &Interruptible), noise)?.m[(0, feature)];
    let together = |m: &DMatrix<f64>| larger(m.column(feature).mean(), 0.0);
    let label = format!("{}: unspecialised phase", in_words(&pushed.theta));
    let phase = measured(&pushed, &label, &together, 0.5 * goal.abs(), quiet)?;
    Ok(vec![specialisation, phase])
}

fn measured(
    spec: &Spec,
    label: &str,
    measure: &(dyn Fn(&DMatrix<f64>) -> f64 + Sync),
    threshold: f64,
    quiet: bool,
) -> Result<Curve, Error> {
    let start = spec.simulation_start()?;
    let (mut dimensions, mut times) = (Vec::new(), Vec::new());
    for dimension in spec.all_dimensions() {
        let sgd = spec.sgd(dimension, Engine::Overlap)?;
        let last = spec.recorded_times().last().copied().unwrap_or(0.0);
        let progress = Progress::new(&format!("chain D={dimension}"), 0, true, quiet);
        let target = Target { measure, threshold, last };
        let found = first_passage(&sgd, &start, spec.replicas, &target, &progress)?;
        if progress.interrupted() {
            break;
        }
        let Some(all) = found.iter().copied().collect::<Option<Vec<f64>>>() else {
            let lost = found.iter().filter(|t| t.is_none()).count();
            return Err(Error::invalid(
                "tau",
                format!(
                    "{lost} of {} replicas at D = {dimension} do not get there by tau = {last}: raise --tau",
                    spec.replicas
                ),
            ));
        };
        dimensions.push(dimension);
        times.push(all);
    }
    Ok(Curve {
        label: label.into(),
        dimensions,
        times,
        replicas: spec.replicas,
        slopes: Vec::new(),
        predicted: Vec::new(),
    })
}

fn in_words(theta: &Theta) -> String {
    let list = |values: &[f64]| values.iter().map(|v| short(*v)).collect::<Vec<_>>().join(", ");
    match theta {
        Theta::Flip { nu } => format!("θ = ±({})", list(nu)),
        Theta::Gaussian { mean, sd: Some(sd), .. } => format!("θ ~ N(({}), sd ({}))", list(mean), list(sd)),
        _ => "θ".into(),
    }
}

pub fn hierarchy(request: &Request, spec: &Spec) -> Result<u8, Error> {
    let clock = Clock::start();
    if spec.initial == Initial::Random {
        return Err(Error::invalid(
            "initial",
            "hierarchy starts the flow and the chain from the same overlaps: leave it out",
        ));
    }
    let (from, code) = match place(request, "hierarchy")? {
        Place::There(from) => (from, 0),
        Place::New(mut folder) => {
            let evaluators = spec.evaluators()?;
            let flow = integrate(&evaluators[..1], &spec.start()?, &spec.flow_options(), "flow", request.quiet)?;
            if !flow.stop.as_requested() {
                return Err(flow.stop.error("flow"));
            }
            let path = &flow.estimate.mean;
            let found = stages(path, &spec.theta.second_moment(), &spec.criteria())?;
            let noise = spec.gamma / spec.batch as f64;
            let mut predicted = Vec::new();
            let mut text = format!("theory\n{}", found.describe());
            for (index, plateau) in found.plateaus.iter().enumerate() {
                let departure = departure(&evaluators, path, plateau, noise, &spec.criteria(), &Interruptible)?;
                let end = path.times.last().copied().unwrap_or(0.0);
                if let Some(next) = departure.learned.first().filter(|p| p.time <= end) {
                    let label = format!("s{} predicted from plateau {}", next.feature + 1, index + 1);
                    text += &format!("{label}: tau = {:.2} (rate {:+.4})\n", next.time, next.rate);
                    predicted.push(json!({
                        "feature": next.feature, "time": next.time, "rate": next.rate, "label": label,
                    }));
                }
            }
            let dimension = spec.dimension.ok_or_else(|| Error::invalid("dimension", "is missing"))?;
            let sgd = spec.sgd(dimension, spec.engines()[0])?;
            let ensemble = simulate(spec, &sgd, &spec.simulation_start()?, request.quiet)?;
            let name = route_name(&sgd);
            let mut all = vec![Series::of_estimate("theory", &flow.estimate, &flow.trace)];
            all.extend(series(&name, &ensemble));
            let writing = writing_result();
            let mut entries = vec![entry("theory", &found)];
            if let Some(run) = ensemble.runs.first()
                && let Ok(of_run) = stages(&run.trajectory, &spec.theta.second_moment(), &spec.criteria())
            {
                text += &format!("{name} replica=0\n{}", of_run.describe());
                entries.push(entry(&format!("{name} replica=0"), &of_run));
            }
            let routes = json!([
                theory_route("theory", &flow.estimate, &flow.stop, flow.solutions.len(), flow.statistics),
                ensemble_route(&name, dimension, &ensemble),
            ]);
            let rest = json!({
                "figure": "hierarchy", "stop": ensemble.stop, "routes": routes, "stages": entries, "predicted": predicted,
            });
            folder.write_run(&all, &[replicas(&name, &ensemble)], &document("figure", spec, &clock, rest)?)?;
            drop(writing);
            if !request.quiet && !request.json {
                say(&text);
            }
            (folder.path().to_path_buf(), exit_code(&ensemble.stop))
        }
    };
    draw(request, spec, &clock, &from, &|from, out| figures::hierarchy(&ResultFolder::open(from)?, out))?;
    Ok(code)
}

pub fn spectrum(request: &Request, spec: &Spec) -> Result<u8, Error> {
    let clock = Clock::start();
    let (from, code) = match place(request, "spectrum")? {
        Place::There(from) => (from, 0),
        Place::New(mut folder) => {
            let evaluators = spec.evaluators()?;
            let flow = integrate(&evaluators[..1], &spec.start()?, &spec.flow_options(), "flow", request.quiet)?;
            let path = &flow.estimate.mean;
            let progress = Progress::new("spectrum", path.times.len() as u64, false, request.quiet);
            let (mut rates, mut kinds): (Vec<Vec<Option<f64>>>, Vec<Vec<Kind>>) = Default::default();
            if !flow.stop.as_requested() {
                return Err(flow.stop.error("flow"));
            }
            for t in 0..path.times.len() {
                let point = OrderParameters::new(path.m(t), path.r(t), path.b(t))?;
                let stability =
                    linearise(&evaluators[..1], &Coordinates::of(&point, &spec.attention()), &Interruptible)?;
                let each = || stability.modes.iter().flat_map(|m| std::iter::repeat_n(m, m.degeneracy));
                rates.push(each().map(|m| Some(m.rate)).collect());
                kinds.push(each().map(|m| m.kind).collect());
                progress.advance(1);
            }
            drop(progress);
            // Keys that span fewer directions have fewer modes.
            let most = rates.iter().map(Vec::len).max().unwrap_or(0);
            rates.iter_mut().for_each(|row| row.resize(most, None));
            kinds.iter_mut().for_each(|row| row.resize(most, Kind::Mixed));
            let entries: Vec<Value> = stages(path, &spec.theta.second_moment(), &spec.criteria())
                .map(|found| entry("theory", &found))
                .into_iter()
                .collect();
            let _writing = writing_result();
            let rest = json!({
                "figure": "spectrum", "stop": flow.stop,
                "routes": [theory_route("theory", &flow.estimate, &flow.stop, flow.solutions.len(), flow.statistics)],
                "stages": entries,
                "spectrum": {"times": path.times[..rates.len()], "rates": rates, "kinds": kinds},
            });
            let series = [Series::of_estimate("theory", &flow.estimate, &flow.trace)];
            folder.write_run(&series, &[], &document("figure", spec, &clock, rest)?)?;
            (folder.path().to_path_buf(), exit_code(&flow.stop))
        }
    };
    draw(request, spec, &clock, &from, &|from, out| figures::spectrum(&ResultFolder::open(from)?, out))?;
    Ok(code)
}
