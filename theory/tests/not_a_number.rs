//! What is no number is not small: every decision on stationarity, convergence and acceptance with NaN and with
//! infinity, and every flow with noise by an evaluator that gives none.

use headflow_model::{
    Activation, Attention, Error, OrderParameters, Shape, StopReason, Task, Theta, Trajectory, Unwatched,
};
use headflow_theory::bayes::bayes_risk;
use headflow_theory::escape::{Escape, departure, noise_of_mode, rates_along, time_of_growth};
use headflow_theory::evaluators::Averages;
use headflow_theory::floor::floor;
use headflow_theory::flow::{Options, derivative, solve};
use headflow_theory::moments::{Coordinates, Evaluator, Loss, Mean, Moments, check_noise};
use headflow_theory::optimum::{self, lowest_curvature_outside, optimum};
use headflow_theory::quadrature::Quadrature;
use headflow_theory::quasi_monte_carlo::QuasiMonteCarlo;
use headflow_theory::stability::{check_stationary, linearise, rate_along, stationary_near, unspecialised, zero};
use headflow_theory::stages::{Criteria, Plateau};
use nalgebra::DMatrix;

const NOT_FINITE: [f64; 3] = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY];

/// Moments and losses that are tampered with, and an evaluator that may say that it gives no noise.
struct Altered<F> {
    inner: QuasiMonteCarlo,
    change: F,
    noise: bool,
}

impl<F: Fn(&Coordinates, &mut Moments) + Sync> Evaluator for Altered<F> {
    fn task(&self) -> &Task {
        self.inner.task()
    }

    fn heads(&self) -> usize {
        self.inner.heads()
    }

    fn attention(&self) -> &Attention {
        self.inner.attention()
    }

    fn gives_noise(&self) -> bool {
        self.noise
    }

    fn moments(&self, at: &Coordinates) -> Moments {
        let mut moments = self.inner.moments(at);
        (self.change)(at, &mut moments);
        moments
    }

    fn loss(&self, at: &Coordinates) -> Loss {
        self.moments(at).loss
    }
}

type Change = Box<dyn Fn(&Coordinates, &mut Moments) + Sync>;

fn flips() -> Theta {
    Theta::Flip { nu: vec![2.0] }
}

fn pushed() -> Theta {
    Theta::Gaussian { mean: vec![1.0], sd: Some(vec![0.5]), cov: None }
}

/// Two heads among five tokens; the scrambles from `first` on.
fn altered(theta: Theta, attention: Attention, scramble: u32, change: Change) -> Altered<Change> {
    let task = Task::new(5, theta).unwrap();
    let inner = QuasiMonteCarlo::new(&task, 2, attention, 256, 1, scramble).unwrap();
    Altered { inner, change, noise: true }
}

fn unaltered(theta: Theta, attention: Attention, scramble: u32) -> Altered<Change> {
    altered(theta, attention, scramble, Box::new(|_, _| ()))
}

/// The same evaluators with `value` in one entry of one moment of the last of three.
fn spoiled(theta: &Theta, attention: Attention, value: f64) -> Vec<(&'static str, Vec<Altered<Change>>)> {
    type Spoil = fn(&mut Moments, f64);
    let all: [(&str, Spoil); 4] = [
        ("g x", |moments, value| moments.gx[(1, 0)] = value),
        ("g c", |moments, value| moments.gc[(1, 0)] = value),
        ("g", |moments, value| moments.gb[1] = value),
        ("g g", |moments, value| moments.gg.iter_mut().for_each(|gg| gg[(0, 0)] = value)),
    ];
    all.into_iter()
        .map(|(name, set)| {
            let evaluators = (0..3)
                .map(|scramble| {
                    let change: Change = if scramble == 2 {
                        Box::new(move |_, moments| set(moments, value))
                    } else {
                        Box::new(|_, _| ())
                    };
                    altered(theta.clone(), attention, scramble, change)
                })
                .collect();
            (name, evaluators)
        })
        .collect()
}

/// Keys outside the spikes, so that every moment has a part in every drift.
fn point(at: &Coordinates) -> OrderParameters {
    let r = &at.m * at.m.transpose() + DMatrix::identity(2, 2) * 0.3;
    OrderParameters::new(at.m.clone(), r, at.b.clone()).unwrap()
}

