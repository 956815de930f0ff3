//! Work that is asked to stop: at any moment it stops, keeps what it has, and passes off nothing as a result.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use headflow_model::{Activation, Bias, Error, OrderParameters, StopReason, Task, Theta, Unwatched, Watch};
use headflow_theory::escape::rates_along;
use headflow_theory::evaluators::Averages;
use headflow_theory::flow::{Method, Options, average, solve};
use headflow_theory::moments::{Coordinates, Evaluator, Moments, Watched};
use headflow_theory::optimum::{self, optimum};
use headflow_theory::quadrature::Quadrature;
use headflow_theory::quasi_monte_carlo::QuasiMonteCarlo;
use headflow_theory::stability::{check_stationary, linearise, stationary_near, unspecialised, zero};
use nalgebra::DMatrix;

/// Interrupts from the `after`-th time on that it is asked, counted from 1.
struct After {
    asked: AtomicU64,
    after: u64,
}

impl After {
    fn new(after: u64) -> Self {
        Self { asked: AtomicU64::new(0), after }
    }

    /// How often `work` asks when it is left alone.
    fn count(work: impl FnOnce(&Self)) -> u64 {
        let never = Self::new(u64::MAX);
        work(&never);
        never.asked.into_inner()
    }
}

impl Watch for After {
    fn advance(&self, _: u64) {}

    fn interrupted(&self) -> bool {
        self.asked.fetch_add(1, Ordering::SeqCst) + 1 >= self.after
    }
}

fn theta() -> Theta {
    Theta::Flip { nu: vec![1.8, 1.2] }
}

fn points(heads: usize, count: usize, activation: Activation) -> QuasiMonteCarlo {
    QuasiMonteCarlo::new(&Task::new(4, theta()).unwrap(), heads, activation.into(), count, 3, 0).unwrap()
}

fn start() -> OrderParameters {
    let m = DMatrix::from_row_slice(3, 2, &[0.9, 0.1, -0.6, 0.4, 0.2, -0.5]);
    let r = &m * m.transpose() + DMatrix::identity(3, 3) * 0.2;
    OrderParameters::new(m, r, vec![0.0; 3]).unwrap()
}

fn is_none(moments: &Moments) -> bool {
    let values = moments.gx.iter().chain(moments.gc.iter()).chain(&moments.gb);
    values.chain(moments.gg.iter().flat_map(|gg| gg.iter())).all(|v| v.is_nan()) && moments.loss.value().is_nan()
}

/// Wherever it is broken off: the records of the unbroken flow up to there, all of them numbers, or no result.
#[test]
fn a_flow_keeps_what_it_has_recorded() {
    let qmc = points(3, 256, Activation::Softmax);
    for (noise, method) in [
        (0.0, Method::Tsit45),
        (0.5, Method::Tsit45),
        (0.0, Method::Bdf),
        (0.0, Method::TrBdf2),
        (0.5, Method::Esdirk34),
    ] {
        let options = Options { method, ..Options::new(noise, vec![0.0, 0.5, 1.0, 4.0]) };
        let whole = solve(&qmc, &start(), &options, &Unwatched).unwrap();
        let all = After::count(|watch| drop(solve(&qmc, &start(), &options, watch).unwrap()));
        assert!(all > 100);
        let mut lengths = vec![0];
        for after in (1..=all).step_by(7) {
            match solve(&qmc, &start(), &options, &After::new(after)) {
                Ok(solution) => {
                    let recorded = solution.trajectory.times.len();
                    assert_eq!(solution.trajectory.rows, whole.trajectory.rows[..recorded]);
                    if recorded < 4 {
                        assert!(matches!(solution.stop, StopReason::Interrupted { .. }), "{:?}", solution.stop);
                    }
                    assert!(solution.statistics.steps <= whole.statistics.steps);
                    assert!(solution.statistics.rejected <= whole.statistics.rejected);
                    lengths.push(recorded);
                }
                Err(error) => assert_eq!(error, Error::interrupted("flow")),
            }
        }
        lengths.dedup();
        assert_eq!(lengths[..4], [0, 1, 2, 3], "it stops later the later it is asked to");
    }
}

