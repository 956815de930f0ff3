//! The attention similarity bias of a language model: the cosine between a head's output `y_i` and
//! the token's own value `v_i`, measured and predicted.

use std::path::{Path, PathBuf};

use headflow_model::text::rounded;
use plotters::style::RGBColor;
use serde::{Deserialize, Deserializer};

use crate::canvas::{Stamp, Stroke};
use crate::cells::Cells;
use crate::error::Error;
use crate::panel::{Bar, Curve, Figure, Key, Legend, Panel, Range, Row, Scale, drawable};
use crate::record::{read_document, read_list, read_needed};
use crate::shade::Shades;
use crate::style::{Dash, GUIDE, INK, Marker, NEUTRAL, ORANGE, SKY, WIDTH, head_color, paler};

/// What is measured and predicted.
const COSINE: &str = "cos(yᵢ, vᵢ)";
/// Height of the plotting areas.
const HEIGHT: f64 = 600.0;
/// At most so many numbers on an axis that counts layers or heads.
const NUMBERS: usize = 12;
/// At most so many markers on a line, so that its dashes remain to be seen.
const MARKERS: usize = 10;
/// How far rounding may carry a cosine or a part beyond its bounds.
const ROUNDING: f64 = 1e-3;
/// So many predictions look different.
const LOOKS: usize = 4;

/// A number per layer and head; `None` where it is undefined.
type Table = Vec<Vec<Option<f64>>>;

/// The fields of the document.
#[derive(Debug, Clone, PartialEq)]
struct Model {
    title: String,
    /// Cosine of a head's output and the token's own value.
    cos: Table,
    /// Part of the output's squared norm along the value.
    removed: Table,
    /// Attention on the first token.
    sink: Table,
    /// By layer and key-value head.
    rho: Table,
    by_position: Positions,
    predictions: Vec<Prediction>,
}

/// Cosines over layers and heads, in bins of the position.
#[derive(Debug, Clone, PartialEq, Deserialize)]
struct Positions {
    /// The middle of the bin.
    position: Vec<f64>,
    cos: Vec<Option<f64>>,
    /// The lower quartile.
    lower: Vec<Option<f64>>,
    /// The upper quartile.
    upper: Vec<Option<f64>>,
    /// With the value of another position.
    other: Vec<Option<f64>>,
}

/// An entry of the field `predictions`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
struct Prediction {
    name: String,
    cos: Table,
    /// Null where undefined, as for a single head.
    #[serde(deserialize_with = "number_or_null")]
    correlation: Option<f64>,
    #[serde(deserialize_with = "number_or_null")]
    mean_absolute_error: Option<f64>,
}

/// Null is allowed, but the field must be there.
fn number_or_null<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    Option::deserialize(deserializer)
}

impl Model {
    fn read(folder: &Path) -> Result<Self, Error> {
        let (header, document) = read_document(folder)?;
        let table = |name| read_list(&header, name, &document);
        let model = Self {
            title: read_needed(&header, "title", &document)?,
            cos: table("cos")?,
            removed: table("removed")?,
            sink: table("sink")?,
            rho: table("rho")?,
            by_position: read_needed(&header, "by_position", &document)?,
            predictions: read_list(&header, "predictions", &document)?,
        };
        model.check().map_err(|problem| Error::unreadable(&header, problem))?;
        Ok(model)
    }

    fn layers(&self) -> usize {
        self.cos.len()
    }

    fn heads(&self) -> usize {
        self.cos.first().map_or(0, Vec::len)
    }

