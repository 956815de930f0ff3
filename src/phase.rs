//! Phase diagrams: one number over two parameters of a spec.
//!
//! A parameter is a numeric field (`length`, `heads`, `gamma`, ...), a part of theta (`theta.nu` sets all entries of
//! `nu`, `theta.nu[1]` one of them), or `theta.scale`, which multiplies all of theta. Whichever axis they are on, the
//! general is set before the part, and the scale multiplies what both have set. An axis that changes nothing is refused.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use headflow_model::{Error, Watch, largest, largest_size, smallest};
use headflow_theory::bayes::best_bayes_risk;
use headflow_theory::evaluators::Averages;
use headflow_theory::flow::average;
use headflow_theory::moments::Watched;
use headflow_theory::optimum::{Optimum, Options, optimum};
use headflow_theory::quadrature::{Quadrature, TIGHTEST};
use headflow_theory::settled::Settled;
use headflow_theory::stability::{Kind, linearise, unspecialised, zero};
use headflow_theory::stages::stages;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::cost;
use crate::spec::{FIELDS, Field, Kind as FieldKind, Purpose, Reader, Spec, count, nearest, overlay};

/// What is drawn over the two parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Quantity {
    /// `1 - E[p_eps]`.
    BayesRisk,
    /// The lowest loss over keys and biases.
    OptimalLoss,
    /// The lowest loss above the Bayes risk.
    Regret,
    /// The loss at the end of a flow.
    FlowLoss,
    /// Heads that are on at the end of a flow.
    SpecialisedHeads,
    /// Features that a flow learns, one stage each.
    Stages,
    /// The largest growth rate at the unspecialised point of gradient flow.
    GrowthRate,
}

impl Quantity {
    /// All quantities.
    pub const ALL: [Self; 7] = [
        Self::BayesRisk,
        Self::OptimalLoss,
        Self::Regret,
        Self::FlowLoss,
        Self::SpecialisedHeads,
        Self::Stages,
        Self::GrowthRate,
    ];

    /// The name on the command line and in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::BayesRisk => "bayes-risk",
            Self::OptimalLoss => "optimal-loss",
            Self::Regret => "regret",
            Self::FlowLoss => "flow-loss",
            Self::SpecialisedHeads => "specialised-heads",
            Self::Stages => "stages",
            Self::GrowthRate => "growth-rate",
        }
    }

    /// The label of a figure.
    pub fn label(self) -> &'static str {
        match self {
            Self::BayesRisk => "Bayes risk",
            Self::OptimalLoss => "optimal loss E*",
            Self::Regret => "regret E* − Bayes risk",
            Self::FlowLoss => "loss after the flow",
            Self::SpecialisedHeads => "heads that are on",
            Self::Stages => "features learned",
            Self::GrowthRate => "largest specialising rate κ",
        }
    }

    /// Whether values are small whole numbers.
    pub fn whole(self) -> bool {
        matches!(self, Self::SpecialisedHeads | Self::Stages)
    }

    /// Whether values are read off a flow, which may not have settled.
    pub fn of_a_flow(self) -> bool {
        matches!(self, Self::FlowLoss | Self::SpecialisedHeads | Self::Stages)
    }

    /// What a cell's spec is completed for.
    pub fn purpose(self) -> Purpose {
        Purpose::Phase(self)
    }

    /// The quantity of that name.
    ///
    /// # Errors
    /// Names the nearest.
    pub fn parse(name: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|q| q.name() == name).ok_or_else(|| {
            let names = Self::ALL.map(Self::name);
            let hint = nearest_name(name, &names).map(|n| format!("; did you mean \"{n}\"?")).unwrap_or_default();
            Error::invalid("quantity", format!("there is no \"{name}\"{hint} (quantities: {})", names.join(", ")))
        })
    }
}

fn nearest_name(name: &str, names: &[&str]) -> Option<String> {
    let dashed: Vec<String> = names.iter().map(|n| n.replace('-', "_")).collect();
    let found = nearest(name, &dashed.iter().map(String::as_str).collect::<Vec<_>>())?;
    dashed.iter().position(|d| *d == found).map(|i| names[i].to_string())
}

/// One side of a phase diagram.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Axis {
    /// The parameter.
    pub field: String,
    /// Its values, increasing, at least two.
    pub values: Vec<f64>,
    /// Whether they are spaced, and drawn, logarithmically.
    #[serde(default)]
    pub log: bool,
}

/// Parameters beside the numeric fields, for messages.
const PARTS_OF_THETA: [&str; 5] = ["theta.scale", "theta.nu", "theta.sd", "theta.mean", "theta.weights"];

/// Most values of an axis.
const MAX_VALUES: usize = 10_000;

/// Most cells of a diagram: each is looked at before any is computed.
const MAX_CELLS: usize = 100_000;

/// How unequal steps may be that count as even: `1, 3, 10` are even steps of the logarithm, to one digit.
const EVEN: f64 = 1.1;

