//! Stages of specialization: predicted from the spectrum, followed by flows and by chains.

use headflow::model::{Activation, OrderParameters, Task, Theta, Unwatched, largest_size, mean_and_error};
use headflow::sims::ensemble::{self, simulate};
use headflow::sims::first_passage::{Target, first_passage};
use headflow::sims::sgd::{Engine, Sgd, Start};
use headflow::theory::escape::{Escape, Rates};
use headflow::theory::flow::{Options, solve};
use headflow::theory::quasi_monte_carlo::QuasiMonteCarlo;
use headflow::theory::stability::{Kind, linearise, stationary_near, unspecialised};
use headflow::theory::stages::{Criteria, stages};
use nalgebra::DMatrix;

/// Alignments of four heads on `+s1, -s1, +s1, -s1`, equal heads `apart` along the second feature.
fn first_feature(size: f64, apart: f64) -> DMatrix<f64> {
    DMatrix::from_fn(4, 2, |h, f| match (f, h % 2, h / 2) {
        (0, 0, _) => size,
        (0, _, _) => -size,
        (_, _, 0) => apart,
        _ => -apart,
    })
}

fn softmax(length: usize, signal: f64, points: usize) -> QuasiMonteCarlo {
    let task = Task::new(length, Theta::Flip { nu: vec![signal; 2] }).unwrap();
    QuasiMonteCarlo::new(&task, 4, Activation::Softmax.into(), points, 1, 0).unwrap()
}

/// At the plateau `+-s1` of softmax with four heads: the mean rate at which equal heads separate
/// along the second feature (two modes, one for each sign), and the alignment with the first.
fn second_stage(length: usize, signal: f64, points: usize) -> (f64, f64) {
    let evaluator = softmax(length, signal, points);
    let m = first_feature(0.75 * signal, 0.0);
    let near = OrderParameters::new(m.clone(), &m * m.transpose(), vec![0.0; 4]).unwrap();
    let evaluators = std::slice::from_ref(&evaluator);
    let at = stationary_near(evaluators, &near, 0.0, 3.0, 1e-6).unwrap();
    let stability = linearise(evaluators, &at, &Unwatched).unwrap();
    let rate = |pair: usize| {
        let sign = |h: usize| if h / 2 == 0 { 1.0 } else { -1.0 };
        stability.rate_along(&DMatrix::from_fn(4, 2, |h, f| if f == 1 && h % 2 == pair { sign(h) } else { 0.0 }))
    };
    (0.5 * (rate(0) + rate(1)), at.m[(0, 0)])
}

/// The signal at which the second stage of softmax ceases to exist, from the spectrum.
fn critical_signal(length: usize, mut low: f64, mut high: f64, points: usize) -> f64 {
    let rate = |signal: f64| second_stage(length, signal, points).0;
    let (mut rate_low, mut rate_high) = (rate(low), rate(high));
    assert!(rate_low > 0.0 && rate_high < 0.0, "L = {length}: {rate_low} at {low}, {rate_high} at {high}");
    for _ in 0..4 {
        let middle = low + (high - low) * rate_low / (rate_low - rate_high);
        let found = rate(middle);
        if found > 0.0 {
            (low, rate_low) = (middle, found);
        } else {
            (high, rate_high) = (middle, found);
        }
    }
    low + (high - low) * rate_low / (rate_low - rate_high)
}

/// The boundary of the second stage of softmax, four heads and two equal flips: near 2.05 at `L = 5`, 2.6 at
/// 20, 3.3 at 100, about `sqrt(2 ln L) + 0.2`. (Measured with 2^14 points: 2.08, 2.59, 3.24; the sampling
/// error of these fewer points is 0.02 to 0.03.)
#[test]
fn the_second_stage_of_softmax_has_a_critical_signal() {
    for (length, low, high, points, known) in
        [(5, 1.9, 2.3, 1 << 13, 2.05), (20, 2.4, 2.8, 1 << 12, 2.6), (100, 3.1, 3.5, 1 << 12, 3.3)]
    {
        let found = critical_signal(length, low, high, points);
        let law = (2.0 * (length as f64).ln()).sqrt() + 0.2;
        println!("L = {length}: critical signal {found:.3}, sqrt(2 ln L) + 0.2 = {law:.3}");
        assert!((found - known).abs() < 0.1, "L = {length}: {found}");
        assert!((found - law).abs() < 0.12, "L = {length}: {found} {law}");
    }
}

