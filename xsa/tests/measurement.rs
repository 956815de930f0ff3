//! Measurements against sums written out, and the closed form where it is exact and where it is an
//! approximation.

mod common;

use common::{Layer, dot, normals, output, shape, weights};
use headflow_xsa::bias::{Prediction, attended_rho, closed_form, compare};
use headflow_xsa::synthetic::Synthetic;
use headflow_xsa::{Mask, Measurement, Rotary, SelfAttention, Shape};
use proptest::prelude::*;

fn cosine(a: &[f64], b: &[f64]) -> f64 {
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

fn minus(a: &[f64], factor: f64, b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a - factor * b).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 25, ..ProptestConfig::default() })]

    #[test]
    fn measurements_are_their_definitions(
        tokens in prop_oneof![2usize..12, 60usize..70, 255usize..262],
        bidirectional in any::<bool>(),
        sinks in (any::<bool>(), any::<bool>()),
        seed in 0u64..1000,
    ) {
        let shape = shape(tokens, 4, 2, 4, 6);
        let layer = Layer::random(shape, sinks.0, sinks.1, seed);
        let mask = if bidirectional { Mask::Bidirectional } else { Mask::Causal };
        let attention = SelfAttention { mask, rotary: Some(Rotary::default()), ..SelfAttention::default() };
        let measured = attention.measure(&shape, &layer.inputs()).unwrap();
        for head in 0..4 {
            let owner = head / 2;
            for i in 0..tokens {
                let (a, _, _) = weights(&attention, &layer, head, i);
                let y = output(&attention, &layer, head, i);
                let v = layer.value(owner, i);
                let norms: Vec<f64> = (0..tokens).map(|j| dot(layer.value(owner, j), layer.value(owner, j)).sqrt()).collect();
                let total: f64 = a.iter().zip(&norms).map(|(a, n)| a * n).sum();
                let b: Vec<f64> = a.iter().zip(&norms).map(|(a, n)| a * n / total).collect();
                let at = |quantity: &[f64]| measured.of_head(quantity, head)[i];
                let close = |name: &str, found: f64, expected: f64| {
                    prop_assert!((found - expected).abs() < 1e-11, "{name} of head {head}, {i}: {found} {expected}");
                    Ok(())
                };
                close("cosine", at(&measured.cosine), cosine(&y, v))?;
                close("a_ii", at(&measured.self_attention), a[i])?;
                close("sum a^2", at(&measured.squared_attention), dot(&a, &a))?;
                close("a_i0", at(&measured.first_attention), a[0])?;
                close("sinks", at(&measured.sink_attention), 1.0 - a.iter().sum::<f64>())?;
                close("b_ii", at(&measured.weighted_self), b[i])?;
                close("sum b^2", at(&measured.weighted_square), dot(&b, &b))?;
                let similarity: f64 = (0..tokens).map(|j| b[j] * cosine(v, layer.value(owner, j))).sum();
                close("attended similarity", at(&measured.attended_similarity), similarity)?;
                let others: f64 = (0..tokens).filter(|j| *j != i).map(|j| cosine(&y, layer.value(owner, j))).sum();
                close("other", at(&measured.other), others / (tokens as f64 - 1.0))?;
                // Nothing is left of the first token's output without itself.
                if i > 0 {
                    let without_first = minus(&y, a[0], layer.value(owner, 0));
                    close("without first", at(&measured.without_first), cosine(&without_first, v))?;
                    close("without self", at(&measured.without_self), cosine(&minus(&y, a[i], v), v))?;
                }
                let mut seen = vec![0.0; 6];
                for j in (0..tokens).filter(|j| bidirectional || *j <= i) {
                    seen.iter_mut().zip(layer.value(owner, j)).for_each(|(s, v)| *s += v);
                }
                close("uniform", measured.of_head(&measured.uniform, owner)[i], cosine(&seen, v))?;
                close("norm", measured.of_head(&measured.value_norm, owner)[i], norms[i])?;
            }
            let pairs = |first: usize| {
                let mut all = Vec::new();
                for i in first..tokens {
                    all.extend((first..tokens).filter(|j| *j != i).map(|j| cosine(layer.value(owner, i), layer.value(owner, j))));
                }
                all.iter().sum::<f64>() / all.len() as f64
            };
            prop_assert!((measured.rho[owner] - pairs(0)).abs() < 1e-12);
            prop_assert!(tokens == 2 || (measured.rho_without_first[owner] - pairs(1)).abs() < 1e-12);
            let from_1 = measured.of_head(&measured.cosine, head)[1..].to_vec();
            let count = from_1.len() as f64;
            prop_assert!((measured.mean(&measured.cosine, head) - from_1.iter().sum::<f64>() / count).abs() < 1e-14);
            prop_assert!((measured.removed(head) - dot(&from_1, &from_1) / count).abs() < 1e-14);
        }
    }
}

