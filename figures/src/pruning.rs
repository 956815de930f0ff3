//! The loss against the number of removed heads.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::canvas::{Stamp, Stroke};
use crate::curves::common_range;
use crate::error::Error;
use crate::panel::{Curve, Figure, Key, Legend, Panel, Range, Row, Rule, drawable};
use crate::record::{Engine, Route, Simulation, read_document, read_list};
use crate::style::{Dash, GUIDE, INK, ORANGE, WIDTH, dimension_marker, head_color, paler};

/// The columns that come first, in this order.
const ATTENTIONS: [&str; 3] = ["softmax", "softmax1", "bayes-softmax"];
/// Pixels between the marks of two routes.
const APART: f64 = 13.0;

/// The loss before any head is removed.
const UNPRUNED: Stroke = Stroke { color: GUIDE, width: 2.2, dash: Dash::Dashed };
/// As many heads removed as there are more than features.
const SPARE: Stroke = Stroke { color: INK, width: 2.6, dash: Dash::Dotted };
/// As many heads removed as there are more than points in the support.
const BEYOND: Stroke = Stroke { color: ORANGE, width: 3.4, dash: Dash::Mixed };

/// An entry of the field `pruning`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
struct Pruning {
    title: String,
    heads: usize,
    features: usize,
    /// Number of points that `theta` takes.
    support: Option<usize>,
    curves: Vec<Losses>,
}

/// Losses of one attention by one route.
#[derive(Debug, Clone, PartialEq, Deserialize)]
struct Losses {
    attention: String,
    route: String,
    /// Numbers of removed heads.
    removed: Vec<usize>,
    mean: Vec<Option<f64>>,
    #[serde(default)]
    standard_error: Option<Vec<Option<f64>>>,
    /// Over the choices of the removed heads.
    #[serde(default)]
    best: Option<Vec<Option<f64>>>,
    #[serde(default)]
    worst: Option<Vec<Option<f64>>>,
    unpruned: Option<f64>,
}

impl Losses {
    fn check(&self, heads: usize) -> Result<(), String> {
        let name = format!("curve \"{}, {}\"", self.attention, self.route);
        let removed = self.removed.len();
        let lengths = [
            ("mean", Some(self.mean.len())),
            ("standard_error", self.standard_error.as_ref().map(Vec::len)),
            ("best", self.best.as_ref().map(Vec::len)),
            ("worst", self.worst.as_ref().map(Vec::len)),
        ];
        if let Some((field, Some(length))) = lengths.into_iter().find(|l| l.1.is_some_and(|length| length != removed)) {
            return Err(format!("{name}: \"removed\" has {removed} entries, \"{field}\" has {length}"));
        }
        match self.removed.iter().find(|&&count| count > heads) {
            Some(count) => Err(format!("{name}: {count} of {heads} heads are removed")),
            None => Ok(()),
        }
    }

    fn is_theory(&self) -> bool {
        matches!(Route::parse(&self.route), Some(Route::Theory { .. }))
    }

    /// `(removed, mean, standard error)`, NaN where unknown.
    fn marks(&self) -> Vec<(f64, f64, f64)> {
        let errors = self.standard_error.iter().flatten().copied().chain(std::iter::repeat(None));
        let rows = self.removed.iter().zip(&self.mean).zip(errors);
        rows.map(|((&count, mean), error)| {
            (count as f64, mean.unwrap_or(f64::NAN), error.filter(|&e| e > 0.0).unwrap_or(f64::NAN))
        })
        .collect()
    }

    fn has_errors(&self) -> bool {
        self.marks().iter().any(|mark| mark.1.is_finite() && mark.2.is_finite())
    }

    /// `(removed, best, worst)`, NaN where unknown; empty where either is missing.
    fn band(&self) -> Vec<(f64, f64, f64)> {
        let (Some(best), Some(worst)) = (&self.best, &self.worst) else { return Vec::new() };
        let number = |value: &Option<f64>| value.unwrap_or(f64::NAN);
        let rows = self.removed.iter().zip(best.iter().zip(worst));
        rows.map(|(&count, (best, worst))| (count as f64, number(best), number(worst))).collect()
    }
}

impl Pruning {
    fn check(&self) -> Result<(), String> {
        self.curves.iter().try_for_each(|curve| curve.check(self.heads))?;
        if self.curves.iter().flat_map(Losses::marks).any(|mark| drawable(mark.1)) {
            return Ok(());
        }
        Err("no \"mean\" of its \"curves\" holds a finite value".into())
    }

    /// The largest number of removed heads.
    fn last(&self) -> usize {
        self.curves.iter().flat_map(|curve| &curve.removed).copied().max().unwrap_or(0)
    }

