//! Biases far beyond the scores: both engines take the steps of the attention that those come to.

use headflow_model::{Activation, Aggregation, Attention, Bias, OrderParameters, Task, Theta, largest_size};
use headflow_sims::direct::Replica;
use headflow_sims::overlap_chain::Chain;
use headflow_sims::sgd::{Engine, Sgd, Start};
use nalgebra::DMatrix;

fn start(b: f64) -> Start {
    let m = DMatrix::from_row_slice(3, 2, &[0.4, 0.1, -0.3, 0.4, 0.2, -0.5]);
    let r = &m * m.transpose() + DMatrix::identity(3, 3) * 0.3;
    Start::Given(OrderParameters::new(m, r, vec![b; 3]).unwrap())
}

/// `m` and `r` after some steps.
fn after(engine: Engine, attention: Attention, b: f64, steps: usize) -> [DMatrix<f64>; 2] {
    let task = Task::new(4, Theta::Flip { nu: vec![1.5, 1.0] }).unwrap();
    let sgd = Sgd { task, attention, dimension: 40, gamma: 1.3, batch: 2, seed: 5, engine };
    let (m, r) = match engine {
        Engine::Direct => {
            let mut replica = Replica::new(&sgd, &start(b), 0).unwrap();
            (0..steps).for_each(|_| replica.advance().unwrap());
            let (m, r, _) = replica.overlaps();
            (m, r)
        }
        Engine::Overlap => {
            let mut chain = Chain::new(&sgd, &start(b), 0).unwrap();
            (0..steps).for_each(|_| chain.advance().unwrap());
            let (m, r, _) = chain.overlaps();
            (m, r)
        }
    };
    [m, r]
}

/// softmax1 whose 1 has no weight is softmax; bayes-softmax does not see a bias that all heads share.
#[test]
fn far_biases_come_to_others() {
    let with = |activation, bias| Attention { activation, bias, aggregation: Aggregation::Sum };
    for engine in [Engine::Direct, Engine::Overlap] {
        // Keys of direct SGD have single precision, with a rounding of 1e-7 a step.
        let rounding = if engine == Engine::Direct { 1e-5 } else { 1e-12 };
        for b in [1e3, 1e5, 1e20, 1e300] {
            // Biases themselves are learned with a rounding relative to them: 30 steps of that, or none worth the name.
            let learned = if b > 1e5 { 1 } else { 30 };
            let rounding = if b > 1e5 { rounding } else { rounding + 30.0 * f64::EPSILON * b };
            let shared = with(Activation::BayesSoftmax, Bias::Trained);
            for (activation, far, near, steps) in [
                (Activation::Softmax1, b, with(Activation::Softmax, Bias::None), 30),
                (Activation::BayesSoftmax, b, shared, learned),
                (Activation::BayesSoftmax, -b, shared, learned),
            ] {
                let found = after(engine, with(activation, Bias::Trained), far, steps);
                let expected = after(engine, near, 0.0, steps);
                for (found, expected) in found.iter().zip(&expected) {
                    let error = largest_size((found - expected).iter());
                    assert!(error < rounding, "{engine:?} {activation:?} {far}: {error}");
                }
            }
        }
    }
}
