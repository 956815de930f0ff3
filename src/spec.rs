//! One experiment, as a JSON document whose every field is also a command-line flag.
//!
//! [`FIELDS`] is the one list of fields: flags, help texts, defaults, the check for unknown names and who
//! reads what come from it. A [`Spec`] holds what was given; [`Spec::complete`] fills in what was not, so that a
//! completed spec says everything about a run and gives the same numbers when it is run again. What is given
//! and not read is refused.

use headflow_model::{
    Activation, Aggregation, Attention, Bias, Error, OrderParameters, Task, Theta, Watch, biases, largest,
};
use headflow_sims::ensemble;
use headflow_sims::sgd::{Engine, Sgd, Start};
use headflow_theory::evaluators::Averages;
use headflow_theory::flow::{self, Event, Method};
use headflow_theory::moments::Evaluator;
use headflow_theory::quadrature::{Quadrature, check_tolerance};
use headflow_theory::quasi_monte_carlo::QuasiMonteCarlo;
use headflow_theory::settled::{self, Settled};
use headflow_theory::stages::Criteria;
use nalgebra::DMatrix;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::json;
use crate::reading as by;
pub use crate::reading::{NAMES, Purpose, Reader, Rule, commands};

/// What a field's flag accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A whole number, in any form that is exact: `1000`, `1e3`, `1000.0`.
    Count,
    /// Whole numbers, likewise.
    Counts,
    /// A number.
    Number,
    /// A word.
    Word,
    /// Numbers: `0,10,20` or a JSON array.
    List,
    /// Rows of numbers: `0.1,0.2;0.3,0.4` or a JSON array of arrays.
    Matrix,
    /// A distribution: `flip:1.8,1.5`, `gaussian:mean=1,0:sd=0.5,1.5`, `sphere:nu=2:features=3`, or JSON.
    Theta,
    /// `head,feature,value`.
    Alignment,
}

/// A field of a spec.
#[derive(Debug, Clone, Copy)]
pub struct Field {
    /// Its name in JSON; the flag is the same with dashes.
    pub name: &'static str,
    /// What it holds.
    pub kind: Kind,
    /// Where it belongs in the help.
    pub group: &'static str,
    /// One line of help, default included.
    pub help: &'static str,
    /// Who reads it, and when.
    pub rules: &'static [Rule],
}

const fn field(
    name: &'static str,
    kind: Kind,
    group: &'static str,
    help: &'static str,
    rules: &'static [Rule],
) -> Field {
    Field { name, kind, group, help, rules }
}

const TASK: &str = "Task and attention";
const LEARNING: &str = "Learning and start";
const TIME: &str = "Time";
const POINT: &str = "Point (loss, stability, prune)";
const STAGES: &str = "Stability and stages";
const PRUNING: &str = "Pruning";
const THEORY: &str = "Theory";
const SIMULATION: &str = "Simulation";

/// Every field, in the order of the help.
pub const FIELDS: &[Field] = &[
    field("length", Kind::Count, TASK, "Tokens L, at least 2 [default: 6]", by::TASK),
    field("heads", Kind::Count, TASK, "Heads H [default: rows of m0 or m, else 4]", by::HEADS),
    field(
        "theta",
        Kind::Theta,
        TASK,
        "Hidden weights: flip:1.8,1.5 | gaussian:mean=1,0:sd=0.5,1.5 | sphere:nu=2:features=3 | JSON \
         (also discrete, full cov) [default: flip:1.8,1.5]",
        by::TASK,
    ),
    field("attention", Kind::Word, TASK, "softmax | softmax1 | bayes-softmax [default: softmax]", by::ATTENTION),
    field("bias", Kind::Word, TASK, "none | half-norm | trained [default: softmax none, others trained]", by::BIAS),
    field("aggregation", Kind::Word, TASK, "mean | sum over heads [default: softmax mean, others sum]", by::HEADS),
    field(
        "gamma",
        Kind::Number,
        LEARNING,
        "Learning rate, eta = gamma / D; 0 is gradient flow (theory only) [default: 1]",
        by::RATES,
    ),
    field("batch", Kind::Count, LEARNING, "Samples per step B [default: 1]", by::BATCH),
    field(
        "initial",
        Kind::Word,
        LEARNING,
        "given: keys with the overlaps m0, r0 | random: keys N(0, key_scale^2 / D) [default: given]",
        by::START,
    ),
    field(
        "m0",
        Kind::Matrix,
        LEARNING,
        "Initial alignments, H rows of F [default: a fixed pattern, 0.1 on feature 0, 0.03 on others]",
        by::OVERLAPS,
    ),
    field("r0", Kind::Matrix, LEARNING, "Initial overlaps, H x H [default: m0 m0^T + key_scale^2 I]", by::OVERLAPS),
    field("b0", Kind::List, LEARNING, "Initial trained biases, length H [default: 0]", by::BIASES),
    field("key_scale", Kind::Number, LEARNING, "Size of the initial keys outside the spikes [default: 0.5]", by::KEYS),
    field("tau", Kind::Number, TIME, "Last time, tau = gamma steps / D [default: 400]", by::LAST),
    field(
        "records",
        Kind::Count,
        TIME,
        "Evenly spaced times that are recorded, 0 and tau included [default: 101; stages, stability 401]",
        by::RECORDS,
    ),
    field("times", Kind::List, TIME, "The recorded times themselves, instead of tau and records", by::START),
    field(
        "until",
        Kind::Word,
        TIME,
        "Where a flow ends (flow, stages, prune, and phase of flows): time: at tau | settled: where nothing moves or grows by more than \
         stationary_tolerance; seen at tau / 100, or at twice, four times ... that, up to tau (then 40000 by default); records are even up to \
         tau / 100 and spaced in proportion to the time from there [default: time]",
        by::SETTLING,
    ),
    field("stop_loss", Kind::Number, TIME, "Stop a flow when its loss falls below this", by::EVENTS),
    field(
        "stop_alignment",
        Kind::Alignment,
        TIME,
        "Stop a flow when m[head][feature] crosses value: head,feature,value",
        by::EVENTS,
    ),
    field("m", Kind::Matrix, POINT, "Alignments, H rows of F", by::POINTS),
    field("r", Kind::Matrix, POINT, "Overlaps, H x H [default: m m^T]", by::POINTS),
    field("b", Kind::List, POINT, "Biases, length H [default: by the bias rule; trained: 0]", by::POINTS),
    field(
        "at",
        Kind::Word,
        STAGES,
        "stability: unspecialised (k = 0, and all heads equal) | point (m, r, b) | plateaus (of the flow) [default: \
         point with m, else unspecialised]",
        by::WHERE,
    ),
    field(
        "stationary_tolerance",
        Kind::Number,
        STAGES,
        "Drift that a stationary point may have, and drift and growth rate that a settled flow may have left, in units of \
         2 (1 - 1/L) / (H L) [default: 0.01]",
        by::STATIONARY,
    ),
    field(
        "on",
        Kind::Number,
        STAGES,
        "A head is on in feature f when |m_hf| / sqrt(E theta_f^2) reaches this [default: 0.5]",
        by::CRITERIA,
    ),
    field(
        "motion",
        Kind::Number,
        STAGES,
        "Motion within a plateau, as a fraction of the largest strength [default: 0.1]",
        by::CRITERIA,
    ),
    field(
        "contrast",
        Kind::Number,
        STAGES,
        "How much longer a plateau dwells than its surroundings [default: 2]",
        by::CRITERIA,
    ),
    field(
        "subsets",
        Kind::Count,
        PRUNING,
        "Most sets of heads that are removed at each number: all of them where there are no more, else random ones \
         [default: 256]",
        by::PRUNING,
    ),
    field("most_removed", Kind::Count, PRUNING, "Most heads that are removed [default: H - 1]", by::PRUNING),
    field(
        "prune_tolerances",
        Kind::List,
        PRUNING,
        "Fractions of the loss that removed heads may cost, for the number that can go [default: 0.01,0.05]",
        by::PRUNING,
    ),
    field(
        "evaluator",
        Kind::Word,
        THEORY,
        "quadrature: exact to tolerance, any L, no noise of SGD (gamma 0) | qmc: quasi-Monte Carlo, with standard errors \
         [default: loss, optimum and phase quadrature (loss of bayes-softmax with r of rank above 3 qmc); others qmc]",
        by::EVALUATOR,
    ),
    field(
        "tolerance",
        Kind::Number,
        THEORY,
        "Absolute error that a quadrature may make, 1e-13 to 1e-2 [default: 1e-8; bayes 1e-10; optimum 1e-7; phase 1e-6; prune 3e-4]",
        by::TOLERANCE,
    ),
    field(
        "points",
        Kind::Count,
        THEORY,
        "Quasi-Monte Carlo points a scramble, a power of two [default: 65536; compare 32768, with random keys \
         8192; stages, stability 16384; prune 8192; fewer for long sequences]",
        by::SAMPLES,
    ),
    field(
        "scrambles",
        Kind::Count,
        THEORY,
        "Independent scrambles, for standard errors [default: 8; loss 16; stability 4; stages, prune 1]",
        by::SAMPLES,
    ),
    field(
        "method",
        Kind::Word,
        THEORY,
        "tsit45 | bdf | tr-bdf2 | esdirk34 (the last three for stiff flows) [default: tsit45]",
        by::SOLVER,
    ),
    field("relative_tolerance", Kind::Number, THEORY, "Of a step [default: 1e-6]", by::SOLVER),
    field("absolute_tolerance", Kind::Number, THEORY, "Of a step [default: 1e-8]", by::SOLVER),
    field("max_steps", Kind::Count, THEORY, "Most steps of the solver [default: 100000]", by::SOLVER),
    field("starts", Kind::Count, THEORY, "Starts of a search for the lowest loss [default: 16; phase 6]", by::SEARCH),
    field(
        "engine",
        Kind::Word,
        SIMULATION,
        "direct: tokens in D dimensions, D >= H + F | overlap: the exact overlap chain, any D >= F + H + L at one \
         cost | both (compare) [default: direct; compare both]",
        by::ENGINES,
    ),
    field(
        "dimension",
        Kind::Count,
        SIMULATION,
        "Token dimension D of simulate, and of the random keys of prune [default: 1000]",
        by::DIMENSIONS,
    ),
    field(
        "dimensions",
        Kind::Counts,
        SIMULATION,
        "Token dimensions of compare [default: 500,1000], and of the escape times of stability [1e2, 1e4, 1e6]",
        by::DIMENSIONS,
    ),
    field("replicas", Kind::Count, SIMULATION, "Independent runs at each dimension [default: 8]", by::REPLICAS),
    field(
        "test_samples",
        Kind::Count,
        SIMULATION,
        "Fresh samples on which each loss is measured [default: 4096]",
        by::TESTS,
    ),
    field("seed", Kind::Count, SIMULATION, "Of all random numbers, scrambles included [default: 1]", by::SEED),
];

