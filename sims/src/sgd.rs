//! Online SGD (`theory/README.md` section 5): its parameters and its start, whichever engine runs it.
//!
//! ```text
//! k_h <- k_h - (eta / B) sum_{samples, l} g_hl X_l,    eta = gamma / D,    tau = gamma steps / D
//! ```

use headflow_model::{Attention, Error, OrderParameters, Task, Watch};
use serde::{Deserialize, Serialize};

use crate::kernels;

/// Beyond this size of a score, or of an update's coefficient, single precision no longer resolves
/// differences of scores of order 1: SGD has diverged.
const DIVERGED: f64 = 1e7;

/// Whether a score or coefficient is one to go on with; a NaN is not.
pub(crate) fn in_range(value: f64) -> bool {
    value.abs() < DIVERGED
}

/// Memory that the keys and tokens of all replicas may take, in bytes.
pub(crate) const MEMORY_LIMIT: usize = 8 << 30;

/// The largest dimension of the overlap chain: beyond it steps of size `gamma / D` are lost in the
/// rounding of overlaps of order 1.
const LARGEST_CHAIN: usize = 1_000_000_000_000;

/// How a simulation represents the keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Engine {
    /// Keys and tokens in `D` dimensions ([`crate::direct`]).
    #[default]
    Direct,
    /// The order parameters alone, exact in law at a cost that does not depend on `D`
    /// ([`crate::overlap_chain`]).
    Overlap,
}

impl Engine {
    /// The name in specs, routes and help texts.
    pub fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Overlap => "overlap",
        }
    }
}

/// What all replicas of a simulation share.
#[derive(Debug, Clone)]
pub struct Sgd {
    /// The task.
    pub task: Task,
    /// The attention.
    pub attention: Attention,
    /// Token dimension `D`.
    pub dimension: usize,
    /// Learning rate in units of `1 / D`: `eta = gamma / D`.
    pub gamma: f64,
    /// Samples per step `B`.
    pub batch: usize,
    /// Seed of all random numbers.
    pub seed: u64,
    /// How the keys are represented.
    pub engine: Engine,
}

/// Initial keys.
#[derive(Debug, Clone, PartialEq)]
pub enum Start {
    /// Keys with exactly these overlaps.
    Given(OrderParameters),
    /// For each replica keys with overlaps of its own.
    Each(Vec<OrderParameters>),
    /// Independent keys `N(0, scale^2 / D)`, different in every replica, with biases `b`.
    Random {
        /// Number of heads.
        heads: usize,
        /// Standard deviation of a key's norm per direction, times `sqrt(D)`.
        scale: f64,
        /// Initial biases, length `heads`.
        b: Vec<f64>,
    },
}

impl Start {
    /// Number of heads.
    pub fn heads(&self) -> usize {
        match self {
            Self::Given(point) => point.heads(),
            Self::Each(points) => points.first().map_or(0, OrderParameters::heads),
            Self::Random { heads, .. } => *heads,
        }
    }

    /// The given overlaps of replica `index`; `None` for random keys.
    ///
    /// # Errors
    /// When there is a point for each replica, but none for this one.
    pub(crate) fn point(&self, index: u32) -> Result<Option<&OrderParameters>, Error> {
        match self {
            Self::Given(point) => Ok(Some(point)),
            Self::Each(points) => points.get(index as usize).map(Some).ok_or_else(|| {
                Error::invalid("replicas", format!("replica {index} has no start: there are {} of them", points.len()))
            }),
            Self::Random { .. } => Ok(None),
        }
    }
}

/// The step that a diverging replica could not take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Diverged {
    /// Steps taken before it.
    pub step: u64,
}

/// Why a replica took no step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Halt {
    /// It diverges.
    Diverged(Diverged),
    /// Whoever watches asked it to stop.
    Interrupted,
}

/// [`Halt::Interrupted`] if `watch`, where there is one, interrupts.
#[inline(always)]
pub(crate) fn look(watch: Option<&dyn Watch>) -> Result<(), Halt> {
    match watch {
        Some(watch) if watch.interrupted() => Err(Halt::Interrupted),
        _ => Ok(()),
    }
}

/// Random numbers drawn between two looks at the watch: about ten milliseconds. Steps that take more look on the way.
pub(crate) const NUMBERS_BETWEEN_LOOKS: usize = 1 << 23;

impl Sgd {
    /// Whether a step takes so long that it must look at the watch on the way.
    pub(crate) fn steps_are_long(&self, heads: usize) -> bool {
        self.numbers_per_step(heads).max(self.replica_bytes(heads)) > NUMBERS_BETWEEN_LOOKS
    }

