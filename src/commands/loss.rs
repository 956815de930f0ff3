//! `headflow loss`: the population loss and its parts at a point.

use headflow::model::{Error, mean_and_error};
use headflow::spec::{EvaluatorKind, Spec};
use headflow::theory::moments::{Coordinates, Evaluator, Loss};
use headflow::theory::quasi_monte_carlo::QuasiMonteCarlo;
use serde_json::{Map, Value, json};

use super::{Clock, document, print, wanted_folder};
use crate::cli::Request;
use crate::progress::writing_result;

/// A number of the document: its name, that of its standard error, and where it is found.
type Part = (&'static str, &'static str, fn(&Loss) -> f64);

const PARTS: [Part; 3] = [
    ("loss", "standard_error", |l| l.value()),
    ("mean_attention_on_relevant", "mean_attention_on_relevant_standard_error", |l| l.attention_on_relevant),
    ("second_moment", "second_moment_standard_error", |l| l.second_moment),
];

pub fn run(request: &Request, spec: &Spec) -> Result<u8, Error> {
    let clock = Clock::start();
    let folder = wanted_folder(request, "loss")?;
    let at = Coordinates::of(&spec.point()?, &spec.attention());
    let (mut values, mut text) = match spec.evaluator {
        Some(EvaluatorKind::Quadrature) => exact(spec, &at)?,
        _ => sampled(spec, &at)?,
    };
    let uniform = spec.task()?.uniform_loss();
    values.insert("uniform_loss".into(), json!(uniform));
    text += &format!("{:<28} {uniform:.8} (uniform attention)\n", "1 - 1/L");
    let result = document("loss", spec, &clock, Value::Object(values))?;
    if let Some(mut folder) = folder {
        let _writing = writing_result();
        folder.write_document(&result)?;
        text += &format!("{}: result.json\n", folder.path().display());
    }
    print(request, &result, &text);
    Ok(0)
}

fn exact(spec: &Spec, at: &Coordinates) -> Result<(Map<String, Value>, String), Error> {
    let found = spec.quadrature()?.loss_to_tolerance(at)?;
    let mut values = Map::new();
    let mut text = String::new();
    for (name, _, part) in PARTS {
        values.insert(name.into(), json!(part(&found.loss)));
        text += &format!("{name:<28} {:.12}\n", part(&found.loss));
    }
    values.insert("error_estimate".into(), json!(found.error_estimate));
    text += &format!("{:<28} {:.1e}\n", "error estimate", found.error_estimate);
    Ok((values, text))
}

fn sampled(spec: &Spec, at: &Coordinates) -> Result<(Map<String, Value>, String), Error> {
    let (task, attention) = (spec.task()?, spec.attention());
    let count = spec.points.ok_or_else(|| Error::invalid("points", "is missing"))?;
    // One scramble after the other: each is parallel in itself, and only one is held in memory.
    let losses: Vec<Loss> = (0..spec.scrambles.unwrap_or(1) as u32)
        .map(|scramble| {
            QuasiMonteCarlo::new(&task, spec.head_count(), attention, count, spec.seed, scramble).map(|q| q.loss(at))
        })
        .collect::<Result<_, _>>()?;
    let mut values = Map::new();
    let mut text = String::new();
    for (name, error_name, part) in PARTS {
        let (value, error) = mean_and_error(losses.iter().map(part));
        values.insert(name.into(), json!(value));
        // A single scramble has no standard error.
        let error_value = if error.is_finite() { json!(error) } else { Value::Null };
        if name == "loss" {
            values.insert("error_estimate".into(), error_value.clone());
        }
        values.insert(error_name.into(), error_value);
        text += &format!("{name:<28} {value:.8}");
        text += &if error.is_finite() { format!(" +- {error:.1e}\n") } else { "\n".into() };
    }
    Ok((values, text))
}
