//! What every call must keep: how it ends, what it says, what it leaves, and numbers that are numbers.

use serde_json::Value;

use crate::call::{Call, Outcome};

/// What is wrong with a call: a kind, by which failures are told apart, and the particulars.
#[derive(Debug, Clone, PartialEq)]
pub struct Fault {
    pub kind: &'static str,
    pub what: String,
}

impl Fault {
    pub fn new(kind: &'static str, what: impl Into<String>) -> Self {
        Self { kind, what: what.into() }
    }
}

/// How a call ended well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    Done,
    /// A comparison found theory and simulation to differ.
    Disagreed,
    Refused,
    /// A run that stopped early, and says why, with what it recorded.
    Stopped,
    /// It was long work that told its progress, and stopped when asked to.
    Interrupted,
}

/// Reasons to stop that a run records.
const STOPS: [&str; 6] = ["step-budget", "no-progress", "step-too-small", "not-finite", "left-cone", "diverged"];

/// Checks a call; with `--json`, its document comes along.
pub fn check(call: &Call, outcome: &Outcome) -> Result<(End, Option<Value>), Fault> {
    let (output, error) = (outcome.output.as_str(), outcome.error.as_str());
    for word in ["internal error", "panicked", "overflowed its stack", "memory allocation"] {
        if error.contains(word) || output.contains("panicked") {
            return Err(Fault::new("internal error", error.trim()));
        }
    }
    if outcome.killed {
        return Err(Fault::new("hang", format!("went on for {:.1} s after it was asked to stop", outcome.seconds)));
    }
    if let Some(signal) = outcome.signal() {
        return Err(match outcome.stopped {
            Some(_) => Fault::new("too long", "worked for ten seconds, and keeps nothing when it is stopped"),
            None => Fault::new("abort", format!("ended by signal {signal}: {error}")),
        });
    }
    let one_line = || {
        let lines: Vec<&str> = error.lines().collect();
        match lines[..] {
            [line] if line.starts_with("headflow: ") && line.len() > "headflow: ".len() => Ok(()),
            _ => Err(Fault::new("not one line", format!("{:?} said: {error}", outcome.code()))),
        }
    };
    match (outcome.code(), outcome.stopped) {
        (Some(130), Some(_)) if call.is("loss") || call.is("bayes") => {
            Err(Fault::new("too long", "worked for ten seconds, and shows no progress"))
        }
        (Some(130), Some(_)) => {
            one_line()?;
            readable(outcome)?;
            Ok((End::Interrupted, None))
        }
        (Some(0), _) => {
            if !error.is_empty() {
                return Err(Fault::new("complaint", format!("exit 0, and said: {error}")));
            }
            let document = document(call, outcome)?;
            numbers(call, document.as_ref(), outcome)?;
            Ok((End::Done, document))
        }
        (Some(1), _) if call.is("compare") || call.is("figure") => {
            let document = document(call, outcome)?;
            numbers(call, document.as_ref(), outcome)?;
            Ok((End::Disagreed, document))
        }
        (Some(2), _) => {
            one_line()?;
            if !output.is_empty() {
                return stopped(call, outcome).map(|document| (End::Stopped, document));
            }
            readable(outcome)?;
            let mut left: Vec<_> = outcome.after.symmetric_difference(&outcome.before).collect();
            // A figure of several runs keeps those that it has, whole.
            if call.is("figure") {
                let runs =
                    || outcome.after.iter().filter(|path| path.ends_with("result.json")).filter_map(|p| p.parent());
                left.retain(|path| !runs().any(|run| path.starts_with(run) || run.starts_with(path)));
            }
            if !left.is_empty() {
                return Err(Fault::new("left behind", format!("{left:?} after: {error}")));
            }
            Ok((End::Refused, None))
        }
        (code, _) => Err(Fault::new("exit code", format!("{code:?}: {error}"))),
    }
}

