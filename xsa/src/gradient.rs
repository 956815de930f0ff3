//! The gradient of attention. With `dz` the gradient at the outputs and `dy` that before the exclusive
//! projection (`exclusive.rs`; `dy = dz` without it),
//!
//! ```text
//! D_i = dy_i . y_i,          ds_ij = a_ij (dy_i . v_j - D_i),
//! dq_i = scale sum_j ds_ij k_j,   dk_j = scale sum_i ds_ij q_i,   dv_j = sum_i a_ij dy_i + (projection),
//! d(sink logit) = -sum_i a_i,sink D_i,
//! ```
//!
//! sums over `i` also over the query heads of a key-value head. Weights are recomputed block by block from
//! the normalisers (arXiv 2205.14135), once along queries for `dq` and once along keys for `dk` and `dv`, so
//! that every sum has one order at any number of threads and memory is `O(T d)`.

use std::ops::Range;

use headflow_model::Unwatched;
use rayon::prelude::*;

use crate::attention::{
    Attended, Inputs, KEYS, Mask, Prepared, QUERIES, SelfAttention, Shape, block, finite, query_blocks, row,
};
use crate::error::Error;
use crate::exclusive::{exclude_gradient, unit};
use crate::matrix::{Matrix, multiply};
use crate::real::Real;

/// Gradients, of the shapes of [`Inputs`].
#[derive(Debug, Clone, PartialEq)]
pub struct Gradients<T> {
    /// `tokens x heads x key_size`.
    pub queries: Vec<T>,
    /// `tokens x key_value_heads x key_size`.
    pub keys: Vec<T>,
    /// `tokens x key_value_heads x value_size`.
    pub values: Vec<T>,
    /// `heads`, if there are sink logits.
    pub sink_logits: Option<Vec<T>>,
    /// `(key_value_heads x key_size, key_value_heads x value_size)`, if there is a sink token.
    pub sink_token: Option<(Vec<T>, Vec<T>)>,
}

/// What the two passes share.
struct Backward<'a, T: Clone> {
    prepared: Prepared<'a, T>,
    log_normalizers: &'a [T],
    /// `dy`: `tokens x heads x value_size`.
    gradient: Vec<T>,
    /// `D`: `tokens x heads`.
    inner: Vec<T>,
}

/// One head's part of `dq` for one block of queries, and its share in the sinks' gradients.
struct QueryPart<T> {
    queries: Vec<T>,
    sink_logit: T,
    sink_key: Vec<T>,
    sink_value: Vec<T>,
}

