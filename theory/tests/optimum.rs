//! The best keys against an exhaustive search, the Bayes risk, and what symmetry says.

use std::sync::atomic::{AtomicU64, Ordering};

use headflow_model::{
    Activation, Attention, Bias, Error, Task, Theta, Unwatched, Watch, largest_size, mean_and_error, smallest,
};
use headflow_theory::moments::{Coordinates, Evaluator, Mean};
use headflow_theory::optimum::{Optimum, Options, lowest_curvature_outside, optimum};
use headflow_theory::quasi_monte_carlo::QuasiMonteCarlo;
use nalgebra::DMatrix;

/// Bayes risk of flips of size 2 in one feature among 5 tokens, by deterministic quadrature.
const BAYES_RISK: f64 = 0.432_367_226_781_33;

fn flip() -> Theta {
    Theta::Flip { nu: vec![2.0] }
}

fn evaluator(heads: usize, theta: Theta, attention: Attention) -> QuasiMonteCarlo {
    QuasiMonteCarlo::new(&Task::new(5, theta).unwrap(), heads, attention, 1 << 12, 1, 0).unwrap()
}

fn half_norm() -> Attention {
    Attention { bias: Bias::HalfNorm, ..Activation::BayesSoftmax.into() }
}

fn search<E: Evaluator>(evaluator: &E, options: &Options) -> Optimum {
    let found = optimum(evaluator, options, &Unwatched).unwrap();
    let counted: usize = found.minima.iter().map(|minimum| minimum.found).sum();
    assert_eq!(counted + found.unconverged, found.starts);
    assert!(found.minima.is_sorted_by(|a, b| a.loss < b.loss));
    found
}

/// The lowest value of a function of two numbers in a box: a grid, whose five best points are centres of grids
/// that shrink.
fn exhaustive(low: [f64; 2], high: [f64; 2], loss: &dyn Fn(f64, f64) -> f64) -> f64 {
    const SIDE: usize = 60;
    let step = [0, 1].map(|i| (high[i] - low[i]) / SIDE as f64);
    let mut grid: Vec<(f64, f64, f64)> = Vec::new();
    for i in 0..=SIDE {
        for j in 0..=SIDE {
            let (x, y) = (low[0] + step[0] * i as f64, low[1] + step[1] * j as f64);
            grid.push((loss(x, y), x, y));
        }
    }
    grid.sort_by(|a, b| a.0.total_cmp(&b.0));
    let refined = grid[..5].iter().map(|&start| {
        let (mut best, mut size) = (start, 1.0);
        while size > 1e-5 {
            let (_, x, y) = best;
            let before = best.0;
            for i in -2..=2 {
                for j in -2..=2 {
                    let (x, y) = (x + size * step[0] * f64::from(i) / 2.0, y + size * step[1] * f64::from(j) / 2.0);
                    let value = loss(x, y);
                    if value < best.0 {
                        best = (value, x, y);
                    }
                }
            }
            size *= if best.0 < before { 0.8 } else { 0.4 };
        }
        best.0
    });
    smallest(refined)
}

fn at(m: &[f64], b: &[f64]) -> Coordinates {
    let heads = m.len();
    Coordinates { m: DMatrix::from_column_slice(heads, 1, m), c: DMatrix::zeros(heads, heads), b: b.to_vec() }
}

#[test]
fn an_exhaustive_search_finds_the_same() {
    let softmax1 = evaluator(1, flip(), Activation::Softmax1.into());
    let softmax = evaluator(2, flip(), Activation::Softmax.into());
    let bayes = evaluator(2, flip(), half_norm());
    let lowest = [
        exhaustive([-4.0, -9.0], [4.0, 2.0], &|m, b| softmax1.loss(&at(&[m], &[b])).value()),
        exhaustive([-4.0, -4.0], [4.0, 4.0], &|m, n| softmax.loss(&at(&[m, n], &[0.0; 2])).value()),
        exhaustive([-4.0, -4.0], [4.0, 4.0], &|m, n| bayes.loss(&at(&[m, n], &[-m * m / 2.0, -n * n / 2.0])).value()),
    ];
    for (evaluator, lowest) in [softmax1, softmax, bayes].iter().zip(lowest) {
        let found = search(evaluator, &Options::default()).minima[0].loss;
        assert!(found <= lowest + 1e-12 && lowest - found < 1e-6, "{:?}: {found}, {lowest}", evaluator.attention());
    }
}

