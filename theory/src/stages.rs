//! The stages of learning that a trajectory goes through: plateaus, what every head has learned
//! there, and the order in which the features are learned.
//!
//! One definition for both routes, the flow and SGD at finite `D`; it reads the alignments only.
//! Give it the path of one replica or scramble: a mean over paths that end in different, symmetric
//! states is not a state. With `Lambda = E[theta theta^T]`, the **strength** of head `h` in
//! feature `f` is
//!
//! ```text
//! w_hf(tau) = m_hf(tau) / sqrt(Lambda_ff)
//! ```
//!
//! in units of the matched filter: at `w = 1` the key is as long along the spike as the typical
//! signal, which for flips is what Bayes-optimal keys are (`k_h = sum_f theta^(h)_f k*_f`, one head
//! for every sign pattern). So strong and weak features share one scale, and the redundant heads
//! that bayes-softmax leaves at a fraction of it count as off. `Lambda_ff = 0` means `w = 0`.
//!
//! - **On.** A head is on in `f`, with the sign of `w_hf`, when `|w_hf| >= on` (default 0.5).
//! - **Move.** A strength moves when it changes by more than
//!   `delta_hf = max(motion W, 6 sigma_hf)`, with `W` the largest `|w|` of the whole path, at least
//!   `on`, and `motion` 0.1 by default. `sigma_hf` is the noise between records: the median distance
//!   of a record from the line through its two neighbours, over what it is for white noise of unit
//!   variance. Smooth motion is straight at this scale and drops out.
//! - **Dwell.** A window is a row of records over which no strength spans more than its `delta`. A
//!   record stands for the time up to halfway to its neighbours, and a window lasts as long as its
//!   records. `T(tau)` is the duration of the longest window that holds `tau`: how long the path
//!   takes to move on from there.
//! - **Plateau.** Two peaks of `T` are two plateaus if between them `T` falls below both by a
//!   factor of `contrast` (default 2); the first and the last need such a fall on one side only,
//!   and a path within one window is one plateau. A plateau is the longest window at its peak, of
//!   at least 3 records, and the records next to it, up to the lowest `T` on either side, at which
//!   all strengths are within `delta` of their means over the window. The slow end of a relaxation
//!   is one plateau, and a move by less than about `2 delta` separates none.
//! - **Pattern.** What a head is on in, from its mean strengths over the plateau.
//! - **Learned.** A feature is learned when the first head comes on in it, linearly between
//!   records, and at the next two records is not below `on - delta_hf / 2`.
//! - **Excursion.** A head between two plateaus, with a pattern that is neither that of the one
//!   before nor that of the one after, for at least 3 records: from the first that is out of both
//!   by `delta_hf / 2` to the last that is out of both. A head that turns from `+s1` to `-s1` is
//!   off on the way, and one that goes from off to `+s1 +s2` may pass `+s1`.
//!
//! The picture of stages, and of heads that switch off, is that of Sagitova, Duranthon and
//! Zdeborova, arXiv 2603.03993; plateaus of online learning go back to Saad and Solla, Phys. Rev. E
//! 52, 4225 (1995). Finding them by dwell times is this crate's own choice.

use std::collections::VecDeque;
use std::fmt::{self, Display, Write};
use std::ops::Range;
use std::str::FromStr;

use headflow_model::{Error, Quantity, Shape, Trajectory, larger, largest_size, smallest};
use nalgebra::DMatrix;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Fewest records of a path.
const FEWEST_RECORDS: usize = 10;

/// Records that a plateau, an excursion, or a feature that was learned must last.
const PERSISTENCE: usize = 3;

/// A move must exceed this many standard deviations of the noise between records.
const SIGMAS: f64 = 6.0;

/// What counts as on, as motion and as a plateau ([the definition](self)).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Criteria {
    /// The strength at which a head is on in a feature, in units of the matched filter
    /// (default 0.5).
    pub on: f64,
    /// How much of the largest strength of the path a strength may move within a plateau
    /// (default 0.1).
    pub motion: f64,
    /// How many times slower than in the transition beside it the path must be on a plateau
    /// (default 2).
    pub contrast: f64,
}

impl Default for Criteria {
    fn default() -> Self {
        Self { on: 0.5, motion: 0.1, contrast: 2.0 }
    }
}

impl Criteria {
    /// Checks the values.
    ///
    /// # Errors
    /// When `on` is not positive, `motion` not between 0 and 1, or `contrast` not above 1.
    pub fn validate(&self) -> Result<(), Error> {
        let wrong = |field: &str, problem: String| Err(Error::invalid(field, problem));
        if !(self.on.is_finite() && self.on > 0.0) {
            return wrong("on", format!("must be positive and finite, got {}; the default is 0.5", self.on));
        }
        if !(self.motion > 0.0 && self.motion < 1.0) {
            return wrong("motion", format!("must be between 0 and 1, got {}; the default is 0.1", self.motion));
        }
        if !(self.contrast.is_finite() && self.contrast > 1.0) {
            return wrong("contrast", format!("must be finite and above 1, got {}; the default is 2", self.contrast));
        }
        Ok(())
    }
}

/// The features that a head is on in, with their signs.
///
/// As text, and in files: `+s1`, `-s1 +s2`, `off`; `s1` is the first feature.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Pattern(Vec<i8>);

impl Pattern {
    /// A pattern from the sign of every feature: `1`, `-1`, or `0` for off.
    pub fn new(signs: impl IntoIterator<Item = i8>) -> Self {
        let mut signs: Vec<i8> = signs.into_iter().map(i8::signum).collect();
        // The text does not tell how many features there are: one form for all.
        while signs.last() == Some(&0) {
            signs.pop();
        }
        Self(signs)
    }