fn is_not_converged(error: &Error, about: &str) {
    assert!(matches!(error, Error::NotConverged { .. }), "{about}: {error}");
    assert!(!error.to_string().contains('\n'), "{about}: {error}");
}

/// A drift of NaN or infinity in one coordinate by one evaluator is no stationary point, whatever the tolerance.
#[test]
fn a_drift_that_is_no_number_is_not_small() {
    let trained = Attention { bias: headflow_model::Bias::Trained, ..Activation::Softmax1.into() };
    let sane: Vec<_> = (0..3).map(|s| unaltered(flips(), trained, s)).collect();
    let at = point(&zero(&sane[0]).unwrap());
    check_stationary(&sane, &at, 1.0, 1e9).unwrap();
    for value in NOT_FINITE {
        for (name, evaluators) in spoiled(&flips(), trained, value) {
            for noise in [0.0, 1.0] {
                // Without noise E[g g^T] is not asked for.
                if name == "g g" && noise == 0.0 {
                    continue;
                }
                let error = check_stationary(&evaluators, &at, noise, 1e9).unwrap_err();
                is_not_converged(&error, &format!("{name} = {value}, noise {noise}"));
            }
        }
        assert!(check_stationary(&sane, &at, value, 1e9).is_err(), "a noise of {value}");
    }
    for tolerance in [f64::NAN, f64::NEG_INFINITY] {
        assert!(check_stationary(&sane, &at, 0.0, tolerance).is_err(), "a tolerance of {tolerance}");
    }
}

/// No linearisation, no root of the flow and no rate without finite gradients.
#[test]
fn gradients_that_are_no_numbers_have_no_rates() {
    let softmax = Activation::Softmax.into();
    let sane: Vec<_> = (0..3).map(|s| unaltered(pushed(), softmax, s)).collect();
    let origin = zero(&sane[0]).unwrap();
    linearise(&sane, &origin, &Unwatched).unwrap();
    let common = unspecialised(&sane, 0.0).unwrap();
    let near = OrderParameters::new(common.m.clone(), common.r(), common.b.clone()).unwrap();
    stationary_near(&sane, &near, 0.0, 0.1, 1e-6).unwrap();
    let along = DMatrix::from_column_slice(2, 1, &[1.0, -1.0]);
    let path =
        |evaluator: &Altered<Change>| rates_along(evaluator, &point(&origin), &along, 0.0, &[0.0, 1.0], &Unwatched);
    path(&sane[0]).unwrap();
    for value in NOT_FINITE {
        for (name, evaluators) in spoiled(&pushed(), softmax, value) {
            let what = format!("{name} = {value}");
            let silent = name == "g g" || name == "g";
            if !silent {
                is_not_converged(&linearise(&evaluators, &origin, &Unwatched).unwrap_err(), &what);
            }
            if name == "g x" {
                assert!(unspecialised(&evaluators, 0.0).is_err(), "{what}");
                assert!(stationary_near(&evaluators, &near, 0.0, 0.1, 1e9).is_err(), "{what}");
                assert!(!rate_along(&evaluators[2], &origin, &along).is_finite(), "{what}");
                is_not_converged(&path(&evaluators[2]).unwrap_err(), &what);
            }
            if name == "g g" {
                assert!(unspecialised(&evaluators, 1.0).is_err(), "{what}");
                assert!(stationary_near(&evaluators, &point(&common), 1.0, 1.0, 1e9).is_err(), "{what}");
            }
        }
        // The loss alone, and a reach or a tolerance that is none.
        let lost = altered(pushed(), softmax, 0, Box::new(move |_, m| m.loss.second_moment = value));
        is_not_converged(&linearise(&[lost], &origin, &Unwatched).unwrap_err(), "the loss");
        let mut elsewhere = origin.clone();
        elsewhere.m[(0, 0)] = value;
        assert!(linearise(&sane, &elsewhere, &Unwatched).is_err());
    }
    assert!(stationary_near(&sane, &near, 0.0, f64::NAN, 1e-6).is_err());
    assert!(stationary_near(&sane, &near, 0.0, 0.1, f64::NAN).is_err());
}

