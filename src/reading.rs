//! Who reads which field of a spec: what is given and not read is refused, never ignored.
//!
//! ```text
//! a field is read   <=>   the reader names it in `also`, or one of the field's rules
//!                         is for the reader's purpose and all its conditions hold;
//!                         and the reader does not set it itself (`own`)
//! ```
//!
//! The rules stand beside the fields, in [`FIELDS`](crate::spec::FIELDS): the one table.

use std::fmt;

use headflow_model::{Error, largest_size};

use crate::phase::Quantity;
use crate::spec::{At, EvaluatorKind, FIELDS, Field, Initial, Spec};

/// What a spec is completed for: a command, or a quantity of a phase diagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// The flow.
    Flow,
    /// The population loss at a point.
    Loss,
    /// SGD at one dimension.
    Simulate,
    /// Theory against SGD.
    Compare,
    /// Growth rates at stationary points.
    Stability,
    /// Stages of a flow, or of a simulation when an engine is given.
    Stages,
    /// The Bayes risk of the task.
    Bayes,
    /// The lowest loss over keys and biases.
    Optimum,
    /// Removal of heads after a flow, after a simulation when an engine is given, or at a point.
    Prune,
    /// One cell of a phase diagram.
    Phase(Quantity),
}

impl Purpose {
    /// Every purpose.
    pub const ALL: [Self; 16] = [
        Self::Flow,
        Self::Loss,
        Self::Simulate,
        Self::Compare,
        Self::Stability,
        Self::Stages,
        Self::Bayes,
        Self::Optimum,
        Self::Prune,
        RISK,
        LOWEST,
        REGRET,
        FLOW_LOSS,
        HEADS_ON,
        LEARNED,
        RATE,
    ];

    /// The command.
    pub fn command(self) -> &'static str {
        match self {
            Self::Flow => "flow",
            Self::Loss => "loss",
            Self::Simulate => "simulate",
            Self::Compare => "compare",
            Self::Stability => "stability",
            Self::Stages => "stages",
            Self::Bayes => "bayes",
            Self::Optimum => "optimum",
            Self::Prune => "prune",
            Self::Phase(_) => "phase",
        }
    }

    /// The command that does what one cell of a diagram does, where there is one.
    pub(crate) fn of_cell(self) -> Self {
        match self {
            RISK => Self::Bayes,
            FLOW_LOSS => Self::Flow,
            HEADS_ON | LEARNED => Self::Stages,
            RATE => Self::Stability,
            other => other,
        }
    }

    /// Whether one set of points serves, the first scramble: several states have no mean, or a search one landscape.
    pub(crate) fn has_one_scramble(self) -> bool {
        matches!(self, Self::Optimum | Self::Prune | LOWEST | REGRET | HEADS_ON | LEARNED)
    }
}

impl fmt::Display for Purpose {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Phase(quantity) => write!(to, "phase --quantity {}", quantity.name()),
            other => to.write_str(other.command()),
        }
    }
}

const RISK: Purpose = Purpose::Phase(Quantity::BayesRisk);
const LOWEST: Purpose = Purpose::Phase(Quantity::OptimalLoss);
const REGRET: Purpose = Purpose::Phase(Quantity::Regret);
const FLOW_LOSS: Purpose = Purpose::Phase(Quantity::FlowLoss);
const HEADS_ON: Purpose = Purpose::Phase(Quantity::SpecialisedHeads);
const LEARNED: Purpose = Purpose::Phase(Quantity::Stages);
const RATE: Purpose = Purpose::Phase(Quantity::GrowthRate);

/// A condition under which a field is read.
#[derive(Debug, Clone, Copy)]
pub struct When {
    /// In words, after "read".
    words: &'static str,
    holds: fn(&Spec) -> bool,
}

const fn when(words: &'static str, holds: fn(&Spec) -> bool) -> When {
    When { words, holds }
}

