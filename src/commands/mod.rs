//! One file a command, and what they share: the result document and how a run ends.

mod bayes;
mod compare;
mod doctor;
mod dynamics;
mod figure;
mod flow;
mod loss;
mod optimum;
mod phase;
mod prune;
mod simulate;
mod stability;
mod stages;
mod xsa;

use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use headflow::cost;
use headflow::figures;
use headflow::folder::{RunFolder, to_text};
use headflow::model::{Error, Estimate, Quantity, StopReason, Trajectory};
use headflow::sims::ensemble::Ensemble;
use headflow::spec::{Purpose, Spec, nearest};
use headflow::theory::evaluators::Averages;
use headflow::theory::flow::Statistics;
use serde_json::{Map, Value, json};

use crate::cli::{FIGURES, Request};
use crate::progress::{interrupted as was_interrupted, remove_if_empty};

/// Runs the requested command; the answer is the exit code.
pub fn run(request: &Request) -> Result<u8, Error> {
    let purpose = match request.command.as_str() {
        "doctor" => return doctor::run(request),
        "xsa bias" | "xsa measure" => return xsa::run(request),
        "flow" => Purpose::Flow,
        "loss" => Purpose::Loss,
        "simulate" => Purpose::Simulate,
        "stability" => Purpose::Stability,
        "stages" => Purpose::Stages,
        "prune" => Purpose::Prune,
        "bayes" => Purpose::Bayes,
        "optimum" => Purpose::Optimum,
        _ => Purpose::Compare,
    };
    if request.command == "figure" {
        let name = request.figure.as_deref().unwrap_or_default();
        if !FIGURES.contains(&name) {
            let hint = nearest(name, &FIGURES).map(|n| format!("; did you mean \"{n}\"?")).unwrap_or_default();
            return Err(Error::invalid(
                "figure",
                format!("there is no figure \"{name}\"{hint} (figures: {})", FIGURES.join(", ")),
            ));
        }
    }
    match (request.command.as_str(), request.figure.as_deref()) {
        ("phase", _) => return phase::run(request),
        ("figure", Some("xsa-bias" | "xsa-model")) => return xsa::figure(request),
        ("figure", Some(name)) if phase::FIGURES.contains(&name) => return phase::figure(request, name),
        _ => {}
    }
    // Figures of the dynamics have defaults of their own, a resumed run its own spec.
    let own = request.figure.as_deref().and_then(dynamics::defaults);
    let (spec, purpose) = match (own, &request.resume) {
        (Some((fields, purpose)), _) => (dynamics::completed(fields, purpose, request)?, purpose),
        (None, Some(folder)) => (simulate::saved_spec(folder, request)?, purpose),
        (None, None) => (Spec::from_map(&request.fields)?.complete(purpose)?, purpose),
    };
    if request.print_spec {
        return print_spec(&spec);
    }
    // Before any work, and any folder; results that exist are only read.
    if request.from.is_none() {
        cost::check(&spec, purpose, request.memory)?;
    }
    match request.command.as_str() {
        "flow" => flow::run(request, &spec),
        "loss" => loss::run(request, &spec),
        "simulate" => simulate::run(request, &spec),
        "compare" => compare::run(request, &spec),
        "stability" => stability::run(request, &spec),
        "stages" => stages::run(request, &spec),
        "prune" => prune::run(request, &spec),
        "bayes" => bayes::run(request, &spec),
        "optimum" => optimum::run(request, &spec),
        _ => figure::run(request, &spec),
    }
}

/// What a request is called when it is interrupted, and whether it then keeps what it has recorded.
pub fn interrupted(request: &Request) -> (String, bool) {
    match (request.command.as_str(), request.figure.as_deref().unwrap_or_default()) {
        ("figure", name) => (
            format!("figure {name}"),
            ["specialization", "hierarchy"].contains(&name) || phase::FIGURES.contains(&name),
        ),
        (command, _) => (command.into(), ["flow", "simulate", "compare", "phase"].contains(&command)),
    }
}

/// The folder of a run: a new one unless `--out` names it.
fn folder(request: &Request, name: &str) -> Result<RunFolder, Error> {
    prepared(request.out.as_deref(), name, request.force)
}

/// The folder of a run that writes only where it is told to.
fn wanted_folder(request: &Request, name: &str) -> Result<Option<RunFolder>, Error> {
    request.out.as_ref().map(|_| folder(request, name)).transpose()
}

fn prepared(out: Option<&Path>, name: &str, force: bool) -> Result<RunFolder, Error> {
    let folder = RunFolder::prepare(out, name, force)?;
    remove_if_empty(folder.made());
    Ok(folder)
}

fn print_spec(spec: &Spec) -> Result<u8, Error> {
    let document = serde_json::to_value(spec).map_err(|e| Error::unreadable("spec", e))?;
    say(&to_text(&document));
    Ok(0)
}

/// When a run began.
struct Clock {
    instant: Instant,
    unix: u64,
}

