//! Growth rates against the closed forms of `theory/README.md` sections 8 and 11, and stationary points.

use headflow_model::{
    Activation, Aggregation, Attention, Bias, OrderParameters, Task, Theta, Unwatched, Watch, largest, largest_size,
};
use headflow_theory::escape::noise_of_mode;
use headflow_theory::flow::derivative;
use headflow_theory::moments::{Coordinates, Evaluator};
use headflow_theory::quasi_monte_carlo::QuasiMonteCarlo;
use headflow_theory::stability::{
    Direction, Kind, Stability, check_stationary, linearise, stationary_near, unspecialised, zero,
};
use nalgebra::DMatrix;
use proptest::prelude::*;

fn evaluators(length: usize, heads: usize, theta: &Theta, attention: Attention) -> Vec<QuasiMonteCarlo> {
    let task = Task::new(length, theta.clone()).unwrap();
    QuasiMonteCarlo::scrambles(&task, heads, attention, 1 << 15, 3, 4).unwrap()
}

fn cases() -> [(usize, usize, Theta); 3] {
    [
        (6, 4, Theta::Flip { nu: vec![1.8, 1.5] }),
        (5, 3, Theta::Flip { nu: vec![2.0] }),
        (3, 2, Theta::Gaussian { mean: vec![0.0], sd: Some(vec![1.2]), cov: None }),
    ]
}

/// The rate of the modes of one kind and direction, and how many they are.
fn rate(stability: &Stability, kind: Kind, direction: Direction) -> (f64, usize) {
    let mut found = stability.modes.iter().filter(|m| m.kind == kind && m.direction == direction);
    let mode = found.next().unwrap_or_else(|| panic!("no {kind:?} modes {direction:?} in {:?}", stability.modes));
    assert!(found.next().is_none(), "two families are {kind:?} {direction:?}");
    (mode.rate, mode.degeneracy)
}

/// `omega = 2 (1 - 1/L) / (H L)` and `pi`, the mass that a head shares among its tokens.
fn constants(length: usize, heads: usize, activation: Activation) -> (f64, f64) {
    let (l, h) = (length as f64, heads as f64);
    let mass = match activation {
        Activation::Softmax => 1.0,
        Activation::Softmax1 => 1.0 / h,
        Activation::BayesSoftmax => 0.0,
    };
    (2.0 / (h * l) * (1.0 - 1.0 / l), mass)
}

/// The table of section 11.3, every entry, to 1e-3 of `kappa_1`.
#[test]
fn rates_at_zero_are_the_closed_forms() {
    for activation in Activation::ALL {
        for (length, heads, theta) in cases() {
            let (l, h) = (length as f64, heads as f64);
            let evaluators = evaluators(length, heads, &theta, activation.into());
            let stability = linearise(&evaluators, &zero(&evaluators[0]).unwrap(), &Unwatched).unwrap();
            let (omega, mass) = constants(length, heads, activation);
            let second = theta.second_moment();
            let kappa = |f: usize| omega * (1.0 - 2.0 * mass / l) * second[(f, f)];
            let check = |kind: Kind, direction: Direction, claimed: f64, count: usize| {
                let (measured, degeneracy) = rate(&stability, kind, direction);
                let name = format!("{activation:?} L={length} H={heads} {kind:?} {direction:?}");
                assert!((measured - claimed).abs() < 1e-3 * kappa(0), "{name}: {measured}, claimed {claimed}");
                assert_eq!(degeneracy, count, "{name}");
            };
            let sigma = 1.0 - (2.0 * mass - mass * mass) / l;
            for f in 0..theta.features() {
                let lambda = second[(f, f)];
                check(Kind::Specialising, Direction::Feature(f), kappa(f), heads - 1);
                let common = match activation {
                    Activation::Softmax1 => kappa(f) - 2.0 / (h * l) * sigma * (1.0 + lambda / l),
                    _ => omega * ((1.0 - 3.0 / l) * lambda - 1.0),
                };
                check(Kind::Symmetric, Direction::Feature(f), common, 1);
            }
            let outside = if activation == Activation::Softmax1 { -2.0 / (h * l) * sigma } else { -omega };
            check(Kind::Symmetric, Direction::Outside, outside, 1);
            check(Kind::Specialising, Direction::Outside, 0.0, heads - 1);
            if activation != Activation::Softmax {
                let biases = if activation == Activation::Softmax1 {
                    -2.0 / (h * l) * (1.0 - 1.0 / h) * (1.0 - 1.0 / h)
                } else {
                    0.0
                };
                check(Kind::Symmetric, Direction::Biases, biases, 1);
                check(Kind::Specialising, Direction::Biases, 0.0, heads - 1);
            }
        }
    }
}

