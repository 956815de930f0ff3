//! `headflow stability`: growth rates at stationary points, what grows, and when it leaves.

use headflow::folder::RunFolder;
use headflow::model::{Activation, Bias, Error, OrderParameters, Unwatched, Watch};
use headflow::spec::{At, Spec};
use headflow::theory::escape::{Escape, departure, noise_of_mode, rates_along, time_of_growth};
use headflow::theory::moments::Coordinates;
use headflow::theory::quasi_monte_carlo::QuasiMonteCarlo;
use headflow::theory::stability::{Direction, Kind, Stability, check_stationary, linearise, unspecialised, zero};
use headflow::theory::stages::stages;
use nalgebra::DMatrix;
use serde_json::{Value, json};

use super::flow::integrate;
use super::{Clock, document, print};
use crate::cli::Request;
use crate::progress::Progress;

/// Dimensions for which escape times are told, unless the spec names some.
const DIMENSIONS: [usize; 3] = [100, 10_000, 1_000_000];

/// Fresh samples for the noise of a mode.
const NOISE_SAMPLES: usize = 1 << 16;

/// Strength, in units of `1 / sqrt(E theta_f^2)`, at which a mode has left: small, so that growth is
/// still exponential.
const LEFT: f64 = 0.1;

/// Times at which the rate is followed while the overlaps settle.
const RATES: u32 = 24;

/// Times and the rates at them.
type Rates = (Vec<f64>, Vec<f64>);

/// A linearisation and what was asked.
struct Answer {
    name: &'static str,
    description: String,
    gamma: f64,
    stability: Stability,
    /// Feature, law, and with noise the rates along the overlaps' way to the fixed point.
    escapes: Vec<(usize, Escape, Option<Rates>)>,
    predicted: Vec<Value>,
}

pub fn run(request: &Request, spec: &Spec) -> Result<u8, Error> {
    let clock = Clock::start();
    let folder =
        request.out.as_deref().map(|out| RunFolder::prepare(Some(out), "stability", request.force)).transpose()?;
    let evaluators = spec.evaluators()?;
    let mut notes: Vec<String> = Vec::new();
    let answers = match spec.at {
        Some(At::Point) => vec![at_point(spec, &evaluators)?],
        Some(At::Plateaus) => at_plateaus(spec, &evaluators, request.quiet, &mut notes)?,
        _ => at_unspecialised(spec, &evaluators, request.quiet)?,
    };
    let dimensions = spec.dimensions.clone().unwrap_or_else(|| DIMENSIONS.to_vec());
    let mut text: String = answers.iter().map(|answer| answer.text(&dimensions)).collect();
    for note in &notes {
        text += &format!("{note}\n");
    }
    let points: Vec<Value> = answers.iter().map(|answer| answer.json(&dimensions)).collect();
    let result = document("stability", spec, &clock, json!({"points": points, "notes": notes}))?;
    if let Some(mut folder) = folder {
        folder.write_document(&result)?;
        text += &format!("{}: result.json\n", folder.path().display());
    }
    print(request, &result, &text);
    Ok(0)
}

fn at_point(spec: &Spec, evaluators: &[QuasiMonteCarlo]) -> Result<Answer, Error> {
    let point = spec.point()?;
    let noise = spec.gamma / spec.batch as f64;
    // Stationary for gradient flow, or for the flow with its noise.
    let tolerance = spec.stationary_tolerance;
    let gamma = match check_stationary(evaluators, &point, 0.0, tolerance) {
        Ok(()) => 0.0,
        Err(error) if noise == 0.0 => return Err(error),
        Err(_) => check_stationary(evaluators, &point, noise, tolerance).map(|()| spec.gamma)?,
    };
    let at = Coordinates::of(&point, &spec.attention());
    Answer::new("point", "the given point".into(), gamma, spec, evaluators, &at)
}

fn at_unspecialised(spec: &Spec, evaluators: &[QuasiMonteCarlo], quiet: bool) -> Result<Vec<Answer>, Error> {
    let progress = Progress::new("stability", 3, false, quiet);
    let noise = spec.gamma / spec.batch as f64;
    let origin = zero(&evaluators[0])?;
    let mut answers = vec![Answer::new("zero", zero_in_words(spec), 0.0, spec, evaluators, &origin)?];
    progress.advance(1);
    let common = unspecialised(evaluators, 0.0)?;
    // Without a mean of theta it is k = 0 itself.
    if common.m.amax() > 0.0 {
        let words = "unspecialised fixed point of gradient flow: all heads equal".into();
        answers.push(Answer::new("unspecialised", words, 0.0, spec, evaluators, &common)?);
    }
    progress.advance(1);
    if noise > 0.0 {
        let held = unspecialised(evaluators, noise)?;
        let centred = held.m.amax() == 0.0;
        let words = if centred {
            "unspecialised fixed point of the flow with its noise term: all heads equal (modes along the features; \
             others change the noise itself)"
        } else {
            "unspecialised fixed point of the flow with its noise term: all heads equal (minus the Hessian there: terms of \
             order gamma are missing)"
        };
        let name = "unspecialised-with-noise";
        let mut answer = Answer::new(name, words.into(), spec.gamma, spec, evaluators, &held)?;
        if centred {
            answer.stability = answer.stability.along_features();
        }
        answers.push(answer);
    }
    Ok(answers)
}