#[test]
fn every_minimum_is_flat_and_no_step_goes_down() {
    let theta = Theta::Gaussian { mean: vec![1.0, 0.0], sd: Some(vec![1.0, 1.5]), cov: None };
    for attention in [Activation::Softmax.into(), Activation::Softmax1.into(), half_norm()] {
        let evaluator = evaluator(3, theta.clone(), attention);
        let found = search(&evaluator, &Options::default());
        assert_eq!(found.unconverged, 0, "{attention:?}");
        for minimum in &found.minima {
            assert!(minimum.gradient <= 1e-7, "{attention:?}: {}", minimum.gradient);
            assert_eq!(evaluator.loss(&minimum.at).value(), minimum.loss);
            for i in 0..6 {
                for step in [-0.02, 0.02] {
                    let mut moved = minimum.at.clone();
                    moved.m[i] += step;
                    if attention.bias == Bias::HalfNorm {
                        moved.b = (0..3).map(|h| -moved.m.row(h).norm_squared() / 2.0).collect();
                    }
                    assert!(evaluator.loss(&moved).value() > minimum.loss - 1e-9, "{attention:?} m[{i}]");
                }
            }
        }
    }
}

/// One head a support point is all that bayes-softmax needs; `b_h = -|k_h|^2 / 2 + ln p_h`.
#[test]
fn bayes_softmax_meets_the_bayes_risk() {
    let task = Task::new(5, flip()).unwrap();
    let all = QuasiMonteCarlo::scrambles(&task, 2, Activation::BayesSoftmax.into(), 1 << 14, 3, 8).unwrap();
    let found = search(&Mean::new(&all).unwrap(), &Options::default());
    assert_eq!((found.minima.len(), found.unconverged), (1, 0));
    let best = &found.minima[0];
    let (loss, error) = mean_and_error(all.iter().map(|e| e.loss(&best.at).value()));
    assert!((loss - BAYES_RISK).abs() < 4.0 * error, "{loss} +- {error}");
    let mut keys: Vec<f64> = best.at.m.iter().copied().collect();
    keys.sort_by(f64::total_cmp);
    assert!((keys[0] + 2.0).abs() < 0.02 && (keys[1] - 2.0).abs() < 0.02, "{keys:?}");
    let claimed = -2.0 + 0.5f64.ln();
    assert!(best.at.b.iter().all(|b| (b - claimed).abs() < 0.05), "{:?}, claimed {claimed}", best.at.b);
    assert_eq!(best.on, [true, true]);
    assert!(best.outside > 0.0 && largest_size(best.at.c.iter()) == 0.0);
}

#[test]
fn threads_do_not_change_the_bits() {
    let evaluator = evaluator(3, Theta::Flip { nu: vec![1.8, 1.5] }, Activation::Softmax1.into());
    let on = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| search(&evaluator, &Options { starts: 6, ..Default::default() }))
    };
    let one = on(1);
    assert_eq!(one, on(3));
    let other = search(&evaluator, &Options { starts: 6, seed: 1, ..Default::default() });
    assert_ne!(one.evaluations, other.evaluations);
}

#[test]
fn permuted_heads_are_the_same_minimum() {
    let evaluator = evaluator(3, Theta::Flip { nu: vec![1.8, 1.5] }, Activation::Softmax1.into());
    let best = search(&evaluator, &Options::default()).minima.swap_remove(0);
    let permuted = |order: [usize; 3]| {
        let m = DMatrix::from_fn(3, 2, |h, f| best.at.m[(order[h], f)]);
        (m, order.map(|h| best.at.b[h]).to_vec())
    };
    let extra_starts = [[0, 1, 2], [2, 0, 1], [1, 0, 2]].map(permuted).to_vec();
    let found = search(&evaluator, &Options { starts: 0, extra_starts, ..Default::default() });
    assert_eq!((found.minima.len(), found.minima[0].found), (1, 3));
    assert!((found.minima[0].loss - best.loss).abs() < 1e-10);
}

/// A given start may be a symmetric saddle: heads alike. The search leaves it.
#[test]
fn a_symmetric_start_is_left() {
    let evaluator = evaluator(2, flip(), Activation::Softmax.into());
    let extra_starts = vec![(DMatrix::zeros(2, 1), vec![0.0; 2])];
    let found = search(&evaluator, &Options { starts: 0, extra_starts, ..Default::default() });
    assert!(found.minima[0].loss < 0.61, "{}", found.minima[0].loss);
}