    fn of(strengths: impl IntoIterator<Item = f64>, on: f64) -> Self {
        Self::new(strengths.into_iter().map(|w| if w.abs() >= on { w.signum() as i8 } else { 0 }))
    }

    /// The sign in a feature, counted from 0: `1`, `-1`, or `0` for off.
    pub fn sign(&self, feature: usize) -> i8 {
        self.0.get(feature).copied().unwrap_or(0)
    }

    /// Whether the head is on in no feature.
    pub fn is_off(&self) -> bool {
        self.0.is_empty()
    }
}

impl Display for Pattern {
    fn fmt(&self, to: &mut fmt::Formatter) -> fmt::Result {
        let signs = self.0.iter().enumerate().filter(|(_, sign)| **sign != 0);
        let names: Vec<_> = signs.map(|(f, sign)| format!("{}s{}", if *sign > 0 { '+' } else { '-' }, f + 1)).collect();
        to.pad(if names.is_empty() { "off".into() } else { names.join(" ") }.as_str())
    }
}

impl FromStr for Pattern {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let wrong = || Error::invalid("pattern", format!("\"{text}\" is not like \"+s1\", \"-s1 +s2\" or \"off\""));
        let mut signs = Vec::new();
        for word in text.split_whitespace().filter(|word| *word != "off") {
            let (sign, feature) = match (word.strip_prefix("+s"), word.strip_prefix("-s")) {
                (Some(feature), _) => (1, feature),
                (_, Some(feature)) => (-1, feature),
                _ => return Err(wrong()),
            };
            // A bound keeps a mistyped number from asking for gigabytes.
            let feature = feature.parse().ok().filter(|f| (1..=10_000).contains(f)).ok_or_else(wrong)?;
            signs.resize(signs.len().max(feature), 0);
            signs[feature - 1] = sign;
        }
        Ok(Self::new(signs))
    }
}

impl Serialize for Pattern {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Pattern {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from)?.parse().map_err(serde::de::Error::custom)
    }
}

/// A matrix as its rows.
mod rows {
    use super::*;

    pub fn serialize<S: Serializer>(matrix: &DMatrix<f64>, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(matrix.row_iter().map(|row| row.iter().copied().collect::<Vec<_>>()))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<DMatrix<f64>, D::Error> {
        let rows = Vec::<Vec<f64>>::deserialize(from)?;
        let width = rows.first().map_or(0, Vec::len);
        if rows.iter().any(|row| row.len() != width) {
            return Err(serde::de::Error::custom("rows of different lengths"));
        }
        Ok(DMatrix::from_fn(rows.len(), width, |i, j| rows[i][j]))
    }
}

/// A stretch of a trajectory where the alignments hardly move.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plateau {
    /// Time `tau` of its first record.
    pub start: f64,
    /// Time `tau` of its last record.
    pub end: f64,
    /// Mean loss over its records.
    pub loss: f64,
    /// Index of its first record.
    pub first: usize,
    /// Index of its last record.
    pub last: usize,
    /// The pattern of each head.
    pub patterns: Vec<Pattern>,
    /// Mean alignments over its records, `H x F`.
    #[serde(with = "rows")]
    pub m: DMatrix<f64>,
}

impl Plateau {
    /// Number of heads that are on in some feature.
    pub fn specialised(&self) -> usize {
        self.patterns.iter().filter(|pattern| !pattern.is_off()).count()
    }
}

/// A feature that some head came on in.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Learned {
    /// The feature, counted from 0.
    pub feature: usize,
    /// When, in `tau`: the first recorded time if it was on from the start.
    pub time: f64,
}

/// A detour of a head between two plateaus.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Excursion {
    /// The head, counted from 0.
    pub head: usize,
    /// Time `tau` of its first record.
    pub start: f64,
    /// Time `tau` of its last record.
    pub end: f64,
    /// The head's pattern there, from its mean strengths.
    pub pattern: Pattern,
}

/// What [`stages`] finds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Stages {
    /// The plateaus in time order, at least one.
    pub plateaus: Vec<Plateau>,
    /// The features that were learned, in the order in which they were.
    pub order: Vec<Learned>,
    /// The features that were not.
    pub absent: Vec<usize>,
    /// Detours between plateaus, in the order of their starts.
    pub excursions: Vec<Excursion>,
}

impl Stages {
    /// The patterns of the heads on the last plateau.
    pub fn last_patterns(&self) -> &[Pattern] {
        self.plateaus.last().map_or(&[], |plateau| &plateau.patterns)
    }

    /// A table for a terminal: a line for every plateau with its times, its loss and the pattern of
    /// each head; then the order of the features and the excursions.
    pub fn describe(&self) -> String {
        let heads = self.last_patterns().len();
        let mut table = vec![["plateau", "from tau", "to tau", "loss", "on"].map(String::from).to_vec()];
        table[0].extend((0..heads).map(|head| format!("head {head}")));
        for (i, plateau) in self.plateaus.iter().enumerate() {
            let Plateau { start, end, loss, patterns, .. } = plateau;
            let on = format!("{}/{heads}", plateau.specialised());
            let mut line = vec![(i + 1).to_string(), number(*start), number(*end), format!("{loss:.4}"), on];
            line.extend(patterns.iter().map(Pattern::to_string));
            table.push(line);
        }
        let widths: Vec<_> =
            (0..heads + 5).map(|i| table.iter().filter_map(|line| line.get(i)).map(String::len).max()).collect();
        let mut text = String::new();
        for line in &table {
            let cells: Vec<_> =
                line.iter().zip(&widths).map(|(cell, w)| format!("{cell:<width$}", width = w.unwrap_or(0))).collect();
            text.push_str(cells.join("  ").trim_end());
            text.push('\n');
        }
        // Writing to a string cannot fail.
        for Learned { feature, time } in &self.order {
            let _ = writeln!(text, "s{} learned at tau = {}", feature + 1, number(*time));
        }
        for feature in &self.absent {
            let _ = writeln!(text, "s{} not learned", feature + 1);
        }
        for Excursion { head, start, end, pattern } in &self.excursions {
            let (start, end) = (number(*start), number(*end));
            let _ = writeln!(text, "head {head} passes through {pattern} from tau = {start} to {end}");
        }
        text
    }
}

