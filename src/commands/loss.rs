//! `headflow loss`: the population loss and its parts at a point.

use headflow::folder::RunFolder;
use headflow::model::{Error, mean_and_error};
use headflow::spec::Spec;
use headflow::theory::moments::{Coordinates, Evaluator, Loss};
use headflow::theory::quasi_monte_carlo::QuasiMonteCarlo;
use serde_json::{Map, Value, json};

use super::{Clock, document, print};
use crate::cli::Request;

/// A number of the document: its name, that of its standard error, and where it is found.
type Part = (&'static str, &'static str, fn(&Loss) -> f64);

pub fn run(request: &Request, spec: &Spec) -> Result<u8, Error> {
    let clock = Clock::start();
    let folder = request.out.as_deref().map(|out| RunFolder::prepare(Some(out), "loss", request.force)).transpose()?;
    let (task, attention, point) = (spec.task()?, spec.attention(), spec.point()?);
    let at = Coordinates::of(&point, &attention);
    let count = spec.points.ok_or_else(|| Error::invalid("points", "is missing"))?;
    // One scramble after the other: each is parallel in itself, and only one is held in memory.
    let losses: Vec<Loss> = (0..spec.scrambles.unwrap_or(1) as u32)
        .map(|scramble| {
            QuasiMonteCarlo::new(&task, point.heads(), attention, count, spec.seed, scramble).map(|q| q.loss(&at))
        })
        .collect::<Result<_, _>>()?;
    let parts: [Part; 3] = [
        ("loss", "standard_error", |l| l.value()),
        ("mean_attention_on_relevant", "mean_attention_on_relevant_standard_error", |l| l.attention_on_relevant),
        ("second_moment", "second_moment_standard_error", |l| l.second_moment),
    ];
    let mut values = Map::new();
    let mut text = String::new();
    for (name, error_name, part) in parts {
        let (value, error) = mean_and_error(losses.iter().map(part));
        values.insert(name.into(), json!(value));
        // A single scramble has no standard error.
        values.insert(error_name.into(), if error.is_finite() { json!(error) } else { Value::Null });
        text += &format!("{name:<28} {value:.8}");
        text += &if error.is_finite() { format!(" +- {error:.1e}\n") } else { "\n".into() };
    }
    values.insert("uniform_loss".into(), json!(task.uniform_loss()));
    text += &format!("{:<28} {:.8} (uniform attention)\n", "1 - 1/L", task.uniform_loss());
    let result = document("loss", spec, &clock, Value::Object(values))?;
    if let Some(mut folder) = folder {
        folder.write_document(&result)?;
        text += &format!("{}: result.json\n", folder.path().display());
    }
    print(request, &result, &text);
    Ok(0)
}