/// Softmax with two heads to spare on two support points: heads in pairs that do the same in the span of the
/// spikes gain by different noise outside, a little. With one head a point they do not.
#[test]
fn spare_softmax_heads_leave_the_span_of_the_spikes() {
    let task = Task::new(5, flip()).unwrap();
    let all = QuasiMonteCarlo::scrambles(&task, 4, Activation::Softmax.into(), 1 << 14, 9, 6).unwrap();
    let wide = search(&Mean::new(&all).unwrap(), &Options { starts: 2, ..Default::default() }).minima.swap_remove(0);
    assert!(largest_size(wide.at.c.iter()) > 0.1 && wide.outside > -1e-4, "{}", wide.at.c);
    // The point in the span: the same loss for both members of a pair.
    let outside: Vec<f64> = {
        let (m, c) = (DMatrix::from_column_slice(4, 1, &[2.0, 2.0, -2.0, -2.0]), DMatrix::zeros(4, 4));
        let paired = Coordinates { m, c, b: vec![0.0; 4] };
        all.iter().map(|e| lowest_curvature_outside(e, &paired)).collect()
    };
    let (curvature, error) = mean_and_error(outside.iter().copied());
    assert!(curvature < -4.0 * error, "{curvature} +- {error}");
    let mut flat = wide.at.clone();
    flat.c.fill(0.0);
    let (gain, error) = mean_and_error(all.iter().map(|e| e.loss(&flat).value() - e.loss(&wide.at).value()));
    assert!(gain > 4.0 * error && gain < 1e-4, "{gain} +- {error}");

    let two = search(&evaluator(2, flip(), Activation::Softmax.into()), &Options::default());
    assert!(two.minima[0].outside > 1e-3 && largest_size(two.minima[0].at.c.iter()) == 0.0);
}

/// Spare heads of softmax1 switch off, or stay at a key near 0 where that pays.
#[test]
fn spare_heads_of_softmax1_are_told_from_those_that_work() {
    let evaluator = evaluator(4, flip(), Activation::Softmax1.into());
    let best = search(&evaluator, &Options::default()).minima.swap_remove(0);
    let on = best.on.iter().filter(|on| **on).count();
    assert!((2..=3).contains(&on), "{:?} {:?}", best.on, best.at);
    for head in (0..4).filter(|&head| !best.on[head]) {
        assert!(best.at.b[head] < -8.0, "{:?}", best.at.b);
    }
}

#[test]
fn softmax_does_not_see_its_biases() {
    let trained = Attention { bias: Bias::Trained, ..Activation::Softmax.into() };
    let options = Options { starts: 4, ..Default::default() };
    let with = search(&evaluator(2, flip(), trained), &options);
    let without = search(&evaluator(2, flip(), Activation::Softmax.into()), &options);
    assert_eq!(with.minima[0].at, without.minima[0].at);
}

#[derive(Default)]
struct Counter {
    advanced: AtomicU64,
    stop: bool,
}

impl Watch for Counter {
    fn advance(&self, amount: u64) {
        self.advanced.fetch_add(amount, Ordering::Relaxed);
    }

    fn interrupted(&self) -> bool {
        self.stop
    }
}

#[test]
fn progress_is_a_unit_a_start_and_an_interruption_ends_it() {
    let evaluator = evaluator(2, flip(), Activation::Softmax.into());
    let options = Options { starts: 5, extra_starts: vec![(DMatrix::zeros(2, 1), vec![0.0; 2])], ..Default::default() };
    let counter = Counter::default();
    optimum(&evaluator, &options, &counter).unwrap();
    assert_eq!(counter.advanced.into_inner(), 6);
    let error = optimum(&evaluator, &options, &Counter { stop: true, ..Default::default() }).unwrap_err();
    assert!(matches!(error, Error::Interrupted { .. }), "{error}");
}

#[test]
fn what_does_not_converge_is_counted() {
    let evaluator = evaluator(3, flip(), Activation::Softmax1.into());
    let found = search(&evaluator, &Options { max_iterations: 2, starts: 3, ..Default::default() });
    assert_eq!((found.unconverged, found.minima.len()), (3, 0));
    assert!(found.lowest_unconverged.is_some_and(|loss| loss > 0.3 && loss < 1.0));
}

#[test]
fn impossible_options_are_one_line() {
    let evaluator = evaluator(2, flip(), Activation::Softmax.into());
    let start = |m: DMatrix<f64>, b: Vec<f64>| Options { extra_starts: vec![(m, b)], ..Default::default() };
    let refused = [
        (Options { starts: 0, ..Default::default() }, "starts: "),
        (Options { gradient_tolerance: 0.0, ..Default::default() }, "gradient_tolerance: "),
        (Options { gradient_tolerance: f64::NAN, ..Default::default() }, "gradient_tolerance: "),
        (Options { max_iterations: 0, ..Default::default() }, "max_iterations: "),
        (start(DMatrix::zeros(3, 1), vec![0.0; 2]), "extra_starts: "),
        (start(DMatrix::zeros(2, 1), vec![0.0; 3]), "extra_starts: "),
        (start(DMatrix::from_element(2, 1, f64::INFINITY), vec![0.0; 2]), "extra_starts: "),
    ];
    for (options, prefix) in refused {
        let error = optimum(&evaluator, &options, &Unwatched).unwrap_err().to_string();
        assert!(error.starts_with(prefix) && !error.contains('\n'), "{options:?}: {error}");
    }
}
