//! The flow as a mathematical object: gradients, coordinates, symmetries, orders of integration,
//! events, and what it does when it cannot go on.

use headflow_model::{
    Activation, Attention, Bias, Error, OrderParameters, Quantity, StopReason, Task, Theta, Unwatched, Watch,
    largest_size, smallest,
};
use headflow_theory::flow::{self, Event, Method, Options, derivative, solve};
use headflow_theory::moments::{Coordinates, Evaluator, Loss, Moments};
use headflow_theory::quasi_monte_carlo::QuasiMonteCarlo;
use nalgebra::DMatrix;
use proptest::prelude::*;

fn attentions() -> Vec<Attention> {
    Attention::all().collect()
}

fn task() -> Task {
    Task::new(5, Theta::Flip { nu: vec![2.0, 1.2] }).unwrap()
}

fn points(attention: Attention, count: usize, scramble: u32) -> QuasiMonteCarlo {
    QuasiMonteCarlo::new(&task(), 3, attention, count, 9, scramble).unwrap()
}

fn start() -> OrderParameters {
    let m = DMatrix::from_row_slice(3, 2, &[0.9, 0.1, -0.6, 0.4, 0.2, -0.5]);
    let keys = DMatrix::from_row_slice(3, 3, &[0.5, 0.0, 0.0, 0.1, 0.6, 0.0, -0.2, 0.1, 0.4]);
    let r = &m * m.transpose() + &keys * keys.transpose();
    OrderParameters::new(m, r, vec![0.3, -0.2, 0.1]).unwrap()
}

/// On fixed points the loss is a function of (m, C, b), and the moments are its exact gradient.
#[test]
fn moments_are_the_gradient_of_the_loss() {
    for attention in attentions() {
        let qmc = points(attention, 256, 0);
        let at = Coordinates::of(&start(), &Attention { bias: Bias::Trained, ..attention });
        let moments = qmc.moments(&at);
        let step = 1e-5;
        let slope = |change: &dyn Fn(&mut Coordinates, f64)| {
            let value = |by: f64| {
                let mut moved = at.clone();
                change(&mut moved, by);
                qmc.loss(&moved).value()
            };
            (value(step) - value(-step)) / (2.0 * step)
        };
        for h in 0..3 {
            for f in 0..2 {
                let numeric = slope(&|c, by| c.m[(h, f)] += by);
                assert!((numeric - moments.gx[(h, f)]).abs() < 1e-8, "{attention:?} m[{h}][{f}]");
            }
            for j in 0..3 {
                let numeric = slope(&|c, by| c.c[(h, j)] += by);
                assert!((numeric - moments.gc[(h, j)]).abs() < 1e-8, "{attention:?} C[{h}][{j}]");
            }
            let numeric = slope(&|c, by| c.b[h] += by);
            assert!((numeric - moments.gb[h]).abs() < 1e-8, "{attention:?} b[{h}]");
        }
    }
}

/// Gradient flow goes down: dE/dtau = -|gradient|^2, through the half-norm rule too.
#[test]
fn gradient_flow_descends_at_the_rate_of_its_gradient() {
    for attention in attentions() {
        let qmc = points(attention, 256, 0);
        let options =
            Options { relative_tolerance: 1e-9, absolute_tolerance: 1e-11, ..Options::new(0.0, vec![0.0, 1e-3]) };
        let path = solve(&qmc, &start(), &options, &Unwatched).unwrap().trajectory;
        let drop = (path.rows[1][0] - path.rows[0][0]) / 1e-3;
        let d = derivative(&qmc, &start(), 0.0);
        // In the coordinates (m, C) the squared speed is |dm|^2 + |dC|^2; dC from moments.
        let at = Coordinates::of(&start(), &attention);
        let moments = qmc.moments(&at);
        let mut dc = -moments.gc.clone();
        if attention.bias == Bias::HalfNorm {
            for h in 0..3 {
                for j in 0..3 {
                    dc[(h, j)] += moments.gb[h] * at.c[(h, j)];
                }
            }
        }
        let speed = d.m.norm_squared() + dc.norm_squared() + d.b.iter().map(|b| b * b).sum::<f64>();
        // The speed changes at rates of order 1, so its mean over 1e-3 is off by half of that, relatively: a quarter of 2e-3.
        assert!((drop + speed).abs() < 2e-3 * speed + 1e-9, "{attention:?}: {drop} against {}", -speed);
    }
}

