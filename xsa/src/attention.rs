//! Multi-head self-attention and its exclusive form (model.md section 11; arXiv 2603.09078):
//!
//! ```text
//! s_ij = scale q_i . k_j,   a_ij = exp(s_ij) / (sum_j exp(s_ij) + sinks),   y_i = sum_j a_ij v_j,
//! z_i = y_i - (y_i . v_i / |v_i|^2) v_i        (exclusive; z_i = y_i where v_i = 0)
//! ```
//!
//! `j` runs over the tokens that `i` sees. Query head `h` uses key-value head `h / (heads / key_value_heads)`.
//! Keys are streamed: scores exist for one block of queries and keys at a time, so that memory is
//! `O(T d)`. The normaliser is kept as `ln` of its value, from which [`crate::gradient`] and
//! [`crate::measurement`] recompute any block of `a`.

use std::borrow::Cow;
use std::ops::Range;

use headflow_model::{Unwatched, Watch};
use rayon::prelude::*;

use crate::error::Error;
use crate::exclusive::exclude_scaled;
use crate::matrix::{Matrix, multiply};
use crate::real::Real;
use crate::rotary::Rotary;

/// Queries in a block.
pub(crate) const QUERIES: usize = 64;
/// Keys in a block.
pub(crate) const KEYS: usize = 256;

/// Which tokens a token sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mask {
    /// Itself and those before it.
    #[default]
    Causal,
    /// All.
    Bidirectional,
}

/// Self-attention with its options; the default is causal, scaled by `1 / sqrt(key_size)`, without
/// rotary embeddings, and not exclusive.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SelfAttention {
    /// Which tokens a token sees.
    pub mask: Mask,
    /// Remove from each output its projection on the token's own value: XSA.
    pub exclusive: bool,
    /// The factor of `q . k`; `1 / sqrt(key_size)` if none.
    pub scale: Option<f64>,
    /// Rotary position embeddings of queries and keys.
    pub rotary: Option<Rotary>,
}

/// The sizes of the tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Tokens of the sequence, `T`.
    pub tokens: usize,
    /// Query heads, `H`.
    pub heads: usize,
    /// Key-value heads, `G`, a divisor of `heads`.
    pub key_value_heads: usize,
    /// Numbers in a query or a key of a head.
    pub key_size: usize,
    /// Numbers in a value of a head.
    pub value_size: usize,
}

/// Queries, keys and values of one sequence, token by token: entry `(t, h, k)` of a tensor
/// `T x H x d` stands at `(t H + h) d + k`.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a, T> {
    /// `tokens x heads x key_size`.
    pub queries: &'a [T],
    /// `tokens x key_value_heads x key_size`.
    pub keys: &'a [T],
    /// `tokens x key_value_heads x value_size`.
    pub values: &'a [T],
    /// Where attention can go beside the tokens.
    pub sinks: Sinks<'a, T>,
}

/// Learned attention sinks; none by default. Both kinds can be used together.
#[derive(Debug, Clone, Copy)]
pub struct Sinks<'a, T> {
    /// A logit for each query head, `heads`: a score without a value, the same for every query.
    pub logits: Option<&'a [T]>,
    /// A token that every query sees, without a position (no rotary embedding).
    pub token: Option<SinkToken<'a, T>>,
}

impl<T> Default for Sinks<'_, T> {
    fn default() -> Self {
        Self { logits: None, token: None }
    }
}

/// A learned token before all others.
#[derive(Debug, Clone, Copy)]
pub struct SinkToken<'a, T> {
    /// `key_value_heads x key_size`.
    pub keys: &'a [T],
    /// `key_value_heads x value_size`.
    pub values: &'a [T],
}

/// What attention gives.
#[derive(Debug, Clone, PartialEq)]
pub struct Attended<T> {
    /// `y`, or `z` if exclusive: `tokens x heads x value_size`.
    pub outputs: Vec<T>,
    /// `ln` of the sum of exponentials, sinks included: `tokens x heads`.
    pub log_normalizers: Vec<T>,
    /// If exclusive, the component `y_i . v_i / |v_i|` that was removed (0 where `v_i = 0`):
    /// `tokens x heads`. So `y = z + removed v / |v|`, and `cos(y, v) = removed / |y|`.
    pub removed: Option<Vec<T>>,
}

impl Shape {
    /// Query heads that share a key-value head.
    pub fn group(&self) -> usize {
        self.heads / self.key_value_heads
    }

    /// The key-value head of a query head.
    pub fn key_value_head(&self, head: usize) -> usize {
        head / self.group()
    }

