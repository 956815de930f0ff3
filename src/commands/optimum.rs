//! `headflow optimum`: the lowest population loss over keys and trained biases.

use headflow::model::Error;
use headflow::phase::lowest;
use headflow::spec::{Spec, rows};
use headflow::theory::bayes::best_bayes_risk;
use headflow::theory::floor::floor;
use headflow::theory::optimum::Minimum;
use serde_json::{Value, json};

use super::{Clock, document, missed, print, wanted_folder};
use crate::cli::Request;
use crate::progress::{Progress, writing_result};

pub fn run(request: &Request, spec: &Spec) -> Result<u8, Error> {
    let clock = Clock::start();
    let folder = wanted_folder(request, "optimum")?;
    let (task, attention, heads) = (spec.task()?, spec.attention(), spec.head_count());
    let evaluators = spec.evaluators()?;
    let progress = Progress::new("optimum", spec.starts.unwrap_or(1) as u64, false, request.quiet);
    let found = lowest(spec, &evaluators, &progress)?;
    drop(progress);
    let best = &found.minima[0];
    let risk = best_bayes_risk(&task, 1e-10)?.risk;
    let bound = floor(&task, heads, &attention, risk);
    let mut text = format!(
        "optimal loss {:.10} of {heads} heads, {} ({} starts, {} evaluations, {:.1} s)\n  Bayes risk {risk:.10}, regret {:.3e}; no keys go below {bound:.10}\n",
        best.loss,
        attention.activation.name(),
        found.starts,
        found.evaluations,
        clock.seconds(),
        best.loss - risk,
    );
    text += &in_words(best);
    text += &format!("  {} distinct minima:\n", found.minima.len());
    for minimum in &found.minima {
        text += &format!(
            "    {:.10}  found {} times, gradient {:.0e}, least curvature outside the spikes {:+.1e}\n",
            minimum.loss, minimum.found, minimum.gradient, minimum.outside
        );
    }
    if found.unconverged > 0 {
        text += &format!("  {} starts did not converge", found.unconverged);
        text += &found.lowest_unconverged.map(|l| format!(" (the lowest at {l:.10})")).unwrap_or_default();
        text.push('\n');
    }
    let missed = missed(spec, &evaluators);
    text += &missed;
    let mut values = of_minimum(best);
    values["note"] = json!(missed.trim_end());
    values["minima"] = found.minima.iter().map(of_minimum).collect();
    values["bayes_risk"] = json!(risk);
    values["regret"] = json!(best.loss - risk);
    values["floor"] = json!(bound);
    values["starts"] = json!(found.starts);
    values["unconverged"] = json!(found.unconverged);
    values["lowest_unconverged"] = json!(found.lowest_unconverged);
    values["evaluations"] = json!(found.evaluations);
    let result = document("optimum", spec, &clock, values)?;
    if let Some(mut folder) = folder {
        let _writing = writing_result();
        folder.write_document(&result)?;
        text += &format!("{}: result.json\n", folder.path().display());
    }
    print(request, &result, &text);
    Ok(0)
}

fn of_minimum(minimum: &Minimum) -> Value {
    json!({
        "loss": minimum.loss, "m": rows(&minimum.at.m), "r": rows(&minimum.at.r()), "b": minimum.at.b,
        "found": minimum.found, "gradient": minimum.gradient, "outside": minimum.outside, "on": minimum.on,
    })
}

fn in_words(minimum: &Minimum) -> String {
    let r = minimum.at.r();
    let mut text = String::new();
    for head in 0..minimum.on.len() {
        let m: Vec<String> = minimum.at.m.row(head).iter().map(|v| format!("{v:+.5}")).collect();
        text += &format!(
            "  head {head}: m = [{}]  r = {:.5}  b = {:+.5}{}\n",
            m.join(", "),
            r[(head, head)],
            minimum.at.b[head],
            if minimum.on[head] { "" } else { "  (off)" }
        );
    }
    text
}
