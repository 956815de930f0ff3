//! Signals, keys, biases, lengths and tolerances of any size: a number within its error and its range, or one line.

mod common;

use common::{document, headflow, printed, refused};
use headflow::model::{Activation, Attention, Error, OrderParameters, Task, Theta, largest_size};
use headflow::theory::bayes::{bayes_risk, best_bayes_risk};
use headflow::theory::moments::{Coordinates, Evaluator};
use headflow::theory::quadrature::{Evaluation, Quadrature};
use headflow::theory::quasi_monte_carlo::QuasiMonteCarlo;
use nalgebra::DMatrix;

fn gaussian(mean: f64, sd: f64) -> Theta {
    Theta::Gaussian { mean: vec![mean], sd: Some(vec![sd]), cov: None }
}

fn flip(nu: f64) -> Theta {
    Theta::Flip { nu: vec![nu] }
}

/// `ln w(x)` in one dimension, by its definition.
fn log_weight(theta: &Theta, x: f64) -> f64 {
    match theta {
        Theta::Gaussian { mean, sd: Some(sd), .. } => {
            let (mean, v) = (mean[0], sd[0] * sd[0]);
            (mean * x - 0.5 * mean * mean + 0.5 * v * x * x) / (1.0 + v) - 0.5 * v.ln_1p()
        }
        Theta::Flip { nu } => {
            let a = (nu[0] * x).abs();
            a + (-2.0 * a).exp().ln_1p() - 2.0f64.ln() - 0.5 * nu[0] * nu[0]
        }
        _ => panic!("of one dimension"),
    }
}

/// The slow twin at two tokens: `R = int int phi(x) phi(y) w(x) w(y) / (w(x) + w(y))` on a square grid.
fn risk_of_two(theta: &Theta) -> f64 {
    let step = 0.02;
    let nodes: Vec<(f64, f64)> = (-600..=600)
        .map(|i| f64::from(i) * step)
        .map(|x| (step / (2.0 * std::f64::consts::PI).sqrt() * (-0.5 * x * x).exp(), log_weight(theta, x)))
        .collect();
    // w v / (w + v) = exp(min) / (1 + exp(min - max)).
    let mean = |a: f64, b: f64| a.min(b).exp() / (1.0 + (a.min(b) - a.max(b)).exp());
    nodes.iter().map(|(p, w)| p * nodes.iter().map(|(q, v)| q * mean(*w, *v)).sum::<f64>()).sum()
}

#[test]
fn large_signals_have_their_bayes_risk() {
    for theta in [
        gaussian(0.0, 3.0),
        gaussian(0.0, 30.0),
        gaussian(0.0, 1e3),
        gaussian(0.0, 1e6),
        gaussian(50.0, 30.0),
        gaussian(6.0, 0.5),
        flip(1.0),
        flip(6.0),
        flip(9.0),
        flip(12.0),
    ] {
        for tolerance in [1e-13, 1e-6] {
            let found = bayes_risk(&Task::new(2, theta.clone()).unwrap(), tolerance).unwrap();
            let slow = risk_of_two(&theta);
            let difference = (found.risk - slow).abs();
            assert!(difference <= found.error_estimate + 1e-14, "{theta:?}: {found:?}, by brute force {slow:e}");
            assert!(found.error_estimate <= tolerance && found.identity.abs() <= found.error_estimate);
            // Terms are positive: even a tiny risk has its digits.
            if tolerance == 1e-13 {
                assert!(difference <= 1e-4 * slow, "{theta:?}: {:e}, by brute force {slow:e}", found.risk);
            }
        }
    }
    // At three tokens, the same in three dimensions, summed apart.
    for (sd, risk) in [(3.0, 0.342_805_796_202), (1e3, 0.001_150_393_334_23), (1e6, 1.150_394_606_37e-6)] {
        let found = bayes_risk(&Task::new(3, gaussian(0.0, sd)).unwrap(), 1e-11).unwrap();
        assert!((found.risk - risk).abs() < 1e-11, "{found:?}");
    }
    // c / sd: what is mistaken is a signal that is small by chance.
    let of = |sd: f64| bayes_risk(&Task::new(6, gaussian(0.0, sd)).unwrap(), 1e-12).unwrap().risk * sd;
    assert!((of(1e5) / of(1e6) - 1.0).abs() < 1e-5, "{} {}", of(1e5), of(1e6));
}

