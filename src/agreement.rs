//! Do theory and simulation agree? A statistical answer, in standard errors.
//!
//! At dimension `D` and a recorded time, let `delta_D` be the mean over replicas of a quantity in
//! the simulation, less its value in the flow. A correct theory is the limit `D -> infinity`, and
//! the leading correction is known to be of order `1/D`, so
//!
//! ```text
//! delta_D = a + b / D + noise,     a = 0 if theory and simulation agree.
//! ```
//!
//! With two or more dimensions `a` is the intercept of a line in `1/D`, least squares with weights
//! `D` (the spread falls as `1/D`). A replica draws from the same random streams at every dimension,
//! so the intercept is taken replica by replica, `a_k = sum_D w_D delta_Dk`: the shared noise
//! cancels in part, and the `a_k` are independent of each other. Their mean has a standard error
//! from their spread (raised to its mean over neighbouring times where it is smaller), to which the
//! theory's own error is added, once. Few replicas make a standard error uncertain: `a / se(a)` is a
//! Student `t` (Welch-Satterthwaite degrees of freedom), and is reported as the normal deviate of
//! equal probability, "standard errors" below.
//!
//! A single deviation of a right theory exceeds [`THRESHOLD`] standard errors with probability at
//! most `6e-5` (less where its standard error was raised). The largest of `N` deviations is given the
//! same chance, so its limit is somewhat higher, 5.5 for two thousand (Bonferroni: it holds however
//! they depend on each other). The verdict is
//!
//! - `agree` when no quantity at any time exceeds that limit;
//! - `disagree` when one does, even less [`remainder`], what the term of order `1/D^2` may leave;
//! - `undetermined` when the remainder may be all that exceeds the limit (larger dimensions tell); with
//!   one dimension, where `a` and `b / D` cannot be told apart; and when replicas are so few that
//!   nothing could have exceeded the limit: beyond [`BLIND`] of its own standard errors.
//!
//! `examples/false_alarms.rs` measures how often a right theory exceeds a limit, by kind of quantity,
//! and how wrong a theory must be to be found.

use headflow_model::{Quantity, Shape, Trajectory, larger, largest_size, mean_and_error};
use serde::{Deserialize, Serialize};
use statrs::distribution::{ContinuousCDF, Normal, StudentsT};

/// Standard errors that one deviation of a right theory may have.
pub const THRESHOLD: f64 = 4.0;

/// Standard errors that the largest of `count` deviations may have, with the chance that one alone
/// has to exceed [`THRESHOLD`].
pub fn limit(count: usize) -> f64 {
    let normal = Normal::standard();
    normal.inverse_cdf(normal.sf(THRESHOLD) / count.max(1) as f64).abs()
}

/// Standard errors, of a mean over few replicas, beyond which a limit shows no disagreement: Student's
/// `t` exceeds it at two thousand looks when there are two or three replicas.
pub const BLIND: f64 = 1000.0;

/// What a term `c / D^2` may leave in the intercept of a line in `1/D`, when the line's slope is
/// `slope` at most: `sum_D w_D c / D^2` (`-c / (D_1 D_2)` with two dimensions) for
///
/// ```text
/// |c| = 8 (F + H) |b|.
/// ```
///
/// `c` cannot be told from `a` by two dimensions, as `b` cannot by one. The factor is a scale of
/// dimension: `F + H` directions of `D` are not noise. Measured at `F + H = 6` over three attentions
/// and dimensions from 16 to 500, `|c / b|` is at most 33, with `b` the largest of a kind of quantity
/// over all times (`theory/README.md` section 10).
pub fn remainder(shape: Shape, dimensions: &[usize], slope: f64) -> f64 {
    let Some(weights) = intercept_weights(dimensions) else { return f64::INFINITY };
    let left: f64 = weights.iter().zip(dimensions).map(|(w, &d)| w / d as f64 / d as f64).sum();
    8.0 * (shape.features + shape.heads) as f64 * (left * slope).abs()
}

/// One dimension's replicas and what theory says of them.
#[derive(Debug, Clone)]
pub struct Measured<'a> {
    /// Token dimension `D`.
    pub dimension: usize,
    /// The replicas' trajectories.
    pub simulated: Vec<&'a Trajectory>,
    /// The flow: one for all replicas, or one for each.
    pub predicted: Vec<&'a Trajectory>,
    /// Standard error of the flow.
    pub predicted_error: Option<&'a Trajectory>,
    /// Standard error of the flow's `tr r` at each time.
    pub predicted_trace_error: Option<&'a [f64]>,
    /// Number of scrambles behind that error.
    pub scrambles: usize,
}

/// The answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// No deviation above the threshold.
    Agree,
    /// A deviation above the threshold that neither the `1/D` bias nor a term in `1/D^2` explains.
    Disagree,
    /// The data cannot tell.
    Undetermined,
}

/// The deviation of one quantity at one time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Deviation {
    /// Time `tau`.
    pub time: f64,
    /// Simulation less theory.
    pub value: f64,
    /// Its standard error.
    pub standard_error: f64,
    /// The deviation as a normal deviate.
    pub standard_errors: f64,
}

/// How one quantity fares: its largest deviation over time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// `loss`, `m`, `r`, `b` or `trace`.
    pub quantity: String,
    /// Head.
    pub i: Option<usize>,
    /// Feature, or head.
    pub j: Option<usize>,
    /// At each dimension, the `1/D` bias included.
    pub at_dimensions: Vec<Deviation>,
    /// Extrapolated to `D -> infinity`; absent with one dimension.
    pub extrapolated: Option<Deviation>,
    /// Estimate of `b` in `b / D` at the time of the largest deviation at the largest dimension.
    pub bias_coefficient: Option<f64>,
}

