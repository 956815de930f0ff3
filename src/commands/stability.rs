//! `headflow stability`: growth rates at stationary points, what grows, and when it leaves.

use headflow::model::{Activation, Bias, Error, Watch, largest_size};
use headflow::spec::{At, Spec, rows};
use headflow::theory::escape::{Escape, Rates, departure};
use headflow::theory::evaluators::Averages;
use headflow::theory::moments::{Coordinates, Watched};
use headflow::theory::stability::{Stability, check_stationary, linearise, unspecialised, zero};
use headflow::theory::stages::stages;
use serde_json::{Value, json};

use super::flow::integrate;
use super::{Clock, document, missed, print, wanted_folder};
use crate::cli::Request;
use crate::progress::{Interruptible, Progress, writing_result};

/// Dimensions for which escape times are told, unless the spec names some.
const DIMENSIONS: [usize; 3] = [100, 10_000, 1_000_000];

/// Strength, in units of `1 / sqrt(E theta_f^2)`, at which a mode has left: small, so that growth is
/// still exponential.
const LEFT: f64 = 0.1;

/// Averages that Ctrl-C stops.
type Points<'a> = Watched<'a, Averages>;

/// The escape of one family of modes.
struct Leaving {
    /// The family in words.
    mode: String,
    /// The feature that it is mostly along.
    feature: usize,
    escape: Escape,
    /// With noise: the rates while the overlaps of the keys settle.
    rates: Option<Rates>,
}

impl Leaving {
    fn time(&self, dimension: usize) -> f64 {
        match &self.rates {
            Some(rates) => rates.time(&self.escape, dimension as f64),
            None => self.escape.time(dimension as f64),
        }
    }
}

/// A linearisation and what was asked.
struct Answer {
    name: &'static str,
    description: String,
    gamma: f64,
    stability: Stability,
    escapes: Vec<Leaving>,
    predicted: Vec<Value>,
}

pub fn run(request: &Request, spec: &Spec) -> Result<u8, Error> {
    let clock = Clock::start();
    let folder = wanted_folder(request, "stability")?;
    let unwatched = spec.evaluators()?;
    let evaluators = Watched::all(&unwatched, &Interruptible);
    let mut notes: Vec<String> = Vec::new();
    let answers = match spec.at {
        Some(At::Point) => vec![at_point(spec, &evaluators)?],
        Some(At::Plateaus) => at_plateaus(spec, &evaluators, request.quiet, &mut notes)?,
        _ => at_unspecialised(spec, &evaluators, request.quiet, &mut notes)?,
    };
    notes.extend(Some(missed(spec, &unwatched).trim_end().to_string()).filter(|note| !note.is_empty()));
    let dimensions = spec.dimensions.clone().unwrap_or_else(|| DIMENSIONS.to_vec());
    let mut text: String = answers.iter().map(|answer| answer.text(&dimensions)).collect();
    for note in &notes {
        text += &format!("{note}\n");
    }
    let points: Vec<Value> = answers.iter().map(|answer| answer.json(&dimensions)).collect();
    let result = document("stability", spec, &clock, json!({"points": points, "notes": notes}))?;
    if let Some(mut folder) = folder {
        let _writing = writing_result();
        folder.write_document(&result)?;
        text += &format!("{}: result.json\n", folder.path().display());
    }
    print(request, &result, &text);
    Ok(0)
}

