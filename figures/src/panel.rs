//! Panels of curves, and figures: a grid of panels under a title, above a legend.

use std::path::{Path, PathBuf};

use plotters::prelude::{DrawingBackend, RGBColor};

use crate::canvas::{Align, Canvas, Drawing, Point, Stamp, Stroke, text_width, write};
use crate::error::Error;
use crate::style::{Dash, GRID, GUIDE, INK, LABEL, NOTE, SHADE, TICK, TITLE};

/// Width of an error bar.
const BAR: f64 = 2.0;
/// Larger numbers cannot be placed without overflow, and are treated as not finite.
const LARGEST: f64 = 1e150;

/// An interval of an axis.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Range {
    pub low: f64,
    pub high: f64,
}

impl Range {
    /// The smallest interval that holds all the finite values; `None` without any.
    pub fn of(values: impl Iterator<Item = f64>) -> Option<Self> {
        values.filter(|&v| drawable(v)).fold(None, |range: Option<Self>, v| {
            Some(range.map_or(Self { low: v, high: v }, |r| Self { low: r.low.min(v), high: r.high.max(v) }))
        })
    }

    /// With some space around; a constant gets an interval around it.
    fn padded(self) -> Self {
        let scale = self.low.abs().max(self.high.abs());
        let span = self.high - self.low;
        let space = if scale < 1.0 / LARGEST {
            0.5
        } else if span < 1e-6 * scale {
            0.1 * scale
        } else {
            0.04 * span
        };
        Self { low: self.low - space, high: self.high + space }
    }

    /// Whether `value` lies between the ends; never for one that is not finite.
    fn holds(self, value: f64) -> bool {
        (self.low..=self.high).contains(&value)
    }

    /// Where `value` lies between the ends, from 0 to 1.
    fn fraction(self, value: f64) -> f64 {
        (value - self.low) / (self.high - self.low)
    }
}

fn drawable(value: f64) -> bool {
    value.abs() < LARGEST
}

/// Round values within the range, at most `count` or so, with their labels.
fn ticks(range: Range, count: f64) -> Vec<(f64, String)> {
    let rough = (range.high - range.low) / count.max(1.0);
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0].into_iter().map(|s| s * power).find(|&s| s >= rough).unwrap_or(10.0 * power);
    let largest = range.low.abs().max(range.high.abs());
    let digit = |v: f64| (v * (1.0 + 1e-9)).log10().floor() as i32;
    let label = |value: f64| {
        let text = if !(1e-3..1e5).contains(&largest) {
            let digits = (digit(largest) - digit(step)).max(0) as usize;
            if value == 0.0 { "0".into() } else { scientific(value, digits) }
        } else {
            format!("{value:.*}", (-digit(step)).max(0) as usize)
        };
        text.replace('-', "−")
    };
    let (first, last) = ((range.low / step).ceil() as i64, (range.high / step).floor() as i64);
    (first..=last).map(|k| k as f64 * step).map(|value| (value, label(value))).collect()
}

fn scientific(value: f64, digits: usize) -> String {
    let text = format!("{value:.digits$e}");
    let Some((mantissa, exponent)) = text.split_once('e') else { return text };
    format!("{mantissa}·10{}", raised(exponent))
}

/// A whole number as an exponent.
fn raised(number: &str) -> String {
    let digit = |c| match c {
        '-' => '⁻',
        '1' => '¹',
        '2' => '²',
        '3' => '³',
        c => char::from_u32(0x2070 + c.to_digit(10).unwrap_or(0)).unwrap_or(c),
    };
    number.chars().map(digit).collect()
}

/// How an axis maps values to places.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Scale {
    #[default]
    Linear,
    /// Decades are equally long; only positive values have a place.
    Logarithmic,
}

impl Scale {
    /// What grows evenly along the axis; not finite where the axis has no place for `value`.
    fn place(self, value: f64) -> f64 {
        match self {
            Self::Linear => value,
            Self::Logarithmic => value.log10(),
        }
    }