/// The two sets of coordinates are the same flow: d(m m^T + C C^T) = dr.
#[test]
fn overlaps_follow_from_the_coordinates() {
    for attention in attentions() {
        let qmc = points(attention, 256, 0);
        let at = Coordinates::of(&start(), &attention);
        let moments = qmc.moments(&at);
        let (mut dm, mut dc) = (-moments.gx.clone(), -moments.gc.clone());
        if attention.bias == Bias::HalfNorm {
            for h in 0..3 {
                (0..2).for_each(|f| dm[(h, f)] += moments.gb[h] * at.m[(h, f)]);
                (0..3).for_each(|j| dc[(h, j)] += moments.gb[h] * at.c[(h, j)]);
            }
        }
        let half = &dm * at.m.transpose() + &dc * at.c.transpose();
        let expected = &half + half.transpose();
        let d = derivative(&qmc, &start(), 0.0);
        assert!(largest_size((&d.m - &dm).iter()) < 1e-12);
        assert!(largest_size((&d.r - expected).iter()) < 1e-12, "{attention:?}");
        let noisy = derivative(&qmc, &start(), 0.7);
        assert!(largest_size((&noisy.r - &d.r - moments.gg.clone().unwrap() * 0.7).iter()) < 1e-12);
    }
}

/// A vanishing learning rate is gradient flow, computed in the other coordinates: within 5 standard
/// errors over scrambles (the factor C turns on its way, and the points are not turned with it).
#[test]
fn small_learning_rates_approach_gradient_flow() {
    for attention in Activation::ALL.map(Attention::from) {
        let qmc: Vec<_> = (0..8).map(|s| points(attention, 4096, s)).collect();
        let ends = |noise: f64| -> Vec<Vec<f64>> {
            let options = Options::new(noise, vec![10.0]);
            qmc.iter().map(|q| solve(q, &start(), &options, &Unwatched).unwrap().trajectory.rows[0].clone()).collect()
        };
        let (flow, tiny) = (ends(0.0), ends(1e-9));
        for i in 0..flow[0].len() {
            let differences = flow.iter().zip(&tiny).map(|(a, b)| a[i] - b[i]);
            let (mean, error) = headflow_model::mean_and_error(differences);
            assert!(mean.abs() <= 5.0 * error + 1e-6, "{attention:?} {i}: {mean} +- {error}");
            assert!(error < 5e-3, "{attention:?} {i}: the error {error} would hide a difference");
        }
    }
}

/// The largest error at `times` with steps of size `step`.
fn error_of(method: Method, step: f64, times: &[f64], exact: &[Vec<f64>], qmc: &QuasiMonteCarlo) -> f64 {
    let options =
        Options { method, fixed_step: Some(step), absolute_tolerance: 1e-11, ..Options::new(0.0, times.to_vec()) };
    let solution = solve(qmc, &start(), &options, &Unwatched).unwrap();
    assert_eq!(solution.statistics.rejected, 0);
    let end = times[times.len() - 1];
    assert!((solution.statistics.steps as f64 - end / step).abs() <= 1.0, "{} steps", solution.statistics.steps);
    let errors = solution.trajectory.rows.iter().zip(exact).flat_map(|(row, exact)| {
        // The order parameters; the loss is a function of them.
        row.iter().zip(exact).skip(1).map(|(a, b)| (a - b).abs())
    });
    largest_size(errors)
}