/// Signals that cannot be missed: the truth is `L e^{-nu^2/4}` at most, below any tolerance.
#[test]
fn signals_that_cannot_be_missed() {
    for (nu, length, tolerance) in
        [(1e4, 5, 1e-10), (3e5, 2, 1e-6), (30.0, 5, 1e-13), (1e6, u32::MAX as usize, 1e-13), (-1e6, 2, 1e-2)]
    {
        let found = bayes_risk(&Task::new(length, flip(nu)).unwrap(), tolerance).unwrap();
        assert!(found.risk >= 0.0 && found.risk <= found.error_estimate, "{nu}: {found:?}");
        assert!(found.error_estimate <= tolerance);
    }
    // One sure feature among others, in any order, and among support points.
    for nu in [vec![0.5, 1e4], vec![1e4, 0.5], vec![1e5; 300]] {
        let found = bayes_risk(&Task::new(5, Theta::Flip { nu }).unwrap(), 1e-10).unwrap();
        assert_eq!(found.risk, 0.0);
    }
    let far = Theta::Discrete { points: vec![vec![1e5, 0.0], vec![0.0, -1e6]], weights: vec![0.5; 2] };
    assert_eq!(bayes_risk(&Task::new(4, far).unwrap(), 1e-10).unwrap().risk, 0.0);
    let sphere = Theta::Sphere { nu: 1e5, features: 3 };
    assert_eq!(bayes_risk(&Task::new(4, sphere).unwrap(), 1e-10).unwrap().risk, 0.0);
}

/// A far point is found whenever it is there, and never imagined: what is left is the risk with the others, which know its share.
#[test]
fn a_far_point_leaves_the_others_their_risk() {
    let mixed = Theta::Discrete { points: vec![vec![0.0], vec![1e5]], weights: vec![0.5; 2] };
    let found = bayes_risk(&Task::new(4, mixed).unwrap(), 1e-11).unwrap();
    assert!((found.risk - 0.5 * 0.75).abs() < 1e-11, "{found:?}");
    // A weak signal beside a far one, in another direction, is not lost to rounding of the far one.
    let points = vec![vec![1e6, 0.0], vec![0.0, 1.5], vec![0.0, -1.5]];
    let weak = Theta::Discrete { points, weights: vec![0.2, 0.4, 0.4] };
    let found = bayes_risk(&Task::new(4, weak).unwrap(), 1e-11).unwrap();
    let alone = bayes_risk(&Task::new(4, flip(1.5)).unwrap(), 1e-11).unwrap();
    assert!((found.risk - 0.8 * alone.risk).abs() < 3e-11, "{found:?} {alone:?}");
}

/// Where a grid is too costly, a bound below the tolerance is an answer; it holds where both are to be had.
#[test]
fn far_points_have_a_bound() {
    let of = |size: f64, directions: usize, tolerance: f64| {
        let point = |f: usize| (0..directions).map(|g| if f == g { size } else { 0.0 }).collect();
        let theta = Theta::Discrete {
            points: (0..directions).map(point).collect(),
            weights: vec![1.0 / directions as f64; directions],
        };
        best_bayes_risk(&Task::new(6, theta).unwrap(), tolerance).unwrap()
    };
    // Beyond three directions there is no grid.
    let (four, tolerance) = (of(14.0, 4, 1e-10), 1e-10);
    assert!(four.error_estimate <= tolerance && four.risk <= four.error_estimate && four.risk > 0.0, "{four:?}");
    for size in [2.0, 4.0, 6.0] {
        let found = of(size, 2, 1e-10);
        let bound = 2.5 * 2.0 * (-size * size / 4.0).exp();
        assert!(
            found.risk <= bound && found.risk > 1e-3 * bound.min(1.0) * (-size).exp(),
            "{size}: {found:?} {bound:e}"
        );
    }
}