    /// Values to mark on an axis whose places are in `range`; one without a label is minor.
    fn ticks(self, range: Range, count: f64) -> Vec<(f64, String)> {
        if self == Self::Linear {
            return ticks(range, count);
        }
        let (first, last) = (range.low.floor() as i32, range.high.floor() as i32);
        let within = |value: &f64| (range.low..=range.high).contains(&value.log10());
        let decades = (first..=last).filter(|&k| within(&10f64.powi(k))).count();
        if range.high - range.low < 0.6 {
            // Such an axis is almost linear.
            return ticks(Range { low: 10f64.powf(range.low), high: 10f64.powf(range.high) }, count);
        }
        let every = (decades as f64 / count.max(1.0)).ceil().max(1.0) as i32;
        let label = |step: i32, exponent: i32| match step {
            1 if exponent.rem_euclid(every) == 0 => format!("10{}", raised(&exponent.to_string())),
            2 | 5 if decades < 2 => format!("{step}·10{}", raised(&exponent.to_string())),
            _ => String::new(),
        };
        (first..=last)
            .flat_map(|k| (1..10).map(move |step| (step, k)))
            .map(|(step, k)| (f64::from(step) * 10f64.powi(k), label(step, k)))
            .filter(|(value, _)| within(value))
            .collect()
    }
}

/// Data in a panel, in the order of drawing.
#[derive(Debug, Clone)]
pub enum Curve {
    /// A line through `(x, y)`, interrupted where a value is not finite.
    Line { points: Vec<Point>, stroke: Stroke },
    /// Markers at `(x, y)` with an error bar of the given half length, where it is finite; all moved
    /// to the right by `shift` pixels. Those outside the panel's ranges are left out.
    Markers { points: Vec<(f64, f64, f64)>, stamp: Stamp, shift: f64 },
}

/// A vertical line from the lower edge of the panel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rule {
    pub at: f64,
    /// The part of the panel's height, from 0 to 1.
    pub height: f64,
    pub stroke: Stroke,
}

/// A short text in a panel, centred at a point of the data that is moved by some pixels.
#[derive(Debug, Clone, PartialEq)]
pub struct Note {
    pub at: Point,
    pub shift: Point,
    pub text: String,
    pub color: RGBColor,
}

impl Curve {
    fn x(&self) -> Box<dyn Iterator<Item = f64> + '_> {
        match self {
            Self::Line { points, .. } => Box::new(points.iter().map(|p| p.0)),
            Self::Markers { points, .. } => Box::new(points.iter().map(|p| p.0)),
        }
    }

    fn y(&self) -> Box<dyn Iterator<Item = f64> + '_> {
        match self {
            Self::Line { points, .. } => Box::new(points.iter().map(|p| p.1)),
            Self::Markers { points, .. } => Box::new(points.iter().flat_map(|p| [p.1, p.1 - p.2, p.1 + p.2])),
        }
    }
}

/// A plotting area with its axes.
#[derive(Debug, Clone, Default)]
pub struct Panel {
    /// Parts of the text above the area, set in lines that fit.
    pub title: Vec<String>,
    /// Below the horizontal axis; empty for none.
    pub x_label: String,
    /// Left of the vertical axis; empty for a panel that shares the axis of its left neighbour.
    pub y_label: String,
    pub x_scale: Scale,
    /// Without numbers below: the axis is that of the panel below.
    pub bare: bool,
    /// Shaded intervals of the horizontal axis.
    pub bands: Vec<Range>,
    /// Horizontal reference lines and their heights.
    pub guides: Vec<(f64, Stroke)>,
    pub rules: Vec<Rule>,
    pub curves: Vec<Curve>,
    pub notes: Vec<Note>,
    /// The horizontal range, or that of the data.
    pub x_range: Option<Range>,
    /// The vertical range, or that of the data.
    pub y_range: Option<Range>,
}

