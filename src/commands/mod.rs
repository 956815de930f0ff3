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
use headflow::model::text::shown;
use headflow::model::{Error, Estimate, Quantity, StopReason, Trajectory, larger, largest_size};
use headflow::phase::Quantity as Drawn;
use headflow::sims::ensemble::Ensemble;
use headflow::spec::{Purpose, Reader, Spec, nearest};
use headflow::theory::evaluators::Averages;
use headflow::theory::flow::Statistics;
use serde_json::{Map, Value, json};

use crate::cli::{FIGURES, Request};
use crate::progress::{interrupted as was_interrupted, remove_if_empty};

/// Who reads the fields of a command line; nobody, where there are none or a figure only draws.
pub fn reader(command: &str, figure: Option<&str>, quantity: Option<&str>) -> Result<Option<Reader>, Error> {
    let purpose = match command {
        "flow" => Purpose::Flow,
        "loss" => Purpose::Loss,
        "simulate" => Purpose::Simulate,
        "compare" => Purpose::Compare,
        "stability" => Purpose::Stability,
        "stages" => Purpose::Stages,
        "prune" => Purpose::Prune,
        "bayes" => Purpose::Bayes,
        "optimum" => Purpose::Optimum,
        "phase" => Purpose::Phase(quantity.map_or(Ok(Drawn::OptimalLoss), Drawn::parse)?),
        "figure" => return Ok(figure.and_then(figure::reader)),
        _ => return Ok(None),
    };
    Ok(Some(purpose.into()))
}

/// Refuses what the command has no use for: a flag is never ignored. Fields of specs have rules of their own.
fn check_flags(request: &Request) -> Result<(), Error> {
    let refuse = |name: &str, problem: String| Err(Error::invalid(name, problem));
    let figure = request.figure.as_deref();
    let name = figure.map_or(request.command.clone(), |name| format!("figure {name}"));
    if request.from.is_some() {
        let given = request.fields.keys().map(String::as_str);
        // The one thing that can be asked of results anew.
        let mut unread = given.filter(|field| request.command != "stages" || !stages::OF_RESULTS.contains(field));
        if let Some(field) = unread.next() {
            return refuse(field, "has no effect on results that exist (--from); leave it out".into());
        }
        for (flag, given) in
            [("resume", request.resume.is_some()), ("force", request.force), ("print-spec", request.print_spec)]
        {
            if given {
                return refuse(flag, "has no use when results that exist are read (--from); leave it out".into());
            }
        }
    }
    if request.resume.is_some() {
        if !matches!(request.command.as_str(), "simulate" | "phase")
            && !figure.is_some_and(|f| phase::FIGURES.contains(&f))
        {
            let resumable = phase::FIGURES.join(", ");
            return refuse("resume", format!("{name} cannot be resumed (simulate, phase, and figure {resumable} can)"));
        }
        for (flag, given) in [("out", request.out.is_some()), ("force", request.force)] {
            if given {
                return refuse(flag, format!("a resumed run goes on in its own folder; leave --{flag} away"));
            }
        }
    }
    if request.force && request.out.is_none() && !request.print_spec {
        return refuse("force", "replaces the result in the folder of --out: name it, or leave this out".into());
    }
    if request.command == "figure" && figure::reader(figure.unwrap_or_default()).is_none() {
        if let Some(field) = request.fields.keys().next() {
            return refuse(field, format!("has no effect on {name}; leave it out"));
        }
        if request.print_spec {
            return refuse("print-spec", format!("{name} has no spec; leave it out"));
        }
    }
    Ok(())
}