/// The integrators have their textbook orders, at the ends of steps and between them (an interpolant
/// of order p has the local error h^(p+1), so a fourth-order one keeps a fifth-order method):
/// halving the step divides the error by `2^order`.
#[test]
fn integrators_and_dense_output_have_their_orders() {
    let qmc = points(Activation::Softmax.into(), 64, 0);
    let end = vec![16.0];
    // Times that no step falls on.
    let between: Vec<f64> = (1..=37).map(|i| 16.0 * f64::from(i) / 37.3).collect();
    let exact = |times: &[f64]| {
        let options =
            Options { relative_tolerance: 1e-12, absolute_tolerance: 1e-14, ..Options::new(0.0, times.to_vec()) };
        solve(&qmc, &start(), &options, &Unwatched).unwrap().trajectory.rows
    };
    // Method, steps, order at the end, order between steps.
    let cases = [
        (Method::Tsit45, [2.0, 1.0, 0.5], 5.0, 5.0),
        (Method::TrBdf2, [1.0, 0.5, 0.25], 2.0, 2.0),
        (Method::Esdirk34, [1.0, 0.5, 0.25], 3.0, 3.0),
    ];
    for (method, steps, order, dense) in cases {
        for (times, expected) in [(&end, order), (&between, dense)] {
            let exact = exact(times);
            let errors = steps.map(|step| error_of(method, step, times, &exact, &qmc));
            let measured = (errors[0] / errors[2]).log2() / 2.0;
            println!("{} at {} times: errors {errors:?}, order {measured:.2}", method.name(), times.len());
            // Another order is off by 1; the next term of the error, at steps this long, by less than 0.6.
            assert!((measured - expected).abs() < 0.6, "{}: order {measured} instead of {expected}", method.name());
        }
    }
}

#[test]
fn the_methods_agree() {
    let qmc = points(Activation::BayesSoftmax.into(), 64, 0);
    let end = |method| {
        let options =
            Options { method, relative_tolerance: 1e-8, absolute_tolerance: 1e-10, ..Options::new(0.5, vec![15.0]) };
        let solution = solve(&qmc, &start(), &options, &Unwatched).unwrap();
        assert_eq!(solution.stop, StopReason::Completed);
        solution.trajectory.rows[0].clone()
    };
    let reference = end(Method::Tsit45);
    for method in [Method::Bdf, Method::TrBdf2, Method::Esdirk34] {
        for (a, b) in end(method).iter().zip(&reference) {
            // 1e-8 a step, and thousands of steps at most: errors that add up stay below 1e-4.
            assert!((a - b).abs() < 1e-4, "{}: {a} {b}", method.name());
        }
    }
}