impl Panel {
    /// The range of the lines' heights between two values of the horizontal axis.
    pub fn lines_between(&self, x: Range) -> Option<Range> {
        let lines = self.curves.iter().filter_map(|curve| match curve {
            Curve::Line { points, .. } => Some(points),
            Curve::Markers { .. } => None,
        });
        Range::of(lines.flatten().filter(|p| x.holds(p.0)).map(|p| p.1))
    }

    /// The vertical range of the data; `None` without finite data.
    pub fn data_range(&self) -> Option<Range> {
        Range::of(self.curves.iter().flat_map(Curve::y).chain(self.guides.iter().map(|g| g.0)))
    }

    /// The range of places along the horizontal axis.
    fn x_axis(&self) -> Range {
        let data = || Range::of(self.curves.iter().flat_map(Curve::x).map(|x| self.x_scale.place(x)));
        let given = self.x_range.and_then(|r| Range::of([r.low, r.high].map(|x| self.x_scale.place(x)).into_iter()));
        given.or_else(data).unwrap_or(Range { low: 0.0, high: 1.0 }).padded()
    }

    fn y_axis(&self) -> Range {
        self.y_range.or_else(|| self.data_range()).unwrap_or(Range { low: 0.0, high: 1.0 }).padded()
    }

    fn y_ticks(&self, height: f64) -> Vec<(f64, String)> {
        ticks(self.y_axis(), height / 50.0)
    }

    /// Space left of the area for a plotting area of the given height.
    fn left_margin(&self, height: f64) -> Result<f64, Error> {
        if self.y_label.is_empty() {
            return Ok(36.0);
        }
        let labels = self.y_ticks(height);
        let widths = labels.iter().map(|(_, label)| text_width(label, TICK)).collect::<Result<Vec<_>, _>>()?;
        Ok(widths.into_iter().fold(0.0, f64::max) + 86.0)
    }

