//! What a run will cost, from all fields of its completed spec, and its limits: looked at before any work.
//!
//! ```text
//! bytes, held at once      points      S N L (F + H) 4 of S scrambles, and 8 (3 H + 2 F) 64 L for each thread
//!                          records     PATH T W of each path, W = 1 + H F + H^2 + H numbers at each of T times, and DOCUMENT T W
//!                          keys        4 (H + L) D of each replica
//! operations, in all       steps       R D tau / gamma, each  B L (NUMBER + 4 H) D, or of the chain  B (10 L (F + H + 1) (1 + H / 4) + 4 H^3)
//!                          averages    N L (4 H (H + F) + WEIGHT H) for each evaluation
//! ```
//!
//! An operation takes about a nanosecond. What cannot be known is counted from below (the steps of a flow); what can, from
//! above. Work of hours shows its progress and can be interrupted at any time, so that only the hopeless is refused; the
//! few things that nothing interrupts are held to some seconds.

use headflow_model::{Activation, Bias, Cost, Error};
use headflow_sims::sgd::Engine;
use headflow_theory::flow::Method;

use crate::spec::{At, EvaluatorKind, Initial, Purpose, Spec};

/// Most operations of a run: months of one core, days of a large machine.
pub const MOST_OPERATIONS: f64 = 1e16;

/// Operations of a random normal number.
const NUMBER: f64 = 10.0;

/// Operations of a quasi-random normal number.
const QUASI_NUMBER: f64 = 20.0;

/// Operations of one weight of attention and its gradient.
const WEIGHT: f64 = 20.0;

/// Samples side by side in [`headflow_theory::quasi_monte_carlo`].
const LANES: f64 = 64.0;

/// Samples that one thread takes on, likewise.
const TASK: f64 = 16.0 * LANES;

/// Bytes for a number of a result document, its mean and its standard error: as values, and as text (measured: 350 to 540).
const DOCUMENT: f64 = 550.0;

/// Bytes for a number of one path among several: its own, and copies on the way to means and arrays (measured: 8 to 12).
const PATH: f64 = 24.0;

/// Evaluations of a flow, at the least.
const EVALUATIONS: f64 = 10.0;

/// Evaluations of one descent to a minimum, about.
const DESCENT: f64 = 100.0;

/// A part of the work.
#[derive(Debug, Clone, Copy)]
struct Part {
    /// The field that makes it so costly.
    field: &'static str,
    /// What would be cheaper.
    advice: &'static str,
    /// In all.
    cost: Cost,
    /// Operations that nothing interrupts.
    at_once: f64,
}

/// The sizes of a completed spec.
struct Sizes {
    heads: f64,
    features: f64,
    length: f64,
    /// Recorded times.
    times: f64,
    /// Numbers at each.
    width: f64,
    replicas: f64,
    scrambles: f64,
    points: f64,
    threads: f64,
    sampled: bool,
}

impl Sizes {
    fn of(spec: &Spec) -> Self {
        let (heads, features) = (spec.head_count() as f64, spec.theta.features() as f64);
        let times = match (&spec.times, spec.records) {
            (Some(times), _) => times.len(),
            (None, records) => records.unwrap_or(0),
        };
        Self {
            heads,
            features,
            length: spec.length as f64,
            times: times as f64,
            width: 1.0 + heads * features + heads * heads + heads,
            replicas: f64::from(spec.replicas),
            scrambles: spec.scrambles.unwrap_or(1) as f64,
            points: spec.points.unwrap_or(0) as f64,
            threads: rayon::current_num_threads() as f64,
            sampled: spec.evaluator == Some(EvaluatorKind::Qmc),
        }
    }

    /// Operations of one evaluation on one set of points; those of a quadrature are held to its own limits.
    fn evaluation(&self) -> f64 {
        let Self { heads, features, length, points, .. } = *self;
        if self.sampled { points * length * heads * (4.0 * (heads + features) + WEIGHT) } else { 0.0 }
    }

