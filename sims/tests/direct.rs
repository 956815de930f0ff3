//! The simulation against its definition, and its behaviour at the edges.

use headflow_model::random::{Purpose, Stream};
use headflow_model::{
    Activation, Aggregation, Attention, Bias, OrderParameters, StopReason, Task, Theta, Unwatched, Watch, biases,
    largest_size, mean_and_error,
};
use headflow_sims::direct::Replica;
use headflow_sims::ensemble::{Options, simulate};
use headflow_sims::population_loss::population_loss;
use headflow_sims::sgd::{Engine, Sgd, Start};
use nalgebra::DMatrix;

const HEADS: usize = 3;

fn sgd(attention: Attention, dimension: usize, batch: usize) -> Sgd {
    Sgd {
        task: Task::new(4, Theta::Gaussian { mean: vec![1.0, 0.0], sd: Some(vec![0.5, 1.5]), cov: None }).unwrap(),
        attention,
        dimension,
        gamma: 1.3,
        batch,
        seed: 11,
        engine: Engine::Direct,
    }
}

fn start() -> OrderParameters {
    let m = DMatrix::from_row_slice(HEADS, 2, &[0.4, 0.1, -0.3, 0.4, 0.2, -0.5]);
    let c = DMatrix::from_row_slice(HEADS, HEADS, &[0.5, 0.0, 0.0, 0.1, 0.6, 0.0, -0.2, 0.1, 0.4]);
    let r = &m * m.transpose() + &c * c.transpose();
    OrderParameters::new(m, r, vec![0.2, -0.1, 0.0]).unwrap()
}

fn attentions() -> Vec<Attention> {
    let mut all = Vec::new();
    for (activation, aggregation) in
        Activation::ALL.into_iter().zip([Aggregation::Mean, Aggregation::Sum, Aggregation::Mean])
    {
        for bias in [Bias::None, Bias::HalfNorm, Bias::Trained] {
            all.push(Attention { activation, bias, aggregation });
        }
    }
    all
}

/// One sample as the simulation draws it, in double precision.
fn sample(sgd: &Sgd, replica: u32, number: u64) -> (usize, DMatrix<f64>) {
    let (length, dimension) = (sgd.task.length(), sgd.dimension);
    let mut uniforms = vec![0.0; 1 + sgd.task.sampler().uniforms()];
    Stream::new(sgd.seed, Purpose::Task, replica).uniforms(number, 0, &mut uniforms);
    let relevant = (uniforms[0] * length as f64) as usize;
    let mut theta = vec![0.0; sgd.task.features()];
    sgd.task.sampler().sample(&uniforms[1..], &mut theta);
    let noise = Stream::new(sgd.seed, Purpose::Tokens, replica);
    let mut tokens = DMatrix::zeros(length, dimension);
    for l in 0..length {
        let mut z = vec![0.0f32; dimension];
        noise.normals(number, l as u32, 0, &mut z);
        for (i, z) in z.into_iter().enumerate() {
            let signal = if l == relevant && i < theta.len() { theta[i] } else { 0.0 };
            tokens[(l, i)] = f64::from(z) + signal;
        }
    }
    (relevant, tokens)
}

/// The loss of one sample by its definition, `|X_eps - yhat|^2 / D`.
fn sample_loss(sgd: &Sgd, keys: &DMatrix<f64>, b: &[f64], relevant: usize, tokens: &DMatrix<f64>) -> f64 {
    let length = tokens.nrows();
    let r = keys * keys.transpose();
    let b = biases(sgd.attention.bias, &r, b);
    let scores: Vec<f64> =
        (0..HEADS * length).map(|i| keys.row(i / length).dot(&tokens.row(i % length)) + b[i / length]).collect();
    let (_, a) = sgd.attention.forward(HEADS, length, &scores).unwrap();
    let mut error = -tokens.row(relevant).clone_owned();
    for l in 0..length {
        error += tokens.row(l) * a[l];
    }
    error.norm_squared() / sgd.dimension as f64
}

/// The start as the simulation lays it out: spikes first, then the factor's coordinates.
fn initial_keys(point: &OrderParameters, dimension: usize) -> DMatrix<f64> {
    let c = point.residual_factor();
    DMatrix::from_fn(HEADS, dimension, |h, i| match i {
        0..2 => point.m()[(h, i)],
        2..5 => c[(h, i - 2)],
        _ => 0.0,
    })
}