/// A run that failed with a record of it.
fn stopped(call: &Call, outcome: &Outcome) -> Result<Option<Value>, Fault> {
    let document = document(call, outcome)?;
    let Some(document) = document else {
        return if ["flow", "simulate", "compare", "phase", "figure"].iter().any(|c| call.is(c)) {
            Ok(None)
        } else {
            Err(Fault::new("exit 2 with output", outcome.output.clone()))
        };
    };
    let reason = document["stop"]["reason"].as_str().unwrap_or_default();
    let cells = document["failed"].as_array().is_some_and(|f| !f.is_empty());
    if !cells && !STOPS.contains(&reason) {
        return Err(Fault::new("exit 2 with output", format!("stop {reason:?}: {}", outcome.error)));
    }
    numbers(call, Some(&document), outcome)?;
    Ok(Some(document))
}

/// The document on standard output.
fn document(call: &Call, outcome: &Outcome) -> Result<Option<Value>, Fault> {
    readable(outcome)?;
    if outcome.cut {
        return Ok(None);
    }
    if !call.flag("--json") {
        // The heading of a column is no number.
        let output = outcome.output.replace("D -> inf", "");
        let numbers = |c: char| !(c.is_alphanumeric() || c == '_');
        if let Some(word) = output.split(numbers).find(|word| ["NaN", "nan", "inf"].contains(word)) {
            return Err(Fault::new("no number", format!("{word} in: {}", outcome.output)));
        }
        return Ok(None);
    }
    match serde_json::from_str(&outcome.output) {
        Ok(document) => Ok(Some(document)),
        Err(e) => {
            let begin: String = outcome.output.chars().take(200).collect();
            Err(Fault::new("no document", format!("{e}: {begin:?}")))
        }
    }
}

/// What it wrote can be read.
fn readable(outcome: &Outcome) -> Result<(), Fault> {
    let work = outcome.folder.path().join("work");
    for path in outcome.after.difference(&outcome.before) {
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        let full = work.join(path);
        if full.is_dir() {
            continue;
        }
        if name.starts_with(".tmp") {
            return Err(Fault::new("left behind", path.display().to_string()));
        }
        if name.ends_with(".json") {
            let text = std::fs::read_to_string(&full).unwrap_or_default();
            if let Err(e) = serde_json::from_str::<Value>(&text) {
                return Err(Fault::new("no document", format!("{}: {e}", path.display())));
            }
        } else if name.ends_with(".csv") {
            let text = std::fs::read_to_string(&full).unwrap_or_default();
            if let Some(line) = text.lines().find(|l| l.contains("NaN") || l.contains("inf,") || l.ends_with("inf")) {
                return Err(Fault::new("no number", format!("{}: {line}", path.display())));
            }
        }
    }
    Ok(())
}

/// Where a document may say null: where there is no such number, and the documentation says so.
fn may_be_null(path: &[String], document: &Value) -> bool {
    // The name that the number goes by, over all indices.
    let named = path.iter().rev().find(|p| p.parse::<usize>().is_err());
    let last = named.map(String::as_str).unwrap_or_default();
    let within = |name: &str| path.iter().any(|p| p == name);
    let single = document["spec"]["scrambles"].as_u64() == Some(1);
    match last {
        // One sample, or none, has no error.
        "error_estimate" => single,
        "standard_error" if within("maps") => document["spec"]["sequences"].as_u64() == Some(1),
        l if l.ends_with("standard_error") => {
            single || within("pruning") || within("stop") || document["spec"]["evaluator"] == "quadrature"
        }
        "lowest_unconverged" | "support" | "heads_minus_support" | "passage" | "observed" => true,
        "i" | "j" | "extrapolated" | "bias_coefficient" | "worst" => within("verdict") || within("verdicts"),
        "seed" => path.len() == 1,
        // Without noise the overlaps of keys do not settle.
        "settling" => true,
        // A mode that no key leaves along, at that dimension.
        _ if within("escapes") && within("times") => true,
        _ if within("maps") && within("values") => document["failed"].as_array().is_some_and(|f| !f.is_empty()),
        // Where a flow moves too fast, or has too many coordinates, for rates to be told; one that broke off, or none.
        "growth_rate" => within("settled") || within("stop"),
        "settled" => true,
        // Points with fewer modes than others.
        _ if within("spectrum") && within("rates") => true,
        _ => false,
    }
}