/// What the default experiment costs, against what the method must cost: a silent slowdown shows here, another release of
/// the solver does not.
#[test]
fn a_flow_costs_what_its_method_costs() {
    let task = Task::new(6, Theta::Flip { nu: vec![1.8, 1.5] }).unwrap();
    let qmc = QuasiMonteCarlo::new(&task, 4, Activation::Softmax.into(), 1024, 1, 0).unwrap();
    let m = DMatrix::from_row_slice(4, 2, &[0.08, 0.05, -0.1, 0.06, 0.12, -0.05, -0.09, -0.06]);
    let r = &m * m.transpose() + DMatrix::identity(4, 4) * 0.25;
    let start = OrderParameters::new(m, r, vec![0.0; 4]).unwrap();
    let cost = |relative_tolerance: f64| {
        let absolute_tolerance = 1e-2 * relative_tolerance;
        let options = Options { relative_tolerance, absolute_tolerance, ..Options::new(1.0, vec![400.0]) };
        solve(&qmc, &start, &options, &Unwatched).unwrap().statistics
    };
    let (coarse, fine) = (cost(1e-6), cost(1e-9));
    for cost in [coarse, fine] {
        // Seven stages a trial step (Tsitouras 2011), and two for the first step's length.
        assert!(cost.evaluations <= 7 * (cost.steps + cost.rejected) + 2, "{cost:?}");
        // A controller that is worth its name rejects fewer steps than it accepts.
        assert!(cost.rejected <= cost.steps, "{cost:?}");
    }
    // Steps of order 5 are (error)^(-1/5): a thousandth of the error takes 10^(3/5) = 4.0 times as many. Half and twice that,
    // since some are held by stability instead.
    let ratio = fine.steps as f64 / coarse.steps as f64;
    assert!((2.0..8.0).contains(&ratio), "{coarse:?}, {fine:?}: {ratio}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    /// Heads have no names: permuting them permutes everything.
    #[test]
    fn relabelling_heads_changes_nothing(swap in 0usize..3, which in 0usize..18) {
        let attention = attentions()[which];
        let qmc = points(attention, 64, 0);
        let order = [[1, 0, 2], [2, 1, 0], [1, 2, 0]][swap];
        let point = start();
        let at = Coordinates::of(&point, &attention);
        let permuted = Coordinates {
            m: at.m.select_rows(&order),
            c: at.c.select_rows(&order),
            b: order.iter().map(|&h| at.b[h]).collect(),
        };
        let (plain, other) = (qmc.moments(&at), qmc.moments(&permuted));
        prop_assert!((plain.loss.value() - other.loss.value()).abs() < 1e-13);
        prop_assert!(largest_size((plain.gx.select_rows(&order) - &other.gx).iter()) < 1e-13);
        prop_assert!(largest_size((plain.gc.select_rows(&order) - &other.gc).iter()) < 1e-13);
        for (i, &h) in order.iter().enumerate() {
            prop_assert!((plain.gb[h] - other.gb[i]).abs() < 1e-13);
            for (j, &k) in order.iter().enumerate() {
                prop_assert!((plain.gg.as_ref().unwrap()[(h, k)] - other.gg.as_ref().unwrap()[(i, j)]).abs() < 1e-13);
            }
        }
    }

    /// Flipping the sign of a feature of a symmetric theta, and rotating the coordinates outside
    /// the spikes, leave the averages where they are: within 5 standard errors over scrambles.
    #[test]
    fn signs_and_rotations_change_nothing(feature in 0usize..2, angle in 0.0f64..6.0, which in 0usize..18) {
        let attention = attentions()[which];
        let at = Coordinates::of(&start(), &attention);
        let mut flipped = at.clone();
        flipped.m.column_mut(feature).neg_mut();
        let (s, c) = angle.sin_cos();
        let rotation = DMatrix::from_row_slice(3, 3, &[c, -s, 0.0, s, c, 0.0, 0.0, 0.0, 1.0]);
        let rotated = Coordinates { c: &at.c * &rotation, ..at.clone() };
        prop_assert!(largest_size((rotated.r() - at.r()).iter()) < 1e-12);
        // u = m gx^T + C gc^T does not depend on the choice of C.
        let summary = |m: &Moments, at: &Coordinates, sign: f64| {
            let u = &at.m * m.gx.transpose() + &at.c * m.gc.transpose();
            let mut values = vec![m.loss.value(), sign * m.gx[(0, feature)], sign * m.gx[(2, feature)], m.gx[(1, 1 - feature)]];
            values.extend(u.iter().chain(m.gg.as_ref().unwrap().iter()).chain(&m.gb));
            values
        };
        let scrambles = 12;
        let differences: Vec<Vec<Vec<f64>>> = (0..scrambles)
            .map(|scramble| {
                let qmc = points(attention, 256, scramble);
                let plain = summary(&qmc.moments(&at), &at, 1.0);
                [(&flipped, -1.0), (&rotated, 1.0)]
                    .map(|(other, sign)| {
                        let other = summary(&qmc.moments(other), other, sign);
                        plain.iter().zip(other).map(|(a, b)| a - b).collect()
                    })
                    .to_vec()
            })
            .collect();
        for kind in 0..2 {
            for i in 0..differences[0][kind].len() {
                let (mean, error) = headflow_model::mean_and_error(differences.iter().map(|d| d[kind][i]));
                // t with 11 degrees of freedom: 7 is as rare as 5 for a normal variable.
                prop_assert!(mean.abs() <= 7.0 * error + 1e-12, "kind {kind}, number {i}: {mean} +- {error}");
            }
        }
    }
}

#[test]
fn events_stop_where_they_should() {
    let qmc = [points(Activation::Softmax.into(), 256, 0), points(Activation::Softmax.into(), 256, 1)];
    let times: Vec<f64> = (0..=40).map(f64::from).collect();
    let free = flow::average(&qmc, &start(), &Options::new(0.0, times.clone()), &Unwatched).unwrap();
    let losses: Vec<f64> = free.estimate.mean.path(Quantity::Loss).collect();
    let target = losses[17];
    let options = Options { events: vec![Event::LossBelow(target)], ..Options::new(0.0, times.clone()) };
    let stopped = flow::average(&qmc, &start(), &options, &Unwatched).unwrap();
    match stopped.stop {
        StopReason::LossBelow { value, time, standard_error, reached, scrambles } => {
            assert_eq!((reached, scrambles), (2, 2));
            assert_eq!(value, target);
            assert!((time - 17.0).abs() < 0.5 && standard_error.is_some(), "{time}");
        }
        other => panic!("{other:?}"),
    }
    assert!(stopped.estimate.mean.times.len() <= 18, "nothing is recorded beyond the event");

    let crossing = Event::AlignmentCrosses { head: 0, feature: 0, value: 1.2 };
    let options = Options { events: vec![crossing], ..Options::new(0.0, times.clone()) };
    let solution = solve(&qmc[0], &start(), &options, &Unwatched).unwrap();
    let StopReason::AlignmentCrossed { time, .. } = solution.stop else { panic!("{:?}", solution.stop) };
    let exact = solve(&qmc[0], &start(), &Options::new(0.0, vec![time]), &Unwatched).unwrap();
    assert!((exact.trajectory.m(0)[(0, 0)] - 1.2).abs() < 1e-4);

    let options = Options { events: vec![Event::LossBelow(10.0)], ..Options::new(0.0, times) };
    let solution = solve(&qmc[0], &start(), &options, &Unwatched).unwrap();
    assert!(matches!(solution.stop, StopReason::LossBelow { time: 0.0, .. }), "already below at the start");
}

/// An evaluator whose moments are tampered with.
struct Altered<F>(QuasiMonteCarlo, F);

impl<F: Fn(&Coordinates, &mut Moments) + Sync> Evaluator for Altered<F> {
    fn task(&self) -> &Task {
        self.0.task()
    }
    fn heads(&self) -> usize {
        self.0.heads()
    }
    fn attention(&self) -> &Attention {
        self.0.attention()
    }
    fn moments(&self, at: &Coordinates) -> Moments {
        let mut moments = self.0.moments(at);
        (self.1)(at, &mut moments);
        moments
    }
    fn loss(&self, at: &Coordinates) -> Loss {
        self.0.loss(at)
    }
}

/// Trial steps that leave the cone are rejected; where every step does, the flow ends there.
#[test]
fn the_cone_is_not_left() {
    let qmc = points(Activation::Softmax.into(), 64, 0);
    let times: Vec<f64> = (0..=50).map(|t| 0.1 * f64::from(t)).collect();
    // A noise term of the wrong sign drives r - m m^T out of the cone.
    let shrinking =
        Altered(qmc, |_: &Coordinates, moments: &mut Moments| moments.gg = Some(DMatrix::identity(3, 3) * -0.1));
    let solution = solve(&shrinking, &start(), &Options::new(1.0, times), &Unwatched).unwrap();
    let StopReason::LeftCone { time, .. } = solution.stop else { panic!("{:?}", solution.stop) };
    // The smallest eigenvalue of r - m m^T shrinks at about the rate 0.1.
    let lowest = smallest((start().r() - start().m() * start().m().transpose()).symmetric_eigenvalues().iter());
    assert!((0.5..2.0).contains(&(time / (lowest / 0.1))), "left at {time}");
    assert!(solution.statistics.rejected > 0);
    for (t, row) in solution.trajectory.rows.iter().enumerate() {
        let m = solution.trajectory.m(t);
        let r = DMatrix::from_fn(3, 3, |head, other| {
            row[solution.trajectory.shape.index(Quantity::Overlap { head, other })]
        });
        assert!(smallest((&r - &m * m.transpose()).symmetric_eigenvalues().iter()) > -1e-6);
    }
}

/// The tolerance of the steps has no say in what counts as a key.
#[test]
fn loose_tolerances_do_not_switch_keys_off() {
    let qmc = points(Activation::Softmax.into(), 1024, 0);
    let loss = |absolute_tolerance: f64| {
        let options = Options { absolute_tolerance, ..Options::new(1.0, vec![0.0]) };
        solve(&qmc, &start(), &options, &Unwatched).unwrap().trajectory.rows[0][0]
    };
    assert_eq!(loss(0.1), loss(1e-8));
}

/// Scrambles that do not all meet an event say so.
#[test]
fn a_mixed_ending_is_told_as_such() {
    let qmc: Vec<_> = (0..6).map(|s| points(Activation::Softmax.into(), 64, s)).collect();
    let times: Vec<f64> = (0..=10).map(f64::from).collect();
    let free = flow::average(&qmc, &start(), &Options::new(0.0, times.clone()), &Unwatched).unwrap();
    let mut last: Vec<f64> = free.solutions.iter().map(|s| s.trajectory.rows[10][0]).collect();
    last.sort_by(f64::total_cmp);
    let options = Options { events: vec![Event::LossBelow(0.5 * (last[1] + last[2]))], ..Options::new(0.0, times) };
    let flow = flow::average(&qmc, &start(), &options, &Unwatched).unwrap();
    let StopReason::LossBelow { reached, scrambles, .. } = flow.stop else { panic!("{:?}", flow.stop) };
    assert_eq!((reached, scrambles), (2, 6));
    assert!(flow.stop.describe().contains("2 of 6"), "{}", flow.stop.describe());
}

#[test]
fn trouble_is_a_typed_reason_that_keeps_what_was_recorded() {
    let times: Vec<f64> = (0..=50).map(f64::from).collect();
    let qmc = points(Activation::Softmax.into(), 64, 0);

    let broken = Altered(qmc.clone(), |at: &Coordinates, moments: &mut Moments| {
        if at.m[(0, 0)] > 1.0 {
            moments.gx[(1, 0)] = f64::NAN;
        }
    });
    let solution = solve(&broken, &start(), &Options::new(0.0, times.clone()), &Unwatched).unwrap();
    let StopReason::NotFinite { time, variable } = &solution.stop else { panic!("{:?}", solution.stop) };
    assert_eq!(variable, "m[1][0]");
    assert!(!solution.trajectory.times.is_empty() && solution.trajectory.times.iter().all(|t| t <= time));
    assert!(solution.trajectory.rows.iter().flatten().all(|v| v.is_finite()));

    let options = Options { max_steps: 3, ..Options::new(0.0, times.clone()) };
    let solution = solve(&qmc, &start(), &options, &Unwatched).unwrap();
    assert!(matches!(solution.stop, StopReason::StepBudget { steps: 3, .. }), "{:?}", solution.stop);
    assert!(solution.stop.describe().contains("--method bdf"));

    struct Impatient;
    impl Watch for Impatient {
        fn advance(&self, _: u64) {}
        fn interrupted(&self) -> bool {
            true
        }
    }
    let error = solve(&qmc, &start(), &Options::new(0.0, times), &Impatient).unwrap_err();
    assert_eq!(error, Error::interrupted("flow"));
}

#[test]
fn impossible_options_are_refused() {
    let qmc = points(Activation::Softmax.into(), 64, 0);
    let good = Options::new(0.0, vec![0.0, 1.0]);
    let cases = [
        Options { noise: -1.0, ..good.clone() },
        Options { noise: f64::NAN, ..good.clone() },
        Options { times: vec![], ..good.clone() },
        Options { times: vec![1.0, 1.0], ..good.clone() },
        Options { times: vec![-1.0], ..good.clone() },
        Options { relative_tolerance: 0.0, ..good.clone() },
        Options { events: vec![Event::LossBelow(f64::NAN)], ..good.clone() },
        Options { events: vec![Event::AlignmentCrosses { head: 3, feature: 0, value: 0.0 }], ..good },
    ];
    for options in cases {
        assert!(solve(&qmc, &start(), &options, &Unwatched).is_err(), "{options:?}");
    }
    let two_heads = OrderParameters::new(DMatrix::zeros(2, 2), DMatrix::identity(2, 2), vec![0.0; 2]).unwrap();
    assert!(solve(&qmc, &two_heads, &Options::new(0.0, vec![1.0]), &Unwatched).is_err());
}

/// Keys inside the span of the spikes (`r = m m^T`) are a legal start of a noisy flow.
#[test]
fn a_singular_start_is_no_trouble() {
    for attention in Activation::ALL.map(Attention::from) {
        let qmc = points(attention, 64, 0);
        let m = start().m().clone();
        let r = &m * m.transpose();
        let singular = OrderParameters::new(m, r, vec![0.0; 3]).unwrap();
        for noise in [0.0, 1.0] {
            let solution = solve(&qmc, &singular, &Options::new(noise, vec![0.0, 5.0]), &Unwatched).unwrap();
            assert_eq!(solution.stop, StopReason::Completed, "{attention:?} noise {noise}");
        }
    }
}

/// The same bits on 1, 2 and 3 threads.
#[test]
fn threads_do_not_change_a_bit() {
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let qmc = QuasiMonteCarlo::scrambles(&task(), 3, Activation::Softmax1.into(), 1 << 12, 2, 3).unwrap();
            flow::average(&qmc, &start(), &Options::new(0.5, vec![0.0, 3.0, 9.0]), &Unwatched).unwrap()
        })
    };
    let one = run(1);
    assert_eq!(one.estimate, run(2).estimate);
    assert_eq!(one.estimate, run(3).estimate);
}