    /// Numbers of removed heads at which something is expected, inside the axis, with their strokes.
    fn rules(&self) -> Vec<(usize, Stroke)> {
        let counts = [(Some(self.features), SPARE), (self.support, BEYOND)];
        let rules = counts.into_iter().filter_map(|(needed, stroke)| Some((self.heads.checked_sub(needed?)?, stroke)));
        rules.filter(|&(at, _)| at <= self.last()).collect()
    }
}

/// Draws the losses of the result in `folder` against the number of removed heads: a row per entry, a
/// column per attention. Theory is a line with small marks in a band from the best to the worst
/// choice of the removed heads; other routes are open marks, moved aside a little. Means have standard
/// errors. Vertical lines mark `H − F`, where there is a head left per feature, and `H − |supp θ|`.
/// Panels of a row share their vertical range.
///
/// It reads the field `pruning` of `result.json` alone: a list of objects with `title`, `heads`,
/// `features`, if finite the size of the `support`, and `curves`, each with `attention`, `route`,
/// `removed`, `mean` and if wanted `standard_error`, `best`, `worst` (null where unknown) and
/// `unpruned`.
///
/// Writes `<out>.png` (1600 pixels wide, for 17 cm) and `<out>.svg`, and returns their paths. The
/// folder of `out` must exist; each file appears whole or not at all.
///
/// # Errors
/// [`Error::Missing`], [`Error::File`] or [`Error::Unreadable`] when `result.json` is not there,
/// cannot be read, or has no or ill-formed `pruning`; [`Error::Drawing`] when the drawing fails,
/// [`Error::File`] when a file cannot be written.
pub fn pruning(folder: &Path, out: &Path) -> Result<Vec<PathBuf>, Error> {
    let (header, document) = read_document(folder)?;
    let entries: Vec<Pruning> = read_list(&header, "pruning", &document)?;
    for (number, entry) in entries.iter().enumerate() {
        entry.check().map_err(|problem| {
            let place = format!("field \"pruning\", entry {} (\"{}\")", number + 1, entry.title);
            Error::unreadable(&header, format!("{place}: {problem}"))
        })?;
    }
    let (attentions, routes) = (attentions(&entries), routes(&entries));
    let height = match attentions.len() {
        1 => 520.0,
        2 => 420.0,
        _ => 340.0,
    };
    let mut rows: Vec<Row> = entries.iter().map(|entry| Row { height, ..row(entry, &attentions, &routes) }).collect();
    // Numbers everywhere, since tasks differ in their heads, but words once.
    for panel in rows.iter_mut().rev().skip(1).flat_map(|row| &mut row.panels) {
        panel.x_label.clear();
    }
    let width = WIDTH.max(440.0 * attentions.len() as f64);
    Figure::new(width, &[], rows, legend(&entries, &routes))?.write(out)
}

/// The attentions in the document, the known ones first.
fn attentions(entries: &[Pruning]) -> Vec<&str> {
    let found = || entries.iter().flat_map(|entry| &entry.curves).map(|curve| curve.attention.as_str());
    let mut attentions: Vec<&str> = ATTENTIONS.into_iter().filter(|&name| found().any(|other| other == name)).collect();
    for name in found() {
        if !attentions.contains(&name) {
            attentions.push(name);
        }
    }
    attentions
}

/// The routes in the document, theory first.
fn routes(entries: &[Pruning]) -> Vec<&str> {
    let curves = || entries.iter().flat_map(|entry| &entry.curves);
    let mut routes: Vec<&str> = Vec::new();
    for curve in curves().filter(|curve| curve.is_theory()).chain(curves().filter(|curve| !curve.is_theory())) {
        if !routes.contains(&curve.route.as_str()) {
            routes.push(&curve.route);
        }
    }
    routes
}

/// The line of the theory's `rank`-th route.
fn stroke(rank: usize) -> Stroke {
    Stroke { color: head_color(rank), width: 3.0, dash: Dash::ALL[rank % Dash::ALL.len()] }
}

fn stamp(rank: usize, theory: bool) -> Stamp {
    let radius = if theory { 5.0 } else { 8.5 };
    Stamp { color: head_color(rank), marker: dimension_marker(rank), filled: theory, radius }
}