const SAMPLED: When = when("with evaluator qmc", |s| s.evaluator == Some(EvaluatorKind::Qmc));
const EXACT: When = when("with evaluator quadrature", |s| s.evaluator == Some(EvaluatorKind::Quadrature));
const AGGREGATION: When = when("with aggregation", |s| s.aggregation.is_some());
const NOISE: When = when("with gamma above 0", |s| s.gamma > 0.0);
const GIVEN: When = when("with initial given", |s| s.initial == Initial::Given);
// From m0 and key_scale follows r0, which then stands for both.
const NO_OVERLAPS: When = when("without r0", |s| s.initial == Initial::Random || s.r0.is_none());
const NO_TIMES: When = when("without times", |s| s.times.is_none());
const ENGINE: When = when("with an engine", |s| s.engine.is_some());
const NO_ENGINE: When = when("without an engine", |s| s.engine.is_none());
const DRAWN: When = when("with an engine or initial random", |s| s.engine.is_some() || s.initial == Initial::Random);
const TRAINED: When = when("without a point m", |s| s.m.is_none());
const AT_POINT: When = when("at point", |s| s.at == Some(At::Point));
const AT_PLATEAUS: When = when("at plateaus", |s| s.at == Some(At::Plateaus));
const ESCAPES: When = when("at unspecialised or a point m = 0", |s| match s.at {
    Some(At::Unspecialised) => true,
    Some(At::Point) => largest_size(s.m.iter().flatten().flatten()) == 0.0,
    _ => false,
});

/// A field is read for one of these purposes, when all conditions hold.
#[derive(Debug, Clone, Copy)]
pub struct Rule {
    purposes: &'static [Purpose],
    conditions: &'static [When],
}

const fn rule(purposes: &'static [Purpose], conditions: &'static [When]) -> Rule {
    Rule { purposes, conditions }
}

use Purpose::{Bayes, Compare, Flow, Loss, Optimum, Prune, Simulate, Stability, Stages};

/// What goes along a path from a start.
const PATHS: &[Purpose] = &[Flow, Simulate, Compare, Stages, FLOW_LOSS, HEADS_ON, LEARNED];
/// What takes population averages, whatever else is given.
const AVERAGES: &[Purpose] =
    &[Flow, Loss, Compare, Stability, Optimum, LOWEST, REGRET, FLOW_LOSS, HEADS_ON, LEARNED, RATE];

/// The task.
pub(crate) const TASK: &[Rule] = &[rule(&Purpose::ALL, &[])];
/// What has heads; the bounds of `bayes` are for all activations.
const HEADED: &[Purpose] = &[
    Flow, Loss, Simulate, Compare, Stability, Stages, Optimum, Prune, LOWEST, REGRET, FLOW_LOSS, HEADS_ON, LEARNED,
    RATE,
];
/// Heads and how they are added.
pub(crate) const HEADS: &[Rule] = &[rule(HEADED, &[]), rule(&[Bayes], &[])];
/// Their attention: `bayes` reads whose aggregation it is that is not the default.
pub(crate) const ATTENTION: &[Rule] = &[rule(HEADED, &[]), rule(&[Bayes], &[AGGREGATION])];
/// Their biases: the bounds of `bayes` hold for all.
pub(crate) const BIAS: &[Rule] = &[rule(HEADED, &[])];
/// The learning rate.
pub(crate) const RATES: &[Rule] = &[rule(PATHS, &[]), rule(&[Stability], &[]), rule(&[Prune], &[TRAINED])];
/// Samples per step.
pub(crate) const BATCH: &[Rule] =
    &[rule(PATHS, &[NOISE]), rule(&[Stability], &[NOISE]), rule(&[Prune], &[TRAINED, NOISE])];
/// The kind of start, and times that are given one by one.
pub(crate) const START: &[Rule] = &[rule(PATHS, &[]), rule(&[Stability], &[AT_PLATEAUS]), rule(&[Prune], &[TRAINED])];
/// Overlaps at the start.
pub(crate) const OVERLAPS: &[Rule] =
    &[rule(PATHS, &[GIVEN]), rule(&[Stability], &[AT_PLATEAUS, GIVEN]), rule(&[Prune], &[TRAINED, GIVEN])];
/// Biases at the start.
pub(crate) const BIASES: &[Rule] = &[
    rule(PATHS, &[]),
    rule(&[Stability], &[AT_PLATEAUS]),
    rule(&[Stability], &[ESCAPES, NOISE]),
    rule(&[Prune], &[TRAINED]),
];
/// The size of keys at the start.
pub(crate) const KEYS: &[Rule] = &[
    rule(PATHS, &[NO_OVERLAPS]),
    rule(&[Stability], &[AT_PLATEAUS, NO_OVERLAPS]),
    rule(&[Stability], &[ESCAPES]),
    rule(&[Prune], &[TRAINED, NO_OVERLAPS]),
];
/// The last time.
pub(crate) const LAST: &[Rule] =
    &[rule(PATHS, &[NO_TIMES]), rule(&[Stability], &[AT_PLATEAUS, NO_TIMES]), rule(&[Prune], &[TRAINED, NO_TIMES])];
