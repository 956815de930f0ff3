//! The overlap chain between direct SGD and theory: right where the ODE is not, and its limit is the ODE.

use headflow::agreement::limit;
use headflow::model::{Activation, OrderParameters, Task, Theta, Trajectory, Unwatched, larger, mean_and_error};
use headflow::sims::ensemble::{Options, simulate};
use headflow::sims::sgd::{Engine, Sgd, Start};
use headflow::theory::flow;
use headflow::theory::quasi_monte_carlo::QuasiMonteCarlo;
use nalgebra::DMatrix;

const GAMMA: f64 = 2.0;

fn task() -> Task {
    Task::new(4, Theta::Flip { nu: vec![2.5] }).unwrap()
}

fn start() -> OrderParameters {
    let m = DMatrix::from_row_slice(2, 1, &[0.5, -0.3]);
    let r = &m * m.transpose() + DMatrix::from_row_slice(2, 2, &[0.2, 0.05, 0.05, 0.3]);
    OrderParameters::new(m, r, vec![0.0; 2]).unwrap()
}

fn replicas(activation: Activation, engine: Engine, dimension: usize, count: u32, times: &[f64]) -> Vec<Trajectory> {
    let sgd = Sgd { task: task(), attention: activation.into(), dimension, gamma: GAMMA, batch: 1, seed: 9, engine };
    let options = Options { times: times.to_vec(), replicas: count, test_samples: 2 };
    let ensemble = simulate(&sgd, &Start::Given(start()), &options, &Unwatched).unwrap();
    ensemble.runs.into_iter().map(|run| run.trajectory).collect()
}

/// The flow's state at `times`.
fn theory(activation: Activation, times: &[f64]) -> Trajectory {
    let evaluators = QuasiMonteCarlo::scrambles(&task(), 2, activation.into(), 1 << 16, 4, 4).unwrap();
    let options = flow::Options::new(GAMMA, times.to_vec());
    flow::average(&evaluators, &start(), &options, &Unwatched).unwrap().estimate.mean
}

/// Columns of a row that hold `m` and `r`.
const COLUMNS: std::ops::Range<usize> = 1..7;

/// At `D = 30` the flow misses the mean of direct SGD by many standard errors, the chain does not: all 54 deviations
/// within the limit for their number, all activations.
#[test]
fn at_small_dimension_the_chain_is_right_and_the_ode_is_not() {
    let times = [1.0, 4.0, 10.0];
    let limit = limit(Activation::ALL.len() * times.len() * COLUMNS.len());
    for activation in Activation::ALL {
        let direct = replicas(activation, Engine::Direct, 30, 3000, &times);
        let chain = replicas(activation, Engine::Overlap, 30, 3000, &times);
        let ode = theory(activation, &times);
        let mut worst_of_ode = 0.0f64;
        for t in 0..times.len() {
            for i in COLUMNS {
                let of = |runs: &[Trajectory]| mean_and_error(runs.iter().map(|run| run.rows[t][i]));
                let ((direct, own), (chain, other)) = (of(&direct), of(&chain));
                let deviation = (direct - chain).abs() / own.hypot(other);
                assert!(deviation < limit, "{activation:?} t={} column {i}: {deviation:.2} standard errors", times[t]);
                worst_of_ode = larger(worst_of_ode, (direct - ode.rows[t][i]).abs() / own);
            }
        }
        println!("{activation:?}: the ODE is off by {worst_of_ode:.0} standard errors");
        assert!(worst_of_ode > 10.0, "{activation:?}: {worst_of_ode}");
    }
}

/// Weighted least squares of `y = a x^-p`: `p` and its standard error.
fn exponent(x: &[f64], y: &[f64], error: &[f64]) -> (f64, f64) {
    // Gauss-Newton in (a, p) from the first and second points.
    let mut p = (y[0] / y[1]).abs().ln() / (x[1] / x[0]).ln();
    let mut a = y[0] * x[0].powf(p);
    let mut variance = f64::NAN;
    for _ in 0..50 {
        let (mut n, mut v) = ([[0.0; 2]; 2], [0.0; 2]);
        for k in 0..x.len() {
            let power = x[k].powf(-p);
            let gradient = [power, -a * x[k].ln() * power];
            for i in 0..2 {
                v[i] += gradient[i] * (y[k] - a * power) / error[k].powi(2);
                for j in 0..2 {
                    n[i][j] += gradient[i] * gradient[j] / error[k].powi(2);
                }
            }
        }
        let determinant = n[0][0] * n[1][1] - n[0][1] * n[1][0];
        a += (n[1][1] * v[0] - n[0][1] * v[1]) / determinant;
        p += (n[0][0] * v[1] - n[1][0] * v[0]) / determinant;
        variance = n[0][0] / determinant;
    }
    (p, variance.sqrt())
}

/// From `D = 10^2` to `10^6` the mean's deviation from the flow falls as `1 / D` and the spread as
/// `1 / sqrt(D)`: fitted exponents within 4 standard errors. (The spread is fitted from `D = 1000` on: below,
/// its own correction of order `1 / D` is larger than its error.)
#[test]
fn the_chain_tends_to_the_ode() {
    let times = [1.0];
    let dimensions = [100usize, 300, 1000, 3000, 10_000, 100_000, 1_000_000];
    let counts = [6000, 6000, 6000, 3000, 1500, 100, 12];
    for activation in Activation::ALL {
        let ode = theory(activation, &times);
        let runs: Vec<Vec<Trajectory>> =
            dimensions.iter().zip(counts).map(|(&d, n)| replicas(activation, Engine::Overlap, d, n, &times)).collect();
        let x: Vec<f64> = dimensions.iter().map(|&d| d as f64).collect();
        // The overlap of the first head.
        let column = 3;
        let samples: Vec<(f64, f64)> =
            runs.iter().map(|runs| mean_and_error(runs.iter().map(|run| run.rows[0][column]))).collect();
        let deviations: Vec<f64> = samples.iter().map(|s| s.0 - ode.rows[0][column]).collect();
        let errors: Vec<f64> = samples.iter().map(|s| s.1).collect();
        let spreads: Vec<f64> = errors.iter().zip(counts).map(|(e, n)| e * f64::from(n).sqrt()).collect();
        let errors_of_spreads: Vec<f64> =
            spreads.iter().zip(counts).map(|(s, n)| s / f64::from(2 * n).sqrt()).collect();
        let (p, error) = exponent(&x, &deviations, &errors);
        println!("{activation:?}: deviation falls as D^-{p:.3} +- {error:.3}");
        assert!((p - 1.0).abs() < 4.0 * error, "{activation:?}: deviation D^-{p} +- {error}");
        let (p, error) = exponent(&x[2..], &spreads[2..], &errors_of_spreads[2..]);
        println!("{activation:?}: spread falls as D^-{p:.4} +- {error:.4}");
        assert!((p - 0.5).abs() < 4.0 * error, "{activation:?}: spread D^-{p} +- {error}");
    }
}
