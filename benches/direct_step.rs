//! One step of direct SGD; to be read against `normals`, which is its floor.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use headflow::model::{Activation, OrderParameters, Task, Theta};
use headflow::sims::direct::Replica;
use headflow::sims::sgd::{Engine, Sgd, Start};
use nalgebra::DMatrix;

fn steps(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("direct step");
    let m = DMatrix::from_row_slice(4, 2, &[0.12, 0.02, -0.05, 0.06, 0.03, -0.1, -0.08, -0.02]);
    let r = &m * m.transpose() + DMatrix::identity(4, 4) * 0.25;
    for dimension in [1000usize, 10_000] {
        for activation in Activation::ALL {
            let point = OrderParameters::new(m.clone(), r.clone(), vec![0.0; 4]).expect("a valid start");
            let task = Task::new(6, Theta::Flip { nu: vec![1.8, 1.5] }).expect("a valid task");
            let sgd = Sgd {
                task,
                attention: activation.into(),
                dimension,
                gamma: 1.0,
                batch: 1,
                seed: 1,
                engine: Engine::Direct,
            };
            let mut replica = Replica::new(&sgd, &Start::Given(point), 0).expect("a valid simulation");
            group.throughput(Throughput::Elements((6 * dimension) as u64));
            group.bench_function(format!("L=6 H=4 F=2 D={dimension} {}", activation.name()), |bencher| {
                bencher.iter(|| replica.advance().expect("no divergence at gamma = 1"));
            });
        }
    }
    group.finish();
}

criterion_group!(benches, steps);
criterion_main!(benches);