/// A search does not call a minimum what it cannot look at: keys outside the spikes, heads that are switched off.
#[test]
fn a_minimum_that_cannot_be_looked_at_is_refused() {
    let options = optimum::Options { starts: 2, gradient_tolerance: 1e-5, ..Default::default() };
    let softmax1 = Activation::Softmax1.into();
    assert_eq!(optimum(&unaltered(flips(), softmax1, 0), &options, &Unwatched).unwrap().unconverged, 0);
    for value in NOT_FINITE {
        let set = move |moments: &mut Moments| {
            moments.gx.fill(value);
            moments.gc.fill(value);
            moments.loss.second_moment = value;
        };
        let outside: Change = Box::new(move |at, moments| {
            if at.c.iter().any(|c| *c != 0.0) {
                set(moments);
            }
        });
        let outside = altered(flips(), softmax1, 0, outside);
        let error = optimum(&outside, &options, &Unwatched).unwrap_err();
        is_not_converged(&error, "outside the spikes");
        assert!(lowest_curvature_outside(&outside, &zero(&outside).unwrap()).is_nan());
        let off: Change = Box::new(move |at, moments| {
            if at.b.iter().any(|b| *b < -500.0) {
                set(moments);
            }
        });
        is_not_converged(&optimum(&altered(flips(), softmax1, 0, off), &options, &Unwatched).unwrap_err(), "off");
        // Nowhere a number: no start converges, and none is the lowest.
        let nowhere = altered(flips(), softmax1, 0, Box::new(move |_, moments| set(moments)));
        let found = optimum(&nowhere, &options, &Unwatched).unwrap();
        assert_eq!((found.minima.len(), found.unconverged, found.lowest_unconverged), (0, 2, None));
        // A gradient alone.
        let steep = altered(flips(), softmax1, 0, Box::new(move |_, moments| moments.gx[(1, 0)] = value));
        assert_eq!(optimum(&steep, &options, &Unwatched).unwrap().minima.len(), 0);
    }
}

/// A flow whose loss or derivative stops being a number ends there, and records none that is not one.
#[test]
fn a_flow_does_not_record_what_is_no_number() {
    let softmax = Activation::Softmax.into();
    let sane = unaltered(flips(), softmax, 0);
    let m = DMatrix::from_column_slice(2, 1, &[0.5, -0.4]);
    let r = &m * m.transpose() + DMatrix::identity(2, 2) * 0.1;
    let start = OrderParameters::new(m, r, vec![0.0; 2]).unwrap();
    let times: Vec<f64> = (0..=20).map(f64::from).collect();
    for noise in [0.0, 1.0] {
        let options = Options::new(noise, times.clone());
        let whole = solve(&sane, &start, &options, &Unwatched).unwrap();
        assert_eq!(whole.stop, StopReason::Completed);
        // Beyond what the first head reaches half way.
        let limit = whole.trajectory.m(10)[(0, 0)];
        for value in NOT_FINITE {
            let beyond = |set: fn(&mut Moments, f64)| {
                let change = move |at: &Coordinates, moments: &mut Moments| {
                    if at.m[(0, 0)] > limit {
                        set(moments, value);
                    }
                };
                let evaluator = altered(flips(), softmax, 0, Box::new(change));
                solve(&evaluator, &start, &options, &Unwatched).unwrap()
            };
            let lost = beyond(|moments, value| moments.loss.second_moment = value);
            let StopReason::NotFinite { time, variable } = &lost.stop else { panic!("{:?}", lost.stop) };
            assert_eq!(variable, "loss");
            assert!((10.0..=11.0).contains(time), "{time}");
            let pushed = beyond(|moments, value| moments.gx.fill(value));
            assert!(!pushed.stop.as_requested(), "{:?}", pushed.stop);
            for path in [lost.trajectory, pushed.trajectory] {
                assert!((9..=11).contains(&path.times.len()), "{:?}", path.times);
                assert!(path.rows.iter().flatten().all(|v| v.is_finite()));
            }
        }
    }
    let never = altered(flips(), softmax, 0, Box::new(|_, moments| moments.loss.second_moment = f64::NAN));
    let found = solve(&never, &start, &Options::new(0.0, vec![0.0]), &Unwatched).unwrap();
    assert!(matches!(found.stop, StopReason::NotFinite { time: 0.0, .. }) && found.trajectory.times.is_empty());
}