/// What is made of a value, at its path.
type See<'a> = dyn FnMut(&[String], &Value) -> Result<(), Fault> + 'a;

fn walk(value: &Value, path: &mut Vec<String>, see: &mut See<'_>) -> Result<(), Fault> {
    see(path, value)?;
    match value {
        Value::Array(list) => {
            for (index, item) in list.iter().enumerate() {
                path.push(index.to_string());
                walk(item, path, see)?;
                path.pop();
            }
        }
        Value::Object(map) => {
            for (name, item) in map {
                path.push(name.clone());
                walk(item, path, see)?;
                path.pop();
            }
        }
        _ => {}
    }
    Ok(())
}

/// Every number is one, and within its range.
fn numbers(call: &Call, document: Option<&Value>, outcome: &Outcome) -> Result<(), Fault> {
    let Some(document) = document else { return Ok(()) };
    if call.is("doctor") {
        return Ok(());
    }
    walk(document, &mut Vec::new(), &mut |path, value| {
        // What was given is not what was found.
        if path.first().is_some_and(|p| p == "spec" || p == "request") {
            return Ok(());
        }
        if value.is_null() && !may_be_null(path, document) {
            return Err(Fault::new("no number", format!("{} is null; {}", path.join("."), outcome.error.trim())));
        }
        let Some(number) = value.as_f64() else { return Ok(()) };
        let last = path.last().map(String::as_str).unwrap_or_default();
        if (last.ends_with("standard_error") || last.contains("error_estimate") || last == "standard_deviation")
            && number < 0.0
        {
            return Err(Fault::new("range", format!("{} is {number}", path.join("."))));
        }
        Ok(())
    })?;
    losses(document)?;
    if call.is("bayes") {
        bayes(document)?;
    }
    if call.is("optimum") {
        optimum(document)?;
    }
    if call.is("prune") {
        prune(document)?;
    }
    Ok(())
}

/// The largest total attention of a spec: 1, or `H` where heads are summed.
pub fn attention(document: &Value) -> f64 {
    let spec = &document["spec"];
    let heads = spec["heads"].as_f64().unwrap_or(1.0);
    if spec["aggregation"] == "sum" && spec["attention"] != "bayes-softmax" { heads } else { 1.0 }
}

/// Losses lie between 0 and `A^2 + 1`, with total attention at most `A`; attention on the relevant token between 0 and `A`.
fn losses(document: &Value) -> Result<(), Fault> {
    let most = attention(document);
    let wrong = |what: &str, value: f64| Err(Fault::new("range", format!("{what} is {value:e}")));
    // Of the population; a finite sample at finite D has a loss of its own.
    let error = document["error_estimate"].as_f64().unwrap_or(1e-6).max(1e-9);
    if document["command"] == "loss" {
        let number = |name: &str| document[name].as_f64().unwrap_or(f64::NAN);
        let (loss, on, second) = (number("loss"), number("mean_attention_on_relevant"), number("second_moment"));
        if !(loss >= -error && loss <= most * most + 1.0 + error) {
            return wrong("loss", loss);
        }
        if !(on >= -error && on <= most + error) {
            return wrong("mean_attention_on_relevant", on);
        }
        if !(second >= -error && second <= most * most + error) {
            return wrong("second_moment", second);
        }
        if (1.0 - 2.0 * on + second - loss).abs() > 1e-12 * (1.0 + most * most) {
            return wrong("loss less its parts", loss - (1.0 - 2.0 * on + second));
        }
    }
    for route in document["routes"].as_array().into_iter().flatten() {
        let theory = route["route"].as_str().is_some_and(|r| r.starts_with("theory"));
        for loss in route["loss"].as_array().into_iter().flatten().filter_map(Value::as_f64) {
            // The rule's own error beside the flow's.
            let slack = document["spec"]["tolerance"].as_f64().unwrap_or(1e-6);
            if loss < -slack || theory && loss > most * most + 1.0 + slack {
                return wrong("a route's loss", loss);
            }
        }
        for r in route["r"].as_array().into_iter().flatten() {
            for head in 0..r.as_array().map_or(0, Vec::len) {
                let own = r[head][head].as_f64().unwrap_or(f64::NAN);
                if !(own >= 0.0) {
                    return wrong("|k_h|^2", own);
                }
            }
        }
    }
    Ok(())
}

