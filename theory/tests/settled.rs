//! Ends and slow passages of flows, the state at an event, and solvers that make no progress.

use headflow_model::{
    Activation, Attention, Bias, OrderParameters, Quantity, StopReason, Task, Theta, Unwatched, largest, largest_size,
    smallest,
};
use headflow_theory::flow::{Event, Method, Options, Until, average, derivative, solve};
use headflow_theory::moments::{Coordinates, Evaluator};
use headflow_theory::quadrature::Quadrature;
use headflow_theory::quasi_monte_carlo::QuasiMonteCarlo;
use headflow_theory::settled::{Settled, settled};
use headflow_theory::stability::{linearise, unit_of_rates, unspecialised};
use nalgebra::{DMatrix, DVector};

/// The default of `stationary_tolerance`.
const TOLERANCE: f64 = 1e-2;

fn task() -> Task {
    Task::new(5, Theta::Flip { nu: vec![2.0] }).unwrap()
}

fn exact() -> Quadrature {
    Quadrature::new(&task(), 2, Activation::Softmax.into(), 1e-8).unwrap()
}

fn sampled(activation: Activation, scramble: u32) -> QuasiMonteCarlo {
    QuasiMonteCarlo::new(&task(), 2, activation.into(), 1024, 5, scramble).unwrap()
}

fn start(m: [f64; 2], size: f64) -> OrderParameters {
    let m = DMatrix::from_row_slice(2, 1, &m);
    let r = &m * m.transpose() + DMatrix::identity(2, 2) * size * size;
    OrderParameters::new(m, r, vec![0.0; 2]).unwrap()
}

/// Equal heads, which nothing separates on fixed points: the sums that they see are the same, bit for bit.
fn equal() -> OrderParameters {
    OrderParameters::new(DMatrix::from_element(2, 1, 0.1), DMatrix::from_element(2, 2, 0.01), vec![0.0; 2]).unwrap()
}

fn look<E: Evaluator>(evaluator: &E, (time, at): &(f64, Coordinates)) -> Settled {
    settled(evaluator, at, 0.0, *time, TOLERANCE, &Unwatched)
}

/// Near `k = 0` a flow hardly moves, but grows at the rate of section 8; with time it comes to an end that does not
/// depend on how long one looks.
#[test]
fn a_slow_passage_is_not_an_end() {
    let quadrature = exact();
    let ends = |m: [f64; 2], times: &[f64]| -> Vec<Settled> {
        let each = times.iter().map(|&time| {
            let solution = solve(&quadrature, &start(m, 1e-6), &Options::new(0.0, vec![time]), &Unwatched).unwrap();
            look(&quadrature, &solution.end.unwrap())
        });
        each.collect()
    };
    // kappa = (2 / (L H)) (1 - 1/L) (1 - 2/L) nu^2.
    let kappa = 0.2 * 0.8 * 0.6 * 4.0;
    let [passage, end, later] = &ends([2e-6, -1e-6], &[10.0, 400.0, 4000.0])[..] else { panic!() };
    assert!(!passage.settled && passage.rests(), "{passage:?}");
    // The error of a difference with step 1e-4, in units of the rates themselves.
    assert!((passage.growth_rate.unwrap() - kappa).abs() < 1e-3 * kappa, "{passage:?} against {kappa}");
    assert!(end.settled && later.settled && end.growth_rate.unwrap() < 0.0, "{end:?} {later:?}");
    assert!((end.growth_rate.unwrap() - later.growth_rate.unwrap()).abs() < 1e-3 * kappa);
    assert!(passage.describe().contains("slow passage") && end.describe().starts_with("settled at"));
    // A symmetric start stays on the saddle for ever, and is never an end.
    let qmc = sampled(Activation::Softmax, 0);
    for time in [400.0, 4000.0] {
        let solution = solve(&qmc, &equal(), &Options::new(0.0, vec![time]), &Unwatched).unwrap();
        let passage = look(&qmc, &solution.end.unwrap());
        assert!(!passage.settled && passage.rests() && passage.growth_rate.unwrap() > 0.1 * kappa, "{passage:?}");
    }
    // A flow on its way has a drift, and no rate that means anything.
    let [way] = &ends([0.3, -0.2], &[1.0])[..] else { panic!() };
    assert!(!way.settled && !way.rests() && way.growth_rate.is_none(), "{way:?}");
}