    fn check(&self) -> Result<(), String> {
        if self.heads() == 0 {
            return Err("field \"cos\", entry 1: a layer without heads".into());
        }
        let own = [("cos", &self.cos, -1.0), ("removed", &self.removed, 0.0), ("sink", &self.sink, 0.0)];
        for (name, table, lowest) in own {
            let place = |problem| format!("field \"{name}\"{problem}");
            check_shape(table, self.layers(), self.heads()).map_err(place)?;
            check_bounds(table, Range { low: lowest, high: 1.0 }).map_err(place)?;
        }
        let groups = self.rho.first().map_or(0, Vec::len);
        if groups == 0 {
            return Err("field \"rho\", entry 1: a layer without key-value heads".into());
        }
        check_shape(&self.rho, self.layers(), groups).map_err(|problem| format!("field \"rho\"{problem}"))?;
        if finite(self.cos.iter().flatten()).next().is_none() {
            return Err("field \"cos\" holds no finite value".into());
        }
        self.by_position.check().map_err(|problem| format!("field \"by_position\": {problem}"))?;
        if self.predictions.len() > LOOKS {
            return Err(format!(
                "field \"predictions\" has {} entries, but this figure draws {LOOKS} at most",
                self.predictions.len()
            ));
        }
        for (number, prediction) in self.predictions.iter().enumerate() {
            check_shape(&prediction.cos, self.layers(), self.heads()).map_err(|problem| {
                format!("field \"predictions\", entry {} (\"{}\"): \"cos\"{problem}", number + 1, prediction.name)
            })?;
        }
        Ok(())
    }

    /// Whether any head has no cosine.
    fn has_gaps(&self) -> bool {
        finite(self.cos.iter().flatten()).count() < self.layers() * self.heads()
    }
}

/// What is wrong with a table that must have so many layers and heads, to follow its name.
fn check_shape(table: &Table, layers: usize, heads: usize) -> Result<(), String> {
    if table.len() != layers {
        return Err(format!(" has {} layers, but \"cos\" has {layers}", table.len()));
    }
    match table.iter().enumerate().find(|(_, row)| row.len() != heads) {
        Some((layer, row)) => {
            Err(format!(", entry {}: {} heads, but the first layer has {heads}", layer + 1, row.len()))
        }
        None => Ok(()),
    }
}

/// What is wrong with a table whose numbers must lie between bounds, to follow its name.
fn check_bounds(table: &Table, bounds: Range) -> Result<(), String> {
    let rounded = Range { low: bounds.low - ROUNDING, high: bounds.high + ROUNDING };
    for (layer, row) in table.iter().enumerate() {
        if let Some(value) = row.iter().flatten().find(|&&value| !rounded.holds(value)) {
            return Err(format!(", entry {}: {value} is not between {} and {}", layer + 1, bounds.low, bounds.high));
        }
    }
    Ok(())
}

impl Positions {
    fn check(&self) -> Result<(), String> {
        let count = self.position.len();
        if count == 0 {
            return Err("\"position\" is an empty list".into());
        }
        let columns = [("cos", &self.cos), ("lower", &self.lower), ("upper", &self.upper), ("other", &self.other)];
        if let Some((name, column)) = columns.iter().find(|(_, column)| column.len() != count) {
            return Err(format!("\"{name}\" has {} entries, but \"position\" has {count}", column.len()));
        }
        if let Some(position) = self.position.iter().find(|&&p| !drawable(Scale::Logarithmic.place(p))) {
            return Err(format!("\"position\" must be positive, but holds {position}"));
        }
        if let Some(pair) = self.position.windows(2).find(|pair| pair[0] >= pair[1]) {
            return Err(format!("\"position\" must grow, but {} follows {}", pair[1], pair[0]));
        }
        if finite(&self.cos).next().is_none() {
            return Err("\"cos\" holds no finite value".into());
        }
        let upside_down = |&(low, high): &(&Option<f64>, &Option<f64>)| low.zip(*high).is_some_and(|(l, h)| l > h);
        match self.lower.iter().zip(&self.upper).position(|pair| upside_down(&pair)) {
            Some(number) => Err(format!("entry {} of \"lower\" is above that of \"upper\"", number + 1)),
            None => Ok(()),
        }
    }

    /// `(position, value)` of a column, NaN where undefined.
    fn path(&self, column: &[Option<f64>]) -> Vec<(f64, f64)> {
        self.position.iter().zip(column).map(|(&at, value)| (at, value.unwrap_or(f64::NAN))).collect()
    }

    /// `(position, lower quartile, upper quartile)`.
    fn band(&self) -> Vec<(f64, f64, f64)> {
        let upper = self.path(&self.upper);
        self.path(&self.lower).iter().zip(upper).map(|(low, high)| (low.0, low.1, high.1)).collect()
    }
}

