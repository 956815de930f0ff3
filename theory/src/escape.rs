//! When a growing mode leaves its plateau (`theory/README.md` sections 8 and 11.6).
//!
//! The amplitude of a mode with rate `kappa` is `e^{kappa tau} N(0, s0^2 / D)` when it starts at the
//! alignments of random keys, `s0^2 = D var(m)`; the noise of SGD adds `v / (2 kappa)` to its variance,
//! `v = (gamma / (B D)) E[Y^2]` with `Y = sum_hl u_h g_hl x_fl` for the mode `u`. The norm of `n`
//! modes of one rate reaches `threshold` at a mean time
//!
//! ```text
//! tau = (1 / (2 kappa)) [ ln(D threshold^2 / (s0^2 + v D / (2 kappa))) - psi(n / 2) - ln 2 ]
//! ```
//!
//! with standard deviation `sqrt(psi'(n / 2)) / (2 kappa)`: `ln D / (2 kappa)` and a constant. A mode
//! whose amplitude is known to be `a` takes `ln(threshold / |a|) / kappa`.
//!
//! [`departure`] does this for the plateaus of a trajectory.
//!
//! While overlaps drift, `kappa tau` becomes the integral of `kappa(r(tau))` along the flow at
//! `m = 0`: [`rates_along`].

use headflow_model::random::{Purpose, Stream};
use headflow_model::{Attention, Error, OrderParameters, StopReason, Task, Trajectory, Watch, larger, largest_size};
use nalgebra::DMatrix;
use serde::{Deserialize, Serialize};
use statrs::function::gamma::digamma;

use crate::flow::{self, Options};
use crate::moments::{Coordinates, Evaluator, Loss, Mean, Moments, Watched, check_noise};
use crate::stability::{Kind, Mode, Stability, linearise, rate_along, stationary_near};
use crate::stages::{Criteria, Pattern, Plateau};

/// A growing mode and where it starts.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Escape {
    /// Growth rate `kappa`, positive.
    pub rate: f64,
    /// Number of modes `n` that share it.
    pub modes: usize,
    /// `s0^2 = D` times the variance of each mode's initial amplitude: `key_scale^2` for random keys.
    pub size: f64,
    /// `v D`: `(gamma / B) E[Y^2]`.
    pub noise: f64,
    /// Norm of the amplitudes that counts as having left.
    pub threshold: f64,
}

impl Escape {
    /// `d tau / d ln D = 1 / (2 kappa)`.
    pub fn slope(&self) -> f64 {
        0.5 / self.rate
    }

    /// The `kappa tau` that dimension `D` asks for, on average: none where keys start beyond the threshold.
    pub fn growth(&self, dimension: f64) -> f64 {
        let start = self.size + self.noise / (2.0 * self.rate);
        let logarithm = (dimension * self.threshold * self.threshold / start).ln();
        larger(0.5 * (logarithm - digamma(0.5 * self.modes as f64) - std::f64::consts::LN_2), 0.0)
    }

    /// Mean escape time at dimension `D`.
    pub fn time(&self, dimension: f64) -> f64 {
        self.growth(dimension) / self.rate
    }

    /// Standard deviation of the escape time.
    pub fn deviation(&self) -> f64 {
        const STEP: f64 = 1e-4;
        let x = 0.5 * self.modes as f64;
        let slope = (digamma(x + STEP) - digamma(x - STEP)) / (2.0 * STEP);
        slope.sqrt() * self.slope()
    }
}