/// Fields of a `theta` document.
const THETA_FIELDS: &[&str] = &["kind", "nu", "mean", "sd", "cov", "points", "weights", "features"];

/// What computes population averages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EvaluatorKind {
    /// Exact to a tolerance.
    Quadrature,
    /// Quasi-Monte Carlo.
    Qmc,
}

/// Where stability is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum At {
    /// At `k = 0` and at the unspecialised fixed points.
    Unspecialised,
    /// At the point `m`, `r`, `b`.
    Point,
    /// At the plateaus of the flow.
    Plateaus,
}

/// Where the keys start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Initial {
    /// Keys with given overlaps.
    #[default]
    Given,
    /// Independent Gaussian keys, different in every replica.
    Random,
}

/// Where a flow ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Until {
    /// At the last recorded time.
    #[default]
    Time,
    /// Where it has settled, or at the last recorded time.
    Settled,
}

/// Which engines simulate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Engines {
    /// Tokens in `D` dimensions.
    Direct,
    /// The overlap chain.
    Overlap,
    /// One after the other.
    Both,
}

impl Engines {
    /// The engines, direct first.
    pub fn list(self) -> &'static [Engine] {
        match self {
            Self::Direct => &[Engine::Direct],
            Self::Overlap => &[Engine::Overlap],
            Self::Both => &[Engine::Direct, Engine::Overlap],
        }
    }
}

/// An experiment; see [`FIELDS`] for what each field means.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs)]
pub struct Spec {
    pub length: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub heads: Option<usize>,
    pub theta: Theta,
    pub attention: Activation,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bias: Option<Bias>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub aggregation: Option<Aggregation>,
    pub gamma: f64,
    pub batch: usize,
    pub initial: Initial,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub m0: Option<Vec<Vec<f64>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub r0: Option<Vec<Vec<f64>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub b0: Option<Vec<f64>>,
    pub key_scale: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tau: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub records: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub times: Option<Vec<f64>>,
    pub until: Until,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_loss: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_alignment: Option<(usize, usize, f64)>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub m: Option<Vec<Vec<f64>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub r: Option<Vec<Vec<f64>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub b: Option<Vec<f64>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at: Option<At>,
    pub stationary_tolerance: f64,
    pub on: f64,
    pub motion: f64,
    pub contrast: f64,
    pub subsets: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub most_removed: Option<usize>,
    pub prune_tolerances: Vec<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evaluator: Option<EvaluatorKind>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tolerance: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub points: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scrambles: Option<usize>,
    #[serde(with = "method_name")]
    pub method: Method,
    pub relative_tolerance: f64,
    pub absolute_tolerance: f64,
    pub max_steps: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub starts: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub engine: Option<Engines>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dimension: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dimensions: Option<Vec<usize>>,
    pub replicas: u32,
    pub test_samples: usize,
    pub seed: u64,
    /// Who completed it; no field of a document.
    #[serde(skip)]
    pub reader: Option<Reader>,
}

impl Default for Spec {
    fn default() -> Self {
        Self {
            length: 6,
            heads: None,
            theta: Theta::Flip { nu: vec![1.8, 1.5] },
            attention: Activation::Softmax,
            bias: None,
            aggregation: None,
            gamma: 1.0,
            batch: 1,
            initial: Initial::Given,
            m0: None,
            r0: None,
            b0: None,
            key_scale: 0.5,
            tau: None,
            records: None,
            times: None,
            until: Until::Time,
            stop_loss: None,
            stop_alignment: None,
            m: None,
            r: None,
            b: None,
            at: None,
            stationary_tolerance: 1e-2,
            on: Criteria::default().on,
            motion: Criteria::default().motion,
            contrast: Criteria::default().contrast,
            subsets: 256,
            most_removed: None,
            prune_tolerances: vec![0.01, 0.05],
            evaluator: None,
            tolerance: None,
            points: None,
            scrambles: None,
            method: Method::Tsit45,
            relative_tolerance: 1e-6,
            absolute_tolerance: 1e-8,
            max_steps: 100_000,
            starts: None,
            engine: None,
            dimension: None,
            dimensions: None,
            replicas: 8,
            test_samples: 4096,
            seed: 1,
            reader: None,
        }
    }
}

mod method_name {
    use super::Method;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(method: &Method, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(method.name())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Method, D::Error> {
        let name = String::deserialize(from)?;
        Method::ALL.into_iter().find(|m| m.name() == name).ok_or_else(|| {
            let names = Method::ALL.map(Method::name).join(", ");
            D::Error::custom(format!("unknown method \"{name}\", expected one of {names}"))
        })
    }
}

/// Most numbers that a default set of points holds: longer sequences get fewer points.
const DEFAULT_NUMBERS: usize = 1 << 24;

/// The most heads: their overlaps are held in full, at every recorded time.
const MAX_HEADS: usize = 1024;

/// The most samples a step.
const MAX_BATCH: usize = 1_000_000;

/// The most replicas.
const MAX_REPLICAS: u32 = 100_000;

/// The most samples that a loss is measured on.
const MAX_TEST_SAMPLES: usize = 100_000_000;

/// The most sets of heads at each number of removed ones.
const MAX_SUBSETS: usize = 1_000_000;

/// The error that losses may have after pruning: well below what a percent of a loss is.
pub const PRUNE_TOLERANCE: f64 = 3e-4;

/// The most starts of a search.
const MAX_STARTS: usize = 100_000;

/// How many times earlier than at the last time a flow is first asked whether it has settled.
const LOOKS: f64 = 100.0;

/// The last time, unless it is given, of a flow that goes on until it has settled: [`LOOKS`] times the usual one.
const CAP: f64 = 40_000.0;

/// The most times that `records` may ask for.
const MAX_RECORDS: usize = 1_000_000;

/// Recorded times where nothing else is said.
const DEFAULT_RECORDS: usize = 101;

/// The fewest points of a scramble, which come in blocks of this many.
const FEWEST_POINTS: usize = 64;

/// The most scrambles.
const MAX_SCRAMBLES: usize = 1 << 16;

/// The largest number up to which every whole number has a floating-point number of its own.
const MAX_WHOLE: f64 = 9_007_199_254_740_992.0;

impl Spec {
    /// A spec from JSON text; `place` names it in errors.
    ///
    /// # Errors
    /// Says which field is unknown (with the nearest name) or holds the wrong kind of value.
    pub fn from_json(text: &str, place: &str) -> Result<Map<String, Value>, Error> {
        let Value::Object(map) = json::parse(text).map_err(|e| Error::unreadable(place, in_words(&e)))? else {
            return Err(Error::unreadable(place, "a spec is a JSON object of fields, like {\"length\": 6}"));
        };
        let map = normalised(&map)?;
        Self::from_map(&map)?;
        Ok(map)
    }