    fn draw<DB: DrawingBackend>(&self, canvas: &Canvas<'_, DB>, area: Area) -> Result<(), Error> {
        let Area { left, top, width, height, left_margin } = area;
        let (right, bottom) = (left + width, top + height);
        let (x_axis, y_axis) = (self.x_axis(), self.y_axis());
        let place = |v: f64| self.x_scale.place(v);
        let x = |v: f64| left + width * x_axis.fraction(place(v));
        let y = |v: f64| bottom - height * y_axis.fraction(v);
        let solid = |color, width| Stroke { color, width, dash: Dash::Solid };

        let x_ticks = self.x_scale.ticks(x_axis, (width / 95.0).min(8.0));
        let y_ticks = self.y_ticks(height);
        for band in &self.bands {
            let (from, to) = (x(band.low).clamp(left, right), x(band.high).clamp(left, right));
            canvas.rectangle((from, top), (to, bottom), SHADE)?;
        }
        for (value, _) in x_ticks.iter().filter(|(_, label)| !label.is_empty()) {
            canvas.line(&[(x(*value), top), (x(*value), bottom)], solid(GRID, 1.5))?;
        }
        for (value, _) in &y_ticks {
            canvas.line(&[(left, y(*value)), (right, y(*value))], solid(GRID, 1.5))?;
        }
        for &(value, stroke) in self.guides.iter().filter(|g| drawable(g.0)) {
            canvas.line(&[(left, y(value)), (right, y(value))], stroke)?;
        }
        for rule in self.rules.iter().filter(|rule| x_axis.holds(place(rule.at))) {
            let at = x(rule.at);
            canvas.line(&[(at, bottom), (at, bottom - height * rule.height)], rule.stroke)?;
        }

        let mut empty = true;
        for curve in &self.curves {
            match curve {
                Curve::Line { points, stroke } => {
                    for run in points.split(|p| !drawable(place(p.0)) || !drawable(p.1)).filter(|run| !run.is_empty()) {
                        empty = false;
                        let run: Vec<_> = run.iter().map(|p| (x(p.0), y(p.1))).collect();
                        match run[..] {
                            // A line of one point would not show.
                            [(x, y)] => {
                                let half = 9.0;
                                canvas.line(&[(x - half, y), (x + half, y)], *stroke)?;
                            }
                            _ => canvas.line(&run, *stroke)?,
                        }
                    }
                }
                Curve::Markers { points, stamp, shift } => {
                    // Exactly what is asked for, so that none lies on the frame.
                    let y_shown = self.y_range.unwrap_or(y_axis);
                    let points = points.iter().filter(|p| x_axis.holds(place(p.0)) && y_shown.holds(p.1));
                    for &(at, value, error) in points {
                        empty = false;
                        let center = (x(at) + shift, y(value));
                        if drawable(error) {
                            bar(canvas, center.0, (y(value - error), y(value + error)), stamp.color)?;
                        }
                        canvas.stamp(center, *stamp)?;
                    }
                }
            }
        }
        if empty {
            let what = if self.curves.is_empty() { "not in this run" } else { "no finite values" };
            // Off the middle, where a lone reference line lies.
            let place = (left + width / 2.0, top + height / 3.0);
            canvas.text(what, place, LABEL, Align::Center, GUIDE)?;
        }

        for note in &self.notes {
            let at = (x(note.at.0) + note.shift.0, y(note.at.1) + note.shift.1);
            canvas.text(&note.text, at, NOTE, Align::Center, note.color)?;
        }

        let frame = [(left, top), (right, top), (right, bottom), (left, bottom), (left, top), (right, top)];
        canvas.line(&frame, solid(INK, 2.0))?;
        let tick = 8.0;
        for (value, label) in &x_ticks {
            let length = if label.is_empty() { 0.6 * tick } else { tick };
            canvas.line(&[(x(*value), bottom), (x(*value), bottom - length)], solid(INK, 2.0))?;
            if !self.bare && !label.is_empty() {
                canvas.text(label, (x(*value), bottom + 22.0), TICK, Align::Center, INK)?;
            }
        }
        for (value, label) in &y_ticks {
            canvas.line(&[(left, y(*value)), (left + tick, y(*value))], solid(INK, 2.0))?;
            if !self.y_label.is_empty() {
                canvas.text(label, (left - 12.0, y(*value)), TICK, Align::Right, INK)?;
            }
        }
        if !self.x_label.is_empty() {
            canvas.text(&self.x_label, (left + width / 2.0, bottom + 56.0), LABEL, Align::Center, INK)?;
        }
        if !self.y_label.is_empty() {
            let at = (left - left_margin + 40.0, top + height / 2.0);
            canvas.upward_text(&self.y_label, at, LABEL, INK)?;
        }
        for (above, line) in self.title.iter().rev().enumerate() {
            let at = (left + width / 2.0, top - 24.0 - LABEL_LINE * above as f64);
            canvas.text(line, at, LABEL, Align::Center, INK)?;
        }
        Ok(())
    }
}

fn bar<DB: DrawingBackend>(
    canvas: &Canvas<'_, DB>,
    x: f64,
    (from, to): (f64, f64),
    color: RGBColor,
) -> Result<(), Error> {
    let stroke = Stroke { color, width: BAR, dash: Dash::Solid };
    let cap = 5.0;
    canvas.line(&[(x, from), (x, to)], stroke)?;
    canvas.line(&[(x - cap, from), (x + cap, from)], stroke)?;
    canvas.line(&[(x - cap, to), (x + cap, to)], stroke)
}

/// Place of a plotting area.
#[derive(Debug, Clone, Copy)]
struct Area {
    left: f64,
    top: f64,
    width: f64,
    height: f64,
    /// Space for the labels on its left.
    left_margin: f64,
}

/// What a legend entry shows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Key {
    Line(Stroke),
    /// With or without an error bar.
    Marker(Stamp, bool),
    /// A vertical line.
    Rule(Stroke),
    /// A shaded interval.
    Band,
    /// Nothing: the text speaks for itself.
    Remark,
}