/// Reads `FROM:TO:COUNT`, `log:FROM:TO:COUNT` or `V1,V2,...`: at least two increasing values (rounded if `whole`),
/// and whether they are spaced logarithmically; a list is when its logarithms are evenly spaced, to the digit that
/// `1,3,10` are, and its values are not. `side` names the range in errors.
///
/// # Errors
/// One line that says what is wrong and what would be right.
pub fn parse_range(side: &str, range: &str, whole: bool) -> Result<(Vec<f64>, bool), Error> {
    let wrong = |problem: String| Error::invalid(side, problem);
    let number = |text: &str| {
        text.trim()
            .parse::<f64>()
            .ok()
            .filter(|v| v.is_finite())
            .ok_or_else(|| wrong(format!("\"{}\" is not a finite number", text.trim())))
    };
    let log = range.starts_with("log:");
    let range = range.strip_prefix("log:").unwrap_or(range);
    let values = if range.contains(':') {
        let parts: Vec<&str> = range.split(':').collect();
        let [from, to, count] = parts[..] else {
            return Err(wrong(format!("\"{range}\" is not FROM:TO:COUNT")));
        };
        let (from, to) = (number(from)?, number(to)?);
        let count = crate::spec::count(count)
            .and_then(|count| usize::try_from(count).ok())
            .ok_or_else(|| wrong(format!("the number of values \"{}\" is not a whole number", count.trim())))?;
        if from > to {
            return Err(wrong(format!("the range goes from {from} down to {to}: give the smaller end first")));
        }
        if from == to || count < 2 {
            return Err(wrong(format!("\"{range}\" is one point: an axis needs at least 2 different values")));
        }
        if count > MAX_VALUES {
            return Err(wrong(format!("{count} values are above the limit of {MAX_VALUES}")));
        }
        if log && from <= 0.0 {
            return Err(wrong(format!("a logarithmic range starts above 0, not at {from}")));
        }
        let at = |i: usize| {
            let part = i as f64 / (count - 1) as f64;
            let value = if log { (from.ln() + part * (to / from).ln()).exp() } else { from + part * (to - from) };
            // The ends are what was asked for.
            if i == 0 {
                from
            } else if i + 1 == count {
                to
            } else {
                value
            }
        };
        let mut values: Vec<f64> = (0..count).map(at).collect();
        if whole {
            values.iter_mut().for_each(|v| *v = v.round());
            values.dedup();
        }
        values
    } else {
        range.split(',').map(number).collect::<Result<_, _>>()?
    };
    check_values(side, &values)?;
    let log = log || !range.contains(':') && is_logarithmic(&values);
    Ok((values, log))
}

/// Whether increasing values step evenly in their logarithms, and not in themselves.
fn is_logarithmic(values: &[f64]) -> bool {
    let uneven = |of: fn(f64) -> f64| {
        let steps = || values.windows(2).map(move |pair| of(pair[1]) - of(pair[0]));
        largest(steps()) / smallest(steps())
    };
    values.len() > 2 && values[0] > 0.0 && uneven(f64::ln) <= EVEN && uneven(|v| v) > EVEN
}

fn check_values(side: &str, values: &[f64]) -> Result<(), Error> {
    if values.len() < 2 {
        return Err(Error::invalid(side, "has one point: an axis needs at least 2 different values"));
    }
    if !values.iter().all(|v| v.is_finite()) || !values.is_sorted_by(|a, b| a < b) {
        return Err(Error::invalid(side, "values must be finite and increasing, each given once"));
    }
    Ok(())
}

impl Axis {
    /// Reads `FIELD=FROM:TO:COUNT`, `FIELD=log:FROM:TO:COUNT` or `FIELD=V1,V2,...`; `side` (`x` or `y`) names it in errors.
    ///
    /// # Errors
    /// One line that says what is wrong and what would be right.
    pub fn parse(side: &str, text: &str) -> Result<Self, Error> {
        let wrong = |problem: String| Error::invalid(side, problem);
        let Some((field, range)) = text.split_once('=') else {
            return Err(wrong(format!("\"{text}\" is not FIELD=FROM:TO:COUNT, like theta.nu=0.5:4:40")));
        };
        let field = field.trim().replace('-', "_");
        check_parameter(side, &field)?;
        // One name for each parameter.
        let field = match (field.split_once('['), index(&field)) {
            (Some((root, _)), Some(index)) => format!("{root}[{index}]"),
            _ => field,
        };
        let (values, log) = parse_range(side, range, is_whole(&field))?;
        let axis = Self { field, values, log };
        axis.validate(side)?;
        Ok(axis)
    }

    /// Checks the values.
    ///
    /// # Errors
    /// As [`Axis::parse`].
    pub fn validate(&self, side: &str) -> Result<(), Error> {
        check_parameter(side, &self.field)?;
        check_values(side, &self.values)?;
        // In the text of a float, every exact whole number is a count.
        if let Some(v) = self.values.iter().find(|v| is_whole(&self.field) && count(&v.to_string()).is_none()) {
            return Err(Error::invalid(side, format!("{} is a whole number, got {v}", self.field)));
        }
        Ok(())
    }