/// Gradient flow from the plateau, equal heads slightly apart: below the boundary they separate at the
/// rate of the spectrum and the second feature is learned, above it they come together again.
#[test]
fn flows_on_either_side_of_the_boundary_part() {
    for (signal, stage) in [(1.7, true), (2.5, false)] {
        let points = 1 << 12;
        let (rate, size) = second_stage(5, signal, points);
        assert_eq!(rate > 0.0, stage, "signal {signal}: {rate}");
        let m = first_feature(size, 0.05);
        let start = OrderParameters::new(m.clone(), &m * m.transpose(), vec![0.0; 4]).unwrap();
        let times: Vec<f64> = (0..=100).map(|k| 10.0 * f64::from(k)).collect();
        let path =
            solve(&softmax(5, signal, points), &start, &Options::new(0.0, times), &Unwatched).unwrap().trajectory;
        let apart = |t: usize| {
            let m = path.m(t);
            0.25 * ((m[(0, 1)] - m[(2, 1)]).abs() + (m[(1, 1)] - m[(3, 1)]).abs())
        };
        let measured = (apart(4) / apart(0)).ln() / 40.0;
        assert!((measured - rate).abs() < 0.1 * rate.abs() + 3e-4, "signal {signal}: {measured}, spectrum {rate}");
        let last = path.times.len() - 1;
        println!("signal {signal}: rate {rate:+.4}, flow {measured:+.4}, apart at the end {:.3}", apart(last));
        assert!(if stage { apart(last) > 0.5 } else { apart(last) < 0.01 });
    }
}

/// The same for the chain at `D = 1000`, fluctuations and all.
#[test]
fn chains_on_either_side_of_the_boundary_part() {
    for (signal, stage) in [(1.6, true), (2.6, false)] {
        let (_, size) = second_stage(5, signal, 1 << 12);
        let m = first_feature(size, 0.05);
        let start = OrderParameters::new(m.clone(), &m * m.transpose(), vec![0.0; 4]).unwrap();
        let task = Task::new(5, Theta::Flip { nu: vec![signal; 2] }).unwrap();
        let second = task.theta().second_moment();
        let attention = Activation::Softmax.into();
        let sgd = Sgd { task, attention, dimension: 1000, gamma: 0.5, batch: 1, seed: 2, engine: Engine::Overlap };
        let times: Vec<f64> = (0..=80).map(|k| 10.0 * f64::from(k)).collect();
        let options = ensemble::Options { times, replicas: 2, test_samples: 64 };
        let ensemble = simulate(&sgd, &Start::Given(start), &options, &Unwatched).unwrap();
        for run in &ensemble.runs {
            let m = run.trajectory.m(run.trajectory.times.len() - 1);
            let strength = |h: usize, f: usize| m[(h, f)].abs() / second[(f, f)].sqrt();
            // Below: heads turn to the second feature. Above: all four stay on the first.
            let most = |f: usize| largest_size((0..4).map(|h| strength(h, f)));
            assert_eq!(most(1) > 0.5, stage, "signal {signal}: {m}");
            assert!(stage || (0..4).all(|h| strength(h, 0) > 0.5), "signal {signal}: {m}");
        }
    }
}

