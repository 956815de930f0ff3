//! Escape times from the unspecialised state against the dimension.

use std::path::{Path, PathBuf};

use headflow_model::text::rounded;
use serde::Deserialize;

use crate::canvas::{Stamp, Stroke};
use crate::error::Error;
use crate::panel::{Curve, Figure, Key, Panel, Range, Row, Scale};
use crate::record::{Spec, read_document, read_needed};
use crate::style::{Dash, WIDTH, dimension_marker, head_color};

/// The field `escape`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
struct Escape {
    curves: Vec<Times>,
    threshold_label: Option<String>,
}

/// Mean escape times of one setting.
#[derive(Debug, Clone, PartialEq, Deserialize)]
struct Times {
    label: String,
    dimensions: Vec<f64>,
    /// `None` where no chain escaped.
    times: Vec<Option<f64>>,
    standard_errors: Vec<Option<f64>>,
    #[serde(default)]
    replicas: Vec<usize>,
    #[serde(default)]
    slopes: Vec<Slope>,
}

/// A prediction of how the times grow: by `slope` with `ln D`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
struct Slope {
    label: String,
    slope: f64,
}

impl Times {
    fn check(&self) -> Result<(), String> {
        let (dimensions, times, errors) = (self.dimensions.len(), self.times.len(), self.standard_errors.len());
        if times != dimensions || errors != dimensions {
            return Err(format!(
                "curve \"{}\" has {dimensions} dimensions, {times} times and {errors} standard errors",
                self.label
            ));
        }
        match self.dimensions.iter().find(|&&d| d < 1.0) {
            Some(d) => Err(format!("curve \"{}\" has a dimension {d}", self.label)),
            None => Ok(()),
        }
    }

    /// `(D, time, standard error)` where there is a time; the error NaN where unknown.
    fn points(&self) -> Vec<(f64, f64, f64)> {
        let rows = self.dimensions.iter().zip(self.times.iter().zip(&self.standard_errors));
        rows.filter_map(|(&d, (&time, error))| Some((d, time?, error.filter(|&e| e > 0.0).unwrap_or(f64::NAN))))
            .collect()
    }

    /// The line of the given slope in `ln D` that lies closest to the times: through their mean with
    /// weights `1 / error^2`, or equal weights unless every error is known.
    fn fitted(&self, slope: f64) -> Vec<(f64, f64)> {
        let points = self.points();
        let known = points.iter().all(|p| p.2.is_finite());
        let weight = |error: f64| if known { error.powi(-2) } else { 1.0 };
        let total: f64 = points.iter().map(|p| weight(p.2)).sum();
        let offset =
            points.iter().map(|&(d, time, error)| weight(error) * (time - slope * d.ln())).sum::<f64>() / total;
        let Some(range) = Range::of(points.iter().map(|p| p.0)) else { return Vec::new() };
        [range.low, range.high].map(|d| (d, offset + slope * d.ln())).to_vec()
    }
}

/// Draws mean escape times with standard errors as markers against the dimension `D`, on an axis
/// logarithmic in `D`; the folder of the result is `folder`. Each predicted slope is a line through
/// its curve's weighted mean point: only its offset is fitted. A lower panel magnifies the differences
/// of times and lines from the curve's first line. A curve without predictions, say one that takes a
/// time of order one, has its markers joined by a thin line.
///
/// It reads the field `escape` of `result.json` alone, and the spec for the title if there is one.
///
/// Writes `<out>.png` (1600 pixels wide, for 17 cm) and `<out>.svg`, and returns their paths. The
/// folder of `out` must exist; each file appears whole or not at all.
///
/// # Errors
/// [`Error::Missing`], [`Error::File`] or [`Error::Unreadable`] when `result.json` is not there,
/// cannot be read, or has no or an ill-formed `escape`; [`Error::Drawing`] when the drawing fails,
/// [`Error::File`] when a file cannot be written.
pub fn escape(folder: &Path, out: &Path) -> Result<Vec<PathBuf>, Error> {
    let (header, document) = read_document(folder)?;
    let escape: Escape = read_needed(&header, "escape", &document)?;
    for curve in &escape.curves {
        curve.check().map_err(|problem| Error::unreadable(&header, format!("field \"escape\": {problem}")))?;
    }
    Figure::new(WIDTH, &title(&document), rows(&escape), legend(&escape))?.write(out)
}

/// What the spec says beside `theta`, in which the curves may differ.
fn title(document: &serde_json::Value) -> Vec<String> {
    let spec = document.get("spec").and_then(|spec| Spec::deserialize(spec).ok());
    spec.map(|spec| spec.words_beside_theta()).unwrap_or_default()
}

/// The marker of a curve.
fn stamp(curve: usize) -> Stamp {
    Stamp { color: head_color(curve), marker: dimension_marker(curve), filled: true, radius: 7.5 }
}

/// The line of every slope, by curve: in colours and dashes of their own, since predictions may
/// hardly differ.
fn strokes(escape: &Escape) -> Vec<Vec<Stroke>> {
    let mut colors = (escape.curves.len()..).map(head_color);
    let of_curve = |curve: &Times| {
        let pairs = (0..curve.slopes.len()).zip(colors.by_ref());
        pairs.map(|(rank, color)| Stroke { color, width: 3.4, dash: Dash::broken(rank) }).collect()
    };
    escape.curves.iter().map(of_curve).collect()
}