    /// Checks the parameters against each other and the start.
    ///
    /// # Errors
    /// When `D < H + F` (overlap chain: `D < F + H + L`), `gamma` is not positive and finite, the
    /// batch is empty, or shapes differ.
    pub fn validate(&self, start: &Start) -> Result<(), Error> {
        let (heads, features, length) = (start.heads(), self.task.features(), self.task.length());
        if heads == 0 {
            return Err(Error::invalid("heads", "there must be at least one"));
        }
        if self.dimension < heads + features {
            return Err(Error::invalid(
                "dimension",
                format!(
                    "D = {} is too small: {heads} keys and {features} spikes need D >= H + F = {}",
                    self.dimension,
                    heads + features
                ),
            ));
        }
        if !(self.gamma.is_finite() && self.gamma > 0.0) {
            return Err(Error::invalid(
                "gamma",
                format!("SGD needs a positive learning rate, got {} (gamma = 0 is the flow's limit)", self.gamma),
            ));
        }
        match self.engine {
            Engine::Direct => self.validate_memory(heads)?,
            Engine::Overlap if self.dimension < features + heads + length => {
                return Err(Error::invalid(
                    "dimension",
                    format!(
                        "D = {} is too small for the overlap chain: it needs D >= F + H + L = {} (or use --engine direct)",
                        self.dimension,
                        features + heads + length
                    ),
                ));
            }
            Engine::Overlap if self.dimension > LARGEST_CHAIN => {
                return Err(Error::invalid(
                    "dimension",
                    format!(
                        "D = {} is above the limit of {LARGEST_CHAIN:e}: the steps would be lost in rounding; use flow",
                        self.dimension
                    ),
                ));
            }
            Engine::Overlap => {}
        }
        if self.batch == 0 {
            return Err(Error::invalid("batch", "there must be at least one sample a step"));
        }
        let points = match start {
            Start::Given(point) => std::slice::from_ref(point),
            Start::Each(points) => points,
            Start::Random { .. } => &[],
        };
        if let Some(point) = points.iter().find(|p| (p.heads(), p.features()) != (heads, features)) {
            return Err(Error::invalid(
                "m0",
                format!(
                    "is {} x {} but there are {heads} heads, and theta has {features} features",
                    point.heads(),
                    point.features()
                ),
            ));
        }
        match start {
            Start::Random { scale, .. } if !(scale.is_finite() && *scale >= 0.0) => {
                Err(Error::invalid("key_scale", format!("must be finite and not negative, got {scale}")))
            }
            Start::Random { heads, b, .. } if b.len() != *heads => {
                Err(Error::invalid("b0", format!("has length {} but there are {heads} heads", b.len())))
            }
            _ => Ok(()),
        }
    }

    fn validate_memory(&self, heads: usize) -> Result<(), Error> {
        let bytes = self.replica_bytes(heads);
        if bytes > MEMORY_LIMIT || self.dimension > 1 << 33 {
            return Err(Error::invalid(
                "dimension",
                format!(
                    "the keys and tokens of one replica at D = {} need {:.0} GiB, above the limit of {} GiB: \
                     use --engine overlap",
                    self.dimension,
                    self.dimension as f64 * 4.0 * (heads + self.task.length()) as f64 / (1u64 << 30) as f64,
                    MEMORY_LIMIT >> 30
                ),
            ));
        }
        Ok(())
    }

    /// Memory that one replica's keys and tokens take: its keys, one sample, and the update of a
    /// batch; next to nothing for the overlap chain.
    pub(crate) fn replica_bytes(&self, heads: usize) -> usize {
        match self.engine {
            Engine::Direct => (heads * if self.batch > 1 { 2 } else { 1 } + self.task.length())
                .saturating_mul(kernels::stride(self.dimension.min(1 << 33)))
                .saturating_mul(size_of::<f32>()),
            Engine::Overlap => {
                let tokens = self.task.length().saturating_mul(16 * (self.task.features() + 3 * heads + 4));
                // Partial sums of eight for every product, and a handful of H x H matrices.
                tokens.saturating_add(64 * heads * (self.task.features() + 3 * heads + 4)).saturating_add(1 << 14)
            }
        }
    }

    /// The work of one step, in units of a random number.
    pub(crate) fn numbers_per_step(&self, heads: usize) -> usize {
        match self.engine {
            Engine::Direct => self.batch.saturating_mul(self.task.length()).saturating_mul(self.dimension),
            // A step of the chain is more than its random numbers: products, and factors of H x H matrices.
            Engine::Overlap => {
                let products = 10 * self.task.length() * (self.task.features() + heads + 1) * (1 + heads / 4);
                self.batch.saturating_mul(products.saturating_add(4 * heads * heads * heads))
            }
        }
    }

    /// Time that one step advances: `gamma / D`.
    pub fn time_step(&self) -> f64 {
        self.gamma / self.dimension as f64
    }

    /// The step at which `time` is reached, to the nearest.
    pub fn step_at(&self, time: f64) -> u64 {
        (time / self.time_step()).round() as u64
    }
}