    /// The label of a figure.
    pub fn label(&self) -> String {
        let symbol = match self.field.as_str() {
            "length" => "L",
            "heads" => "H",
            "gamma" => "γ",
            "batch" => "B",
            "tau" => "τ",
            "theta.nu" => "ν",
            "theta.nu[0]" => "ν₁",
            "theta.nu[1]" => "ν₂",
            "theta.nu[2]" => "ν₃",
            "theta.sd" => "standard deviation of θ",
            "theta.mean" => "mean of θ",
            "theta.scale" => "scale of θ",
            other => other,
        };
        symbol.into()
    }
}

/// Whether a parameter takes whole numbers.
fn is_whole(field: &str) -> bool {
    field == "theta.features" || FIELDS.iter().any(|f| f.name == field && f.kind == FieldKind::Count)
}

fn numeric_fields() -> Vec<&'static str> {
    FIELDS
        .iter()
        .filter(|f| matches!(f.kind, FieldKind::Count | FieldKind::Number))
        .map(|f| f.name)
        .chain(PARTS_OF_THETA)
        .chain(["theta.features"])
        .collect()
}

fn check_parameter(side: &str, field: &str) -> Result<(), Error> {
    let names = numeric_fields();
    let root = field.split('[').next().unwrap_or(field);
    if names.contains(&root) && (root == field || root.starts_with("theta.") && index(field).is_some()) {
        return Ok(());
    }
    if FIELDS.iter().any(|f| f.name == root) {
        return Err(Error::invalid(
            side,
            format!(
                "{root} is not one number; parameters are numeric fields and parts of theta, like theta.nu or theta.nu[1]"
            ),
        ));
    }
    Err(Error::UnknownField { place: side.into(), name: field.into(), nearest: nearest(root, &names) })
}

fn index(field: &str) -> Option<usize> {
    field.split_once('[')?.1.strip_suffix(']')?.parse().ok()
}

/// Sets a parameter in a map of fields.
///
/// # Errors
/// When theta has no such part.
pub fn set(fields: &mut Map<String, Value>, field: &str, value: f64) -> Result<(), Error> {
    let number = if is_whole(field) { json!(value as u64) } else { json!(value) };
    let Some(part) = field.strip_prefix("theta.") else {
        fields.insert(field.into(), number);
        return Ok(());
    };
    let theta = match fields.get("theta") {
        Some(theta) => theta.clone(),
        None => serde_json::to_value(Spec::default().theta).map_err(|e| Error::unreadable("theta", e))?,
    };
    let Value::Object(mut theta) = theta else { return Err(Error::invalid("theta", "is not a distribution")) };
    if part == "scale" {
        for name in ["nu", "mean", "sd", "points"] {
            if let Some(part) = theta.get_mut(name) {
                scale(part, value);
            }
        }
        // A covariance is of second order.
        if let Some(cov) = theta.get_mut("cov") {
            scale(cov, value * value);
        }
    } else {
        let name = part.split('[').next().unwrap_or(part);
        let kind = theta.get("kind").and_then(Value::as_str).unwrap_or("?").to_string();
        let Some(target) = theta.get_mut(name) else {
            return Err(Error::invalid(field, format!("a theta of kind \"{kind}\" has no \"{name}\"")));
        };
        match (target, index(field)) {
            (Value::Array(entries), Some(i)) => {
                let count = entries.len();
                let Some(entry) = entries.get_mut(i) else {
                    return Err(Error::invalid(field, format!("theta.{name} has {count} entries, counted from 0")));
                };
                *entry = number;
            }
            (Value::Array(entries), None) => entries.iter_mut().for_each(|entry| *entry = number.clone()),
            (_, Some(_)) => return Err(Error::invalid(field, format!("theta.{name} is one number, without entries"))),
            (target, None) => *target = number,
        }
    }
    fields.insert("theta".into(), Value::Object(theta));
    Ok(())
}

fn scale(value: &mut Value, factor: f64) {
    match value {
        Value::Array(entries) => entries.iter_mut().for_each(|entry| scale(entry, factor)),
        _ => {
            if let Some(number) = value.as_f64() {
                *value = json!(number * factor);
            }
        }
    }
}

/// The order in which parameters are set: theta's whole parts, then their entries, then its scale; other fields at any time.
fn rank(field: &str) -> u8 {
    match field {
        "theta.scale" => 2,
        field if field.contains('[') => 1,
        _ => 0,
    }
}

/// The spec of one cell: fields with parameters set, the general before the part, completed for a quantity. Fields
/// that the quantity does not read are dropped.
///
/// # Errors
/// As [`set`] and [`Spec::complete`].
pub fn cell(fields: &Map<String, Value>, quantity: Quantity, values: &[(&str, f64)]) -> Result<Spec, Error> {
    Spec::recorded(&with(fields, values)?, quantity.purpose())
}

