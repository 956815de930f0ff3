//! Phase diagrams: a quantity by colour over a plane of two parameters, with lines of equal height
//! and curves from theory on top.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::canvas::Stroke;
use crate::cells::{CONTOUR_WIDTH, Cells, Contour};
use crate::contour::contours;
use crate::error::Error;
use crate::panel::{Bar, Curve, Figure, Key, Legend, Panel, Range, Scale, drawable, grid, plain};
use crate::record::{Pair, points, read_document, read_list};
use crate::shade::{Shades, viridis};
use crate::style::{Dash, INK, WIDTH, boundary_look};

/// On an axis of at most so many values every one is marked.
const MARKED: usize = 9;

/// An entry of the field `maps`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
struct Map {
    title: String,
    quantity: String,
    x: Axis,
    y: Axis,
    /// `values[j][i]` belongs to `y[j]` and `x[i]`; `None` was not computed.
    values: Vec<Vec<Option<f64>>>,
    #[serde(default)]
    whole: bool,
    /// What the whole values 0, 1 and so on are called.
    #[serde(default)]
    names: Vec<String>,
    #[serde(default)]
    log_values: bool,
    contours: Option<Vec<f64>>,
    /// What the contours are of, in rows like `values`; `values` themselves where absent.
    contours_of: Option<Vec<Vec<Option<f64>>>>,
    /// What the contours are, for the legend.
    contours_label: Option<String>,
    #[serde(default)]
    boundaries: Vec<Boundary>,
    /// Columns and rows of cells read off flows that had not settled.
    #[serde(default)]
    unsettled: Vec<(usize, usize)>,
    note: Option<String>,
}

/// A parameter and its values, which grow.
#[derive(Debug, Clone, PartialEq, Deserialize)]
struct Axis {
    label: String,
    values: Vec<f64>,
    #[serde(default)]
    log: bool,
}

/// A curve over the map.
#[derive(Debug, Clone, PartialEq, Deserialize)]
struct Boundary {
    label: String,
    points: Vec<Pair>,
}

impl Axis {
    fn check(&self, name: &str) -> Result<(), String> {
        let values = &self.values;
        if values.len() < 2 {
            return Err(format!("{name} has {} values, but a map needs at least two", values.len()));
        }
        if let Some(value) = values.iter().find(|&&v| !drawable(self.scale().place(v))) {
            return Err(format!("{name} is logarithmic but has a value {value}"));
        }
        match values.windows(2).find(|pair| pair[0] >= pair[1]) {
            Some(pair) => Err(format!("the values of {name} must grow, but {} follows {}", pair[1], pair[0])),
            None => Ok(()),
        }
    }

    fn scale(&self) -> Scale {
        Scale::of(self.log)
    }

    fn places(&self) -> Vec<f64> {
        self.values.iter().map(|&v| self.scale().place(v)).collect()
    }

    /// The edges of cells around the values: half way between neighbours along the axis.
    fn edges(&self) -> Vec<f64> {
        let places = self.places();
        let middles = places.windows(2).map(|pair| f64::midpoint(pair[0], pair[1]));
        let last = places.len() - 1;
        let before = places[0] - (places[1] - places[0]) / 2.0;
        let after = places[last] + (places[last] - places[last - 1]) / 2.0;
        [before].into_iter().chain(middles).chain([after]).map(|place| self.scale().value(place)).collect()
    }

    fn range(&self) -> Option<Range> {
        Range::of(self.edges().into_iter())
    }

    /// The values, where they are few and short enough to be marked.
    fn marks(&self) -> Vec<f64> {
        let few = self.values.len() <= MARKED && self.values.iter().all(|&v| plain(v).chars().count() <= 6);
        if few { self.values.clone() } else { Vec::new() }
    }
}

impl Map {
    fn check(&self) -> Result<(), String> {
        self.x.check("\"x\"")?;
        self.y.check("\"y\"")?;
        self.check_rows("values", &self.values)?;
        if let Some(field) = &self.contours_of {
            self.check_rows("contours_of", field)?;
        }
        if self.whole {
            // Larger ones are no counts.
            if let Some(value) = self.finite().find(|v| v.fract() != 0.0 || v.abs() > 1e9) {
                return Err(format!("\"whole\" is true, but \"values\" holds {value}"));
            }
        }
        let (columns, rows) = (self.x.values.len(), self.y.values.len());
        if let Some((column, row)) = self.unsettled.iter().find(|(column, row)| *column >= columns || *row >= rows) {
            return Err(format!(
                "\"unsettled\" holds [{column}, {row}], but there are {columns} columns and {rows} rows"
            ));
        }
        let levels = self.contours.iter().flatten();
        match levels.copied().find(|&level| !drawable(self.scale().place(level))) {
            Some(level) => Err(format!("\"log_values\" is true, but \"contours\" holds {level}")),
            None => Ok(()),
        }
    }