/// With noise: at the point that it holds, rates along the features are those of `stability`, exact there.
#[test]
fn noise_holds_a_saddle_too() {
    let noise = 1.0;
    let qmc = sampled(Activation::Softmax, 0);
    let held = unspecialised(std::slice::from_ref(&qmc), noise).unwrap();
    let expected = linearise(std::slice::from_ref(&qmc), &held, &Unwatched).unwrap().along_features().modes[0].rate;
    let found = settled(&qmc, &held, noise, 400.0, 10.0, &Unwatched);
    let rate = found.growth_rate.unwrap();
    // On fixed points m = 0 is stationary and symmetric only to their error, some 1 / 1024 of a rate.
    assert!(expected > 0.0 && (rate - expected).abs() < 2e-2 * expected, "{rate} against {expected}");
    assert!(!settled(&qmc, &held, noise, 400.0, TOLERANCE, &Unwatched).settled);
}

/// The largest rate of the flow in `(m, r, b)`, by central differences: a slow twin, away from the border of the cone.
fn slow_growth<E: Evaluator>(evaluator: &E, at: &Coordinates, noise: f64) -> f64 {
    let heads = at.m.nrows();
    let trained = evaluator.attention().bias == Bias::Trained;
    let places: Vec<(usize, usize)> = (0..heads).flat_map(|h| (0..=h).map(move |k| (h, k))).collect();
    let size = heads + places.len() + if trained { heads } else { 0 };
    let drift = |i: usize, step: f64| {
        let (mut m, mut r, mut b) = (at.m.clone(), at.r(), at.b.clone());
        if i < heads {
            m[(i, 0)] += step;
        } else if let Some(&(h, k)) = places.get(i - heads) {
            r[(h, k)] += step;
            r[(k, h)] = r[(h, k)];
        } else {
            b[i - heads - places.len()] += step;
        }
        let d = derivative(evaluator, &OrderParameters::new(m, r, b).unwrap(), noise);
        let all = d.m.iter().copied().chain(places.iter().map(|&place| d.r[place])).chain(d.b.clone());
        DVector::from_vec(all.take(size).collect())
    };
    let columns: Vec<DVector<f64>> = (0..size).map(|i| (drift(i, 1e-5) - drift(i, -1e-5)) / 2e-5).collect();
    largest(DMatrix::from_columns(&columns).complex_eigenvalues().iter().map(|rate| rate.re))
}

/// The Jacobian in which small steps never leave the cone has the rates of the one in the overlaps, the noise's share included.
#[test]
fn rates_are_those_of_the_overlaps() {
    for attention in Attention::all() {
        let qmc = QuasiMonteCarlo::new(&task(), 2, attention, 512, 5, 0).unwrap();
        let noise = 1.0;
        let options = Options::new(noise, vec![4000.0]);
        let solution = solve(&qmc, &start([0.3, -0.2], 0.5), &options, &Unwatched).unwrap();
        let (time, at) = solution.end.unwrap();
        let least = smallest((&at.c * at.c.transpose()).symmetric_eigenvalues().iter());
        let found = settled(&qmc, &at, noise, time, 1e-2, &Unwatched);
        // The two agree where the flow rests, and the twin's steps fit into the cone.
        if !found.rests() || least < 1e-3 {
            continue;
        }
        let (found, slow) = (found.growth_rate.unwrap(), slow_growth(&qmc, &at, noise));
        // The error of forward differences with a step of 1e-4, and what a drift of 1e-2 of the limit leaves.
        let allowed = 2e-3 * unit_of_rates(&qmc) + 1e-2 * slow.abs();
        println!("{attention:?}: {found} against {slow}");
        assert!((found - slow).abs() < allowed, "{attention:?}: {found} against {slow}");
    }
    // Softmax rests there: the comparison is not empty.
    let qmc = sampled(Activation::Softmax, 0);
    let solution = solve(&qmc, &start([0.3, -0.2], 0.5), &Options::new(1.0, vec![4000.0]), &Unwatched).unwrap();
    let (time, at) = solution.end.unwrap();
    let rate = settled(&qmc, &at, 1.0, time, TOLERANCE, &Unwatched).growth_rate.unwrap();
    // Without the noise's share the rate is another one.
    let without = slow_growth(&qmc, &at, 1e-12);
    assert!(
        (rate - slow_growth(&qmc, &at, 1.0)).abs() < 1e-2 * rate.abs() && (rate - without).abs() > 0.05 * rate.abs()
    );
}