/// Runs the requested command; the answer is the exit code.
pub fn run(request: &Request) -> Result<u8, Error> {
    if let Some(name) = request.figure.as_deref()
        && !FIGURES.contains(&name)
    {
        let hint = nearest(name, &FIGURES).map(|n| format!("; did you mean \"{n}\"?")).unwrap_or_default();
        return Err(Error::invalid(
            "figure",
            format!("there is no figure \"{name}\"{hint} (figures: {})", FIGURES.join(", ")),
        ));
    }
    check_flags(request)?;
    match (request.command.as_str(), request.figure.as_deref()) {
        ("doctor", _) => return doctor::run(request),
        ("xsa bias" | "xsa measure", _) => return xsa::run(request),
        ("phase", _) => return phase::run(request),
        ("figure", Some("xsa-bias" | "xsa-model")) => return xsa::figure(request),
        ("figure", Some(name)) if phase::FIGURES.contains(&name) => return phase::figure(request, name),
        _ => {}
    }
    let reader = reader(&request.command, request.figure.as_deref(), request.quantity.as_deref())?;
    // Figures of the dynamics have defaults of their own, a resumed run its own spec.
    let own = request.figure.as_deref().and_then(dynamics::defaults);
    let spec = match (reader, own, &request.resume) {
        // Drawn from a result that exists.
        (None, ..) => Spec::default(),
        (Some(reader), Some(fields), _) => dynamics::completed(fields, reader, request)?,
        (_, None, Some(folder)) => simulate::saved_spec(folder, request)?,
        (Some(reader), None, None) => Spec::completed(&request.fields, reader)?,
    };
    if request.print_spec {
        return print_spec(&spec);
    }
    // Before any work, and any folder; results that exist are only read.
    if let (None, Some(reader)) = (&request.from, reader) {
        cost::check(&spec, reader.purpose, request.memory)?;
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
    print_fields(spec.document()?)
}

fn print_fields(fields: Map<String, Value>) -> Result<u8, Error> {
    say(&to_text(&Value::Object(fields)));
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
///
/// # Errors
/// As [`headed`].
fn document(command: &str, spec: &Spec, clock: &Clock, rest: Value) -> Result<Value, Error> {
    headed(command, Value::Object(spec.document()?), json!(spec.seed), clock, rest)
}

/// The same for a spec of any form.
///
/// # Errors
/// When a number of the result is not finite: JSON has none but null for it, so that is what is looked for.
fn headed(command: &str, spec: Value, seed: Value, clock: &Clock, rest: Value) -> Result<Value, Error> {
    if let Some(place) = missing(&rest, "", String::new()) {
        return Err(Error::not_converged(
            command,
            format!("the result is not a finite number at {place}"),
            "use smaller keys, signals and learning rates, or more samples; nothing is written",
        ));
    }
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
    Ok(Value::Object(document))
}

/// Fields, by the ends of their names, that are null or hold nulls where there is nothing to tell; anywhere else null is a
/// number that is none.
const NULLS: [&str; 28] = [
    // One sample has no standard error.
    "standard_error",
    "best_standard_error",
    "worst_standard_error",
    "mean_attention_on_relevant_standard_error",
    "second_moment_standard_error",
    "curves.standard_errors",
    "curves.slope_standard_error",
    "error_estimate",
    // Dimensions that are too few for a line through them.
    "curves.slope",
    "rows.extrapolated",
    "rows.bias_coefficient",
    // Quantities without indices, verdicts without numbers.
    "rows.i",
    "rows.j",
    "worst",
    // A law without finite support.
    "support",
    "heads_minus_support",
    // What never happens, or is not asked.
    "escapes.times",
    "escapes.settling",
    "predicted.observed",
    "curves.predicted_times",
    "lowest_unconverged",
    // A flow of which nothing is known at its end, and one that drifts too fast for rates to mean anything.
    "settled",
    "settled.growth_rate",
    "stop.growth_rate",
    // Places without a value in a table: modes that are not there, cells that failed.
    "spectrum.rates",
    "maps.values",
    "maps.rates",
    "lines.table",
];

/// The same of a language model: two tokens leave one without the first, heads that are all alike have no correlation.
const NULLS_OF_MODELS: [&str; 5] = [
    "rho_without_first",
    "predictions.correlation",
    // Token ids that were given, and tokens that are not added.
    "tokenizer",
    "tokenizer.begin_token",
    "tokenizer.end_token",
];

/// What was asked for and is only repeated.
const REPEATED: [&str; 4] = ["request", "spec", "theta.sd", "theta.cov"];

/// Where `value`, of the fields `names` at `place`, holds a number that is not finite.
fn missing(value: &Value, names: &str, place: String) -> Option<String> {
    let among = |list: &[&str]| {
        list.iter().any(|end| names.strip_suffix(end).is_some_and(|before| before.is_empty() || before.ends_with('.')))
    };
    match value {
        Value::Null => Some(place).filter(|_| !among(&NULLS) && !among(&NULLS_OF_MODELS) && !among(&REPEATED)),
        Value::Array(all) => all.iter().enumerate().find_map(|(i, v)| missing(v, names, format!("{place}[{i}]"))),
        Value::Object(_) if among(&REPEATED[..2]) => None,
        Value::Object(map) => map.iter().find_map(|(key, v)| {
            let below = |outer: &str| if outer.is_empty() { key.clone() } else { format!("{outer}.{key}") };
            missing(v, &below(names), below(&place))
        }),
        _ => None,
    }
}

/// A line on a quadrature that could not keep its tolerance everywhere.
fn missed(spec: &Spec, evaluators: &[Averages]) -> String {
    missed_by(spec, evaluators.iter().filter_map(Averages::missed).reduce(larger))
}

/// The same for the largest error above the tolerance, if there is one.
fn missed_by(spec: &Spec, worst: Option<f64>) -> String {
    let Some(worst) = worst else { return String::new() };
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
        let largest = |from: usize, to: usize| largest_size(errors.rows.iter().flat_map(|r| &r[from..to]));
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
            complain(&stop.describe());
            130
        }
        _ => {
            complain(&stop.describe());
            2
        }
    }
}

