//! What is measured of attention (model.md section 11). For query head `h`, position `i`, weights `a_ij`
//! and the values `v_j` of its key-value head:
//!
//! ```text
//! cos(y_i, v_i),   a_ii,   sum_j a_ij^2,   a_i0,
//! b_ij = a_ij |v_j| / sum_k a_ik |v_k|:   b_ii,   sum_j b_ij^2,   sum_j b_ij cos(v_i, v_j),
//! cos(y_i, v_j) on average over j != i,
//! cos(y_i - a_ii v_i, v_i),   cos(y_i - a_i0 v_0, v_i),   cos(sum_{j seen} v_j, v_i),
//! rho = (|sum_j v_j / |v_j||^2 - T) / (T (T - 1)):   the mean cosine of two different values.
//! ```
//!
//! XSA removes the fraction `cos(y_i, v_i)^2` of `|y_i|^2`. A cosine with a zero vector counts as 0. Averages over
//! a head leave out position 0, which under a causal mask sees only itself: `y_0 = v_0`, cosine 1.
//! Outputs without a term are sums over the other terms, so that they keep their digits where it is nearly all.

use std::ops::Range;

use headflow_model::{Unwatched, Watch};
use rayon::prelude::*;

use crate::attention::{Inputs, KEYS, Mask, Prepared, SelfAttention, Shape, SinkToken, query_blocks, row};
use crate::error::Error;
use crate::exclusive::unit;
use crate::matrix::{Matrix, multiply};
use crate::real::Real;

/// The measurements of one attention layer on one sequence. Vectors of heads and positions hold head `h`,
/// position `i` at `h tokens + i`; those of key-value heads likewise.
#[derive(Debug, Clone, PartialEq)]
pub struct Measurement {
    /// The sizes.
    pub shape: Shape,
    /// `cos(y_i, v_i)`: the attention similarity bias.
    pub cosine: Vec<f64>,
    /// `a_ii`.
    pub self_attention: Vec<f64>,
    /// `sum_j a_ij^2`.
    pub squared_attention: Vec<f64>,
    /// `a_i0`: what the first token gets.
    pub first_attention: Vec<f64>,
    /// What learned sinks get: `1 - sum_j a_ij`.
    pub sink_attention: Vec<f64>,
    /// `b_ii`: as `a_ii`, with weights times the norms of values.
    pub weighted_self: Vec<f64>,
    /// `sum_j b_ij^2`.
    pub weighted_square: Vec<f64>,
    /// `sum_j b_ij cos(v_i, v_j)`: similarity of the own value with what is attended to.
    pub attended_similarity: Vec<f64>,
    /// `cos(y_i, v_j)`, the mean over all `j != i` of the sequence (exact, not sampled): the control.
    pub other: Vec<f64>,
    /// `cos(y_i - a_ii v_i, v_i)`: the self term removed.
    pub without_self: Vec<f64>,
    /// `cos(y_i - a_i0 v_0, v_i)`: the first token removed.
    pub without_first: Vec<f64>,
    /// `cos(sum_j v_j, v_i)` over the tokens that `i` sees: uniform attention; of key-value heads.
    pub uniform: Vec<f64>,
    /// `|v_i|`; of key-value heads.
    pub value_norm: Vec<f64>,
    /// `rho` of each key-value head, over all positions.
    pub rho: Vec<f64>,
    /// `rho` of each key-value head without position 0.
    pub rho_without_first: Vec<f64>,
}

/// The unit values of the key-value heads, in double precision, and what is summed of them.
struct Values {
    /// `v_j / |v_j|`, zero where `v_j` is: `key_value_heads x tokens x value_size`.
    units: Vec<f64>,
    /// `|v_j|`: `key_value_heads x tokens`.
    norms: Vec<f64>,
    /// `sum_j v_j / |v_j|`: `key_value_heads x value_size`.
    sums: Vec<f64>,
    /// `cos(sum_{j seen} v_j, v_i)`: `key_value_heads x tokens`.
    uniform: Vec<f64>,
}

