//! The same number by another way: another evaluator, a simulation of the posterior, another number of threads, the spec
//! that a result holds.

use headflow::model::largest;
use serde_json::{Value, json};

use crate::call::{Call, Words};
use crate::check::{End, Fault, attention, check};
use crate::draw::Draw;

/// Events as rare as `RARE / n` are missed by all of `n` samples with probability `e^-RARE`, and then by their error too.
const RARE: f64 = 25.0;

/// Deviations in standard errors: Student's t with 15 degrees of freedom exceeds this with probability 2e-8.
const MOST_DEVIATION: f64 = 10.0;

/// Checks a call that succeeded by a second one, where there is one; says whether there was.
pub fn check_again(call: &Call, document: &Value, draw: &mut Draw, program: &str) -> Result<bool, Fault> {
    match call.command[0].as_str() {
        "loss" => loss(document, program),
        "bayes" => bayes(document, draw),
        "optimum" => optimum(document, program),
        "flow" => flow(document, program),
        "stability" => stability(document, program),
        _ => Ok(false),
    }
}

fn words(parts: &[(&str, String)]) -> Vec<Words> {
    parts.iter().map(|(name, value)| vec![format!("--{name}"), value.clone()]).collect()
}

fn rows(matrix: &Value) -> String {
    let row = |row: &Value| row.as_array().into_iter().flatten().map(Value::to_string).collect::<Vec<_>>().join(",");
    matrix.as_array().into_iter().flatten().map(row).collect::<Vec<_>>().join(";")
}

/// The loss of `spec`'s task and attention at a point, by `evaluator`; none where that cannot be had.
fn loss_at(spec: &Value, [m, r, b]: [&Value; 3], evaluator: &[(&str, &str)], program: &str) -> Option<Value> {
    let text = |name: &str| spec[name].as_str().unwrap_or_default().to_string();
    let mut flags = words(&[
        ("length", spec["length"].to_string()),
        ("theta", spec["theta"].to_string()),
        ("attention", text("attention")),
        ("bias", text("bias")),
        ("aggregation", text("aggregation")),
        ("m", rows(m)),
        ("r", rows(r)),
    ]);
    if spec["bias"] == "trained" {
        flags.push(vec!["--b".into(), rows(&json!([b]))]);
    }
    flags.extend(evaluator.iter().map(|(name, value)| vec![format!("--{name}"), value.to_string()]));
    let call = Call { command: vec!["loss".into()], flags, ..Call::default() }.with(&["--json"]);
    match check(&call, &call.run(program)) {
        Ok((End::Done, document)) => document,
        _ => None,
    }
}

fn number(document: &Value, name: &str) -> f64 {
    document[name].as_f64().unwrap_or(f64::NAN)
}

/// Points and scrambles of the second evaluator.
const SAMPLED: [(&str, &str); 3] = [("evaluator", "qmc"), ("points", "8192"), ("scrambles", "16")];
const SAMPLES: f64 = 8192.0 * 16.0;

/// Quadrature against quasi-Monte Carlo.
fn loss(document: &Value, program: &str) -> Result<bool, Fault> {
    let spec = &document["spec"];
    let size =
        number(spec, "length") * (number(spec, "heads") + spec["m"][0].as_array().map_or(1.0, |f| f.len() as f64));
    if size > 400.0 {
        return Ok(false);
    }
    let exact = spec["evaluator"] == "quadrature";
    let other: &[(&str, &str)] = if exact { &SAMPLED } else { &[("evaluator", "quadrature"), ("tolerance", "1e-6")] };
    let Some(second) = loss_at(spec, [&spec["m"], &spec["r"], &spec["b"]], other, program) else { return Ok(false) };
    let (quadrature, sampled) = if exact { (document, &second) } else { (&second, document) };
    let samples = if exact { SAMPLES } else { number(spec, "points") * number(spec, "scrambles") };
    let scrambles = if exact { 16.0 } else { number(spec, "scrambles") };
    let most = attention(document);
    for (name, error, size) in [
        ("loss", "standard_error", most * most + 1.0),
        ("mean_attention_on_relevant", "mean_attention_on_relevant_standard_error", most),
        ("second_moment", "second_moment_standard_error", most * most),
    ] {
        // Few scrambles do not tell their own error: that of plain Monte Carlo is a bound.
        let noise = if scrambles < 8.0 { 6.0 * size / samples.sqrt() } else { MOST_DEVIATION * number(sampled, error) };
        let allowed = number(quadrature, "error_estimate") + noise + size * RARE / samples;
        let difference = number(quadrature, name) - number(sampled, name);
        if !(difference.abs() <= allowed) {
            return Err(Fault::new(
                "second evaluator",
                format!(
                    "{name} is {} by quadrature (error {:e}), {} by quasi-Monte Carlo: {difference:e} apart, {allowed:.1e} allowed",
                    number(quadrature, name),
                    number(quadrature, "error_estimate"),
                    number(sampled, name)
                ),
            ));
        }
    }
    Ok(true)
}