/// The number of times: a loss at the last one does not depend on it.
pub(crate) const RECORDS: &[Rule] = &[
    rule(&[Flow, Simulate, Compare, Stages, HEADS_ON, LEARNED], &[NO_TIMES]),
    rule(&[Stability], &[AT_PLATEAUS, NO_TIMES]),
    rule(&[Prune], &[TRAINED, NO_TIMES]),
];
/// Events that end a flow.
pub(crate) const EVENTS: &[Rule] = &[rule(&[Flow, FLOW_LOSS], &[])];
/// A point.
pub(crate) const POINTS: &[Rule] = &[rule(&[Loss, Prune], &[]), rule(&[Stability], &[AT_POINT])];
/// Where stability is asked.
pub(crate) const WHERE: &[Rule] = &[rule(&[Stability], &[])];
/// Flows, which may settle.
pub(crate) const SETTLING: &[Rule] = &[
    rule(&[Flow, FLOW_LOSS, HEADS_ON, LEARNED], &[]),
    rule(&[Stages], &[NO_ENGINE]),
    rule(&[Prune], &[TRAINED, NO_ENGINE]),
];
/// How stationary a point, or the end of a flow, must be.
pub(crate) const STATIONARY: &[Rule] = &[
    rule(&[Stability], &[AT_POINT]),
    rule(&[Flow, FLOW_LOSS, HEADS_ON, LEARNED], &[]),
    rule(&[Stages], &[NO_ENGINE]),
    rule(&[Prune], &[TRAINED, NO_ENGINE]),
];
/// What counts as on and as a plateau.
pub(crate) const CRITERIA: &[Rule] = &[rule(&[Stages, HEADS_ON, LEARNED], &[]), rule(&[Stability], &[AT_PLATEAUS])];
/// Pruning.
pub(crate) const PRUNING: &[Rule] = &[rule(&[Prune], &[])];
/// What computes population averages.
pub(crate) const EVALUATOR: &[Rule] =
    &[rule(AVERAGES, &[]), rule(&[Bayes], &[]), rule(&[Stages], &[NO_ENGINE]), rule(&[Prune], &[TRAINED, NO_ENGINE])];
/// What belongs to quadrature.
pub(crate) const TOLERANCE: &[Rule] =
    &[rule(AVERAGES, &[EXACT]), rule(&[Bayes, RISK, Prune], &[]), rule(&[Stages], &[NO_ENGINE, EXACT])];
/// What belongs to sampling.
pub(crate) const SAMPLES: &[Rule] = &[
    rule(AVERAGES, &[SAMPLED]),
    rule(&[Stages], &[NO_ENGINE, SAMPLED]),
    rule(&[Prune], &[TRAINED, NO_ENGINE, SAMPLED]),
];
/// The solver of flows.
pub(crate) const SOLVER: &[Rule] = &[
    rule(&[Flow, Compare, FLOW_LOSS, HEADS_ON, LEARNED], &[]),
    rule(&[Stability], &[AT_PLATEAUS]),
    rule(&[Stages], &[NO_ENGINE]),
    rule(&[Prune], &[TRAINED, NO_ENGINE]),
];
/// Searches for the lowest loss.
pub(crate) const SEARCH: &[Rule] = &[rule(&[Optimum, LOWEST, REGRET], &[])];
/// Who simulates.
pub(crate) const ENGINES: &[Rule] = &[rule(&[Simulate, Compare, Stages], &[]), rule(&[Prune], &[TRAINED])];
/// The dimension, in either form.
pub(crate) const DIMENSIONS: &[Rule] = &[
    rule(&[Simulate, Compare], &[]),
    rule(&[Stability], &[ESCAPES]),
    rule(&[Stages], &[ENGINE]),
    rule(&[Prune], &[TRAINED, DRAWN]),
];
/// Independent runs.
pub(crate) const REPLICAS: &[Rule] =
    &[rule(&[Simulate, Compare], &[]), rule(&[Stages], &[ENGINE]), rule(&[Prune], &[TRAINED, DRAWN])];
/// Samples of a simulation's losses.
pub(crate) const TESTS: &[Rule] =
    &[rule(&[Simulate, Compare], &[]), rule(&[Stages], &[ENGINE]), rule(&[Prune], &[TRAINED, ENGINE])];