impl Row {
    /// The quantity as a person writes it.
    pub fn name(&self) -> String {
        match (self.quantity.as_str(), self.i, self.j) {
            ("trace", ..) => "tr r".into(),
            (q, Some(i), Some(j)) => format!("{q}[{i}][{j}]"),
            (q, Some(i), None) => format!("{q}[{i}]"),
            (q, ..) => q.into(),
        }
    }
}

/// Deviations of all quantities and the verdict on them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Agreement {
    /// The answer.
    pub outcome: Outcome,
    /// The answer in a sentence, with its grounds.
    pub summary: String,
    /// Standard errors that the largest deviation may have, given how many there are.
    pub threshold: f64,
    /// The dimensions that were compared.
    pub dimensions: Vec<usize>,
    /// The largest deviation: name of the quantity, and the deviation.
    pub worst: Option<(String, Deviation)>,
    /// Every quantity.
    pub rows: Vec<Row>,
}

/// What is compared: every scalar of a row (`r` once for each pair), and `tr r`.
fn compared(shape: Shape) -> Vec<(Option<Quantity>, Row)> {
    let row = |quantity: &str, i, j| Row {
        quantity: quantity.into(),
        i,
        j,
        at_dimensions: Vec::new(),
        extrapolated: None,
        bias_coefficient: None,
    };
    shape
        .quantities()
        .filter_map(|quantity| {
            let row = match quantity {
                Quantity::Loss => row("loss", None, None),
                Quantity::Alignment { head, feature } => row("m", Some(head), Some(feature)),
                Quantity::Overlap { head, other } if other <= head => row("r", Some(head), Some(other)),
                Quantity::Overlap { .. } => return None,
                Quantity::Bias { head } => row("b", Some(head), None),
            };
            Some((Some(quantity), row))
        })
        .chain(std::iter::once((None, row("trace", None, None))))
        .collect()
}

/// The value of `quantity` (`None`: the trace of `r`) in a row.
fn value(shape: Shape, row: &[f64], quantity: Option<Quantity>) -> f64 {
    match quantity {
        Some(quantity) => row[shape.index(quantity)],
        None => (0..shape.heads).map(|h| row[shape.index(Quantity::Overlap { head: h, other: h })]).sum(),
    }
}

/// A sample mean: value, variance of the mean, degrees of freedom of that variance.
#[derive(Debug, Clone, Copy)]
struct Sample {
    mean: f64,
    variance: f64,
    freedom: f64,
}