/// The posterior weight `ln E exp(theta . x - |theta|^2 / 2)` of a token; none where the test has no formula.
fn weight(theta: &Value, x: &[f64]) -> Option<f64> {
    let list = |name: &str| -> Option<Vec<f64>> { theta[name].as_array()?.iter().map(Value::as_f64).collect() };
    // ln cosh and the like, for any size.
    let ln_cosh = |v: f64| v.abs() + (-2.0 * v.abs()).exp().ln_1p() - std::f64::consts::LN_2;
    match theta["kind"].as_str()? {
        "flip" => Some(list("nu")?.iter().zip(x).map(|(nu, x)| ln_cosh(nu * x) - 0.5 * nu * nu).sum()),
        "gaussian" => {
            let (mean, sd) = (list("mean")?, list("sd")?);
            // theta = mean + sd g: a Gaussian integral in each feature.
            let one = |((mean, sd), x): ((&f64, &f64), &f64)| {
                let v = sd * sd;
                (mean * x - 0.5 * mean * mean + 0.5 * v * x * x) / (1.0 + v) - 0.5 * v.ln_1p()
            };
            Some(mean.iter().zip(&sd).zip(x).map(one).sum())
        }
        "discrete" => {
            let points: Vec<Vec<f64>> = serde_json::from_value(theta["points"].clone()).ok()?;
            let logs: Vec<f64> = points
                .iter()
                .zip(list("weights")?)
                .map(|(p, w)| w.ln() + p.iter().zip(x).map(|(t, x)| t * x - 0.5 * t * t).sum::<f64>())
                .collect();
            let most = largest(&logs);
            Some(most + logs.iter().map(|l| (l - most).exp()).sum::<f64>().ln())
        }
        _ => None,
    }
}

fn sample(theta: &Value, draw: &mut Draw) -> Option<Vec<f64>> {
    let list = |name: &str| -> Option<Vec<f64>> { theta[name].as_array()?.iter().map(Value::as_f64).collect() };
    match theta["kind"].as_str()? {
        "flip" => Some(list("nu")?.into_iter().map(|nu| if draw.chance(0.5) { nu } else { -nu }).collect()),
        "gaussian" => Some(list("mean")?.iter().zip(list("sd")?).map(|(m, s)| m + s * draw.normal()).collect()),
        "discrete" => {
            let points: Vec<Vec<f64>> = serde_json::from_value(theta["points"].clone()).ok()?;
            let mut left = draw.unit();
            for (point, weight) in points.iter().zip(list("weights")?) {
                left -= weight;
                if left < 0.0 {
                    return Some(point.clone());
                }
            }
            points.last().cloned()
        }
        _ => None,
    }
}

/// The Bayes risk against a simulation of tokens and their posterior.
fn bayes(document: &Value, draw: &mut Draw) -> Result<bool, Fault> {
    let spec = &document["spec"];
    let (length, theta) = (number(spec, "length"), &spec["theta"]);
    if length > 50.0 {
        return Ok(false);
    }
    let samples = 4000;
    let mut risks = Vec::new();
    for _ in 0..samples {
        let Some(signal) = sample(theta, draw) else { return Ok(false) };
        // Sizes whose squares leave the numbers: not for this twin.
        if signal.len() > 8 || signal.iter().any(|v| v.abs() > 1e6 || v.abs() < 1e-6 && *v != 0.0) {
            return Ok(false);
        }
        let mut logs = Vec::new();
        for l in 0..length as usize {
            let x: Vec<f64> = signal.iter().map(|s| draw.normal() + if l == 0 { *s } else { 0.0 }).collect();
            let Some(log) = weight(theta, &x).filter(|w| w.is_finite()) else { return Ok(false) };
            logs.push(log);
        }
        let most = largest(&logs);
        let all: f64 = logs.iter().map(|l| (l - most).exp()).sum();
        risks.push(1.0 - (logs[0] - most).exp() / all);
    }
    let n = f64::from(samples);
    let mean = risks.iter().sum::<f64>() / n;
    let error = (risks.iter().map(|r| (r - mean).powi(2)).sum::<f64>() / n / (n - 1.0)).sqrt();
    let allowed = 6.0 * error + RARE / n + number(document, "error_estimate");
    let risk = number(document, "bayes_risk");
    if !((risk - mean).abs() <= allowed) {
        return Err(Fault::new(
            "second evaluator",
            format!("the Bayes risk is {risk}, by simulation {mean} +- {error:.1e}"),
        ));
    }
    Ok(true)
}

/// The loss at a minimum, by `loss`.
fn optimum(document: &Value, program: &str) -> Result<bool, Fault> {
    let spec = &document["spec"];
    if spec["evaluator"] != "quadrature" {
        return Ok(false);
    }
    let tolerance = number(spec, "tolerance");
    let text = format!("{tolerance:e}");
    let point = [&document["m"], &document["r"], &document["b"]];
    let Some(second) = loss_at(spec, point, &[("evaluator", "quadrature"), ("tolerance", &text)], program) else {
        return Ok(false);
    };
    same("the loss at the minimum", number(document, "loss"), number(&second, "loss"), 2.0 * tolerance)
}