/// A time with about four digits.
pub(crate) fn number(time: f64) -> String {
    let digits = if time.abs() >= 100.0 {
        1
    } else if time.abs() >= 1.0 || time == 0.0 {
        2
    } else {
        4
    };
    format!("{time:.digits$}")
}

/// Finds the stages of a trajectory, by [the definition](self) that theory and simulation share.
///
/// `second_moment` is `Lambda = E[theta theta^T]`, `F x F`; only its diagonal is used. The cost is
/// linear in the number of records.
///
/// # Errors
/// One line each, for a path that is too short (`records`), too coarse to show its transitions
/// (`records`), not finite (`records`) or without a plateau (`tau`); for criteria outside their
/// domain (`on`, `motion`, `contrast`) and a second moment that does not fit (`theta`).
pub fn stages(trajectory: &Trajectory, second_moment: &DMatrix<f64>, criteria: &Criteria) -> Result<Stages, Error> {
    criteria.validate()?;
    validate(trajectory, second_moment)?;
    let path = Path::new(trajectory, second_moment, criteria);
    path.refuse_jumps()?;
    let plateaus: Vec<_> = path.windows()?.into_iter().map(|(first, last)| path.plateau(first, last)).collect();
    let features = 0..trajectory.shape.features;
    let mut order: Vec<_> =
        features.clone().filter_map(|feature| path.learned(feature).map(|time| Learned { feature, time })).collect();
    order.sort_by(|a, b| a.time.total_cmp(&b.time));
    let absent = features.filter(|feature| order.iter().all(|learned| learned.feature != *feature)).collect();
    let mut excursions: Vec<_> = plateaus.windows(2).flat_map(|pair| path.excursions(&pair[0], &pair[1])).collect();
    excursions.sort_by(|a, b| a.start.total_cmp(&b.start));
    Ok(Stages { plateaus, order, absent, excursions })
}

fn validate(trajectory: &Trajectory, second_moment: &DMatrix<f64>) -> Result<(), Error> {
    let Trajectory { shape, times, rows } = trajectory;
    let wrong = |problem: String| Err(Error::invalid("records", problem));
    if times.len() < FEWEST_RECORDS {
        return wrong(format!("stages need at least {FEWEST_RECORDS}, got {}; raise --records", times.len()));
    }
    if rows.len() != times.len() || rows.iter().any(|row| row.len() != shape.width()) {
        return wrong(format!("there must be {} rows of {} numbers, one per time", times.len(), shape.width()));
    }
    if !times.iter().all(|t| t.is_finite()) || !times.is_sorted_by(|a, b| a < b) {
        return wrong("the times must be finite and strictly increasing".into());
    }
    let read = 1 + shape.heads * shape.features;
    for (time, row) in times.iter().zip(rows) {
        if let Some((quantity, value)) = shape.quantities().take(read).zip(row).find(|(_, value)| !value.is_finite()) {
            let name = match quantity {
                Quantity::Alignment { head, feature } => format!("m of head {head}, feature {feature}"),
                _ => "the loss".into(),
            };
            return wrong(format!("{name} is {value} at tau = {time}; end the run before, or lower --gamma"));
        }
    }
    let features = shape.features;
    if second_moment.shape() != (features, features) {
        let (rows, columns) = second_moment.shape();
        let problem = format!("its second moment is {rows} x {columns} but the records have {features} features");
        return Err(Error::invalid("theta", problem));
    }
    if let Some(value) = second_moment.diagonal().iter().find(|value| !(value.is_finite() && **value >= 0.0)) {
        return Err(Error::invalid(
            "theta",
            format!("its second moment has {value} on the diagonal; must be finite and not negative"),
        ));
    }
    Ok(())
}

/// The strengths along a trajectory and what they count as a move.
struct Path<'a> {
    trajectory: &'a Trajectory,
    criteria: &'a Criteria,
    /// `w_hf` at every record, for `h F + f`.
    strengths: Vec<Vec<f64>>,
    /// `delta_hf`.
    moves: Vec<f64>,
}

impl<'a> Path<'a> {
    fn new(trajectory: &'a Trajectory, second_moment: &DMatrix<f64>, criteria: &'a Criteria) -> Self {
        let Shape { heads, features } = trajectory.shape;
        let strengths: Vec<Vec<f64>> = (0..heads * features)
            .map(|i| {
                let (head, feature) = (i / features, i % features);
                let size = second_moment[(feature, feature)].sqrt();
                let scale = if size > 0.0 { 1.0 / size } else { 0.0 };
                trajectory.path(Quantity::Alignment { head, feature }).map(|m| m * scale).collect()
            })
            .collect();
        let largest = larger(criteria.on, largest_size(strengths.iter().map(largest_size)));
        let moves = strengths
            .iter()
            .map(|path| larger(criteria.motion * largest, SIGMAS * noise(&trajectory.times, path)))
            .collect();
        Self { trajectory, criteria, strengths, moves }
    }