/// `dm_h/dtau = omega E theta` at `k = 0`, all activations, to 1e-3.
#[test]
fn the_mean_push_is_the_closed_form() {
    let theta = Theta::Gaussian { mean: vec![1.0, -0.5], sd: Some(vec![0.5, 1.5]), cov: None };
    for activation in Activation::ALL {
        let evaluators = evaluators(6, 4, &theta, activation.into());
        let at = zero(&evaluators[0]).unwrap();
        let point = OrderParameters::new(at.m.clone(), at.r(), at.b.clone()).unwrap();
        let (omega, _) = constants(6, 4, activation);
        for (f, mu) in theta.mean().iter().enumerate() {
            let push = evaluators.iter().map(|e| derivative(e, &point, 0.0).m.column(f).mean()).sum::<f64>() / 4.0;
            assert!((push - omega * mu).abs() < 1e-3 * omega, "{activation:?} s{f}: {push} {}", omega * mu);
        }
    }
}

/// At `r_hh' = r`, `m = 0`, the specialising rate moves as section 11.5 says, to first order in `r`; at
/// independent keys of norm 1 it is section 8's 0.541.
#[test]
fn overlaps_change_the_rate() {
    for (length, heads, theta) in cases() {
        let lambda = theta.second_moment()[(0, 0)];
        let l = length as f64;
        for activation in [Activation::Softmax, Activation::BayesSoftmax] {
            let evaluators = evaluators(length, heads, &theta, activation.into());
            let (omega, mass) = constants(length, heads, activation);
            let kappa = omega * (1.0 - 2.0 * mass / l) * lambda;
            let slope = match activation {
                Activation::Softmax => -omega / l * ((3.0 - 8.0 / l) * lambda - 2.0),
                _ => -kappa / l,
            };
            let mut at = zero(&evaluators[0]).unwrap();
            let at_overlap = |r: f64, at: &mut Coordinates| {
                at.c.column_mut(0).fill(f64::sqrt(r));
                rate(&linearise(&evaluators, at, &Unwatched).unwrap(), Kind::Specialising, Direction::Feature(0)).0
            };
            let r = 0.02;
            let measured = (at_overlap(2.0 * r, &mut at) - at_overlap(r, &mut at)) / r;
            // The second difference, 3 r / 2 times the curvature, is of relative order r.
            assert!((measured - slope).abs() < 0.1 * slope.abs() + 1e-3 * kappa, "{activation:?}: {measured} {slope}");
        }
    }
    let evaluators = evaluators(6, 2, &Theta::Flip { nu: vec![3.0] }, Activation::Softmax.into());
    let at = Coordinates { m: DMatrix::zeros(2, 1), c: DMatrix::identity(2, 2), b: vec![0.0; 2] };
    let stability = linearise(&evaluators, &at, &Unwatched).unwrap();
    let fastest = stability.modes.iter().find(|m| m.direction == Direction::Feature(0)).unwrap();
    assert!((fastest.rate - 0.541).abs() < 1.5e-3, "{}", fastest.rate);
    assert_eq!((stability.rank, fastest.kind), (2, Kind::Specialising));
}