/// The slow twin: steps by finite differences of the loss's definition. Nothing of the closed-form
/// gradient is used.
#[test]
fn a_step_is_minus_the_gradient_of_the_loss() {
    for attention in attentions() {
        for batch in [1, 3] {
            let sgd = sgd(attention, 40, batch);
            let mut replica = Replica::new(&sgd, &Start::Given(start()), 2).unwrap();
            let (mut keys, mut b) = (initial_keys(&start(), 40), start().b().to_vec());
            if attention.bias != Bias::Trained {
                b.fill(0.0);
            }
            let rate = sgd.gamma / 40.0;
            for step in 0..3u64 {
                let samples: Vec<_> = (0..batch as u64).map(|k| sample(&sgd, 2, step * batch as u64 + k)).collect();
                let loss = |keys: &DMatrix<f64>, b: &[f64]| {
                    samples.iter().map(|(e, x)| sample_loss(&sgd, keys, b, *e, x)).sum::<f64>() / batch as f64
                };
                let d = 1e-5;
                let gradient = DMatrix::from_fn(HEADS, 40, |h, i| {
                    let at = |by: f64| {
                        let mut moved = keys.clone();
                        moved[(h, i)] += by;
                        loss(&moved, &b)
                    };
                    (at(d) - at(-d)) / (2.0 * d)
                });
                let gradient_b: Vec<f64> = (0..HEADS)
                    .map(|h| {
                        let at = |by: f64| {
                            let mut moved = b.clone();
                            moved[h] += by;
                            loss(&keys, &moved)
                        };
                        (at(d) - at(-d)) / (2.0 * d)
                    })
                    .collect();
                keys -= gradient * rate;
                if attention.bias == Bias::Trained {
                    b.iter_mut().zip(&gradient_b).for_each(|(b, g)| *b -= rate * g);
                }
                replica.advance().unwrap();
                let (m, r, _) = replica.overlaps();
                // Keys are held in single precision: rounding alone moves them by 1e-7 of their size a step.
                let moved = largest_size((m - keys.columns(0, 2)).iter());
                let turned = largest_size((&r - &keys * keys.transpose()).iter());
                assert!(
                    moved < 5e-6 && turned < 5e-6,
                    "{attention:?}, batch {batch}, step {step}: {moved:e} {turned:e}"
                );
            }
        }
    }
}

#[test]
fn given_starts_are_exact_and_random_ones_have_their_scale() {
    let sgd = sgd(Activation::Softmax.into(), 500, 1);
    let (m, r, _) = Replica::new(&sgd, &Start::Given(start()), 0).unwrap().overlaps();
    assert!(largest_size((m - start().m()).iter()) < 1e-7 && largest_size((r - start().r()).iter()) < 1e-6);
    // The smallest dimension that holds H keys and F spikes.
    let tight = Sgd { dimension: 5, ..sgd.clone() };
    let (_, r, _) = Replica::new(&tight, &Start::Given(start()), 0).unwrap().overlaps();
    assert!(largest_size((r - start().r()).iter()) < 1e-6);

    let random = Start::Random { heads: HEADS, scale: 0.7, b: vec![0.0; HEADS] };
    let norms: Vec<f64> = (0..40).map(|i| Replica::new(&sgd, &random, i).unwrap().overlaps().1[(0, 0)]).collect();
    let (mean, error) = mean_and_error(norms.iter().copied());
    assert!((mean - 0.49).abs() < 4.0 * error, "{mean} +- {error}");
    assert_ne!(norms[0], norms[1], "replicas start differently");
}

/// The loss at finite D from low-dimensional samples against its definition on whole tokens.
#[test]
fn the_population_loss_is_that_of_whole_tokens() {
    for attention in attentions() {
        for dimension in [8, 60] {
            let sgd = sgd(attention, dimension, 1);
            let keys = initial_keys(&start(), dimension);
            let b = if attention.bias == Bias::Trained { start().b().to_vec() } else { vec![0.0; HEADS] };
            let effective = biases(attention.bias, start().r(), &b);
            let whole = (0..6000).map(|k| {
                let (relevant, tokens) = sample(&sgd, 0, k);
                sample_loss(&sgd, &keys, &b, relevant, &tokens)
            });
            let (slow, slow_error) = mean_and_error(whole.collect::<Vec<_>>().iter().copied());
            let (fast, fast_error) =
                population_loss(&sgd.task, &attention, dimension, (start().m(), start().r(), &effective), 6000, 3, 0)
                    .unwrap();
            let error = (slow_error.powi(2) + fast_error.powi(2)).sqrt();
            assert!((fast - slow).abs() < 4.0 * error, "{attention:?} D={dimension}: {fast} {slow} +- {error}");
        }
    }
}