fn rows(escape: &Escape) -> Vec<Row> {
    let panel = |label: &str| Panel {
        x_label: "dimension  D".into(),
        y_label: label.into(),
        x_scale: Scale::Logarithmic,
        x_range: Range::of(escape.curves.iter().flat_map(|curve| curve.points()).map(|p| p.0)),
        ..Panel::default()
    };
    let (mut times, mut differences) = (panel("escape time  τ*"), panel("difference"));
    for (curve, strokes) in escape.curves.iter().zip(strokes(escape)) {
        let Some(first) = curve.slopes.first().map(|slope| slope.slope) else { continue };
        let reference = curve.fitted(first);
        for (slope, stroke) in curve.slopes.iter().zip(strokes) {
            let points = curve.fitted(slope.slope);
            let beside = points.iter().zip(&reference).map(|(p, r)| (p.0, p.1 - r.1));
            differences.curves.push(Curve::Line { points: beside.collect(), stroke });
            times.curves.push(Curve::Line { points, stroke });
        }
    }
    for (number, curve) in escape.curves.iter().enumerate() {
        let (points, stamp) = (curve.points(), stamp(number));
        if let Some(slope) = curve.slopes.first() {
            let reference = curve.fitted(slope.slope);
            let height = |d: f64| reference.first().map_or(f64::NAN, |r| r.1 + slope.slope * (d / r.0).ln());
            let beside = points.iter().map(|&(d, time, error)| (d, time - height(d), error)).collect();
            differences.curves.push(Curve::Markers { points: beside, stamp, shift: 0.0 });
        } else {
            let stroke = Stroke { color: stamp.color, width: 1.6, dash: Dash::Solid };
            times.curves.push(Curve::Line { points: points.iter().map(|p| (p.0, p.1)).collect(), stroke });
        }
        times.curves.push(Curve::Markers { points, stamp, shift: 0.0 });
    }
    // Times are seen from zero.
    times.y_range = times.data_range().map(|range| Range { low: range.low.min(0.0), ..range });
    let mut rows = vec![Row { height: 560.0, panels: vec![times], ..Row::default() }];
    if !differences.curves.is_empty() {
        for panel in &mut rows[0].panels {
            panel.x_label.clear();
            panel.bare = true;
        }
        rows.push(Row { height: 230.0, panels: vec![differences], ..Row::default() });
    }
    rows
}

