//! The operator against attention written out, its gradient against differences, and its edges.

mod common;

use common::{Layer, distance, dot, message, normals, outputs, shape};
use headflow_xsa::{Error, Inputs, Mask, Pairing, Rotary, SelfAttention, Shape};
use proptest::prelude::*;

fn attention(bidirectional: bool, exclusive: bool, rotary: usize) -> SelfAttention {
    SelfAttention {
        mask: if bidirectional { Mask::Bidirectional } else { Mask::Causal },
        exclusive,
        scale: None,
        rotary: match rotary {
            0 => None,
            1 => Some(Rotary::default()),
            _ => Some(Rotary { base: 500.0, size: Some(4), pairing: Pairing::Halves, factors: Some(vec![1.0, 8.0]) }),
        },
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    /// Any shape and options, tokens beyond one and two blocks; both precisions.
    #[test]
    fn streamed_is_plain(
        tokens in prop_oneof![1usize..20, 60usize..70, 250usize..330],
        key_value_heads in 1usize..3,
        group in 1usize..4,
        sizes in (2usize..5, 1usize..9),
        options in (any::<bool>(), any::<bool>(), 0usize..3),
        sinks in (any::<bool>(), any::<bool>()),
        seed in 0u64..1000,
    ) {
        let shape = shape(tokens, key_value_heads * group, key_value_heads, 2 * sizes.0, sizes.1);
        let layer = Layer::random(shape, sinks.0, sinks.1, seed);
        let attention = attention(options.0, options.1, options.2);
        let plain = outputs(&attention, &layer);
        let streamed = attention.forward(&shape, &layer.inputs()).unwrap();
        prop_assert!(distance(&streamed.outputs, &plain) < 1e-13);
        let single = layer.single(|inputs| attention.forward(&shape, inputs)).unwrap();
        let single: Vec<f64> = single.outputs.iter().map(|x| f64::from(*x)).collect();
        prop_assert!(distance(&single, &plain) < 1e-5);
    }

    /// `z . v = 0` to rounding, whatever the size of `v`; `y = z + removed v / |v|`.
    #[test]
    fn exclusive_outputs_are_orthogonal(
        tokens in 1usize..40,
        exponent in -30i32..30,
        options in (any::<bool>(), any::<bool>()),
        seed in 0u64..1000,
    ) {
        let shape = shape(tokens, 4, 2, 4, 5);
        let mut layer = Layer::random(shape, options.1, false, seed);
        layer.values.iter_mut().for_each(|v| *v *= 10f64.powi(exponent));
        let plain = attention(options.0, false, 1).forward(&shape, &layer.inputs()).unwrap();
        let exclusive = attention(options.0, true, 1);
        let attended = exclusive.forward(&shape, &layer.inputs()).unwrap();
        let removed = attended.removed.unwrap();
        layer.single(|inputs| {
            let single = exclusive.forward(&shape, inputs).unwrap();
            for (at, z) in single.outputs.chunks(5).enumerate() {
                let own = (at / 4 * 2 + at % 4 / 2) * 5;
                let (z, v): (Vec<f64>, Vec<f64>) =
                    z.iter().zip(&inputs.values[own..own + 5]).map(|(z, v)| (f64::from(*z), f64::from(*v))).unzip();
                let y = &plain.outputs[at * 5..at * 5 + 5];
                prop_assert!(dot(&z, &v).abs() <= 8.0 * f64::from(f32::EPSILON) * (dot(y, y) * dot(&v, &v)).sqrt());
            }
            Ok(())
        })?;
        for (at, z) in attended.outputs.chunks(5).enumerate() {
            let v = layer.value(at % 4 / 2, at / 4);
            let y = &plain.outputs[at * 5..at * 5 + 5];
            let norm = dot(v, v).sqrt();
            let size = dot(y, y).sqrt();
            prop_assert!(dot(z, v).abs() <= 8.0 * f64::EPSILON * norm * size);
            for k in 0..5 {
                prop_assert!((y[k] - z[k] - removed[at] * v[k] / norm).abs() <= 8.0 * f64::EPSILON * size);
            }
        }
    }
}

/// A loss with a generic gradient at the outputs: `sum_k (c_k z_k + z_k^2 / 2)`.
fn loss(attention: &SelfAttention, layer: &Layer, coefficients: &[f64]) -> f64 {
    let attended = attention.forward(&layer.shape, &layer.inputs()).unwrap();
    attended.outputs.iter().zip(coefficients).map(|(z, c)| c * z + 0.5 * z * z).sum()
}

/// Every tensor of a layer, for differences.
fn tensors(layer: &mut Layer) -> Vec<&mut Vec<f64>> {
    let mut all = vec![&mut layer.queries, &mut layer.keys, &mut layer.values];
    all.extend(layer.logits.as_mut());
    if let Some((keys, values)) = &mut layer.sink {
        all.extend([keys, values]);
    }
    all
}

fn gradients(attention: &SelfAttention, layer: &Layer, coefficients: &[f64]) -> Vec<Vec<f64>> {
    let attended = attention.forward(&layer.shape, &layer.inputs()).unwrap();
    let at_outputs: Vec<f64> = attended.outputs.iter().zip(coefficients).map(|(z, c)| c + z).collect();
    let found = attention.backward(&layer.shape, &layer.inputs(), &attended, &at_outputs).unwrap();
    let mut all = vec![found.queries, found.keys, found.values];
    all.extend(found.sink_logits);
    if let Some((keys, values)) = found.sink_token {
        all.extend([keys, values]);
    }
    all
}

/// Every entry of every gradient, by central differences of order 4, for all options.
#[test]
fn gradients_are_derivatives() {
    for number in 0..48 {
        let bit = |k: usize| number >> k & 1 == 1;
        let attention = attention(bit(0), bit(1), number / 16);
        let shape = shape(6, 4, 2, 4, 3);
        let mut layer = Layer::random(shape, bit(2), bit(3), number as u64);
        let coefficients = normals(99, number as u64, 6 * 4 * 3);
        let exact = gradients(&attention, &layer, &coefficients);
        for (tensor, exact) in exact.iter().enumerate() {
            for entry in 0..exact.len() {
                let mut at = |step: f64| {
                    tensors(&mut layer)[tensor][entry] += step;
                    let value = loss(&attention, &layer, &coefficients);
                    tensors(&mut layer)[tensor][entry] -= step;
                    value
                };
                let h = 1e-3;
                let slope = (8.0 * (at(h) - at(-h)) - (at(2.0 * h) - at(-2.0 * h))) / (12.0 * h);
                assert!(
                    (slope - exact[entry]).abs() < 1e-8 * (1.0 + slope.abs()),
                    "options {number}, tensor {tensor}, entry {entry}: {} should be {slope}",
                    exact[entry]
                );
            }
        }
    }
}

/// Sequences of several blocks of queries and keys, along a random direction of all inputs at once.
#[test]
fn gradients_are_derivatives_over_many_blocks() {
    for number in 0..4u64 {
        let attention = attention(number & 1 == 1, number & 2 == 2, 1);
        let shape = shape(600, 4, 2, 4, 3);
        let mut layer = Layer::random(shape, true, true, number);
        let coefficients = normals(98, number, 600 * 4 * 3);
        let exact = gradients(&attention, &layer, &coefficients);
        let directions: Vec<Vec<f64>> = exact.iter().enumerate().map(|(n, g)| normals(97, n as u64, g.len())).collect();
        let along: f64 = exact.iter().zip(&directions).map(|(g, d)| dot(g, d)).sum();
        let mut at = |step: f64| {
            let shift = |layer: &mut Layer, step: f64| {
                for (tensor, direction) in tensors(layer).into_iter().zip(&directions) {
                    tensor.iter_mut().zip(direction).for_each(|(x, d)| *x += step * d);
                }
            };
            let before = layer.clone();
            shift(&mut layer, step);
            let value = loss(&attention, &layer, &coefficients);
            layer = before;
            value
        };
        let h = 1e-4;
        let slope = (8.0 * (at(h) - at(-h)) - (at(2.0 * h) - at(-2.0 * h))) / (12.0 * h);
        assert!((slope - along).abs() < 1e-7 * slope.abs(), "{number}: {along} should be {slope}");
    }
}

/// Single precision gives the gradient of double precision, to its own rounding.
#[test]
fn gradients_in_single_precision() {
    let shape = shape(300, 4, 2, 8, 6);
    let layer = Layer::random(shape, true, true, 5);
    let attention = attention(false, true, 1);
    let coefficients = normals(96, 0, 300 * 4 * 6);
    let exact = gradients(&attention, &layer, &coefficients);
    layer.single(|inputs| {
        let attended = attention.forward(&shape, inputs).unwrap();
        let at_outputs: Vec<f32> = attended.outputs.iter().zip(&coefficients).map(|(z, c)| *c as f32 + z).collect();
        let found = attention.backward(&shape, inputs, &attended, &at_outputs).unwrap();
        let (sink_keys, sink_values) = found.sink_token.unwrap();
        let found = [found.queries, found.keys, found.values, found.sink_logits.unwrap(), sink_keys, sink_values];
        for (found, exact) in found.iter().zip(&exact) {
            let found: Vec<f64> = found.iter().map(|x| f64::from(*x)).collect();
            let size = headflow_model::largest_size(exact);
            assert!(distance(&found, exact) < 1e-5 * size, "{} of {size}", distance(&found, exact));
        }
    });
}

/// The same bits with 1, 2 and 3 threads.
#[test]
fn threads_change_nothing() {
    let shape = shape(700, 6, 3, 8, 8);
    let layer = Layer::random(shape, true, true, 11);
    let attention = attention(false, true, 1);
    let coefficients = normals(95, 0, 700 * 6 * 8);
    let with = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            layer.single(|inputs| {
                let attended = attention.forward(&shape, inputs).unwrap();
                let slopes: Vec<f32> = coefficients.iter().map(|c| *c as f32).collect();
                let gradients = attention.backward(&shape, inputs, &attended, &slopes).unwrap();
                (attended, gradients, attention.measure(&shape, inputs).unwrap())
            })
        })
    };
    let one = with(1);
    assert_eq!(one, with(2));
    assert_eq!(one, with(3));
}

