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
//! A single deviation of a right theory exceeds [`THRESHOLD`] standard errors with probability
//! `6e-5`. The largest of `N` deviations is given the same chance, so its limit is somewhat higher,
//! 5.5 for two thousand (Bonferroni: it holds however they depend on each other). The verdict is
//! `agree` when no quantity at any time exceeds that limit. With one dimension `a` and `b / D`
//! cannot be told apart, and the verdict is `undetermined`.

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
    /// A deviation above the threshold that no `1/D` bias explains.
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
    let times =
        measured.iter().flat_map(|m| m.simulated.iter().chain(&m.predicted).map(|t| t.times.len())).min().unwrap_or(0);
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
    let weights = intercept_weights(&dimensions);
    let mut rows = Vec::new();
    let mut comparisons = 0;
    for (quantity, mut row) in compared(shape) {
        let differences: Vec<Vec<Vec<f64>>> =
            measured.iter().map(|m| (0..times).map(|t| differences(m, shape, t, quantity)).collect()).collect();
        let largest_deviation = |samples: &[Sample]| {
            let deviations = steady(samples).into_iter().enumerate().map(|(t, sample)| {
                let theory = theory_variance(measured, shape, t, quantity);
                let size = value(shape, &measured[0].predicted[0].rows[t], quantity).abs();
                deviation(first.times[t], sample.mean, [sample, theory], ROUNDING * (1.0 + size))
            });
            let counted: Vec<Deviation> = deviations.collect();
            let count = counted.iter().filter(|d| d.standard_errors != 0.0).count();
            let largest =
                counted.into_iter().max_by(|a, b| a.standard_errors.abs().total_cmp(&b.standard_errors.abs()));
            (largest, count)
        };
        let at_dimension = |d: &Vec<Vec<f64>>| -> Vec<Sample> { d.iter().map(|values| Sample::of(values)).collect() };
        row.at_dimensions = differences.iter().filter_map(|d| largest_deviation(&at_dimension(d)).0).collect();
        if let Some(weights) = &weights {
            // Replica by replica: the noise that the dimensions share is in every term.
            let intercepts: Vec<Sample> = (0..times)
                .map(|t| {
                    let of = |k: usize| weights.iter().zip(&differences).map(|(w, d)| w * d[t][k]).sum();
                    Sample::of(&(0..replicas).map(of).collect::<Vec<f64>>())
                })
                .collect();
            let (largest, count) = largest_deviation(&intercepts);
            (row.extrapolated, comparisons) = (largest, comparisons + count);
        }
        // The bias where it is largest, at the largest dimension.
        let biases = differences.last().map(at_dimension).unwrap_or_default();
        let at = (0..times).max_by(|&s, &t| biases[s].mean.abs().total_cmp(&biases[t].mean.abs()));
        row.bias_coefficient = at.and_then(|t| {
            let means: Vec<f64> = differences.iter().map(|d| Sample::of(&d[t]).mean).collect();
            slope(&dimensions, &means)
        });
        rows.push(row);
    }
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
    let threshold = limit(comparisons);
    if !size.is_finite() {
        return undetermined(not_finite(&name, &found), rows, None);
    }
    let (outcome, relation) =
        if size <= threshold { (Outcome::Agree, "within") } else { (Outcome::Disagree, "beyond") };
    let alone = if measured.iter().any(|m| m.scrambles < 2) {
        "; one scramble leaves the theory's own error out (use --scrambles 8)"
    } else {
        ""
    };
    let summary = format!(
        "extrapolated from D = {list} to infinity, the largest of {comparisons} deviations is {size:.2} standard \
         errors ({name} at tau = {}: {:+.2e} +- {:.1e}), {relation} the {threshold:.2} that a right theory may show among so many{alone}",
        (found.time * 1e6).round() / 1e6,
        found.value,
        found.standard_error
    );
    Agreement { outcome, summary, threshold, dimensions, worst, rows }
}

/// Judges two engines, which must have the same law at every dimension: differences of means, with no
/// bias to allow for.
///
/// The verdict is `agree` when none of the differences exceeds the limit for their number, as in
/// [`judge`].
pub fn judge_engines(one: &[Measured<'_>], other: &[Measured<'_>], complete: bool) -> Agreement {
    let dimensions: Vec<usize> = one.iter().map(|m| m.dimension).collect();
    let replicas = one.iter().chain(other).map(|m| m.simulated.len()).min().unwrap_or(0);
    let times = one.iter().chain(other).flat_map(|m| m.simulated.iter().map(|t| t.times.len())).min().unwrap_or(0);
    let mut rows = Vec::new();
    let mut comparisons = 0;
    let shape = one.iter().find_map(|m| m.simulated.first()).map(|t| t.shape);
    if let (Some(shape), true) = (shape, replicas > 1) {
        for (quantity, mut row) in compared(shape) {
            for (one, other) in one.iter().zip(other) {
                let samples = |measured: &Measured<'_>| -> Vec<Sample> {
                    let at = |t: usize| -> Vec<f64> {
                        measured.simulated.iter().map(|run| value(shape, &run.rows[t], quantity)).collect()
                    };
                    steady(&(0..times).map(|t| Sample::of(&at(t))).collect::<Vec<_>>())
                };
                let deviations = samples(one).into_iter().zip(samples(other)).enumerate().map(|(t, (a, b))| {
                    deviation(one.simulated[0].times[t], a.mean - b.mean, [a, b], ROUNDING * (1.0 + b.mean.abs()))
                });
                let counted: Vec<Deviation> = deviations.collect();
                comparisons += counted.iter().filter(|d| d.standard_errors != 0.0).count();
                row.at_dimensions.extend(
                    counted.into_iter().max_by(|a, b| a.standard_errors.abs().total_cmp(&b.standard_errors.abs())),
                );
            }
            rows.push(row);
        }
    }
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
            let (outcome, relation) =
                if size <= threshold { (Outcome::Agree, "within") } else { (Outcome::Disagree, "beyond") };
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
    }
}