fn legend(escape: &Escape) -> Vec<Vec<(Key, String)>> {
    let mut legend: Vec<Vec<(Key, String)>> = Vec::new();
    let with_bars = |curve: &Times| curve.points().iter().any(|p| p.2.is_finite());
    for (number, (curve, strokes)) in escape.curves.iter().zip(strokes(escape)).enumerate() {
        legend.push(vec![(Key::Marker(stamp(number), with_bars(curve)), curve.label.clone())]);
        let lines = curve.slopes.iter().zip(strokes);
        legend.extend(lines.map(|(slope, stroke)| {
            vec![(Key::Line(stroke), format!("{}, slope {}", slope.label, rounded(slope.slope, 3)))]
        }));
    }
    let mut remarks = Vec::new();
    if escape.curves.iter().any(with_bars) {
        let counts = escape.curves.iter().flat_map(|curve| &curve.replicas).copied();
        let over = match (counts.clone().min(), counts.max()) {
            (Some(least), Some(most)) if least == most => format!(" over {most} chains"),
            (Some(least), Some(most)) => format!(" over {least} to {most} chains"),
            _ => String::new(),
        };
        remarks.push(format!("markers: mean ± standard error{over}"));
    }
    if escape.curves.iter().any(|curve| !curve.slopes.is_empty()) {
        remarks.push("broken lines: predicted slope in ln D, offset fitted".into());
        remarks.push("difference: from the first of a curve's lines".into());
    }
    legend.push(remarks.into_iter().map(|remark| (Key::Remark, remark)).collect());
    legend.extend(escape.threshold_label.iter().map(|label| vec![(Key::Remark, label.clone())]));
    legend
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::{Value, json};

    use super::*;
    use crate::fixture::assert_drawn;

    fn example() -> Value {
        json!({
            "curves": [
                {
                    "label": "θ = ±3 (E θ = 0): specialisation",
                    "dimensions": [100, 1000, 10000, 100000, 1000000, 10000000],
                    "times": [4.61, 6.02, 7.55, 8.98, 10.46, 11.93],
                    "standard_errors": [0.11, 0.10, 0.12, 0.11, 0.13, 0.12],
                    "replicas": [64, 64, 64, 64, 64, 64],
                    "slopes": [
                        {"label": "κ = 0.78: stationary point with γ", "rate": 0.78, "slope": 0.641},
                        {"label": "κ = 0.83: k = 0", "rate": 0.83, "slope": 0.602},
                    ],
                },
                {
                    "label": "θ ~ N(1, 0.5²): unspecialised phase",
                    "dimensions": [100, 1000, 10000, 100000, 1000000, 10000000],
                    "times": [0.93, 1.02, 1.05, 1.06, 1.06, 1.06],
                    "standard_errors": [0.03, 0.01, 0.004, 0.0, null, 0.0003],
                    "replicas": [64, 64, 64, 64, 64, 64],
                    "slopes": [],
                },
            ],
            "threshold_label": "τ*: the first time at which the largest alignment |m_h0| reaches 0.5",
        })
    }

    fn draw(document: &Value) -> (tempfile::TempDir, Result<Vec<PathBuf>, Error>) {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("result.json"), document.to_string()).unwrap();
        let files = escape(folder.path(), &folder.path().join("escape"));
        (folder, files)
    }

    #[test]
    fn escape_times_give_a_figure() {
        let spec = json!({"length": 6, "heads": 2, "theta": {"kind": "flip", "nu": [3.0]}, "attention": "softmax",
            "gamma": 0.5, "batch": 1});
        let (_folder, files) = draw(&json!({"format": "headflow-result", "spec": spec, "escape": example()}));
        let labels = [
            "escape time  τ*",
            "dimension  D",
            "10⁷",
            "L = 6",
            "κ = 0.83: k = 0, slope 0.602",
            "unspecialised phase",
            "over 64 chains",
            "largest alignment",
        ];
        assert_drawn(&files.unwrap(), &labels, &["NaN", "flips"]);
    }

    #[test]
    fn missing_times_and_few_dimensions_give_a_figure() {
        let curve = |dimensions: Value, times: Value, errors: Value| {
            json!({"format": "headflow-result", "escape": {"curves": [{"label": "a", "dimensions": dimensions,
                "times": times, "standard_errors": errors, "slopes": [{"label": "b", "slope": 0.5}]}]}})
        };
        for document in [
            curve(json!([500]), json!([3.0]), json!([null])),
            curve(json!([500, 1000]), json!([3.0, 3.4]), json!([0.1, 0.0])),
            curve(json!([500, 1000, 4000]), json!([3.0, null, 4.2]), json!([0.1, null, 0.1])),
        ] {
            let (_folder, files) = draw(&document);
            assert_drawn(&files.unwrap(), &["escape time  τ*", "b, slope 0.500"], &["NaN", "10⁷"]);
        }
    }

    #[test]
    fn the_fitted_line_goes_through_the_weighted_mean() {
        let e = std::f64::consts::E;
        let mut curve = Times {
            label: String::new(),
            dimensions: vec![1.0, e, e * e],
            times: vec![Some(1.0), Some(2.0), Some(7.0)],
            standard_errors: vec![Some(1.0), Some(1.0), Some(0.5)],
            replicas: Vec::new(),
            slopes: Vec::new(),
        };
        // Weights 1, 1, 4.
        let mean = ((0.0 + 1.0 + 8.0) / 6.0, (1.0 + 2.0 + 28.0) / 6.0);
        let line = curve.fitted(0.5);
        assert_eq!((line[0].0, line[1].0), (1.0, e * e));
        assert!((line[0].1 - (mean.1 - 0.5 * mean.0)).abs() < 1e-12);
        assert!((line[1].1 - line[0].1 - 0.5 * 2.0).abs() < 1e-12);
        // One unknown error: equal weights.
        curve.standard_errors[2] = Some(0.0);
        assert!((curve.fitted(0.5)[0].1 - (10.0 / 3.0 - 0.5)).abs() < 1e-12);
        curve.times = vec![None; 3];
        assert!(curve.fitted(0.5).is_empty());
    }

    #[test]
    fn broken_results_are_refused_in_one_line_that_names_the_file() {
        let refused = |document: Value, what: &str| {
            let (folder, files) = draw(&document);
            let message = files.unwrap_err().to_string();
            assert!(message.contains("result.json") && !message.contains('\n') && message.contains(what), "{message}");
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        };
        let with = |change: &dyn Fn(&mut Value)| {
            let mut escape = example();
            change(&mut escape);
            json!({"format": "headflow-result", "escape": escape})
        };
        refused(json!({"escape": example()}), "format");
        refused(json!({"format": "headflow-result"}), "holds no \"escape\"");
        refused(json!({"format": "headflow-result", "escape": []}), "\"escape\"");
        refused(with(&|e| e["curves"][0]["times"] = json!([1.0])), "6 dimensions, 1 times");
        refused(with(&|e| e["curves"][0]["dimensions"][0] = json!(0)), "dimension 0");
        refused(with(&|e| e["curves"][1]["times"] = json!("none")), "\"escape\"");
        refused(with(&|e| e["curves"] = Value::Null), "\"escape\"");
        let folder = tempfile::tempdir().unwrap();
        let message = escape(folder.path(), &folder.path().join("escape")).unwrap_err().to_string();
        assert!(message.contains("result.json: no such file"), "{message}");
        fs::write(folder.path().join("result.json"), "{\"format\": ").unwrap();
        let message = escape(folder.path(), &folder.path().join("escape")).unwrap_err().to_string();
        assert!(message.contains("truncated"), "{message}");
    }
}