    /// Whether the rows fit the axes and hold values that have a place.
    fn check_rows(&self, name: &str, values: &[Vec<Option<f64>>]) -> Result<(), String> {
        let (columns, rows) = (self.x.values.len(), self.y.values.len());
        if values.len() != rows {
            return Err(format!("\"{name}\" has {} rows, but \"y\" has {rows} values", values.len()));
        }
        if let Some((number, row)) = values.iter().enumerate().find(|(_, row)| row.len() != columns) {
            return Err(format!(
                "row {} of \"{name}\" has {} entries, but \"x\" has {columns} values",
                number + 1,
                row.len()
            ));
        }
        if finite(values).next().is_none() {
            return Err(format!("\"{name}\" holds no finite value"));
        }
        if self.scale() == Scale::Logarithmic && !finite(values).any(|v| v > 0.0) {
            return Err(format!("\"log_values\" is true, but \"{name}\" holds no positive value"));
        }
        Ok(())
    }

    fn finite(&self) -> impl Iterator<Item = f64> + '_ {
        finite(&self.values)
    }

    /// What the contours are of.
    fn contoured(&self) -> &[Vec<Option<f64>>] {
        self.contours_of.as_ref().unwrap_or(&self.values)
    }

    fn scale(&self) -> Scale {
        Scale::of(self.log_values && !self.whole)
    }

    /// Whether the two maps share their colours.
    fn shares(&self, other: &Self) -> bool {
        let kind = |map: &Self| (map.whole, map.scale(), map.names.clone());
        self.quantity == other.quantity && kind(self) == kind(other)
    }

    /// Whether any cell was not computed.
    fn has_gaps(&self) -> bool {
        self.finite().count() < self.x.values.len() * self.y.values.len()
    }
}

/// The values that can be placed.
fn finite(rows: &[Vec<Option<f64>>]) -> impl Iterator<Item = f64> + '_ {
    rows.iter().flatten().copied().flatten().filter(|&v| drawable(v))
}

/// What the colours of some maps mean.
enum Colors {
    Continuous(Shades),
    /// The values, each of a colour of its own.
    Steps(Vec<f64>),
}

impl Colors {
    fn of(maps: &[&Map]) -> Option<Self> {
        let first = maps.first()?;
        let values = || maps.iter().flat_map(|map| map.finite());
        if !first.whole {
            return Shades::of(values(), first.scale()).map(Self::Continuous);
        }
        let mut steps: Vec<f64> = values().collect();
        steps.sort_unstable_by(f64::total_cmp);
        // Zero of either sign is one step.
        steps.dedup_by(|a, b| a == b);
        Some(Self::Steps(steps))
    }

    fn color(&self, value: f64) -> plotters::style::RGBColor {
        match self {
            Self::Continuous(shades) => shades.color(value),
            // Not the ends, which are close to the ink and to white.
            Self::Steps(steps) => match (steps.iter().position(|&step| step == value), steps.len()) {
                (Some(rank), 2..) => viridis(0.06 + 0.9 * rank as f64 / (steps.len() - 1) as f64),
                _ => viridis(0.3),
            },
        }
    }

    fn height(&self, value: f64) -> f64 {
        match self {
            Self::Continuous(shades) => shades.height(value),
            Self::Steps(_) => value,
        }
    }
}

/// Maps that share their colours, by their numbers in the document.
struct Group {
    members: Vec<usize>,
    colors: Colors,
}