/// Larger variance, earlier specialisation: from random keys, bayes-softmax learns the stronger of two Gaussian
/// features first in all of 20 seeds.
#[test]
fn features_are_learned_in_the_order_of_their_variance() {
    let theta = Theta::Gaussian { mean: vec![0.0, 0.0], sd: Some(vec![1.4, 2.4]), cov: None };
    let task = Task::new(6, theta.clone()).unwrap();
    let sgd = Sgd {
        task,
        attention: Activation::BayesSoftmax.into(),
        dimension: 2000,
        gamma: 1.0,
        batch: 1,
        seed: 6,
        engine: Engine::Overlap,
    };
    let start = Start::Random { heads: 4, scale: 0.5, b: vec![0.0; 4] };
    let times: Vec<f64> = (0..=100).map(|k| 1.2 * f64::from(k)).collect();
    let options = ensemble::Options { times, replicas: 20, test_samples: 64 };
    let ensemble = simulate(&sgd, &start, &options, &Unwatched).unwrap();
    for run in &ensemble.runs {
        let found = stages(&run.trajectory, &theta.second_moment(), &Criteria::default()).unwrap();
        let order: Vec<usize> = found.order.iter().map(|l| l.feature).collect();
        assert_eq!(order.first(), Some(&1), "{}", found.describe());
    }
}

/// Chains leave the unspecialised state when the spectrum says: from small random keys, the mean time until
/// the difference of two heads is 0.1 of the signal, within 4 standard errors of growth at the rate
/// followed while noise fills the overlaps.
#[test]
fn escape_times_are_those_of_the_spectrum() {
    let (gamma, size, strength) = (4.0, 0.04, 0.1);
    let task = Task::new(4, Theta::Flip { nu: vec![3.0] }).unwrap();
    let attention = Activation::Softmax.into();
    let evaluators = QuasiMonteCarlo::scrambles(&task, 2, attention, 1 << 14, 1, 2).unwrap();
    let held = linearise(&evaluators, &unspecialised(&evaluators, gamma).unwrap(), &Unwatched).unwrap();
    let mode = held.modes.iter().find(|m| m.kind == Kind::Specialising && m.feature_weights[0] > 0.95).unwrap();
    let law = (size, gamma, strength);
    let escape = Escape::of_mode(&evaluators[0], &held, mode, law, 1).unwrap().unwrap();
    let rates = Rates::of_settling(&evaluators[0], &escape, &mode.basis[0], &[0.0; 2], gamma, &Unwatched).unwrap();

    let start = Start::Random { heads: 2, scale: f64::sqrt(size), b: vec![0.0; 2] };
    let apart = |m: &DMatrix<f64>| (m[(0, 0)] - m[(1, 0)]).abs() / 2f64.sqrt();
    for (dimension, replicas) in [(10_000, 150), (100_000, 40)] {
        let engine = Engine::Overlap;
        let sgd = Sgd { task: task.clone(), attention, dimension, gamma, batch: 1, seed: 4, engine };
        let target = Target { measure: &apart, threshold: escape.threshold, last: 100.0 };
        let times = first_passage(&sgd, &start, replicas, &target, &Unwatched).unwrap();
        let times: Vec<f64> = times.into_iter().collect::<Option<_>>().expect("all leave");
        let (mean, error) = mean_and_error(times.iter().copied());
        let predicted = rates.time(&escape, dimension as f64);
        println!("D = {dimension}: {mean:.3} +- {error:.3}, predicted {predicted:.3}");
        assert!((mean - predicted).abs() < 4.0 * error, "D = {dimension}: {mean} +- {error}, predicted {predicted}");
        // Too little time, then a start that has left already.
        let never = Target { last: 0.01, ..target };
        assert!(first_passage(&sgd, &start, 2, &never, &Unwatched).unwrap().iter().all(Option::is_none));
    }
    let sgd = Sgd { task, attention, dimension: 1000, gamma, batch: 1, seed: 4, engine: Engine::Overlap };
    let gone = Target { measure: &|_| 1.0, threshold: 0.5, last: 1.0 };
    assert_eq!(first_passage(&sgd, &start, 1, &gone, &Unwatched).unwrap(), [Some(0.0)]);
}