/// The loss at the end of an exact flow, by `loss`.
fn flow(document: &Value, program: &str) -> Result<bool, Fault> {
    let spec = &document["spec"];
    let route = &document["routes"][0];
    let last = |name: &str| route[name].as_array().and_then(|all| all.last()).cloned().unwrap_or_default();
    if spec["evaluator"] != "quadrature" || document["note"].as_str().is_some_and(|n| !n.is_empty()) {
        return Ok(false);
    }
    let tolerance = number(spec, "tolerance");
    let text = format!("{tolerance:e}");
    let point = [&last("m"), &last("r"), &last("b")];
    let Some(second) = loss_at(spec, point, &[("evaluator", "quadrature"), ("tolerance", &text)], program) else {
        return Ok(false);
    };
    same("the loss at the end", last("loss").as_f64().unwrap_or(f64::NAN), number(&second, "loss"), 2.0 * tolerance)
}

/// The largest growth rate at k = 0, by quadrature, against sampled averages.
fn stability(document: &Value, program: &str) -> Result<bool, Fault> {
    let spec = &document["spec"];
    let size = number(spec, "length") * number(spec, "heads");
    // Differences of gradients magnify the error of looser quadratures.
    if spec["at"] != "unspecialised"
        || spec["evaluator"] != "quadrature"
        || number(spec, "tolerance") > 1e-8
        || size > 200.0
    {
        return Ok(false);
    }
    let text = |name: &str| spec[name].as_str().unwrap_or_default().to_string();
    let mut flags = words(&[
        ("length", spec["length"].to_string()),
        ("heads", spec["heads"].to_string()),
        ("theta", spec["theta"].to_string()),
        ("attention", text("attention")),
        ("bias", text("bias")),
        ("aggregation", text("aggregation")),
        ("gamma", "0".into()),
    ]);
    flags.extend(SAMPLED.iter().map(|(name, value)| vec![format!("--{name}"), value.to_string()]));
    let call = Call { command: vec!["stability".into()], flags, ..Call::default() }.with(&["--json"]);
    let Ok((End::Done, Some(second))) = check(&call, &call.run(program)) else { return Ok(false) };
    let rate = |document: &Value, name: &str| number(&document["points"][0]["modes"][0], name);
    let (exact, sampled, error) = (rate(document, "rate"), rate(&second, "rate"), rate(&second, "standard_error"));
    let allowed = MOST_DEVIATION * error + 1e-3 * exact.abs() + 1e-4;
    if !((exact - sampled).abs() <= allowed) {
        return Err(Fault::new(
            "second evaluator",
            format!("the largest rate is {exact} by quadrature, {sampled} +- {error:.1e} by quasi-Monte Carlo"),
        ));
    }
    Ok(true)
}

fn same(what: &str, first: f64, second: f64, allowed: f64) -> Result<bool, Fault> {
    if (first - second).abs() <= allowed {
        return Ok(true);
    }
    Err(Fault::new("second evaluator", format!("{what} is {first}, and {second} by \"loss\": {allowed:.1e} allowed")))
}

/// What of a document belongs to the numbers.
fn numbers(document: &Value) -> Value {
    let mut document = document.clone();
    if let Some(map) = document.as_object_mut() {
        ["started_unix_seconds", "wall_time_seconds", "threads", "spec"].iter().for_each(|name| {
            map.remove(*name);
        });
    }
    document
}

/// The same bits with another number of threads, or from the spec that the result holds.
pub fn check_bits(call: &Call, document: &Value, draw: &mut Draw, program: &str) -> Result<bool, Fault> {
    let runnable = ["flow", "loss", "simulate", "compare", "stability", "stages", "prune", "bayes", "optimum"];
    let own = runnable.iter().any(|c| call.is(c)) && !call.flag("--from") && !call.flag("--resume");
    let mut again = call.clone();
    let from_spec = own && draw.chance(0.5);
    if from_spec {
        let Some(fields) = document["spec"].as_object() else { return Ok(false) };
        again.file =
            Some((String::new(), fields.iter().map(|(name, value)| (name.clone(), value.to_string())).collect()));
        again.flags.retain(|words| words[0] == "--threads" || words[0] == "--json");
    } else if call.is("from") || call.is("doctor") || call.flag("--from") || call.flag("--resume") {
        return Ok(false);
    } else {
        let threads = if call.flag("--threads") { "2" } else { "1" };
        again.flags.retain(|words| words[0] != "--threads");
        again = again.with(&["--threads", threads]);
    }
    let outcome = again.run(program);
    let what = if from_spec { "from its own spec" } else { "with other threads" };
    match check(&again, &outcome) {
        Ok((End::Interrupted, _)) => Ok(false),
        Ok((_, Some(second))) if numbers(&second) == numbers(document) => Ok(true),
        Ok((_, Some(_))) => Err(Fault::new("other bits", format!("{what}: {}", again.line()))),
        Ok((end, None)) => Err(Fault::new("other bits", format!("{what}: {end:?}, {}", outcome.error.trim()))),
        Err(fault) => Err(fault),
    }
}
