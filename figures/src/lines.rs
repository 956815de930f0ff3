//! Curves against a parameter, on linear or logarithmic axes.

use std::path::{Path, PathBuf};

use plotters::style::RGBColor;
use serde::Deserialize;

use crate::canvas::{Stamp, Stroke};
use crate::error::Error;
use crate::panel::{Curve, Figure, Key, Legend, Panel, Scale, drawable, grid};
use crate::record::{Pair, points, read_document, read_list};
use crate::style::{Dash, INK, WIDTH, dimension_marker, head_color, head_dash};

/// An entry of the field `lines`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
struct Lines {
    title: String,
    x: Axis,
    y: Axis,
    curves: Vec<Course>,
    note: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
struct Axis {
    label: String,
    #[serde(default)]
    log: bool,
}

impl Axis {
    fn scale(&self) -> Scale {
        Scale::of(self.log)
    }
}

/// One of the curves in a panel.
#[derive(Debug, Clone, PartialEq, Deserialize)]
struct Course {
    label: String,
    points: Vec<Pair>,
    /// Half lengths of the error bars.
    #[serde(default)]
    errors: Vec<Option<f64>>,
    #[serde(default)]
    style: Style,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Style {
    #[default]
    Line,
    /// A reference.
    Dashed,
    Points,
}

impl Course {
    /// `(x, y)`, NaN where an axis has no place for either.
    fn path(&self, x: Scale, y: Scale) -> Vec<(f64, f64)> {
        let has_place = |p: &(f64, f64)| drawable(x.place(p.0)) && drawable(y.place(p.1));
        points(&self.points).into_iter().map(|p| if has_place(&p) { p } else { (f64::NAN, f64::NAN) }).collect()
    }

    /// `(x, y, half length of the error bar)`, the last NaN where unknown.
    fn marks(&self, x: Scale, y: Scale) -> Vec<(f64, f64, f64)> {
        let errors = self.errors.iter().copied().chain(std::iter::repeat(None));
        let error = |e: Option<f64>| e.filter(|&e| e > 0.0).unwrap_or(f64::NAN);
        self.path(x, y).into_iter().zip(errors).map(|((x, y), e)| (x, y, error(e))).collect()
    }

    fn has_errors(&self) -> bool {
        self.errors.iter().flatten().any(|&e| e > 0.0)
    }
}

impl Lines {
    fn check(&self) -> Result<(), String> {
        for curve in &self.curves {
            let (errors, points) = (curve.errors.len(), curve.points.len());
            if errors > 0 && errors != points {
                return Err(format!("curve \"{}\" has {points} points and {errors} errors", curve.label));
            }
        }
        if self.shown().next().is_none() {
            return Err("\"curves\" holds no point that the axes have a place for".into());
        }
        Ok(())
    }

    /// The curves of which there is something to see.
    fn shown(&self) -> impl Iterator<Item = &Course> {
        let (x, y) = (self.x.scale(), self.y.scale());
        self.curves.iter().filter(move |curve| curve.path(x, y).iter().any(|p| p.0.is_finite()))
    }
}

/// How the curves of one label look in all panels.
#[derive(Debug, Clone)]
struct Look {
    label: String,
    style: Style,
    color: RGBColor,
    dash: Dash,
    /// The rank among points.
    marker: usize,
    errors: bool,
}

impl Look {
    fn stroke(&self) -> Stroke {
        Stroke { color: self.color, width: if self.style == Style::Dashed { 3.2 } else { 3.6 }, dash: self.dash }
    }