/// The sums over keys for one query.
#[derive(Debug, Clone, Copy, Default)]
struct Row {
    total: f64,
    square: f64,
    weighted: f64,
    weighted_square: f64,
    own: f64,
    first: f64,
}

/// One head's part of one block of queries, a number for each of [`COLUMNS`].
type HeadPart = Vec<[f64; COLUMNS]>;
const COLUMNS: usize = 11;

impl SelfAttention {
    /// Measures one sequence; whether [`SelfAttention::exclusive`] is set makes no difference: `y` is the
    /// output before the projection.
    ///
    /// # Errors
    /// As [`SelfAttention::forward`].
    pub fn measure<T: Real>(&self, shape: &Shape, inputs: &Inputs<'_, T>) -> Result<Measurement, Error> {
        self.measure_watched(shape, inputs, &Unwatched)
    }

    /// [`SelfAttention::measure`], stopping between two blocks once `watch` interrupts.
    ///
    /// # Errors
    /// As [`SelfAttention::forward`], and [`Error::Interrupted`].
    pub fn measure_watched<'a, T: Real>(
        &self,
        shape: &Shape,
        inputs: &Inputs<'a, T>,
        watch: &'a dyn Watch,
    ) -> Result<Measurement, Error> {
        // z and c = y . u together keep the digits of cos(y, v).
        let exclusive = Self { exclusive: true, ..self.clone() };
        let attended = exclusive.forward_watched(shape, inputs, watch)?;
        let along = attended.removed.as_deref().unwrap_or_default();
        let prepared = Prepared::new(self, shape, inputs, watch)?;
        let values = Values::new(&prepared)?;
        let Shape { tokens, heads, key_value_heads, .. } = *shape;
        let blocks: Vec<Vec<HeadPart>> = query_blocks(tokens)
            .map(|rows| {
                let part = |head| {
                    let (sums, others) = rows_of(&prepared, &values, &attended.log_normalizers, head, &rows)?;
                    let measured = rows.clone().zip(sums).zip(others.chunks(shape.value_size));
                    let measured = measured.map(|((i, sums), others)| {
                        let at = i * heads + head;
                        let output = row(&attended.outputs, heads, shape.value_size, head, i);
                        let sink = prepared.sinks.token.as_ref().map(|token| {
                            let score = prepared.sink_score(head, i, token) - attended.log_normalizers[at];
                            (score.exp().wide(), token)
                        });
                        values.measure(&prepared, (head, i), &sums, others, (output, along[at].wide()), sink)
                    });
                    Ok(measured.collect())
                };
                (0..heads).into_par_iter().map(part).collect()
            })
            .collect::<Result<_, Error>>()?;
        let column = |k: usize| -> Vec<f64> {
            (0..heads).flat_map(|head| blocks.iter().flat_map(move |b| b[head].iter().map(move |p| p[k]))).collect()
        };
        let of_heads = |skip: usize| (0..key_value_heads).map(|owner| values.rho(shape, owner, skip)).collect();
        Ok(Measurement {
            shape: *shape,
            cosine: column(0),
            self_attention: column(1),
            squared_attention: column(2),
            first_attention: column(3),
            sink_attention: column(4),
            weighted_self: column(5),
            weighted_square: column(6),
            attended_similarity: column(7),
            other: column(8),
            without_self: column(9),
            without_first: column(10),
            rho: of_heads(0),
            rho_without_first: of_heads(1),
            uniform: values.uniform,
            value_norm: values.norms,
        })
    }
}

impl Measurement {
    /// The numbers of one head, one a position.
    ///
    /// # Panics
    /// When `quantity` has fewer heads.
    pub fn of_head<'a>(&self, quantity: &'a [f64], head: usize) -> &'a [f64] {
        &quantity[head * self.shape.tokens..(head + 1) * self.shape.tokens]
    }

    /// The mean over the positions of a head from 1 on; NaN if there is only one token.
    pub fn mean(&self, quantity: &[f64], head: usize) -> f64 {
        mean(self.of_head(quantity, head)[1..].iter().copied())
    }

    /// The fraction of `|y_i|^2` that XSA removes: the mean of `cos(y_i, v_i)^2` from position 1 on.
    pub fn removed(&self, head: usize) -> f64 {
        mean(self.of_head(&self.cosine, head)[1..].iter().map(|c| c * c))
    }
}

fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = values.len() as f64;
    values.sum::<f64>() / count
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    f64::dot(a, b)
}

/// `a . b / |a|`, the cosine if `b` is a unit vector; 0 if `a` is zero.
fn cosine(a: &[f64], b: &[f64]) -> f64 {
    let norm = dot(a, a).sqrt();
    if norm == 0.0 { 0.0 } else { dot(a, b) / norm }
}

impl Values {
    fn new<T: Real>(prepared: &Prepared<'_, T>) -> Result<Self, Error> {
        let Shape { tokens, key_value_heads, value_size, .. } = prepared.shape;
        let mut units = vec![0.0; key_value_heads * tokens * value_size];
        let mut norms = vec![0.0; key_value_heads * tokens];
        let mut sums = vec![0.0; key_value_heads * value_size];
        let mut uniform = vec![0.0; key_value_heads * tokens];
        for owner in 0..key_value_heads {
            prepared.look()?;
            let units = &mut units[owner * tokens * value_size..(owner + 1) * tokens * value_size];
            let norms = &mut norms[owner * tokens..(owner + 1) * tokens];
            let sum = &mut sums[owner * value_size..(owner + 1) * value_size];
            let wide = |position| prepared.value(owner, position).iter().map(|v| v.wide());
            for (position, direction) in units.chunks_mut(value_size).enumerate() {
                norms[position] = unit(&wide(position).collect::<Vec<_>>(), direction).unwrap_or(0.0);
                sum.iter_mut().zip(&*direction).for_each(|(sum, u)| *sum += u);
            }
            let mut seen = vec![0.0; value_size];
            let add = |seen: &mut Vec<f64>, position| seen.iter_mut().zip(wide(position)).for_each(|(s, v)| *s += v);
            if prepared.mask == Mask::Bidirectional {
                (0..tokens).for_each(|position| add(&mut seen, position));
            }
            for (position, direction) in units.chunks(value_size).enumerate() {
                if prepared.mask == Mask::Causal {
                    add(&mut seen, position);
                }
                uniform[owner * tokens + position] = cosine(&seen, direction);
            }
        }
        Ok(Self { units, norms, sums, uniform })
    }

    fn unit(&self, shape: &Shape, owner: usize, position: usize) -> &[f64] {
        row(&self.units, shape.tokens, shape.value_size, position, owner)
    }

    /// The mean cosine of two different values, without the first `skip` positions; NaN if fewer than two are left.
    fn rho(&self, shape: &Shape, owner: usize, skip: usize) -> f64 {
        let mut sum = self.sums[owner * shape.value_size..(owner + 1) * shape.value_size].to_vec();
        for position in 0..skip {
            sum.iter_mut().zip(self.unit(shape, owner, position)).for_each(|(s, u)| *s -= u);
        }
        let count = shape.tokens as f64 - skip as f64;
        if count < 2.0 {
            return f64::NAN;
        }
        // Zero values have no direction, and a cosine of 0.
        let norms = &self.norms[owner * shape.tokens..(owner + 1) * shape.tokens];
        let directions = norms[skip..].iter().filter(|norm| **norm > 0.0).count() as f64;
        (dot(&sum, &sum) - directions) / (count * (count - 1.0))
    }