/// Weights that sum to 1 to nine digits are weights that sum to 1.
#[test]
fn rounded_weights_are_weights() {
    let of = |weights: Vec<f64>| {
        let points = vec![vec![1.0], vec![-1.0], vec![2.0]];
        let task = Task::new(5, Theta::Discrete { points, weights }).unwrap();
        let risk = bayes_risk(&task, 1e-12).unwrap().risk;
        let at = OrderParameters::new(DMatrix::from_element(1, 1, 1.0), DMatrix::from_element(1, 1, 1.5), vec![0.0]);
        let attention = Attention::from(Activation::Softmax);
        let at = Coordinates::of(&at.unwrap(), &attention);
        let loss = Quadrature::new(&task, 1, attention, 1e-12).unwrap().loss_to_tolerance(&at).unwrap().loss.value();
        [risk, loss]
    };
    let (exact, rounded) = (of(vec![1.0 / 3.0; 3]), of(vec![0.333_333_333; 3]));
    assert!((0..2).all(|i| (exact[i] - rounded[i]).abs() < 2e-12), "{exact:?} {rounded:?}");
}

fn one_head(m: f64, outside: f64, b: f64, attention: &Attention) -> Coordinates {
    let at =
        OrderParameters::new(DMatrix::from_element(1, 1, m), DMatrix::from_element(1, 1, m * m + outside), vec![b]);
    Coordinates::of(&at.unwrap(), attention)
}

/// A wide score is followed only where it meets the others: against the whole law just below, and samples.
#[test]
fn wide_signals_have_their_loss() {
    for activation in [Activation::Softmax, Activation::Softmax1] {
        let attention = Attention::from(activation);
        let at = one_head(1.0, 0.3, -0.4, &attention);
        let of = |mean: f64, sd: f64| {
            let task = Task::new(6, gaussian(mean, sd)).unwrap();
            Quadrature::new(&task, 1, attention, 1e-10).unwrap().gradient_to_tolerance(&at).unwrap()
        };
        // Smooth in sd: of four values at equal distances, two of either kind, the third difference is that of c / sd with c < 1,
        // 6 c / sd^4 < 8e-10, and eight times the error.
        let [a, b, c, d] = [298.0, 299.0, 300.0 + 1e-9, 301.0].map(|sd| of(0.0, sd));
        let third = |part: fn(&Evaluation) -> f64| part(&d) - 3.0 * part(&c) + 3.0 * part(&b) - part(&a);
        let parts: [fn(&Evaluation) -> f64; 3] = [
            |e| e.loss.attention_on_relevant,
            |e| e.loss.second_moment,
            |e| e.gradient.as_ref().map_or(f64::NAN, |g| g.r[(0, 0)]),
        ];
        for part in parts {
            assert!(third(part).abs() < 8e-10 + 8.0 * 1e-10, "{activation:?}: {:e}", third(part));
        }
        // Half of all signals are above all others, half below.
        let task = Task::new(6, gaussian(0.0, 1e6)).unwrap();
        let exact = of(0.0, 1e6).loss;
        assert!((exact.attention_on_relevant - 0.5).abs() < 1e-5);
        let samples: Vec<f64> = (0..8)
            .map(|s| QuasiMonteCarlo::new(&task, 1, attention, 1 << 12, 1, s).unwrap().loss(&at).value())
            .collect();
        let (mean, error) = headflow::model::mean_and_error(samples.into_iter());
        assert!((mean - exact.value()).abs() < 5.0 * error, "{activation:?}: {exact:?}, sampled {mean} +- {error}");
    }
}

/// Two tokens under one softmax head: `A_eps = sigmoid(d)` with `d ~ N(m mu, 2 r + m^2 v)`, so that the second moment is
/// `1 - 2 E[A (1 - A)]`, an integral over a stretch that does not grow with the signal or the key.
#[test]
fn two_tokens_have_a_closed_form() {
    let attention = Attention::from(Activation::Softmax);
    let second_moment = |mean: f64, variance: f64| {
        let step = 0.05;
        let product = |d: f64| 1.0 / ((0.5 * d).exp() + (-0.5 * d).exp()).powi(2);
        let density =
            |d: f64| (-0.5 * (d - mean) * (d - mean) / variance).exp() / (2.0 * std::f64::consts::PI * variance).sqrt();
        let inside: f64 = (-1000..=1000).map(|i| f64::from(i) * step).map(|d| step * product(d) * density(d)).sum();
        1.0 - 2.0 * inside
    };
    let mut cases: Vec<(Theta, f64, f64, f64)> = Vec::new();
    for sd in [1.0, 30.0, 299.0, 301.0, 1e4, 9e5] {
        for mean in [0.0, 0.5, 700.0] {
            cases.push((gaussian(mean, sd), mean, sd * sd, 1.0));
        }
    }
    for m in [0.1, 1.0, 30.0, 300.0, 1000.0] {
        cases.push((gaussian(2.0, 0.0), 2.0, 0.0, m));
        cases.push((gaussian(-3.0, 2.0), -3.0, 4.0, m));
    }
    for (theta, mean, variance, m) in cases {
        let quadrature = Quadrature::new(&Task::new(2, theta.clone()).unwrap(), 1, attention, 1e-10).unwrap();
        let at = one_head(m, 0.3 * m * m, 0.0, &attention);
        let found = quadrature.loss_to_tolerance(&at).unwrap();
        let exact = second_moment(m * mean, 2.6 * m * m + m * m * variance);
        let difference = found.loss.second_moment - exact;
        assert!(difference.abs() <= found.error_estimate + 1e-14, "{theta:?} m = {m}: {found:?}, exactly {exact}");
        if mean == 0.0 {
            assert!((found.loss.attention_on_relevant - 0.5).abs() <= found.error_estimate, "{theta:?}: {found:?}");
        }
    }
}

