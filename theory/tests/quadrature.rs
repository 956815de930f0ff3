//! The quadrature and the Bayes risk against values of independent programs, against finite differences, against
//! quasi-Monte Carlo, and against themselves at a tighter tolerance.

use headflow_model::{Activation, Attention, OrderParameters, Task, Theta, larger, largest_size, mean_and_error};
use headflow_theory::bayes::bayes_risk;
use headflow_theory::moments::{Coordinates, Evaluator};
use headflow_theory::quadrature::Quadrature;
use headflow_theory::quasi_monte_carlo::QuasiMonteCarlo;
use nalgebra::DMatrix;
use proptest::prelude::*;
use serde_json::Value;

fn matrix(value: &Value) -> DMatrix<f64> {
    let rows: Vec<Vec<f64>> = serde_json::from_value(value.clone()).unwrap();
    DMatrix::from_fn(rows.len(), rows[0].len(), |i, j| rows[i][j])
}

fn cases(text: &str) -> Vec<Value> {
    let file: Value = serde_json::from_str(text).unwrap();
    file["cases"].as_array().unwrap().clone()
}

fn task(case: &Value) -> Task {
    let theta: Theta = serde_json::from_value(case["theta"].clone()).unwrap();
    Task::new(case["length"].as_u64().unwrap() as usize, theta).unwrap()
}

fn setting(case: &Value) -> (Task, Attention, Coordinates) {
    let attention = Attention {
        activation: serde_json::from_value(case["attention"].clone()).unwrap(),
        bias: serde_json::from_value(case["bias"].clone()).unwrap(),
        aggregation: serde_json::from_value(case["aggregation"].clone()).unwrap(),
    };
    let b: Vec<f64> = serde_json::from_value(case["b"].clone()).unwrap();
    let point = OrderParameters::new(matrix(&case["m"]), matrix(&case["r"]), b).unwrap();
    (task(case), attention, Coordinates::of(&point, &attention))
}

/// To 1e-10, or to what the reference itself is good for.
#[test]
fn reference_losses() {
    let texts = [include_str!("../../tests/reference/loss.json"), include_str!("../../tests/reference/gradient.json")];
    for case in texts.into_iter().flat_map(cases) {
        let (task, attention, at) = setting(&case);
        let quadrature = Quadrature::new(&task, at.m.nrows(), attention, 1e-11).unwrap();
        let found = quadrature.loss_to_tolerance(&at).unwrap();
        let bound = case["refinement_difference"].as_f64().unwrap().max(1e-10);
        for (name, value) in [
            ("loss", found.loss.value()),
            ("mean_attention_on_relevant", found.loss.attention_on_relevant),
            ("second_moment", found.loss.second_moment),
        ] {
            let difference = (value - case[name].as_f64().unwrap()).abs();
            println!("{} {name}: off by {difference:.1e}, estimate {:.1e}", case["attention"], found.error_estimate);
            assert!(difference <= bound, "{case}: {name} is off by {difference:e}");
        }
    }
}

/// Gradients of an independent program (differences of order 8), to 1e-9.
#[test]
fn reference_gradients() {
    for case in cases(include_str!("../../tests/reference/gradient.json")) {
        let (task, attention, at) = setting(&case);
        let at = Coordinates { c: matrix(&case["c"]), ..at };
        let moments = Quadrature::new(&task, at.m.nrows(), attention, 1e-10).unwrap().moments(&at);
        let b: Vec<f64> = serde_json::from_value(case["mean_g"].clone()).unwrap();
        let off = [
            largest_size((&moments.gx - matrix(&case["mean_g_x"])).iter()),
            largest_size((&moments.gc - matrix(&case["mean_g_c"]).resize(at.m.nrows(), at.m.nrows(), 0.0)).iter()),
            largest_size(moments.gb.iter().zip(&b).map(|(x, y)| (x - y).abs())),
        ];
        println!("{} {}: off by {off:?}", case["attention"], case["length"]);
        assert!(off.iter().all(|o| *o < 1e-9), "{case}: {off:?}");
    }
}

#[test]
fn reference_bayes_risks() {
    let texts = [
        include_str!("../../tests/reference/bayes_risk.json"),
        include_str!("../../tests/reference/bayes_risk_more.json"),
    ];
    for case in texts.into_iter().flat_map(cases) {
        let clock = std::time::Instant::now();
        let found = bayes_risk(&task(&case), 1e-11).unwrap();
        let difference = (found.risk - case["bayes_risk"].as_f64().unwrap()).abs();
        println!(
            "{} L = {}: off by {difference:.1e}, estimate {:.1e}, identity {:.1e}, {:?}",
            case["theta"],
            case["length"],
            found.error_estimate,
            found.identity,
            clock.elapsed()
        );
        assert!(difference <= 1e-10, "{case}: {found:?}");
        assert!(difference <= found.error_estimate + case["precision"].as_f64().unwrap() + 1e-12, "{case}: {found:?}");
    }
}