fn options(times: Vec<f64>, replicas: u32) -> Options {
    Options { times, replicas, test_samples: 64 }
}

/// The same bits on 1, 2 and 3 threads, and whatever the number of replicas.
#[test]
fn threads_do_not_change_a_bit() {
    let sgd = sgd(Activation::BayesSoftmax.into(), 70, 2);
    let run = |threads: usize, replicas| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            simulate(&sgd, &Start::Given(start()), &options(vec![0.0, 1.0, 5.0], replicas), &Unwatched).unwrap()
        })
    };
    let one = run(1, 5);
    assert_eq!(one.runs, run(2, 5).runs);
    assert_eq!(one.runs, run(3, 5).runs);
    assert_eq!(one.runs[..2], run(2, 2).runs[..]);
}

#[test]
fn impossible_simulations_are_refused() {
    let good = sgd(Activation::Softmax.into(), 50, 1);
    let given = Start::Given(start());
    let refused = [
        Sgd { dimension: 4, ..good.clone() },
        Sgd { gamma: 0.0, ..good.clone() },
        Sgd { gamma: -1.0, ..good.clone() },
        Sgd { gamma: f64::NAN, ..good.clone() },
        Sgd { batch: 0, ..good.clone() },
    ];
    for sgd in refused {
        assert!(Replica::new(&sgd, &given, 0).is_err(), "{sgd:?}");
    }
    assert!(simulate(&good, &given, &options(vec![0.0], 0), &Unwatched).is_err());
    assert!(simulate(&good, &given, &options(vec![1.0, 0.5], 1), &Unwatched).is_err());
    let one_feature = OrderParameters::new(DMatrix::zeros(1, 1), DMatrix::identity(1, 1), vec![0.0]).unwrap();
    assert!(Replica::new(&good, &Start::Given(one_feature), 0).is_err());
    assert!(Replica::new(&good, &Start::Random { heads: 2, scale: -1.0, b: vec![0.0; 2] }, 0).is_err());
}

/// A learning rate beyond all bounds stops before anything overflows, and keeps what was recorded.
#[test]
fn divergence_keeps_the_last_finite_state() {
    for attention in attentions() {
        let sgd = Sgd { gamma: 1e10, ..sgd(attention, 30, 1) };
        let ensemble = simulate(&sgd, &Start::Given(start()), &options(vec![0.0, 1e12], 2), &Unwatched).unwrap();
        let StopReason::Diverged { step, time, replica } = ensemble.stop else {
            panic!("{attention:?}: {:?}", ensemble.stop)
        };
        assert_eq!(ensemble.estimate.mean.times, [0.0], "the start is kept");
        let (at, row) = ensemble.runs[replica as usize].last_finite.clone().unwrap();
        assert_eq!(at, time);
        assert_eq!(time, step as f64 * sgd.time_step());
        assert!(row[1..].iter().all(|v| v.is_finite()), "{attention:?}: {row:?}");
    }
}

#[test]
fn an_interruption_keeps_what_was_recorded() {
    use std::sync::atomic::{AtomicU64, Ordering};
    struct StopAfter(AtomicU64);
    impl Watch for StopAfter {
        fn advance(&self, amount: u64) {
            self.0.fetch_add(amount, Ordering::SeqCst);
        }
        fn interrupted(&self) -> bool {
            self.0.load(Ordering::SeqCst) >= 1000
        }
    }
    let sgd = sgd(Activation::Softmax.into(), 50, 1);
    let times: Vec<f64> = (0..100).map(f64::from).collect();
    let ensemble = simulate(&sgd, &Start::Given(start()), &options(times, 1), &StopAfter(AtomicU64::new(0))).unwrap();
    let StopReason::Interrupted { time } = ensemble.stop else { panic!("{:?}", ensemble.stop) };
    let recorded = &ensemble.estimate.mean.times;
    assert!(recorded.len() > 20 && recorded.len() < 100 && recorded[recorded.len() - 1] <= time);
}