/// Draws the phase diagrams of the result in `folder`: a panel per map, up to three in a row, in
/// which the cell around every pair of parameters has the colour of its value, from dark to light.
/// Maps of one quantity share a scale of colours, which stands below the panels; whole values have a
/// colour each and stand in the legend. Thin lines join equal heights, bold ones are the map's
/// boundaries. Cells that were not computed are hatched, those of flows that had not settled striped over their colour. A map of measured values can have the lines
/// of a theory's: each has the number and, below it, the colour of its height.
///
/// It reads the field `maps` of `result.json` alone: a list of objects with `title`, `quantity`, the
/// axes `x` and `y` (each a `label`, growing `values`, and `log`, false by default), the rows of
/// `values` (a row per value of `y`, null where not computed), and if wanted `whole` (with `names` for
/// the values 0, 1 and so on), `log_values`, `contours` (heights; about five round ones by default,
/// none if `whole`), `contours_of` (rows like `values` whose lines are drawn in place of theirs, by
/// default at the same heights, or at round heights of their own if `whole`), `contours_label` (what
/// the lines are, for the legend), `boundaries` (each with a `label` and its `points`), `unsettled` (pairs of column and
/// row) and a `note`.
///
/// Writes `<out>.png` (1600 pixels wide, for 17 cm) and `<out>.svg`, and returns their paths. The
/// folder of `out` must exist; each file appears whole or not at all.
///
/// # Errors
/// [`Error::Missing`], [`Error::File`] or [`Error::Unreadable`] when `result.json` is not there,
/// cannot be read, or has no or ill-formed `maps`; [`Error::Drawing`] when the drawing fails,
/// [`Error::File`] when a file cannot be written.
pub fn map(folder: &Path, out: &Path) -> Result<Vec<PathBuf>, Error> {
    let (header, document) = read_document(folder)?;
    let maps: Vec<Map> = read_list(&header, "maps", &document)?;
    for (number, map) in maps.iter().enumerate() {
        map.check().map_err(|problem| {
            let place = format!("field \"maps\", entry {} (\"{}\")", number + 1, map.title);
            Error::unreadable(&header, format!("{place}: {problem}"))
        })?;
    }
    let groups = groups(&maps);
    let looks = looks(&maps);
    let mut panels: Vec<Panel> = Vec::new();
    for (number, map) in maps.iter().enumerate() {
        let Some(group) = groups.iter().find(|group| group.members.contains(&number)) else { continue };
        panels.push(panel(map, &group.colors, groups.len() > 1, &looks));
    }
    let mut rows = grid(panels, [640.0, 530.0, 410.0]);
    let columns = rows[0].panels.len();
    for (number, pair) in maps.windows(2).enumerate() {
        let (row, column) = ((number + 1) / columns, (number + 1) % columns);
        if column > 0 && pair[0].y == pair[1].y {
            rows[row].panels[column].y_label.clear();
        }
    }
    Figure::new(WIDTH, &[], rows, legend(&maps, &groups, &looks))?.with_bars(bars(&maps, &groups))?.write(out)
}

fn groups(maps: &[Map]) -> Vec<Group> {
    let mut members: Vec<Vec<usize>> = Vec::new();
    for (number, map) in maps.iter().enumerate() {
        match members.iter_mut().find(|group| maps[group[0]].shares(map)) {
            Some(group) => group.push(number),
            None => members.push(vec![number]),
        }
    }
    let colored = members.into_iter().filter_map(|members| {
        let colors = Colors::of(&members.iter().map(|&number| &maps[number]).collect::<Vec<_>>())?;
        Some(Group { members, colors })
    });
    colored.collect()
}

/// The stroke of every boundary, by label: the same in all maps.
fn looks(maps: &[Map]) -> Vec<(String, Stroke)> {
    let mut looks: Vec<(String, Stroke)> = Vec::new();
    for boundary in maps.iter().flat_map(|map| &map.boundaries) {
        if looks.iter().all(|(label, _)| *label != boundary.label) {
            let (color, dash) = boundary_look(looks.len());
            looks.push((boundary.label.clone(), Stroke { color, width: 4.2, dash }));
        }
    }
    looks
}

fn panel(map: &Map, colors: &Colors, name_quantity: bool, looks: &[(String, Stroke)]) -> Panel {
    let of_cell = |value: &Option<f64>| value.filter(|&v| drawable(v)).map(|v| colors.color(v));
    let cells = Cells {
        x_edges: map.x.edges(),
        y_edges: map.y.edges(),
        colors: map.values.iter().map(|row| row.iter().map(of_cell).collect()).collect(),
        striped: map.unsettled.clone(),
        contours: contour_lines(map, colors),
    };
    let boundaries = map.boundaries.iter().filter_map(|boundary| {
        let (_, stroke) = looks.iter().find(|(label, _)| *label == boundary.label)?;
        Some(Curve::Boundary { points: points(&boundary.points), stroke: *stroke })
    });
    let mut title: Vec<String> = map.title.split(", ").map(String::from).collect();
    if name_quantity && !map.title.contains(&map.quantity) {
        title.push(map.quantity.clone());
    }
    Panel {
        title,
        remark: map.note.iter().cloned().collect(),
        x_label: map.x.label.clone(),
        y_label: map.y.label.clone(),
        x_scale: map.x.scale(),
        y_scale: map.y.scale(),
        x_marks: map.x.marks(),
        y_marks: map.y.marks(),
        x_range: map.x.range(),
        y_range: map.y.range(),
        curves: boundaries.collect(),
        cells: Some(cells),
        ..Panel::default()
    }
}