    /// Refuses a path with a whole transition between two records.
    fn refuse_jumps(&self) -> Result<(), Error> {
        let Trajectory { shape, times, .. } = self.trajectory;
        let jumps = self.strengths.iter().zip(&self.moves).enumerate().flat_map(|(i, (path, width))| {
            let size = largest_size(path);
            let jumps = path.windows(2).map(|pair| (pair[1] - pair[0]).abs()).enumerate();
            // A strength that never counts as on may jump, and so may noise.
            let jumps = jumps.filter(move |(_, jump)| size >= self.criteria.on && jump > width);
            jumps.map(move |(t, jump)| (jump / size, i, t))
        });
        let Some((jump, i, t)) = jumps.max_by(|a, b| a.0.total_cmp(&b.0)).filter(|(jump, ..)| *jump > 0.5) else {
            return Ok(());
        };
        let (head, feature) = (i / shape.features, i % shape.features + 1);
        // Ten records in the transition.
        let records = ((times.len() - 1) as f64 * 10.0 * jump).ceil() + 1.0;
        Err(Error::invalid(
            "records",
            format!(
                "too coarse: head {head} moves by {:.0}% of its largest strength in s{feature} between two records, tau = {} \
                 and {}; about {records} records would show it",
                100.0 * jump,
                number(times[t]),
                number(times[t + 1]),
            ),
        ))
    }

    /// First and last records of the plateaus.
    fn windows(&self) -> Result<Vec<(usize, usize)>, Error> {
        let times = &self.trajectory.times;
        let count = times.len();
        let mut lefts = vec![0; count];
        for (path, width) in self.strengths.iter().zip(&self.moves) {
            for (left, other) in lefts.iter_mut().zip(quiet_since(path, *width)) {
                *left = other.max(*left);
            }
        }
        if lefts[count - 1] == 0 {
            return Ok(vec![(0, count - 1)]);
        }
        let longest = longest_windows(times, &lefts);
        let dwell: Vec<_> = longest.iter().map(|(first, last)| duration(times, *first, *last)).collect();
        let mut found = peaks(&dwell, self.criteria.contrast);
        found.retain(|&peak| longest[peak].1 - longest[peak].0 + 1 >= PERSISTENCE);
        if found.is_empty() {
            let (slow, fast) = (largest_size(dwell.iter().copied()), smallest(dwell.iter().copied()));
            let problem = format!(
                "the alignments move throughout: no plateau up to {}; the slowest move by {} of the largest strength takes {}, \
                 the fastest {}, which must be {} times as short; raise --tau",
                number(times[count - 1]),
                self.criteria.motion,
                number(slow),
                number(fast),
                self.criteria.contrast,
            );
            return Err(Error::invalid("tau", problem));
        }
        // No plateau reaches past the fastest record between it and the next.
        let mut bounds = vec![0];
        bounds.extend(found.windows(2).map(|pair| lowest(&dwell, pair[0], pair[1])));
        bounds.push(count);
        let around = |(i, peak): (usize, &usize)| self.around(longest[*peak], bounds[i]..bounds[i + 1]);
        Ok(found.iter().enumerate().map(around).collect())
    }

    /// The run of records around a window, within bounds, that stay near its mean.
    fn around(&self, (first, last): (usize, usize), bounds: Range<usize>) -> (usize, usize) {
        let means: Vec<_> = self.strengths.iter().map(|path| mean(&path[first..=last])).collect();
        let near = |t: &usize| {
            let mut all = self.strengths.iter().zip(&means).zip(&self.moves);
            all.all(|((path, mean), width)| (path[*t] - mean).abs() <= *width)
        };
        let start = (bounds.start..first).rev().take_while(near).last().unwrap_or(first);
        let end = (last + 1..bounds.end).take_while(near).last().unwrap_or(last);
        (start, end)
    }

    fn plateau(&self, first: usize, last: usize) -> Plateau {
        let Trajectory { shape, times, rows } = self.trajectory;
        let mean = |quantity| {
            let index = shape.index(quantity);
            rows[first..=last].iter().map(|row| row[index]).sum::<f64>() / (last - first + 1) as f64
        };
        Plateau {
            start: times[first],
            end: times[last],
            loss: mean(Quantity::Loss),
            first,
            last,
            patterns: (0..shape.heads).map(|head| self.pattern(head, first, last)).collect(),
            m: DMatrix::from_fn(shape.heads, shape.features, |head, feature| {
                mean(Quantity::Alignment { head, feature })
            }),
        }
    }

    /// A head's pattern from its mean strengths.
    fn pattern(&self, head: usize, first: usize, last: usize) -> Pattern {
        Pattern::of(self.of_head(head).map(|(path, _)| mean(&path[first..=last])), self.criteria.on)
    }

    /// Strengths and moves of a head, by feature.
    fn of_head(&self, head: usize) -> impl Iterator<Item = (&Vec<f64>, f64)> {
        let features = self.trajectory.shape.features;
        let range = head * features..(head + 1) * features;
        self.strengths[range.clone()].iter().zip(self.moves[range].iter().copied())
    }

    /// When the first head comes on in a feature.
    fn learned(&self, feature: usize) -> Option<f64> {
        let Shape { heads, features } = self.trajectory.shape;
        let times = (0..heads).filter_map(|head| self.comes_on(head * features + feature));
        times.min_by(f64::total_cmp)
    }

    fn comes_on(&self, i: usize) -> Option<f64> {
        let (path, times, on) = (&self.strengths[i], &self.trajectory.times, self.criteria.on);
        let low = on - self.moves[i] / 2.0;
        let stays = |t: usize| {
            let sign = path[t].signum();
            path[t..].iter().take(PERSISTENCE).all(|w| w * sign >= low)
        };
        // A crossing that does not last is forgotten, and the next one is looked for.
        let t = (0..path.len()).find(|&t| path[t].abs() >= on && stays(t))?;
        let before = t.checked_sub(1).filter(|&s| path[s].abs() < on);
        Some(before.map_or(times[t], |s| {
            let (a, b) = (path[s] * path[t].signum(), path[t].abs());
            times[s] + (times[t] - times[s]) * (on - a) / (b - a)
        }))
    }