/// Where the own value is zero, `z = y` and the projection adds nothing to the gradient.
#[test]
fn a_zero_value_stays_as_it_is() {
    let shape = shape(5, 2, 1, 4, 3);
    let mut layer = Layer::random(shape, false, false, 3);
    layer.values[6..9].fill(0.0);
    let exclusive = attention(false, true, 0);
    let (z, y) = (
        exclusive.forward(&shape, &layer.inputs()).unwrap(),
        attention(false, false, 0).forward(&shape, &layer.inputs()).unwrap(),
    );
    // Token 2, both heads.
    assert_eq!(z.outputs[12..18], y.outputs[12..18]);
    assert_eq!(z.removed.as_ref().unwrap()[4..6], [0.0; 2]);
    let found = exclusive.backward(&shape, &layer.inputs(), &z, &normals(1, 0, 30)).unwrap();
    assert!(found.values.iter().chain(&found.queries).chain(&found.keys).all(|g| g.is_finite()));
}

/// Values down to the smallest normal numbers are projected out like any other; smaller ones count as zero.
/// Gradients stay finite.
#[test]
fn tiny_values() {
    let shape = shape(3, 1, 1, 2, 2);
    for (size, projected) in [(1e-30f32, true), (2e-38, true), (1e-39, false), (1e-45, false)] {
        let (queries, keys) = ([0.5f32; 6], [0.25f32; 6]);
        let values = [1.0, 2.0, size, size, -1.0, 3.0];
        let inputs = Inputs { queries: &queries, keys: &keys, values: &values, sinks: Default::default() };
        let exclusive = attention(false, true, 0);
        let attended = exclusive.forward(&shape, &inputs).unwrap();
        let z = &attended.outputs[2..4];
        // y_1 is near (0.5, 1), and its part along (1, 1) is (0.75, 0.75).
        let expected = if projected { [-0.25, 0.25] } else { [0.5, 1.0] };
        assert!((z[0] - expected[0]).abs() < 1e-6 && (z[1] - expected[1]).abs() < 1e-6, "{size}: {z:?}");
        let found = exclusive.backward(&shape, &inputs, &attended, &[1.0, -2.0, 3.0, 0.5, 1.0, 1.0]).unwrap();
        assert!(found.values.iter().all(|g| g.is_finite()), "{size}: {:?}", found.values);
    }
}