/// The numbers that can be placed.
fn finite<'a>(values: impl IntoIterator<Item = &'a Option<f64>>) -> impl Iterator<Item = f64> {
    values.into_iter().copied().flatten().filter(|&value| drawable(value))
}

/// The mean; NaN without any number.
fn mean(row: &[Option<f64>]) -> f64 {
    finite(row).sum::<f64>() / finite(row).count() as f64
}

/// The lower and the upper quartile, interpolated between neighbours; NaN without any number.
fn quartiles(row: &[Option<f64>]) -> (f64, f64) {
    let mut sorted: Vec<f64> = finite(row).collect();
    sorted.sort_unstable_by(f64::total_cmp);
    let at = |part: f64| {
        let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
        let rank = part * last as f64;
        let below = rank.floor() as usize;
        let above = (below + 1).min(last);
        sorted[below] + (sorted[above] - sorted[below]) * rank.fract()
    };
    (at(0.25), at(0.75))
}

/// A quantity that is drawn against the layer or the position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Quantity {
    Cosine,
    Removed,
    Sink,
    Rho,
    /// The cosine with the value of another position.
    Other,
}

impl Quantity {
    /// Those of the layers.
    const OF_LAYERS: [Self; 4] = [Self::Cosine, Self::Removed, Self::Sink, Self::Rho];

    fn label(self) -> String {
        match self {
            Self::Cosine => COSINE.into(),
            Self::Removed => "part of |yᵢ|² along vᵢ".into(),
            Self::Sink => "attention on the first token".into(),
            Self::Rho => "ρ (key-value heads)".into(),
            Self::Other => "cos(yᵢ, vⱼ), another position j".into(),
        }
    }

    fn look(self) -> (RGBColor, Dash, Marker) {
        match self {
            Self::Cosine => (head_color(0), Dash::Solid, Marker::Circle),
            Self::Removed => (head_color(1), Dash::Dashed, Marker::Square),
            Self::Sink => (head_color(2), Dash::Mixed, Marker::Triangle),
            Self::Rho => (head_color(3), Dash::Dotted, Marker::Diamond),
            Self::Other => (NEUTRAL, Dash::Dashed, Marker::Wedge),
        }
    }

    fn stroke(self) -> Stroke {
        let (color, dash, _) = self.look();
        Stroke { color, width: 3.6, dash }
    }

    fn stamp(self) -> Stamp {
        let (color, _, marker) = self.look();
        Stamp { color, marker, filled: true, radius: 7.0 }
    }

    /// The colour of the area between its quartiles.
    fn band(self) -> RGBColor {
        paler(self.look().0, 0.75)
    }

    fn key(self) -> (Key, String) {
        (Key::Marked(self.stroke(), self.stamp()), self.label())
    }

    /// The line with markers on it, at most about [`MARKERS`], of which `shift` (0 to 1) moves the first by
    /// a part of their distance.
    fn curves(self, path: Vec<(f64, f64)>, shift: f64) -> [Curve; 2] {
        let marks: Vec<_> = path.iter().filter(|p| drawable(p.1)).map(|&(x, y)| (x, y, f64::NAN)).collect();
        let step = marks.len().div_ceil(MARKERS).max(1);
        let points = marks.into_iter().skip((shift * step as f64) as usize).step_by(step).collect();
        [
            Curve::Line { points: path, stroke: self.stroke() },
            Curve::Markers { points, stamp: self.stamp(), shift: 0.0 },
        ]
    }
}