/// Fields with parameters set, the general before the part.
fn with(fields: &Map<String, Value>, values: &[(&str, f64)]) -> Result<Map<String, Value>, Error> {
    let mut fields = fields.clone();
    let mut values = values.to_vec();
    values.sort_by_key(|(field, _)| rank(field));
    for (field, value) in values {
        set(&mut fields, field, value)?;
    }
    Ok(fields)
}

/// A phase diagram: a quantity over two parameters, and the other fields that were given.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Diagram {
    /// What is drawn.
    pub quantity: Quantity,
    /// The parameter across.
    pub x: Axis,
    /// The parameter upwards.
    pub y: Axis,
    /// Fields of a spec.
    pub fields: Map<String, Value>,
}

impl Diagram {
    /// The spec of a cell.
    ///
    /// # Errors
    /// As [`cell`].
    pub fn cell(&self, i: usize, j: usize) -> Result<Spec, Error> {
        cell(&self.fields, self.quantity, &self.parameters(i, j))
    }

    fn parameters(&self, i: usize, j: usize) -> [(&str, f64); 2] {
        [(&self.x.field, self.x.values[i]), (&self.y.field, self.y.values[j])]
    }

    /// A cell's spec as it is asked for, and completed.
    fn resolved(&self, i: usize, j: usize, reader: Reader) -> Result<(Spec, Spec), Error> {
        let spec = Spec::from_map(&with(&self.fields, &self.parameters(i, j))?)?;
        spec.validate()?;
        spec.resolved(reader)
    }

    /// Looks at every cell before any work, and gives the fields that all have in common: with the axes they are the
    /// diagram.
    ///
    /// # Errors
    /// When an axis is impossible, sets what the other sets, or changes nothing; when a field was given that no cell reads
    /// or an axis sets; when a cell would hold more than `most_bytes` or take too long ([`cost::check`]); and those of the
    /// cells.
    pub fn check(&self, most_bytes: f64) -> Result<Map<String, Value>, Error> {
        for (side, axis) in [("x", &self.x), ("y", &self.y)] {
            if self.fields.contains_key(&axis.field) {
                return Err(Error::invalid(
                    &axis.field,
                    format!("the axis {side} sets it in every cell; leave it out"),
                ));
            }
        }
        let (common, unread) = self.survey(most_bytes)?;
        if unread.is_empty() {
            return Ok(common);
        }
        let reader = Reader::from(self.quantity.purpose());
        Err(reader.refusal(&unread, &self.resolved(0, 0, reader)?.0))
    }

    /// The same for a diagram that was begun: fields that no cell reads were no obstacle then.
    ///
    /// # Errors
    /// As [`Diagram::check`].
    pub fn recorded(&self, most_bytes: f64) -> Result<Map<String, Value>, Error> {
        Ok(self.survey(most_bytes)?.0)
    }

    /// Looks at the axes and completes every cell: what they have in common, and which of the fields none reads.
    fn survey(&self, most_bytes: f64) -> Result<(Map<String, Value>, Vec<&'static Field>), Error> {
        let reader = Reader::from(self.quantity.purpose());
        self.x.validate("x")?;
        self.y.validate("y")?;
        if self.x.field == self.y.field {
            return Err(Error::invalid("y", format!("is {}, like x: give another parameter", self.y.field)));
        }
        let cells = self.x.values.len() * self.y.values.len();
        if cells > MAX_CELLS {
            let needs = format!("needs {cells} cells");
            return Err(Error::too_costly("x, y", needs, format!("{MAX_CELLS} cells"), "give fewer values"));
        }
        for (side, axis) in [("x", &self.x), ("y", &self.y)] {
            let root = axis.field.split(['.', '[']).next().unwrap_or_default();
            if FIELDS.iter().any(|field| field.name == root && !reader.may_read(field)) {
                let reads = readable(&reader).join(", ");
                return Err(Error::invalid(side, format!("{reader} does not read {root}; it reads {reads}")));
            }
        }
        let mut unread: Vec<&Field> = FIELDS.iter().filter(|field| self.fields.contains_key(field.name)).collect();
        let (mut along_x, mut along_y) = (false, false);
        let mut common: Option<Map<String, Value>> = None;
        let mut first_row: Vec<Map<String, Value>> = Vec::new();
        for (j, b) in self.y.values.iter().enumerate() {
            let mut first: Option<Map<String, Value>> = None;
            for (i, a) in self.x.values.iter().enumerate() {
                let place = || format!("at {} = {a}, {} = {b}", self.x.field, self.y.field);
                let (asked, done) = self
                    .resolved(i, j, reader)
                    .and_then(|both| cost::check(&both.1, reader.purpose, most_bytes).map(|()| both))
                    .map_err(|error| Error::unreadable(place(), error))?;
                unread.retain(|field| !reader.reads(field, &asked));
                let document = done.document()?;
                if let Some(common) = &mut common {
                    common.retain(|name, value| document.get(name) == Some(value));
                } else {
                    common = Some(document.clone());
                }
                match &first {
                    None => first = Some(document.clone()),
                    Some(first) => along_x |= *first != document,
                }
                match first_row.get(i) {
                    None => first_row.push(document),
                    Some(below) => along_y |= *below != document,
                }
            }
        }
        let (spec, _) = self.resolved(0, 0, reader)?;
        for (side, axis, other, effective) in [("x", &self.x, &self.y, along_x), ("y", &self.y, &self.x, along_y)] {
            if effective {
                continue;
            }
            let unmet = FIELDS.iter().find(|field| field.name == axis.field && !reader.reads(field, &spec));
            let why = match unmet {
                Some(field) => reader.why_not(field, &spec),
                None if rank(&other.field) > rank(&axis.field) => format!("{} sets it again", other.field),
                None => "all its cells are the same".into(),
            };
            let problem =
                format!("{} has no effect on {} ({why}): give another parameter", axis.field, self.quantity.name());
            return Err(Error::invalid(side, problem));
        }
        let mut common = common.unwrap_or_default();
        // What an axis changes a part of stands as it was given.
        for (name, value) in self.fields.iter().filter(|(name, _)| unread.iter().all(|field| field.name != *name)) {
            common.entry(name.clone()).or_insert_with(|| value.clone());
        }
        Ok((common, unread))
    }