/// Of several flows, those that have recorded something make the average; none of them alone is no result.
#[test]
fn an_average_of_flows_keeps_what_there_is() {
    let sets: Vec<_> = (0..2)
        .map(|s| {
            QuasiMonteCarlo::new(&Task::new(4, theta()).unwrap(), 3, Activation::Softmax.into(), 256, 3, s).unwrap()
        })
        .collect();
    let options = Options::new(0.0, vec![0.0, 1.0]);
    let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    let run = |watch: &After| one.install(|| average(&sets, &start(), &options, watch));
    let half = After::count(|watch| drop(solve(&sets[0], &start(), &options, watch).unwrap()));
    // Within the second: the first is there.
    let flow = run(&After::new(half + 2)).unwrap();
    assert!(matches!(flow.stop, StopReason::Interrupted { .. }));
    assert_eq!(flow.estimate.count, 1);
    assert_eq!(flow.estimate.mean.times, [0.0, 1.0]);
    assert_eq!(run(&After::new(1)).unwrap_err(), Error::interrupted("flow"));
}

/// A search, a linearisation, a root solve: the whole result, or an interruption, never a part of one.
#[test]
fn what_has_no_parts_is_whole_or_interrupted() {
    let softmax = points(2, 256, Activation::BayesSoftmax);
    let options = optimum::Options { starts: 2, max_iterations: 30, ..Default::default() };
    let best = optimum(&softmax, &options, &Unwatched).unwrap();
    let all = After::count(|watch| drop(optimum(&softmax, &options, watch).unwrap()));
    for after in (1..=all + 10).step_by(all as usize / 60) {
        match optimum(&softmax, &options, &After::new(after)) {
            Ok(found) => assert_eq!(found, best),
            Err(error) => assert_eq!(error, Error::interrupted("optimum")),
        }
    }
    let sets = [points(3, 256, Activation::Softmax)];
    let at = zero(&sets[0]).unwrap();
    let rates = |watch: &dyn Watch| linearise(&sets, &at, watch);
    let whole = rates(&Unwatched).unwrap();
    let all = After::count(|watch| drop(rates(watch).unwrap()));
    for after in (1..=all + 2).step_by(11) {
        match rates(&After::new(after)) {
            Ok(found) => assert_eq!(found, whole),
            Err(error) => assert_eq!(error, Error::interrupted("stability")),
        }
    }
    let pushed = Task::new(4, Theta::Gaussian { mean: vec![1.0], sd: Some(vec![0.5]), cov: None }).unwrap();
    let pushed = [QuasiMonteCarlo::new(&pushed, 2, Activation::Softmax.into(), 256, 1, 0).unwrap()];
    let common = |watch: &dyn Watch| unspecialised(&Watched::all(&pushed, watch), 0.3);
    let whole = common(&Unwatched).unwrap();
    let all = After::count(|watch| drop(common(watch).unwrap()));
    for after in (1..=all + 2).step_by(5) {
        match common(&After::new(after)) {
            Ok(found) => assert_eq!(found, whole),
            Err(error) => assert_eq!(error, Error::interrupted("stability")),
        }
    }
    let now = After::new(0);
    let watched = Watched::all(&sets, &now);
    let interrupted = Error::interrupted("stability");
    assert_eq!(check_stationary(&watched, &start(), 0.0, 1.0).unwrap_err(), interrupted);
    assert_eq!(stationary_near(&watched, &start(), 0.0, 1.0, 1e-6).unwrap_err(), interrupted);
    let mode = DMatrix::from_row_slice(3, 2, &[1.0, 0.0, -1.0, 0.0, 0.0, 0.0]);
    let error = rates_along(&sets[0], &start(), &mode, 0.0, &[0.0, 1.0], &now).unwrap_err();
    assert!(matches!(error, Error::Interrupted { .. }), "{error}");
}