impl Key {
    fn width(self) -> f64 {
        match self {
            Self::Line(_) => 52.0,
            Self::Marker(..) | Self::Rule(_) => 18.0,
            Self::Band => 40.0,
            Self::Remark => 0.0,
        }
    }

    /// Width with the gap before the text.
    fn indent(self) -> f64 {
        if self == Self::Remark { 0.0 } else { self.width() + 12.0 }
    }
}

/// Symbols and what they mean. Entries of one group stand together.
pub type Legend = Vec<Vec<(Key, String)>>;

/// A row of panels.
#[derive(Debug, Clone)]
pub struct Row {
    /// Height of the plotting areas.
    pub height: f64,
    pub panels: Vec<Panel>,
}

/// A title, rows of panels and a legend below them, outside the data.
#[derive(Debug, Clone)]
pub struct Figure {
    width: f64,
    title: Vec<String>,
    rows: Vec<Row>,
    /// Lines of entries, each with its place from the left.
    legend: Vec<Vec<(f64, Key, String)>>,
}

/// Space at the figure's edges.
const EDGE: f64 = 24.0;
const TITLE_LINE: f64 = 44.0;
const LABEL_LINE: f64 = 38.0;
const LEGEND_LINE: f64 = 42.0;

/// Joins parts with commas, in lines that are at most `width` wide where the parts allow it.
fn wrapped(parts: &[String], size: f64, width: f64) -> Result<Vec<String>, Error> {
    let mut lines: Vec<String> = Vec::new();
    for part in parts {
        if let Some(line) = lines.last_mut() {
            let longer = format!("{line}, {part}");
            if text_width(&longer, size)? <= width {
                *line = longer;
                continue;
            }
            line.push(',');
        }
        lines.push(part.clone());
    }
    Ok(lines)
}

/// Breaks a text between words into lines that are at most `width` wide where the words allow it.
fn filled(text: &str, size: f64, width: f64) -> Result<Vec<String>, Error> {
    let mut lines: Vec<String> = Vec::new();
    // Runs of spaces stay.
    for word in text.split(' ') {
        if let Some(line) = lines.last_mut() {
            let longer = format!("{line} {word}");
            if text_width(&longer, size)? <= width {
                *line = longer;
                continue;
            }
        }
        lines.push(word.into());
    }
    Ok(lines)
}

/// Width of the plotting areas in a row of `count` panels.
fn panel_width(figure: f64, left_margins: &[f64], count: usize) -> f64 {
    (figure - EDGE - left_margins[..count].iter().sum::<f64>()) / count as f64
}

impl Figure {
    /// Lays out a figure `width` wide; the title is set in lines that fit, broken between its parts.
    ///
    /// # Errors
    /// When the font is missing.
    pub fn new(width: f64, title: &[String], rows: Vec<Row>, legend: Legend) -> Result<Self, Error> {
        let mut placed = Vec::new();
        for group in legend {
            let mut line: Vec<(f64, Key, String)> = Vec::new();
            let mut end = EDGE;
            for (key, label) in group {
                let mut lines = filled(&label, LABEL, width - 2.0 * EDGE - key.indent())?.into_iter();
                let label = lines.next().unwrap_or_default();
                let space = key.indent() + text_width(&label, LABEL)?;
                if !line.is_empty() && end + space > width - EDGE {
                    placed.push(std::mem::take(&mut line));
                    end = EDGE;
                }
                line.push((end, key, label));
                end += space + 42.0;
                for rest in lines {
                    placed.push(std::mem::take(&mut line));
                    line.push((EDGE + key.indent(), Key::Remark, rest));
                    end = width;
                }
            }
            if !line.is_empty() {
                placed.push(line);
            }
        }
        let title = wrapped(title, TITLE, width - 2.0 * EDGE)?;
        let mut figure = Self { width, title, rows, legend: placed };
        let margins = figure.left_margins()?;
        for row in &mut figure.rows {
            let widths = panel_width(width, &margins, row.panels.len());
            for panel in &mut row.panels {
                panel.title = wrapped(&panel.title, LABEL, widths)?;
            }
        }
        Ok(figure)
    }