/// The 1 of softmax1 against a large bias, and a head that is off; a bias that all heads share.
#[test]
fn biases_of_any_size_have_their_limits() {
    let task = Task::new(5, flip(2.0)).unwrap();
    let tolerance = 1e-10;
    let of = |activation: Activation, b: f64| {
        let attention = Attention::from(activation);
        let quadrature = Quadrature::new(&task, 1, attention, tolerance).unwrap();
        quadrature.gradient_to_tolerance(&one_head(1.0, 0.5, b, &attention)).unwrap()
    };
    let softmax = of(Activation::Softmax, 0.0);
    for b in [60.0, 900.0, 1100.0, 1e10, 1e20, 1e300] {
        let found = of(Activation::Softmax1, b);
        assert!((found.loss.value() - softmax.loss.value()).abs() < 2.0 * tolerance, "{b}: {found:?}");
        let gradient = found.gradient.unwrap();
        assert!((gradient.r[(0, 0)] - softmax.gradient.as_ref().unwrap().r[(0, 0)]).abs() < 2.0 * tolerance);
        assert!(gradient.b[0].abs() < 2.0 * tolerance);
    }
    for b in [-60.0, -1100.0, -1e10, -1e17, -1e300] {
        let found = of(Activation::Softmax1, b);
        assert!((found.loss.value() - 1.0).abs() < tolerance, "{b}: {found:?}");
        assert!(largest_size(found.gradient.unwrap().m.iter()) < tolerance);
    }
    for activation in [Activation::Softmax, Activation::BayesSoftmax] {
        for b in [0.0, 3.0, 1e10, -1e20, 1e300] {
            assert!(
                (of(activation, b).loss.value() - softmax.loss.value()).abs() < 2.0 * tolerance,
                "{activation:?} {b}"
            );
        }
    }
}

/// Pairs with a head that is off are the other head alone.
#[test]
fn a_head_that_is_off_leaves_the_others() {
    let task = Task::new(4, Theta::Flip { nu: vec![1.5, 1.0] }).unwrap();
    let of = |m: &[[f64; 2]], b: &[f64], activation: Activation| {
        let m = DMatrix::from_fn(m.len(), 2, |h, f| m[h][f]);
        let r = &m * m.transpose() + DMatrix::identity(m.nrows(), m.nrows()) * 0.2;
        let attention = Attention::from(activation);
        let at = Coordinates::of(&OrderParameters::new(m, r, b.to_vec()).unwrap(), &attention);
        let quadrature = Quadrature::new(&task, b.len(), attention, 1e-9).unwrap();
        quadrature.loss_to_tolerance(&at).unwrap().loss.value()
    };
    for activation in [Activation::Softmax1, Activation::BayesSoftmax] {
        let alone = of(&[[1.0, 0.4], [-0.7, 0.3]], &[-0.5, 0.2], activation);
        for off in [-2e3, -1e12, -1e20] {
            let with = of(&[[1.0, 0.4], [3.0, 1.0], [-0.7, 0.3]], &[-0.5, off, 0.2], activation);
            assert!((with - alone).abs() < 2e-9, "{activation:?} {off}: {with} {alone}");
        }
    }
}