    /// A spec from a map of fields.
    ///
    /// # Errors
    /// As [`Spec::from_json`].
    pub fn from_map(map: &Map<String, Value>) -> Result<Self, Error> {
        let map = normalised(map)?;
        if map.contains_key("times") && (map.contains_key("tau") || map.contains_key("records")) {
            return Err(Error::invalid("times", "give either times or tau and records, not both"));
        }
        let spec: Result<Self, _> = serde_json::from_value(Value::Object(map.clone()));
        spec.map_err(|error| {
            // serde does not say which field: find the one that fails alone.
            for (name, value) in &map {
                let single = Map::from_iter([(name.clone(), value.clone())]);
                if let Err(error) = serde_json::from_value::<Self>(Value::Object(single)) {
                    return Error::invalid(name, error.to_string());
                }
            }
            Error::unreadable("spec", error)
        })
    }

    /// Number of heads, from `heads`, `m0` or `m`.
    pub fn head_count(&self) -> usize {
        let rows = |m: &Option<Vec<Vec<f64>>>| m.as_ref().map(Vec::len);
        self.heads.or_else(|| rows(&self.m0)).or_else(|| rows(&self.m)).unwrap_or(4)
    }

    /// The attention with its defaults.
    pub fn attention(&self) -> Attention {
        let default = Attention::from(self.attention);
        Attention {
            activation: self.attention,
            bias: self.bias.unwrap_or(default.bias),
            aggregation: self.aggregation.unwrap_or(default.aggregation),
        }
    }

    /// The task.
    ///
    /// # Errors
    /// As [`Task::new`].
    pub fn task(&self) -> Result<Task, Error> {
        Task::new(self.length, self.theta.clone())
    }

    /// The spec of the fields that were given, completed for who reads them.
    ///
    /// # Errors
    /// As [`Spec::complete`]; a field that is given and not read is refused whatever its value.
    pub fn completed(given: &Map<String, Value>, reader: impl Into<Reader>) -> Result<Self, Error> {
        Self::over(Map::new(), given, reader)
    }

    /// The same with the fields that were given laid over a `base`: what the base has and the reader has no use for is
    /// no order, and is dropped.
    ///
    /// # Errors
    /// As [`Spec::completed`].
    pub fn over(
        mut base: Map<String, Value>,
        given: &Map<String, Value>,
        reader: impl Into<Reader>,
    ) -> Result<Self, Error> {
        let (given, reader) = (normalised(given)?, reader.into());
        let names: Vec<String> = given.keys().cloned().collect();
        overlay(&mut base, given, reader.purpose);
        Self::from_map(&base)?.finish(reader, &names)
    }

    /// The spec of a record, like that in a result: fields that the reader does not read are dropped.
    ///
    /// # Errors
    /// As [`Spec::complete`].
    pub fn recorded(record: &Map<String, Value>, reader: impl Into<Reader>) -> Result<Self, Error> {
        Self::from_map(record)?.finish(reader.into(), &[])
    }

    /// Fills in everything that was not given, so that the spec stands for itself, and checks it. Fields that the reader
    /// does not read are at their defaults, before and after.
    ///
    /// # Errors
    /// Names the field that is wrong, and what would be right; or all fields that differ from their defaults and
    /// are not read, and who reads them.
    pub fn complete(self, reader: impl Into<Reader>) -> Result<Self, Error> {
        let (own, default) = (self.to_map()?, Self::default().to_map()?);
        let given: Vec<String> =
            own.iter().filter(|(name, v)| default.get(*name) != Some(v)).map(|(n, _)| n.clone()).collect();
        self.finish(reader.into(), &given)
    }

    /// The fields of a completed spec that its reader reads: what it is run again from.
    ///
    /// # Errors
    /// When a number is not finite.
    pub fn document(&self) -> Result<Map<String, Value>, Error> {
        let mut map = self.to_map()?;
        if let Some(reader) = self.reader {
            FIELDS.iter().filter(|field| !reader.reads(field, self)).for_each(|field| {
                map.remove(field.name);
            });
        }
        Ok(map)
    }

    fn to_map(&self) -> Result<Map<String, Value>, Error> {
        match serde_json::to_value(self) {
            Ok(Value::Object(map)) => Ok(map),
            Ok(_) => Err(Error::unreadable("spec", "is no object")),
            Err(error) => Err(Error::unreadable("spec", error)),
        }
    }

    /// The spec with some fields at their defaults.
    fn without(&self, fields: &[&Field]) -> Result<Self, Error> {
        if fields.is_empty() {
            return Ok(self.clone());
        }
        let mut map = self.to_map()?;
        for field in fields {
            map.remove(field.name);
        }
        serde_json::from_value(Value::Object(map)).map_err(|e| Error::unreadable("spec", e))
    }

    fn finish(self, reader: Reader, given: &[String]) -> Result<Self, Error> {
        let refused = |unread: &dyn Fn(&Field) -> bool| -> Vec<&Field> {
            FIELDS.iter().filter(|field| given.iter().any(|name| name == field.name) && unread(field)).collect()
        };
        self.validate()?;
        let (asked, done) = match self.resolved(reader) {
            Ok(both) => both,
            Err(error) => {
                let unread = refused(&|field| !reader.may_read(field));
                return Err(if unread.is_empty() { error } else { reader.refusal(&unread, &self) });
            }
        };
        let unread = refused(&|field| !reader.reads(field, &asked));
        if unread.is_empty() { Ok(done) } else { Err(reader.refusal(&unread, &asked)) }
    }

    /// The spec as it was asked for, with its choices made, and completed. The former says what is read: what follows from
    /// a field, like `r0` from `key_scale`, does not undo that it was.
    pub(crate) fn resolved(&self, reader: Reader) -> Result<(Self, Self), Error> {
        // What a figure has of its own stays as it set it.
        let never: Vec<&Field> = FIELDS.iter().filter(|field| !reader.may_read(field) && !reader.owns(field)).collect();
        let mut asked = self.without(&never)?;
        let filled = asked.clone().filled(&reader)?;
        (asked.evaluator, asked.at) = (filled.evaluator, filled.at);
        let useless = |field: &&Field| !reader.reads(field, &filled) && !reader.owns(field);
        let unread: Vec<&Field> = FIELDS.iter().filter(useless).collect();
        let done = Self { reader: Some(reader), ..filled.without(&unread)? };
        Ok((asked, done))
    }