impl Escape {
    /// The escape of a growing specialising mode of `stability`, a linearisation at `m = 0`, from independent
    /// keys `N(0, size / D)` under the learning rate `noise = gamma / B`. It has left when the norm of its
    /// amplitudes is `strength` times the root mean square of theta along it: small, for growth to be exponential until then.
    /// `None` for modes that do not grow, do not separate heads or are not along features.
    ///
    /// # Errors
    /// When the rate, `size`, `noise` or `strength` is not a finite number (one that is missing is not zero), or `noise` is
    /// negative; as [`noise_of_mode`].
    pub fn of_mode<E: Evaluator>(
        evaluator: &E,
        stability: &Stability,
        mode: &Mode,
        (size, noise, strength): (f64, f64, f64),
        seed: u64,
    ) -> Result<Option<Self>, Error> {
        for (what, value) in [("rate", mode.rate), ("key_scale", size), ("gamma", noise), ("strength", strength)] {
            if !value.is_finite() || what == "gamma" && value < 0.0 {
                return Err(Error::invalid(
                    what,
                    format!("an escape needs a finite one, not below 0 for gamma; got {value}"),
                ));
            }
        }
        let along_features = mode.feature_weights.iter().sum::<f64>() > 0.95;
        if mode.rate <= 0.0 || mode.kind != Kind::Specialising || !along_features || size <= 0.0 {
            return Ok(None);
        }
        let Some(shape) = mode.basis.first() else { return Ok(None) };
        let heads = shape.nrows();
        // The noise is that at the keys themselves: independent, beside what they have in common.
        let r = stability.at.r() + DMatrix::identity(heads, heads) * size;
        let point = OrderParameters::new(stability.at.m.clone(), r, stability.at.b.clone())?;
        let at = Coordinates::of(&point, evaluator.attention());
        let strength_of_noise = match noise {
            0.0 => 0.0,
            _ => noise_of_mode(evaluator.task(), evaluator.attention(), &at, shape, NOISE_SAMPLES, seed)?.0,
        };
        let second = evaluator.task().theta().second_moment();
        let spread = (shape * second).dot(shape) / shape.norm_squared();
        let (noise, threshold) = (noise * strength_of_noise, strength * spread.sqrt());
        if !(noise.is_finite() && threshold.is_finite()) {
            return Err(Error::not_converged(
                "escape",
                format!("the noise of a mode is {noise}, its threshold {threshold}"),
                "use smaller keys and signals",
            ));
        }
        Ok(Some(Self { rate: mode.rate, modes: mode.degeneracy, size, noise, threshold }))
    }
}

/// Fresh samples for the noise of a mode.
const NOISE_SAMPLES: usize = 1 << 16;

/// `E[Y^2]`, the strength of SGD's noise on a mode of the alignments, and its standard error, over
/// `samples` fresh samples. `mode` is `H x F` and counts as normalised.
///
/// # Errors
/// When the shapes differ, the mode is zero or not finite, or `samples` is below 2.
pub fn noise_of_mode(
    task: &Task,
    attention: &Attention,
    at: &Coordinates,
    mode: &DMatrix<f64>,
    samples: usize,
    seed: u64,
) -> Result<(f64, f64), Error> {
    let (heads, features, length) = (at.m.nrows(), task.features(), task.length());
    if mode.shape() != (heads, features) || at.m.ncols() != features {
        return Err(Error::invalid("mode", format!("is not {heads} x {features}")));
    }
    let square = mode.norm_squared();
    if !(square.is_finite() && square > 0.0) {
        return Err(Error::invalid("mode", format!("has the squared norm {square}, not a finite number above 0")));
    }
    if samples < 2 {
        return Err(Error::invalid("samples", "an average with an error needs at least 2"));
    }
    let rows = features + heads;
    let stream = Stream::new(seed, Purpose::Points, u32::MAX);
    let (mut uniforms, mut theta) = (vec![0.0; task.sampler().uniforms()], vec![0.0; features]);
    let mut values = vec![0.0f32; rows * length];
    let (mut scores, mut combined) = (vec![0.0; heads * length], vec![0.0; length]);
    let b = at.near_biases(attention);
    let squares: Vec<f64> = (0..samples as u64)
        .map(|sample| {
            stream.uniforms(sample, 1, &mut uniforms);
            task.sampler().sample(&uniforms, &mut theta);
            stream.normals(sample, 0, 0, &mut values);
            let value = |j: usize, l: usize| {
                f64::from(values[j * length + l]) + if l == 0 && j < features { theta[j] } else { 0.0 }
            };
            for h in 0..heads {
                for l in 0..length {
                    let along: f64 = (0..features).map(|f| at.m[(h, f)] * value(f, l)).sum();
                    let outside: f64 = (0..heads).map(|j| at.c[(h, j)] * value(features + j, l)).sum();
                    scores[h * length + l] = along + outside + b[h];
                }
            }
            attention.forward_in_place(heads, length, &mut scores, &mut combined);
            combined[0] -= 1.0;
            combined.iter_mut().for_each(|d| *d *= 2.0);
            attention.backward_in_place(heads, length, &mut scores, &combined);
            let mut sum = 0.0;
            for h in 0..heads {
                for f in 0..features {
                    let product: f64 = (0..length).map(|l| scores[h * length + l] * value(f, l)).sum();
                    sum += mode[(h, f)] * product;
                }
            }
            sum * sum / square
        })
        .collect();
    Ok(headflow_model::mean_and_error(squares.iter().copied()))
}