#[test]
fn a_flow_goes_on_until_it_has_settled() {
    let times: Vec<f64> = (0..=400).map(|t| 4.0 * f64::from(t)).collect();
    let until = Some(Until { first: 10.0, tolerance: TOLERANCE });
    let options = Options { until, ..Options::new(0.0, times) };
    let quadrature = exact();
    let solution = solve(&quadrature, &start([0.2, -0.1], 0.1), &options, &Unwatched).unwrap();
    let StopReason::Settled { time } = solution.stop else { panic!("{:?}", solution.stop) };
    // A time of a look, and the one before it was too early.
    assert_eq!((time / 10.0).log2().fract(), 0.0);
    assert_eq!(solution.trajectory.times.last(), Some(&time));
    assert!(look(&quadrature, &solution.end.unwrap()).settled && time > 10.0);
    let before =
        solve(&quadrature, &start([0.2, -0.1], 0.1), &Options::new(0.0, vec![time / 2.0]), &Unwatched).unwrap();
    assert!(!look(&quadrature, &before.end.unwrap()).settled);

    // What cannot settle ends at the last time, and says what is left.
    let stuck = solve(&sampled(Activation::Softmax, 0), &equal(), &options, &Unwatched).unwrap();
    let StopReason::NotSettled { time, drift, growth_rate } = stuck.stop else { panic!("{:?}", stuck.stop) };
    assert_eq!(time, 1600.0);
    assert!(drift.unwrap() < TOLERANCE * unit_of_rates(&quadrature) && growth_rate.unwrap() > 0.03);
    assert_eq!(stuck.trajectory.times.len(), 401);
    assert!(stuck.stop.describe().contains("m0") && !stuck.stop.as_requested() && stuck.stop.is_whole());

    // Scrambles end together, at the last one's time.
    let qmc: Vec<_> = (0..4).map(|s| sampled(Activation::BayesSoftmax, s)).collect();
    let flow = average(&qmc, &start([0.2, -0.1], 0.1), &options, &Unwatched).unwrap();
    let StopReason::Settled { time } = flow.stop else { panic!("{:?}", flow.stop) };
    assert!(flow.solutions.iter().all(|s| s.trajectory.times.last() == Some(&time)));
    assert_eq!(flow.estimate.mean.times.last(), Some(&time));
}

/// The state at an event is the last record, at the event's time: of one flow, and of several at their mean time.
#[test]
fn the_state_at_an_event_is_recorded() {
    let times: Vec<f64> = (0..=40).map(f64::from).collect();
    for noise in [0.0, 0.5] {
        let qmc: Vec<_> = (0..3).map(|s| sampled(Activation::Softmax, s)).collect();
        let free = average(&qmc, &start([0.3, -0.2], 0.5), &Options::new(noise, times.clone()), &Unwatched).unwrap();
        let losses: Vec<f64> = free.estimate.mean.path(Quantity::Loss).collect();
        let target = 0.4 * losses[10] + 0.6 * losses[11];
        let options = Options { events: vec![Event::LossBelow(target)], ..Options::new(noise, times.clone()) };
        let flow = average(&qmc, &start([0.3, -0.2], 0.5), &options, &Unwatched).unwrap();
        for solution in &flow.solutions {
            let StopReason::LossBelow { time, .. } = solution.stop else { panic!("{:?}", solution.stop) };
            let path = &solution.trajectory;
            assert_eq!(path.times.last(), Some(&time));
            assert!(path.times.is_sorted_by(|a, b| a < b));
            // The tolerance of the steps.
            assert!((path.rows.last().unwrap()[0] - target).abs() < 1e-6, "noise {noise}");
            let exact = solve(&qmc[0], &start([0.3, -0.2], 0.5), &Options::new(noise, vec![time]), &Unwatched).unwrap();
            if std::ptr::eq(solution, &flow.solutions[0]) {
                for (a, b) in exact.trajectory.rows[0].iter().zip(path.rows.last().unwrap()) {
                    assert!((a - b).abs() < 1e-4, "{a} {b}");
                }
            }
        }
        let StopReason::LossBelow { time, .. } = flow.stop else { panic!("{:?}", flow.stop) };
        let mean = &flow.estimate.mean;
        assert_eq!(mean.times.last(), Some(&time));
        assert!(
            mean.times.is_sorted_by(|a, b| a < b)
                && mean.times[..mean.times.len() - 1] == times[..mean.times.len() - 1]
        );
        assert!((mean.rows.last().unwrap()[0] - target).abs() < 1e-6);
    }
    // Met at the start, and the start is not among the times.
    let options = Options { events: vec![Event::LossBelow(10.0)], ..Options::new(0.0, vec![5.0]) };
    let solution = solve(&exact(), &start([0.3, -0.2], 0.5), &options, &Unwatched).unwrap();
    assert_eq!(solution.trajectory.times, [0.0]);
}