fn attentions() -> Vec<Attention> {
    Attention::all().collect()
}

fn thetas() -> Vec<Theta> {
    vec![
        Theta::Flip { nu: vec![1.8, 1.2] },
        Theta::Flip { nu: vec![2.5] },
        Theta::Gaussian { mean: vec![0.8, 0.0], sd: Some(vec![1.0, 1.6]), cov: None },
        Theta::Discrete {
            points: vec![vec![1.5, 0.0], vec![-0.7, 1.0], vec![0.0, -2.0]],
            weights: vec![0.5, 0.3, 0.2],
        },
        Theta::Sphere { nu: 1.8, features: 2 },
    ]
}

/// Points of all kinds: regular, `m = 0`, singular `r`, equal heads, one head.
fn point(kind: usize, heads: usize, features: usize, entries: &[f64]) -> Coordinates {
    let entry = |k: usize| entries[k % entries.len()];
    let m = DMatrix::from_fn(heads, features, |h, f| if kind == 1 { 0.0 } else { entry(3 * h + 7 * f) });
    let c =
        DMatrix::from_fn(heads, heads, |h, k| if kind == 2 || k > h { 0.0 } else { 0.6 * entry(5 * h + 11 * k + 1) });
    let b: Vec<f64> = (0..heads).map(|h| entry(13 * h + 2) - 0.5).collect();
    if kind != 3 {
        return Coordinates { m, c, b };
    }
    // All heads like the first.
    Coordinates {
        m: DMatrix::from_fn(heads, features, |_, f| m[(0, f)]),
        c: DMatrix::from_fn(heads, heads, |_, k| c[(0, k)]),
        b: vec![b[0]; heads],
    }
}

fn with_rule(attention: &Attention, mut at: Coordinates) -> Coordinates {
    let r = at.r();
    at.b = headflow_model::biases(attention.bias, &r, &at.b);
    at
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, max_shrink_iters: 0, ..ProptestConfig::default() })]

    /// Loss and moments of 200 random points within the standard errors of quasi-Monte Carlo. That is dozens of numbers each: the
    /// bound for all of them, 7 standard errors over 16 scrambles (a t distribution with 15 degrees of freedom), is about as likely
    /// to be passed by chance as 4.9 of a normal one; bayes-softmax above rank 3 adds the error that it states.
    #[test]
    fn quasi_monte_carlo_agrees(
        kind in 0usize..4, heads in 1usize..4, length in 2usize..7, which in 0usize..18, theta in 0usize..5,
        entries in prop::collection::vec(-1.5f64..1.5, 40),
    ) {
        let task = Task::new(length, thetas()[theta].clone()).unwrap();
        let attention = attentions()[which];
        let at = with_rule(&attention, point(kind, heads, task.features(), &entries));
        let exact = Quadrature::new(&task, heads, attention, 1e-6).unwrap();
        let found = exact.evaluate(&at, true);
        prop_assert!(found.error_estimate <= 1e-6 && found.gradient_error_estimate <= 1e-6, "{:?}", found);
        let stated = found.error_estimate.max(found.gradient_error_estimate);
        let flat = |m: &headflow_theory::moments::Moments| -> Vec<f64> {
            let loss = [m.loss.value(), m.loss.attention_on_relevant, m.loss.second_moment];
            loss.into_iter().chain(m.gx.iter().copied()).chain(m.gc.iter().copied()).chain(m.gb.iter().copied()).collect()
        };
        let sampled: Vec<Vec<f64>> = QuasiMonteCarlo::scrambles(&task, heads, attention, 1 << 10, 5, 16)
            .unwrap()
            .iter()
            .map(|q| flat(&q.moments(&at)))
            .collect();
        for (i, exact) in flat(&exact.moments(&at)).into_iter().enumerate() {
            let (mean, error) = mean_and_error(sampled.iter().map(|s| s[i]));
            // 16 scrambles: 7 standard errors of a t distribution with 15 degrees of freedom are as likely as 4.9 of a normal one.
            prop_assert!((mean - exact).abs() <= 7.0 * error + 2.0 * stated, "number {i}: {mean} +- {error}, exactly {exact}");
        }
    }
}