/// `half-norm` changes nothing for softmax and bayes-softmax; differences of softmax1's keys outside the
/// spikes grow at `4 (H L - L - 1) / (L + 1)^4`.
#[test]
fn half_norm_biases_have_their_rates() {
    let (length, heads, theta) = (5, 3, Theta::Flip { nu: vec![2.0] });
    for activation in Activation::ALL {
        let attention =
            Attention { activation, bias: Bias::HalfNorm, aggregation: Attention::from(activation).aggregation };
        let evaluators = evaluators(length, heads, &theta, attention);
        let stability = linearise(&evaluators, &zero(&evaluators[0]).unwrap(), &Unwatched).unwrap();
        let outside = rate(&stability, Kind::Specialising, Direction::Outside).0;
        let claimed = if activation == Activation::Softmax1 { 4.0 * (15.0 - 5.0 - 1.0) / 6f64.powi(4) } else { 0.0 };
        assert!((outside - claimed).abs() < 1e-4, "{activation:?}: {outside} {claimed}");
        if activation != Activation::Softmax1 {
            let (omega, mass) = constants(length, heads, activation);
            let along = rate(&stability, Kind::Specialising, Direction::Feature(0)).0;
            assert!((along - omega * (1.0 - 2.0 * mass / 5.0) * 4.0).abs() < 1e-3 * along);
        }
    }
}

/// Overlaps that the noise of a small learning rate holds: section 11.3's last line.
#[test]
fn noise_holds_the_overlap_of_the_closed_form() {
    let noise = 0.02;
    for activation in Activation::ALL {
        for (length, heads, theta) in cases() {
            let (l, h) = (length as f64, heads as f64);
            let evaluators = evaluators(length, heads, &theta, activation.into());
            let at = unspecialised(&evaluators, noise).unwrap();
            let (_, mass) = constants(length, heads, activation);
            let claimed = match activation {
                Activation::Softmax1 => noise / (h * l) * (l - 1.0) / (l - 2.0 * mass + mass * mass),
                _ => noise / (h * l),
            };
            let r = at.r()[(0, 1)];
            assert!((r - claimed).abs() < 5e-3 * claimed, "{activation:?} L={length}: {r} {claimed}");
            assert!(largest_size(at.m.iter()) == 0.0);
            let point = OrderParameters::new(at.m.clone(), at.r(), at.b.clone()).unwrap();
            check_stationary(&evaluators, &point, noise, 1e-6).unwrap();
        }
    }
}

/// Strength of the noise on a specialising mode for independent keys of squared norm `rho`: section 11.6.
#[test]
fn the_noise_of_a_mode_is_the_closed_form() {
    let rho = 1e-3;
    for activation in Activation::ALL {
        for (length, heads, theta) in cases() {
            let (l, h) = (length as f64, heads as f64);
            let lambda = theta.second_moment()[(0, 0)];
            let evaluators = evaluators(length, heads, &theta, activation.into());
            let mut at = zero(&evaluators[0]).unwrap();
            at.c = DMatrix::identity(heads, heads) * f64::sqrt(rho);
            let mut mode = DMatrix::zeros(heads, theta.features());
            (mode[(0, 0)], mode[(1, 0)]) = (1.0, -1.0);
            let (omega, p) = constants(length, heads, activation);
            let claimed = 2.0 * omega / (h * l)
                * (1.0 - 2.0 * p * (2.0 - p) / l + lambda * (1.0 - (1.0 + 4.0 * p - p * p) / l + 4.0 * p / (l * l)));
            let task = evaluators[0].task();
            let (measured, error) = noise_of_mode(task, evaluators[0].attention(), &at, &mode, 200_000, 1).unwrap();
            let (measured, error) = (measured / rho, error / rho);
            assert!(
                (measured - claimed).abs() < 4.0 * error + 0.01 * claimed,
                "{activation:?} L={length}: {measured} +- {error}, claimed {claimed}"
            );
        }
    }
}