/// What cannot be averaged is NaN, not a number.
#[test]
fn one_token_and_zero_values() {
    let one = shape(1, 1, 1, 2, 2);
    let layer = Layer::random(one, false, false, 1);
    let measured = SelfAttention::default().measure(&one, &layer.inputs()).unwrap();
    assert!((measured.cosine[0] - 1.0).abs() < 1e-15);
    assert!(measured.rho[0].is_nan() && measured.other[0].is_nan() && measured.mean(&measured.cosine, 0).is_nan());
    let shape = shape(6, 2, 1, 2, 2);
    let mut layer = Layer::random(shape, false, false, 1);
    layer.values.fill(0.0);
    let measured = SelfAttention::default().measure(&shape, &layer.inputs()).unwrap();
    let quantities = [&measured.cosine, &measured.attended_similarity, &measured.without_self, &measured.weighted_self];
    assert!(quantities.iter().all(|q| q.iter().all(|x| *x == 0.0)));
    assert_eq!((measured.rho[0], measured.rho_without_first[0]), (0.0, 0.0));
    assert!(Prediction::ALL.iter().all(|p| p.of_head(&measured, 0).is_finite()));
}

/// Where a sink token takes nearly all attention, what tokens get is still measured to many digits.
#[test]
fn a_sink_token_that_takes_nearly_everything() {
    let shape = shape(40, 2, 1, 4, 6);
    let mut layer = Layer::random(shape, false, true, 3);
    layer.queries.iter_mut().for_each(|q| *q *= 60.0);
    let exact = SelfAttention::default().measure(&shape, &layer.inputs()).unwrap();
    let single = layer.single(|inputs| SelfAttention::default().measure(&shape, inputs)).unwrap();
    for (single, exact) in single.attended_similarity.iter().zip(&exact.attended_similarity) {
        assert!(exact.abs() <= 1.0 + 1e-12 && (single - exact).abs() < 1e-3, "{single} {exact}");
    }
    let nearly = (0..80).filter(|at| exact.sink_attention[*at] > 1.0 - 1e-4).count();
    assert!(nearly > 0);
}

/// Where a token gives nearly everything to itself or to the first one, what is left has its digits all the same.
#[test]
fn terms_that_are_nearly_everything() {
    let shape = shape(30, 2, 1, 4, 6);
    let mut layer = Layer::random(shape, false, false, 5);
    layer.queries.iter_mut().for_each(|q| *q *= 15.0);
    let exact = SelfAttention::default().measure(&shape, &layer.inputs()).unwrap();
    let single = layer.single(|inputs| SelfAttention::default().measure(&shape, inputs)).unwrap();
    let nearly = |all: &[f64]| (0..2).flat_map(|h| &all[h * 30 + 1..(h + 1) * 30]).filter(|a| **a > 0.9999).count();
    assert!(nearly(&exact.self_attention) > 0 && nearly(&exact.first_attention) > 0);
    for (single, exact) in [(&single.without_self, &exact.without_self), (&single.without_first, &exact.without_first)]
    {
        assert!(common::distance(single, exact) < 1e-3, "{}", common::distance(single, exact));
    }
}

/// A measured layer with the given values.
fn measured(shape: Shape, values: Vec<f64>, seed: u64) -> Measurement {
    let layer = Layer { values, ..Layer::random(shape, false, false, seed) };
    SelfAttention::default().measure(&shape, &layer.inputs()).unwrap()
}

/// With a simplex of values, all of one norm and all pairs of one cosine, the closed form is exact, also for
/// negative cosines.
#[test]
fn the_closed_form_is_exact_for_a_simplex() {
    let tokens = 9;
    for rho in [-0.1, 0.0, 0.3, 0.9] {
        // v_j = p e_j + q sum_k e_k with |v|^2 = p^2 + 2 p q + q^2 T = 1 and v . v' = 2 p q + q^2 T = rho.
        let p = f64::sqrt(1.0 - rho);
        let q = (-p + (p * p + rho * tokens as f64).sqrt()) / tokens as f64;
        let values = (0..tokens * tokens).map(|k| q + if k / tokens == k % tokens { p } else { 0.0 }).collect();
        let found = measured(shape(tokens, 3, 1, 4, tokens), values, 4);
        assert!((found.rho[0] - rho).abs() < 1e-14);
        for head in 0..3 {
            for prediction in Prediction::ALL {
                // Where rho is negative, attended values are taken to be alike in their difference.
                if rho < 0.0 && prediction == Prediction::AttendedValues {
                    continue;
                }
                let (predicted, exact) = (prediction.of_head(&found, head), found.mean(&found.cosine, head));
                assert!((predicted - exact).abs() < 1e-13, "{prediction:?} at rho {rho}: {predicted} {exact}");
            }
            assert!((attended_rho(&found, head) - rho).abs() < 1e-13);
        }
    }
}

/// Values of different norms at right angles: weights times norms are exact, weights alone are not.
#[test]
fn norms_of_values_count() {
    let tokens = 8;
    let entry = |k: usize| if k / tokens == k % tokens { 1.0 + (k / tokens % 3) as f64 } else { 0.0 };
    let found = measured(shape(tokens, 2, 1, 4, tokens), (0..tokens * tokens).map(entry).collect(), 9);
    let exact = found.mean(&found.cosine, 0);
    assert!((Prediction::NormWeighted.of_head(&found, 0) - exact).abs() < 1e-13);
    assert!((Prediction::ClosedForm.of_head(&found, 0) - exact).abs() > 0.02);
}