/// Whatever follows a flow with noise refuses an evaluator that gives none, behind wrappers too, in one line that says
/// what to do; gradient flow is open to it.
#[test]
fn noise_is_not_taken_from_an_evaluator_without() {
    let softmax: Attention = Activation::Softmax.into();
    let task = Task::new(5, pushed()).unwrap();
    let exact = Quadrature::new(&task, 2, softmax, 1e-6).unwrap();
    let sampled = QuasiMonteCarlo::new(&task, 2, softmax, 256, 1, 0).unwrap();
    let silent = Altered { noise: false, ..unaltered(pushed(), softmax, 0) };
    let mixed = [Averages::Sampled(sampled.clone()), Averages::Exact(exact.clone())];
    let origin = zero(&exact).unwrap();
    let at = point(&origin);
    let along = DMatrix::from_column_slice(2, 1, &[1.0, -1.0]);
    let trajectory = {
        let shape = Shape { heads: 2, features: 1 };
        Trajectory { shape, times: vec![0.0], rows: vec![shape.row(0.8, at.m(), at.r(), at.b())] }
    };
    let plateau = Plateau {
        start: 0.0,
        end: 0.0,
        loss: 0.8,
        first: 0,
        last: 0,
        patterns: vec!["off".parse().unwrap(); 2],
        m: at.m().clone(),
    };
    fn all<E: Evaluator>(
        evaluators: &[E],
        at: &OrderParameters,
        along: &DMatrix<f64>,
        path: (&Trajectory, &Plateau),
        noise: f64,
    ) -> Vec<Result<(), Error>> {
        let mean = Mean::new(evaluators).unwrap();
        let criteria = Criteria::default();
        vec![
            check_noise(&mean, noise),
            check_stationary(evaluators, at, noise, 1e9),
            unspecialised(evaluators, noise).map(|_| ()),
            stationary_near(evaluators, at, noise, 9.0, 1e9).map(|_| ()),
            solve(&mean, at, &Options::new(noise, vec![0.0, 0.1]), &Unwatched).map(|_| ()),
            rates_along(&mean, at, along, noise, &[0.0, 0.1], &Unwatched).map(|_| ()),
            departure(evaluators, path.0, path.1, noise, &criteria, &Unwatched).map(|_| ()),
        ]
    }
    let path = (&trajectory, &plateau);
    let exact = [exact];
    let silent = [silent];
    for noise in [0.5, f64::NAN, f64::INFINITY, -1.0] {
        for (which, found) in [
            ("quadrature", all(&exact, &at, &along, path, noise)),
            ("an evaluator that says so", all(&silent, &at, &along, path, noise)),
            ("one of several", all(&mixed, &at, &along, path, noise)),
        ] {
            for (k, found) in found.into_iter().enumerate() {
                let message = found.expect_err(&format!("{which}, entry {k}, noise {noise}")).to_string();
                assert!(message.contains("gamma") && !message.contains('\n'), "{which}, entry {k}: {message}");
            }
        }
    }
    for found in all(&exact, &at, &along, path, 0.0).into_iter().chain(all(&mixed, &at, &along, path, 0.0)) {
        found.unwrap();
    }
    for found in all(&[Averages::Sampled(sampled)], &at, &along, path, 0.5) {
        found.unwrap();
    }
    // An average of some evaluators alone is none, and a derivative without its noise has no value.
    let mean = Mean::new(&mixed).unwrap();
    assert!(!mean.gives_noise() && mean.moments(&origin).gg.is_none());
    assert!(derivative(&exact[0], &at, 0.5).r.iter().all(|v| v.is_nan()));
    assert!(derivative(&exact[0], &at, 0.0).r.iter().all(|v| v.is_finite()));
}