/// The gradient against differences of the loss of order 4, to 1e-7.
#[test]
fn the_gradient_is_that_of_the_loss() {
    let entries: Vec<f64> = (0..40).map(|i| (1.0 + 1.7 * f64::from(i)).sin()).collect();
    for (i, attention) in attentions().into_iter().enumerate() {
        let theta = thetas()[i % 5].clone();
        let task = Task::new(2 + i % 5, theta).unwrap();
        let heads = 1 + i % 2;
        let at = with_rule(&attention, point(0, heads, task.features(), &entries));
        let quadrature = Quadrature::new(&task, heads, attention, 1e-9).unwrap();
        let moments = quadrature.moments(&at);
        let slope = |change: &dyn Fn(&mut Coordinates, f64)| {
            let loss = |step: f64| {
                let mut moved = at.clone();
                change(&mut moved, step);
                quadrature.loss(&moved).value()
            };
            let h = 4e-3;
            (8.0 * (loss(h) - loss(-h)) - (loss(2.0 * h) - loss(-2.0 * h))) / (12.0 * h)
        };
        for h in 0..heads {
            for f in 0..task.features() {
                let difference = slope(&|at, s| at.m[(h, f)] += s) - moments.gx[(h, f)];
                assert!(difference.abs() < 1e-7, "{attention:?} m {h} {f}: {difference:e}");
            }
            for k in 0..heads {
                let difference = slope(&|at, s| at.c[(h, k)] += s) - moments.gc[(h, k)];
                assert!(difference.abs() < 1e-7, "{attention:?} C {h} {k}: {difference:e}");
            }
            let difference = slope(&|at, s| at.b[h] += s) - moments.gb[h];
            assert!(difference.abs() < 1e-7, "{attention:?} b {h}: {difference:e}");
        }
    }
}

/// Estimates are of the size of the true errors, or above: an error of more than twice its estimate is a failure. At every
/// tolerance, for small and large keys, short and long sequences.
#[test]
fn estimates_cover_errors() {
    let entries: Vec<f64> = (0..40).map(|i| (2.0 + 2.3 * f64::from(i)).cos()).collect();
    for (i, attention) in attentions().into_iter().enumerate() {
        let length = [2, 6, 40, 1000, 1_000_000][i % 5];
        let scale = [1.0, 3.0, 0.2, 8.0][i % 4];
        let theta = Theta::Flip { nu: vec![[2.0, 4.0, 8.0][i % 3]] };
        let task = Task::new(length, theta).unwrap();
        // bayes-softmax on a product grid.
        let kind = if attention.activation == Activation::BayesSoftmax { 2 } else { 0 };
        let mut at = point(kind, 2, 1, &entries);
        at.m *= scale;
        at.c *= scale;
        let at = with_rule(&attention, at);
        let evaluate = |tolerance| Quadrature::new(&task, 2, attention, tolerance).unwrap().evaluate(&at, true);
        let exact = evaluate(1e-12);
        let (own, own_gradient) = (exact.error_estimate, exact.gradient_error_estimate);
        for tolerance in [1e-3, 1e-5, 1e-7, 1e-9] {
            let found = evaluate(tolerance);
            let error = (found.loss.value() - exact.loss.value()).abs();
            let (g, e) = (found.gradient.unwrap(), exact.gradient.clone().unwrap());
            let of_gradient = larger(largest_size((g.m - e.m).iter()), largest_size((g.r - e.r).iter()));
            let name = format!("{attention:?}, L = {length}, scale {scale}, tolerance {tolerance:e}");
            println!(
                "{name}: {error:.1e} ({:.1e}), {of_gradient:.1e} ({:.1e})",
                found.error_estimate, found.gradient_error_estimate
            );
            assert!(error <= 2.0 * found.error_estimate + own, "{name}: loss off by {error:e}");
            assert!(
                of_gradient <= 2.0 * found.gradient_error_estimate + own_gradient,
                "{name}: gradient off by {of_gradient:e}"
            );
            assert!(found.error_estimate <= tolerance, "{name}: {:e}", found.error_estimate);
        }
    }
}

/// A tolerance that cannot be met says what was reached.
#[test]
fn an_impossible_tolerance_is_refused() {
    let task = Task::new(6, Theta::Flip { nu: vec![1.0] }).unwrap();
    let attention = Attention::from(Activation::BayesSoftmax);
    let at = Coordinates { m: DMatrix::zeros(5, 1), c: DMatrix::identity(5, 5), b: vec![0.0; 5] };
    let message = Quadrature::new(&task, 5, attention, 1e-10).unwrap().loss_to_tolerance(&at).unwrap_err().to_string();
    assert!(message.starts_with("tolerance: 1e-10 cannot be met") && message.contains("reached"), "{message}");
    for tolerance in [0.0, -1.0, f64::NAN, 1e-15, 0.5] {
        assert!(Quadrature::new(&task, 5, attention, tolerance).is_err());
    }
}

/// The bits do not depend on the number of threads.
#[test]
fn threads_change_nothing() {
    for activation in Activation::ALL {
        let task = Task::new(5, Theta::Flip { nu: vec![1.5, 1.0] }).unwrap();
        let attention = Attention::from(activation);
        let entries: Vec<f64> = (0..40).map(|i| f64::from(i).sin()).collect();
        let at = point(if activation == Activation::BayesSoftmax { 2 } else { 0 }, 3, 2, &entries);
        let quadrature = Quadrature::new(&task, 3, attention, 1e-6).unwrap();
        let on = |threads: usize| {
            rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build()
                .unwrap()
                .install(|| quadrature.evaluate(&at, true))
        };
        let one = on(1);
        assert_eq!(one, on(2));
        assert_eq!(one, on(3));
    }
}