    /// `sets` sets of points held at once, and `evaluations` on each of the scrambles, `together` blocks at once.
    fn averages(&self, sets: f64, evaluations: f64, together: f64) -> Part {
        let Self { heads, features, length, points, scrambles, .. } = *self;
        if !self.sampled {
            return Part { field: "tolerance", advice: "", cost: Cost::default(), at_once: 0.0 };
        }
        let numbers = points * length * (heads + features);
        let scratch = together * 8.0 * LANES * length * (3.0 * heads + 2.0 * features);
        // One block of samples alone is too much of a sequence.
        let field = if 4.0 * LANES * length * (heads + features) + scratch > Cost::MOST_BYTES {
            "length"
        } else if 4.0 * numbers > Cost::MOST_BYTES {
            "points"
        } else {
            "scrambles"
        };
        Part {
            field,
            advice: "use fewer points, scrambles or heads, a shorter sequence, or --evaluator quadrature",
            cost: Cost {
                operations: scrambles * (QUASI_NUMBER * numbers + evaluations * self.evaluation()),
                bytes: sets * 4.0 * numbers + scratch,
            },
            at_once: 0.0,
        }
    }

    /// Paths that are held at once, and the documents of `routes` of them.
    fn records(&self, paths: f64, routes: f64) -> Part {
        let numbers = self.times * self.width;
        Part {
            field: if self.heads > self.times { "heads" } else { "records" },
            advice: "record fewer times, or use fewer heads, replicas or scrambles",
            cost: Cost { operations: 10.0 * paths * numbers, bytes: numbers * (PATH * paths + DOCUMENT * routes) },
            at_once: 0.0,
        }
    }

    /// The variables of a flow.
    fn variables(&self, spec: &Spec) -> f64 {
        let (h, f) = (self.heads, self.features);
        let second = if spec.gamma > 0.0 { h * (h + 1.0) / 2.0 } else { h * h };
        h * f + second + if spec.attention().bias == Bias::Trained { h } else { 0.0 }
    }

    /// What the solver holds of `together` flows at once.
    fn solver(&self, spec: &Spec, together: f64) -> Part {
        let n = self.variables(spec);
        let stiff = spec.method != Method::Tsit45;
        let each = 8.0 * 24.0 * n + if stiff { 8.0 * 4.0 * n * n } else { 0.0 };
        Part {
            field: if stiff { "method" } else { "heads" },
            advice: if stiff {
                "use --method tsit45, which holds no matrix of all variables, or fewer heads"
            } else {
                "use fewer heads"
            },
            cost: Cost { operations: 0.0, bytes: each * together },
            at_once: if stiff { n * n * n / 3.0 } else { 0.0 },
        }
    }

    /// `starts` flows on every scramble.
    fn flows(&self, spec: &Spec, starts: f64) -> Vec<Part> {
        let paths = starts * self.scrambles;
        vec![
            self.averages(self.scrambles, starts * EVALUATIONS, self.threads),
            self.solver(spec, self.scrambles.min(self.threads)),
            self.records(paths, 1.0),
        ]
    }

    /// SGD in `dimensions`, by `engines`.
    fn simulation(&self, spec: &Spec, dimensions: &[usize], engines: &[Engine]) -> Vec<Part> {
        let Self { heads, features, length, times, replicas, .. } = *self;
        let batch = spec.batch as f64;
        let last = spec.recorded_times().last().copied().unwrap_or(0.0);
        let test = spec.test_samples as f64 * length * heads * (2.0 * features + heads + 3.0 * NUMBER + WEIGHT);
        let losses = Part {
            field: "test_samples",
            advice: "use fewer test samples, or a shorter sequence",
            cost: Cost { operations: replicas * times * test, bytes: 0.0 },
            at_once: 0.0,
        };
        let mut parts = vec![losses];
        for engine in engines {
            for dimension in dimensions.iter().map(|&d| d as f64) {
                let steps = replicas * last * dimension / spec.gamma;
                let (step, bytes) = match engine {
                    Engine::Direct => (
                        batch * length * dimension * (NUMBER + 4.0 * heads),
                        4.0 * (dimension + LANES) * (heads * if batch > 1.0 { 2.0 } else { 1.0 } + length),
                    ),
                    Engine::Overlap => (
                        batch * (10.0 * length * (features + heads + 1.0) * (1.0 + heads / 4.0) + 4.0 * heads.powi(3)),
                        128.0 * (length + 8.0 * heads) * (features + 3.0 * heads + 4.0),
                    ),
                };
                let field = match (step > Cost::MOST_OPERATIONS, replicas * bytes > Cost::MOST_BYTES) {
                    (true, _) if batch > 1.0 => "batch",
                    (false, true) if bytes <= Cost::MOST_BYTES => "replicas",
                    (false, true) | (true, _) => "dimension",
                    _ => "tau",
                };
                parts.push(Part {
                    field,
                    advice: match engine {
                        Engine::Direct => {
                            "use a smaller dimension, batch or tau, fewer replicas, a larger gamma, or --engine overlap"
                        }
                        Engine::Overlap => {
                            "use a smaller tau, batch or length, fewer heads or replicas, or a larger gamma"
                        }
                    },
                    cost: Cost { operations: steps * step, bytes: replicas * bytes },
                    at_once: 0.0,
                });
                parts.push(self.records(replicas, 1.0));
            }
        }
        parts
    }