fn zero_in_words(spec: &Spec) -> String {
    let attention = spec.attention();
    if attention.activation == Activation::Softmax1 && attention.bias == Bias::Trained {
        "k = 0, at the biases where it is stationary".into()
    } else {
        "k = 0".into()
    }
}

fn at_plateaus(
    spec: &Spec,
    evaluators: &[QuasiMonteCarlo],
    quiet: bool,
    notes: &mut Vec<String>,
) -> Result<Vec<Answer>, Error> {
    let noise = spec.gamma / spec.batch as f64;
    // One scramble's flow: several may end in different, equivalent states.
    let flow = integrate(&evaluators[..1], &spec.start()?, &spec.flow_options(), "flow", quiet)?;
    let path = &flow.estimate.mean;
    let found = stages(path, &spec.theta.second_moment(), &spec.criteria())?;
    let mut answers = Vec::new();
    for (index, plateau) in found.plateaus.iter().enumerate() {
        let patterns: Vec<String> = plateau.patterns.iter().map(ToString::to_string).collect();
        let words = format!(
            "plateau {} of the flow, tau = {} to {}: {}",
            index + 1,
            plateau.start,
            plateau.end,
            patterns.join(", ")
        );
        let departure = departure(evaluators, path, plateau, noise, &spec.criteria())?;
        if let Some(passage) = &departure.passage {
            notes.push(format!("plateau {}: linearised where it moves least: {passage}", index + 1));
        }
        let mut answer = Answer::of("plateau", words, spec.gamma, departure.stability);
        let observed = |feature| found.order.iter().find(|l| l.feature == feature).map(|l| l.time);
        answer.predicted = departure
            .learned
            .iter()
            .map(|p| json!({"feature": p.feature, "time": p.time, "rate": p.rate, "observed": observed(p.feature)}))
            .collect();
        answers.push(answer);
    }
    Ok(answers)
}

impl Answer {
    fn of(name: &'static str, description: String, gamma: f64, stability: Stability) -> Self {
        Self { name, description, gamma, stability, escapes: Vec::new(), predicted: Vec::new() }
    }

    fn new(
        name: &'static str,
        description: String,
        gamma: f64,
        spec: &Spec,
        evaluators: &[QuasiMonteCarlo],
        at: &Coordinates,
    ) -> Result<Self, Error> {
        let stability = linearise(evaluators, at)?;
        let mut answer = Self::of(name, description, gamma, stability);
        if answer.stability.at.m.amax() == 0.0 {
            for feature in 0..spec.theta.features() {
                if let Some(escape) = escape(spec, &answer.stability, feature, gamma)? {
                    let rates = match gamma {
                        0.0 => None,
                        _ => Some(settling_rates(spec, &evaluators[0], feature, &escape)?),
                    };
                    answer.escapes.push((feature, escape, rates));
                }
            }
        }
        Ok(answer)
    }

    fn json(&self, dimensions: &[usize]) -> Value {
        let Stability { at, loss, residual, rank, modes } = &self.stability;
        let rows = |matrix: &DMatrix<f64>| -> Vec<Vec<f64>> {
            matrix.row_iter().map(|row| row.iter().copied().collect()).collect()
        };
        let escapes: Vec<Value> = self
            .escapes
            .iter()
            .map(|(feature, escape, rates)| {
                let times: Vec<f64> = dimensions.iter().map(|&d| leaving(escape, rates.as_ref(), d)).collect();
                json!({
                    "feature": feature, "rate": escape.rate, "modes": escape.modes, "slope": escape.slope(),
                    "dimensions": dimensions, "times": times, "standard_deviation": escape.deviation(),
                    "size": escape.size, "noise": escape.noise, "threshold": escape.threshold,
                })
            })
            .collect();
        json!({
            "name": self.name, "description": self.description, "gamma": self.gamma, "loss": loss,
            "m": rows(&at.m), "r": rows(&at.r()), "b": at.b, "rank": rank,
            "gradient_residual": residual, "modes": modes, "escapes": escapes, "predicted": self.predicted,
        })
    }