/// A single token attends to itself: `y = v`, and nothing is left of it.
#[test]
fn a_single_token() {
    let shape = shape(1, 2, 1, 4, 3);
    let layer = Layer::random(shape, false, false, 8);
    let y = attention(false, false, 1).forward(&shape, &layer.inputs()).unwrap();
    assert!(distance(&y.outputs, &[&layer.values[..], &layer.values[..]].concat()) < 1e-15);
    let z = attention(true, true, 1).forward(&shape, &layer.inputs()).unwrap();
    assert!(z.outputs.iter().all(|z| z.abs() < 1e-15));
}

/// A sink logit that grows takes all attention: outputs tend to zero, not to NaN.
#[test]
fn a_large_sink_takes_everything() {
    let shape = shape(4, 2, 2, 4, 3);
    let mut layer = Layer::random(shape, true, false, 2);
    layer.logits = Some(vec![1e4, -1e4]);
    let attended = attention(false, false, 0).forward(&shape, &layer.inputs()).unwrap();
    let without =
        attention(false, false, 0).forward(&shape, &Inputs { sinks: Default::default(), ..layer.inputs() }).unwrap();
    for i in 0..4 {
        assert!(attended.outputs[i * 6..i * 6 + 3].iter().all(|y| *y == 0.0));
        assert!(distance(&attended.outputs[i * 6 + 3..i * 6 + 6], &without.outputs[i * 6 + 3..i * 6 + 6]) < 1e-15);
    }
}