    /// Writes `<stem>.png` and `<stem>.svg`.
    ///
    /// # Errors
    /// When the drawing fails, or a file cannot be written.
    pub fn write(&self, stem: &Path) -> Result<Vec<PathBuf>, Error> {
        write(self, stem)
    }

    fn title_height(&self) -> f64 {
        EDGE + TITLE_LINE * self.title.len() as f64
    }

    fn above(row: &Row) -> f64 {
        let lines = row.panels.iter().map(|p| p.title.len()).max().unwrap_or(0);
        if lines > 0 { 14.0 + LABEL_LINE * lines as f64 } else { 18.0 }
    }

    fn below(row: &Row) -> f64 {
        let panels = || row.panels.iter();
        if panels().any(|p| !p.x_label.is_empty()) {
            84.0
        } else if panels().all(|p| p.bare) {
            4.0
        } else {
            46.0
        }
    }

    /// Space left of each column, the same in every row so that columns align.
    fn left_margins(&self) -> Result<Vec<f64>, Error> {
        let mut margins = Vec::new();
        for row in &self.rows {
            for (column, panel) in row.panels.iter().enumerate() {
                let margin = panel.left_margin(row.height)?;
                match margins.get_mut(column) {
                    None => margins.push(margin),
                    Some(widest) => *widest = margin.max(*widest),
                }
            }
        }
        Ok(margins)
    }
}

impl Drawing for Figure {
    fn size(&self) -> (u32, u32) {
        let rows: f64 = self.rows.iter().map(|row| Self::above(row) + row.height + Self::below(row)).sum();
        let height = self.title_height() + rows + LEGEND_LINE * self.legend.len() as f64 + EDGE;
        (self.width.round() as u32, height.round() as u32)
    }