/// How far from a plateau its stationary point may lie, as a fraction of the largest alignment.
const REACH: f64 = 0.25;

/// The drift that the stationary point of a plateau may have.
const STATIONARY: f64 = 1e-6;

/// A feature that is about to be learned.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Predicted {
    /// The feature.
    pub feature: usize,
    /// When some head's strength in it is predicted to reach the criterion.
    pub time: f64,
    /// The growth rate behind it.
    pub rate: f64,
}

/// How a plateau ends: its linearisation, and which features the growth of its modes will have learned
/// when, soonest first.
#[derive(Debug, Clone)]
pub struct Departure {
    /// The linearisation at the stationary point of the plateau.
    pub stability: Stability,
    /// Features that no head has on the plateau, and that grow.
    pub learned: Vec<Predicted>,
    /// Why there is no stationary point by the plateau; it is then linearised where it moves least.
    pub passage: Option<String>,
}

/// Predicts how `plateau` of a trajectory under the flow with `noise = gamma / B` ends, from the
/// stationary point beside it and the displacement from that point when the plateau begins: the
/// part of it in a growing mode grows as `e^{rate (tau - start)}`, until a head is on (`criteria.on`)
/// in the feature. Growth is not exponential to the end, so the prediction is off by a time of order
/// `1 / rate`, either way.
///
/// Where all heads are off the point is `m = 0` with the overlaps and biases of the plateau's start.
/// A plateau may be a slow passage without a stationary point nearby: heads that are off may lower their
/// biases for ever. It is then linearised where it moves least, at alignments 0 with
/// the features that no head has.
///
/// # Errors
/// When the shapes of the trajectory and the evaluators differ, `watch` interrupts, as [`check_noise`] and [`linearise`].
pub fn departure<E: Evaluator>(
    evaluators: &[E],
    trajectory: &Trajectory,
    plateau: &Plateau,
    noise: f64,
    criteria: &Criteria,
    watch: &dyn Watch,
) -> Result<Departure, Error> {
    let evaluators = &Watched::all(evaluators, watch);
    let evaluator = Mean::new(evaluators)?;
    check_noise(&evaluator, noise)?;
    let second = evaluator.task().theta().second_moment();
    let features = evaluator.task().features();
    let off = plateau.patterns.iter().all(Pattern::is_off);
    let record = |t: usize| OrderParameters::new(trajectory.m(t), trajectory.r(t), trajectory.b(t));
    let unlearned: Vec<usize> = (0..features).filter(|&f| plateau.patterns.iter().all(|p| p.sign(f) == 0)).collect();
    // The same keys without their part along the features that no head has.
    let without = |point: &OrderParameters| -> Result<Coordinates, Error> {
        let mut m = point.m().clone();
        unlearned.iter().for_each(|&f| m.column_mut(f).fill(0.0));
        let outside = point.r() - point.m() * point.m().transpose();
        let r = &m * m.transpose() + outside;
        Ok(Coordinates::of(&OrderParameters::new(m, r, point.b().to_vec())?, evaluator.attention()))
    };
    let (at, passage) = if off {
        (without(&record(plateau.first)?)?, None)
    } else {
        let middle = record((plateau.first + plateau.last) / 2)?;
        match stationary_near(evaluators, &middle, noise, REACH * largest_size(plateau.m.iter()), STATIONARY) {
            Ok(at) => (at, None),
            Err(error @ Error::Interrupted { .. }) => return Err(error),
            Err(error) => {
                let motion = |t: usize| {
                    largest_size((trajectory.m(t + 1) - trajectory.m(t)).iter())
                        / (trajectory.times[t + 1] - trajectory.times[t])
                };
                let slowest = (plateau.first..plateau.last)
                    .min_by(|&s, &t| motion(s).total_cmp(&motion(t)))
                    .unwrap_or(plateau.first);
                (without(&record(slowest)?)?, Some(error.to_string()))
            }
        }
    };
    let stability = linearise(evaluators, &at, watch)?;
    let displacement = trajectory.m(plateau.first) - &at.m;
    let mut learned: Vec<Predicted> = unlearned
        .iter()
        .filter_map(|&feature| {
            let threshold = criteria.on * second[(feature, feature)].sqrt();
            stability
                .modes
                .iter()
                .filter(|mode| mode.feature_weights[feature] > 0.5)
                .filter_map(|mode| {
                    let time = plateau.start + mode.time_to(&displacement, feature, threshold)?;
                    Some(Predicted { feature, time, rate: mode.rate })
                })
                .min_by(|a, b| a.time.total_cmp(&b.time))
        })
        .collect();
    learned.sort_by(|a, b| a.time.total_cmp(&b.time));
    Ok(Departure { stability, learned, passage })
}