impl Clock {
    fn start() -> Self {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        Self { instant: Instant::now(), unix }
    }

    fn seconds(&self) -> f64 {
        self.instant.elapsed().as_secs_f64()
    }
}

/// The parts of a result document that every command has.
fn document(command: &str, spec: &Spec, clock: &Clock, rest: Value) -> Result<Value, Error> {
    let spec_value = serde_json::to_value(spec).map_err(|e| Error::unreadable("spec", e))?;
    Ok(headed(command, spec_value, json!(spec.seed), clock, rest))
}

/// The same for a spec of any form.
fn headed(command: &str, spec: Value, seed: Value, clock: &Clock, rest: Value) -> Value {
    let mut document = Map::from_iter([
        ("format".to_string(), json!("headflow-result")),
        ("format_version".to_string(), json!(1)),
        ("command".to_string(), json!(command)),
        ("version".to_string(), json!(headflow::VERSION)),
        ("git_revision".to_string(), json!(headflow::GIT_REVISION)),
        ("seed".to_string(), seed),
        ("started_unix_seconds".to_string(), json!(clock.unix)),
        ("wall_time_seconds".to_string(), json!(clock.seconds())),
        ("threads".to_string(), json!(rayon::current_num_threads())),
        ("spec".to_string(), spec),
    ]);
    if let Value::Object(rest) = rest {
        document.extend(rest);
    }
    Value::Object(document)
}

/// A line on a quadrature that could not keep its tolerance everywhere.
fn missed(spec: &Spec, evaluators: &[Averages]) -> String {
    let worst = evaluators.iter().filter_map(Averages::missed).fold(0.0, f64::max);
    if worst == 0.0 {
        return String::new();
    }
    format!("the tolerance {:e} was missed on the way: errors up to {worst:.1e}\n", spec.tolerance.unwrap_or(f64::NAN))
}

/// What the document says of a trajectory: the reference files' names and shapes.
fn trajectory(values: &Trajectory) -> Value {
    let shape = values.shape;
    let at = |row: &Vec<f64>, q| row[shape.index(q)];
    let heads = || 0..shape.heads;
    let rows = |f: &dyn Fn(&Vec<f64>) -> Value| values.rows.iter().map(f).collect::<Vec<_>>();
    json!({
        "times": values.times,
        "loss": values.path(Quantity::Loss).collect::<Vec<_>>(),
        "m": rows(&|row| json!(heads().map(|head| {
            (0..shape.features).map(|feature| at(row, Quantity::Alignment { head, feature })).collect::<Vec<_>>()
        }).collect::<Vec<_>>())),
        "r": rows(&|row| json!(heads().map(|head| {
            heads().map(|other| at(row, Quantity::Overlap { head, other })).collect::<Vec<_>>()
        }).collect::<Vec<_>>())),
        "b": rows(&|row| json!(heads().map(|head| at(row, Quantity::Bias { head })).collect::<Vec<_>>())),
    })
}

/// A route of the document: an average and where it comes from.
fn route(name: &str, mean: &Trajectory, standard_error: Option<&Trajectory>, stop: &StopReason, rest: Value) -> Value {
    let mut value = Map::from_iter([("route".to_string(), json!(name)), ("stop".to_string(), json!(stop))]);
    if let Value::Object(rest) = rest {
        value.extend(rest);
    }
    if let Value::Object(path) = trajectory(mean) {
        value.extend(path);
    }
    if let Some(errors) = standard_error {
        let mut errors_value = trajectory(errors);
        if let Some(map) = errors_value.as_object_mut() {
            map.remove("times");
        }
        value.insert("standard_error".into(), errors_value);
        let largest =
            |from: usize, to: usize| errors.rows.iter().flat_map(|r| &r[from..to]).fold(0.0f64, |a, b| a.max(*b));
        value.insert("max_standard_error".into(), json!(largest(1, errors.shape.width())));
        value.insert("max_standard_error_loss".into(), json!(largest(0, 1)));
    }
    Value::Object(value)
}

/// The document's entry for theory.
fn theory_route(name: &str, estimate: &Estimate, stop: &StopReason, scrambles: usize, statistics: Statistics) -> Value {
    route(
        name,
        &estimate.mean,
        estimate.standard_error.as_ref(),
        stop,
        json!({
            "scrambles": scrambles,
            "statistics": {
                "steps": statistics.steps,
                "rejected": statistics.rejected,
                "evaluations": statistics.evaluations,
            },
        }),
    )
}