/// Draws the attention similarity bias of a language model, from the result in `folder`, in four
/// panels: the mean cosine `cos(y_i, v_i)` between the output and the token's own value of every
/// head by colour, over heads and layers counted from zero (heads without one are hatched); against
/// the layer, means over heads of the cosine with its quartiles, of the part of `|y_i|^2` along `v_i`
/// and of the attention on the first token, and the mean `rho` over key-value heads; the cosine
/// against the position with its quartiles over layers and heads, beside the cosine with the value of
/// another position; and the predicted against the measured cosine, a point per head.
///
/// It reads these fields of `result.json` alone: `title`; the tables `cos`, `removed` and `sink` (a
/// list of heads per layer, null where undefined) and `rho` (of key-value heads per layer);
/// `by_position` with lists of one length, `position` (the middles of bins, positive and growing),
/// `cos`, its quartiles `lower` and `upper`, and `other` (null where undefined); and `predictions`, up
/// to four objects with `name`, a table `cos`, `correlation` and `mean_absolute_error` (null where
/// undefined).
///
/// Writes `<out>.png` (1600 pixels wide, for 17 cm) and `<out>.svg`, and returns their paths. The
/// folder of `out` must exist; each file appears whole or not at all.
///
/// # Errors
/// [`Error::Missing`], [`Error::File`] or [`Error::Unreadable`] when `result.json` is not there,
/// cannot be read, or lacks a field or has an ill-formed one; [`Error::Drawing`] when the drawing
/// fails, [`Error::File`] when a file cannot be written.
pub fn xsa_model(folder: &Path, out: &Path) -> Result<Vec<PathBuf>, Error> {
    let model = Model::read(folder)?;
    let title: Vec<String> = model.title.split(", ").map(String::from).collect();
    let rows = [vec![heads(&model), layers(&model)], vec![positions(&model.by_position), predictions(&model)]];
    let rows = rows.map(|panels| Row { height: HEIGHT, panels, ..Row::default() });
    Figure::new(WIDTH, &title, rows.into(), legend(&model))?.write(out)
}

/// Numbers from zero to mark on an axis that counts to `count`, in round steps.
fn counted(count: usize) -> Vec<f64> {
    let steps = (0..).flat_map(|power| [1, 2, 5].map(|step: usize| step * 10usize.pow(power)));
    let step = steps.into_iter().find(|step| count.div_ceil(*step) <= NUMBERS).unwrap_or(count);
    (0..count).step_by(step).map(|number| number as f64).collect()
}

/// The edges of cells around the numbers from zero.
fn edges(count: usize) -> Vec<f64> {
    (0..=count).map(|edge| edge as f64 - 0.5).collect()
}

fn around(count: usize) -> Range {
    Range { low: -0.5, high: count as f64 - 0.5 }
}

fn heads(model: &Model) -> Panel {
    let shades = Shades::of(finite(model.cos.iter().flatten()), Scale::Linear);
    let color = |value: &Option<f64>| Some(shades?.color(value.filter(|&v| drawable(v))?));
    let (heads, layers) = (model.heads(), model.layers());
    Panel {
        title: vec![format!("(a)  mean {COSINE} of every head")],
        x_label: "head".into(),
        y_label: "layer".into(),
        x_marks: counted(heads),
        y_marks: counted(layers),
        x_range: Some(around(heads)),
        y_range: Some(around(layers)),
        cells: Some(Cells {
            x_edges: edges(heads),
            y_edges: edges(layers),
            colors: model.cos.iter().map(|row| row.iter().map(color).collect()).collect(),
            striped: Vec::new(),
            contours: Vec::new(),
        }),
        bar: shades.map(|shades| Bar { label: Vec::new(), shades, levels: Vec::new() }),
        ..Panel::default()
    }
}

/// A thin line at zero.
fn zero() -> Vec<(f64, Stroke)> {
    vec![(0.0, Stroke { color: GUIDE, width: 1.6, dash: Dash::Solid })]
}

fn layers(model: &Model) -> Panel {
    let tables = [&model.cos, &model.removed, &model.sink, &model.rho];
    let spread = |(layer, row): (usize, &Vec<Option<f64>>)| {
        let (low, high) = quartiles(row);
        (layer as f64, low, high)
    };
    let mut curves = vec![Curve::Band {
        points: model.cos.iter().enumerate().map(spread).collect(),
        color: Quantity::Cosine.band(),
    }];
    // The cosine on top.
    for (rank, (quantity, table)) in Quantity::OF_LAYERS.into_iter().zip(tables).enumerate().rev() {
        let path = table.iter().enumerate().map(|(layer, row)| (layer as f64, mean(row))).collect();
        curves.extend(quantity.curves(path, rank as f64 / Quantity::OF_LAYERS.len() as f64));
    }
    Panel {
        title: vec!["(b)  means over the heads of a layer".into()],
        x_label: "layer".into(),
        y_label: "mean over heads".into(),
        x_marks: counted(model.layers()),
        guides: zero(),
        curves,
        ..Panel::default()
    }
}