    /// A Hessian in `n` coordinates for every scramble.
    fn hessian(&self, n: f64) -> Part {
        Part {
            field: "heads",
            advice: "use fewer heads or scrambles",
            cost: Cost {
                operations: self.scrambles * 2.0 * n * self.evaluation(),
                bytes: 8.0 * n * n * (2.0 * self.scrambles + 6.0),
            },
            at_once: 0.0,
        }
    }
}

/// The parts of a completed spec's work.
fn parts(spec: &Spec, purpose: Purpose) -> Vec<Part> {
    let sizes = Sizes::of(spec);
    let Sizes { heads, features, replicas, scrambles, threads, .. } = sizes;
    let dimensions = spec.all_dimensions();
    match purpose.of_cell() {
        // Held to the limits of quadrature.
        Purpose::Bayes => Vec::new(),
        // One set of points after the other.
        Purpose::Loss => {
            let part = sizes.averages(1.0, 1.0, threads.min((sizes.points / TASK).ceil()));
            // It shows no progress.
            vec![Part { at_once: part.cost.operations, ..part }]
        }
        Purpose::Flow => sizes.flows(spec, 1.0),
        Purpose::Stages if spec.engine.is_none() => sizes.flows(spec, 1.0),
        Purpose::Simulate | Purpose::Stages => sizes.simulation(spec, &dimensions, spec.engines()),
        Purpose::Compare => {
            let starts = if spec.initial == Initial::Random { replicas * dimensions.len() as f64 } else { 1.0 };
            let mut parts = sizes.flows(spec, starts);
            parts.extend(sizes.simulation(spec, &dimensions, spec.engines()));
            parts
        }
        Purpose::Stability => {
            let mut parts = vec![sizes.averages(scrambles, 1.0, threads)];
            // The keys of the unspecialised points span no more than one direction beside the spikes.
            let columns = if spec.at == Some(At::Unspecialised) { heads.min(2.0) } else { heads };
            let all = heads * (features + columns + 1.0);
            parts.push(sizes.hessian(all.min(headflow_theory::stability::MAX_COORDINATES as f64)));
            if spec.at == Some(At::Plateaus) {
                parts.extend(sizes.flows(spec, 1.0));
            }
            parts
        }
        Purpose::Optimum | Purpose::Phase(_) => {
            let starts = spec.starts.unwrap_or(1) as f64;
            let variables = heads * (features + 2.0 * heads + 1.0);
            vec![
                sizes.averages(scrambles, starts / scrambles * DESCENT, threads),
                Part {
                    field: "starts",
                    advice: "use fewer starts or heads",
                    // Each may find a minimum of its own.
                    cost: Cost { operations: 0.0, bytes: starts * variables * DOCUMENT },
                    at_once: 0.0,
                },
            ]
        }
        Purpose::Prune => {
            let trained = spec.m.is_none();
            let mut parts = match spec.engine {
                _ if !trained => Vec::new(),
                Some(_) => sizes.simulation(spec, &dimensions, spec.engines()),
                None => {
                    let starts = if spec.initial == Initial::Random { replicas } else { 1.0 };
                    let mut parts = sizes.flows(spec, starts);
                    parts.push(sizes.solver(spec, starts.min(threads)));
                    parts
                }
            };
            let systems = if spec.engine.is_some() || spec.initial == Initial::Random { replicas } else { 1.0 };
            // A sum over the pairs of the heads that stay; bayes-softmax takes a quadrature for each set, which is more.
            let removed = spec.most_removed.unwrap_or(0) as f64;
            let sets =
                headflow_theory::pruning::sets(spec.head_count(), spec.subsets, spec.most_removed.unwrap_or(0)) as f64;
            let of_set = if spec.attention == Activation::BayesSoftmax { 1e5 } else { heads * heads };
            parts.push(Part {
                field: "subsets",
                advice: "take fewer subsets, or remove fewer heads (--most-removed)",
                cost: Cost {
                    operations: systems * sets * of_set,
                    bytes: spec.subsets as f64 * (24.0 * heads + 64.0) + systems * removed * 4.0 * DOCUMENT,
                },
                at_once: 0.0,
            });
            parts
        }
    }
}