    fn draw<DB: DrawingBackend>(&self, canvas: &Canvas<'_, DB>) -> Result<(), Error> {
        let mut top = EDGE;
        for line in &self.title {
            canvas.text(line, (self.width / 2.0, top + TITLE_LINE / 2.0), TITLE, Align::Center, INK)?;
            top += TITLE_LINE;
        }
        let margins = self.left_margins()?;
        for row in &self.rows {
            top += Self::above(row);
            let width = panel_width(self.width, &margins, row.panels.len());
            let mut left = 0.0;
            for (panel, &left_margin) in row.panels.iter().zip(&margins) {
                left += left_margin;
                panel.draw(canvas, Area { left, top, width, height: row.height, left_margin })?;
                left += width;
            }
            top += row.height + Self::below(row);
        }
        for line in &self.legend {
            let middle = top + LEGEND_LINE / 2.0;
            for (left, key, label) in line {
                match *key {
                    Key::Line(stroke) => canvas.line(&[(*left, middle), (left + key.width(), middle)], stroke)?,
                    Key::Marker(stamp, with_bar) => {
                        let x = left + key.width() / 2.0;
                        if with_bar {
                            bar(canvas, x, (middle - 14.0, middle + 14.0), stamp.color)?;
                        }
                        canvas.stamp((x, middle), stamp)?;
                    }
                    Key::Rule(stroke) => {
                        let x = left + key.width() / 2.0;
                        canvas.line(&[(x, middle - 17.0), (x, middle + 17.0)], stroke)?;
                    }
                    Key::Band => {
                        let (from, to) = ((*left, middle - 13.0), (left + key.width(), middle + 13.0));
                        canvas.rectangle(from, to, SHADE)?;
                    }
                    Key::Remark => {}
                }
                canvas.text(label, (left + key.indent(), middle), LABEL, Align::Left, INK)?;
            }
            top += LEGEND_LINE;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(low: f64, high: f64) -> Vec<String> {
        ticks(Range { low, high }, 5.0).into_iter().map(|(_, label)| label).collect()
    }

    #[test]
    fn ticks_are_round_and_labelled_exactly() {
        assert_eq!(labels(-1.1, 1.1), ["−1.0", "−0.5", "0.0", "0.5", "1.0"]);
        assert_eq!(labels(0.0, 400.0), ["0", "100", "200", "300", "400"]);
        assert_eq!(labels(0.0, 4.1e5), ["0", "1·10⁵", "2·10⁵", "3·10⁵", "4·10⁵"]);
        assert_eq!(labels(0.0, 3e-5), ["0", "1·10⁻⁵", "2·10⁻⁵", "3·10⁻⁵"]);
        assert_eq!(labels(0.30001, 0.30004), ["0.30002", "0.30003", "0.30004"]);
    }

    #[test]
    fn every_range_gives_a_usable_axis() {
        for values in [vec![0.0], vec![-3.0], vec![1e-300], vec![1e120], vec![-1e149, 1e149], vec![0.5, 0.5 + 1e-12]] {
            let axis = Range::of(values.iter().copied()).unwrap().padded();
            assert!(axis.low < axis.high);
            let count = ticks(axis, 5.0).len();
            assert!((2..=12).contains(&count), "{values:?}: {count} ticks");
            for &v in &values {
                assert!((0.0..=1.0).contains(&axis.fraction(v)));
            }
        }
    }

    #[test]
    fn ranges_skip_what_is_not_finite() {
        assert_eq!(Range::of([f64::NAN, f64::INFINITY].into_iter()), None);
        assert_eq!(Range::of([f64::NAN, 1.0, f64::NEG_INFINITY, 2.0].into_iter()), Some(Range { low: 1.0, high: 2.0 }));
    }

    #[test]
    fn long_titles_break_between_their_parts() {
        let parts: Vec<_> = (0..12).map(|i| format!("a longer part number {i}")).collect();
        let figure = Figure::new(1600.0, &parts, Vec::new(), Vec::new()).unwrap();
        assert!(figure.title.len() > 1);
        assert_eq!(figure.title.join(" "), parts.join(", "));
    }

    #[test]
    fn long_legends_break_between_words() {
        let text = "a word and another ".repeat(12);
        let legend = vec![vec![(Key::Band, "short".into()), (Key::Remark, text.trim().into())]];
        let figure = Figure::new(1600.0, &[], Vec::new(), legend).unwrap();
        assert!(figure.legend.len() > 2);
        let words: Vec<_> = figure.legend.iter().flatten().map(|(_, _, label)| label.as_str()).collect();
        assert_eq!(words.join(" "), format!("short {}", text.trim()));
    }

    fn decades(low: f64, high: f64) -> Vec<(f64, String)> {
        let mut all = Scale::Logarithmic.ticks(Range { low: low.log10(), high: high.log10() }, 8.0);
        all.retain(|(_, label)| !label.is_empty());
        all
    }

    #[test]
    fn logarithmic_axes_are_labelled_at_any_length() {
        let labels = |low, high| decades(low, high).into_iter().map(|(_, label)| label).collect::<Vec<_>>();
        assert_eq!(labels(80.0, 1.2e7), ["10²", "10³", "10⁴", "10⁵", "10⁶", "10⁷"]);
        assert_eq!(labels(90.0, 600.0), ["10²", "2·10²", "5·10²"]);
        assert_eq!(labels(480.0, 1050.0), ["500", "600", "700", "800", "900", "1000"]);
        assert!((2..=9).contains(&labels(1e-9, 1e9).len()));
        for (value, label) in decades(1e-3, 1e3) {
            assert_eq!(label, format!("10{}", raised(&value.log10().round().to_string())));
        }
        assert!(!drawable(Scale::Logarithmic.place(0.0)) && !drawable(Scale::Logarithmic.place(-1.0)));
    }
}