/// The document's entry for a simulation.
fn ensemble_route(name: &str, dimension: usize, ensemble: &Ensemble) -> Value {
    let last_finite: Vec<Value> = ensemble
        .runs
        .iter()
        .enumerate()
        .filter_map(|(replica, run)| {
            let (time, row) = run.last_finite.clone()?;
            let state = Trajectory { shape: run.trajectory.shape, times: vec![time], rows: vec![row] };
            let mut state = trajectory(&state);
            if let Some(map) = state.as_object_mut() {
                map.remove("loss");
                map.insert("replica".into(), json!(replica));
            }
            Some(state)
        })
        .collect();
    let mut rest = json!({
        "dimension": dimension,
        "replicas": ensemble.runs.len(),
        "statistics": {"steps": ensemble.steps},
    });
    if let (false, Some(map)) = (last_finite.is_empty(), rest.as_object_mut()) {
        map.insert("last_finite".into(), json!(last_finite));
    }
    route(name, &ensemble.estimate.mean, ensemble.estimate.standard_error.as_ref(), &ensemble.stop, rest)
}

/// The exit code of a run that ended like this; says so when it is not what was asked for.
fn exit_code(stop: &StopReason) -> u8 {
    match stop {
        stop if stop.as_requested() => 0,
        StopReason::Interrupted { .. } => {
            eprintln!("headflow: {}", stop.describe());
            130
        }
        _ => {
            eprintln!("headflow: {}", stop.describe());
            2
        }
    }
}

/// Prints to standard output. A reader that has gone away, as in `| head`, is no error.
fn say(text: &str) {
    use std::io::{ErrorKind, Write};
    let mut out = std::io::stdout().lock();
    if let Err(error) = out.write_all(text.as_bytes()).and_then(|()| out.flush())
        && error.kind() != ErrorKind::BrokenPipe
    {
        eprintln!("headflow: standard output cannot be written: {error}");
        std::process::exit(2);
    }
}

/// Prints the result: the document for programs, `text` for people.
fn print(request: &Request, document: &Value, text: &str) {
    if request.json {
        say(&to_text(document));
    } else if !request.quiet {
        say(text);
    }
}

/// Draws the comparison of a result folder, when anything was recorded, and names its files.
fn drawn(path: &Path, result: &Value) -> String {
    let recorded = |route: &Value| route["times"].as_array().is_some_and(|t| !t.is_empty());
    if !result["routes"].as_array().is_some_and(|routes| routes.iter().any(recorded)) {
        return String::new();
    }
    // Who interrupts does not wait for a picture, which takes longer than the rest where there are many heads.
    if was_interrupted() {
        return format!(" (drawn by headflow figure comparison --from {})", path.display());
    }
    illustrated(path, || {
        figures::ResultFolder::open(path).and_then(|folder| figures::comparison(&folder, &path.join("comparison")))
    })
}

/// Draws the figure of a finished result, and names its files. One that fails does not undo the result.
fn illustrated(path: &Path, draw: impl FnOnce() -> Result<Vec<PathBuf>, figures::Error>) -> String {
    match draw() {
        Ok(files) => format!(", {}", names(path, &files)),
        Err(error) => {
            eprintln!("headflow: the results are written, but their figure is not: {error}");
            String::new()
        }
    }
}

/// Folders that were made for figures, the innermost first; they go again where nothing is drawn into them.
struct Made(Vec<PathBuf>);

impl Drop for Made {
    fn drop(&mut self) {
        for folder in &self.0 {
            // Fails, as it should, once something is in it.
            let _ = std::fs::remove_dir(folder);
        }
    }
}

/// Makes the folder of figures that are drawn from results.
fn made(out: &Path) -> Result<Made, Error> {
    let missing = out.ancestors().filter(|p| !p.as_os_str().is_empty()).take_while(|p| !p.exists());
    let made = Made(missing.map(Path::to_path_buf).collect());
    std::fs::create_dir_all(out).map_err(|e| Error::unwritable(out.display().to_string(), e))?;
    Ok(made)
}

fn names(folder: &Path, files: &[PathBuf]) -> String {
    files
        .iter()
        .map(|file| file.strip_prefix(folder).unwrap_or(file).display().to_string())
        .collect::<Vec<_>>()
        .join(", ")
}

/// The last state of a trajectory, as a small table.
fn last_state(values: &Trajectory, errors: Option<&Trajectory>) -> String {
    let shape = values.shape;
    let Some((row, time)) = values.rows.last().zip(values.times.last()) else {
        return "nothing was recorded\n".into();
    };
    let error = |q: Quantity| match errors.and_then(|e| e.rows.get(values.rows.len() - 1)) {
        Some(row) => format!(" +- {:.1e}", row[shape.index(q)]),
        None => String::new(),
    };
    let mut text = format!("at tau = {time}: loss {:.6}{}\n", row[0], error(Quantity::Loss));
    for head in 0..shape.heads {
        let m: Vec<String> = (0..shape.features)
            .map(|feature| format!("{:+.4}", row[shape.index(Quantity::Alignment { head, feature })]))
            .collect();
        text += &format!(
            "  head {head}: m = [{}]  r = {:.4}  b = {:+.4}\n",
            m.join(", "),
            row[shape.index(Quantity::Overlap { head, other: head })],
            row[shape.index(Quantity::Bias { head })]
        );
    }
    text
}