#[test]
fn the_closed_form_at_its_ends() {
    assert_eq!(closed_form(1.0, 0.2, 0.3), 1.0);
    assert_eq!(closed_form(0.0, 1.0, 1.0), 1.0);
    assert!((closed_form(0.0, 0.1, 0.01) - 1.0).abs() < 1e-15);
    assert_eq!(closed_form(-0.25, 0.2, 0.2), 0.0);
}

/// Synthetic values of large size: theory and measurement within 4 standard errors of 64 sequences.
#[test]
fn synthetic_values_follow_the_closed_form() {
    let layer = |value_size: usize, rho: f64, self_attention: f64| Synthetic {
        tokens: 32,
        sequences: 64,
        key_size: 64,
        value_size,
        rho,
        self_attention,
        spread: 1.0,
        seed: 7,
    };
    for (rho, self_attention) in [(0.0, 0.1), (0.3, 0.1), (0.3, 0.5), (0.7, 0.05)] {
        let deviation = |value_size: usize| {
            let found = layer(value_size, rho, self_attention).measure().unwrap();
            let error = found.cosine.standard_error.hypot(found.closed_form.standard_error);
            (found.cosine.mean - found.closed_form.mean, error, found)
        };
        let (large, error, found) = deviation(2048);
        println!("rho {rho}, a_ii {self_attention}: {large:.5} +- {error:.5}");
        assert!(large.abs() <= 4.0 * error, "rho {rho}, a_ii {self_attention}: {large} +- {error}");
        assert!((found.self_attention.mean - self_attention).abs() < 0.05 * (self_attention + 0.1));
        assert!((found.rho.mean - rho).abs() <= 4.0 * found.rho.standard_error + 1e-3);
    }
}

#[test]
fn synthetic_settings_are_checked() {
    let good = Synthetic {
        tokens: 4,
        sequences: 1,
        key_size: 8,
        value_size: 8,
        rho: 0.1,
        self_attention: 0.5,
        spread: 1.0,
        seed: 0,
    };
    let says = |layer: Synthetic, expected: &str| {
        let text = common::message(layer.measure());
        assert!(text.contains(expected), "{text}");
    };
    says(Synthetic { tokens: 1, ..good.clone() }, "tokens: 1 is too few");
    says(Synthetic { rho: 1.5, ..good.clone() }, "rho: 1.5 is not between 0 and 1");
    says(Synthetic { self_attention: 0.0, ..good.clone() }, "self_attention: 0 is not between");
    says(Synthetic { spread: -1.0, ..good.clone() }, "spread: -1");
    says(Synthetic { key_size: 2, self_attention: 0.9999, ..good }, "key_size: 2 is too small");
}

#[test]
fn comparisons_are_pearsons() {
    let (predicted, measured) = (normals(3, 0, 50), normals(3, 1, 50));
    let mixed: Vec<f64> = predicted.iter().zip(&measured).map(|(p, m)| 0.6 * m + 0.8 * p).collect();
    let found = compare(&mixed, &measured);
    let mean = |v: &[f64]| v.iter().sum::<f64>() / 50.0;
    let centred = |v: &[f64]| v.iter().map(|x| x - mean(v)).collect::<Vec<_>>();
    assert!((found.correlation - cosine(&centred(&mixed), &centred(&measured))).abs() < 1e-14);
    let errors: Vec<f64> = mixed.iter().zip(&measured).map(|(p, m)| p - m).collect();
    assert!((found.mean_error - mean(&errors)).abs() < 1e-15);
    assert!(found.worst.windows(2).all(|w| errors[w[0]].abs() >= errors[w[1]].abs()));
    assert!(compare(&[1.0, 1.0], &[0.0, 1.0]).correlation.is_nan());
}

/// A measurement that is asked to stop anywhere stops, and is otherwise the same.
#[test]
fn an_interrupted_measurement_is_none() {
    use std::sync::atomic::{AtomicU64, Ordering};

    use headflow_model::Watch;

    struct After(AtomicU64, u64);
    impl Watch for After {
        fn advance(&self, _: u64) {}
        fn interrupted(&self) -> bool {
            self.0.fetch_add(1, Ordering::SeqCst) + 1 >= self.1
        }
    }
    let layer = Synthetic {
        tokens: 300,
        sequences: 2,
        key_size: 16,
        value_size: 16,
        rho: 0.3,
        self_attention: 0.2,
        spread: 1.0,
        seed: 1,
    };
    let never = After(AtomicU64::new(0), u64::MAX);
    assert_eq!(layer.measure_watched(&never).unwrap(), layer.measure().unwrap());
    let asked = never.0.into_inner();
    // At every token drawn, and at every block of keys of every pass.
    assert!(asked > 600 + 2 * 2 * 2 * 5, "{asked}");
    for after in (1..=asked).step_by(asked as usize / 20).chain([asked]) {
        assert_eq!(layer.measure_watched(&After(AtomicU64::new(0), after)), Err(headflow_xsa::Error::Interrupted));
    }
}
