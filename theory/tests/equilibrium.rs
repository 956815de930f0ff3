//! How good attention can be: bayes-softmax meets the Bayes risk with one head for each support point, softmax
//! has a floor, softmax1 tends to zero; and no keys go below the floors.

use headflow_model::{Activation, Aggregation, Attention, Bias, Task, Theta, Unwatched};
use headflow_theory::bayes::bayes_risk;
use headflow_theory::floor::floor;
use headflow_theory::moments::{Coordinates, Evaluator};
use headflow_theory::optimum::{Options, optimum};
use headflow_theory::quadrature::Quadrature;
use nalgebra::DMatrix;
use proptest::prelude::*;

fn flips(length: usize, nu: &[f64]) -> Task {
    Task::new(length, Theta::Flip { nu: nu.to_vec() }).unwrap()
}

fn loss(task: &Task, activation: Activation, m: DMatrix<f64>, b: Vec<f64>) -> f64 {
    let heads = m.nrows();
    let at = Coordinates { m, c: DMatrix::zeros(heads, heads), b };
    Quadrature::new(task, heads, activation.into(), 1e-10).unwrap().loss_to_tolerance(&at).unwrap().loss.value()
}

/// `k_h = theta_h`, `b_h = ln p_h - |theta_h|^2/2`: the Bayes risk to 1e-9.
#[test]
fn one_head_for_each_support_point_is_bayes() {
    let cases = [
        (5, Theta::Flip { nu: vec![2.0] }),
        (1000, Theta::Flip { nu: vec![4.0] }),
        (6, Theta::Flip { nu: vec![2.0, 1.0] }),
        (
            9,
            Theta::Discrete {
                points: vec![vec![2.0, 0.5], vec![-1.0, 1.5], vec![0.3, -2.2]],
                weights: vec![0.5, 0.3, 0.2],
            },
        ),
    ];
    for (length, theta) in cases {
        let (points, weights): (Vec<Vec<f64>>, Vec<f64>) = match &theta {
            Theta::Flip { nu } => {
                let signs =
                    |i: usize| nu.iter().enumerate().map(|(f, v)| if i >> f & 1 == 0 { *v } else { -v }).collect();
                let count = 1 << nu.len();
                ((0..count).map(signs).collect(), vec![1.0 / count as f64; count])
            }
            Theta::Discrete { points, weights } => (points.clone(), weights.clone()),
            _ => unreachable!(),
        };
        let task = Task::new(length, theta).unwrap();
        let m = DMatrix::from_fn(points.len(), task.features(), |h, f| points[h][f]);
        let b = (0..points.len()).map(|h| weights[h].ln() - 0.5 * m.row(h).norm_squared()).collect();
        let difference = loss(&task, Activation::BayesSoftmax, m, b) - bayes_risk(&task, 1e-11).unwrap().risk;
        println!("{:?}: {difference:.1e}", task.theta());
        assert!(difference.abs() < 1e-9, "{difference:e}");
    }
}

/// With fewer heads than support points bayes-softmax stays above; with more, the extra one is off or shares its work.
#[test]
fn bayes_softmax_needs_a_head_for_each_support_point() {
    let task = flips(5, &[2.0]);
    let risk = bayes_risk(&task, 1e-11).unwrap().risk;
    let options = Options { starts: 3, gradient_tolerance: 1e-8, ..Options::default() };
    for heads in 1..=3 {
        let quadrature = Quadrature::new(&task, heads, Activation::BayesSoftmax.into(), 1e-9).unwrap();
        let found = optimum(&quadrature, &options, &Unwatched).unwrap();
        let best = &found.minima[0];
        let above = loss(&task, Activation::BayesSoftmax, best.at.m.clone(), best.at.b.clone()) - risk;
        println!(
            "H = {heads}: {above:.3e} above Bayes, m = {:?}, b = {:?}, on {:?}",
            best.at.m.as_slice(),
            best.at.b,
            best.on
        );
        if heads == 1 {
            assert!(above > 0.1, "{above}");
        } else {
            assert!(above.abs() < 1e-9, "{heads} heads: {above:e}");
        }
        if heads == 3 {
            let signs = [1.0, -1.0].map(|s| (0..3).filter(|&h| best.on[h] && best.at.m[(h, 0)] * s > 1.0).count());
            let off = best.on.iter().filter(|on| !**on).count();
            assert!(signs[0] >= 1 && signs[1] >= 1 && signs[0] + signs[1] + off == 3, "{signs:?}, {off} off");
        }
    }
}