/// Where steps are taken but the time stands still, the flow stops with advice.
#[test]
fn a_flow_without_progress_stops() {
    let qmc = sampled(Activation::Softmax, 0);
    for method in Method::ALL {
        let options = Options { method, ..Options::new(1e300, vec![0.0, 400.0]) };
        let solution = solve(&qmc, &start([0.3, -0.2], 0.5), &options, &Unwatched).unwrap();
        let (StopReason::NoProgress { time, steps, .. } | StopReason::StepTooSmall { time, steps, .. }) = solution.stop
        else {
            panic!("{:?}", solution.stop)
        };
        assert!(time < 1e-12 && steps <= 1000, "{}: {:?}", method.name(), solution.stop);
        assert!(solution.stop.describe().contains("lower --gamma"), "{}", solution.stop.describe());
        assert_eq!(solution.trajectory.times, [0.0]);
    }
    let options =
        Options { relative_tolerance: 1e-30, absolute_tolerance: 1e-30, ..Options::new(0.0, vec![0.0, 400.0]) };
    let solution = solve(&qmc, &start([0.3, -0.2], 0.5), &options, &Unwatched).unwrap();
    assert!(matches!(solution.stop, StopReason::NoProgress { .. }), "{:?}", solution.stop);
    // A transient that is twelve orders faster than the flow is no standstill.
    for method in Method::ALL {
        let options = Options { method, ..Options::new(1e12, vec![0.0, 400.0]) };
        let solution = solve(&qmc, &start([0.3, -0.2], 0.5), &options, &Unwatched).unwrap();
        assert_eq!(solution.stop, StopReason::Completed, "{}", method.name());
    }
}

/// Heads that are off under bayes-softmax lower their biases for ever, ever more slowly: an end in due time. All attentions
/// come to one from a generic start.
#[test]
fn every_attention_comes_to_an_end() {
    for attention in Activation::ALL.map(Attention::from) {
        for noise in [0.0, 0.5] {
            let qmc = QuasiMonteCarlo::new(&task(), 2, attention, 1024, 5, 0).unwrap();
            let until = Some(Until { first: 400.0, tolerance: TOLERANCE });
            let options = Options { until, ..Options::new(noise, vec![0.0, 40_000.0]) };
            let solution = solve(&qmc, &start([0.3, -0.2], 0.5), &options, &Unwatched).unwrap();
            let StopReason::Settled { time } = solution.stop else {
                panic!("{attention:?} {noise}: {:?}", solution.stop)
            };
            // Twice as long later it is the same state, to what an alignment may still move.
            let path = solve(&qmc, &start([0.3, -0.2], 0.5), &Options::new(noise, vec![time, 2.0 * time]), &Unwatched);
            let path = path.unwrap().trajectory;
            assert!(
                largest_size((path.m(1) - path.m(0)).iter()) < 0.1 * 2.0,
                "{attention:?} {noise}: {} {}",
                path.m(0),
                path.m(1)
            );
        }
    }
}