    fn check(&self) -> Result<(), Error> {
        let sizes = [
            ("tokens", self.tokens),
            ("heads", self.heads),
            ("key_value_heads", self.key_value_heads),
            ("key_size", self.key_size),
            ("value_size", self.value_size),
        ];
        if let Some((field, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            return Err(Error::invalid(field, "must be at least 1"));
        }
        if !self.heads.is_multiple_of(self.key_value_heads) {
            return Err(Error::invalid(
                "key_value_heads",
                format!("{} does not divide the {} query heads", self.key_value_heads, self.heads),
            ));
        }
        Ok(())
    }
}

fn sized<T>(what: &'static str, data: &[T], sizes: &[(usize, &str)]) -> Result<(), Error> {
    let expected = sizes.iter().map(|(size, _)| size).product();
    if data.len() == expected {
        return Ok(());
    }
    let shape = sizes.iter().map(|(size, name)| format!("{size} {name}")).collect::<Vec<_>>().join(" x ");
    Err(Error::Size { what, found: data.len(), expected, shape })
}

/// Refuses what is not finite in `data`, a tensor of `heads` heads of `size` numbers a token.
pub(crate) fn finite<T: Real>(
    what: &'static str,
    data: &[T],
    heads: usize,
    size: usize,
    sink: bool,
) -> Result<(), Error> {
    match data.iter().position(|x| !x.is_finite()) {
        None => Ok(()),
        Some(at) => {
            let (position, head) = (at / (heads * size), at / size % heads);
            Err(Error::NotFinite { what, layer: None, head, position: (!sink).then_some(position) })
        }
    }
}

/// Checked inputs, with rotary embeddings applied.
pub(crate) struct Prepared<'a, T: Clone> {
    pub shape: Shape,
    pub scale: T,
    pub mask: Mask,
    pub queries: Cow<'a, [T]>,
    pub keys: Cow<'a, [T]>,
    pub values: &'a [T],
    pub sinks: Sinks<'a, T>,
    watch: &'a dyn Watch,
}

impl<'a, T: Real> Prepared<'a, T> {
    pub fn new(
        attention: &SelfAttention,
        shape: &Shape,
        inputs: &Inputs<'a, T>,
        watch: &'a dyn Watch,
    ) -> Result<Self, Error> {
        shape.check()?;
        let Shape { tokens, heads, key_value_heads, key_size, value_size } = *shape;
        sized("queries", inputs.queries, &[(tokens, "tokens"), (heads, "heads"), (key_size, "numbers")])?;
        sized("keys", inputs.keys, &[(tokens, "tokens"), (key_value_heads, "heads"), (key_size, "numbers")])?;
        sized("values", inputs.values, &[(tokens, "tokens"), (key_value_heads, "heads"), (value_size, "numbers")])?;
        finite("the query", inputs.queries, heads, key_size, false)?;
        finite("the key", inputs.keys, key_value_heads, key_size, false)?;
        finite("the value", inputs.values, key_value_heads, value_size, false)?;
        if let Some(logits) = inputs.sinks.logits {
            sized("sink logits", logits, &[(heads, "heads")])?;
            finite("the sink logit", logits, heads, 1, true)?;
        }
        if let Some(token) = inputs.sinks.token {
            sized("keys of the sink", token.keys, &[(key_value_heads, "heads"), (key_size, "numbers")])?;
            sized("values of the sink", token.values, &[(key_value_heads, "heads"), (value_size, "numbers")])?;
            finite("the key", token.keys, key_value_heads, key_size, true)?;
            finite("the value", token.values, key_value_heads, value_size, true)?;
        }
        let scale = attention.scale.unwrap_or(1.0 / (key_size as f64).sqrt());
        if !scale.is_finite() {
            return Err(Error::invalid("scale", format!("{scale} is not a finite number")));
        }
        let (mut queries, mut keys) = (Cow::Borrowed(inputs.queries), Cow::Borrowed(inputs.keys));
        if let Some(rotary) = &attention.rotary {
            let turns = rotary.turns(tokens, key_size)?;
            turns.apply(queries.to_mut(), heads);
            turns.apply(keys.to_mut(), key_value_heads);
        }
        let (mask, values, sinks) = (attention.mask, inputs.values, inputs.sinks);
        Ok(Self { shape: *shape, scale: T::of(scale), mask, queries, keys, values, sinks, watch })
    }

    /// # Errors
    /// [`Error::Interrupted`] once the watch asks to stop: to be called between two blocks of keys.
    pub fn look(&self) -> Result<(), Error> {
        if self.watch.interrupted() { Err(Error::Interrupted) } else { Ok(()) }
    }

    /// The first token that none of the queries before `end` sees.
    pub fn visible(&self, end: usize) -> usize {
        match self.mask {
            Mask::Causal => end,
            Mask::Bidirectional => self.shape.tokens,
        }
    }