/// Keys beyond what a grid can hold are refused by their field, before any grid is made.
#[test]
fn large_keys_are_refused_in_one_line() {
    let attention = Attention::from(Activation::Softmax);
    let task = Task::new(6, flip(2.0)).unwrap();
    for (m, outside, field) in [(1e6, 0.0, "r"), (1.0, 1e7, "r"), (1e100, 0.0, "m"), (0.0, 1e200, "r")] {
        let quadrature = Quadrature::new(&task, 1, attention, 1e-8).unwrap();
        let entry = |value| DMatrix::from_element(1, 1, value);
        let at = Coordinates { m: entry(m), c: entry(outside), b: vec![0.0] };
        let error = quadrature.loss_to_tolerance(&at).unwrap_err();
        assert!(matches!(error, Error::TooCostly { .. }), "{m} {outside}: {error}");
        let text = error.to_string();
        assert!(text.starts_with(&format!("{field}: ")) && !text.contains('\n') && !text.contains("inf"), "{text}");
        // An evaluation without numbers says so.
        let nothing = quadrature.evaluate(&at, true);
        assert!(nothing.loss.value().is_nan() && nothing.error_estimate == f64::INFINITY);
        // It is no error of a number: whoever asks for the largest of those is not told infinity.
        assert_eq!(quadrature.worst_error(), 0.0);
    }
}

/// Many pieces, each cheap, are dear together.
#[test]
fn many_heads_and_points_are_counted() {
    let points: Vec<Vec<f64>> =
        (0..4000).map(|i| vec![(f64::from(i) * 0.7).sin(), (f64::from(i) * 1.3).cos()]).collect();
    let theta = Theta::Discrete { points, weights: vec![1.0 / 4000.0; 4000] };
    let task = Task::new(6, theta).unwrap();
    for activation in Activation::ALL {
        let attention = Attention::from(activation);
        let heads = 12;
        let m = DMatrix::from_fn(heads, 2, |h, f| ((h * 2 + f) as f64).sin());
        let r = &m * m.transpose() + DMatrix::identity(heads, heads);
        let at = Coordinates::of(&OrderParameters::new(m, r, vec![0.0; heads]).unwrap(), &attention);
        let error = Quadrature::new(&task, heads, attention, 1e-8).unwrap().gradient_to_tolerance(&at).unwrap_err();
        assert!(matches!(error, Error::TooCostly { .. }), "{activation:?}: {error}");
    }
}

/// `E[sum_l p_l^2] = E[p_eps]`, and values in their ranges, wherever they are.
#[test]
fn risks_lie_in_their_range_at_any_size() {
    let sizes = [1e-300, 1e-12, 0.1, 3.0, 17.0, 40.0, 1e3, 1e6];
    for size in sizes {
        let thetas = [
            flip(size),
            Theta::Flip { nu: vec![size, 0.7, 1e-200] },
            gaussian(0.0, size),
            gaussian(size, 1.0),
            gaussian(size, 0.7 * size),
            Theta::Gaussian { mean: vec![0.0; 2], sd: Some(vec![size; 2]), cov: None },
            Theta::Gaussian { mean: vec![0.0, 1.0], sd: Some(vec![size, 1e-3]), cov: None },
            Theta::Sphere { nu: size, features: 3 },
            Theta::Discrete { points: vec![vec![size, 0.0], vec![0.3, size]], weights: vec![0.9, 0.1] },
            Theta::Discrete { points: vec![vec![size, 0.0], vec![0.3, size]], weights: vec![1.0, 0.0] },
        ];
        for theta in thetas {
            let Ok(task) = Task::new(2, theta.clone()) else {
                assert!(size >= 1e6, "{theta:?}");
                continue;
            };
            for length in [2, 7, 100_000, u32::MAX as usize] {
                let task = Task::new(length, task.theta().clone()).unwrap();
                for tolerance in [1e-13, 1e-8, 1e-2] {
                    let found = best_bayes_risk(&task, tolerance).unwrap();
                    let all = format!("{theta:?} L = {length} at {tolerance:e}: {found:?}");
                    assert!(found.risk >= 0.0 && found.risk <= task.uniform_loss(), "{all}");
                    assert!(found.error_estimate <= tolerance, "{all}");
                    assert!(found.identity.abs() <= found.error_estimate, "{all}");
                }
            }
        }
    }
}