    /// Checks every field's own domain, whoever reads it.
    ///
    /// # Errors
    /// Names the field that is impossible, and what would be right.
    pub fn validate(&self) -> Result<(), Error> {
        let within = |name: &str, value: Option<usize>, least: usize, most: usize| match value {
            Some(value) if !(least..=most).contains(&value) => {
                Err(Error::invalid(name, format!("must be from {least} to {most}, got {value}")))
            }
            _ => Ok(()),
        };
        let number = |name: &str, value: Option<f64>, what: &str, possible: fn(f64) -> bool| match value {
            Some(value) if !(value.is_finite() && possible(value)) => {
                Err(Error::invalid(name, format!("{what}, got {value}")))
            }
            _ => Ok(()),
        };
        self.task()?;
        within("heads", Some(self.head_count()), 1, MAX_HEADS)?;
        let learning_rate = "the learning rate must be finite and not negative";
        number("gamma", Some(self.gamma), learning_rate, |v| v >= 0.0)?;
        within("batch", Some(self.batch), 1, MAX_BATCH)?;
        number("key_scale", Some(self.key_scale), "must be finite and not negative", |v| v >= 0.0)?;
        let matrices = [("m0", &self.m0), ("r0", &self.r0), ("m", &self.m), ("r", &self.r)];
        for (name, rows) in matrices {
            for &value in rows.iter().flatten().flatten() {
                number(name, Some(value), "must hold finite numbers", |_| true)?;
            }
        }
        for (name, list) in [("b0", &self.b0), ("b", &self.b)] {
            for &value in list.iter().flatten() {
                number(name, Some(value), "must hold finite numbers", |_| true)?;
            }
        }
        number("tau", self.tau, "the last time must be positive and finite", |v| v > 0.0)?;
        within("records", self.records, 2, MAX_RECORDS)?;
        if let Some(times) = &self.times
            && (times.is_empty()
                || !times.iter().all(|t| t.is_finite() && *t >= 0.0)
                || !times.is_sorted_by(|a, b| a < b))
        {
            let problem = "must be at least one, finite, not negative and strictly increasing";
            return Err(Error::invalid("times", problem));
        }
        if self.times.is_some() && (self.tau.is_some() || self.records.is_some()) {
            return Err(Error::invalid("times", "give either times or tau and records, not both"));
        }
        number("stop_loss", self.stop_loss, "must be finite", |_| true)?;
        number("stop_alignment", self.stop_alignment.map(|(_, _, value)| value), "must be finite", |_| true)?;
        self.criteria().validate()?;
        number("stationary_tolerance", Some(self.stationary_tolerance), "must be positive and finite", |v| v > 0.0)?;
        within("subsets", Some(self.subsets), 1, MAX_SUBSETS)?;
        if self.prune_tolerances.is_empty() {
            return Err(Error::invalid("prune_tolerances", "there must be at least one"));
        }
        for &tolerance in &self.prune_tolerances {
            number("prune_tolerances", Some(tolerance), "must be finite and not negative", |v| v >= 0.0)?;
            // A hundred times that, in percent, is a number too.
            number("prune_tolerances", Some(tolerance), "must be at most 1e300", |v| v <= 1e300)?;
        }
        self.tolerance.map_or(Ok(()), check_tolerance)?;
        if let Some(points) = self.points.filter(|points| !points.is_power_of_two() || *points < FEWEST_POINTS) {
            return Err(Error::invalid("points", format!("{points} is not a power of two from {FEWEST_POINTS} on")));
        }
        within("scrambles", self.scrambles, 1, MAX_SCRAMBLES)?;
        number("relative_tolerance", Some(self.relative_tolerance), "must be positive", |v| v > 0.0)?;
        number("absolute_tolerance", Some(self.absolute_tolerance), "must be positive", |v| v > 0.0)?;
        if self.max_steps == 0 {
            return Err(Error::invalid("max_steps", "must be at least 1"));
        }
        within("starts", self.starts, 1, MAX_STARTS)?;
        if self.dimension.is_some() && self.dimensions.is_some() {
            return Err(Error::invalid("dimension", "give either dimension or dimensions, not both"));
        }
        within("dimension", self.dimension, 1, usize::MAX)?;
        if let Some(dimensions) = &self.dimensions {
            if dimensions.is_empty() {
                return Err(Error::invalid("dimensions", "there must be at least one"));
            }
            let mut sorted = dimensions.clone();
            sorted.sort_unstable();
            within("dimensions", sorted.first().copied(), 1, usize::MAX)?;
            if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
                return Err(Error::invalid("dimensions", format!("{} is given twice", pair[0])));
            }
        }
        within("replicas", Some(self.replicas as usize), 1, MAX_REPLICAS as usize)?;
        within("test_samples", Some(self.test_samples), 2, MAX_TEST_SAMPLES)
    }

    /// Fills in what follows from what was given; every field is valid by itself.
    fn filled(mut self, reader: &Reader) -> Result<Self, Error> {
        let asked = reader.purpose;
        let purpose = asked.of_cell();
        let features = self.theta.features();
        let heads = self.head_count();
        self.heads = Some(heads);
        let attention = self.attention();
        (self.bias, self.aggregation) = (Some(attention.bias), Some(attention.aggregation));
        if purpose == Purpose::Stability {
            let at = self.at.unwrap_or(if self.m.is_some() { At::Point } else { At::Unspecialised });
            self.at = Some(at);
            if at != At::Point && self.m.is_some() {
                return Err(Error::invalid("m", "is a point of its own: leave it out, or use --at point"));
            }
            if self.dimensions.iter().flatten().chain(&self.dimension).any(|&d| d < 2) {
                return Err(Error::invalid("dimensions", "escape times need dimensions of at least 2"));
            }
            if let Some(dimension) = self.dimension.take() {
                self.dimensions = Some(vec![dimension]);
            }
            // A point's escapes, like any start, have trained biases alone.
            self.check_start_biases(heads)?;
        }
        if purpose == Purpose::Prune {
            self.complete_pruning(heads)?;
        }
        if purpose == Purpose::Loss || self.at == Some(At::Point) || self.prunes_a_point(purpose) {
            self.complete_point(heads, features)?;
        } else if matches!(purpose, Purpose::Bayes | Purpose::Optimum) {
            // Neither a start nor times.
        } else if self.at != Some(At::Unspecialised) {
            self.complete_start(heads, features, purpose)?;
            self.complete_times(purpose)?;
        }
        self.complete_until()?;
        self.complete_dimensions(purpose, heads, features)?;
        self.complete_evaluator(reader)?;
        if matches!(purpose, Purpose::Optimum | Purpose::Phase(_)) {
            self.starts.get_or_insert(if purpose == Purpose::Optimum { 16 } else { 6 });
        }
        if self.evaluator == Some(EvaluatorKind::Quadrature) {
            return Ok(self);
        }
        if self.points.is_none() {
            let limit = DEFAULT_NUMBERS / (self.length * (heads + features));
            let most = match (purpose, self.initial) {
                // One flow for each replica.
                (Purpose::Compare, Initial::Random) => 1 << 13,
                (Purpose::Compare, Initial::Given) => 1 << 15,
                // A column of the Jacobian is two evaluations.
                (Purpose::Stability | Purpose::Stages, _) => 1 << 14,
                // One flow for each start.
                (Purpose::Prune, _) => 1 << 13,
                _ => 1 << 16,
            };
            self.points = Some((1 << limit.max(256).ilog2()).min(most));
        }
        let scrambles = self.scrambles.unwrap_or(match purpose {
            _ if asked.has_one_scramble() => 1,
            Purpose::Loss => 16,
            Purpose::Stability => 4,
            // One flow with one pattern: scrambles may end in different, equivalent states.
            Purpose::Stages => 1,
            _ => 8,
        });
        if asked.has_one_scramble() && scrambles > 1 {
            return Err(Error::invalid(
                "scrambles",
                format!("{asked} uses one set of points: leave it out, or give 1"),
            ));
        }
        self.scrambles = Some(scrambles);
        Ok(self)
    }