    /// Blocks of keys that the queries before `end` see.
    pub fn key_blocks(&self, end: usize) -> impl Iterator<Item = Range<usize>> + use<T> {
        let visible = self.visible(end);
        (0..visible).step_by(KEYS).map(move |start| start..(start + KEYS).min(visible))
    }

    /// The queries of one head, one row a token.
    pub fn query_block(&self, head: usize, rows: &Range<usize>) -> Matrix<'_, T> {
        block(&self.queries, self.shape.heads, self.shape.key_size, head, rows)
    }

    /// The keys of one key-value head, one row a token.
    pub fn key_block(&self, head: usize, rows: &Range<usize>) -> Matrix<'_, T> {
        block(&self.keys, self.shape.key_value_heads, self.shape.key_size, head, rows)
    }

    /// The values of one key-value head, one row a token.
    pub fn value_block(&self, head: usize, rows: &Range<usize>) -> Matrix<'_, T> {
        block(self.values, self.shape.key_value_heads, self.shape.value_size, head, rows)
    }

    /// The value of a token in a key-value head.
    pub fn value(&self, head: usize, position: usize) -> &[T] {
        row(self.values, self.shape.key_value_heads, self.shape.value_size, head, position)
    }

    /// The scores of the queries `rows` and the keys `columns`, row by row; minus infinity where a
    /// query does not see the key.
    pub fn scores(&self, head: usize, rows: &Range<usize>, columns: &Range<usize>, scores: &mut [T]) {
        let keys = self.key_block(self.shape.key_value_head(head), columns);
        multiply(scores, self.scale, self.query_block(head, rows), keys.transposed(), false, 1);
        if self.mask == Mask::Causal && columns.end > rows.start + 1 {
            for (i, row) in rows.clone().zip(scores.chunks_mut(columns.len())) {
                let seen = (i + 1).saturating_sub(columns.start).min(columns.len());
                row[seen..].fill(T::neg_infinity());
            }
        }
    }

    /// The weights `a_ij` of a block, from the normalisers of all queries (`tokens x heads`).
    pub fn weights(
        &self,
        head: usize,
        rows: &Range<usize>,
        columns: &Range<usize>,
        log_normalizers: &[T],
        weights: &mut [T],
    ) {
        self.scores(head, rows, columns, weights);
        for (i, row) in rows.clone().zip(weights.chunks_mut(columns.len())) {
            T::exponentials(row, log_normalizers[i * self.shape.heads + head]);
        }
    }

    /// The score of the sink token for one query.
    pub fn sink_score(&self, head: usize, position: usize, token: &SinkToken<'_, T>) -> T {
        let (size, owner) = (self.shape.key_size, self.shape.key_value_head(head));
        let query = row(&self.queries, self.shape.heads, size, head, position);
        self.scale * T::dot(query, &token.keys[owner * size..(owner + 1) * size])
    }
}

/// The row of a token and a head in a tensor `tokens x heads x size`.
pub(crate) fn row<T>(data: &[T], heads: usize, size: usize, head: usize, position: usize) -> &[T] {
    let start = (position * heads + head) * size;
    &data[start..start + size]
}

/// The rows of one head in a tensor `tokens x heads x size`.
pub(crate) fn block<'a, T>(
    data: &'a [T],
    heads: usize,
    size: usize,
    head: usize,
    rows: &Range<usize>,
) -> Matrix<'a, T> {
    Matrix::new(&data[(rows.start * heads + head) * size..], rows.len(), size, heads * size)
}

/// Blocks of queries, in parallel.
pub(crate) fn query_blocks(tokens: usize) -> impl IndexedParallelIterator<Item = Range<usize>> {
    (0..tokens.div_ceil(QUERIES)).into_par_iter().map(move |n| n * QUERIES..((n + 1) * QUERIES).min(tokens))
}

/// One head's part of one block of queries.
struct HeadBlock<T> {
    outputs: Vec<T>,
    log_normalizers: Vec<T>,
    removed: Vec<T>,
}

impl SelfAttention {
    /// The outputs for one sequence.
    ///
    /// The bits do not depend on the number of threads; they do on the processor's vector units.
    ///
    /// # Errors
    /// [`Error::Size`] and [`Error::Invalid`] for tensors that do not fit `shape`, [`Error::NotFinite`]
    /// for inputs that are not finite and scores above the range of `T` (those below it get no weight).
    pub fn forward<T: Real>(&self, shape: &Shape, inputs: &Inputs<'_, T>) -> Result<Attended<T>, Error> {
        self.forward_watched(shape, inputs, &Unwatched)
    }