/// With a mean of `theta` the unspecialised point is where the common motion ends: all heads equal,
/// nothing moves, every symmetric mode decays.
#[test]
fn the_unspecialised_point_is_stationary() {
    let theta = Theta::Gaussian { mean: vec![1.0, 0.0], sd: Some(vec![0.5, 1.5]), cov: None };
    for activation in Activation::ALL {
        let evaluators = evaluators(6, 3, &theta, activation.into());
        for noise in [0.0, 0.5] {
            let at = unspecialised(&evaluators, noise).unwrap();
            for h in 1..3 {
                assert_eq!((at.m.row(h), at.b[h]), (at.m.row(0), at.b[0]));
            }
            assert!(at.m[(0, 0)] > 0.3, "{activation:?}: {}", at.m);
            let point = OrderParameters::new(at.m.clone(), at.r(), at.b.clone()).unwrap();
            check_stationary(&evaluators, &point, noise, 1e-3).unwrap();
            let stability = linearise(&evaluators, &at, &Unwatched).unwrap();
            if noise == 0.0 {
                assert!(stability.residual.size < 1e-3, "{:?}", stability.residual);
                let symmetric = stability.modes.iter().filter(|m| m.kind == Kind::Symmetric);
                assert!(largest(symmetric.map(|m| m.rate)) < 1e-3, "{activation:?}");
            }
        }
    }
}

/// From nearby, the solve finds the plateau at `+-s1`, a saddle that no waiting would find; its
/// fastest growth separates equal heads along the second feature.
#[test]
fn a_plateau_is_found_although_it_is_unstable() {
    let evaluators = evaluators(6, 4, &Theta::Flip { nu: vec![1.8, 1.5] }, Activation::Softmax.into());
    let m = DMatrix::from_row_slice(4, 2, &[0.9, 0.0, -0.9, 0.0, 0.9, 0.0, -0.9, 0.0]);
    let near = OrderParameters::new(m.clone(), &m * m.transpose(), vec![0.0; 4]).unwrap();
    assert!(check_stationary(&evaluators, &near, 0.0, 1e-3).unwrap_err().to_string().contains("not stationary"));
    let at = stationary_near(&evaluators, &near, 0.0, 1.0, 1e-6).unwrap();
    let stability = linearise(&evaluators, &at, &Unwatched).unwrap();
    // What is left is the sampling error outside the spikes, where nothing moves by symmetry.
    assert!(stability.residual.size < 4.0 * stability.residual.standard_error + 1e-6, "{:?}", stability.residual);
    assert!((at.m[(0, 0)] + at.m[(1, 0)]).abs() < 1e-2 && (at.m[(0, 0)] - at.m[(2, 0)]).abs() < 1e-6);
    let fastest = &stability.modes[0];
    assert!(fastest.rate > 0.005 && fastest.feature_weights[1] > 0.95, "{fastest:?}");
    assert_eq!((fastest.kind, fastest.degeneracy), (Kind::Specialising, 2));
    // The same with noise, in the interior of the cone.
    let r = &m * m.transpose() + DMatrix::identity(4, 4) * 0.05;
    let near = OrderParameters::new(m, r, vec![0.0; 4]).unwrap();
    let at = stationary_near(&evaluators, &near, 0.2, 1.0, 1e-6).unwrap();
    let point = OrderParameters::new(at.m.clone(), at.r(), at.b.clone()).unwrap();
    check_stationary(&evaluators, &point, 0.2, 1e-4).unwrap();
    assert!(stationary_near(&evaluators, &near, 0.2, 1e-3, 1e-6).unwrap_err().to_string().contains("away"));
}

/// Long sequences learn slowly, in units of `2 / (H L)`: the solve finds its point all the same.
#[test]
fn long_sequences_have_an_unspecialised_point() {
    let theta = Theta::Gaussian { mean: vec![1.0], sd: Some(vec![0.5]), cov: None };
    for length in [100, 1000] {
        let task = Task::new(length, theta.clone()).unwrap();
        let evaluators = QuasiMonteCarlo::scrambles(&task, 4, Activation::Softmax.into(), 1 << 8, 3, 1).unwrap();
        for noise in [0.0, 1.0] {
            let at = unspecialised(&evaluators, noise).unwrap();
            let point = OrderParameters::new(at.m.clone(), at.r(), at.b.clone()).unwrap();
            check_stationary(&evaluators, &point, noise, 1e-3).unwrap();
            assert!(at.m[(0, 0)] > 0.1, "L = {length}: {}", at.m);
        }
    }
}

