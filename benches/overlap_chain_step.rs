//! One step of the overlap chain: what it costs at any `D`, and how it grows with `L`.

use criterion::{Criterion, criterion_group, criterion_main};
use headflow::model::{Activation, OrderParameters, Task, Theta};
use headflow::sims::overlap_chain::Chain;
use headflow::sims::sgd::{Engine, Sgd, Start};
use nalgebra::DMatrix;

fn chain(length: usize, dimension: usize, activation: Activation) -> Chain {
    let m = DMatrix::from_row_slice(4, 2, &[0.12, 0.02, -0.05, 0.06, 0.03, -0.1, -0.08, -0.02]);
    let r = &m * m.transpose() + DMatrix::identity(4, 4) * 0.25;
    let point = OrderParameters::new(m, r, vec![0.0; 4]).expect("a valid start");
    let task = Task::new(length, Theta::Flip { nu: vec![1.8, 1.5] }).expect("a valid task");
    let attention = activation.into();
    let sgd = Sgd { task, attention, dimension, gamma: 1.0, batch: 1, seed: 1, engine: Engine::Overlap };
    Chain::new(&sgd, &Start::Given(point), 0).expect("a valid simulation")
}

fn steps(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("overlap chain step");
    let mut measure = |length: usize, dimension: usize, activation: Activation| {
        let mut chain = chain(length, dimension, activation);
        group.bench_function(format!("L={length} H=4 F=2 D={dimension} {}", activation.name()), |bencher| {
            bencher.iter(|| chain.advance().expect("no divergence at gamma = 1"));
        });
    };
    for activation in Activation::ALL {
        for dimension in [1000, 1_000_000, 1_000_000_000] {
            measure(6, dimension, activation);
        }
    }
    for length in [10, 100, 1000, 10_000] {
        measure(length, 1_000_000_000, Activation::Softmax);
    }
    group.finish();
}

criterion_group!(benches, steps);
criterion_main!(benches);