fn positions(of: &Positions) -> Panel {
    let mut curves = vec![Curve::Band { points: of.band(), color: Quantity::Cosine.band() }];
    curves.extend(Quantity::Other.curves(of.path(&of.other), 0.0));
    curves.extend(Quantity::Cosine.curves(of.path(&of.cos), 0.0));
    Panel {
        title: vec!["(c)  means over layers and heads".into()],
        x_label: "position  i".into(),
        y_label: COSINE.into(),
        x_scale: Scale::Logarithmic,
        guides: zero(),
        curves,
        ..Panel::default()
    }
}

/// The marker of the `rank`-th prediction: in colours that the other panels do not use, while they
/// last.
fn stamp(rank: usize, radius: f64) -> Stamp {
    let looks: [_; LOOKS] =
        [(ORANGE, Marker::Circle), (SKY, Marker::Triangle), (INK, Marker::Diamond), (head_color(3), Marker::Square)];
    let (color, marker) = looks[rank % LOOKS];
    Stamp { color, marker, filled: true, radius }
}

/// Radius of so many markers of a kind: many are smaller.
fn radius(count: usize) -> f64 {
    (5.5 * (300.0 / count as f64).powf(0.25)).clamp(3.0, 7.0)
}

const DIAGONAL: Stroke = Stroke { color: INK, width: 2.2, dash: Dash::Dashed };

fn predictions(model: &Model) -> Panel {
    let predicted = model.predictions.iter().flat_map(|prediction| prediction.cos.iter().flatten());
    let range = Range::of(finite(model.cos.iter().flatten().chain(predicted)));
    // From corner to corner.
    let ends = range.map(Range::padded);
    let diagonal = ends.iter().flat_map(|ends| [(ends.low, ends.low), (ends.high, ends.high)]).collect();
    let mut curves = Vec::new();
    let radius = radius(model.layers() * model.heads());
    // By turns, so that no prediction hides another.
    for (layer, measured) in model.cos.iter().enumerate() {
        for (rank, prediction) in model.predictions.iter().enumerate() {
            let pairs = measured.iter().zip(&prediction.cos[layer]);
            let points = pairs.filter_map(|(&measured, &predicted)| Some((measured?, predicted?, f64::NAN)));
            curves.push(Curve::Markers { points: points.collect(), stamp: stamp(rank, radius), shift: 0.0 });
        }
    }
    curves.push(Curve::Line { points: diagonal, stroke: DIAGONAL });
    Panel {
        title: vec!["(d)  predictions, a point per head".into()],
        x_label: format!("measured {COSINE}"),
        y_label: format!("predicted {COSINE}"),
        x_range: range,
        y_range: range,
        curves,
        ..Panel::default()
    }
}