/// Random numbers.
pub(crate) const SEED: &[Rule] = &[
    rule(&[Simulate, Compare, Optimum, Prune, LOWEST, REGRET], &[]),
    rule(&[Flow, Loss, Stability, FLOW_LOSS, HEADS_ON, LEARNED, RATE], &[SAMPLED]),
    rule(&[Stability], &[ESCAPES, NOISE]),
    rule(&[Stages], &[ENGINE]),
    rule(&[Stages], &[NO_ENGINE, SAMPLED]),
];

/// Who reads a spec: a purpose, or a figure that departs from one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reader {
    /// What the spec is completed for.
    pub purpose: Purpose,
    /// The figure.
    pub figure: Option<&'static str>,
    /// Fields that it reads beside those of its purpose.
    pub also: &'static [&'static str],
    /// Fields that it varies, sets itself or has no use for.
    pub own: &'static [&'static str],
}

impl From<Purpose> for Reader {
    fn from(purpose: Purpose) -> Self {
        Self { purpose, figure: None, also: &[], own: &[] }
    }
}

impl fmt::Display for Reader {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.figure {
            Some(name) => write!(to, "figure {name}"),
            None => self.purpose.fmt(to),
        }
    }
}

impl Reader {
    /// Whether it reads a field of a spec whose choices (evaluator, `at`) are made.
    pub fn reads(&self, field: &Field, spec: &Spec) -> bool {
        self.decides(field, |rule| rule.conditions.iter().all(|condition| (condition.holds)(spec)))
    }

    /// Whether it reads a field of some spec.
    pub fn may_read(&self, field: &Field) -> bool {
        self.decides(field, |_| true)
    }

    /// Whether it varies a field, or has its own.
    pub(crate) fn owns(&self, field: &Field) -> bool {
        self.own.contains(&field.name)
    }

    fn decides(&self, field: &Field, applies: impl Fn(&Rule) -> bool) -> bool {
        let by_rule = || field.rules.iter().any(|rule| rule.purposes.contains(&self.purpose) && applies(rule));
        !self.owns(field) && (self.also.contains(&field.name) || by_rule())
    }

    /// Why it does not read a field of `spec`, in words.
    pub(crate) fn why_not(&self, field: &Field, spec: &Spec) -> String {
        let mut reasons: Vec<String> = Vec::new();
        for rule in field.rules.iter().filter(|rule| rule.purposes.contains(&self.purpose)) {
            let unmet = rule.conditions.iter().filter(|condition| !(condition.holds)(spec));
            let words: Vec<&str> = unmet.map(|condition| condition.words).collect();
            if !words.is_empty() && !reasons.contains(&words.join(", ")) {
                reasons.push(words.join(", "));
            }
        }
        if reasons.is_empty() {
            format!("read by {}", readers(field, self.purpose).join(", "))
        } else {
            format!("read {}", reasons.join(", or "))
        }
    }

    /// The refusal of fields that were given and are not read, all in one line.
    pub(crate) fn refusal(&self, fields: &[&Field], spec: &Spec) -> Error {
        let names: Vec<&str> = fields.iter().map(|field| field.name).collect();
        let place = names.join(", ");
        if fields.iter().all(|field| self.owns(field)) {
            let them =
                if fields.len() == 1 { "it, or needs its own; leave it" } else { "them, or needs its own; leave them" };
            return Error::invalid(place, format!("{self} varies {them} out"));
        }
        let (them, why) = match fields {
            [field] => ("it", self.why_not(field, spec)),
            _ => {
                let each = fields.iter().map(|field| format!("{}: {}", field.name, self.why_not(field, spec)));
                ("them", each.collect::<Vec<_>>().join("; "))
            }
        };
        Error::invalid(place, format!("{self} does not read {them} ({why}); leave {them} out"))
    }
}

/// Who reads a field, by command; for a phase diagram also by the diagrams' quantities.
pub(crate) fn readers(field: &Field, asked: Purpose) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for purpose in Purpose::ALL.into_iter().filter(|purpose| field.rules.iter().any(|r| r.purposes.contains(purpose))) {
        let name = match (asked, purpose) {
            (Purpose::Phase(_), Purpose::Phase(_)) => purpose.to_string(),
            _ => purpose.command().to_string(),
        };
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

/// The commands that read a field.
pub fn commands(field: &Field) -> Vec<String> {
    readers(field, Purpose::Flow)
}

/// The names of all fields.
pub const NAMES: [&str; FIELDS.len()] = {
    let mut names = [""; FIELDS.len()];
    let mut i = 0;
    while i < names.len() {
        names[i] = FIELDS[i].name;
        i += 1;
    }
    names
};