fn row(entry: &Pruning, attentions: &[&str], routes: &[&str]) -> Row {
    let column = |(number, &attention): (usize, &&str)| {
        let mut panel = Panel {
            title: vec![attention.into()],
            x_label: "heads removed".into(),
            y_label: if number == 0 { "loss  E".into() } else { String::new() },
            x_marks: (0..=entry.last()).map(|count| count as f64).collect(),
            // With room for marks aside of the first and the last number.
            x_range: Some(Range { low: -0.2, high: entry.last().max(1) as f64 + 0.2 }),
            ..Panel::default()
        };
        panel.rules =
            entry.rules().into_iter().map(|(at, stroke)| Rule { at: at as f64, height: 1.0, stroke }).collect();
        let curves = || entry.curves.iter().filter(|curve| curve.attention == attention);
        let rank = |curve: &Losses| routes.iter().position(|&route| route == curve.route).unwrap_or(0);
        // The first route's is the one that others would hide.
        let leading = curves().min_by_key(|curve| rank(curve));
        panel.guides.extend(leading.and_then(|curve| curve.unpruned).map(|loss| (loss, UNPRUNED)));
        for curve in curves().filter(|curve| curve.is_theory()) {
            let color = paler(head_color(rank(curve)), 0.8);
            panel.curves.push(Curve::Band { points: curve.band(), color });
        }
        for curve in curves().filter(|curve| curve.is_theory()) {
            let points = curve.marks();
            let line = points.iter().map(|mark| (mark.0, mark.1)).collect();
            panel.curves.push(Curve::Line { points: line, stroke: stroke(rank(curve)) });
            panel.curves.push(Curve::Markers { points, stamp: stamp(rank(curve), true), shift: 0.0 });
        }
        for (place, curve) in curves().filter(|curve| !curve.is_theory()).enumerate() {
            // To the right and to the left of the theory by turns, ever farther.
            let side = if place % 2 == 0 { 1.0 } else { -1.0 };
            let shift = side * APART * (place / 2 + 1) as f64;
            panel.curves.push(Curve::Markers { points: curve.marks(), stamp: stamp(rank(curve), false), shift });
        }
        panel
    };
    let mut panels: Vec<Panel> = attentions.iter().enumerate().map(column).collect();
    let range = common_range(panels.iter());
    for panel in &mut panels {
        panel.y_range = range;
    }
    Row { heading: vec![entry.title.clone()], panels, ..Row::default() }
}

/// A route in words.
fn words(route: &str) -> String {
    match Route::parse(route) {
        Some(Route::Theory { dimension: None }) => "theory".into(),
        Some(Route::Theory { dimension: Some(dimension) }) => format!("theory from the start at D = {dimension}"),
        Some(Route::Simulation { simulation: Simulation { engine, dimension }, replica }) => {
            let engine = match engine {
                Engine::Direct => "direct SGD",
                Engine::Overlap => "overlap chain",
            };
            let one = if replica.is_some() { ", one replica" } else { "" };
            format!("{engine}, D = {dimension}{one}")
        }
        None => route.into(),
    }
}

