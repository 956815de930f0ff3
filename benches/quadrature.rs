//! Exact losses and gradients, for the three activations and at short and very long sequences, and Bayes risks.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use headflow::model::{Activation, Task, Theta};
use headflow::theory::bayes::bayes_risk;
use headflow::theory::moments::{Coordinates, Evaluator};
use headflow::theory::quadrature::Quadrature;
use headflow::theory::quasi_monte_carlo::QuasiMonteCarlo;
use nalgebra::DMatrix;

fn flips(length: usize, nu: &[f64]) -> Task {
    Task::new(length, Theta::Flip { nu: nu.to_vec() }).expect("a valid task")
}

fn quadrature(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("quadrature, H = 4, F = 2, L = 6, tolerance 1e-8");
    group.sample_size(10);
    let task = flips(6, &[1.8, 1.5]);
    for activation in Activation::ALL {
        let evaluator = Quadrature::new(&task, 4, activation.into(), 1e-8).expect("valid");
        let m = DMatrix::from_row_slice(4, 2, &[1.8, 1.4, 1.7, -1.3, -1.6, 1.5, -1.9, -1.2]);
        // bayes-softmax has a grid up to rank 3.
        let outside = if activation == Activation::BayesSoftmax { 0.0 } else { 0.5 };
        let at = Coordinates { m, c: DMatrix::identity(4, 4) * outside, b: vec![-2.0, -2.1, -2.2, -1.9] };
        let name = activation.name();
        group.bench_function(format!("{name}, loss"), |b| b.iter(|| evaluator.evaluate(black_box(&at), false)));
        group.bench_function(format!("{name}, loss and gradient"), |b| {
            b.iter(|| evaluator.evaluate(black_box(&at), true))
        });
        if activation == Activation::Softmax {
            let points = QuasiMonteCarlo::new(&task, 4, activation.into(), 1 << 16, 1, 0).expect("valid");
            group.bench_function("quasi-Monte Carlo, 2^16 points", |b| b.iter(|| points.moments(black_box(&at))));
        }
    }
    group.finish();

    let mut group = criterion.benchmark_group("quadrature, softmax1, H = 2, F = 1, tolerance 1e-8");
    group.sample_size(10);
    for length in [6usize, 1000, 1_000_000_000] {
        let signal = 1.2 * (2.0 * (length as f64).ln()).sqrt();
        let evaluator =
            Quadrature::new(&flips(length, &[signal]), 2, Activation::Softmax1.into(), 1e-8).expect("valid");
        let m = DMatrix::from_row_slice(2, 1, &[signal, -signal]);
        let at = Coordinates { m, c: DMatrix::zeros(2, 2), b: vec![-0.5 * signal * signal - 2.0; 2] };
        group.bench_function(format!("L = {length}"), |b| b.iter(|| evaluator.evaluate(black_box(&at), true)));
    }
    group.finish();

    let mut group = criterion.benchmark_group("Bayes risk, L = 10^5, tolerance 1e-10");
    group.sample_size(20);
    for nu in [vec![5.0], vec![5.0, 4.0]] {
        let task = flips(100_000, &nu);
        group.bench_function(format!("{} flips", nu.len()), |b| b.iter(|| bayes_risk(black_box(&task), 1e-10)));
    }
    group.finish();
}

criterion_group!(benches, quadrature);
criterion_main!(benches);
