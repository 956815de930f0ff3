//! Random layers, and attention written out: the slow twin of the operator.

// Each test program uses a part of this.
#![allow(dead_code)]

use headflow_model::random::{Purpose, Stream};
use headflow_xsa::{Error, Inputs, Mask, Pairing, SelfAttention, Shape, SinkToken, Sinks};

/// Tensors in double precision.
#[derive(Debug, Clone)]
pub struct Layer {
    pub shape: Shape,
    pub queries: Vec<f64>,
    pub keys: Vec<f64>,
    pub values: Vec<f64>,
    pub logits: Option<Vec<f64>>,
    pub sink: Option<(Vec<f64>, Vec<f64>)>,
}

pub fn shape(tokens: usize, heads: usize, key_value_heads: usize, key_size: usize, value_size: usize) -> Shape {
    Shape { tokens, heads, key_value_heads, key_size, value_size }
}

pub fn normals(seed: u64, number: u64, count: usize) -> Vec<f64> {
    let mut out = vec![0.0f32; count];
    Stream::new(seed, Purpose::Values, 0).normals(number, 0, 0, &mut out);
    out.into_iter().map(f64::from).collect()
}

impl Layer {
    pub fn random(shape: Shape, logits: bool, token: bool, seed: u64) -> Self {
        let Shape { tokens, heads, key_value_heads, key_size, value_size } = shape;
        Self {
            shape,
            queries: normals(seed, 0, tokens * heads * key_size),
            keys: normals(seed, 1, tokens * key_value_heads * key_size),
            values: normals(seed, 2, tokens * key_value_heads * value_size),
            logits: logits.then(|| normals(seed, 3, heads)),
            sink: token.then(|| {
                (normals(seed, 4, key_value_heads * key_size), normals(seed, 5, key_value_heads * value_size))
            }),
        }
    }

    pub fn inputs(&self) -> Inputs<'_, f64> {
        Inputs {
            queries: &self.queries,
            keys: &self.keys,
            values: &self.values,
            sinks: Sinks {
                logits: self.logits.as_deref(),
                token: self.sink.as_ref().map(|(keys, values)| SinkToken { keys, values }),
            },
        }
    }

    /// Runs `f` on the same layer in single precision.
    pub fn single<R>(&self, f: impl FnOnce(&Inputs<'_, f32>) -> R) -> R {
        let narrow = |v: &Vec<f64>| v.iter().map(|x| *x as f32).collect::<Vec<f32>>();
        let (queries, keys, values) = (narrow(&self.queries), narrow(&self.keys), narrow(&self.values));
        let logits = self.logits.as_ref().map(narrow);
        let sink = self.sink.as_ref().map(|(keys, values)| (narrow(keys), narrow(values)));
        f(&Inputs {
            queries: &queries,
            keys: &keys,
            values: &values,
            sinks: Sinks {
                logits: logits.as_deref(),
                token: sink.as_ref().map(|(keys, values)| SinkToken { keys, values }),
            },
        })
    }

    pub fn query(&self, head: usize, i: usize) -> &[f64] {
        let at = (i * self.shape.heads + head) * self.shape.key_size;
        &self.queries[at..at + self.shape.key_size]
    }

    pub fn key(&self, owner: usize, j: usize) -> &[f64] {
        let at = (j * self.shape.key_value_heads + owner) * self.shape.key_size;
        &self.keys[at..at + self.shape.key_size]
    }

    pub fn value(&self, owner: usize, j: usize) -> &[f64] {
        let at = (j * self.shape.key_value_heads + owner) * self.shape.value_size;
        &self.values[at..at + self.shape.value_size]
    }
}

pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// A query or key turned by its position.
fn turned(attention: &SelfAttention, row: &[f64], position: usize) -> Vec<f64> {
    let mut row = row.to_vec();
    let Some(rotary) = &attention.rotary else { return row };
    let size = rotary.size.unwrap_or(row.len());
    for k in 0..size / 2 {
        let factor = rotary.factors.as_ref().map_or(1.0, |f| f[k]);
        let angle = position as f64 / rotary.base.powf(2.0 * k as f64 / size as f64) / factor;
        let (a, b) = match rotary.pairing {
            Pairing::Interleaved => (2 * k, 2 * k + 1),
            Pairing::Halves => (k, k + size / 2),
        };
        (row[a], row[b]) = (row[a] * angle.cos() - row[b] * angle.sin(), row[a] * angle.sin() + row[b] * angle.cos());
    }
    row
}

/// `a_ij` of one query over all tokens, and what the sink logit and the sink token get.
pub fn weights(attention: &SelfAttention, layer: &Layer, head: usize, i: usize) -> (Vec<f64>, f64, f64) {
    let shape = layer.shape;
    let owner = head / (shape.heads / shape.key_value_heads);
    let scale = attention.scale.unwrap_or(1.0 / (shape.key_size as f64).sqrt());
    let query = turned(attention, layer.query(head, i), i);
    let seen = |j: usize| attention.mask == Mask::Bidirectional || j <= i;
    let score = |j: usize| scale * dot(&query, &turned(attention, layer.key(owner, j), j));
    let scores: Vec<f64> = (0..shape.tokens).map(|j| if seen(j) { score(j) } else { f64::NEG_INFINITY }).collect();
    let logit = layer.logits.as_ref().map_or(f64::NEG_INFINITY, |logits| logits[head]);
    let token = layer.sink.as_ref().map_or(f64::NEG_INFINITY, |(keys, _)| {
        scale * dot(&query, &keys[owner * shape.key_size..(owner + 1) * shape.key_size])
    });
    let largest = headflow_model::largest(scores.iter().chain([&logit, &token]));
    let total: f64 = scores.iter().chain([&logit, &token]).map(|s| (s - largest).exp()).sum();
    let weight = |s: f64| (s - largest).exp() / total;
    (scores.iter().map(|s| weight(*s)).collect(), weight(logit), weight(token))
}

/// `y_i` of one head.
pub fn output(attention: &SelfAttention, layer: &Layer, head: usize, i: usize) -> Vec<f64> {
    let shape = layer.shape;
    let owner = head / (shape.heads / shape.key_value_heads);
    let (weights, _, to_token) = weights(attention, layer, head, i);
    let mut y = vec![0.0; shape.value_size];
    for (j, a) in weights.iter().enumerate() {
        y.iter_mut().zip(layer.value(owner, j)).for_each(|(y, v)| *y += a * v);
    }
    if let Some((_, values)) = &layer.sink {
        let value = &values[owner * shape.value_size..(owner + 1) * shape.value_size];
        y.iter_mut().zip(value).for_each(|(y, v)| *y += to_token * v);
    }
    y
}

/// All outputs, as [`SelfAttention::forward`] gives them.
pub fn outputs(attention: &SelfAttention, layer: &Layer) -> Vec<f64> {
    let shape = layer.shape;
    let mut all = Vec::new();
    for i in 0..shape.tokens {
        for head in 0..shape.heads {
            let mut y = output(attention, layer, head, i);
            let v = layer.value(head / (shape.heads / shape.key_value_heads), i);
            let square = dot(v, v);
            if attention.exclusive && square > 0.0 {
                let part = dot(&y, v) / square;
                y.iter_mut().zip(v).for_each(|(y, v)| *y -= part * v);
            }
            all.extend(y);
        }
    }
    all
}

/// The largest difference of two lists.
pub fn distance(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    headflow_model::largest_size(a.iter().zip(b).map(|(a, b)| a - b))
}

/// The message of an error.
pub fn message<T>(result: Result<T, Error>) -> String {
    result.err().expect("an error").to_string()
}