fn at_point(spec: &Spec, evaluators: &[Points<'_>]) -> Result<Answer, Error> {
    let point = spec.point()?;
    let noise = spec.gamma / spec.batch as f64;
    // Stationary for gradient flow, or for the flow with its noise.
    let tolerance = spec.stationary_tolerance;
    let gamma = match check_stationary(evaluators, &point, 0.0, tolerance) {
        Ok(()) => 0.0,
        Err(error) if noise == 0.0 || matches!(error, Error::Interrupted { .. }) => return Err(error),
        Err(_) => check_stationary(evaluators, &point, noise, tolerance).map(|()| spec.gamma)?,
    };
    let at = Coordinates::of(&point, &spec.attention());
    Answer::new("point", "the given point".into(), gamma, spec, evaluators, &at)
}

fn at_unspecialised(
    spec: &Spec,
    evaluators: &[Points<'_>],
    quiet: bool,
    notes: &mut Vec<String>,
) -> Result<Vec<Answer>, Error> {
    let progress = Progress::new("stability", 3, false, quiet);
    let noise = spec.gamma / spec.batch as f64;
    let origin = zero(&evaluators[0])?;
    let mut answers = vec![Answer::new("zero", zero_in_words(spec), 0.0, spec, evaluators, &origin)?];
    progress.advance(1);
    match unspecialised(evaluators, 0.0) {
        // Without a mean of theta it is k = 0 itself.
        Ok(common) if largest_size(common.m.iter()) > 0.0 => {
            let words = "unspecialised fixed point of gradient flow: all heads equal".into();
            answers.push(Answer::new("unspecialised", words, 0.0, spec, evaluators, &common)?);
        }
        Ok(_) => {}
        Err(error @ Error::Interrupted { .. }) => return Err(error),
        Err(error) => notes.push(format!("gradient flow: {error}")),
    }
    progress.advance(1);
    if noise > 0.0 {
        match unspecialised(evaluators, noise) {
            Ok(held) => {
                let words = format!(
                    "unspecialised fixed point of the flow with its noise term: all heads equal\n  ({})",
                    with_noise(&held)
                );
                answers.push(Answer::new("unspecialised-with-noise", words, spec.gamma, spec, evaluators, &held)?);
            }
            Err(error @ Error::Interrupted { .. }) => return Err(error),
            Err(error) => notes.push(format!("gamma = {}: {error}", spec.gamma)),
        }
    }
    Ok(answers)
}

/// What rates mean where noise holds the point.
fn with_noise(at: &Coordinates) -> &'static str {
    if largest_size(at.m.iter()) == 0.0 {
        "rates along the features, exact there; other modes change the noise itself and are left out"
    } else {
        "rates along the features, without terms of order gamma; other modes change the noise itself and are left out"
    }
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
    evaluators: &[Points<'_>],
    quiet: bool,
    notes: &mut Vec<String>,
) -> Result<Vec<Answer>, Error> {
    let noise = spec.gamma / spec.batch as f64;
    // One scramble's flow: several may end in different, equivalent states.
    let flow = integrate(&evaluators[..1], &spec.start()?, &spec.flow_options(), "flow", quiet)?;
    if !flow.stop.as_requested() {
        return Err(flow.stop.error("flow"));
    }
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
        let departure = departure(evaluators, path, plateau, noise, &spec.criteria(), &Interruptible)?;
        if let Some(passage) = &departure.passage {
            notes.push(format!("plateau {}: linearised where it moves least: {passage}", index + 1));
        }
        let (words, stability) = match noise {
            0.0 => (words, departure.stability),
            _ => {
                (format!("{words}\n  ({})", with_noise(&departure.stability.at)), departure.stability.along_features())
            }
        };
        let mut answer = Answer::of("plateau", words, spec.gamma, stability);
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
        evaluators: &[Points<'_>],
        at: &Coordinates,
    ) -> Result<Self, Error> {
        let stability = linearise(evaluators, at, &Interruptible)?;
        let mut answer = Self::of(name, description, gamma, stability);
        if largest_size(answer.stability.at.m.iter()) == 0.0 {
            answer.escapes = escapes(spec, &answer.stability, gamma, evaluators)?;
        }
        if gamma > 0.0 {
            answer.stability = answer.stability.along_features();
        }
        Ok(answer)
    }

    fn json(&self, dimensions: &[usize]) -> Value {
        let Stability { at, loss, residual, rank, modes } = &self.stability;
        let escapes: Vec<Value> = self
            .escapes
            .iter()
            .map(|leaving| {
                let escape = &leaving.escape;
                let times: Vec<f64> = dimensions.iter().map(|&d| leaving.time(d)).collect();
                json!({
                    "mode": leaving.mode, "feature": leaving.feature, "rate": escape.rate, "modes": escape.modes,
                    "slope": escape.slope(), "dimensions": dimensions, "times": times,
                    "standard_deviation": escape.deviation(), "size": escape.size, "noise": escape.noise,
                    "threshold": escape.threshold, "settling": leaving.rates,
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
        let alike = |h: usize| at.m.row(h) == at.m.row(0) && at.b[h] == at.b[0] && (r[(h, h)] - r[(0, 0)]).abs() < 1e-9;
        let same = (1..heads).all(alike);
        for head in 0..if same { 1 } else { heads } {
            let m: Vec<String> = at.m.row(head).iter().map(|m| format!("{m:+.4}")).collect();
            let who = if same { "every head".into() } else { format!("head {head}") };
            text += &format!("  {who}: m = [{}]  r = {:.4}  b = {:+.4}\n", m.join(", "), r[(head, head)], at.b[head]);
        }
        text += &format!("  {:>10} {:>9} {:>6}  mode\n", "rate", "error", "modes");
        for mode in &self.stability.modes {
            let error = mode.standard_error.filter(|e| *e != 0.0).map(|e| format!("{e:.0e}")).unwrap_or_default();
            // Sampling noise around zero has no sign worth showing.
            let rate = if mode.rate.abs() < 5e-6 { 0.0 } else { mode.rate };
            text += &format!("  {rate:>+10.5} {error:>9} {:>6}  {}\n", mode.degeneracy, mode.describe());
        }
        for leaving in &self.escapes {
            let time = |d: usize| match leaving.time(d) {
                time if time.is_finite() => format!("{time:.2} at D = {d}"),
                _ => format!("never at D = {d}"),
            };
            let times: Vec<String> = dimensions.iter().map(|&d| time(d)).collect();
            let how = if leaving.rates.is_some() { "rate followed as their overlaps settle" } else { "as if small" };
            let escape = &leaving.escape;
            text += &format!(
                "  escape, {} (random keys of size {}, {how}): tau = {} (+- {:.2}); slope {:.4} in ln D\n",
                leaving.mode,
                escape.size.sqrt(),
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

/// The escapes of the growing specialising families of a linearisation at `m = 0`.
fn escapes(spec: &Spec, stability: &Stability, gamma: f64, evaluators: &[Points<'_>]) -> Result<Vec<Leaving>, Error> {
    let (size, noise) = (spec.key_scale * spec.key_scale, gamma / spec.batch as f64);
    let b0 = spec.b0.clone().unwrap_or_else(|| vec![0.0; spec.head_count()]);
    let mut all = Vec::new();
    for mode in &stability.modes {
        let Some(escape) = Escape::of_mode(&evaluators[0], stability, mode, (size, noise, LEFT), spec.seed)? else {
            continue;
        };
        let rates = match mode.basis.first() {
            Some(shape) if gamma > 0.0 => {
                Some(Rates::of_settling(&evaluators[0], &escape, shape, &b0, noise, &Interruptible)?)
            }
            _ => None,
        };
        let weights = mode.feature_weights.iter().enumerate();
        let feature = weights.max_by(|a, b| a.1.total_cmp(b.1)).map_or(0, |(f, _)| f);
        all.push(Leaving { mode: mode.describe(), feature, escape, rates });
    }
    Ok(all)
}