/// Refuses a completed spec whose run would hold more than `most_bytes`, do more than [`MOST_OPERATIONS`], or more than
/// [`Cost::MOST_OPERATIONS`] of which nothing interrupts it.
///
/// # Errors
/// [`Error::TooCostly`]: the field that makes it so, what it needs, and what would be cheaper.
pub fn check(spec: &Spec, purpose: Purpose, most_bytes: f64) -> Result<(), Error> {
    within(&parts(spec, purpose), most_bytes)
}

fn within(parts: &[Part], most_bytes: f64) -> Result<(), Error> {
    for part in parts {
        Cost { operations: part.at_once, bytes: 0.0 }.check(part.field, part.advice)?;
    }
    let all = parts.iter().fold(Cost::default(), |sum, part| sum + part.cost);
    // What is refused is the sum; what is named, its largest part.
    let worst = |size: fn(&Part) -> f64| parts.iter().max_by(|a, b| size(a).total_cmp(&size(b)));
    if let Some(part) = worst(|part| part.cost.bytes) {
        let advice = format!("{}, or allow more with --memory", part.advice);
        Cost { operations: 0.0, ..all }.within(MOST_OPERATIONS, most_bytes, part.field, &advice)?;
    }
    if let Some(part) = worst(|part| part.cost.operations) {
        Cost { bytes: 0.0, ..all }.within(MOST_OPERATIONS, most_bytes, part.field, part.advice)?;
    }
    Ok(())
}