    /// Whether parts of a diagram that are given again are its own.
    pub fn has(&self, quantity: Option<Quantity>, [x, y]: [Option<&Axis>; 2], given: &Map<String, Value>) -> bool {
        let same = |own: &Axis, other: Option<&Axis>| {
            other.is_none_or(|other| own.field == other.field && own.values == other.values)
        };
        quantity.is_none_or(|quantity| quantity == self.quantity)
            && same(&self.x, x)
            && same(&self.y, y)
            && holds(&self.fields, given, self.quantity.purpose())
    }
}

/// Whether fields that are given again change nothing.
pub fn holds(fields: &Map<String, Value>, given: &Map<String, Value>, purpose: Purpose) -> bool {
    let mut together = fields.clone();
    overlay(&mut together, given.clone(), purpose);
    together == *fields
}

/// The parameters that a reader reads.
fn readable(reader: &Reader) -> Vec<&'static str> {
    let numeric = |field: &&Field| matches!(field.kind, FieldKind::Count | FieldKind::Number | FieldKind::Theta);
    FIELDS.iter().filter(numeric).filter(|field| reader.may_read(field)).map(|field| field.name).collect()
}

/// A value of a cell.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(from = "Saved", into = "Saved")]
pub struct Measured {
    /// The number.
    pub value: f64,
    /// Whether the flow that it is read off had settled; absent without a flow.
    pub settled: Option<Settled>,
}

/// A value in a file: a number alone, where there is no flow.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Saved {
    Number(f64),
    OfAFlow { value: f64, settled: Option<Settled> },
}

impl From<Saved> for Measured {
    fn from(saved: Saved) -> Self {
        match saved {
            Saved::Number(value) => value.into(),
            Saved::OfAFlow { value, settled } => Self { value, settled },
        }
    }
}

impl From<Measured> for Saved {
    fn from(measured: Measured) -> Self {
        match measured {
            Measured { value, settled: None } => Self::Number(value),
            Measured { value, settled } => Self::OfAFlow { value, settled },
        }
    }
}

impl From<f64> for Measured {
    fn from(value: f64) -> Self {
        Self { value, settled: None }
    }
}

/// The quantity for a completed spec; of a flow, with whether it had settled.
///
/// # Errors
/// What went wrong, as one line.
pub fn measure(spec: &Spec, quantity: Quantity, watch: &dyn Watch) -> Result<Measured, Error> {
    if quantity.of_a_flow() {
        of_a_flow(spec, quantity, watch)
    } else {
        number(spec, quantity, watch).map(Measured::from)
    }
}

fn of_a_flow(spec: &Spec, quantity: Quantity, watch: &dyn Watch) -> Result<Measured, Error> {
    let evaluators = spec.evaluators()?;
    // Scrambles may end in different, equivalent states: a mean over them is of use for the loss alone.
    let used = if quantity == Quantity::FlowLoss { evaluators.len() } else { 1 };
    let evaluators = &evaluators[..used];
    let flow = average(evaluators, &spec.start()?, &spec.flow_options(), watch)?;
    if !flow.stop.is_whole() {
        return Err(flow.stop.error("flow"));
    }
    let path = &flow.estimate.mean;
    let value = if quantity == Quantity::FlowLoss {
        path.rows.last().map(|row| row[0]).ok_or_else(|| Error::invalid("times", "nothing was recorded"))?
    } else {
        let found = stages(path, &spec.theta.second_moment(), &spec.criteria())?;
        (match quantity {
            Quantity::Stages => found.order.len(),
            _ => found.last_patterns().iter().filter(|pattern| !pattern.is_off()).count(),
        }) as f64
    };
    Ok(Measured { value, settled: spec.settled(evaluators, &flow.solutions, watch) })
}

