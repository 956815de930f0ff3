//! `headflow bayes`: the Bayes risk, its check, and the floors of the activations.

use headflow::model::{Activation, Attention, Error};
use headflow::spec::Spec;
use headflow::theory::bayes::bayes_risk;
use headflow::theory::floor::{floor, symmetric_part};
use serde_json::{Map, Value, json};

use super::{Clock, document, print, wanted_folder};
use crate::cli::Request;
use crate::progress::writing_result;

pub fn run(request: &Request, spec: &Spec) -> Result<u8, Error> {
    let clock = Clock::start();
    let folder = wanted_folder(request, "bayes")?;
    let task = spec.task()?;
    let found = bayes_risk(&task, spec.tolerance.unwrap_or(1e-10))?;
    let mut text = format!("{:<28} {:.12}\n", "Bayes risk 1 - E[p_eps]", found.risk);
    text += &format!("{:<28} {:.1e}\n", "error estimate", found.error_estimate);
    text += &format!("{:<28} {:.1e}\n", "E[sum_l p_l^2] - E[p_eps]", found.identity);
    text += &format!("{:<28} {:.12} (uniform attention)\n", "1 - 1/L", task.uniform_loss());
    let heads = spec.head_count();
    text += &format!("losses that {heads} heads cannot pass:\n");
    let mut floors = Map::new();
    let own = spec.attention();
    for activation in Activation::ALL {
        // The spec's own rules for its own activation, the defaults for the others.
        let attention = if activation == own.activation { own } else { Attention::from(activation) };
        let value = floor(&task, heads, &attention, found.risk);
        let what = if value > found.risk + 1e-12 { "" } else { " (the Bayes risk)" };
        text += &format!("  {:<26} {value:.12}{what}\n", activation.name());
        floors.insert(activation.name().into(), json!(value));
    }
    let values = json!({
        "bayes_risk": found.risk,
        "error_estimate": found.error_estimate,
        "identity": found.identity,
        "uniform_loss": task.uniform_loss(),
        "symmetric_part": symmetric_part(task.theta()),
        "floors": Value::Object(floors),
    });
    let result = document("bayes", spec, &clock, values)?;
    if let Some(mut folder) = folder {
        let _writing = writing_result();
        folder.write_document(&result)?;
        text += &format!("{}: result.json\n", folder.path().display());
    }
    print(request, &result, &text);
    Ok(0)
}