/// Signals up to 20 (flips, L = 6, H = 2): softmax's best loss stays above its floor and comes near it, softmax1 falls below 1e-6.
#[test]
fn softmax_has_a_floor_and_softmax1_has_none() {
    let options = Options { starts: 2, gradient_tolerance: 1e-5, ..Options::default() };
    let softmax = Attention::from(Activation::Softmax);
    let mut last = 1.0;
    for signal in [2.0, 5.0, 10.0] {
        let task = flips(6, &[signal]);
        let quadrature = Quadrature::new(&task, 2, softmax, 1e-6).unwrap();
        let best = optimum(&quadrature, &options, &Unwatched).unwrap().minima[0].loss;
        let bound = floor(&task, 2, &softmax, bayes_risk(&task, 1e-10).unwrap().risk);
        println!("softmax, nu = {signal}: {best:.6}, floor {bound:.6}");
        assert!(best > bound && bound > 0.3 - 1e-9 && best < last);
        last = best;
    }
    // The best keys at nu = 20, found by `headflow optimum`; others are worse.
    let task = flips(6, &[20.0]);
    let pair =
        |activation, key: f64, b: f64| loss(&task, activation, DMatrix::from_row_slice(2, 1, &[key, -key]), vec![b; 2]);
    let best = pair(Activation::Softmax, 0.3837, 0.0);
    assert!((best - 0.307_302_6).abs() < 1e-6, "{best}");
    assert!(pair(Activation::Softmax, 0.35, 0.0) > best && pair(Activation::Softmax, 0.42, 0.0) > best);
    let softmax1 = pair(Activation::Softmax1, 12.0, -100.0);
    println!("softmax1, nu = 20: {softmax1:.2e}");
    assert!(softmax1 < 1e-6);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, max_shrink_iters: 0, ..ProptestConfig::default() })]

    /// No keys go below the floors.
    #[test]
    fn floors_hold(
        length in 2usize..8, heads in 1usize..4, which in 0usize..6, signal in 0.5f64..6.0, asymmetric in 0.0f64..1.0,
        entries in prop::collection::vec(-1.0f64..1.0, 9), size in 0.1f64..3.0, noise in 0.0f64..0.5,
    ) {
        let aggregation = if which % 2 == 0 { Aggregation::Mean } else { Aggregation::Sum };
        let attention = Attention { activation: Activation::ALL[which / 2], bias: Bias::Trained, aggregation };
        let theta = if asymmetric < 0.3 {
            Theta::Discrete { points: vec![vec![signal], vec![-signal], vec![0.0]], weights: vec![0.4 + asymmetric, 0.4 - asymmetric, 0.2] }
        } else {
            Theta::Flip { nu: vec![signal] }
        };
        let task = Task::new(length, theta).unwrap();
        let risk = bayes_risk(&task, 1e-9).unwrap().risk;
        let m = DMatrix::from_fn(heads, 1, |h, _| size * entries[h]);
        // One direction outside the spikes, so that bayes-softmax has a grid.
        let c = DMatrix::from_fn(heads, heads, |h, k| if k == 0 { noise * entries[3 + h] } else { 0.0 });
        let b: Vec<f64> = (0..heads).map(|h| 2.0 * entries[6 + h] - 0.5 * m[(h, 0)] * m[(h, 0)]).collect();
        let quadrature = Quadrature::new(&task, heads, attention, 1e-6).unwrap();
        let found = quadrature.loss(&Coordinates { m, c, b }).value();
        let bound = floor(&task, heads, &attention, risk);
        prop_assert!(found > bound - 1e-6, "{attention:?}, H = {heads}, L = {length}: {found} below {bound}");
    }
}