/// The heights of a map's contours, with their labels.
fn levels(map: &Map, colors: &Colors) -> Vec<(f64, String)> {
    match (&map.contours, colors) {
        (Some(levels), _) => levels.iter().map(|&level| (level, plain(level))).collect(),
        (None, Colors::Continuous(shades)) => shades.levels(),
        (None, Colors::Steps(_)) => {
            let shades = map.contours_of.as_ref().and_then(|field| Shades::of(finite(field), Scale::Linear));
            shades.map(|shades| shades.levels()).unwrap_or_default()
        }
    }
}

fn contour_lines(map: &Map, colors: &Colors) -> Vec<Contour> {
    // Interpolated along the axes as they are drawn.
    let (x, y) = (map.x.places(), map.y.places());
    let height = |value: &Option<f64>| value.filter(|&v| drawable(v)).map(|v| colors.height(v));
    let heights: Vec<Vec<_>> = map.contoured().iter().map(|row| row.iter().map(height).collect()).collect();
    let to_units = |line: Vec<(f64, f64)>| -> Vec<(f64, f64)> {
        line.into_iter().map(|p| (map.x.scale().value(p.0), map.y.scale().value(p.1))).collect()
    };
    let of_level = |(level, label): (f64, String)| {
        let lines = contours(&x, &y, &heights, colors.height(level));
        let rimmed = map.contours_of.is_some();
        Contour { lines: lines.into_iter().map(to_units).collect(), label, color: colors.color(level), rimmed }
    };
    levels(map, colors).into_iter().map(of_level).collect()
}

fn bars(maps: &[Map], groups: &[Group]) -> Vec<Bar> {
    let of_group = |group: &Group| {
        let Colors::Continuous(shades) = group.colors else { return None };
        let members = || group.members.iter().map(|&number| &maps[number]);
        let levels = members().flat_map(|map| levels(map, &group.colors)).map(|level| level.0);
        let mut levels: Vec<f64> = levels.filter(|&level| shades.range().holds(shades.scale.place(level))).collect();
        levels.sort_unstable_by(f64::total_cmp);
        levels.dedup();
        Some(Bar { label: members().take(1).map(|map| map.quantity.clone()).collect(), shades, levels })
    };
    groups.iter().filter_map(of_group).collect()
}