    /// The columns of a query, in the order of [`Measurement`]: from its sums, the part of `y` that comes neither
    /// from itself nor from the first token nor from a sink, `z` and `c`, and the weight of the sink token.
    fn measure<T: Real>(
        &self,
        prepared: &Prepared<'_, T>,
        (head, position): (usize, usize),
        sums: &Row,
        others: &[T],
        (output, along): (&[T], f64),
        sink: Option<(f64, &SinkToken<'_, T>)>,
    ) -> [f64; COLUMNS] {
        let shape = &prepared.shape;
        let owner = shape.key_value_head(head);
        let direction = self.unit(shape, owner, position);
        let norm = self.norms[owner * shape.tokens + position];
        let wide = |vector: &[T]| vector.iter().map(|x| x.wide()).collect::<Vec<f64>>();
        let plus = |vector: &[f64], weight: f64, term: &[T]| -> Vec<f64> {
            vector.iter().zip(term).map(|(x, t)| x + weight * t.wide()).collect()
        };
        let own = prepared.value(owner, position);
        // The first token's own term is one and the same.
        let first = if position == 0 { 0.0 } else { sums.first };
        let others = wide(others);
        let of_tokens = plus(&plus(&others, sums.own, own), first, prepared.value(owner, 0));
        let others = match sink {
            None => others,
            Some((weight, token)) => {
                plus(&others, weight, &token.values[owner * shape.value_size..(owner + 1) * shape.value_size])
            }
        };
        let without_self = plus(&others, first, prepared.value(owner, 0));
        let without_first = plus(&others, if position == 0 { 0.0 } else { sums.own }, own);
        let rest = wide(output);
        let length = along.hypot(dot(&rest, &rest).sqrt());
        let own_cosine = if length == 0.0 { 0.0 } else { along / length };
        let y: Vec<f64> = rest.iter().zip(direction).map(|(z, u)| z + along * u).collect();
        let sum = &self.sums[owner * shape.value_size..(owner + 1) * shape.value_size];
        let count = if shape.tokens > 1 { shape.tokens as f64 - 1.0 } else { f64::NAN };
        let weighted = |value: f64| if sums.weighted == 0.0 { 0.0 } else { value / sums.weighted };
        [
            own_cosine,
            sums.own,
            sums.square,
            sums.first,
            1.0 - sums.total,
            weighted(sums.own * norm),
            weighted(weighted(sums.weighted_square)),
            weighted(dot(&of_tokens, direction)),
            // The mean of cos(y, v_j) over all j is y . sum / |y|, over T.
            (cosine(&y, sum) - own_cosine) / count,
            cosine(&without_self, direction),
            cosine(&without_first, direction),
        ]
    }
}

/// The sums over keys for the queries `rows` of one head, and `sum_j a_ij v_j` without `j = i` and `j = 0`.
fn rows_of<T: Real>(
    prepared: &Prepared<'_, T>,
    values: &Values,
    log_normalizers: &[T],
    head: usize,
    rows: &Range<usize>,
) -> Result<(Vec<Row>, Vec<T>), Error> {
    let Shape { tokens, value_size, .. } = prepared.shape;
    let owner = prepared.shape.key_value_head(head);
    let norms = &values.norms[owner * tokens..(owner + 1) * tokens];
    let mut sums = vec![Row::default(); rows.len()];
    let mut others = vec![T::zero(); rows.len() * value_size];
    let mut buffer = vec![T::zero(); rows.len() * KEYS.min(prepared.visible(rows.end))];
    for columns in prepared.key_blocks(rows.end) {
        prepared.look()?;
        let width = columns.len();
        let weights = &mut buffer[..rows.len() * width];
        prepared.weights(head, rows, &columns, log_normalizers, weights);
        for ((i, weights), sums) in rows.clone().zip(weights.chunks_mut(width)).zip(&mut sums) {
            for (weight, norm) in weights.iter().zip(&norms[columns.clone()]) {
                let weight = weight.wide();
                let weighted = weight * norm;
                sums.total += weight;
                sums.square += weight * weight;
                sums.weighted += weighted;
                sums.weighted_square += weighted * weighted;
            }
            if columns.start == 0 {
                sums.first = weights[0].wide();
            }
            if columns.contains(&i) {
                sums.own = std::mem::take(&mut weights[i - columns.start]).wide();
            }
            if columns.start == 0 {
                weights[0] = T::zero();
            }
        }
        let weights = Matrix::new(weights, rows.len(), width, width);
        multiply(&mut others, T::one(), weights, prepared.value_block(owner, &columns), true, 1);
    }
    Ok((sums, others))
}