    /// Chooses and checks the evaluator.
    fn complete_evaluator(&mut self, reader: &Reader) -> Result<(), Error> {
        let (asked, purpose) = (reader.purpose, reader.purpose.of_cell());
        let evaluates = FIELDS.iter().any(|field| field.name == "evaluator" && reader.reads(field, self));
        // A simulation alone takes no averages.
        if purpose == Purpose::Stages && !evaluates {
            return Ok(());
        }
        let sampled = self.points.is_some() || self.scrambles.is_some();
        let exact = match purpose {
            Purpose::Bayes | Purpose::Optimum | Purpose::Phase(_) => true,
            // Above rank 3 bayes-softmax has no grid, and sampling whole tokens tells its error better.
            Purpose::Loss => self.attention != Activation::BayesSoftmax || rank(&self.point()?) <= 3,
            _ => false,
        };
        let kind =
            self.evaluator.unwrap_or(if self.tolerance.is_some() && purpose != Purpose::Prune || exact && !sampled {
                EvaluatorKind::Quadrature
            } else {
                EvaluatorKind::Qmc
            });
        self.evaluator = Some(kind);
        let default = match purpose {
            Purpose::Bayes => 1e-10,
            Purpose::Optimum => 1e-7,
            Purpose::Phase(_) => 1e-6,
            Purpose::Prune => PRUNE_TOLERANCE,
            _ => 1e-8,
        };
        // Losses after pruning are a quadrature's, whatever computes the flow.
        if kind == EvaluatorKind::Quadrature || purpose == Purpose::Prune {
            self.tolerance.get_or_insert(default);
        } else if self.tolerance.is_some() {
            return Err(Error::invalid("tolerance", "belongs to evaluator quadrature; qmc has points and scrambles"));
        }
        if kind == EvaluatorKind::Qmc {
            if purpose == Purpose::Bayes {
                return Err(Error::invalid("evaluator", "the Bayes risk is computed by quadrature; leave it out"));
            }
            return Ok(());
        }
        for (name, given) in [("points", self.points.is_some()), ("scrambles", self.scrambles.is_some())] {
            if given {
                return Err(Error::invalid(name, "belongs to evaluator qmc; quadrature has a tolerance"));
            }
        }
        // Rates of a diagram are those of gradient flow, and a given point is not trained.
        let with_noise = matches!(purpose, Purpose::Flow | Purpose::Stages)
            || asked == Purpose::Stability
            || purpose == Purpose::Prune && evaluates;
        if purpose == Purpose::Compare {
            return Err(Error::invalid("evaluator", "compare needs the noise of SGD, which only qmc gives"));
        }
        if with_noise && self.gamma > 0.0 {
            return Err(Error::invalid(
                "evaluator",
                "quadrature gives no noise of SGD: use --gamma 0 (gradient flow), or --evaluator qmc",
            ));
        }
        Ok(())
    }

    /// Whether heads of a given point are removed, without training.
    fn prunes_a_point(&self, purpose: Purpose) -> bool {
        purpose == Purpose::Prune && self.m.is_some()
    }

    fn complete_pruning(&mut self, heads: usize) -> Result<(), Error> {
        let most_removed = self.most_removed.unwrap_or(heads - 1);
        if most_removed >= heads {
            return Err(Error::invalid(
                "most_removed",
                format!("of {heads} heads at most {} can be removed, got {most_removed}", heads - 1),
            ));
        }
        self.most_removed = Some(most_removed);
        let training = [
            ("engine", self.engine.is_some()),
            ("m0", self.m0.is_some()),
            ("r0", self.r0.is_some()),
            ("b0", self.b0.is_some()),
            ("initial", self.initial == Initial::Random),
        ];
        if self.m.is_some()
            && let Some((name, _)) = training.into_iter().find(|(_, given)| *given)
        {
            return Err(Error::invalid(name, "the point m is not trained: leave this out, or leave m out"));
        }
        for (name, given) in [("r", self.r.is_some()), ("b", self.b.is_some())] {
            if given && self.m.is_none() {
                return Err(Error::invalid(name, "belongs to a point: give its alignments m as well"));
            }
        }
        Ok(())
    }

    fn complete_point(&mut self, heads: usize, features: usize) -> Result<(), Error> {
        let Some(m) = &self.m else {
            return Err(Error::invalid(
                "m",
                "the loss, or stability at a point, needs the alignments: --m \"1.5;-1.2\", one row of F numbers a head",
            ));
        };
        let m = matrix("m", m, heads, features)?;
        let r = match &self.r {
            Some(r) => matrix("r", r, heads, heads)?,
            None => &m * m.transpose(),
        };
        let rule = self.attention().bias;
        let b = biases(rule, &r, self.b.as_deref().unwrap_or(&vec![0.0; heads]));
        if let Some(given) = &self.b {
            if given.len() != heads {
                return Err(Error::invalid("b", format!("has length {} but there are {heads} heads", given.len())));
            }
            if given.iter().zip(&b).any(|(g, b)| g.is_nan() || (g - b).abs() > 1e-9 * (1.0 + b.abs())) {
                return Err(Error::invalid(
                    "b",
                    match rule {
                        Bias::None => "the bias rule is none, so b must be 0; for other biases use --bias trained",
                        _ => "the bias rule is half-norm, so b must be -r_hh / 2; for other biases use --bias trained",
                    },
                ));
            }
        }
        OrderParameters::named(["m", "r", "b"], m.clone(), r.clone(), b.clone())?;
        (self.m, self.r, self.b) = (Some(rows(&m)), Some(rows(&r)), Some(b));
        Ok(())
    }

    fn check_start_biases(&self, heads: usize) -> Result<(), Error> {
        let trained = self.attention().bias == Bias::Trained;
        match &self.b0 {
            Some(b0) if b0.len() != heads => {
                Err(Error::invalid("b0", format!("has length {} but there are {heads} heads", b0.len())))
            }
            Some(b0) if !trained && b0.iter().any(|&b| b != 0.0) => {
                Err(Error::invalid("b0", "only trained biases have a start; use --bias trained"))
            }
            _ => Ok(()),
        }
    }

    fn complete_start(&mut self, heads: usize, features: usize, purpose: Purpose) -> Result<(), Error> {
        self.check_start_biases(heads)?;
        let b0 = self.b0.clone().unwrap_or_else(|| vec![0.0; heads]);
        if self.initial == Initial::Random {
            if self.m0.is_some() || self.r0.is_some() {
                return Err(Error::invalid(
                    "initial",
                    "random keys have no given m0 and r0; leave those out, or use --initial given",
                ));
            }
            let simulated = matches!(purpose, Purpose::Simulate | Purpose::Compare | Purpose::Prune)
                || purpose == Purpose::Stages && self.engine.is_some();
            if !simulated {
                return Err(Error::invalid(
                    "initial",
                    "a flow starts from given overlaps (m0, r0); random keys need a dimension: use compare, simulate or prune, or give stages an --engine",
                ));
            }
            self.b0 = Some(b0);
            return Ok(());
        }
        let m0 = match &self.m0 {
            Some(m0) => matrix("m0", m0, heads, features)?,
            None => default_alignments(heads, features),
        };
        let r0 = match &self.r0 {
            Some(r0) => matrix("r0", r0, heads, heads)?,
            None => &m0 * m0.transpose() + DMatrix::identity(heads, heads) * (self.key_scale * self.key_scale),
        };
        OrderParameters::named(["m0", "r0", "b0"], m0.clone(), r0.clone(), b0.clone())?;
        (self.m0, self.r0, self.b0) = (Some(rows(&m0)), Some(rows(&r0)), Some(b0));
        Ok(())
    }

    fn complete_times(&mut self, purpose: Purpose) -> Result<(), Error> {
        if self.times.is_some() {
            return Ok(());
        }
        let fine = matches!(purpose, Purpose::Stability | Purpose::Stages);
        let usual = if self.until == Until::Settled { CAP } else { 400.0 };
        let (tau, records) =
            (self.tau.unwrap_or(usual), self.records.unwrap_or(if fine { 401 } else { DEFAULT_RECORDS }));
        (self.tau, self.records) = (Some(tau), Some(records));
        Ok(())
    }

    /// The times of a flow that settles follow from where it does.
    fn complete_until(&self) -> Result<(), Error> {
        if self.until == Until::Time {
            return Ok(());
        }
        if self.times.is_some() {
            let problem =
                "the times of a flow that settles are not known before; give tau, the latest, instead of times";
            return Err(Error::invalid("until", problem));
        }
        if self.recorded_times().len() > MAX_RECORDS {
            let problem = format!("a flow until settled would have more than {MAX_RECORDS}; lower it");
            return Err(Error::invalid("records", problem));
        }
        Ok(())
    }