impl SelfAttention {
    /// The gradients of a loss, given `attended = self.forward(shape, inputs)` and the loss's gradient at its
    /// outputs (`tokens x heads x value_size`).
    ///
    /// # Errors
    /// As [`SelfAttention::forward`], also for the gradient, and [`Error::Size`] for an `attended` of another shape.
    pub fn backward<T: Real>(
        &self,
        shape: &Shape,
        inputs: &Inputs<'_, T>,
        attended: &Attended<T>,
        gradient: &[T],
    ) -> Result<Gradients<T>, Error> {
        let prepared = Prepared::new(self, shape, inputs, &Unwatched)?;
        let Shape { tokens, heads, key_value_heads, key_size, value_size } = *shape;
        let sizes = [
            ("the gradient", gradient.len(), value_size),
            ("attended outputs", attended.outputs.len(), value_size),
            ("attended normalizers", attended.log_normalizers.len(), 1),
            ("attended removed", attended.removed.as_ref().map_or(tokens * heads, Vec::len), 1),
        ];
        for (what, found, size) in sizes {
            let expected = tokens * heads * size;
            if found != expected {
                let shape = format!("{tokens} tokens x {heads} heads x {size} numbers");
                return Err(Error::Size { what, found, expected, shape });
            }
        }
        if self.exclusive != attended.removed.is_some() {
            return Err(Error::invalid("attended", "is not of the same attention: exclusive and not exclusive"));
        }
        finite("the gradient", gradient, heads, value_size, false)?;
        let mut gradient = gradient.to_vec();
        let mut values = vec![T::zero(); tokens * key_value_heads * value_size];
        if let Some(removed) = &attended.removed {
            through_projection(shape, inputs.values, attended, removed, &mut gradient, &mut values);
        }
        // D = dy . y = dy . z: dy is orthogonal to what was removed.
        let inner = gradient
            .par_chunks(value_size)
            .zip(attended.outputs.par_chunks(value_size))
            .map(|(dy, y)| T::dot(dy, y))
            .collect();
        let backward = Backward { prepared, log_normalizers: &attended.log_normalizers, gradient, inner };

        let mut queries = vec![T::zero(); tokens * heads * key_size];
        let mut parts: Vec<Vec<QueryPart<T>>> = query_blocks(tokens)
            .zip(queries.par_chunks_mut(QUERIES * heads * key_size))
            .map(|(rows, queries)| {
                let mut parts: Vec<QueryPart<T>> =
                    (0..heads).into_par_iter().map(|head| backward.query_part(head, &rows)).collect();
                for (head, part) in parts.iter_mut().enumerate() {
                    for (i, from) in part.queries.chunks(key_size).enumerate() {
                        let at = (i * heads + head) * key_size;
                        queries[at..at + key_size].copy_from_slice(from);
                    }
                    part.queries = Vec::new();
                }
                parts
            })
            .collect();
        let mut keys = vec![T::zero(); tokens * key_value_heads * key_size];
        keys.par_chunks_mut(KEYS * key_value_heads * key_size)
            .zip(values.par_chunks_mut(KEYS * key_value_heads * value_size))
            .enumerate()
            .for_each(|(number, (keys, values))| {
                let columns = number * KEYS..((number + 1) * KEYS).min(tokens);
                let parts: Vec<(Vec<T>, Vec<T>)> =
                    (0..key_value_heads).into_par_iter().map(|owner| backward.key_part(owner, &columns)).collect();
                for (owner, (key_part, value_part)) in parts.iter().enumerate() {
                    add_rows(keys, key_part, key_value_heads, owner, key_size);
                    add_rows(values, value_part, key_value_heads, owner, value_size);
                }
            });
        if let Some(rotary) = &self.rotary {
            let turns = rotary.turns(tokens, key_size)?;
            turns.undo(&mut queries, heads);
            turns.undo(&mut keys, key_value_heads);
        }
        let sink_logits = inputs.sinks.logits.map(|_| {
            (0..heads).map(|head| parts.iter().fold(T::zero(), |sum, block| sum + block[head].sink_logit)).collect()
        });
        let sink_token = inputs.sinks.token.map(|_| {
            let mut sink_keys = vec![T::zero(); key_value_heads * key_size];
            let mut sink_values = vec![T::zero(); key_value_heads * value_size];
            for (head, part) in parts.iter_mut().flat_map(|block| block.iter_mut().enumerate()) {
                let owner = shape.key_value_head(head);
                add(&mut sink_keys[owner * key_size..(owner + 1) * key_size], &part.sink_key);
                add(&mut sink_values[owner * value_size..(owner + 1) * value_size], &part.sink_value);
            }
            (sink_keys, sink_values)
        });
        Ok(Gradients { queries, keys, values, sink_logits, sink_token })
    }
}

fn add<T: Real>(to: &mut [T], from: &[T]) {
    to.iter_mut().zip(from).for_each(|(to, &from)| *to = *to + from);
}

/// Adds the rows of one head to a tensor `tokens x heads x size`.
fn add_rows<T: Real>(to: &mut [T], from: &[T], heads: usize, head: usize, size: usize) {
    for (i, from) in from.chunks(size).enumerate() {
        let at = (i * heads + head) * size;
        add(&mut to[at..at + size], from);
    }
}

/// Turns `dz` into `dy`, and adds what goes to the values.
fn through_projection<T: Real>(
    shape: &Shape,
    values: &[T],
    attended: &Attended<T>,
    removed: &[T],
    gradient: &mut [T],
    to_values: &mut [T],
) {
    let Shape { heads, key_value_heads, value_size, .. } = *shape;
    let per_token = gradient
        .par_chunks_mut(heads * value_size)
        .zip(to_values.par_chunks_mut(key_value_heads * value_size))
        .enumerate();
    per_token.for_each_init(
        || vec![T::zero(); value_size],
        |direction, (position, (gradient, to_values))| {
            for (owner, to_value) in to_values.chunks_mut(value_size).enumerate() {
                let value = row(values, key_value_heads, value_size, owner, position);
                let Some(norm) = unit(value, direction) else { continue };
                for head in owner * shape.group()..(owner + 1) * shape.group() {
                    let output = row(&attended.outputs, heads, value_size, head, position);
                    let gradient = &mut gradient[head * value_size..(head + 1) * value_size];
                    let along = removed[position * heads + head];
                    exclude_gradient(gradient, direction, norm, output, along, to_value);
                }
            }
        },
    );
}