fn legend(model: &Model) -> Legend {
    let panel = |name: &str| (Key::Remark, name.to_string());
    let mut legend: Legend = Vec::new();
    if model.has_gaps() {
        legend.push(vec![panel("(a)"), (Key::Hatch, "undefined".into())]);
    }
    let band = |over: &str| (Key::Patch(Quantity::Cosine.band()), format!("its quartiles over {over}"));
    let mut of_layers = vec![panel("(b)")];
    of_layers.extend(Quantity::OF_LAYERS.map(Quantity::key));
    of_layers.insert(2, band("heads"));
    legend.push(of_layers);
    legend.push(vec![panel("(c)"), Quantity::Cosine.key(), band("layers and heads"), Quantity::Other.key()]);
    let number = |value: f64| rounded(value, 2).replace('-', "−");
    let of_prediction = |(rank, prediction): (usize, &Prediction)| {
        let correlation = prediction.correlation.map(|r| format!(", r = {}", number(r)));
        let error = prediction.mean_absolute_error.map(|e| format!(", mean |error| {}", number(e)));
        let measures = correlation.unwrap_or_default() + &error.unwrap_or_default();
        (Key::Marker(stamp(rank, 6.5), false), format!("{}{measures}", prediction.name))
    };
    let mut of_predictions = vec![panel("(d)")];
    of_predictions.extend(model.predictions.iter().enumerate().map(of_prediction));
    of_predictions.push((Key::Line(DIAGONAL), "predicted = measured".into()));
    legend.push(of_predictions);
    legend
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::{Value, json};
    use tempfile::TempDir;

    use super::*;
    use crate::fixture::{assert_drawn, draw_document};

    fn draw(document: &Value) -> (TempDir, Result<Vec<PathBuf>, Error>) {
        draw_document(document, xsa_model)
    }

    /// A number per layer and head that looks like any but is always the same.
    fn scatter(layer: usize, head: usize, salt: usize) -> f64 {
        let mixed = (layer * 7919 + head * 104_729 + salt * 1_299_709 + 17).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((mixed >> 20) % 10_007) as f64 / 10_007.0 - 0.5
    }

    fn table(layers: usize, heads: usize, value: impl Fn(f64, usize, usize) -> f64) -> Table {
        let depth = |layer: usize| layer as f64 / (layers.max(2) - 1) as f64;
        let row = |layer: usize| (0..heads).map(|head| Some(value(depth(layer), layer, head))).collect();
        (0..layers).map(row).collect()
    }

    fn bias(depth: f64, layer: usize, head: usize) -> f64 {
        let level = 0.12 + 0.5 * depth * depth + 0.12 * (9.0 * depth).sin().abs();
        (level + 0.32 * scatter(layer, head, 0) * (0.4 + depth)).clamp(-0.08, 0.92)
    }

    /// A model whose bias grows with the layer and falls with the position.
    fn example(layers: usize, heads: usize, groups: usize, bins: usize) -> Value {
        let sink = |depth: f64, layer, head| {
            (0.75 * (1.0 - (-6.0 * depth).exp()) - 0.25 * depth + 0.2 * scatter(layer, head, 1)).clamp(0.01, 0.95)
        };
        let removed = |depth, layer, head| (bias(depth, layer, head).powi(2) + 0.02).min(1.0);
        let rho = |depth: f64, layer, head| 0.55 - 0.35 * depth + 0.12 * scatter(layer, head, 2);
        let position: Vec<f64> = (0..bins).map(|bin| 1.5f64.powi(bin as i32) * 1.3).collect();
        let cos = |i: f64| 0.22 + 0.6 / (1.0 + i / 4.0).sqrt();
        let column = |of: &dyn Fn(f64) -> f64| -> Vec<f64> { position.iter().map(|&i| of(i)).collect() };
        let predicted = |slope: f64, width: f64, salt| {
            table(layers, heads, |d, l, h| 0.03 + slope * bias(d, l, h) + width * scatter(l, h, salt))
        };
        json!({
            "format": "headflow-result",
            "command": "xsa measure",
            "title": "SmolLM2 135M Instruct, 512 tokens",
            "cos": table(layers, heads, bias),
            "aii": table(layers, heads, |d, l, h| 0.3 * bias(d, l, h) + 0.1),
            "sink": table(layers, heads, sink),
            "removed": table(layers, heads, removed),
            "rho": table(layers, groups, rho),
            "by_position": {
                "position": position,
                "cos": column(&cos),
                "lower": column(&|i| cos(i) - 0.1 - 0.03 * i.ln()),
                "upper": column(&|i| cos(i) + 0.09 + 0.02 * i.ln()),
                "other": column(&|i| 0.06 + 0.1 / i),
            },
            "predictions": [
                {"name": "isotropic values", "cos": predicted(0.75, 0.25, 3), "correlation": 0.85, "mean_absolute_error": 0.072},
                {"name": "values with their mean", "cos": predicted(0.95, 0.1, 4), "correlation": 0.97, "mean_absolute_error": 0.021},
                {"name": "self-attention alone", "cos": predicted(0.4, 0.3, 5), "correlation": -0.114, "mean_absolute_error": 0.2},
            ],
        })
    }

    #[test]
    fn a_model_gives_a_figure() {
        let mut document = example(30, 9, 3, 15);
        document["cos"][4][7] = Value::Null;
        document["removed"][4][7] = Value::Null;
        document["by_position"]["other"][0] = Value::Null;
        let (_folder, files) = draw(&document);
        let files = files.unwrap();
        let labels = [
            "SmolLM2 135M Instruct, 512 tokens",
            "mean cos(yᵢ, vᵢ) of every head",
            "head",
            "layer",
            "mean over heads",
            "position  i",
            "measured cos(yᵢ, vᵢ)",
            "predicted cos(yᵢ, vᵢ)",
            "undefined",
            "its quartiles over heads",
            "part of |yᵢ|² along vᵢ",
            "attention on the first token",
            "ρ (key-value heads)",
            "cos(yᵢ, vⱼ), another position j",
            "isotropic values, r = 0.85, mean |error| 0.07",
            "self-attention alone, r = −0.11, mean |error| 0.20",
            "10²",
        ];
        assert_drawn(&files, &labels, &["NaN", "null", "not in this run"]);
        let image = image::open(&files[0]).unwrap().to_rgb8();
        let pixels = |color: RGBColor| image.pixels().filter(|p| p.0 == [color.0, color.1, color.2]).count();
        for quantity in Quantity::OF_LAYERS.into_iter().chain([Quantity::Other]) {
            assert!(pixels(quantity.look().0) > 500, "no {quantity:?}");
        }
        for rank in 0..3 {
            assert!(pixels(stamp(rank, 1.0).color) > 5000, "no prediction {rank}");
        }
        assert!(pixels(Quantity::Cosine.band()) > 20_000, "no quartiles");
    }

    #[test]
    fn one_head_and_two_positions_give_a_figure() {
        let mut document = example(1, 1, 1, 2);
        document["predictions"].as_array_mut().unwrap().truncate(2);
        for entry in 0..2 {
            document["predictions"][entry]["correlation"] = Value::Null;
        }
        let (_folder, files) = draw(&document);
        let labels = ["isotropic values, mean |error| 0.07", "values with their mean, mean |error| 0.02", "ρ"];
        assert_drawn(&files.unwrap(), &labels, &["NaN", "null", "r = ", "undefined", "self-attention"]);
    }

    #[test]
    fn many_heads_and_four_predictions_give_a_figure() {
        let mut document = example(48, 40, 8, 24);
        let fourth = json!({
            "name": "a prediction whose name is so long that it has hardly room in a line of the legend",
            "cos": document["cos"],
            "correlation": 1.0,
            "mean_absolute_error": null,
        });
        document["predictions"].as_array_mut().unwrap().push(fourth);
        let (_folder, files) = draw(&document);
        assert_drawn(&files.unwrap(), &["45", "r = 1.00", "10⁴"], &["NaN", "null", "undefined"]);
    }

    #[test]
    fn layers_and_heads_are_counted_in_round_steps() {
        assert_eq!(counted(1), [0.0]);
        assert_eq!(counted(9), (0..9).map(f64::from).collect::<Vec<_>>());
        assert_eq!(counted(30), [0.0, 5.0, 10.0, 15.0, 20.0, 25.0]);
        assert_eq!(counted(121), [0.0, 20.0, 40.0, 60.0, 80.0, 100.0, 120.0]);
    }

    #[test]
    fn means_and_quartiles_skip_what_is_undefined() {
        let row = [Some(4.0), None, Some(1.0), Some(2.0), Some(3.0), Some(0.0)];
        assert_eq!(mean(&row), 2.0);
        assert_eq!(quartiles(&row), (1.0, 3.0));
        assert_eq!(quartiles(&[Some(0.0), Some(1.0)]), (0.25, 0.75));
        assert_eq!(quartiles(&[Some(7.0)]), (7.0, 7.0));
        assert!(mean(&[None]).is_nan() && quartiles(&[None]).0.is_nan());
    }

    #[test]
    fn broken_results_are_refused_in_one_line_that_names_the_file_and_the_field() {
        let refused = |change: &dyn Fn(&mut Value), what: &str| {
            let mut document = example(4, 3, 1, 5);
            change(&mut document);
            let (folder, files) = draw(&document);
            let message = files.unwrap_err().to_string();
            assert!(message.contains("result.json") && !message.contains('\n') && message.contains(what), "{message}");
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        };
        for field in ["title", "cos", "removed", "sink", "rho", "by_position", "predictions"] {
            refused(&|d| d[field] = Value::Null, &format!("holds no \"{field}\""));
            refused(&|d| d[field] = json!(1), &format!("field \"{field}\": invalid type"));
        }
        for field in ["cos", "removed", "sink", "rho", "predictions"] {
            refused(&|d| d[field] = json!([]), &format!("field \"{field}\" is an empty list"));
        }
        refused(&|d| d["cos"] = json!([[], [], [], []]), "field \"cos\", entry 1: a layer without heads");
        refused(&|d| d["cos"][1] = json!([0.1]), "field \"cos\", entry 2: 1 heads, but the first layer has 3");
        refused(&|d| d["cos"][1] = Value::Null, "field \"cos\", entry 2: invalid type: null");
        refused(&|d| d["cos"][2][0] = json!("high"), "field \"cos\", entry 3: invalid type: string");
        refused(&|d| d["cos"][2][0] = json!(-1.5), "field \"cos\", entry 3: -1.5 is not between -1 and 1");
        refused(&|d| d["cos"] = json!(vec![[None::<f64>; 3]; 4]), "field \"cos\" holds no finite value");
        refused(&|d| d["sink"] = json!([[0.1, 0.1, 0.1]]), "field \"sink\" has 1 layers, but \"cos\" has 4");
        refused(&|d| d["removed"][3] = json!([0.1, 0.1, 0.1, 0.1]), "field \"removed\", entry 4: 4 heads");
        refused(&|d| d["removed"][3][1] = json!(-0.5), "field \"removed\", entry 4: -0.5 is not between 0 and 1");
        refused(&|d| d["rho"] = json!([[], [], [], []]), "field \"rho\", entry 1: a layer without key-value heads");
        refused(&|d| d["rho"][1] = json!([0.1, 0.1]), "field \"rho\", entry 2: 2 heads, but the first layer has 1");
        refused(&|d| d["rho"] = json!([[0.1]]), "field \"rho\" has 1 layers");
        let position = |name: &'static str, value: Value, what: &str| {
            refused(&|d| d["by_position"][name] = value.clone(), &format!("field \"by_position\": {what}"));
        };
        position("position", json!([]), "\"position\" is an empty list");
        position("position", json!([0, 1, 2, 3, 4]), "\"position\" must be positive, but holds 0");
        position("position", json!([1, 2, 2, 3, 4]), "\"position\" must grow, but 2 follows 2");
        position("position", json!([1, null, 2, 3, 4]), "invalid type: null");
        position("other", json!([0.1]), "\"other\" has 1 entries, but \"position\" has 5");
        position("cos", json!([null, null, null, null, null]), "\"cos\" holds no finite value");
        position("lower", json!([0, 0, 2, 0, 0]), "entry 3 of \"lower\" is above that of \"upper\"");
        refused(
            &|d| {
                d["by_position"].as_object_mut().unwrap().remove("upper");
            },
            "field \"by_position\": missing field `upper`",
        );
        refused(
            &|d| {
                d["predictions"][1].as_object_mut().unwrap().remove("correlation");
            },
            "field \"predictions\", entry 2: missing field `correlation`",
        );
        refused(
            &|d| d["predictions"][2]["cos"] = json!([[0.1]]),
            "field \"predictions\", entry 3 (\"self-attention alone\"): \"cos\" has 1 layers",
        );
        refused(
            &|d| d["predictions"][0]["cos"][3] = json!([]),
            "entry 1 (\"isotropic values\"): \"cos\", entry 4: 0 heads",
        );
        refused(
            &|d| d["predictions"] = json!(vec![d["predictions"][0].clone(); 5]),
            "field \"predictions\" has 5 entries, but this figure draws 4 at most",
        );
    }
}