/// Judges theory against simulation.
///
/// Times are those that all trajectories reached. `complete` says that none of them stopped early;
/// otherwise the verdict is `undetermined`, whatever the numbers.
pub fn judge(measured: &[Measured<'_>], complete: bool) -> Agreement {
    let dimensions: Vec<usize> = measured.iter().map(|m| m.dimension).collect();
    let replicas = measured.iter().map(|m| m.simulated.len()).min().unwrap_or(0);
    let times = common_times(measured);
    let undetermined = |summary: String, rows: Vec<Row>, worst| Agreement {
        outcome: Outcome::Undetermined,
        summary,
        threshold: THRESHOLD,
        dimensions: dimensions.clone(),
        worst,
        rows,
    };
    let Some(first) = measured.iter().find_map(|m| m.simulated.first()) else {
        return undetermined("nothing was simulated".into(), Vec::new(), None);
    };
    if replicas < 2 {
        return undetermined(
            "one replica has no standard error: use --replicas 2 or more (8 is a good number)".into(),
            Vec::new(),
            None,
        );
    }
    let shape = first.shape;
    let courses = courses(measured, shape, times, replicas);
    let rows: Vec<Row> = courses.iter().map(|course| course.row.clone()).collect();
    let largest = |pick: &dyn Fn(&Row) -> Option<Deviation>| {
        rows.iter()
            .filter_map(|row| pick(row).map(|d| (row.name(), d)))
            .max_by(|a, b| a.1.standard_errors.abs().total_cmp(&b.1.standard_errors.abs()))
    };
    if !complete {
        let worst = largest(&|row| row.at_dimensions.last().cloned());
        return undetermined(
            "a run stopped before its last time, so this is not the experiment that was asked for".into(),
            rows,
            worst,
        );
    }
    if measured.len() < 2 {
        let worst = largest(&|row| row.at_dimensions.last().cloned());
        let size = worst.as_ref().map_or(0.0, |(_, d)| d.standard_errors.abs());
        let summary = format!(
            "at D = {} the largest deviation is {size:.1} standard errors; one dimension cannot separate the O(1/D) \
             bias from disagreement: add another, as in --dimensions {},{}",
            dimensions[0],
            dimensions[0],
            2 * dimensions[0]
        );
        return undetermined(summary, rows, worst);
    }
    let worst = largest(&|row| row.extrapolated.clone());
    let Some((name, found)) = worst.clone() else {
        return undetermined("there is nothing to compare".into(), rows, None);
    };
    let size = found.standard_errors.abs();
    let list = dimensions.iter().map(|d| d.to_string()).collect::<Vec<_>>().join(", ");
    let comparisons = courses.iter().map(Course::comparisons).sum();
    let threshold = limit(comparisons);
    if !size.is_finite() {
        return undetermined(not_finite(&name, &found), rows, None);
    }
    let said = |found: &Deviation, name: &str| {
        let time = (found.time * 1e6).round() / 1e6;
        format!("({name} at tau = {time}: {:+.2e} +- {:.1e})", found.value, found.standard_error)
    };
    let grounds = |size: f64, said: String, relation: &str| {
        let alone = if measured.iter().any(|m| m.scrambles < 2) {
            "; one scramble leaves the theory's own error out (use --scrambles 8)"
        } else {
            ""
        };
        format!(
            "extrapolated from D = {list} to infinity, the largest of {comparisons} deviations is {size:.2} standard \
             errors {said}, {relation} the {threshold:.2} that a right theory may show among so many{alone}"
        )
    };
    let judged = |outcome, summary, worst| Agreement {
        outcome,
        summary,
        threshold,
        dimensions: dimensions.clone(),
        worst,
        rows: rows.clone(),
    };
    if size <= threshold {
        let needed = student_deviate(threshold, replicas as f64 - 1.0);
        if needed > BLIND {
            let summary = format!(
                "the mean of {replicas} replicas counts as a deviation only beyond {needed:.0e} of its standard errors, so \
                 nothing could disagree: use more --replicas (8 is a good number)"
            );
            return judged(Outcome::Undetermined, summary, worst);
        }
        return judged(Outcome::Agree, grounds(size, said(&found, &name), "within"), worst);
    }
    // Beyond the limit: is there one that is so without the most that 1/D^2 may leave?
    let clear = courses
        .iter()
        .flat_map(|course| {
            let left = remainder(shape, &dimensions, largest_slope(&courses, &course.row.quantity));
            course.extrapolated.iter().map(move |look| (course, look, look.judged(left).standard_errors.abs(), left))
        })
        .max_by(|a, b| a.2.total_cmp(&b.2));
    match clear {
        Some((course, look, size, left)) if !(size <= threshold) => {
            let (name, found) = (course.row.name(), look.deviation());
            let size = found.standard_errors.abs();
            let left =
                format!("{}, also less the {left:.1e} that a term of order 1/D^2 may leave", said(&found, &name));
            judged(Outcome::Disagree, grounds(size, left, "beyond"), Some((name, found)))
        }
        _ => {
            let left = remainder(shape, &dimensions, largest_slope(&courses, quantity_of(&rows, &name)));
            let beyond = grounds(size, said(&found, &name), "beyond");
            let summary = format!(
                "{beyond}, but a term of order 1/D^2 may leave {left:.1e}: use larger --dimensions to tell it from disagreement"
            );
            judged(Outcome::Undetermined, summary, worst)
        }
    }
}

/// Every deviation, extrapolated to `D -> infinity`, that [`judge`] judges: for each quantity (in a row
/// that has its name alone) one at each time. Empty with one dimension or one replica.
pub fn deviations(measured: &[Measured<'_>]) -> Vec<(Row, Vec<Deviation>)> {
    let replicas = measured.iter().map(|m| m.simulated.len()).min().unwrap_or(0);
    let Some(shape) = measured.iter().find_map(|m| m.simulated.first()).map(|t| t.shape).filter(|_| replicas > 1)
    else {
        return Vec::new();
    };
    courses(measured, shape, common_times(measured), replicas)
        .into_iter()
        .map(|course| (course.row, course.extrapolated.iter().map(Look::deviation).collect()))
        .collect()
}

/// The number of recorded times that all trajectories reached.
fn common_times(measured: &[Measured<'_>]) -> usize {
    measured.iter().flat_map(|m| m.simulated.iter().chain(&m.predicted).map(|t| t.times.len())).min().unwrap_or(0)
}

/// One quantity at one time: its deviation and what that is made of.
#[derive(Debug, Clone, Copy)]
struct Look {
    time: f64,
    value: f64,
    parts: [Sample; 2],
    rounding: f64,
}

impl Look {
    fn deviation(&self) -> Deviation {
        deviation(self.time, self.value, self.parts, self.rounding)
    }

    /// The deviation, less an `allowance` for what is no disagreement.
    fn judged(&self, allowance: f64) -> Deviation {
        let value = if self.value.abs() <= allowance { 0.0 } else { self.value - allowance.copysign(self.value) };
        deviation(self.time, value, self.parts, self.rounding)
    }
}

/// One quantity at all times.
struct Course {
    row: Row,
    /// Extrapolated to `D -> infinity`; empty with one dimension.
    extrapolated: Vec<Look>,
    /// Largest size of `b` in `b / D` over time.
    slope: f64,
}

impl Course {
    /// Deviations that count as looks.
    fn comparisons(&self) -> usize {
        self.extrapolated.iter().filter(|look| look.deviation().standard_errors != 0.0).count()
    }
}

/// The largest `b` of a kind of quantity.
fn largest_slope(courses: &[Course], quantity: &str) -> f64 {
    largest_size(courses.iter().filter(|c| c.row.quantity == quantity).map(|c| c.slope))
}

/// The kind of the quantity with this name.
fn quantity_of<'a>(rows: &'a [Row], name: &str) -> &'a str {
    rows.iter().find(|row| row.name() == name).map_or("", |row| &row.quantity)
}

/// The largest of a quantity's deviations.
fn largest_deviation(looks: &[Look]) -> Option<Deviation> {
    looks.iter().map(Look::deviation).max_by(|a, b| a.standard_errors.abs().total_cmp(&b.standard_errors.abs()))
}

/// Every quantity at every time, at each dimension and extrapolated.
fn courses(measured: &[Measured<'_>], shape: Shape, times: usize, replicas: usize) -> Vec<Course> {
    let dimensions: Vec<usize> = measured.iter().map(|m| m.dimension).collect();
    let weights = intercept_weights(&dimensions);
    let clock = |t: usize| measured[0].simulated[0].times[t];
    let course = |(quantity, mut row): (Option<Quantity>, Row)| {
        let differences: Vec<Vec<Vec<f64>>> =
            measured.iter().map(|m| (0..times).map(|t| differences(m, shape, t, quantity)).collect()).collect();
        let looks = |samples: &[Sample]| -> Vec<Look> {
            let looks = steady(samples).into_iter().enumerate().map(|(t, sample)| {
                let theory = theory_variance(measured, shape, t, quantity);
                let size = value(shape, &measured[0].predicted[0].rows[t], quantity).abs();
                Look { time: clock(t), value: sample.mean, parts: [sample, theory], rounding: ROUNDING * (1.0 + size) }
            });
            looks.collect()
        };
        let at_dimensions: Vec<Vec<Sample>> =
            differences.iter().map(|d| d.iter().map(|values| Sample::of(values)).collect()).collect();
        row.at_dimensions = at_dimensions.iter().filter_map(|samples| largest_deviation(&looks(samples))).collect();
        let mut extrapolated = Vec::new();
        if let Some(weights) = &weights {
            // Replica by replica: the noise that the dimensions share is in every term.
            let intercepts: Vec<Sample> = (0..times)
                .map(|t| {
                    let of = |k: usize| weights.iter().zip(&differences).map(|(w, d)| w * d[t][k]).sum();
                    Sample::of(&(0..replicas).map(of).collect::<Vec<f64>>())
                })
                .collect();
            extrapolated = looks(&intercepts);
            row.extrapolated = largest_deviation(&extrapolated);
        }
        let slopes: Vec<f64> = (0..times)
            .filter_map(|t| slope(&dimensions, &at_dimensions.iter().map(|d| d[t].mean).collect::<Vec<f64>>()))
            .collect();
        // The bias where it is largest, at the largest dimension.
        let at = at_dimensions
            .last()
            .and_then(|last| (0..times).max_by(|&s, &t| last[s].mean.abs().total_cmp(&last[t].mean.abs())));
        row.bias_coefficient = at.and_then(|t| slopes.get(t).copied());
        Course { row, extrapolated, slope: largest_size(&slopes) }
    };
    compared(shape).into_iter().map(course).collect()
}

/// Judges two engines, which must have the same law at every dimension: differences of means, with no
/// bias to allow for.
///
/// The verdict is `agree` when none of the differences exceeds the limit for their number, as in
/// [`judge`].
pub fn judge_engines(one: &[Measured<'_>], other: &[Measured<'_>], complete: bool) -> Agreement {
    let dimensions: Vec<usize> = one.iter().map(|m| m.dimension).collect();
    let replicas = one.iter().chain(other).map(|m| m.simulated.len()).min().unwrap_or(0);
    let courses = engine_courses(one, other);
    let looks = || courses.iter().flat_map(|(_, at_dimensions)| at_dimensions.iter().flatten());
    let comparisons = looks().filter(|look| look.deviation().standard_errors != 0.0).count();
    let rows: Vec<Row> = courses
        .iter()
        .map(|(row, at_dimensions)| Row {
            at_dimensions: at_dimensions.iter().filter_map(|looks| largest_deviation(looks)).collect(),
            ..row.clone()
        })
        .collect();
    let worst = rows
        .iter()
        .flat_map(|row| row.at_dimensions.iter().zip(&dimensions).map(|(d, dimension)| (row.name(), *dimension, d)))
        .max_by(|a, b| a.2.standard_errors.abs().total_cmp(&b.2.standard_errors.abs()))
        .map(|(name, dimension, d)| (name, dimension, d.clone()));
    let threshold = limit(comparisons);
    let (outcome, summary) = match &worst {
        _ if !complete => (Outcome::Undetermined, "a run stopped before its last time".to_string()),
        None => (Outcome::Undetermined, "one replica has no standard error: use --replicas 2 or more".to_string()),
        Some((name, _, found)) if !found.standard_errors.is_finite() => {
            (Outcome::Undetermined, not_finite(name, found))
        }
        Some((name, dimension, found)) => {
            let size = found.standard_errors.abs();
            let needed = student_deviate(threshold, 2.0 * (replicas as f64 - 1.0));
            let (outcome, relation) = match size <= threshold {
                true if needed > BLIND => {
                    let summary = format!(
                        "means of {replicas} replicas count as different only beyond {needed:.0e} standard errors, so \
                         nothing could disagree: use more --replicas (8 is a good number)"
                    );
                    return Agreement {
                        outcome: Outcome::Undetermined,
                        summary,
                        threshold,
                        dimensions,
                        worst: worst.map(|(name, _, deviation)| (name, deviation)),
                        rows,
                    };
                }
                true => (Outcome::Agree, "within"),
                false => (Outcome::Disagree, "beyond"),
            };
            let summary = format!(
                "at equal D, the largest of {comparisons} differences is {size:.2} standard errors ({name} at D = \
                 {dimension}, tau = {}: {:+.2e} +- {:.1e}), {relation} the {threshold:.2} that one law may show among so many",
                (found.time * 1e6).round() / 1e6,
                found.value,
                found.standard_error
            );
            (outcome, summary)
        }
    };
    Agreement {
        outcome,
        summary,
        threshold,
        dimensions,
        worst: worst.map(|(name, _, deviation)| (name, deviation)),
        rows,
    }
}

/// The differences that [`judge_engines`] judges: for each quantity one at each dimension and time.
pub fn engine_deviations(one: &[Measured<'_>], other: &[Measured<'_>]) -> Vec<(Row, Vec<Deviation>)> {
    engine_courses(one, other)
        .into_iter()
        .map(|(row, looks)| (row, looks.iter().flatten().map(Look::deviation).collect()))
        .collect()
}

/// Every quantity at each dimension and time, one engine less the other. Empty with one replica.
fn engine_courses(one: &[Measured<'_>], other: &[Measured<'_>]) -> Vec<(Row, Vec<Vec<Look>>)> {
    let runs = || one.iter().chain(other);
    let replicas = runs().map(|m| m.simulated.len()).min().unwrap_or(0);
    let times = runs().flat_map(|m| m.simulated.iter().map(|t| t.times.len())).min().unwrap_or(0);
    let Some(shape) = one.iter().find_map(|m| m.simulated.first()).map(|t| t.shape).filter(|_| replicas > 1) else {
        return Vec::new();
    };
    let course = |(quantity, row): (Option<Quantity>, Row)| {
        let at_dimensions = one.iter().zip(other).map(|(one, other)| {
            let samples = |measured: &Measured<'_>| -> Vec<Sample> {
                let at = |t: usize| -> Vec<f64> {
                    measured.simulated.iter().map(|run| value(shape, &run.rows[t], quantity)).collect()
                };
                steady(&(0..times).map(|t| Sample::of(&at(t))).collect::<Vec<_>>())
            };
            let pairs = samples(one).into_iter().zip(samples(other)).enumerate();
            let looks = pairs.map(|(t, (a, b))| Look {
                time: one.simulated[0].times[t],
                value: a.mean - b.mean,
                parts: [a, b],
                rounding: ROUNDING * (1.0 + b.mean.abs()),
            });
            looks.collect()
        });
        (row, at_dimensions.collect())
    };
    compared(shape).into_iter().map(course).collect()
}

/// Why there is no verdict where a deviation is no number.
fn not_finite(name: &str, found: &Deviation) -> String {
    format!(
        "the deviation of {name} at tau = {} is {} +- {}: where a number or its error is missing there is nothing to judge",
        found.time, found.value, found.standard_error
    )
}

impl Sample {
    /// The mean of independent values.
    fn of(values: &[f64]) -> Self {
        let (mean, error) = mean_and_error(values.iter().copied());
        Self { mean, variance: error * error, freedom: values.len() as f64 - 1.0 }
    }
}

/// Simulation less theory, replica by replica.
fn differences(measured: &Measured<'_>, shape: Shape, t: usize, quantity: Option<Quantity>) -> Vec<f64> {
    let theory = |i: usize| measured.predicted[if measured.predicted.len() == 1 { 0 } else { i }];
    let runs = measured.simulated.iter().enumerate();
    runs.map(|(i, run)| value(shape, &run.rows[t], quantity) - value(shape, &theory(i).rows[t], quantity)).collect()
}

/// The theory's own variance: shared by all dimensions, so it counts once.
fn theory_variance(measured: &[Measured<'_>], shape: Shape, t: usize, quantity: Option<Quantity>) -> Sample {
    let variance = largest_size(
        measured
            .iter()
            .filter_map(|m| match quantity {
                Some(quantity) => Some((m.scrambles, m.predicted_error?.rows.get(t)?[shape.index(quantity)])),
                None => Some((m.scrambles, *m.predicted_trace_error?.get(t)?)),
            })
            // One scramble has no error (NaN), and the verdict says so; of several one that is missing is not zero.
            .filter(|(scrambles, error)| *scrambles > 1 || error.is_finite())
            .map(|(_, error)| error * error),
    );
    let scrambles = measured.iter().map(|m| m.scrambles).min().unwrap_or(1);
    Sample { mean: 0.0, variance, freedom: (scrambles as f64 - 1.0).max(1.0) }
}

/// Raises a variance that is by chance smaller than those around it to their mean: among hundreds of
/// times, the variance of a few replicas is sure to be much too small at some.
fn steady(samples: &[Sample]) -> Vec<Sample> {
    /// Recorded times to either side.
    const REACH: usize = 2;
    (0..samples.len())
        .map(|t| {
            let around = &samples[t.saturating_sub(REACH)..(t + REACH + 1).min(samples.len())];
            let mean = around.iter().map(|s| s.variance).sum::<f64>() / around.len() as f64;
            Sample { variance: larger(samples[t].variance, mean), ..samples[t] }
        })
        .collect()
}

/// Single precision, in which keys are held: relative differences below this are no deviation.
const ROUNDING: f64 = 1e-6;

/// The deviation `value` whose variance is that of independent parts; what is within `rounding` is
/// none.
fn deviation(time: f64, value: f64, parts: [Sample; 2], rounding: f64) -> Deviation {
    let variance: f64 = parts.iter().map(|p| p.variance).sum();
    if value.abs() <= rounding {
        return Deviation { time, value, standard_error: variance.sqrt(), standard_errors: 0.0 };
    }
    let error = larger(variance.sqrt(), rounding);
    let freedom = if variance == 0.0 {
        f64::INFINITY
    } else {
        variance * variance / parts.iter().map(|p| p.variance * p.variance / p.freedom).sum::<f64>()
    };
    Deviation { time, value, standard_error: error, standard_errors: normal_deviate(value / error, freedom) }
}

/// The normal deviate as improbable as a Student `t` with `freedom` degrees.
fn normal_deviate(t: f64, freedom: f64) -> f64 {
    // Neither a deviation that is no number, nor one whose error is none, has a deviate.
    if t.is_nan() || freedom.is_nan() {
        return f64::NAN;
    }
    let magnitude = t.abs();
    let tail = match StudentsT::new(0.0, 1.0, freedom) {
        Ok(student) if freedom < 1e4 => student.sf(magnitude),
        _ => return t,
    };
    // Beyond double precision's tail probabilities the deviate itself is reported.
    let deviate = if tail > 1e-300 { Normal::standard().inverse_cdf(tail).abs() } else { magnitude.min(37.0) };
    deviate.copysign(t)
}

/// The Student `t` with `freedom` degrees that is as improbable as the normal `deviate > 0`: the inverse of
/// [`normal_deviate`]; infinite beyond `1e15`.
fn student_deviate(deviate: f64, freedom: f64) -> f64 {
    let (mut low, mut high) = (deviate.ln(), 1e15_f64.ln());
    if normal_deviate(high.exp(), freedom) < deviate {
        return f64::INFINITY;
    }
    while high - low > 1e-9 {
        let middle = 0.5 * (low + high);
        if normal_deviate(middle.exp(), freedom) < deviate { low = middle } else { high = middle }
    }
    high.exp()
}

/// Weights `w` of the intercept `a = sum w_D delta_D` of a line in `1/D`, least squares weighted by `D`.
/// They sum to 1, and `sum w_D / D = 0`.
fn intercept_weights(dimensions: &[usize]) -> Option<Vec<f64>> {
    if dimensions.len() < 2 {
        return None;
    }
    let p: Vec<f64> = dimensions.iter().map(|&d| d as f64).collect();
    let sum = |f: &dyn Fn(f64) -> f64| p.iter().map(|&d| f(d)).sum::<f64>();
    // With weights D and abscissa 1/D: sum p = s, sum p x = n, sum p x^2 = sxx.
    let (s, n, sxx) = (sum(&|d| d), p.len() as f64, sum(&|d| 1.0 / d));
    let determinant = s * sxx - n * n;
    Some(p.iter().map(|&d| d * (sxx - n / d) / determinant).collect())
}

/// The slope `b` of a line through `means`, unweighted.
fn slope(dimensions: &[usize], means: &[f64]) -> Option<f64> {
    if dimensions.len() < 2 {
        return None;
    }
    let n = dimensions.len() as f64;
    let x: Vec<f64> = dimensions.iter().map(|&d| 1.0 / d as f64).collect();
    let mean_x = x.iter().sum::<f64>() / n;
    let mean_y = means.iter().sum::<f64>() / n;
    let top: f64 = x.iter().zip(means).map(|(x, y)| (x - mean_x) * (y - mean_y)).sum();
    let bottom: f64 = x.iter().map(|x| (x - mean_x).powi(2)).sum();
    Some(top / bottom)
}

#[cfg(test)]
mod tests {
    use super::*;
    use headflow_model::random::{Purpose, Stream};

    const SHAPE: Shape = Shape { heads: 2, features: 1 };

    fn theory() -> Trajectory {
        let times: Vec<f64> = (0..20).map(f64::from).collect();
        let rows = times.iter().map(|t| vec![1.0 - 0.02 * t; SHAPE.width()]).collect();
        Trajectory { shape: SHAPE, times, rows }
    }

    /// Replicas around `theory + offset + bias / D`, with spread `1 / sqrt(D)`.
    fn replicas(seed: u64, dimension: usize, offset: f64, bias: f64) -> Vec<Trajectory> {
        (0..8)
            .map(|replica| {
                let stream = Stream::new(seed, Purpose::Test, replica);
                let mut run = theory();
                for (t, row) in run.rows.iter_mut().enumerate().skip(1) {
                    let mut z = vec![0.0f32; row.len()];
                    stream.normals(dimension as u64, t as u32, 0, &mut z);
                    for (v, z) in row.iter_mut().zip(z) {
                        *v += offset + bias / dimension as f64 + f64::from(z) / (dimension as f64).sqrt();
                    }
                }
                run
            })
            .collect()
    }

    fn verdict(seed: u64, dimensions: &[usize], offset: f64, bias: f64) -> Agreement {
        let theory = theory();
        let runs: Vec<_> = dimensions.iter().map(|&d| (d, replicas(seed, d, offset, bias))).collect();
        judge(&measured_of(&runs, &theory), true)
    }

    fn measured_of<'a>(runs: &'a [(usize, Vec<Trajectory>)], theory: &'a Trajectory) -> Vec<Measured<'a>> {
        runs.iter()
            .map(|(d, runs)| Measured {
                dimension: *d,
                simulated: runs.iter().collect(),
                predicted: vec![theory],
                predicted_error: None,
                predicted_trace_error: None,
                scrambles: 8,
            })
            .collect()
    }

    /// Of 100 correct theories with a `1/D` bias of many standard errors, nearly all pass.
    #[test]
    fn a_bias_of_order_one_over_d_is_no_disagreement() {
        let passed = (0..100).filter(|&s| verdict(s, &[500, 1000], 0.0, 60.0).outcome == Outcome::Agree).count();
        assert_eq!(passed, 100);
        let rows = verdict(1, &[500, 1000], 0.0, 60.0).rows;
        assert!(rows[0].at_dimensions[0].standard_errors > THRESHOLD, "the bias alone is significant");
    }

    /// An offset that does not vanish with `D` is found.
    #[test]
    fn a_wrong_theory_disagrees() {
        for seed in 0..20 {
            assert_eq!(verdict(seed, &[500, 1000], 1.0, 0.0).outcome, Outcome::Disagree);
            assert_eq!(verdict(seed, &[250, 500, 1000], 1.0, 20.0).outcome, Outcome::Disagree);
        }
    }

    #[test]
    fn one_dimension_or_one_replica_cannot_tell() {
        let one = verdict(1, &[500], 0.0, 0.0);
        assert_eq!(one.outcome, Outcome::Undetermined);
        assert!(one.summary.contains("--dimensions 500,1000"), "{}", one.summary);
        let theory = theory();
        let run = replicas(1, 500, 0.0, 0.0);
        let single = Measured {
            dimension: 500,
            simulated: vec![&run[0]],
            predicted: vec![&theory],
            predicted_error: None,
            predicted_trace_error: None,
            scrambles: 8,
        };
        assert_eq!(judge(&[single], true).outcome, Outcome::Undetermined);
    }

    #[test]
    fn the_intercept_is_that_of_an_exact_line() {
        let dimensions = [250, 500, 2000];
        let means = dimensions.map(|d| 0.7 + 30.0 / d as f64);
        let weights = intercept_weights(&dimensions).unwrap();
        assert!((weights.iter().sum::<f64>() - 1.0).abs() < 1e-12);
        let a: f64 = weights.iter().zip(means).map(|(w, y)| w * y).sum();
        assert!((a - 0.7).abs() < 1e-12);
        assert!((slope(&dimensions, &means).unwrap() - 30.0).abs() < 1e-9);
        // Two dimensions leave no choice: a = (D2 y2 - D1 y1) / (D2 - D1).
        assert_eq!(intercept_weights(&[500, 1000]).unwrap(), [-1.0, 2.0]);
    }

    /// Two sets of replicas of one law agree; an offset at one dimension is found.
    #[test]
    fn engines_of_one_law_agree() {
        let theory = theory();
        let runs = |seed: u64, offset: f64| {
            vec![(500, replicas(seed, 500, 0.0, 60.0)), (1000, replicas(seed, 1000, offset, 60.0))]
        };
        let judged = |seed: u64, offset: f64| {
            let (one, other) = (runs(seed, 0.0), runs(seed + 1000, offset));
            judge_engines(&measured_of(&one, &theory), &measured_of(&other, &theory), true)
        };
        for seed in 0..50 {
            assert_eq!(judged(seed, 0.0).outcome, Outcome::Agree);
            assert_eq!(judged(seed, 1.0).outcome, Outcome::Disagree);
        }
    }

    /// What a term in `1/D^2` leaves is not called a disagreement, and what exceeds it is.
    #[test]
    fn a_term_of_order_one_over_d_squared_is_no_disagreement() {
        // H = 2, F = 1: |c| = 24 |b|.
        for dimensions in [&[16, 32][..], &[16, 32, 64]] {
            let curve = |d: usize| 24.0 * 300.0 / (d * d) as f64;
            let left: f64 =
                intercept_weights(dimensions).unwrap().iter().zip(dimensions).map(|(w, &d)| w * curve(d)).sum();
            assert!((remainder(SHAPE, dimensions, -300.0) - left.abs()).abs() < 1e-12);
        }
        assert!((remainder(SHAPE, &[16, 32], 300.0) - 24.0 * 300.0 / 512.0).abs() < 1e-12);
        let theory = theory();
        for seed in 0..20 {
            let judged = |offset: f64| {
                let at = |d: usize| (d, replicas(seed, d, offset + 6000.0 / (d * d) as f64, 300.0));
                judge(&measured_of(&[at(16), at(32)], &theory), true)
            };
            let curved = judged(0.0);
            assert_eq!(curved.outcome, Outcome::Undetermined, "{}", curved.summary);
            assert!(curved.summary.contains("larger --dimensions"), "{}", curved.summary);
            assert_eq!(judged(100.0).outcome, Outcome::Disagree);
        }
    }

    /// A verdict that could not have been otherwise is none: two or three replicas, right or wrong.
    #[test]
    fn replicas_too_few_to_disagree_cannot_tell() {
        let theory = theory();
        for seed in 0..20 {
            let judged = |count: usize, offset: f64| {
                let runs = |d: usize| (d, replicas(seed, d, offset, 0.0).into_iter().take(count).collect());
                judge(&measured_of(&[runs(500), runs(1000)], &theory), true)
            };
            for (count, offset) in [(2, 0.0), (2, 3.0), (3, 0.0), (3, 3.0)] {
                let verdict = judged(count, offset);
                assert_eq!(verdict.outcome, Outcome::Undetermined, "{}", verdict.summary);
                assert!(verdict.summary.contains("use more --replicas"), "{}", verdict.summary);
            }
            assert_eq!(judged(4, 0.0).outcome, Outcome::Agree);
            assert_eq!(judged(4, 100.0).outcome, Outcome::Disagree);
        }
    }

    /// Replicas as skewed as the simulations' and more, dependent in time as theirs: no more deviations
    /// exceed 3 than the law says, and no more experiments a limit for one false alarm in ten, with
    /// few replicas and many, two dimensions and three. The normal law in place of Student's would not hold.
    #[test]
    fn the_stated_level_holds_for_skewed_replicas() {
        const EXPERIMENTS: usize = 400;
        let theory = theory();
        let width = SHAPE.width();
        // Lognormal with skewness 3 scale = 0.95 at D = 100, falling as 1/sqrt(D), and spread 1/sqrt(D).
        let skewed = |experiment: usize, dimension: usize, replica: usize| -> Trajectory {
            let stream = Stream::new(7 + experiment as u64, Purpose::Test, replica as u32);
            let root = (dimension as f64).sqrt();
            let scale = 3.0 / root;
            let mut run = theory.clone();
            let (mut state, mut z) = (vec![0.0f64; width], vec![0.0f32; width]);
            for (t, row) in run.rows.iter_mut().enumerate() {
                stream.normals(dimension as u64, t as u32, 0, &mut z);
                let (kept, fresh) = if t == 0 { (0.0, 1.0) } else { (0.7, (1.0f64 - 0.49).sqrt()) };
                for ((v, z), s) in row.iter_mut().zip(&z).zip(&mut state) {
                    *s = kept * *s + fresh * f64::from(*z);
                    *v += ((scale * *s).exp() - (0.5 * scale * scale).exp()) / scale / root + 60.0 / dimension as f64;
                }
            }
            run
        };
        // A rate over experiments with its standard error.
        let rate = |values: Vec<f64>| mean_and_error(values.iter().copied());
        for (count, dimensions) in
            [(4, &[100, 200][..]), (8, &[100, 200]), (20, &[100, 200]), (8, &[100, 200, 400]), (20, &[100, 200, 400])]
        {
            let (mut beyond, mut normal, mut alarms) = (Vec::new(), Vec::new(), Vec::new());
            for experiment in 0..EXPERIMENTS {
                let runs: Vec<_> = dimensions
                    .iter()
                    .map(|&d| (d, (0..count).map(|replica| skewed(experiment, d, replica)).collect()))
                    .collect();
                let looks: Vec<Deviation> =
                    deviations(&measured_of(&runs, &theory)).into_iter().flat_map(|(_, looks)| looks).collect();
                let share = |of: &dyn Fn(&Deviation) -> f64| {
                    looks.iter().filter(|d| of(d).abs() > 3.0).count() as f64 / looks.len() as f64
                };
                beyond.push(share(&|d| d.standard_errors));
                normal.push(share(&|d| d.value / d.standard_error));
                let limit = Normal::standard().inverse_cdf(0.05 / looks.len() as f64).abs();
                alarms.push(f64::from(u8::from(looks.iter().any(|d| d.standard_errors.abs() > limit))));
            }
            let stated = 2.0 * Normal::standard().sf(3.0);
            let ((beyond, error), (normal, normal_error)) = (rate(beyond), rate(normal));
            assert!(
                beyond < stated + 4.0 * error,
                "{count} replicas, D = {dimensions:?}: {beyond} +- {error} beyond 3"
            );
            if count == 4 {
                assert!(normal > stated + 4.0 * normal_error, "the test could not fail: {normal} +- {normal_error}");
            }
            let alarms = rate(alarms).0;
            let most = 0.1 + 4.0 * (0.1f64 * 0.9 / EXPERIMENTS as f64).sqrt();
            assert!(alarms < most, "{count} replicas, D = {dimensions:?}: {alarms} false alarms");
        }
    }

    /// Rounding of single precision is no deviation, however small the spread.
    #[test]
    fn rounding_is_no_deviation() {
        let zero = Sample { mean: 0.0, variance: 0.0, freedom: 7.0 };
        assert_eq!(deviation(0.0, 4.6e-5, [zero, zero], ROUNDING * 920.0).standard_errors, 0.0);
        assert!(deviation(0.0, 4.6e-3, [zero, zero], ROUNDING * 920.0).standard_errors > THRESHOLD);
    }

    /// A number that is none, in a run, in the theory or in its error, is no agreement and no disagreement; one scramble,
    /// which has no error, is left out as before.
    #[test]
    fn what_is_no_number_is_not_judged() {
        let (theory, width) = (theory(), SHAPE.width());
        let errors = |value: f64| Trajectory { rows: vec![vec![value; width]; theory.times.len()], ..theory.clone() };
        let judged = |error: f64, scrambles: usize, spoil: Option<f64>| {
            let mut runs = vec![(500, replicas(1, 500, 0.0, 0.0)), (1000, replicas(1, 1000, 0.0, 0.0))];
            if let Some(value) = spoil {
                runs[1].1[3].rows[7][2] = value;
            }
            let (errors, trace) = (errors(error), vec![error; theory.times.len()]);
            let mut measured = measured_of(&runs, &theory);
            for m in &mut measured {
                (m.predicted_error, m.predicted_trace_error, m.scrambles) =
                    (Some(&errors), Some(&trace[..]), scrambles);
            }
            let other = [(500, replicas(77, 500, 0.0, 0.0)), (1000, replicas(77, 1000, 0.0, 0.0))];
            let engines = judge_engines(&measured, &measured_of(&other, &theory), true);
            (judge(&measured, true), engines)
        };
        let (sane, engines) = judged(1e-3, 8, None);
        assert_eq!((sane.outcome, engines.outcome), (Outcome::Agree, Outcome::Agree));
        assert_eq!(judged(f64::NAN, 1, None).0.outcome, Outcome::Agree);
        for value in [f64::NAN, f64::INFINITY] {
            let missing = judged(value, 8, None).0;
            assert_eq!(missing.outcome, Outcome::Undetermined, "an error of {value}: {}", missing.summary);
            let (theory, engines) = judged(1e-3, 8, Some(value));
            for found in [theory, engines] {
                assert_eq!(found.outcome, Outcome::Undetermined, "a run at {value}: {}", found.summary);
                assert!(found.summary.contains("nothing to judge"), "{}", found.summary);
            }
        }
    }

    #[test]
    fn the_limit_allows_for_the_number_of_looks() {
        assert!((limit(1) - THRESHOLD).abs() < 1e-9);
        // P(z > 5.451) = P(z > 4) / 1264.
        assert!((limit(1264) - 5.450).abs() < 2e-2, "{}", limit(1264));
        assert!(limit(2000) > limit(200));
    }

    #[test]
    fn student_deviates_are_converted() {
        // P(t_7 > 4.785) = 0.001 = P(z > 3.090).
        assert!((normal_deviate(4.785_29, 7.0) - 3.090_23).abs() < 1e-3);
        assert!((normal_deviate(-2.5, 1e9) + 2.5).abs() < 1e-12);
        assert!((student_deviate(3.090_23, 7.0) - 4.785_29).abs() < 1e-3);
        // One degree of freedom is Cauchy's law: P(t > x) = 1 / (pi x) far out.
        let tail = Normal::standard().sf(5.5);
        let cauchy = 1.0 / (std::f64::consts::PI * tail);
        assert!((student_deviate(5.5, 1.0) / cauchy - 1.0).abs() < 1e-6);
        assert_eq!(student_deviate(30.0, 1.0), f64::INFINITY);
    }
}