fn legend(maps: &[Map], groups: &[Group], looks: &[(String, Stroke)]) -> Legend {
    let mut legend: Legend = Vec::new();
    for group in groups {
        let Some(first) = group.members.first().map(|&number| &maps[number]) else { continue };
        if let Colors::Steps(steps) = &group.colors {
            let mut entries = vec![(Key::Remark, format!("{}:", first.quantity))];
            entries.extend(steps.iter().map(|&step| {
                let name = if step >= 0.0 { first.names.get(step as usize) } else { None };
                (Key::Patch(group.colors.color(step)), name.cloned().unwrap_or_else(|| plain(step)))
            }));
            legend.push(entries);
        }
    }
    let mut others: Vec<_> = looks.iter().map(|(label, stroke)| (Key::Line(*stroke), label.clone())).collect();
    let thin = Key::Line(Stroke { color: INK, width: CONTOUR_WIDTH, dash: Dash::Solid });
    for label in maps.iter().filter_map(|map| map.contours_label.as_ref()) {
        if !others.iter().any(|(key, other)| *key == thin && other == label) {
            others.push((thin, label.clone()));
        }
    }
    if maps.iter().any(Map::has_gaps) {
        others.push((Key::Hatch, "not computed".into()));
    }
    if maps.iter().any(|map| !map.unsettled.is_empty()) {
        others.push((Key::Stripes, "not settled".into()));
    }
    let below = |map: &Map| map.scale() == Scale::Logarithmic && map.finite().any(|v| v <= 0.0);
    if maps.iter().any(below) {
        others.push((Key::Patch(viridis(0.0)), "also values ≤ 0".into()));
    }
    legend.push(others);
    legend
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::{Value, json};
    use tempfile::TempDir;

    use super::*;
    use crate::fixture::{assert_drawn, draw_document};
    use crate::style::boundary_look;

    fn draw(entries: &Value) -> (TempDir, Result<Vec<PathBuf>, Error>) {
        draw_document(&json!({"format": "headflow-result", "maps": entries}), map)
    }

    fn linear(low: f64, high: f64, count: usize) -> Vec<f64> {
        (0..count).map(|k| low + (high - low) * k as f64 / (count - 1) as f64).collect()
    }

    fn decades(low: f64, high: f64, count: usize) -> Vec<f64> {
        linear(low.log10(), high.log10(), count).into_iter().map(|v| 10f64.powf(v)).collect()
    }

    /// How far a strength `nu` lies beyond what `L` tokens hide, times `factor`, smoothly.
    fn regret(nu: f64, length: f64, factor: f64) -> f64 {
        let beyond = nu - (2.0 * length.ln()).sqrt();
        factor * (0.02 + 0.9 / (1.0 + (beyond * beyond * 0.8).exp()) * (0.5 + 0.5 * (nu * 0.8).tanh()))
    }

    fn phases(title: &str, count: (usize, usize), value: impl Fn(f64, f64) -> Value) -> Value {
        let (x, y) = (linear(0.0, 8.0, count.0), decades(10.0, 1e9, count.1));
        let values: Vec<Vec<Value>> = y.iter().map(|&y| x.iter().map(|&x| value(x, y)).collect()).collect();
        let on = |scale: f64| -> Vec<_> { y.iter().map(|&l| ((2.0 * l.ln()).sqrt() * scale, l)).collect() };
        json!({
            "title": title,
            "quantity": "regret to Bayes  E − E_Bayes",
            "x": {"label": "signal strength  ν", "values": x, "log": false},
            "y": {"label": "number of tokens  L", "values": y, "log": true},
            "values": values,
            "boundaries": [
                {"label": "√(2 ln L)", "points": on(1.0)},
                {"label": "√(ln L / 2)", "points": on(0.5)},
            ],
        })
    }

    fn heads(nu: f64, length: f64) -> Value {
        let count = (nu * 6.0 / (2.0 * length.ln()).sqrt() / 1.2).floor().clamp(0.0, 6.0);
        json!(count)
    }

    /// The number of pixels of a colour.
    fn pixels(png: &Path, color: plotters::style::RGBColor) -> usize {
        let image = image::open(png).unwrap().to_rgb8();
        image.pixels().filter(|p| p.0 == [color.0, color.1, color.2]).count()
    }

    #[test]
    fn one_map_with_boundaries_and_gaps_gives_a_figure() {
        let mut map = phases("softmax, flips θ = ±ν, F = 1, H = 2", (40, 40), |nu, length| {
            if nu > 6.0 && length > 1e7 { Value::Null } else { json!(regret(nu, length, 1.0)) }
        });
        map["note"] = json!("best of 16 starts of the flow");
        let (_folder, files) = draw(&json!([map]));
        let files = files.unwrap();
        let labels = ["√(2 ln L)", "√(ln L / 2)", "not computed", "regret to Bayes  E − E_Bayes", "0.1", "10²"];
        assert_drawn(&files, &labels, &["NaN", "null", "≤ 0"]);
        assert_drawn(&files, &["signal strength  ν", "number of tokens  L", "best of 16 starts of the flow"], &[]);
        for rank in 0..2 {
            assert!(pixels(&files[0], boundary_look(rank).0) > 500);
        }
        assert!(pixels(&files[0], viridis(0.0)) > 100, "no cell of the lowest colour");
    }

    #[test]
    fn maps_of_one_quantity_share_a_scale() {
        let maps: Vec<_> = [("softmax", 1.0), ("softmax1", 0.7), ("bayes-softmax", 0.2)]
            .into_iter()
            .map(|(title, factor)| phases(title, (40, 40), |nu, length| json!(regret(nu, length, factor))))
            .collect();
        let (_folder, files) = draw(&json!(maps));
        let files = files.unwrap();
        assert_drawn(&files, &["softmax", "softmax1", "bayes-softmax"], &["not computed"]);
        let svg = fs::read_to_string(&files[1]).unwrap();
        // One scale of colours, one axis label on the left, one legend.
        assert_eq!(svg.matches("regret to Bayes").count(), 1);
        assert_eq!(svg.matches("number of tokens").count(), 1);
        assert_eq!(svg.matches("√(2 ln L)").count(), 1);
    }

    #[test]
    fn six_maps_of_two_quantities_fill_two_rows() {
        let of = |factor: f64| {
            phases("softmax", (7, 5), move |nu, length| match regret(nu, length, factor) {
                value if nu > 7.0 && length < 100.0 => json!(-value),
                value => json!(value.powi(6)),
            })
        };
        let mut maps: Vec<Value> = [1.0, 0.7, 0.2].map(of).to_vec();
        for (map, title) in maps.iter_mut().zip(["softmax, H = 6", "softmax1, H = 6", "bayes-softmax, H = 6"]) {
            map["title"] = json!(title);
            map["log_values"] = json!(true);
        }
        for title in ["softmax, H = 6", "softmax1, H = 6", "bayes-softmax, H = 6"] {
            let mut map = phases(title, (7, 5), |nu, length| if nu < 1.0 { Value::Null } else { heads(nu, length) });
            map["quantity"] = json!("number of specialised heads");
            map["whole"] = json!(true);
            maps.push(map);
        }
        let (_folder, files) = draw(&json!(maps));
        let labels = ["number of specialised heads:", "not computed", "also values ≤ 0", "10⁻⁶", "10⁷", "8"];
        assert_drawn(&files.unwrap(), &labels, &["null"]);
    }

    #[test]
    fn whole_maps_have_a_colour_for_every_value() {
        let mut counts = phases("bayes-softmax, isotropic Gaussian θ, F = 2", (40, 40), heads);
        counts["quantity"] = json!("number of specialised heads");
        counts["whole"] = json!(true);
        let mut stages = phases("softmax", (40, 40), |nu, length| json!(u8::from(nu > length.ln().sqrt())));
        stages["quantity"] = json!("learned in stages");
        stages["whole"] = json!(true);
        stages["names"] = json!(["no", "yes"]);
        let (_folder, files) = draw(&json!([counts, stages]));
        let files = files.unwrap();
        let labels = ["number of specialised heads:", "learned in stages:", "no", "yes", "6"];
        assert_drawn(&files, &labels, &["NaN"]);
        for rank in 0..7 {
            assert!(pixels(&files[0], viridis(0.06 + 0.9 * f64::from(rank) / 6.0)) > 500, "step {rank}");
        }
    }

    #[test]
    fn odd_maps_give_a_figure() {
        // Uneven axes, one value, given heights, other axes than the neighbour, long words.
        let even = json!({
            "title": "a title that is a good deal longer than any panel of a row of three could ever hold in one line",
            "quantity": "a quantity with quite a long name that does not fit beside its scale of colours",
            "x": {"label": "E θ", "values": [0.0, 0.5, 1.0, 4.0, 10.0], "log": false},
            "y": {"label": "D", "values": [100.0, 1000.0], "log": true},
            "values": [[0.1, 0.2, null, 0.5, 0.9], [0.3, 0.4, 0.5, 0.6, 1.2]],
            "contours": [0.55, 1e-4, 5.0],
            "boundaries": [{"label": "outside", "points": [[20.0, -1.0], [0.0, 0.0], [null, 300.0], [-5.0, 300.0], [20.0, 300.0]]}],
            "note": "a note that is also longer than a panel of a row of three, and is set in more lines than one",
        });
        let constant = json!({
            "title": "constant",
            "quantity": "loss",
            "x": {"label": "x", "values": [-1e6, 1e6]},
            "y": {"label": "y", "values": [1e-7, 2e-7, 3e-7]},
            "values": [[2.0, 2.0], [2.0, null], [2.0, 2.0]],
        });
        let whole = json!({
            "title": "one step",
            "quantity": "stages",
            "x": {"label": "H", "values": [1, 2, 3]},
            "y": {"label": "F", "values": [1, 2]},
            "values": [[3, 3, 3], [3, 3, 3]],
            "whole": true,
        });
        let (_folder, files) = draw(&json!([even, constant, whole, even]));
        assert_drawn(&files.unwrap(), &["0.55", "outside", "stages:", "loss"], &["5.0"]);
        let (_folder, files) = draw(&json!([even, constant, whole, constant, whole]));
        assert_drawn(&files.unwrap(), &["0.55", "outside", "stages:", "loss"], &["NaN"]);
    }

    #[test]
    fn contours_of_another_field_give_a_figure() {
        let with_theory = |title: &str, value: &dyn Fn(f64, f64) -> Value| {
            let mut map = phases(title, (12, 10), value);
            let theory = phases("", (12, 10), |nu, length| json!(regret(nu, length, 1.0)));
            map["boundaries"] = json!([]);
            map["contours_of"] = theory["values"].clone();
            map["contours_label"] = json!("lines: closed form");
            map
        };
        let wave = |nu: f64, length: f64| (3.0 * nu + length.ln()).sin();
        let measured = |nu: f64, length: f64| {
            if nu > 7.0 && length > 1e7 {
                Value::Null
            } else {
                json!(regret(nu, length, 1.0) + 0.03 * wave(nu, length))
            }
        };
        let own = with_theory("softmax", &measured);
        let mut far = with_theory("softmax1", &|nu, length| json!(0.45 - 0.8 * regret(nu, length, 1.0)));
        far["contours"] = json!([0.1, 0.3]);
        let (_folder, files) = draw(&json!([own, far]));
        let files = files.unwrap();
        assert_drawn(&files, &["lines: closed form", "not computed", "0.3"], &["NaN", "null"]);
        assert_eq!(fs::read_to_string(&files[1]).unwrap().matches("lines: closed form").count(), 1);
        let (_folder, files) = draw(&json!([own]));
        assert_drawn(&files.unwrap(), &["lines: closed form", "not computed"], &["NaN", "null"]);
    }

    #[test]
    fn contours_are_those_of_the_other_field() {
        let lines = |change: &dyn Fn(&mut Value)| {
            let mut map = json!({
                "title": "t",
                "quantity": "q",
                "x": {"label": "x", "values": [0.0, 1.0, 2.0]},
                "y": {"label": "y", "values": [0.0, 1.0]},
                "values": [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]],
                "contours": [0.5],
            });
            change(&mut map);
            let map: Map = serde_json::from_value(map).unwrap();
            map.check().unwrap();
            contour_lines(&map, &Colors::of(&[&map]).unwrap())
        };
        let x = |contour: &Contour| contour.lines.iter().flatten().map(|p| p.0).collect::<Vec<_>>();
        let own = lines(&|_| {});
        assert_eq!((x(&own[0]), own[0].rimmed), (vec![0.5, 0.5], false));
        let mirrored = json!([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0]]);
        let other = lines(&|m| m["contours_of"] = mirrored.clone());
        assert_eq!((x(&other[0]), other[0].rimmed), (vec![1.5, 1.5], true));
        // Its colour is still that of its height among the values.
        assert_eq!((&other[0].label, other[0].color), (&own[0].label, own[0].color));
        // Without heights, those of the colours; of steps, those of the field.
        let defaults = |whole: bool| {
            let contours = lines(&|m| {
                m["contours"] = Value::Null;
                m["contours_of"] = json!([[0.0, 0.5, 1.0], [0.0, 0.5, 1.0]]);
                m["whole"] = json!(whole);
            });
            contours.into_iter().map(|contour| contour.label).collect::<Vec<_>>()
        };
        assert_eq!(defaults(false), ["0.5", "1.0", "1.5"]);
        assert_eq!(defaults(true), ["0.2", "0.4", "0.6", "0.8"]);
    }

    /// Cells of flows that had not settled keep their colour under the stripes, and the legend says what these are.
    #[test]
    fn unsettled_cells_are_striped() {
        let whole = |unsettled: Value| {
            let mut map = phases("softmax", (6, 5), heads);
            map["whole"] = json!(true);
            map["unsettled"] = unsettled;
            draw(&json!([map]))
        };
        let (_folder, settled) = whole(json!([]));
        let settled = settled.unwrap();
        assert_drawn(&settled, &["6"], &["not settled"]);
        let (_other, moving) = whole(json!([[0, 0], [5, 4], [2, 1]]));
        let moving = moving.unwrap();
        assert_drawn(&moving, &["not settled"], &["not computed"]);
        // Dark cells have white stripes.
        let white = plotters::style::RGBColor(255, 255, 255);
        let dark = viridis(0.06);
        let (before, after) = (pixels(&settled[0], dark), pixels(&moving[0], dark));
        assert!(after < before && 2 * after > before, "{before} {after}");
        assert!(pixels(&moving[0], white) > 0);
    }

    #[test]
    fn cells_reach_half_a_step_beyond_the_values() {
        let axis = |values: &[f64], log| Axis { label: "x".into(), values: values.to_vec(), log };
        assert_eq!(axis(&[0.0, 1.0, 3.0], false).edges(), [-0.5, 0.5, 2.0, 4.0]);
        let edges = axis(&[10.0, 1000.0], true).edges();
        for (edge, wanted) in edges.iter().zip([1.0, 100.0, 1e4]) {
            assert!((edge / wanted - 1.0).abs() < 1e-12);
        }
    }

    #[test]
    fn broken_maps_are_refused_in_one_line_that_names_the_file_and_the_field() {
        let refused = |maps: Value, what: &str| {
            let (folder, files) = draw(&maps);
            let message = files.unwrap_err().to_string();
            assert!(message.contains("result.json") && !message.contains('\n') && message.contains(what), "{message}");
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        };
        let with = |change: &dyn Fn(&mut Value)| {
            let mut map = phases("softmax", (4, 3), |nu, length| json!(regret(nu, length, 1.0)));
            change(&mut map);
            json!([map])
        };
        refused(Value::Null, "holds no \"maps\"");
        refused(json!([]), "\"maps\" is an empty list");
        refused(json!({"title": "softmax"}), "field \"maps\"");
        refused(json!([{"title": "softmax"}]), "field \"maps\", entry 1: missing field `quantity`");
        refused(with(&|m| m["x"]["values"] = json!([1.0])), "\"x\" has 1 values");
        refused(with(&|m| m["y"]["values"] = json!([1.0])), "\"y\" has 1 values");
        refused(with(&|m| m["x"]["values"] = json!([1.0, 2.0, 2.0, 3.0])), "the values of \"x\" must grow");
        refused(with(&|m| m["y"]["values"] = json!([0.0, 1.0, 2.0])), "\"y\" is logarithmic but has a value 0");
        refused(with(&|m| m["values"] = json!([[1, 2, 3, 4]])), "\"values\" has 1 rows, but \"y\" has 3");
        refused(with(&|m| m["values"][1] = json!([1, 2])), "row 2 of \"values\" has 2 entries");
        refused(with(&|m| m["values"] = json!(vec![vec![Value::Null; 4]; 3])), "no finite value");
        refused(with(&|m| m["whole"] = json!(true)), "\"whole\" is true, but \"values\" holds");
        refused(
            with(&|m| {
                m["log_values"] = json!(true);
                m["values"] = json!(vec![vec![-1.0; 4]; 3]);
            }),
            "no positive value",
        );
        refused(
            with(&|m| {
                m["log_values"] = json!(true);
                m["contours"] = json!([0.1, 0.0]);
            }),
            "\"contours\" holds 0",
        );
        refused(
            with(&|m| m["unsettled"] = json!([[0, 3]])),
            "\"unsettled\" holds [0, 3], but there are 4 columns and 3 rows",
        );
        refused(with(&|m| m["unsettled"] = json!([[4, 0]])), "\"unsettled\" holds [4, 0]");
        refused(with(&|m| m["boundaries"] = json!([{"label": "line"}])), "missing field `points`");
        refused(with(&|m| m["contours_of"] = json!([[1, 2, 3, 4]])), "\"contours_of\" has 1 rows, but \"y\" has 3");
        refused(
            with(&|m| m["contours_of"] = json!([[1, 2, 3, 4], [1, 2, 3], [1, 2, 3, 4]])),
            "row 2 of \"contours_of\" has 3 entries, but \"x\" has 4 values",
        );
        refused(
            with(&|m| m["contours_of"] = json!(vec![vec![Value::Null; 4]; 3])),
            "\"contours_of\" holds no finite value",
        );
        refused(
            with(&|m| {
                m["log_values"] = json!(true);
                m["contours_of"] = json!(vec![vec![-1.0; 4]; 3]);
            }),
            "\"contours_of\" holds no positive value",
        );
        refused(with(&|m| m["contours_of"] = json!([["a"]])), "field \"maps\", entry 1: invalid type: string");
        refused(with(&|m| m["contours_label"] = json!(1)), "field \"maps\", entry 1: invalid type: integer");
    }
}