/// An evaluator whose alignments do not move: for following `r` at fixed `m`.
struct Held<'a, E>(&'a E);

impl<E: Evaluator> Evaluator for Held<'_, E> {
    fn task(&self) -> &Task {
        self.0.task()
    }

    fn heads(&self) -> usize {
        self.0.heads()
    }

    fn attention(&self) -> &Attention {
        self.0.attention()
    }

    fn gives_noise(&self) -> bool {
        self.0.gives_noise()
    }

    fn moments(&self, at: &Coordinates) -> Moments {
        let moments = self.0.moments(at);
        Moments { gx: moments.gx * 0.0, ..moments }
    }

    fn loss(&self, at: &Coordinates) -> Loss {
        self.0.loss(at)
    }

    fn moments_watched(&self, at: &Coordinates, watch: &dyn Watch) -> Moments {
        let moments = self.0.moments_watched(at, watch);
        Moments { gx: moments.gx * 0.0, ..moments }
    }

    fn loss_watched(&self, at: &Coordinates, watch: &dyn Watch) -> Loss {
        self.0.loss_watched(at, watch)
    }

    fn interrupted(&self) -> bool {
        self.0.interrupted()
    }
}

/// The rate along `mode` (`H x F`) at `times`, while the overlaps and biases follow the flow with
/// `noise = gamma / B` from `start` and the alignments stay where they are.
///
/// # Errors
/// When the options are invalid, the evaluator does not give the noise ([`check_noise`]), the flow does not reach the last
/// time, a rate is not a finite number, or `watch` interrupts.
pub fn rates_along<E: Evaluator>(
    evaluator: &E,
    start: &OrderParameters,
    mode: &DMatrix<f64>,
    noise: f64,
    times: &[f64],
    watch: &dyn Watch,
) -> Result<Vec<f64>, Error> {
    let solution = flow::solve(&Held(evaluator), start, &Options::new(noise, times.to_vec()), watch)?;
    let path = &solution.trajectory;
    let interrupted = || Error::interrupted("rates along a flow");
    if matches!(solution.stop, StopReason::Interrupted { .. }) {
        return Err(interrupted());
    }
    if path.times.len() < times.len() {
        let how = solution.stop.describe();
        let reached = format!("the flow of the overlaps ended early: {how}");
        return Err(Error::not_converged("escape", reached, "or ask for earlier times"));
    }
    let evaluator = &Watched::new(evaluator, watch);
    let rate = |t: usize| {
        let point = OrderParameters::new(path.m(t), path.r(t), path.b(t))?;
        let rate = rate_along(evaluator, &Coordinates::of(&point, evaluator.attention()), mode);
        // Then the rate may be none.
        if watch.interrupted() {
            return Err(interrupted());
        }
        if !rate.is_finite() {
            let reached = format!("the rate along the mode is {rate} at tau = {}", path.times[t]);
            return Err(Error::not_converged("escape", reached, "use smaller keys and signals, or evaluator qmc"));
        }
        Ok(rate)
    };
    (0..path.times.len()).map(rate).collect()
}

/// Times and the rates of a mode at them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// Times `tau`, increasing from 0.
    pub times: Vec<f64>,
    /// The rate at each.
    pub rates: Vec<f64>,
}

impl Rates {
    /// The rate of `mode` while the overlaps of independent keys of squared norm `escape.size`, and the
    /// biases from `b0`, follow the flow at `m = 0`: until the largest dimension of interest, `10^8`, has left.
    ///
    /// # Errors
    /// As [`rates_along`].
    pub fn of_settling<E: Evaluator>(
        evaluator: &E,
        escape: &Escape,
        mode: &DMatrix<f64>,
        b0: &[f64],
        noise: f64,
        watch: &dyn Watch,
    ) -> Result<Self, Error> {
        const COUNT: u32 = 24;
        let r = DMatrix::identity(mode.nrows(), mode.nrows()) * escape.size;
        let start = OrderParameters::new(mode * 0.0, r, b0.to_vec())?;
        let horizon = larger(escape.time(1e8), 1.0);
        let times: Vec<f64> = (0..=COUNT).map(|k| horizon * f64::from(k) / f64::from(COUNT)).collect();
        let rates = rates_along(evaluator, &start, mode, noise, &times, watch)?;
        Ok(Self { times, rates })
    }