    fn excursions(&self, before: &Plateau, after: &Plateau) -> Vec<Excursion> {
        let times = &self.trajectory.times;
        let on = self.criteria.on;
        let mut found = Vec::new();
        for head in 0..self.trajectory.shape.heads {
            // Whether the head is out of a pattern by more than a share of `delta`.
            let leaves = |pattern: &Pattern, t: usize, share: f64| {
                self.of_head(head).enumerate().any(|(feature, (path, width))| match pattern.sign(feature) {
                    0 => path[t].abs() > on + share * width,
                    sign => path[t] * f64::from(sign) < on - share * width,
                })
            };
            let away = |t: usize, share: f64| {
                leaves(&before.patterns[head], t, share) && leaves(&after.patterns[head], t, share)
            };
            let mut next = before.last + 1;
            // Leaving takes half a move beyond the threshold: no flicker there.
            while let Some(first) = (next..after.first).find(|&t| away(t, 0.5)) {
                next = (first..after.first).find(|&t| !away(t, 0.0)).unwrap_or(after.first);
                if next - first >= PERSISTENCE {
                    let (start, end) = (times[first], times[next - 1]);
                    found.push(Excursion { head, start, end, pattern: self.pattern(head, first, next - 1) });
                }
            }
        }
        found
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// The index of the smallest value between two.
fn lowest(values: &[f64], from: usize, to: usize) -> usize {
    (from..to).min_by(|a, b| values[*a].total_cmp(&values[*b])).unwrap_or(from)
}

/// A robust estimate of the standard deviation of white noise on a path.
fn noise(times: &[f64], path: &[f64]) -> f64 {
    let mut deviations: Vec<f64> = (1..path.len() - 1)
        .map(|i| {
            let a = (times[i + 1] - times[i]) / (times[i + 1] - times[i - 1]);
            let b = 1.0 - a;
            (path[i] - a * path[i - 1] - b * path[i + 1]).abs() / (1.0 + a * a + b * b).sqrt()
        })
        .collect();
    let middle = deviations.len() / 2;
    // 0.6745: the median of |z| for a standard normal z.
    *deviations.select_nth_unstable_by(middle, f64::total_cmp).1 / 0.6745
}

/// For every record, the first record from which on the path spans at most `width` up to it.
fn quiet_since(path: &[f64], width: f64) -> Vec<usize> {
    // Candidates for the smallest and the largest value of the window, best first.
    let (mut low, mut high) = (VecDeque::new(), VecDeque::new());
    let mut left = 0;
    (0..path.len())
        .map(|right| {
            while low.back().is_some_and(|&i: &usize| path[i] >= path[right]) {
                low.pop_back();
            }
            while high.back().is_some_and(|&i: &usize| path[i] <= path[right]) {
                high.pop_back();
            }
            low.push_back(right);
            high.push_back(right);
            while let (Some(&a), Some(&b)) = (low.front(), high.front()) {
                if path[b] - path[a] <= width {
                    break;
                }
                left = a.min(b) + 1;
                for candidates in [&mut low, &mut high] {
                    while candidates.front().is_some_and(|&i| i < left) {
                        candidates.pop_front();
                    }
                }
            }
            left
        })
        .collect()
}

/// For every record, first and last of the longest window that holds it; `lefts` are the earliest
/// starts of windows by their last record.
fn longest_windows(times: &[f64], lefts: &[usize]) -> Vec<(usize, usize)> {
    let length = |right: usize| duration(times, lefts[right], right);
    // Windows by their last record, longest first.
    let mut candidates: VecDeque<usize> = VecDeque::new();
    let mut next = 0;
    (0..times.len())
        .map(|i| {
            while next < lefts.len() && lefts[next] <= i {
                while candidates.back().is_some_and(|&other| length(other) < length(next)) {
                    candidates.pop_back();
                }
                candidates.push_back(next);
                next += 1;
            }
            while candidates.front().is_some_and(|&right| right < i) {
                candidates.pop_front();
            }
            // The window that ends at `i` itself is always there.
            candidates.front().map_or((i, i), |&right| (lefts[right], right))
        })
        .collect()
}

/// The time that records stand for, up to halfway to their neighbours.
fn duration(times: &[f64], first: usize, last: usize) -> f64 {
    let start = (times[first] + times[first.saturating_sub(1)]) / 2.0;
    let end = (times[last] + times[(last + 1).min(times.len() - 1)]) / 2.0;
    end - start
}

/// Where positive values peak that are at least `contrast` times the lowest ones between them.
fn peaks(values: &[f64], contrast: f64) -> Vec<usize> {
    let mut found = Vec::new();
    let (mut top, mut bottom, mut rising) = (0, 0, true);
    for i in 0..values.len() {
        top = if values[i] > values[top] { i } else { top };
        bottom = if values[i] < values[bottom] { i } else { bottom };
        if rising && values[i] * contrast <= values[top] {
            found.push(top);
            (rising, bottom) = (false, i);
        } else if !rising && values[i] >= contrast * values[bottom] {
            (rising, top) = (true, i);
        }
    }
    // The last one has no lower values after it, and needs them before.
    if rising && values.get(top).is_some_and(|peak| *peak >= contrast * values[bottom]) {
        found.push(top);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use headflow_model::largest;
    use proptest::prelude::*;

    const SHAPE: Shape = Shape { heads: 2, features: 2 };

    /// `Lambda` of flips `+-2.5`, `+-1.5`.
    fn second_moment() -> DMatrix<f64> {
        DMatrix::from_row_slice(2, 2, &[6.25, 0.0, 0.0, 2.25])
    }

    /// A trajectory from strengths, evenly recorded up to `end`, with a loss of `1 - tau / 1000`.
    fn trajectory(records: usize, end: f64, strength: impl Fn(usize, usize, f64) -> f64) -> Trajectory {
        let mut trajectory = Trajectory::new(SHAPE);
        for t in 0..records {
            let tau = end * t as f64 / (records - 1) as f64;
            let m = DMatrix::from_fn(2, 2, |h, f| strength(h, f, tau) * second_moment()[(f, f)].sqrt());
            trajectory.times.push(tau);
            trajectory.rows.push(SHAPE.row(1.0 - tau / 1000.0, &m, &DMatrix::zeros(2, 2), &[0.0; 2]));
        }
        trajectory
    }

    fn found(trajectory: &Trajectory) -> Stages {
        stages(trajectory, &second_moment(), &Criteria::default()).unwrap()
    }

    fn step(tau: f64, at: f64, width: f64) -> f64 {
        0.5 * (1.0 + ((tau - at) / width).tanh())
    }

    /// Off, then `+-s1` at 100, then head 1 `+s2` at 250.
    fn staged(head: usize, feature: usize, tau: f64) -> f64 {
        match (head, feature) {
            (0, 0) => step(tau, 100.0, 10.0),
            (1, 0) => -step(tau, 100.0, 10.0),
            (1, 1) => step(tau, 250.0, 10.0),
            _ => 0.0,
        }
    }

    /// Standard normals that are always the same.
    fn normals(count: usize) -> Vec<f64> {
        let mut state = 7u64;
        let mut uniform = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 11) as f64 / (1u64 << 53) as f64
        };
        (0..count).map(|_| (0..12).map(|_| uniform()).sum::<f64>() - 6.0).collect()
    }

    fn add_noise(trajectory: &mut Trajectory, sigma: f64) {
        let normals = normals(trajectory.rows.len() * 4);
        for (row, noise) in trajectory.rows.iter_mut().zip(normals.chunks(4)) {
            row[1..5].iter_mut().zip(noise).for_each(|(m, z)| *m += sigma * z);
        }
    }

    fn texts(patterns: &[Pattern]) -> Vec<String> {
        patterns.iter().map(Pattern::to_string).collect()
    }

    fn problem(result: Result<Stages, Error>) -> (String, String) {
        match result {
            Err(Error::Invalid { field, problem }) => {
                assert!(!problem.contains('\n'));
                (field, problem)
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_staged_path_has_its_plateaus() {
        // `w = step` is 0.1 from its ends at `atanh(0.8) = 1.0986` widths from its middle.
        let edges = [[0.0, 89.0], [111.0, 239.0], [261.0, 400.0]];
        // (noise of m, tolerance in tau): two records, and what 3 sigma shift at a slope of 0.018.
        for (sigma, tolerance) in [(0.0, 1.0), (0.02, 3.0), (0.04, 6.0)] {
            let mut path = trajectory(801, 400.0, staged);
            add_noise(&mut path, sigma);
            let stages = found(&path);
            assert_eq!(stages.plateaus.len(), 3, "{}", stages.describe());
            for (plateau, [start, end]) in stages.plateaus.iter().zip(edges) {
                assert!((plateau.start - start).abs() <= tolerance, "{sigma}: {} {start}", plateau.start);
                assert!((plateau.end - end).abs() <= tolerance, "{sigma}: {} {end}", plateau.end);
                assert_eq!([plateau.start, plateau.end], [path.times[plateau.first], path.times[plateau.last]]);
                let middle = (plateau.start + plateau.end) / 2.0;
                assert!((plateau.loss - (1.0 - middle / 1000.0)).abs() < 1e-12);
            }
            assert_eq!(texts(&stages.plateaus[0].patterns), ["off", "off"]);
            assert_eq!(texts(&stages.plateaus[1].patterns), ["+s1", "-s1"]);
            assert_eq!(texts(stages.last_patterns()), ["+s1", "-s1 +s2"]);
            assert_eq!(stages.plateaus.iter().map(Plateau::specialised).collect::<Vec<_>>(), [0, 2, 2]);
            assert!((stages.plateaus[1].m[(1, 0)] + 2.5).abs() < 0.03);
            let order: Vec<_> = stages.order.iter().map(|learned| learned.feature).collect();
            assert_eq!(order, [0, 1]);
            assert!((stages.order[0].time - 100.0).abs() < 0.1 + 20.0 * sigma);
            assert!((stages.order[1].time - 250.0).abs() < 0.1 + 40.0 * sigma);
            assert_eq!((stages.absent.len(), stages.excursions.len()), (0, 0));
        }
    }

    #[test]
    fn a_path_at_rest_is_one_plateau() {
        for sigma in [0.0, 0.3] {
            let mut path = trajectory(101, 50.0, |h, _, _| if h == 0 { 1.0 } else { 0.0 });
            add_noise(&mut path, sigma);
            let stages = found(&path);
            assert_eq!((stages.plateaus.len(), stages.plateaus[0].first, stages.plateaus[0].last), (1, 0, 100));
            assert_eq!(texts(stages.last_patterns()), ["+s1 +s2", "off"]);
            // On from the first record.
            assert!(stages.order.iter().all(|learned| learned.time == 0.0));
        }
        let nothing = found(&trajectory(10, 50.0, |_, _, _| 0.0));
        assert_eq!((nothing.plateaus.len(), nothing.order.len(), nothing.absent), (1, 0, vec![0, 1]));
    }

    #[test]
    fn plateaus_at_the_start_and_at_the_end_only() {
        let escape =
            found(&trajectory(201, 100.0, |_, f, tau| if f == 0 { 0.7 * (tau / 10.0 - 10.0).exp() } else { 0.0 }));
        assert_eq!((escape.plateaus.len(), escape.plateaus[0].first, escape.absent.clone()), (1, 0, vec![1]));
        // The slow tail is one plateau, not a ladder of them: 1 - w = 0.1 at 23.
        let relaxation =
            found(&trajectory(401, 200.0, |_, f, tau| if f == 1 { 1.0 - (-tau / 10.0).exp() } else { 0.0 }));
        assert_eq!((relaxation.plateaus.len(), relaxation.plateaus[0].last), (1, 400));
        assert!((relaxation.plateaus[0].start - 23.0).abs() < 1.0, "{}", relaxation.plateaus[0].start);
        assert!((relaxation.order[0].time - 10.0 * 2f64.ln()).abs() < 0.01);
        // Slow drift by 1.5 delta on a plateau does not split it.
        let drift =
            found(&trajectory(401, 400.0, |h, f, tau| staged(h, f, tau) + if f == 1 { tau / 2700.0 } else { 0.0 }));
        assert_eq!(drift.plateaus.len(), 3);
    }

    #[test]
    fn uneven_records_show_the_same_plateaus() {
        let even = trajectory(2001, 400.0, staged);
        let mut sparse = Trajectory::new(SHAPE);
        for t in (0..2001).filter(|t| if *t < 700 { t % 2 == 0 } else { t % 10 == 0 }) {
            sparse.times.push(even.times[t]);
            sparse.rows.push(even.rows[t].clone());
        }
        for (a, b) in found(&even).plateaus.iter().zip(&found(&sparse).plateaus) {
            assert!((a.start - b.start).abs() <= 2.0 && (a.end - b.end).abs() <= 2.0);
            assert_eq!(a.patterns, b.patterns);
        }
        assert_eq!(found(&sparse).plateaus.len(), 3);
    }

    #[test]
    fn detours_are_excursions() {
        // Head 0 comes on in s1 and goes off again while head 1 learns s2; then head 1 turns over.
        let mut path = trajectory(1001, 500.0, |h, f, tau| match (h, f) {
            (0, 0) => (-((tau - 200.0) / 20.0).powi(2)).exp(),
            (1, 1) => step(tau, 200.0, 10.0) * (1.0 - 2.0 * step(tau, 400.0, 10.0)),
            _ => 0.0,
        });
        add_noise(&mut path, 0.01);
        let stages = found(&path);
        assert_eq!(texts(stages.last_patterns()), ["off", "-s2"]);
        assert_eq!(stages.plateaus.len(), 3, "{}", stages.describe());
        let detours: Vec<_> = stages.excursions.iter().map(|e| (e.head, e.pattern.to_string())).collect();
        assert_eq!(detours, [(0, "+s1".into()), (1, "off".into())], "{}", stages.describe());
        // |w| = 0.5 at 20 sqrt(ln 2) from the middle; half a move (0.05) later at the start.
        let (first, half) = (&stages.excursions[0], 20.0 * 2f64.ln().sqrt());
        assert!((first.start - (200.0 - half)).abs() < 3.0 && (first.end - (200.0 + half)).abs() < 1.5, "{first:?}");
        let text = stages.describe();
        assert!(text.contains("head 0 passes through +s1 from tau = ") && text.contains("s2 learned at tau = 200."));
    }

    #[test]
    fn a_short_crossing_is_not_learned() {
        let bump = |tau: f64| [0.0, 0.2, 0.4, 0.55, 0.35, 0.2, 0.1].get((tau - 40.0) as usize).copied().unwrap_or(0.0);
        let path = trajectory(101, 100.0, |h, f, tau| match (h, f) {
            (0, 0) => step(tau, 60.0, 3.0),
            (1, 1) if tau >= 40.0 => bump(tau),
            _ => 0.0,
        });
        let stages = found(&path);
        assert_eq!((stages.order.len(), stages.order[0].feature, stages.absent.clone()), (1, 0, vec![1]));
        assert!(stages.describe().contains("s2 not learned"));
    }

    #[test]
    fn bad_input_is_one_clear_line() {
        let good = trajectory(401, 400.0, staged);
        let with =
            |on, motion, contrast| problem(stages(&good, &second_moment(), &Criteria { on, motion, contrast })).0;
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert_eq!([with(bad, 0.1, 2.0), with(0.5, bad, 2.0), with(0.5, 0.1, bad)], ["on", "motion", "contrast"]);
        }
        assert_eq!([with(0.5, 1.0, 2.0), with(0.5, 0.1, 1.0)], ["motion", "contrast"]);

        let of = |path: &Trajectory| problem(stages(path, &second_moment(), &Criteria::default()));
        let short = of(&trajectory(9, 400.0, staged));
        assert!(short.0 == "records" && short.1.contains("at least 10, got 9"), "{short:?}");
        let coarse = of(&trajectory(11, 400.0, |h, f, tau| staged(h, f, tau + 20.0)));
        assert!(coarse.0 == "records" && coarse.1.contains("head 1 moves by 88%"), "{coarse:?}");
        assert!(coarse.1.contains("s2 between two records, tau = 200.0 and 240.0; about 89 records"), "{coarse:?}");
        let moving = of(&trajectory(101, 100.0, |_, f, tau| if f == 0 { tau / 100.0 } else { 0.0 }));
        assert!(moving.0 == "tau" && moving.1.contains("raise --tau"), "{moving:?}");
        for (index, name) in [(0, "the loss"), (4, "m of head 1, feature 1")] {
            let mut path = good.clone();
            path.rows[7][index] = f64::NAN;
            let bad = of(&path);
            assert!(bad.0 == "records" && bad.1.contains(name) && bad.1.contains("tau = 7"), "{bad:?}");
        }
        let mut path = good.clone();
        path.times[3] = path.times[2];
        assert_eq!(of(&path).0, "records");
        let mut path = good.clone();
        path.rows.pop();
        assert_eq!(of(&path).0, "records");
        for bad in [DMatrix::zeros(1, 1), DMatrix::from_element(2, 2, f64::NAN), DMatrix::from_element(2, 2, -1.0)] {
            assert_eq!(problem(stages(&good, &bad, &Criteria::default())).0, "theta");
        }
        // No signal in a feature: never on.
        let dead = stages(&good, &DMatrix::from_row_slice(2, 2, &[6.25, 0.0, 0.0, 0.0]), &Criteria::default());
        assert_eq!(dead.unwrap().absent, [1]);
    }

    #[test]
    fn files_hold_what_was_found() {
        let stages = found(&trajectory(401, 400.0, staged));
        let json = serde_json::to_string(&stages).unwrap();
        assert!(json.contains(r#""patterns":["+s1","-s1 +s2"]"#), "{json}");
        assert_eq!(serde_json::from_str::<Stages>(&json).unwrap(), stages);
        assert_eq!(serde_json::from_str::<Criteria>("{}").unwrap(), Criteria::default());
        assert!(serde_json::from_str::<Criteria>(r#"{"onn": 1}"#).is_err());
        for text in ["off", "+s1", "-s1 +s2", "+s3"] {
            assert_eq!(text.parse::<Pattern>().unwrap().to_string(), text);
        }
        assert_eq!(Pattern::new([0, -1, 0]), "-s2".parse().unwrap());
        assert_eq!((Pattern::new([0, -1]).sign(1), Pattern::new([0, -1]).sign(7)), (-1, 0));
        for text in ["s1", "+s0", "+s99999999999", "+x1", "+s1,-s2"] {
            assert!(text.parse::<Pattern>().is_err(), "{text}");
        }
        assert!(serde_json::from_str::<Plateau>(&json.replace("[[", "[[0.0],[")).is_err());
    }

    fn slow_quiet_since(path: &[f64], width: f64) -> Vec<usize> {
        let span = |part: &[f64]| largest(part.iter().copied()) - smallest(part.iter().copied());
        (0..path.len()).map(|right| (0..=right).find(|&left| span(&path[left..=right]) <= width).unwrap()).collect()
    }

    proptest! {
        #[test]
        fn the_sliding_window_is_right(path in prop::collection::vec(-5i8..5, 1..60), width in 0u8..8) {
            // Small integers: many ties.
            let path: Vec<_> = path.into_iter().map(f64::from).collect();
            let lefts = quiet_since(&path, f64::from(width));
            prop_assert_eq!(&lefts, &slow_quiet_since(&path, f64::from(width)));
            let times: Vec<_> = (0..path.len()).map(|t| (t * t) as f64).collect();
            for (i, (first, last)) in longest_windows(&times, &lefts).into_iter().enumerate() {
                let holding = (i..path.len()).filter(|&right| lefts[right] <= i);
                let longest = largest_size(holding.map(|right| duration(&times, lefts[right], right)));
                prop_assert!(first <= i && i <= last);
                prop_assert_eq!(duration(&times, first, last), longest);
            }
        }

        #[test]
        fn peaks_are_separated_by_falls(values in prop::collection::vec(1u8..40, 1..60), contrast in 1.5..4.0) {
            let values: Vec<_> = values.into_iter().map(f64::from).collect();
            let low = |range: &[f64]| smallest(range.iter().copied());
            let found = peaks(&values, contrast);
            for pair in found.windows(2) {
                let fall = low(&values[pair[0]..=pair[1]]);
                prop_assert!(fall * contrast <= values[pair[0]].min(values[pair[1]]) * (1.0 + 1e-12));
            }
            let high = largest_size(values.iter().copied());
            if high > contrast * low(&values) {
                prop_assert!(found.iter().any(|&peak| values[peak] == high));
            }
            let mirrored: Vec<_> = values.iter().rev().copied().collect();
            prop_assert_eq!(found.len(), peaks(&mirrored, contrast).len());
        }

        #[test]
        fn symmetries_of_the_model_are_symmetries_of_the_stages(
            steps in prop::collection::vec((20.0..380.0f64, 3.0..30.0f64, -1.2..1.2f64), 4),
            sigma in 0.0..0.03f64,
        ) {
            let mut path = trajectory(401, 400.0, |h, f, tau| {
                let (at, width, height) = steps[2 * h + f];
                height * step(tau, at, width)
            });
            add_noise(&mut path, sigma);
            let mut swapped = path.clone();
            let mut flipped = path.clone();
            for (swapped, flipped) in swapped.rows.iter_mut().zip(&mut flipped.rows) {
                swapped.swap(1, 3);
                swapped.swap(2, 4);
                flipped[2] = -flipped[2];
                flipped[4] = -flipped[4];
            }
            let of = |path| stages(path, &second_moment(), &Criteria::default());
            if let Ok(mut expected) = of(&path) {
                let turned = |pattern: &Pattern| Pattern::new([pattern.sign(0), -pattern.sign(1)]);
                let mut mirror = expected.clone();
                for plateau in &mut mirror.plateaus {
                    plateau.patterns = plateau.patterns.iter().map(turned).collect();
                    plateau.m.column_mut(1).neg_mut();
                }
                for excursion in &mut mirror.excursions {
                    excursion.pattern = turned(&excursion.pattern);
                }
                prop_assert_eq!(of(&flipped).unwrap(), mirror);
                for plateau in &mut expected.plateaus {
                    plateau.patterns.swap(0, 1);
                    plateau.m.swap_rows(0, 1);
                }
                for excursion in &mut expected.excursions {
                    excursion.head = 1 - excursion.head;
                }
                let mut found = of(&swapped).unwrap();
                // Excursions that start together are in the order of the heads.
                for stages in [&mut found, &mut expected] {
                    stages.excursions.sort_by(|a, b| a.start.total_cmp(&b.start).then(a.head.cmp(&b.head)));
                }
                prop_assert_eq!(found, expected);
            } else {
                prop_assert!(of(&swapped).is_err() && of(&flipped).is_err());
            }
        }
    }
}