fn number(spec: &Spec, quantity: Quantity, watch: &dyn Watch) -> Result<f64, Error> {
    match quantity {
        Quantity::BayesRisk => Ok(best_bayes_risk(&spec.task()?, spec.tolerance.unwrap_or(1e-10))?.risk),
        Quantity::OptimalLoss => Ok(lowest(spec, &spec.evaluators()?, watch)?.minima[0].loss),
        Quantity::Regret => {
            let loss = lowest(spec, &spec.evaluators()?, watch)?.minima[0].loss;
            Ok(loss - best_bayes_risk(&spec.task()?, 1e-10)?.risk)
        }
        Quantity::GrowthRate => {
            let evaluators = spec.evaluators()?;
            let evaluators = Watched::all(&evaluators, watch);
            let settled = unspecialised(&evaluators, 0.0)?;
            // Without a mean of theta it is k = 0, which softmax1 holds at a bias of its own.
            let at = if largest_size(settled.m.iter()) > 0.0 { settled } else { zero(&evaluators[0])? };
            let found = linearise(&evaluators, &at, watch)?;
            let specialising = found.modes.iter().filter(|mode| mode.kind != Kind::Symmetric);
            Ok(largest(specialising.map(|mode| mode.rate)))
        }
        Quantity::FlowLoss | Quantity::SpecialisedHeads | Quantity::Stages => {
            of_a_flow(spec, quantity, watch).map(|found| found.value)
        }
    }
}

/// Losses at minima are evaluated to this part of the search's tolerance, where that can be had.
const MORE_DIGITS: f64 = 1e-3;

/// The lowest losses of a completed spec: a search to gradients of a few tolerances, then, by quadrature, the losses of what
/// it found to more digits. There is at least one minimum.
///
/// # Errors
/// When no start converges, or as [`optimum`].
pub fn lowest(spec: &Spec, evaluators: &[Averages], watch: &dyn Watch) -> Result<Optimum, Error> {
    let options = Options {
        starts: spec.starts.unwrap_or(Options::default().starts),
        seed: spec.seed,
        gradient_tolerance: spec.tolerance.map_or(1e-6, |t| (3.0 * t).max(1e-9)),
        ..Options::default()
    };
    let evaluator = evaluators.first().ok_or_else(|| Error::invalid("scrambles", "there must be at least one"))?;
    let mut found = optimum(evaluator, &options, watch)?;
    if found.minima.is_empty() {
        return Err(Error::invalid(
            "starts",
            format!("none of {} starts converged: use more, or a looser --tolerance", found.starts),
        ));
    }
    if let Averages::Exact(quadrature) = evaluator {
        let tolerance = (quadrature.tolerance() * MORE_DIGITS).max(TIGHTEST);
        let exact = Quadrature::new(&spec.task()?, spec.head_count(), spec.attention(), tolerance)?;
        for minimum in &mut found.minima {
            let evaluation = exact.evaluate_watched(&minimum.at, false, watch);
            if evaluation.error_estimate < quadrature.tolerance() {
                minimum.loss = evaluation.loss.value();
            }
        }
        if watch.interrupted() {
            return Err(Error::interrupted("optimum"));
        }
        found.minima.sort_by(|a, b| a.loss.total_cmp(&b.loss));
    }
    Ok(found)
}

/// The cells of a diagram, row by row (`y` the slow index): not yet there, a value, or what went wrong.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Cells(pub Vec<Option<Result<Measured, String>>>);

impl Cells {
    /// None of `count` is there.
    pub fn empty(count: usize) -> Self {
        Self(vec![None; count])
    }

    /// How many are missing.
    pub fn missing(&self) -> usize {
        self.0.iter().filter(|c| c.is_none()).count()
    }

    /// What went wrong, with the index of the cell.
    pub fn failed(&self) -> Vec<(usize, &str)> {
        let mut all = Vec::new();
        for (i, cell) in self.0.iter().enumerate() {
            if let Some(Err(problem)) = cell {
                all.push((i, problem.as_str()));
            }
        }
        all
    }

    /// The cells whose flow had not settled, with the index of the cell.
    pub fn unsettled(&self) -> Vec<(usize, &Settled)> {
        let mut all = Vec::new();
        for (i, cell) in self.0.iter().enumerate() {
            if let Some(Ok(Measured { settled: Some(settled), .. })) = cell
                && !settled.settled
            {
                all.push((i, settled));
            }
        }
        all
    }

    /// Forgets values of flows that do not say whether these had settled, as older versions saved them.
    pub fn forget_untold(&mut self, of_a_flow: impl Fn(usize) -> bool) {
        for (i, cell) in self.0.iter_mut().enumerate() {
            if matches!(cell, Some(Ok(Measured { settled: None, .. }))) && of_a_flow(i) {
                *cell = None;
            }
        }
    }

    /// Values, failures and gaps as null, in rows of `width`.
    pub fn rows(&self, width: usize) -> Vec<Vec<Option<f64>>> {
        let value = |cell: &Option<Result<Measured, String>>| match cell {
            Some(Ok(found)) if found.value.is_finite() => Some(found.value),
            _ => None,
        };
        self.0.chunks(width).map(|row| row.iter().map(value).collect()).collect()
    }
}

