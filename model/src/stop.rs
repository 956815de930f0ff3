//! Why a trajectory ended.

use serde::{Deserialize, Serialize};

use crate::error::Error;

/// Why a trajectory ended, with the time `tau` at which it did.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "reason", rename_all = "kebab-case")]
pub enum StopReason {
    /// The last requested time was reached.
    Completed,
    /// The loss fell below the requested value.
    LossBelow {
        /// The requested value.
        value: f64,
        /// When it was crossed.
        time: f64,
        /// Standard error of the time over scrambles.
        standard_error: Option<f64>,
        /// Scrambles that got there.
        reached: usize,
        /// Scrambles in all.
        scrambles: usize,
    },
    /// An alignment crossed the requested value.
    AlignmentCrossed {
        /// Head, from zero.
        head: usize,
        /// Feature, from zero.
        feature: usize,
        /// The requested value.
        value: f64,
        /// When it was crossed.
        time: f64,
        /// Standard error of the time over scrambles.
        standard_error: Option<f64>,
        /// Scrambles that got there.
        reached: usize,
        /// Scrambles in all.
        scrambles: usize,
    },
    /// The solver used up its steps.
    StepBudget {
        /// How far it came.
        time: f64,
        /// Steps taken.
        steps: usize,
        /// Steps rejected on the way.
        rejected: usize,
    },
    /// The solver cannot go on: its step shrank to nothing.
    StepTooSmall {
        /// How far it came.
        time: f64,
        /// Steps taken.
        steps: usize,
        /// Steps rejected on the way.
        rejected: usize,
    },
    /// The right-hand side of the flow is not finite there, however small the step.
    NotFinite {
        /// How far it came.
        time: f64,
        /// The derivative that is not finite.
        variable: String,
    },
    /// The flow runs into overlaps that no keys have, however small the step.
    LeftCone {
        /// How far it came.
        time: f64,
        /// The pivot of `r - m m^T` that turned negative.
        pivot: f64,
    },
    /// A step of SGD would leave the range of finite numbers.
    Diverged {
        /// The step that was not taken.
        step: u64,
        /// Its time.
        time: f64,
        /// The replica that diverged.
        replica: u32,
    },
    /// The work was asked to stop.
    Interrupted {
        /// How far it came.
        time: f64,
    },
}

impl StopReason {
    /// One line for a person, with what to do where something should be done.
    pub fn describe(&self) -> String {
        let error = |e: &Option<f64>| e.map(|e| format!(" +- {e:.2e}")).unwrap_or_default();
        match self {
            Self::Completed => "reached the last requested time".into(),
            Self::LossBelow { value, time, standard_error, reached, scrambles } => {
                format!(
                    "the loss fell below {value} at tau = {}{}{}",
                    number(*time),
                    error(standard_error),
                    share(*reached, *scrambles)
                )
            }
            Self::AlignmentCrossed { head, feature, value, time, standard_error, reached, scrambles } => {
                format!(
                    "m[{head}][{feature}] crossed {value} at tau = {}{}{}",
                    number(*time),
                    error(standard_error),
                    share(*reached, *scrambles)
                )
            }
            Self::StepBudget { time, steps, rejected } => format!(
                "the solver used its {steps} steps ({rejected} rejected) by tau = {}: raise --max-steps, \
                 loosen --relative-tolerance, or try --method bdf",
                number(*time)
            ),
            Self::StepTooSmall { time, steps, rejected } => format!(
                "the solver's step shrank to nothing at tau = {} ({steps} steps, {rejected} rejected): \
                 loosen --relative-tolerance, or try --method bdf",
                number(*time)
            ),
            Self::NotFinite { time, variable } => format!(
                "the derivative of {variable} is not finite just after tau = {}: \
                 check the sizes of theta and of the start, or lower --gamma",
                number(*time)
            ),
            Self::LeftCone { time, pivot } => format!(
                "r - m m^T stops being positive semi-definite just after tau = {} (pivot {pivot:.3e}): \
                 lower --gamma, or tighten --relative-tolerance",
                number(*time)
            ),
            Self::Diverged { step, time, replica } => {
                format!("SGD diverged at step {step} (tau = {}, replica {replica}): lower --gamma", number(*time))
            }
            Self::Interrupted { time } => format!("interrupted at tau = {}; what was recorded is kept", number(*time)),
        }
    }

    /// The error of work, `what`, that needed this run complete: an interruption is one, and nothing else is.
    pub fn error(&self, what: &str) -> Error {
        match self {
            Self::Interrupted { .. } => Error::interrupted(what),
            other => Error::invalid(what, other.describe()),
        }
    }

    /// Whether the run did what it was asked to: it completed or met an event.
    pub fn as_requested(&self) -> bool {
        matches!(self, Self::Completed | Self::LossBelow { .. } | Self::AlignmentCrossed { .. })
    }
}

/// How many scrambles an event is told of, when not all.
fn share(reached: usize, scrambles: usize) -> String {
    if reached == scrambles {
        String::new()
    } else {
        format!(", in {reached} of {scrambles} scrambles; averages end there")
    }
}

/// A time as a person writes it.
fn number(time: f64) -> String {
    if time == 0.0 || (1e-3..1e7).contains(&time) {
        let text = format!("{time:.6}");
        text.trim_end_matches('0').trim_end_matches('.').to_string()
    } else {
        format!("{time:.3e}")
    }
}