impl<T: Real> Backward<'_, T> {
    fn gradient_block(&self, head: usize, rows: &Range<usize>) -> Matrix<'_, T> {
        block(&self.gradient, self.prepared.shape.heads, self.prepared.shape.value_size, head, rows)
    }

    /// `a_ij` into `weights` and `ds_ij` into `slopes`.
    fn slopes(&self, head: usize, rows: &Range<usize>, columns: &Range<usize>, weights: &mut [T], slopes: &mut [T]) {
        let heads = self.prepared.shape.heads;
        self.prepared.weights(head, rows, columns, self.log_normalizers, weights);
        let values = self.prepared.value_block(self.prepared.shape.key_value_head(head), columns);
        multiply(slopes, T::one(), self.gradient_block(head, rows), values.transposed(), false, 1);
        let width = columns.len();
        for ((i, slopes), weights) in rows.clone().zip(slopes.chunks_mut(width)).zip(weights.chunks(width)) {
            let inner = self.inner[i * heads + head];
            slopes.iter_mut().zip(weights).for_each(|(slope, &a)| *slope = a * (*slope - inner));
        }
    }

    fn query_part(&self, head: usize, rows: &Range<usize>) -> QueryPart<T> {
        let prepared = &self.prepared;
        let Shape { heads, key_size, value_size, .. } = prepared.shape;
        let owner = prepared.shape.key_value_head(head);
        let count = rows.len();
        let mut queries = vec![T::zero(); count * key_size];
        let most = count * KEYS.min(prepared.visible(rows.end));
        let (mut weights, mut slopes) = (vec![T::zero(); most], vec![T::zero(); most]);
        for columns in prepared.key_blocks(rows.end) {
            let size = count * columns.len();
            let (weights, slopes) = (&mut weights[..size], &mut slopes[..size]);
            self.slopes(head, rows, &columns, weights, slopes);
            let slopes = Matrix::new(slopes, count, columns.len(), columns.len());
            multiply(&mut queries, prepared.scale, slopes, prepared.key_block(owner, &columns), true, 1);
        }
        let mut part = QueryPart { queries, sink_logit: T::zero(), sink_key: Vec::new(), sink_value: Vec::new() };
        if let Some(logits) = prepared.sinks.logits {
            for i in rows.clone() {
                let at = i * heads + head;
                part.sink_logit = part.sink_logit - (logits[head] - self.log_normalizers[at]).exp() * self.inner[at];
            }
        }
        if let Some(token) = &prepared.sinks.token {
            let key = &token.keys[owner * key_size..(owner + 1) * key_size];
            let value = &token.values[owner * value_size..(owner + 1) * value_size];
            part.sink_key = vec![T::zero(); key_size];
            part.sink_value = vec![T::zero(); value_size];
            for (n, i) in rows.clone().enumerate() {
                let at = i * heads + head;
                let weight = (prepared.sink_score(head, i, token) - self.log_normalizers[at]).exp();
                let dy = row(&self.gradient, heads, value_size, head, i);
                let slope = prepared.scale * weight * (T::dot(dy, value) - self.inner[at]);
                let query = row(&prepared.queries, heads, key_size, head, i);
                for k in 0..key_size {
                    part.queries[n * key_size + k] = part.queries[n * key_size + k] + slope * key[k];
                    part.sink_key[k] = part.sink_key[k] + slope * query[k];
                }
                part.sink_value.iter_mut().zip(dy).for_each(|(to, &dy)| *to = *to + weight * dy);
            }
        }
        part
    }

    /// `dk` and `dv` of one key-value head for one block of keys.
    fn key_part(&self, owner: usize, columns: &Range<usize>) -> (Vec<T>, Vec<T>) {
        let prepared = &self.prepared;
        let Shape { tokens, key_size, value_size, .. } = prepared.shape;
        let width = columns.len();
        let mut keys = vec![T::zero(); width * key_size];
        let mut values = vec![T::zero(); width * value_size];
        let (mut weights, mut slopes) = (vec![T::zero(); QUERIES * width], vec![T::zero(); QUERIES * width]);
        let first = match prepared.mask {
            Mask::Causal => columns.start / QUERIES,
            Mask::Bidirectional => 0,
        };
        for head in owner * prepared.shape.group()..(owner + 1) * prepared.shape.group() {
            for start in (first * QUERIES..tokens).step_by(QUERIES) {
                let rows = start..(start + QUERIES).min(tokens);
                let size = rows.len() * width;
                let (weights, slopes) = (&mut weights[..size], &mut slopes[..size]);
                self.slopes(head, &rows, columns, weights, slopes);
                let transposed = |data| Matrix::new(data, rows.len(), width, width).transposed();
                multiply(&mut values, T::one(), transposed(weights), self.gradient_block(head, &rows), true, 1);
                multiply(&mut keys, prepared.scale, transposed(slopes), prepared.query_block(head, &rows), true, 1);
            }
        }
        (keys, values)
    }
}