    fn complete_dimensions(&mut self, purpose: Purpose, heads: usize, features: usize) -> Result<(), Error> {
        match purpose {
            Purpose::Flow
            | Purpose::Loss
            | Purpose::Stability
            | Purpose::Bayes
            | Purpose::Optimum
            | Purpose::Phase(_) => return Ok(()),
            Purpose::Stages if self.engine.is_none() => return Ok(()),
            // Only random keys have a dimension.
            Purpose::Prune if self.m.is_some() || self.engine.is_none() && self.initial == Initial::Given => {
                return Ok(());
            }
            Purpose::Simulate | Purpose::Stages | Purpose::Prune => {
                let dimension = match (&self.dimension, self.dimensions.as_deref()) {
                    (Some(d), _) => *d,
                    (None, Some([d])) => *d,
                    (None, Some(_)) => {
                        return Err(Error::invalid(
                            "dimensions",
                            "this runs one dimension: use --dimension, or compare",
                        ));
                    }
                    (None, None) => 1000,
                };
                (self.dimension, self.dimensions) = (Some(dimension), None);
            }
            Purpose::Compare => {
                let mut dimensions =
                    self.dimensions.clone().or(self.dimension.map(|d| vec![d])).unwrap_or_else(|| vec![500, 1000]);
                dimensions.sort_unstable();
                (self.dimension, self.dimensions) = (None, Some(dimensions));
            }
        }
        // A flow that starts from random keys takes no step of SGD.
        let flows = purpose == Purpose::Prune && self.engine.is_none();
        if self.gamma == 0.0 && !flows {
            return Err(Error::invalid("gamma", "SGD needs a positive learning rate; gamma = 0 is the limit of flow"));
        }
        let field = if purpose == Purpose::Compare { "dimensions" } else { "dimension" };
        let smallest = self.all_dimensions().into_iter().min().unwrap_or(0);
        if smallest < heads + features {
            return Err(Error::invalid(
                field,
                format!(
                    "D = {smallest} is too small: {heads} keys and {features} spikes need D >= H + F = {}",
                    heads + features
                ),
            ));
        }
        if flows {
            return Ok(());
        }
        let chain = heads + features + self.length;
        let engine = self.engine.unwrap_or(match purpose {
            Purpose::Compare if smallest >= chain => Engines::Both,
            _ => Engines::Direct,
        });
        if engine == Engines::Both && purpose != Purpose::Compare {
            return Err(Error::invalid("engine", "only compare runs both engines: choose direct or overlap"));
        }
        if engine != Engines::Direct && smallest < chain {
            return Err(Error::invalid(
                field,
                format!(
                    "D = {smallest} is too small for the overlap chain: it needs D >= F + H + L = {chain} \
                     (or use --engine direct)"
                ),
            ));
        }
        self.engine = Some(engine);
        Ok(())
    }

    /// The dimensions to simulate.
    pub fn all_dimensions(&self) -> Vec<usize> {
        self.dimensions.clone().unwrap_or_else(|| self.dimension.into_iter().collect())
    }

    /// The recorded times of a completed spec.
    pub fn recorded_times(&self) -> Vec<f64> {
        let records = self.records.unwrap_or(DEFAULT_RECORDS);
        match (&self.times, self.tau) {
            (Some(times), _) => times.clone(),
            (None, Some(tau)) if self.until == Until::Settled => {
                // Even up to the first look, then as far apart, relative to the time, as they were there.
                let first = tau / LOOKS;
                let even = (0..records).map(|i| first * i as f64 / (records - 1) as f64);
                // Whole numbers of records between looks, which are all recorded.
                let doubling = (std::f64::consts::LN_2 / (1.0 / (records - 1) as f64).ln_1p()).ceil() as usize;
                let growing = (1..).map(|i: usize| {
                    let part = (i % doubling) as f64 / doubling as f64;
                    first * 2f64.powi((i / doubling) as i32) * part.exp2()
                });
                even.chain(growing.take_while(|&t| t < tau)).chain([tau]).collect()
            }
            (None, Some(tau)) => (0..records).map(|i| tau * i as f64 / (records - 1) as f64).collect(),
            _ => Vec::new(),
        }
    }

    /// The point of a spec completed for [`Purpose::Loss`], or for [`Purpose::Prune`] with a point.
    ///
    /// # Errors
    /// When the point is missing or impossible.
    pub fn point(&self) -> Result<OrderParameters, Error> {
        self.order_parameters(["m", "r", "b"], [&self.m, &self.r], &self.b)
    }

    /// The given start of a completed spec.
    ///
    /// # Errors
    /// When the start is random, missing or impossible.
    pub fn start(&self) -> Result<OrderParameters, Error> {
        self.order_parameters(["m0", "r0", "b0"], [&self.m0, &self.r0], &self.b0)
    }

    /// The start of a simulation.
    ///
    /// # Errors
    /// As [`Spec::start`].
    pub fn simulation_start(&self) -> Result<Start, Error> {
        let heads = self.head_count();
        match self.initial {
            Initial::Given => Ok(Start::Given(self.start()?)),
            Initial::Random => Ok(Start::Random {
                heads,
                scale: self.key_scale,
                b: self.b0.clone().unwrap_or_else(|| vec![0.0; heads]),
            }),
        }
    }

    /// The evaluators of a completed spec: one for each scramble, or the one quadrature.
    ///
    /// # Errors
    /// As [`QuasiMonteCarlo::new`] or [`Quadrature::new`].
    pub fn evaluators(&self) -> Result<Vec<Averages>, Error> {
        if self.evaluator == Some(EvaluatorKind::Quadrature) {
            return Ok(vec![Averages::Exact(self.quadrature()?)]);
        }
        Ok(self.samples()?.into_iter().map(Averages::Sampled).collect())
    }

    /// The quadrature of a completed spec.
    ///
    /// # Errors
    /// As [`Quadrature::new`].
    pub fn quadrature(&self) -> Result<Quadrature, Error> {
        Quadrature::new(&self.task()?, self.head_count(), self.attention(), self.tolerance.unwrap_or(1e-8))
    }

    /// The points of a completed spec, one set for each scramble.
    ///
    /// # Errors
    /// As [`QuasiMonteCarlo::new`].
    pub fn samples(&self) -> Result<Vec<QuasiMonteCarlo>, Error> {
        let missing = |name| Error::invalid(name, "is missing: complete the spec first");
        QuasiMonteCarlo::scrambles(
            &self.task()?,
            self.head_count(),
            self.attention(),
            self.points.ok_or_else(|| missing("points"))?,
            self.seed,
            self.scrambles.ok_or_else(|| missing("scrambles"))?,
        )
    }

    /// How the flow of a completed spec is integrated.
    pub fn flow_options(&self) -> flow::Options {
        flow::Options {
            method: self.method,
            relative_tolerance: self.relative_tolerance,
            absolute_tolerance: self.absolute_tolerance,
            max_steps: self.max_steps,
            events: self.events(),
            until: (self.until == Until::Settled)
                .then(|| flow::Until { first: self.tau.unwrap_or(CAP) / LOOKS, tolerance: self.stationary_tolerance }),
            ..flow::Options::new(self.gamma / self.batch as f64, self.recorded_times())
        }
    }

    /// Whether flows of a completed spec had settled where they ended, each with its evaluator; the least settled speaks for all.
    pub fn settled<E: Evaluator>(
        &self,
        evaluators: &[E],
        solutions: &[flow::Solution],
        watch: &dyn Watch,
    ) -> Option<Settled> {
        let noise = self.gamma / self.batch as f64;
        settled::of_flows(evaluators, solutions, noise, self.stationary_tolerance, watch)
    }

    /// The engines that simulate, direct first.
    pub fn engines(&self) -> &'static [Engine] {
        self.engine.unwrap_or(Engines::Direct).list()
    }

    /// The SGD of a spec in `dimension` dimensions.
    ///
    /// # Errors
    /// As [`Task::new`].
    pub fn sgd(&self, dimension: usize, engine: Engine) -> Result<Sgd, Error> {
        Ok(Sgd {
            task: self.task()?,
            attention: self.attention(),
            dimension,
            gamma: self.gamma,
            batch: self.batch,
            seed: self.seed,
            engine,
        })
    }

    /// What a simulation of a completed spec runs and records.
    pub fn ensemble_options(&self) -> ensemble::Options {
        ensemble::Options { times: self.recorded_times(), replicas: self.replicas, test_samples: self.test_samples }
    }

    /// What counts as a plateau and as a head that is on.
    pub fn criteria(&self) -> Criteria {
        Criteria { on: self.on, motion: self.motion, contrast: self.contrast }
    }

    /// The events at which a flow stops.
    pub fn events(&self) -> Vec<Event> {
        let loss = self.stop_loss.map(Event::LossBelow);
        let alignment =
            self.stop_alignment.map(|(head, feature, value)| Event::AlignmentCrosses { head, feature, value });
        loss.into_iter().chain(alignment).collect()
    }

    fn order_parameters(
        &self,
        names: [&str; 3],
        matrices: [&Option<Vec<Vec<f64>>>; 2],
        b: &Option<Vec<f64>>,
    ) -> Result<OrderParameters, Error> {
        let (heads, features) = (self.head_count(), self.theta.features());
        let given = |name: &str, m: &Option<Vec<Vec<f64>>>, columns| {
            let Some(m) = m else { return Err(Error::invalid(name, "is missing")) };
            matrix(name, m, heads, columns)
        };
        OrderParameters::named(
            names,
            given(names[0], matrices[0], features)?,
            given(names[1], matrices[1], heads)?,
            b.clone().unwrap_or_else(|| vec![0.0; heads]),
        )
    }
}