    fn stamp(&self) -> Stamp {
        let radius = if self.style == Style::Points { 7.5 } else { 4.0 };
        Stamp { color: self.color, marker: dimension_marker(self.marker), filled: true, radius }
    }
}

/// Draws the curves of the result in `folder` against their parameter: a panel per entry, up to three
/// in a row. Curves of one label look alike in all panels; references are broken lines without
/// colour. Where an axis is logarithmic, values that are not positive are left out.
///
/// It reads the field `lines` of `result.json` alone: a list of objects with `title`, the axes `x` and
/// `y` (each a `label`, and `log`, false by default), `curves` (each a `label`, its `points`, and if
/// wanted `errors`, half the lengths of the error bars, and `style`, one of `line`, `dashed` and
/// `points`) and if wanted a `note`.
///
/// Writes `<out>.png` (1600 pixels wide, for 17 cm) and `<out>.svg`, and returns their paths. The
/// folder of `out` must exist; each file appears whole or not at all.
///
/// # Errors
/// [`Error::Missing`], [`Error::File`] or [`Error::Unreadable`] when `result.json` is not there,
/// cannot be read, or has no or ill-formed `lines`; [`Error::Drawing`] when the drawing fails,
/// [`Error::File`] when a file cannot be written.
pub fn lines(folder: &Path, out: &Path) -> Result<Vec<PathBuf>, Error> {
    let (header, document) = read_document(folder)?;
    let entries: Vec<Lines> = read_list(&header, "lines", &document)?;
    for (number, entry) in entries.iter().enumerate() {
        entry.check().map_err(|problem| {
            let place = format!("field \"lines\", entry {} (\"{}\")", number + 1, entry.title);
            Error::unreadable(&header, format!("{place}: {problem}"))
        })?;
    }
    let looks = looks(&entries);
    let panels = entries.iter().map(|entry| panel(entry, &looks)).collect();
    Figure::new(WIDTH, &[], grid(panels, [620.0, 500.0, 400.0]), legend(&looks))?.write(out)
}

fn looks(entries: &[Lines]) -> Vec<Look> {
    let mut looks: Vec<Look> = Vec::new();
    let (mut colored, mut references, mut marked) = (0, 0, 0);
    for curve in entries.iter().flat_map(Lines::shown) {
        if let Some(look) = looks.iter_mut().find(|look| look.label == curve.label && look.style == curve.style) {
            look.errors |= curve.has_errors();
            continue;
        }
        // Points of a line's label belong to the line.
        let twin = looks.iter().find(|look| look.label == curve.label && look.style != Style::Dashed);
        let (color, dash) = match (curve.style, twin) {
            (Style::Dashed, _) => (INK, Dash::broken(references)),
            (_, Some(twin)) => (twin.color, twin.dash),
            _ => (head_color(colored), head_dash(colored)),
        };
        match curve.style {
            Style::Dashed => references += 1,
            _ if twin.is_none() => colored += 1,
            _ => {}
        }
        looks.push(Look {
            label: curve.label.clone(),
            style: curve.style,
            color,
            dash,
            marker: marked,
            errors: curve.has_errors(),
        });
        if curve.style == Style::Points {
            marked += 1;
        }
    }
    looks
}

fn panel(entry: &Lines, looks: &[Look]) -> Panel {
    let mut curves = Vec::new();
    let (x, y) = (entry.x.scale(), entry.y.scale());
    let styled = |style| entry.shown().filter(move |curve| curve.style == style);
    // References below, points on top.
    for curve in styled(Style::Dashed).chain(styled(Style::Line)).chain(styled(Style::Points)) {
        let Some(look) = looks.iter().find(|l| l.label == curve.label && l.style == curve.style) else { continue };
        if curve.style != Style::Points {
            curves.push(Curve::Line { points: curve.path(x, y), stroke: look.stroke() });
        }
        if curve.style == Style::Points || curve.has_errors() {
            curves.push(Curve::Markers { points: curve.marks(x, y), stamp: look.stamp(), shift: 0.0 });
        }
    }
    Panel {
        title: entry.title.split(", ").map(String::from).collect(),
        remark: entry.note.iter().cloned().collect(),
        x_label: entry.x.label.clone(),
        y_label: entry.y.label.clone(),
        x_scale: x,
        y_scale: y,
        curves,
        ..Panel::default()
    }
}

fn legend(looks: &[Look]) -> Legend {
    let key = |look: &Look| match look.style {
        Style::Points => Key::Marker(look.stamp(), look.errors),
        _ if look.errors => Key::Marked(look.stroke(), look.stamp()),
        _ => Key::Line(look.stroke()),
    };
    vec![looks.iter().map(|look| (key(look), look.label.clone())).collect()]
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::{Value, json};
    use tempfile::TempDir;

    use super::*;
    use crate::fixture::{assert_drawn_in_few_strokes, draw_document};

    fn draw(entries: &Value) -> (TempDir, Result<Vec<PathBuf>, Error>) {
        draw_document(&json!({"format": "headflow-result", "lines": entries}), lines)
    }

    /// Losses that fall with the strength, to zero beyond its double value for softmax.
    fn example(title: &str, speed: f64) -> Value {
        let x: Vec<f64> = (0..41).map(|k| 0.2 * f64::from(k)).collect();
        let curve = |slope: f64, floor: f64| -> Vec<(f64, f64)> {
            x.iter().map(|&nu| (nu, floor + 0.94 * (-slope * speed * nu * nu / 10.0).exp())).collect()
        };
        let zero = |nu: f64| if nu > 6.0 { 0.0 } else { 0.9 * (-0.24 * speed * nu * nu).exp() };
        let measured: Vec<_> = curve(1.0, 0.01).into_iter().step_by(5).map(|(nu, e)| (nu, 1.05 * e)).collect();
        let errors: Vec<_> = measured.iter().map(|p| json!(p.1 * 0.1 + 0.008)).collect();
        json!({
            "title": title,
            "x": {"label": "signal strength  ν", "log": false},
            "y": {"label": "optimal loss  E*", "log": true},
            "curves": [
                {"label": "softmax", "points": curve(1.0, 0.01), "style": "line"},
                {"label": "softmax1", "points": curve(1.3, 0.003)},
                {"label": "bayes-softmax", "points": curve(1.9, 0.0), "style": "line"},
                {"label": "direct SGD, D = 1000", "points": measured, "errors": errors, "style": "points"},
                {"label": "Bayes risk", "points": x.iter().map(|&nu| (nu, zero(nu))).collect::<Vec<_>>(), "style": "dashed"},
            ],
        })
    }

    #[test]
    fn one_to_six_panels_give_a_figure() {
        let titles =
            ["flips θ = ±ν, F = 1", "Gaussian θ, F = 1", "sphere, F = 2", "flips, F = 2", "flips, F = 3", "discrete"];
        for count in [1, 2, 3, 6] {
            let entries: Vec<_> = titles.iter().zip(1..).take(count).map(|(t, k)| example(t, f64::from(k))).collect();
            let (_folder, files) = draw(&json!(entries));
            let files = files.unwrap();
            let labels = ["flips θ = ±ν, F = 1", "optimal loss  E*", "signal strength  ν", "Bayes risk", "direct SGD"];
            assert_drawn_in_few_strokes(&files, &labels, &["NaN", "null"]);
            let svg = fs::read_to_string(&files[1]).unwrap();
            assert_eq!(svg.matches("bayes-softmax").count(), 1);
            let image = image::open(&files[0]).unwrap().to_rgb8();
            for rank in 0..4 {
                let color = head_color(rank);
                let count = image.pixels().filter(|p| p.0 == [color.0, color.1, color.2]).count();
                assert!(count > 200, "{count} pixels of curve {rank}");
            }
        }
    }

    #[test]
    fn odd_curves_give_a_figure() {
        let entry = json!({
            "title": "odd",
            "note": "a note below the title",
            "x": {"label": "L", "log": true},
            "y": {"label": "E"},
            "curves": [
                {"label": "one", "points": [[10, 0.5]]},
                {"label": "two", "points": [[-1, 0.5], [0, 1], [100, null], [1000, 0.25], [1e9, 0.5]], "errors": [1, 1, 1, 0.1, null]},
                {"label": "nowhere", "points": []},
                {"label": "one", "points": [[10, 0.5], [1e5, 0.4]], "style": "points"},
            ],
        });
        let (_folder, files) = draw(&json!([entry]));
        assert_drawn_in_few_strokes(
            &files.unwrap(),
            &["one", "two", "a note below the title", "10⁴", "0.5"],
            &["NaN", "nowhere", "2.0"],
        );
        let looks = looks(&[serde_json::from_value(entry).unwrap()]);
        assert_eq!(looks.len(), 3);
        assert_eq!(looks[0].color, looks[2].color);
        assert_ne!(looks[0].color, looks[1].color);
    }

    #[test]
    fn broken_lines_are_refused_in_one_line_that_names_the_file_and_the_field() {
        let refused = |entries: Value, what: &str| {
            let (folder, files) = draw(&entries);
            let message = files.unwrap_err().to_string();
            assert!(message.contains("result.json") && !message.contains('\n') && message.contains(what), "{message}");
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        };
        let with = |change: &dyn Fn(&mut Value)| {
            let mut entry = example("flips", 1.0);
            change(&mut entry);
            json!([example("first", 1.0), entry])
        };
        refused(Value::Null, "holds no \"lines\"");
        refused(json!([]), "\"lines\" is an empty list");
        refused(json!([{"title": "flips"}]), "field \"lines\", entry 1: missing field `x`");
        refused(
            with(&|e| e["curves"][3]["errors"] = json!([1.0])),
            "entry 2 (\"flips\"): curve \"direct SGD, D = 1000\"",
        );
        refused(with(&|e| e["curves"][0]["style"] = json!("dotted")), "unknown variant `dotted`");
        refused(with(&|e| e["curves"] = json!([])), "no point that the axes have a place for");
        refused(
            with(&|e| e["curves"] = json!([{"label": "zero", "points": [[1, 0], [2, -1]]}])),
            "no point that the axes have a place for",
        );
        refused(with(&|e| e["curves"][0]["points"] = json!([[1]])), "field \"lines\", entry 2");
    }
}