/// Every evaluator, by any way to it, gives nothing at all once it is interrupted, and its own numbers before.
#[test]
fn averages_are_whole_or_none() {
    let at = Coordinates {
        m: DMatrix::from_row_slice(2, 2, &[1.0, 0.2, -0.7, 0.4]),
        c: DMatrix::identity(2, 2) * 0.3,
        b: vec![0.0; 2],
    };
    let task = Task::new(4, theta()).unwrap();
    let exact = |activation: Activation| Quadrature::new(&task, 2, activation.into(), 1e-6).unwrap();
    let all = [
        Averages::Sampled(points(2, 4096, Activation::Softmax)),
        Averages::Exact(exact(Activation::Softmax)),
        Averages::Exact(exact(Activation::Softmax1)),
        Averages::Exact(exact(Activation::BayesSoftmax)),
    ];
    for averages in &all {
        let whole = averages.moments(&at);
        let asked = After::count(|watch| assert_eq!(averages.moments_watched(&at, watch), whole));
        assert!(asked > 3, "{asked}");
        for after in 1..=asked {
            let watch = After::new(after);
            let watched = Watched::new(averages, &watch);
            assert!(is_none(&watched.moments(&at)), "{after} of {asked}");
            assert!(watched.interrupted() && !averages.interrupted());
        }
        assert!(averages.loss_watched(&at, &After::new(2)).value().is_nan());
        assert_eq!(Watched::new(averages, &Unwatched).loss(&at), averages.loss(&at));
    }
}

/// An evaluation that is broken off is no error of the quadrature, and a clone's errors are not the original's.
#[test]
fn a_quadrature_keeps_its_own_record_of_errors() {
    let attention = headflow_model::Attention { bias: Bias::Trained, ..Activation::BayesSoftmax.into() };
    let task = Task::new(4, Theta::Flip { nu: vec![1.0] }).unwrap();
    let original = Quadrature::new(&task, 2, attention, 1e-9).unwrap();
    let easy = Coordinates { m: DMatrix::from_row_slice(2, 1, &[0.5, -0.5]), c: DMatrix::zeros(2, 2), b: vec![0.0; 2] };
    original.evaluate(&easy, true);
    let before = original.worst_error();
    assert!(before > 0.0 && before < 1e-8, "{before}");
    original.evaluate_watched(&easy, true, &After::new(1));
    assert_eq!(original.worst_error(), before);
    let clone = original.clone();
    assert_eq!(clone.worst_error(), 0.0);
    let other = Coordinates { m: DMatrix::from_row_slice(2, 1, &[2.0, -2.0]), ..easy };
    clone.evaluate(&other, true);
    assert!(clone.worst_error() > 0.0 && clone.worst_error() != before, "{}", clone.worst_error());
    assert_eq!(original.worst_error(), before);
}

/// The longest time between two looks at the watch, on one thread.
struct Looks(std::sync::Mutex<(Option<Instant>, Duration)>);

impl Watch for Looks {
    fn advance(&self, _: u64) {}

    fn interrupted(&self) -> bool {
        let (last, longest) = &mut *self.0.lock().unwrap();
        *longest = (*longest).max(last.map_or(Duration::ZERO, |last| last.elapsed()));
        *last = Some(Instant::now());
        false
    }
}

/// The largest sampled averages, of 1024 heads, look at the watch all the time: not once in seconds, as a block takes.
#[test]
fn the_largest_averages_look_within_a_block() {
    let heads = 1024;
    let qmc = points(heads, 64, Activation::Softmax);
    let m = DMatrix::from_fn(heads, 2, |h, f| 0.1 * ((3 * h + 5 * f) % 7) as f64 - 0.3);
    let at = Coordinates { m, c: DMatrix::identity(heads, heads) * 0.3, b: vec![0.0; heads] };
    let looks = Looks(std::sync::Mutex::new((None, Duration::ZERO)));
    let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    one.install(|| qmc.moments_watched(&at, &looks));
    let (_, longest) = looks.0.into_inner().unwrap();
    assert!(longest > Duration::ZERO && longest < Duration::from_millis(500), "{longest:?}");
}