    /// [`SelfAttention::forward`], stopping between two blocks once `watch` interrupts.
    ///
    /// # Errors
    /// As [`SelfAttention::forward`], and [`Error::Interrupted`].
    pub fn forward_watched<'a, T: Real>(
        &self,
        shape: &Shape,
        inputs: &Inputs<'a, T>,
        watch: &'a dyn Watch,
    ) -> Result<Attended<T>, Error> {
        let prepared = Prepared::new(self, shape, inputs, watch)?;
        let Shape { tokens, heads, value_size, .. } = *shape;
        let mut outputs = vec![T::zero(); tokens * heads * value_size];
        let mut log_normalizers = vec![T::zero(); tokens * heads];
        let removed: Vec<Vec<T>> = query_blocks(tokens)
            .zip(outputs.par_chunks_mut(QUERIES * heads * value_size))
            .zip(log_normalizers.par_chunks_mut(QUERIES * heads))
            .map(|((rows, outputs), log_normalizers)| {
                let blocks: Vec<HeadBlock<T>> = (0..heads)
                    .into_par_iter()
                    .map(|head| self.head_block(&prepared, head, &rows))
                    .collect::<Result<_, _>>()?;
                for (head, block) in blocks.iter().enumerate() {
                    for (i, output) in block.outputs.chunks(value_size).enumerate() {
                        let at = i * heads + head;
                        outputs[at * value_size..(at + 1) * value_size].copy_from_slice(output);
                        log_normalizers[at] = block.log_normalizers[i];
                    }
                }
                let of_block = |i: usize| blocks.iter().filter_map(move |block| block.removed.get(i).copied());
                Ok((0..rows.len()).flat_map(of_block).collect())
            })
            .collect::<Result<_, Error>>()?;
        Ok(Attended { outputs, log_normalizers, removed: self.exclusive.then(|| removed.concat()) })
    }

    fn head_block<T: Real>(
        &self,
        prepared: &Prepared<'_, T>,
        head: usize,
        rows: &Range<usize>,
    ) -> Result<HeadBlock<T>, Error> {
        let Shape { value_size, .. } = prepared.shape;
        let owner = prepared.shape.key_value_head(head);
        let count = rows.len();
        let mut outputs = vec![T::zero(); count * value_size];
        // The running largest score and the sum of exponentials relative to it.
        let mut largest = vec![T::neg_infinity(); count];
        let mut sums = vec![T::zero(); count];
        if let Some(logits) = prepared.sinks.logits {
            largest.fill(logits[head]);
            sums.fill(T::one());
        }
        if let Some(token) = &prepared.sinks.token {
            let value = &token.values[owner * value_size..(owner + 1) * value_size];
            for i in 0..count {
                let score = prepared.sink_score(head, rows.start + i, token);
                let new = largest[i].max(score);
                let weight = (score - new).exp();
                sums[i] = sums[i] * (largest[i] - new).exp() + weight;
                largest[i] = new;
                for (output, &v) in outputs[i * value_size..].iter_mut().zip(value) {
                    *output = weight * v;
                }
            }
        }
        let mut buffer = vec![T::zero(); count * KEYS.min(prepared.visible(rows.end))];
        for columns in prepared.key_blocks(rows.end) {
            prepared.look()?;
            let weights = &mut buffer[..count * columns.len()];
            prepared.scores(head, rows, &columns, weights);
            for (i, row) in weights.chunks_mut(columns.len()).enumerate() {
                let new = largest[i].max(T::largest(row));
                let shrink = (largest[i] - new).exp();
                sums[i] = sums[i] * shrink + T::exponentials(row, new);
                largest[i] = new;
                if shrink != T::one() {
                    outputs[i * value_size..(i + 1) * value_size].iter_mut().for_each(|y| *y = *y * shrink);
                }
            }
            let (weights, values) = (Matrix::new(weights, count, columns.len(), columns.len()), columns);
            multiply(&mut outputs, T::one(), weights, prepared.value_block(owner, &values), true, 1);
        }
        let mut log_normalizers = sums;
        let mut removed = Vec::with_capacity(if self.exclusive { count } else { 0 });
        let mut direction = vec![T::zero(); value_size];
        for (i, output) in outputs.chunks_mut(value_size).enumerate() {
            let position = rows.start + i;
            let scale = T::one() / log_normalizers[i];
            log_normalizers[i] = largest[i] + log_normalizers[i].ln();
            if !log_normalizers[i].is_finite() {
                return Err(Error::NotFinite { what: "a score", layer: None, head, position: Some(position) });
            }
            if self.exclusive {
                removed.push(exclude_scaled(output, prepared.value(owner, position), scale, &mut direction));
            } else {
                output.iter_mut().for_each(|y| *y = *y * scale);
            }
        }
        Ok(HeadBlock { outputs, log_normalizers, removed })
    }
}