/// Between two looks at the watch while cells are computed.
const BETWEEN_LOOKS: Duration = Duration::from_millis(20);

/// Between two saves of unfinished cells.
const BETWEEN_SAVES: Duration = Duration::from_secs(5);

/// Computes the missing cells, each on one thread of its own so that neither the numbers nor the bits depend on how many
/// there are; `keep` is given the cells every few seconds. When `watch` is interrupted it is given them at once, since cells
/// that are being computed may take a while to stop; those are dropped.
///
/// # Errors
/// When threads cannot be had, or `keep` fails.
pub fn fill(
    cells: &mut Cells,
    cell: &(dyn Fn(usize) -> Result<Measured, Error> + Sync),
    watch: &(dyn Watch + Sync),
    keep: &mut (dyn FnMut(&Cells) -> Result<(), Error> + Send),
) -> Result<(), Error> {
    let missing: Vec<usize> = (0..cells.0.len()).filter(|&i| cells.0[i].is_none()).collect();
    let threads = rayon::current_num_threads().min(missing.len()).max(1);
    let next = AtomicUsize::new(0);
    let state = Mutex::new((cells, keep, Instant::now(), None::<Error>));
    let (working, stopped) = (Mutex::new(threads), Condvar::new());
    let work_off = || -> Result<(), Error> {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(1)
            .build()
            .map_err(|e| Error::invalid("threads", format!("cannot be started: {e}")))?;
        while let Some(&index) = missing.get(next.fetch_add(1, Ordering::Relaxed)) {
            if watch.interrupted() {
                return Ok(());
            }
            let found = pool.install(|| cell(index)).and_then(|found| {
                if found.value.is_finite() {
                    Ok(found)
                } else {
                    Err(Error::invalid("phase", format!("the result is {}", found.value)))
                }
            });
            let found = found.map_err(|e| e.to_string());
            if watch.interrupted() {
                // Broken off, in all likelihood: neither a number nor a failure.
                return Ok(());
            }
            watch.advance(1);
            // A panic elsewhere has its own report; the cells are whole between two assignments.
            let mut guard = state.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            let (cells, keep, saved, failure) = &mut *guard;
            cells.0[index] = Some(found);
            if failure.is_none() && saved.elapsed() >= BETWEEN_SAVES {
                if let Err(error) = keep(cells) {
                    *failure = Some(error);
                    next.store(missing.len(), Ordering::Relaxed);
                }
                *saved = Instant::now();
            }
        }
        Ok(())
    };
    /// Tells when a worker ends, however it does.
    struct Working<'a>(&'a Mutex<usize>, &'a Condvar);
    impl Drop for Working<'_> {
        fn drop(&mut self) {
            *self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner) -= 1;
            self.1.notify_all();
        }
    }
    let work = || {
        let _working = Working(&working, &stopped);
        work_off()
    };
    let ends: Vec<Result<(), Error>> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let mut left = working.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        while *left > 0 && !watch.interrupted() {
            let waited = stopped.wait_timeout(left, BETWEEN_LOOKS);
            left = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
        drop(left);
        if watch.interrupted() {
            let mut guard = state.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            let (cells, keep, _, failure) = &mut *guard;
            if failure.is_none() && cells.missing() > 0 {
                *failure = keep(cells).err();
            }
        }
        workers
            .into_iter()
            .map(|w| w.join().unwrap_or_else(|_| Err(Error::invalid("phase", "a cell ended in an internal error"))))
            .collect()
    });
    let (_, _, _, failure) = state.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    match failure {
        Some(error) => Err(error),
        None => ends.into_iter().collect(),
    }
}

/// The document of one map for [`crate::figures::map`].
pub fn map_document(title: &str, quantity: Quantity, x: &Axis, y: &Axis, cells: &Cells) -> Value {
    let mut map = json!({
        "title": title, "quantity": quantity.label(),
        "x": {"label": x.label(), "field": x.field, "values": x.values, "log": x.log},
        "y": {"label": y.label(), "field": y.field, "values": y.values, "log": y.log},
        "values": cells.rows(x.values.len()), "whole": quantity.whole(),
    });
    if quantity.of_a_flow() {
        let width = x.values.len();
        let settled = |cell: &Option<Result<Measured, String>>| match cell {
            Some(Ok(found)) => json!(found.settled),
            _ => Value::Null,
        };
        map["settled"] = cells.0.chunks(width).map(|row| row.iter().map(settled).collect::<Value>()).collect();
        map["unsettled"] = cells.unsettled().iter().map(|(i, _)| json!([i % width, i / width])).collect();
    }
    map
}