/// Times of escape: what is no number is neither at once nor never.
#[test]
fn escapes_are_neither_at_once_nor_never_by_mistake() {
    let good = Escape { rate: 0.5, modes: 1, size: 0.04, noise: 0.1, threshold: 0.2 };
    assert!(good.time(1e6) > 0.0);
    let spoil: [fn(&mut Escape); 4] =
        [|e| e.rate = f64::NAN, |e| e.size = f64::NAN, |e| e.noise = f64::NAN, |e| e.threshold = f64::NAN];
    for spoil in spoil {
        let mut bad = good;
        spoil(&mut bad);
        assert!(bad.growth(1e6).is_nan() && bad.time(1e6).is_nan(), "{bad:?}");
    }
    assert!(time_of_growth(&[0.0, 1.0], &[0.5, f64::NAN], 3.0).is_nan());
    assert!(time_of_growth(&[0.0, 1.0], &[f64::NAN, 0.5], 0.1).is_nan());
    assert!(time_of_growth(&[0.0, 1.0], &[0.5, 0.5], f64::NAN).is_nan());
    assert_eq!(time_of_growth(&[0.0, 1.0], &[0.5, 0.5], f64::INFINITY), f64::INFINITY);

    let softmax: Attention = Activation::Softmax.into();
    let evaluator = unaltered(flips(), softmax, 0);
    let stability = linearise(std::slice::from_ref(&evaluator), &zero(&evaluator).unwrap(), &Unwatched).unwrap();
    let growing = stability.modes.iter().find(|mode| mode.rate > 0.0).unwrap();
    let law = (0.04, 1.0, 0.1);
    assert!(Escape::of_mode(&evaluator, &stability, growing, law, 1).unwrap().is_some());
    for value in NOT_FINITE {
        for law in [(value, 1.0, 0.1), (0.04, value, 0.1), (0.04, 1.0, value)] {
            assert!(Escape::of_mode(&evaluator, &stability, growing, law, 1).is_err(), "{law:?}");
        }
        let mut mode = growing.clone();
        mode.rate = value;
        assert!(Escape::of_mode(&evaluator, &stability, &mode, (0.04, 1.0, 0.1), 1).is_err());
    }
    let displacement = DMatrix::from_column_slice(2, 1, &[0.1, -0.1]);
    assert!(growing.time_to(&displacement, 0, 0.5).is_some_and(|time| time > 0.0));
    assert!(growing.time_to(&displacement, 0, f64::NAN).is_some_and(f64::is_nan));
    assert!(growing.time_to(&(displacement * f64::NAN), 0, 0.5).is_some_and(f64::is_nan));
    let task = evaluator.task();
    let at = zero(&evaluator).unwrap();
    for mode in [DMatrix::zeros(2, 1), DMatrix::from_element(2, 1, f64::NAN)] {
        assert!(noise_of_mode(task, &softmax, &at, &mode, 64, 1).is_err());
    }
}

/// The quadrature at coordinates that are no numbers has no value, says so, and does not count it among its errors.
#[test]
fn a_quadrature_of_what_is_no_number_has_no_value() {
    let task = Task::new(5, flips()).unwrap();
    for activation in Activation::ALL {
        let quadrature = Quadrature::new(&task, 2, activation.into(), 1e-6).unwrap();
        let m = DMatrix::from_column_slice(2, 1, &[1.0, -1.0]);
        let good = Coordinates { m, c: DMatrix::zeros(2, 2), b: vec![0.0; 2] };
        quadrature.gradient_to_tolerance(&good).unwrap();
        for value in NOT_FINITE {
            let spoil: [fn(&mut Coordinates, f64); 3] =
                [|at, v| at.m[(1, 0)] = v, |at, v| at.c[(1, 1)] = v, |at, v| at.b[1] = v];
            for spoil in spoil {
                let mut at = good.clone();
                spoil(&mut at, value);
                for gradient in [false, true] {
                    let found = quadrature.evaluate(&at, gradient);
                    assert!(found.loss.value().is_nan() && found.error_estimate == f64::INFINITY, "{found:?}");
                }
                assert!(quadrature.loss_to_tolerance(&at).is_err() && quadrature.gradient_to_tolerance(&at).is_err());
                assert!(quadrature.moments(&at).gx.iter().all(|v| v.is_nan()));
                assert!(quadrature.head_moments(&at).is_none());
            }
        }
        assert!(quadrature.worst_error() <= 1e-6);
        assert!(Averages::Exact(quadrature).missed().is_none());
    }
}

#[test]
fn floors_and_risks_that_are_no_numbers_are_none() {
    let task = Task::new(5, flips()).unwrap();
    for activation in Activation::ALL {
        assert!(floor(&task, 2, &activation.into(), f64::NAN).is_nan());
    }
    for tolerance in NOT_FINITE {
        assert!(bayes_risk(&task, tolerance).is_err());
    }
}