fn bayes(document: &Value) -> Result<(), Fault> {
    let number = |name: &str| document[name].as_f64().unwrap_or(f64::NAN);
    let (risk, error, uniform) = (number("bayes_risk"), number("error_estimate"), number("uniform_loss"));
    let tolerance = document["spec"]["tolerance"].as_f64().unwrap_or(f64::NAN);
    if !(error >= 0.0 && error <= tolerance.max(1e-12)) {
        return Err(Fault::new("range", format!("the error estimate {error:e} exceeds the tolerance {tolerance:e}")));
    }
    if !(risk >= -error && risk <= uniform + error) {
        return Err(Fault::new(
            "range",
            format!("the Bayes risk {risk:e} is not within 0 and {uniform}, error {error:e}"),
        ));
    }
    if !(number("identity").abs() <= 10.0 * tolerance.max(1e-12)) {
        return Err(Fault::new("range", format!("the identity fails by {:e}", number("identity"))));
    }
    for (name, floor) in document["floors"].as_object().into_iter().flatten() {
        let floor = floor.as_f64().unwrap_or(f64::NAN);
        if !(floor >= risk - error - 1e-12 && floor <= uniform + error + 1e-9) {
            return Err(Fault::new("range", format!("the floor of {name} is {floor}, the Bayes risk {risk}")));
        }
    }
    Ok(())
}

fn optimum(document: &Value) -> Result<(), Fault> {
    let number = |name: &str| document[name].as_f64().unwrap_or(f64::NAN);
    let (loss, risk, floor) = (number("loss"), number("bayes_risk"), number("floor"));
    let exact = document["spec"]["evaluator"] == "quadrature";
    // On points, a search fits their noise: of the order of that of plain Monte Carlo.
    let slack = if exact {
        10.0 * document["spec"]["tolerance"].as_f64().unwrap_or(f64::NAN)
    } else {
        let points = document["spec"]["points"].as_f64().unwrap_or(f64::NAN);
        6.0 * (attention(document).powi(2) + 1.0) / points.sqrt()
    };
    if !(loss >= floor.max(risk) - slack) {
        return Err(Fault::new(
            "range",
            format!("the loss {loss} is below its floor {floor} or the Bayes risk {risk}"),
        ));
    }
    let minima = document["minima"].as_array().map(Vec::as_slice).unwrap_or_default();
    let all: Vec<f64> = minima.iter().filter_map(|m| m["loss"].as_f64()).collect();
    if all.is_empty() || !all.is_sorted() || all[0] != loss {
        return Err(Fault::new("range", format!("the losses of minima are {all:?}")));
    }
    Ok(())
}

fn prune(document: &Value) -> Result<(), Fault> {
    let heads = document["spec"]["heads"].as_f64().unwrap_or(f64::NAN);
    for system in document["pruning"]["systems"].as_array().into_iter().flatten() {
        for row in system["rows"].as_array().into_iter().flatten() {
            let number = |name: &str| row[name].as_f64().unwrap_or(f64::NAN);
            let (best, mean, worst) = (number("best"), number("mean"), number("worst"));
            let slack = 1e-12 * (1.0 + mean.abs());
            if !(best <= mean + slack && mean <= worst + slack && best >= -1e-2) {
                return Err(Fault::new("range", format!("losses after pruning: {row}")));
            }
        }
        for name in ["by_choice", "together", "at_random"] {
            for count in system[name].as_array().into_iter().flatten().filter_map(Value::as_f64) {
                if !(count < heads) {
                    return Err(Fault::new("range", format!("{count} of {heads} heads can go")));
                }
            }
        }
    }
    Ok(())
}