fn legend(entries: &[Pruning], routes: &[&str]) -> Legend {
    let curves = || entries.iter().flat_map(|entry| &entry.curves);
    let mut means = Vec::new();
    let mut bands = Vec::new();
    for (rank, &route) in routes.iter().enumerate() {
        let of_route = || curves().filter(|curve| curve.route == route);
        let theory = of_route().any(Losses::is_theory);
        let errors = of_route().any(Losses::has_errors);
        let key =
            if theory { Key::Marked(stroke(rank), stamp(rank, true)) } else { Key::Marker(stamp(rank, false), errors) };
        let error = if errors { ", mean ± standard error" } else { ", mean" };
        means.push((key, format!("{}{error}", words(route))));
        if theory && of_route().flat_map(Losses::band).any(|p| p.1.is_finite() && p.2.is_finite()) {
            let text = format!("{}, from the best to the worst choice of heads", words(route));
            bands.push((Key::Patch(paler(head_color(rank), 0.8)), text));
        }
    }
    let mut references = Vec::new();
    if curves().any(|curve| curve.unpruned.is_some()) {
        references.push((Key::Line(UNPRUNED), "no head removed".into()));
    }
    for (stroke, label) in [(SPARE, "H − F heads removed"), (BEYOND, "H − |supp θ| heads removed")] {
        if entries.iter().flat_map(Pruning::rules).any(|rule| rule.1 == stroke) {
            references.push((Key::Rule(stroke), label.into()));
        }
    }
    vec![means, bands, references]
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::{Value, json};
    use tempfile::TempDir;

    use super::*;
    use crate::fixture::{assert_drawn, assert_drawn_in_few_strokes, draw_document};

    fn draw(entries: &Value) -> (TempDir, Result<Vec<PathBuf>, Error>) {
        draw_document(&json!({"format": "headflow-result", "pruning": entries}), pruning)
    }

    fn curve(attention: &str, route: &str, heads: usize, needed: usize) -> Value {
        let harm = match attention {
            "softmax" => 1.0,
            "softmax1" => 0.6,
            _ => 0.25,
        };
        let loss = |removed: usize, harm: f64| {
            let missing = (removed + needed).saturating_sub(heads) as f64;
            0.3 + harm * (0.01 * removed as f64 + 0.1 * missing)
        };
        let shift = if route == "theory" { 0.0 } else { 0.01 };
        let column = |factor: f64| (0..heads).map(|r| loss(r, harm * factor) + shift).collect::<Vec<_>>();
        let errors: Vec<_> = (0..heads).map(|r| if r == 0 { Value::Null } else { json!(0.004 * r as f64) }).collect();
        json!({
            "attention": attention,
            "route": route,
            "removed": (0..heads).collect::<Vec<_>>(),
            "mean": column(1.0),
            "standard_error": errors,
            "standard_deviation": column(0.1),
            "best": column(0.4),
            "worst": column(1.7),
            "unpruned": 0.3,
        })
    }

    fn entry(title: &str, heads: usize, features: usize, support: Option<usize>) -> Value {
        let curves: Vec<_> = ["bayes-softmax", "softmax", "softmax1"]
            .into_iter()
            .flat_map(|attention| {
                let needed = support.unwrap_or(features);
                ["theory", "direct D=1000", "overlap D=1000"].map(|route| curve(attention, route, heads, needed))
            })
            .collect();
        json!({"title": title, "heads": heads, "features": features, "support": support, "curves": curves})
    }

    #[test]
    fn a_row_per_task_and_a_column_per_attention() {
        let entries = json!([
            entry("isotropic Gaussian θ, F = 2, H = 6", 6, 2, None),
            entry("flips θ = (±2, ±1), F = 2, H = 6", 6, 2, Some(4)),
            entry("discrete θ on two points, F = 2, H = 8", 8, 2, Some(2)),
        ]);
        let (_folder, files) = draw(&entries);
        let files = files.unwrap();
        let labels = [
            "isotropic Gaussian θ, F = 2, H = 6",
            "flips θ = (±2, ±1), F = 2, H = 6",
            "direct SGD, D = 1000, mean ± standard error",
            "theory, from the best to the worst choice of heads",
            "H − F heads removed",
            "H − |supp θ| heads removed",
            "no head removed",
            "loss  E",
        ];
        assert_drawn(&files, &labels, &["NaN", "null"]);
        let image = image::open(&files[0]).unwrap().to_rgb8();
        for color in [head_color(0), head_color(1), paler(head_color(0), 0.8)] {
            assert!(image.pixels().filter(|p| p.0 == [color.0, color.1, color.2]).count() > 300, "{color:?}");
        }
        let svg = fs::read_to_string(&files[1]).unwrap();
        let place = |name: &str| svg.find(&format!("\n{name}\n")).unwrap();
        assert!(place("softmax") < place("softmax1") && place("softmax1") < place("bayes-softmax"));
    }

    #[test]
    fn sparse_pruning_gives_a_figure() {
        let curves = json!([
            {"attention": "softmax", "route": "theory", "removed": [0, 1, 2], "mean": [0.5, null, 0.7], "unpruned": null},
            {"attention": "linear", "route": "direct D=100", "removed": [0], "mean": [0.4], "standard_error": [null]},
        ]);
        let (_folder, files) =
            draw(&json!([{"title": "sparse", "heads": 2, "features": 3, "support": null, "curves": curves}]));
        let absent = ["NaN", "H − F", "supp", "best", "no head removed", "±"];
        assert_drawn_in_few_strokes(&files.unwrap(), &["sparse", "linear", "direct SGD, D = 100, mean"], &absent);
    }

    #[test]
    fn broken_pruning_is_refused_in_one_line_that_names_the_file_and_the_field() {
        let refused = |entries: Value, what: &str| {
            let (folder, files) = draw(&entries);
            let message = files.unwrap_err().to_string();
            assert!(message.contains("result.json") && !message.contains('\n') && message.contains(what), "{message}");
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        };
        let with = |change: &dyn Fn(&mut Value)| {
            let mut entry = entry("flips", 6, 2, None);
            change(&mut entry);
            json!([entry])
        };
        refused(Value::Null, "holds no \"pruning\"");
        refused(json!([]), "\"pruning\" is an empty list");
        refused(json!([{"title": "flips"}]), "field \"pruning\", entry 1: missing field `heads`");
        refused(with(&|e| e["curves"][0]["mean"] = json!([1.0])), "\"removed\" has 6 entries, \"mean\" has 1");
        refused(with(&|e| e["curves"][0]["worst"] = json!([])), "\"removed\" has 6 entries, \"worst\" has 0");
        refused(with(&|e| e["curves"][0]["removed"][5] = json!(7)), "7 of 6 heads are removed");
        refused(with(&|e| e["curves"][0]["removed"][5] = json!(-1)), "field \"pruning\", entry 1");
        refused(with(&|e| e["curves"] = json!([])), "holds a finite value");
        refused(
            with(&|e| {
                for curve in e["curves"].as_array_mut().unwrap() {
                    curve["mean"] = json!(vec![Value::Null; 6]);
                }
            }),
            "holds a finite value",
        );
    }
}