/// Reads saved cells; their request must be `request`.
///
/// # Errors
/// When the file is no such file, or of another request.
pub fn saved(path: &Path) -> Result<(Value, Cells), Error> {
    let place = path.display().to_string();
    let wrong = |problem: String| Error::unreadable(&place, problem);
    let text = std::fs::read_to_string(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => wrong("does not exist: there is nothing to resume".into()),
        _ => wrong(format!("cannot be read: {e}")),
    })?;
    let document: Value =
        serde_json::from_str(&text).map_err(|e| wrong(format!("is not a checkpoint, or truncated: {e}")))?;
    if document["format"] != FORMAT {
        return Err(wrong(format!("is not of a phase diagram (\"format\" is not \"{FORMAT}\")")));
    }
    if document["version"] != crate::VERSION {
        return Err(wrong(format!(
            "was written by headflow {}, this is {}: finish it with that one, or start anew",
            document["version"].as_str().unwrap_or("?"),
            crate::VERSION
        )));
    }
    let cells = serde_json::from_value(document["cells"].clone()).map_err(|e| wrong(format!("holds no cells: {e}")))?;
    Ok((document["request"].clone(), cells))
}

/// What identifies saved cells.
const FORMAT: &str = "headflow-cells";

/// The text of a file of cells that belongs to `request`.
pub fn to_save(request: &Value, cells: &Cells) -> String {
    json!({"format": FORMAT, "version": crate::VERSION, "request": request, "cells": cells}).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use headflow_model::Unwatched;

    #[test]
    fn axes_read_ranges_and_lists() {
        let axis = Axis::parse("x", "theta.nu=0.5:4:8").unwrap();
        assert_eq!((axis.values.len(), axis.values[0], axis.values[7]), (8, 0.5, 4.0));
        let axis = Axis::parse("y", "length=log:10:1e5:9").unwrap();
        assert!(axis.log && axis.values.iter().all(|v| v.fract() == 0.0));
        assert_eq!(axis.values[8], 1e5);
        assert_eq!(Axis::parse("x", "heads=1:4:20").unwrap().values, [1.0, 2.0, 3.0, 4.0]);
        assert_eq!(Axis::parse("x", "theta.nu[1]=1,2,5").unwrap().values, [1.0, 2.0, 5.0]);
    }

    #[test]
    fn wrong_axes_are_refused_in_one_line() {
        let cases = [
            ("theta.nu", "FROM:TO:COUNT"),
            ("theta.nu=1:2:1", "one point"),
            ("theta.nu=2:2:5", "one point"),
            ("theta.nu=3", "one point"),
            ("theta.nu=4:1:5", "smaller end first"),
            ("theta.nu=1,1,2", "increasing"),
            ("theta.nu=log:0:2:5", "above 0"),
            ("theta.nu=a:2:5", "not a finite number"),
            ("lenght=2:9:3", "did you mean \"length\""),
            ("theta.mu=2:9:3", "did you mean \"theta.nu\""),
            ("attention=1:2:3", "not one number"),
            ("m0=1:2:3", "not one number"),
            ("length=2.5,3", "whole number"),
        ];
        for (text, part) in cases {
            let message = Axis::parse("x", text).unwrap_err().to_string();
            assert!(
                message.contains(part) && !message.contains('\n') && message.starts_with("x: "),
                "{text}: {message}"
            );
        }
        assert!(Quantity::parse("optimal_los").unwrap_err().to_string().contains("did you mean \"optimal-loss\""));
    }

    #[test]
    fn parameters_reach_into_theta() {
        let mut fields = Map::new();
        set(&mut fields, "theta.nu[1]", 3.0).unwrap();
        assert_eq!(fields["theta"]["nu"], json!([1.8, 3.0]));
        set(&mut fields, "theta.scale", 2.0).unwrap();
        assert_eq!(fields["theta"]["nu"], json!([3.6, 6.0]));
        set(&mut fields, "theta.nu", 1.0).unwrap();
        set(&mut fields, "length", 12.0).unwrap();
        let spec = Spec::from_map(&fields).unwrap();
        assert_eq!(spec.length, 12);
        for (field, part) in [("theta.nu[2]", "2 entries"), ("theta.sd", "has no \"sd\"")] {
            assert!(set(&mut fields, field, 1.0).unwrap_err().to_string().contains(part));
        }
    }

    /// Cells that were there stay, the others come, failures are kept beside the values; on 1, 2 and 3 threads.
    #[test]
    fn cells_are_filled() {
        let cell = |i: usize| {
            if i == 5 { Err(Error::invalid("length", "too short")) } else { Ok(((i * i) as f64).into()) }
        };
        for threads in 1..=3 {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let mut cells = Cells::empty(8);
            cells.0[2] = Some(Ok((-1.0).into()));
            pool.install(|| fill(&mut cells, &cell, &Unwatched, &mut |_| Ok(()))).unwrap();
            assert_eq!(cells.missing(), 0);
            assert_eq!(cells.rows(4)[0], [Some(0.0), Some(1.0), Some(-1.0), Some(9.0)]);
            assert_eq!(cells.rows(4)[1][1], None);
            assert_eq!(cells.failed(), [(5, "length: too short")]);
        }
    }
}