#[test]
fn what_is_not_finite_is_named() {
    let shape = shape(5, 4, 2, 3, 2);
    let attention = SelfAttention::default();
    let spoiled = |spoil: fn(&mut Layer)| {
        let mut layer = Layer::random(shape, true, true, 1);
        spoil(&mut layer);
        message(attention.forward(&shape, &layer.inputs()).map_err(|error| error.in_layer(7)))
    };
    // Token 3, head 2 of 4; token 4, head 1 of 2.
    assert!(
        spoiled(|l| l.queries[(3 * 4 + 2) * 3] = f64::NAN).starts_with("layer 7, head 2, position 3: the query is")
    );
    assert!(
        spoiled(|l| l.keys[(4 * 2 + 1) * 3] = f64::INFINITY).starts_with("layer 7, head 1, position 4: the key is")
    );
    assert!(spoiled(|l| l.values[(4 * 2 + 1) * 2] = f64::NAN).starts_with("layer 7, head 1, position 4: the value is"));
    assert!(spoiled(|l| l.logits = Some(vec![0.0, 0.0, 0.0, f64::NAN])).starts_with("layer 7, head 3, sink: "));
    let overflow = spoiled(|l| {
        l.queries[(2 * 4 + 1) * 3..(2 * 4 + 2) * 3].fill(1e200);
        l.keys[2 * 2 * 3..(2 * 2 + 1) * 3].fill(1e200);
    });
    assert_eq!(overflow, "layer 7, head 1, position 2: a score is not finite, so attention is not defined there");
}

#[test]
fn tensors_that_do_not_fit_are_refused() {
    let good = shape(4, 4, 2, 4, 3);
    let layer = Layer::random(good, true, true, 1);
    let attention = SelfAttention::default();
    let says = |shape: Shape, expected: &str| {
        let text = message(attention.forward(&shape, &layer.inputs()));
        assert!(text.contains(expected), "{text}");
    };
    says(Shape { tokens: 0, ..good }, "tokens: must be at least 1");
    says(Shape { key_value_heads: 3, ..good }, "3 does not divide the 4 query heads");
    says(Shape { tokens: 5, ..good }, "queries: 64 numbers, but 80 are needed for 5 tokens x 4 heads x 4 numbers");
    says(Shape { value_size: 2, ..good }, "values: 24 numbers, but 16 are needed");
    let odd = SelfAttention { rotary: Some(Rotary { size: Some(3), ..Rotary::default() }), ..attention.clone() };
    assert!(message(odd.forward(&good, &layer.inputs())).starts_with("rotary: 3 entries"));
    let attended = attention.forward(&good, &layer.inputs()).unwrap();
    assert!(matches!(
        attention.backward(&good, &layer.inputs(), &attended, &[0.0; 3]),
        Err(Error::Size { what: "the gradient", found: 3, expected: 48, .. })
    ));
    let exclusive = SelfAttention { exclusive: true, ..attention };
    assert!(message(exclusive.backward(&good, &layer.inputs(), &attended, &[0.0; 48])).starts_with("attended: "));
}