    fn text(&self, dimensions: &[usize]) -> String {
        let at = &self.stability.at;
        let mut text = format!("{}\n  loss {:.6}", self.description, self.stability.loss);
        if self.gamma > 0.0 {
            text += &format!(", gamma = {}", self.gamma);
        }
        text.push('\n');
        let (r, heads) = (at.r(), at.m.nrows());
        let same = (1..heads).all(|h| at.m.row(h) == at.m.row(0) && (r[(h, h)] - r[(0, 0)]).abs() < 1e-9);
        for head in 0..if same { 1 } else { heads } {
            let m: Vec<String> = at.m.row(head).iter().map(|m| format!("{m:+.4}")).collect();
            let who = if same { "every head".into() } else { format!("head {head}") };
            text += &format!("  {who}: m = [{}]  r = {:.4}  b = {:+.4}\n", m.join(", "), r[(head, head)], at.b[head]);
        }
        text += &format!("  {:>10} {:>9} {:>6}  mode\n", "rate", "error", "modes");
        for mode in &self.stability.modes {
            let error = mode.standard_error.map(|e| format!("{e:.0e}")).unwrap_or_default();
            // Sampling noise around zero has no sign worth showing.
            let rate = if mode.rate.abs() < 5e-6 { 0.0 } else { mode.rate };
            text += &format!("  {rate:>+10.5} {error:>9} {:>6}  {}\n", mode.degeneracy, mode.describe());
        }
        for (feature, escape, rates) in &self.escapes {
            let time = |d: usize| match leaving(escape, rates.as_ref(), d) {
                time if time.is_finite() => format!("{time:.2} at D = {d}"),
                _ => format!("never at D = {d}"),
            };
            let times: Vec<String> = dimensions.iter().map(|&d| time(d)).collect();
            let keys = match rates {
                Some(_) => {
                    format!("random keys of size {}, rate followed as their overlaps settle", escape.size.sqrt())
                }
                None => format!("random keys of size {}, as if small", escape.size.sqrt()),
            };
            text += &format!(
                "  escape along s{} ({keys}): tau = {} (+- {:.2}); slope {:.4} in ln D\n",
                feature + 1,
                times.join(", "),
                escape.deviation(),
                escape.slope()
            );
        }
        for p in &self.predicted {
            text += &format!(
                "  s{} is predicted to be learned at tau = {:.2} (rate {:+.4}){}\n",
                p["feature"].as_u64().unwrap_or(0) + 1,
                p["time"].as_f64().unwrap_or(f64::NAN),
                p["rate"].as_f64().unwrap_or(f64::NAN),
                p["observed"].as_f64().map(|t| format!("; the flow learns it at {t:.2}")).unwrap_or_default()
            );
        }
        text.push('\n');
        text
    }
}

/// Mean escape time at dimension `D`.
fn leaving(escape: &Escape, rates: Option<&Rates>, dimension: usize) -> f64 {
    let growth = escape.growth(dimension as f64);
    match rates {
        Some((times, rates)) => time_of_growth(times, rates, growth),
        None => escape.time(dimension as f64),
    }
}

/// The rate along `feature` while the overlaps of random keys, and the biases, follow the flow at `m = 0`.
pub fn settling_rates(
    spec: &Spec,
    evaluator: &QuasiMonteCarlo,
    feature: usize,
    escape: &Escape,
) -> Result<Rates, Error> {
    let heads = spec.head_count();
    let r = DMatrix::identity(heads, heads) * escape.size;
    let b = spec.b0.clone().unwrap_or_else(|| vec![0.0; heads]);
    let start = OrderParameters::new(DMatrix::zeros(heads, spec.theta.features()), r, b)?;
    let horizon = escape.time(1e8).max(1.0);
    let times: Vec<f64> = (0..=RATES).map(|k| horizon * f64::from(k) / f64::from(RATES)).collect();
    let noise = spec.gamma / spec.batch as f64;
    let rates = rates_along(evaluator, &start, feature, noise, &times, &Unwatched)?;
    Ok((times, rates))
}

/// Escape along `feature` from random keys of size `key_scale` under the learning rate `gamma`, if its
/// specialising modes grow.
pub fn escape(spec: &Spec, stability: &Stability, feature: usize, gamma: f64) -> Result<Option<Escape>, Error> {
    let of_feature = |m: &&headflow::theory::stability::Mode| {
        m.kind == Kind::Specialising && m.direction == Direction::Feature(feature) && m.rate > 0.0
    };
    let Some(mode) = stability.modes.iter().find(of_feature) else { return Ok(None) };
    let (task, attention) = (spec.task()?, spec.attention());
    let size = spec.key_scale * spec.key_scale;
    if size == 0.0 {
        return Ok(None);
    }
    // The noise of a mode is that at the keys themselves: independent, of this size, beside the common one.
    let heads = stability.at.m.nrows();
    let r = stability.at.r() + DMatrix::identity(heads, heads) * size;
    let point = OrderParameters::new(stability.at.m.clone(), r, stability.at.b.clone())?;
    let at = Coordinates::of(&point, &spec.attention());
    let shape = DMatrix::from_fn(heads, task.features(), |h, f| mode.m[h][f]);
    let (noise, _) = noise_of_mode(&task, &attention, &at, &shape, NOISE_SAMPLES, spec.seed)?;
    Ok(Some(Escape {
        rate: mode.rate,
        modes: mode.degeneracy,
        size,
        noise: gamma / spec.batch as f64 * noise,
        threshold: LEFT * spec.theta.second_moment()[(feature, feature)].sqrt(),
    }))
}