#[test]
fn points_without_an_answer_are_refused() {
    let theta = Theta::Flip { nu: vec![2.0] };
    let one_head = evaluators(5, 1, &theta, Activation::Softmax1.into());
    assert!(zero(&one_head[0]).unwrap_err().to_string().contains("without bound"));
    let mean = Attention { aggregation: Aggregation::Mean, ..Activation::Softmax1.into() };
    assert!(unspecialised(&evaluators(5, 3, &theta, mean), 0.0).is_err());
    let none: [QuasiMonteCarlo; 0] = [];
    let nowhere = Coordinates { m: DMatrix::zeros(1, 1), c: DMatrix::zeros(1, 1), b: vec![0.0] };
    assert!(linearise(&none, &nowhere, &Unwatched).is_err());
    // Another shape, and an interruption.
    let three = evaluators(5, 3, &theta, Activation::Softmax.into());
    assert!(linearise(&three, &nowhere, &Unwatched).unwrap_err().to_string().contains("3 heads"));
    struct Impatient;
    impl Watch for Impatient {
        fn advance(&self, _: u64) {}
        fn interrupted(&self) -> bool {
            true
        }
    }
    assert!(linearise(&three, &zero(&three[0]).unwrap(), &Impatient).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// The slow twin: along each mode the loss curves by `-rate`, by second differences of the loss
    /// itself; and relabelling heads changes no rate.
    #[test]
    fn modes_are_curvatures_of_the_loss(
        m in prop::collection::vec(-1.0f64..1.0, 6), c in prop::collection::vec(-0.7f64..0.7, 9),
        which in 0usize..3, rule in 0usize..3,
    ) {
        let bias = [Bias::None, Bias::HalfNorm, Bias::Trained][rule];
        let attention = Attention { bias, ..Activation::ALL[which].into() };
        let theta = Theta::Flip { nu: vec![1.5, 1.0] };
        let task = Task::new(4, theta).unwrap();
        let evaluators = QuasiMonteCarlo::scrambles(&task, 3, attention, 1 << 10, 3, 1).unwrap();
        let (m, c) = (DMatrix::from_row_slice(3, 2, &m), DMatrix::from_row_slice(3, 3, &c));
        let r = &m * m.transpose() + &c * c.transpose();
        let b = headflow_model::biases(bias, &r, &[0.1, -0.2, 0.0]);
        let at = Coordinates { m: m.clone(), c: c.clone(), b };
        let stability = linearise(&evaluators, &at, &Unwatched).unwrap();
        for mode in [&stability.modes[0], &stability.modes[stability.modes.len() - 1]] {
            let loss = |step: f64| {
                let shift = |matrix: &DMatrix<f64>, rows: &[Vec<f64>]| {
                    DMatrix::from_fn(matrix.nrows(), matrix.ncols(), |i, j| {
                        matrix[(i, j)] + step * rows[i].get(j).copied().unwrap_or(0.0)
                    })
                };
                let (m, c) = (shift(&stability.at.m, &mode.m), shift(&stability.at.c, &mode.c));
                let stored: Vec<f64> = stability.at.b.iter().zip(&mode.b).map(|(b, d)| b + step * d).collect();
                let b = headflow_model::biases(bias, &(&m * m.transpose() + &c * c.transpose()), &stored);
                evaluators[0].loss(&Coordinates { m, c, b }).value()
            };
            let step = 2e-3;
            let curvature = (loss(step) - 2.0 * loss(0.0) + loss(-step)) / (step * step);
            // Within a family of one rate modes may differ by sampling; here there is one scramble.
            prop_assert!((curvature + mode.rate).abs() < 1e-4 + 1e-3 * mode.rate.abs(), "{curvature} {mode:?}");
        }
        let swap = |matrix: &DMatrix<f64>| { let mut s = matrix.clone(); s.swap_rows(0, 2); s };
        let mut b = at.b.clone();
        b.swap(0, 2);
        let other = linearise(&evaluators, &Coordinates { m: swap(&m), c: swap(&c), b }, &Unwatched).unwrap();
        // The heads meet other sample points, of which there are few.
        prop_assert!((other.modes[0].rate - stability.modes[0].rate).abs() < 0.02);
    }
}