    /// Mean time at which the modes of `escape` leave at dimension `D`; infinite if they never do.
    pub fn time(&self, escape: &Escape, dimension: f64) -> f64 {
        time_of_growth(&self.times, &self.rates, escape.growth(dimension))
    }
}

/// The time at which the integral of `rates` over `times` (trapezoids; the last rate from then on)
/// reaches `growth`; infinite if it never does, NaN if one of the numbers is.
pub fn time_of_growth(times: &[f64], rates: &[f64], growth: f64) -> f64 {
    // Comparisons with NaN fail, and would end in "never".
    if growth.is_nan() || times.iter().chain(rates).any(|v| v.is_nan()) {
        return f64::NAN;
    }
    let mut done = 0.0;
    for (t, k) in times.windows(2).zip(rates.windows(2)) {
        let (span, slope) = (t[1] - t[0], k[1] - k[0]);
        let here = 0.5 * (k[0] + k[1]) * span;
        if done + here >= growth {
            // k0 x + slope x^2 / (2 span) = what is missing
            let missing = growth - done;
            let root = (k[0] * k[0] + 2.0 * slope * missing / span).max(0.0).sqrt();
            return t[0] + 2.0 * missing / (k[0] + root).max(1e-300);
        }
        done += here;
    }
    match (times.last(), rates.last()) {
        (Some(&end), Some(&rate)) if rate > 0.0 => end + (growth - done) / rate,
        _ => f64::INFINITY,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One mode: `E ln chi^2_1 = -(gamma_E + ln 2)`, so the constant is `(gamma_E + ln 2) / (2 kappa)`.
    #[test]
    fn the_law_is_that_of_an_exponential() {
        let escape = Escape { rate: 0.8, modes: 1, size: 0.01, noise: 0.0, threshold: 0.3 };
        let constant = (0.577_215_664_901_532_9 + std::f64::consts::LN_2) / 1.6;
        assert!((escape.time(1e4) - ((1e4f64 * 0.09 / 0.01).ln() / 1.6 + constant)).abs() < 1e-12);
        assert!((escape.time(1e6) - escape.time(1e4) - escape.slope() * 100f64.ln()).abs() < 1e-12);
        // psi'(1/2) = pi^2 / 2.
        assert!((escape.deviation() - std::f64::consts::PI / 2f64.sqrt() / 1.6).abs() < 1e-6);
    }

    /// Means and standard deviations of simulated escapes, within 4 standard errors.
    #[test]
    fn random_amplitudes_escape_when_it_says() {
        for modes in [1, 3] {
            let escape = Escape { rate: 0.5, modes, size: 0.04, noise: 0.0, threshold: 0.2 };
            let stream = Stream::new(3, Purpose::Test, modes as u32);
            let n = 20_000;
            let times: Vec<f64> = (0..n)
                .map(|k| {
                    let mut z = vec![0.0f32; modes];
                    stream.normals(k, 0, 0, &mut z);
                    let square: f64 = z.iter().map(|z| f64::from(*z).powi(2)).sum::<f64>() * 0.04 / 1e6;
                    (0.2 / square.sqrt()).ln() / 0.5
                })
                .collect();
            let (mean, error) = headflow_model::mean_and_error(times.iter().copied());
            assert!((mean - escape.time(1e6)).abs() < 4.0 * error, "{mean} {}", escape.time(1e6));
            assert!((error * (n as f64).sqrt() - escape.deviation()).abs() < 0.05 * escape.deviation());
        }
    }

    #[test]
    fn growth_is_integrated() {
        let times: Vec<f64> = (0..=100).map(|k| 0.1 * f64::from(k)).collect();
        let rates: Vec<f64> = times.iter().map(|t| 1.0 - 0.05 * t).collect();
        // tau - 0.025 tau^2 = 3.
        let exact = (1.0 - (1.0f64 - 0.1 * 3.0).sqrt()) / 0.05;
        assert!((time_of_growth(&times, &rates, 3.0) - exact).abs() < 1e-9);
        assert!((time_of_growth(&[0.0], &[0.5], 3.0) - 6.0).abs() < 1e-12);
        assert_eq!(time_of_growth(&[0.0, 1.0], &[-0.5, -0.5], 3.0), f64::INFINITY);
    }
}