/// Says on standard error what went wrong: one line, whatever a file or an argument put into it.
pub fn complain(message: &str) {
    eprintln!("headflow: {}", shown(message));
}

/// Prints to standard output; what names out of files and arguments put into a line stays in it and commands no
/// terminal. A reader that has gone away, as in `| head`, is no error.
fn say(text: &str) {
    use std::io::{BufWriter, ErrorKind, Write};
    let mut out = BufWriter::new(std::io::stdout().lock());
    let mut lines = text.split_inclusive('\n').map(|line| match line.strip_suffix('\n') {
        Some(line) => (shown(line), "\n"),
        None => (shown(line), ""),
    });
    if let Err(error) = lines
        .try_for_each(|(line, end)| out.write_all(line.as_bytes()).and_then(|()| out.write_all(end.as_bytes())))
        .and_then(|()| out.flush())
        && error.kind() != ErrorKind::BrokenPipe
    {
        complain(&format!("standard output cannot be written: {error}"));
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
            let error = error.to_string();
            complain(&format!("the results are written, but their figure is not: {error}"));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli;

    /// The words of a line as a shell splits them; enough for the examples.
    fn words(line: &str) -> Vec<String> {
        let mut all = vec![String::new()];
        let mut quoted = false;
        for c in line.chars() {
            match c {
                '"' => quoted = !quoted,
                ' ' if !quoted => all.push(String::new()),
                c => all.last_mut().unwrap().push(c),
            }
        }
        all.into_iter().filter(|word| !word.is_empty()).collect()
    }

    /// No example of the help is refused.
    #[test]
    fn examples_of_the_help_are_accepted() {
        let build = cli::build();
        let helps = build.get_subcommands().chain([&build]).filter_map(|c| c.get_after_help().map(ToString::to_string));
        let mut seen = 0;
        for help in helps {
            // A description stands apart from its command.
            let lines = help.lines().map(|line| line.trim().split("   ").next().unwrap_or_default());
            for line in lines.filter(|line| line.starts_with("headflow ")) {
                let line = line.split(" > ").next().unwrap_or_default();
                let matches = cli::build().try_get_matches_from(words(line)).unwrap_or_else(|e| panic!("{line}: {e}"));
                if ["--spec ", "--from ", "--resume ", " doctor", " xsa "].iter().any(|other| line.contains(other)) {
                    continue;
                }
                let request = cli::request(&matches).unwrap_or_else(|e| panic!("{line}: {e}"));
                let request = Request { print_spec: true, ..request };
                assert_eq!(run(&request).unwrap_or_else(|e| panic!("{line}: {e}")), 0);
                seen += 1;
            }
        }
        assert!(seen > 40, "{seen}");
    }

    /// A number that is not finite is null in JSON: no document goes out with one, and the error says where it is.
    #[test]
    fn a_document_holds_no_number_that_is_none() {
        let of = |rest: Value| document("stability", &Spec::default(), &Clock::start(), rest);
        for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            for (rest, place) in [
                (json!({"loss": value}), "loss"),
                (json!({"points": [{"modes": [{"rate": 1.0}, {"rate": value}]}]}), "points[0].modes[1].rate"),
                (json!({"routes": [{"times": [0.0, 1.0], "m": [[[0.5]], [[value]]]}]}), "routes[0].m[1][0][0]"),
                (json!({"minima": [{"outside": value}]}), "minima[0].outside"),
                (json!({"verdict": {"rows": [{"standard_errors": value}]}}), "verdict.rows[0].standard_errors"),
            ] {
                let error = of(rest).unwrap_err();
                assert!(matches!(error, Error::NotConverged { .. }), "{error}");
                assert!(error.to_string().contains(&format!("at {place};")), "{error}");
            }
            // "Never" is a time of escape, and an unknown error is none.
            of(json!({"points": [{"escapes": [{"times": [1.0, value]}]}], "standard_error": value})).unwrap();
        }
        of(json!({"request": {"y": null}, "maps": [{"values": [[1.0, null]]}], "lowest_unconverged": null})).unwrap();
        // The name must be the field's whole name.
        assert!(of(json!({"other_support": null})).is_err() && of(json!({"support": null})).is_ok());
    }

    /// A quadrature that missed its tolerance is told of by the largest of its errors.
    #[test]
    fn the_largest_error_above_the_tolerance_is_told() {
        let spec = Spec { tolerance: Some(1e-6), ..Spec::default() };
        assert_eq!(missed_by(&spec, None), "");
        assert!(missed_by(&spec, Some(2e-5)).contains("errors up to 2.0e-5"));
    }
}
