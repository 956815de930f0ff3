//! The theory against values computed by independent programs (`tests/reference/`, other language,
//! other method), through the same specs that a user would write.

use headflow::agreement::limit;
use headflow::model::{Quantity, Unwatched, larger, mean_and_error};
use headflow::spec::{Purpose, Spec};
use headflow::theory::bayes::bayes_risk;
use headflow::theory::flow::average;
use headflow::theory::moments::{Coordinates, Evaluator};
use headflow::theory::quasi_monte_carlo::QuasiMonteCarlo;
use serde_json::{Map, Value};

fn cases(text: &str) -> Vec<Value> {
    let file: Value = serde_json::from_str(text).unwrap();
    file["cases"].as_array().unwrap().clone()
}

/// A reference case's fields are a spec; its results are not fields.
fn spec(case: &Value, results: &[&str], purpose: Purpose) -> Spec {
    let fields: Map<String, Value> = case
        .as_object()
        .unwrap()
        .iter()
        .filter(|(k, _)| !results.contains(&k.as_str()))
        .map(|(k, v)| (k.clone(), v.clone()))
        .collect();
    Spec::from_map(&fields).unwrap().complete(purpose).unwrap()
}

/// Every trajectory within 2e-2 in m, r and b, and 1e-3 in the loss, at the default points and scrambles; and the largest of
/// all deviations within the limit for their number, in combined standard errors.
#[test]
fn trajectories() {
    let (mut looks, mut worst) = (0, 0.0f64);
    for case in cases(include_str!("reference/flow.json")) {
        let results = ["m", "r", "b", "loss", "max_standard_error", "max_standard_error_loss"];
        let spec = spec(&case, &results, Purpose::Flow);
        let flow =
            average(&spec.evaluators().unwrap(), &spec.start().unwrap(), &spec.flow_options(), &Unwatched).unwrap();
        let (mean, errors) = (&flow.estimate.mean, flow.estimate.standard_error.as_ref().unwrap());
        let name = format!("{:?} {:?} gamma {}", spec.attention, spec.bias, spec.gamma);
        assert_eq!(mean.times, spec.recorded_times(), "{name}");
        let their_error =
            |loss: bool| case[if loss { "max_standard_error_loss" } else { "max_standard_error" }].as_f64().unwrap();
        let (mut largest, mut sigmas) = (0.0f64, 0.0f64);
        for t in 0..mean.times.len() {
            for (k, quantity) in mean.shape.quantities().enumerate() {
                let (reference, bound, loss) = match quantity {
                    Quantity::Loss => (&case["loss"][t], 1e-3, true),
                    Quantity::Alignment { head, feature } => (&case["m"][t][head][feature], 2e-2, false),
                    Quantity::Overlap { head, other } => (&case["r"][t][head][other], 2e-2, false),
                    Quantity::Bias { .. } if case["b"].is_null() => continue,
                    Quantity::Bias { head } => (&case["b"][t][head], 2e-2, false),
                };
                let difference = (mean.rows[t][k] - reference.as_f64().unwrap()).abs();
                let error = errors.rows[t][k].hypot(their_error(loss));
                largest = larger(largest, difference / bound);
                sigmas = larger(sigmas, difference / error);
                looks += 1;
                assert!(difference <= bound, "{name} {quantity:?} at {}: off by {difference}", mean.times[t]);
            }
        }
        println!("{name}: {:.0}% of the bound, {sigmas:.1} standard errors", 100.0 * largest);
        worst = larger(worst, sigmas);
    }
    assert!(worst <= limit(looks), "the largest of {looks} deviations is {worst:.2} standard errors");
}

/// Population losses and their parts within 5 reported standard errors.
#[test]
fn losses() {
    for case in cases(include_str!("reference/loss.json")) {
        let results = ["loss", "mean_attention_on_relevant", "second_moment", "refinement_difference"];
        let mut fields = case.clone();
        fields["evaluator"] = "qmc".into();
        let spec = spec(&fields, &results, Purpose::Loss);
        let point = spec.point().unwrap();
        let (task, attention) = (spec.task().unwrap(), spec.attention());
        let at = Coordinates::of(&point, &attention);
        let losses: Vec<_> = (0..spec.scrambles.unwrap() as u32)
            .map(|scramble| {
                QuasiMonteCarlo::new(&task, point.heads(), attention, spec.points.unwrap(), spec.seed, scramble)
                    .unwrap()
                    .loss(&at)
            })
            .collect();
        let parts = [
            ("loss", mean_and_error(losses.iter().map(|l| l.value()))),
            ("mean_attention_on_relevant", mean_and_error(losses.iter().map(|l| l.attention_on_relevant))),
            ("second_moment", mean_and_error(losses.iter().map(|l| l.second_moment))),
        ];
        for (name, (value, error)) in parts {
            let difference = (value - case[name].as_f64().unwrap()).abs();
            println!(
                "L = {} {:?} {name}: {:.1} standard errors of {error:.1e}",
                spec.length,
                spec.attention,
                difference / error
            );
            assert!(difference <= 5.0 * error, "{case}: {name} is {value} +- {error}");
            assert!(error < 2e-3, "{case}: {name} has the error {error}");
        }
    }
}

/// The same losses by quadrature, and Bayes risks, to 1e-10 (or what the reference is good for).
#[test]
fn exact_numbers() {
    for case in cases(include_str!("reference/loss.json")) {
        let results = ["loss", "mean_attention_on_relevant", "second_moment", "refinement_difference"];
        let mut fields = case.clone();
        fields["tolerance"] = 1e-11.into();
        let spec = spec(&fields, &results, Purpose::Loss);
        let at = Coordinates::of(&spec.point().unwrap(), &spec.attention());
        let found = spec.quadrature().unwrap().loss_to_tolerance(&at).unwrap().loss;
        let bound = case["refinement_difference"].as_f64().unwrap().max(1e-10);
        let parts = [found.value(), found.attention_on_relevant, found.second_moment];
        for (name, value) in results.iter().zip(parts) {
            assert!((value - case[*name].as_f64().unwrap()).abs() <= bound, "{case}: {name} = {value}");
        }
    }
    for case in cases(include_str!("reference/bayes_risk.json")) {
        let spec = spec(&case, &["bayes_risk", "precision"], Purpose::Bayes);
        let found = bayes_risk(&spec.task().unwrap(), 1e-11).unwrap();
        assert!((found.risk - case["bayes_risk"].as_f64().unwrap()).abs() <= 1e-10, "{case}: {found:?}");
    }
}