/// Every command line ends, with numbers in their ranges or one line.
#[test]
fn the_program_ends_at_any_size() {
    let folder = tempfile::tempdir().unwrap();
    let sizes = ["1e-300", "1e-12", "1", "40", "1000", "1e6", "1e150", "1e300"];
    let lengths = ["2", "6", "4294967295"];
    for (i, size) in sizes.iter().enumerate() {
        let (length, tolerance) = (lengths[i % 3], ["1e-13", "1e-8", "1e-2"][(i / 3) % 3]);
        let common = ["--length", length, "--tolerance", tolerance, "--json"];
        let flips = format!("flip:{size}");
        let sd = format!("gaussian:mean=0:sd={size}");
        let mean = format!("gaussian:mean={size}:sd=2");
        let mut lines: Vec<Vec<String>> = Vec::new();
        for theta in [&flips, &sd, &mean] {
            lines.push(["bayes", "--theta", theta].map(String::from).to_vec());
            for attention in ["softmax", "softmax1", "bayes-softmax"] {
                let loss = ["loss", "--evaluator", "quadrature", "--attention", attention, "--theta", theta];
                lines.push([&loss[..], &["--m", "1"]].concat().iter().map(ToString::to_string).collect());
            }
        }
        for attention in ["softmax", "softmax1", "bayes-softmax"] {
            let loss = ["loss", "--evaluator", "quadrature", "--attention", attention, "--theta", "flip:2"];
            for more in [["--m", size].to_vec(), ["--m", "1", "--b", size].to_vec()] {
                lines.push([&loss[..], &more[..]].concat().iter().map(ToString::to_string).collect());
            }
            let negative = format!("--b=-{size}");
            lines.push([&loss[..], &["--m", "1", &negative]].concat().iter().map(ToString::to_string).collect());
        }
        for line in lines {
            let arguments: Vec<&str> = line.iter().map(String::as_str).chain(common).collect();
            let output = headflow(folder.path(), &arguments);
            let error = String::from_utf8(output.stderr).unwrap();
            match output.status.code() {
                Some(0) => {
                    let result = document(&String::from_utf8(output.stdout).unwrap());
                    let value = result["bayes_risk"].as_f64().or_else(|| result["loss"].as_f64());
                    let estimate = result["error_estimate"].as_f64().unwrap();
                    // One head of gain 1: its attention sums to 1 at most.
                    assert!(value.is_some_and(|v| (0.0..=2.0).contains(&v)), "{arguments:?}: {result}");
                    assert!(estimate > 0.0 && estimate <= tolerance.parse().unwrap(), "{arguments:?}: {result}");
                }
                Some(2) => assert_eq!(error.trim_end().lines().count(), 1, "{arguments:?}: {error}"),
                code => panic!("{arguments:?}: {code:?} {error}"),
            }
        }
    }
}

/// The inputs of which this was first seen, as a user gives them.
#[test]
fn inputs_that_did_not_end() {
    let folder = tempfile::tempdir().unwrap();
    let number = |arguments: &str, name: &str| {
        let arguments: Vec<&str> = arguments.split(' ').collect();
        let result = printed(folder.path(), &arguments);
        let value = result[name].as_f64();
        value.unwrap_or_else(|| panic!("{arguments:?}: {result}"))
    };
    let risk = number("bayes --theta gaussian:mean=0:sd=100000 --length 2", "bayes_risk");
    assert!((risk - 8.119_286_509_87e-6).abs() < 1e-10);
    assert_eq!(number("bayes --theta flip:10000 --length 5", "bayes_risk"), 0.0);
    assert_eq!(number("bayes --theta flip:3e5 --length 2 --tolerance 1e-6", "bayes_risk"), 0.0);
    let softmax = number("loss --attention softmax --theta flip:2 --m 1", "loss");
    let softmax1 = number("loss --attention softmax1 --theta flip:2 --m 1 --b=1e20", "loss");
    assert!((softmax1 - softmax).abs() < 2e-8);
    let wide = number("loss --theta gaussian:mean=0:sd=1000000 --m 1", "mean_attention_on_relevant");
    assert!((wide - 0.5).abs() < 1e-6);
    let arguments = ["loss", "--theta", "flip:2", "--m", "1e6", "--evaluator", "quadrature"];
    refused(folder.path(), &arguments, "r: needs at least");
}