/// The rank of the overlaps, eigenvalues below 1e-13 of the largest counting as zero.
fn rank(point: &OrderParameters) -> usize {
    let eigenvalues = point.r().symmetric_eigenvalues();
    let largest = largest(eigenvalues.iter());
    eigenvalues.iter().filter(|v| **v > 1e-13 * largest).count()
}

/// Alignments of size 0.1 that single out no direction of a sign-symmetric theta: head `h` prefers
/// one sign of the first feature, and the second feature splits heads of equal sign.
fn default_alignments(heads: usize, features: usize) -> DMatrix<f64> {
    DMatrix::from_fn(heads, features, |h, f| {
        let sign = if (h >> f.min(usize::BITS as usize - 1)) & 1 == 0 { 1.0 } else { -1.0 };
        let size = if f == 0 { 0.1 } else { 0.03 };
        // Slightly different sizes, so that no two heads are the same.
        sign * size * (0.84 + 0.08 * ((7 * h + 3 * f) % 5) as f64)
    })
}

/// A matrix as documents hold it, row by row.
pub fn rows(matrix: &DMatrix<f64>) -> Vec<Vec<f64>> {
    matrix.row_iter().map(|row| row.iter().copied().collect()).collect()
}

fn matrix(name: &str, given: &[Vec<f64>], expected_rows: usize, columns: usize) -> Result<DMatrix<f64>, Error> {
    if given.len() != expected_rows {
        return Err(Error::invalid(name, format!("has {} rows but there are {expected_rows} heads", given.len())));
    }
    if let Some((h, row)) = given.iter().enumerate().find(|(_, row)| row.len() != columns) {
        return Err(Error::invalid(name, format!("row {h} has length {}, expected {columns}", row.len())));
    }
    if let Some(v) = given.iter().flatten().find(|v| !v.is_finite()) {
        return Err(Error::invalid(name, format!("{v} is not a finite number")));
    }
    Ok(DMatrix::from_fn(expected_rows, columns, |i, j| given[i][j]))
}

fn check_names(place: &str, map: &Map<String, Value>, names: &[&str]) -> Result<(), Error> {
    for name in map.keys() {
        if !names.contains(&name.as_str()) {
            return Err(Error::UnknownField { place: place.into(), name: name.clone(), nearest: nearest(name, names) });
        }
    }
    Ok(())
}

/// Why a text is no JSON for a spec.
fn in_words(error: &serde_json::Error) -> String {
    // A repeated field is JSON all the same.
    if error.is_data() { error.to_string() } else { format!("not valid JSON: {error}") }
}

/// Fields as they were given: a null is a field that was not, and counts are whole numbers in whatever form they come.
fn normalised(map: &Map<String, Value>) -> Result<Map<String, Value>, Error> {
    check_names("spec", map, &NAMES)?;
    let mut fields = Map::new();
    for (name, value) in map.iter().filter(|(_, value)| !value.is_null()) {
        let mut value = value.clone();
        let kind = FIELDS.iter().find(|field| field.name == name).map(|field| field.kind);
        let counts: Vec<&mut Value> = match (kind, &mut value) {
            (Some(Kind::Count), count) => vec![count],
            (Some(Kind::Counts), Value::Array(list)) => list.iter_mut().collect(),
            (Some(Kind::Alignment), Value::Array(list)) => list.iter_mut().take(2).collect(),
            (Some(Kind::Theta), Value::Object(theta)) => {
                check_names("theta", theta, THETA_FIELDS)?;
                theta.retain(|_, part| !part.is_null());
                theta.get_mut("features").into_iter().collect()
            }
            _ => Vec::new(),
        };
        for count in counts {
            // What is no number at all has its own message.
            if let (Value::Number(_), false) = (&*count, count.is_u64()) {
                let given = count.as_f64().unwrap_or(f64::NAN);
                *count = whole(given).map(Value::from).ok_or_else(|| Error::invalid(name, not_whole(given)))?;
            }
        }
        fields.insert(name.clone(), value);
    }
    Ok(fields)
}

/// The whole number that a floating-point number is exactly.
fn whole(value: f64) -> Option<u64> {
    ((0.0..=MAX_WHOLE).contains(&value) && value.fract() == 0.0).then_some(value as u64)
}

fn not_whole(value: f64) -> String {
    if value > MAX_WHOLE {
        format!("{value:e} is too large for a count")
    } else {
        format!("{value} is not a whole number")
    }
}

/// A whole number in any form that is exact: `1000`, `1e3`, `1000.0`.
pub fn count(text: &str) -> Option<u64> {
    let text = text.trim();
    text.parse::<u64>().ok().or_else(|| text.parse::<f64>().ok().and_then(whole))
}

/// The name most like `name`, when one is at all like it.
pub fn nearest(name: &str, names: &[&str]) -> Option<String> {
    let name = name.replace('-', "_").to_lowercase();
    names
        .iter()
        .map(|candidate| (strsim::jaro_winkler(&name, candidate), *candidate))
        .filter(|(similarity, _)| *similarity > 0.7)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, candidate)| candidate.to_string())
}

/// The JSON value that a flag's text stands for.
///
/// # Errors
/// Names the field and what was expected.
pub fn parse_flag(field: &Field, text: &str) -> Result<Value, Error> {
    let text = text.trim();
    let wrong = |expected: &str| Error::invalid(field.name, format!("\"{text}\" is not {expected}"));
    let json = |text: &str| json::parse(text).map_err(|e| wrong(&format!("valid JSON ({e})")));
    match field.kind {
        Kind::Count => count(text).map(Value::from).ok_or_else(|| wrong("a whole number")),
        Kind::Number => number(text).ok_or_else(|| wrong("a finite number")),
        Kind::Word => Ok(Value::from(text)),
        Kind::List | Kind::Counts | Kind::Alignment | Kind::Matrix if text.starts_with('[') => json(text),
        Kind::Counts => text
            .split(',')
            .map(|part| count(part).map(Value::from))
            .collect::<Option<Vec<_>>>()
            .map(Value::from)
            .ok_or_else(|| wrong("a list of whole numbers like 500,1000")),
        Kind::List | Kind::Alignment => list(text).ok_or_else(|| wrong("a list of finite numbers like 0,10,20")),
        Kind::Matrix => text
            .split(';')
            .map(list)
            .collect::<Option<Vec<_>>>()
            .map(Value::from)
            .ok_or_else(|| wrong("rows of finite numbers like 0.1,0.2;0.3,0.4")),
        Kind::Theta if text.starts_with('{') => json(text),
        Kind::Theta => theta(text).ok_or_else(|| {
            wrong("a distribution like flip:1.8,1.5, gaussian:mean=1,0:sd=0.5,1.5, sphere:nu=2:features=3, or JSON")
        }),
    }
}

/// A number; whole ones stay whole, so that they fit counts in lists.
fn number(text: &str) -> Option<Value> {
    let text = text.trim();
    if let Ok(whole) = text.parse::<u64>() {
        return Some(Value::from(whole));
    }
    text.parse::<f64>().ok().filter(|v| v.is_finite()).map(Value::from)
}

fn list(text: &str) -> Option<Value> {
    text.split(',').map(number).collect::<Option<Vec<_>>>().map(Value::from)
}

fn theta(text: &str) -> Option<Value> {
    let mut parts = text.split(':');
    let kind = parts.next()?;
    let mut map = Map::from_iter([("kind".to_string(), Value::from(kind))]);
    for part in parts {
        let (key, value) = match part.split_once('=') {
            Some(pair) => pair,
            None if map.len() == 1 => ("nu", part),
            None => return None,
        };
        let scalar = key == "features" || (kind == "sphere" && key == "nu");
        let value = if scalar { number(value)? } else { list(value)? };
        // A part that is given twice is no distribution.
        if map.insert(key.trim().into(), value).is_some() {
            return None;
        }
    }
    Some(Value::Object(map))
}