/// Refuses maps of the bias of synthetic values that would take too much: `cells` cells of `sequences` sequences with
/// `longest` tokens, whose keys and values have `sizes` numbers.
///
/// ```text
/// bytes       4 n L (3 K + 3 V), of which queries, keys and values are the most
/// operations  n L^2 (K + V) / 10 for each cell: products of matrices take less than others
/// ```
///
/// # Errors
/// As [`check`].
pub fn check_bias_maps(
    cells: usize,
    sequences: usize,
    longest: usize,
    sizes: [usize; 2],
    most_bytes: f64,
) -> Result<(), Error> {
    let numbers = sequences as f64 * longest as f64 * (sizes[0] as f64 + sizes[1] as f64);
    let part = Part {
        field: "lengths",
        advice: "use shorter or fewer sequences, or smaller keys and values",
        cost: Cost { operations: cells as f64 * numbers * longest as f64 / 10.0, bytes: 12.0 * numbers },
        at_once: 0.0,
    };
    within(&[part], most_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::phase::Quantity;

    fn completed(json: &str, purpose: Purpose) -> Spec {
        Spec::from_json(json, "test").and_then(|map| Spec::from_map(&map)).unwrap().complete(purpose).unwrap()
    }

    fn cost(json: &str, purpose: Purpose) -> Cost {
        parts(&completed(json, purpose), purpose).iter().fold(Cost::default(), |sum, part| sum + part.cost)
    }

    /// Every command with its defaults is far from the limits.
    #[test]
    fn defaults_pass() {
        for (json, purpose) in [
            ("{}", Purpose::Flow),
            (r#"{"m": [[1, 0], [0, 1]]}"#, Purpose::Loss),
            (r#"{"m": [[1, 0], [0, 1]], "evaluator": "qmc"}"#, Purpose::Loss),
            ("{}", Purpose::Simulate),
            (r#"{"engine": "overlap", "dimension": 1000000000, "tau": 20}"#, Purpose::Simulate),
            ("{}", Purpose::Compare),
            (r#"{"initial": "random"}"#, Purpose::Compare),
            ("{}", Purpose::Stability),
            (r#"{"at": "plateaus"}"#, Purpose::Stability),
            ("{}", Purpose::Stages),
            (r#"{"engine": "overlap", "replicas": 20, "initial": "random", "dimension": 100000}"#, Purpose::Stages),
            ("{}", Purpose::Bayes),
            ("{}", Purpose::Optimum),
            ("{}", Purpose::Phase(Quantity::OptimalLoss)),
            ("{}", Purpose::Prune),
            (r#"{"initial": "random", "replicas": 40, "heads": 8}"#, Purpose::Prune),
            (r#"{"heads": 64, "length": 100}"#, Purpose::Flow),
        ] {
            let spec = completed(json, purpose);
            assert_eq!(check(&spec, purpose, Cost::MOST_BYTES), Ok(()), "{json} {purpose:?}");
            assert!(cost(json, purpose).bytes < 0.5 * Cost::MOST_BYTES, "{json} {purpose:?}");
        }
    }

    /// What doubles, and what does not.
    #[test]
    fn costs_grow_with_what_makes_them() {
        let of = |json: &str| cost(json, Purpose::Simulate).operations;
        let one = of(r#"{"tau": 100, "test_samples": 2}"#);
        for (json, times) in [
            (r#"{"tau": 200, "test_samples": 2}"#, 2.0),
            (r#"{"tau": 100, "test_samples": 2, "replicas": 16}"#, 2.0),
            (r#"{"tau": 100, "test_samples": 2, "batch": 3}"#, 3.0),
            (r#"{"tau": 100, "test_samples": 2, "gamma": 0.5}"#, 2.0),
            // Twice the steps, each twice as long.
            (r#"{"tau": 100, "test_samples": 2, "dimension": 2000}"#, 4.0),
        ] {
            assert!((of(json) / one / times - 1.0).abs() < 0.01, "{json}: {}", of(json) / one);
        }
        // The chain's steps do not depend on D: half of what the others grow by.
        let chain = |d: usize| of(&format!(r#"{{"engine": "overlap", "test_samples": 2, "dimension": {d}}}"#));
        assert!((chain(2000) / chain(1000) / 2.0 - 1.0).abs() < 0.01);
        let points =
            |n: usize| cost(&format!(r#"{{"points": {n}, "times": [0], "scrambles": 3}}"#), Purpose::Flow).bytes;
        // Three scrambles of 2^20 points of 36 numbers, in single precision.
        assert!((points(1 << 21) - points(1 << 20) - 3.0 * 36.0 * 4.0 * (1u64 << 20) as f64).abs() < 1.0);
    }

    /// What is named is the largest part of what is too much; more memory lets it pass.
    #[test]
    fn the_largest_part_is_named() {
        let refused = |json: &str, bytes: f64| check(&completed(json, Purpose::Flow), Purpose::Flow, bytes);
        let many = r#"{"points": 4194304, "scrambles": 4, "times": [0]}"#;
        let error = refused(many, Cost::MOST_BYTES).unwrap_err();
        assert!(matches!(&error, Error::TooCostly { field, .. } if field == "scrambles"), "{error}");
        assert!(error.to_string().ends_with("or allow more with --memory"), "{error}");
        assert_eq!(refused(many, 4.0 * Cost::MOST_BYTES), Ok(()));
        let error = refused(r#"{"heads": 200, "records": 1000, "points": 64}"#, Cost::MOST_BYTES).unwrap_err();
        assert!(matches!(&error, Error::TooCostly { field, .. } if field == "records"), "{error}");
    }
}