/// Lays flags over the fields of a file: a flag for the times replaces the file's other way to give
/// them, one for the size of the keys the overlaps that followed from it, and one for the attention the bias and
/// aggregation that came with the file's.
pub fn overlay(map: &mut Map<String, Value>, flags: Map<String, Value>, purpose: Purpose) {
    if flags.contains_key("times") {
        map.remove("tau");
        map.remove("records");
    }
    if flags.contains_key("tau") || flags.contains_key("records") {
        map.remove("times");
    }
    if flags.contains_key("key_scale") {
        map.remove("r0");
    }
    // Another attention brings its own defaults, unless the file chose others than its attention's.
    if flags.contains_key("attention")
        && let Ok(file) = Spec::from_map(map)
        && file.attention() == Attention::from(file.attention)
    {
        map.remove("bias");
        map.remove("aggregation");
    }
    // So does another evaluator, or what belongs to one; the tolerance of prune goes with either.
    let evaluator = flags.get("evaluator").and_then(Value::as_str);
    let tells = flags.contains_key("tolerance") && purpose != Purpose::Prune;
    if evaluator == Some("quadrature") || tells && evaluator.is_none() {
        map.remove("points");
        map.remove("scrambles");
        map.remove("evaluator");
    } else if evaluator == Some("qmc") || flags.contains_key("points") || flags.contains_key("scrambles") {
        if purpose != Purpose::Prune {
            map.remove("tolerance");
        }
        map.remove("evaluator");
    }
    if flags.contains_key("dimensions") {
        map.remove("dimension");
    }
    if flags.contains_key("dimension") {
        map.remove("dimensions");
    }
    map.extend(flags);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(json: &str) -> Result<Spec, Error> {
        Spec::from_json(json, "test").and_then(|map| Spec::from_map(&map))
    }

    fn flag(name: &str, text: &str) -> Result<Value, Error> {
        parse_flag(FIELDS.iter().find(|f| f.name == name).unwrap(), text)
    }

    #[test]
    fn the_table_lists_exactly_the_fields() {
        let everything = Spec {
            heads: Some(1),
            bias: Some(Bias::None),
            aggregation: Some(Aggregation::Sum),
            m0: Some(vec![]),
            r0: Some(vec![]),
            b0: Some(vec![]),
            tau: Some(1.0),
            records: Some(2),
            times: Some(vec![]),
            stop_loss: Some(0.0),
            stop_alignment: Some((0, 0, 0.0)),
            m: Some(vec![]),
            r: Some(vec![]),
            b: Some(vec![]),
            at: Some(At::Point),
            most_removed: Some(1),
            evaluator: Some(EvaluatorKind::Qmc),
            tolerance: Some(1.0),
            points: Some(1),
            scrambles: Some(1),
            starts: Some(1),
            engine: Some(Engines::Both),
            dimension: Some(1),
            dimensions: Some(vec![]),
            ..Spec::default()
        };
        let Value::Object(map) = serde_json::to_value(everything).unwrap() else { panic!("not an object") };
        let mut names: Vec<_> = map.keys().map(String::as_str).collect();
        let mut listed: Vec<_> = FIELDS.iter().map(|f| f.name).collect();
        names.sort_unstable();
        listed.sort_unstable();
        assert_eq!(names, listed);
    }

    #[test]
    fn a_completed_spec_completes_to_itself() {
        for purpose in [Purpose::Flow, Purpose::Simulate, Purpose::Compare, Purpose::Prune] {
            let once = spec("{}").unwrap().complete(purpose).unwrap();
            let text = serde_json::to_string(&once).unwrap();
            assert_eq!(spec(&text).unwrap().complete(purpose).unwrap(), once);
        }
    }

    #[test]
    fn unknown_fields_are_refused_with_the_nearest_name() {
        let message = |json: &str| spec(json).unwrap_err().to_string();
        assert_eq!(message(r#"{"lenght": 6}"#), "spec: unknown field \"lenght\"; did you mean \"length\"?");
        assert!(message(r#"{"theta": {"kind": "flip", "nuu": [1]}}"#).contains("did you mean \"nu\""));
        assert!(message(r#"{"attention": "softmx"}"#).starts_with("attention: "));
        assert!(message(r#"{"length": 6.5}"#).starts_with("length: "));
        assert!(message("[1]").contains("JSON object"));
        assert!(message("{").contains("not valid JSON"));
    }

    #[test]
    fn impossible_specs_are_refused() {
        let cases = [
            (r#"{"length": 1}"#, "length"),
            (r#"{"heads": 0}"#, "heads"),
            (r#"{"gamma": -1}"#, "gamma"),
            (r#"{"batch": 0}"#, "batch"),
            (r#"{"heads": 2, "m0": [[0.1, 0.1]]}"#, "m0"),
            (r#"{"m0": [[0.1]]}"#, "m0"),
            (r#"{"m0": [[1, 0]], "r0": [[0.5]]}"#, "m0, r0"),
            (r#"{"b0": [1, 0, 0, 0]}"#, "b0"),
            (r#"{"times": [0, 2, 1]}"#, "times"),
            (r#"{"tau": 0}"#, "tau"),
            (r#"{"tau": 1, "times": [1]}"#, "times"),
            (r#"{"records": 1}"#, "records"),
            (r#"{"dimension": 5}"#, "dimension"),
            (r#"{"replicas": 0}"#, "replicas"),
            (r#"{"theta": {"kind": "gaussian", "mean": [0, 1], "sd": [1]}}"#, "theta.sd"),
            (r#"{"initial": "random", "m0": [[0.1, 0.1]]}"#, "initial"),
        ];
        for (json, field) in cases {
            let error = spec(json).and_then(|s| s.complete(Purpose::Simulate)).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{field}: ")), "{json}: {error}");
            assert!(!error.contains('\n'));
        }
    }

    #[test]
    fn flags_read_their_short_forms() {
        assert_eq!(flag("m0", "0.1,-0.2;0,1").unwrap(), serde_json::json!([[0.1, -0.2], [0, 1]]));
        assert_eq!(flag("theta", "flip:1.8,1.5").unwrap(), serde_json::json!({"kind": "flip", "nu": [1.8, 1.5]}));
        assert_eq!(
            flag("theta", "gaussian:mean=1,0:sd=0.5,1.5").unwrap(),
            serde_json::json!({"kind": "gaussian", "mean": [1, 0], "sd": [0.5, 1.5]})
        );
        assert_eq!(
            flag("theta", "sphere:nu=2:features=3").unwrap(),
            serde_json::json!({"kind": "sphere", "nu": 2, "features": 3})
        );
        assert_eq!(flag("stop_alignment", "0,1,-0.5").unwrap(), serde_json::json!([0, 1, -0.5]));
        for (name, text) in
            [("gamma", "nan"), ("gamma", "inf"), ("gamma", "1e999"), ("length", "-1"), ("times", "1,,2")]
        {
            assert!(flag(name, text).is_err(), "{name} {text}");
        }
    }

    #[test]
    fn flags_replace_the_other_way_to_give_times() {
        let mut map = Spec::from_json(r#"{"times": [0, 1]}"#, "test").unwrap();
        overlay(&mut map, Map::from_iter([("tau".to_string(), Value::from(5))]), Purpose::Flow);
        let spec = Spec::from_map(&map).unwrap().complete(Purpose::Flow).unwrap();
        assert_eq!(spec.recorded_times().len(), 101);
        assert_eq!(spec.recorded_times()[100], 5.0);
    }

    #[test]
    fn another_attention_brings_its_defaults() {
        let attention = Value::from("softmax");
        let over = |json: &str| {
            let mut map = Spec::from_json(json, "test").unwrap();
            overlay(&mut map, Map::from_iter([("attention".to_string(), attention.clone())]), Purpose::Flow);
            Spec::from_map(&map).unwrap().attention()
        };
        let completed = r#"{"attention": "softmax1", "bias": "trained", "aggregation": "sum"}"#;
        assert_eq!(over(completed), Attention::from(Activation::Softmax));
        let chosen = r#"{"attention": "softmax1", "bias": "half-norm", "aggregation": "sum"}"#;
        assert_eq!(over(chosen).bias, Bias::HalfNorm);
    }

    #[test]
    fn long_sequences_get_fewer_points() {
        let points =
            |length: usize| Spec { length, ..Spec::default() }.complete(Purpose::Flow).unwrap().points.unwrap();
        assert_eq!(points(6), 1 << 16);
        assert!(points(1000) < 1 << 13 && points(1000).is_power_of_two());
    }
}
