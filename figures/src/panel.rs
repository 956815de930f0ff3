//! Panels of curves, and figures: a grid of panels under a title, above a legend.

use std::path::{Path, PathBuf};

use plotters::prelude::{DrawingBackend, RGBColor, WHITE};

use crate::canvas::{Align, Canvas, Drawing, Point, Stamp, Stroke, clipped, text_width, write};
use crate::cells::{CONTOUR_WIDTH, Cells, Frame, hatch, stripe};
use crate::error::Error;
use crate::shade::{Shades, ink_on, viridis};
use crate::style::{Dash, GRID, GUIDE, INK, LABEL, NOTE, SHADE, TICK, TITLE};

/// Width of an error bar.
const BAR: f64 = 2.0;
/// Half the length of a line, and half the width of a band, that has one point only.
const ALONE: f64 = 9.0;
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
    pub fn padded(self) -> Self {
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
    pub fn holds(self, value: f64) -> bool {
        (self.low..=self.high).contains(&value)
    }

    /// Where `value` lies between the ends, from 0 to 1.
    pub fn fraction(self, value: f64) -> f64 {
        (value - self.low) / (self.high - self.low)
    }
}

/// Whether a value is finite and small enough to be placed.
pub fn drawable(value: f64) -> bool {
    value.abs() < LARGEST
}

/// Round values within the range, at most `count` or so, with their labels.
fn ticks(range: Range, count: f64) -> Vec<(f64, String)> {
    let rough = (range.high - range.low) / count.max(1.0);
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0].into_iter().map(|s| s * power).find(|&s| s >= rough).unwrap_or(10.0 * power);
    // Between the smallest numbers there is nothing round; at the end of an axis a long number has no room.
    if !step.is_normal() {
        return vec![(range.low, plain(range.low)), (range.high, String::new())];
    }
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

/// A number to six digits, as short as it can be written.
pub fn plain(value: f64) -> String {
    let rounded: f64 = format!("{value:.5e}").parse().unwrap_or(value);
    let text = if rounded == 0.0 || (1e-3..1e5).contains(&rounded.abs()) {
        rounded.to_string()
    } else {
        let text = format!("{rounded:e}");
        match text.split_once('e') {
            Some(("1", exponent)) => format!("10{}", raised(exponent)),
            Some((mantissa, exponent)) => format!("{mantissa}·10{}", raised(exponent)),
            None => text,
        }
    };
    text.replace('-', "−")
}

/// Labels of values on an axis, written alike: all as powers of ten where one has to be and all are.
fn marked(values: &[f64]) -> Vec<(f64, String)> {
    let exponent = |value: f64| {
        let exponent = value.log10().round();
        ((value / 10f64.powf(exponent) - 1.0).abs() < 1e-6).then_some(exponent)
    };
    let powers: Option<Vec<f64>> = values.iter().copied().map(exponent).collect();
    let label = |value: f64| match &powers {
        Some(exponents) if exponents.iter().any(|e| !(-3.0..5.0).contains(e)) => {
            format!("10{}", raised(&value.log10().round().to_string()))
        }
        _ => plain(value),
    };
    values.iter().map(|&value| (value, label(value))).collect()
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
    pub fn place(self, value: f64) -> f64 {
        match self {
            Self::Linear => value,
            Self::Logarithmic => value.log10(),
        }
    }

    /// The value at a place: undoes [`Self::place`].
    pub fn value(self, place: f64) -> f64 {
        match self {
            Self::Linear => place,
            Self::Logarithmic => 10f64.powf(place),
        }
    }

    /// The scale of an axis that a document calls logarithmic or not.
    pub fn of(logarithmic: bool) -> Self {
        if logarithmic { Self::Logarithmic } else { Self::Linear }
    }

    /// Values to mark on an axis whose places are in `range`; one without a label is minor.
    pub fn ticks(self, range: Range, count: f64) -> Vec<(f64, String)> {
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
        // Where not every decade has room for a label, what lies between decades has none for a mark.
        let every = (decades as f64 / count.max(1.0)).ceil().max(1.0) as i32;
        let label = |step: i32, exponent: i32| match step {
            1 if exponent.rem_euclid(every) == 0 => format!("10{}", raised(&exponent.to_string())),
            2 | 5 if decades < 2 => format!("{step}·10{}", raised(&exponent.to_string())),
            _ => String::new(),
        };
        (first..=last)
            .flat_map(|k| (1..10).map(move |step| (step, k)))
            .map(|(step, k)| (f64::from(step) * 10f64.powi(k), label(step, k)))
            .filter(|(value, label)| within(value) && (every == 1 || !label.is_empty()))
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
    /// The area between `(x, low, high)`, interrupted where a value is not finite; a short bar for one
    /// point alone.
    Band { points: Vec<(f64, f64, f64)>, color: RGBColor },
    /// A line with a white rim, cut off at the panel's edges; the panel's ranges ignore it.
    Boundary { points: Vec<Point>, stroke: Stroke },
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
            Self::Markers { points, .. } | Self::Band { points, .. } => Box::new(points.iter().map(|p| p.0)),
            Self::Boundary { .. } => Box::new(std::iter::empty()),
        }
    }

    fn y(&self) -> Box<dyn Iterator<Item = f64> + '_> {
        match self {
            Self::Line { points, .. } => Box::new(points.iter().map(|p| p.1)),
            Self::Markers { points, .. } => Box::new(points.iter().flat_map(|p| [p.1, p.1 - p.2, p.1 + p.2])),
            Self::Band { points, .. } => Box::new(points.iter().flat_map(|p| [p.1, p.2])),
            Self::Boundary { .. } => Box::new(std::iter::empty()),
        }
    }
}

/// A plotting area with its axes.
#[derive(Debug, Clone, Default)]
pub struct Panel {
    /// Parts of the text above the area, set in lines that fit.
    pub title: Vec<String>,
    /// Small text between the title and the area, set in lines that fit.
    pub remark: Vec<String>,
    /// Below the horizontal axis; empty for none.
    pub x_label: String,
    /// Left of the vertical axis; empty for a panel that shares the axis of its left neighbour.
    pub y_label: String,
    pub x_scale: Scale,
    pub y_scale: Scale,
    /// Values to mark on the horizontal axis in place of round ones, if their labels find room.
    pub x_marks: Vec<f64>,
    /// The same for the vertical axis.
    pub y_marks: Vec<f64>,
    /// Fills the area, without space around; the ranges must then be those of its edges.
    pub cells: Option<Cells>,
    /// A scale of colours that stands upright on the right of the area; its label is not drawn.
    pub bar: Option<Bar>,
    /// Nothing is drawn, but the panel keeps its place in the row.
    pub blank: bool,
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
            _ => None,
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
        self.spaced(given.or_else(data))
    }

    /// The range of places along the vertical axis.
    fn y_axis(&self) -> Range {
        let place = |y: f64| self.y_scale.place(y);
        let given = self.y_range.and_then(|r| Range::of([r.low, r.high].map(place).into_iter()));
        let data = || match self.y_scale {
            Scale::Linear => self.data_range(),
            Scale::Logarithmic => {
                let heights = self.curves.iter().flat_map(|curve| match curve {
                    // An error as large as the value should not stretch the axis.
                    Curve::Markers { points, .. } => {
                        points.iter().flat_map(|p| [p.1, (p.1 - p.2).max(p.1 / 3.0), p.1 + p.2]).collect()
                    }
                    _ => curve.y().collect::<Vec<_>>(),
                });
                Range::of(heights.chain(self.guides.iter().map(|g| g.0)).map(place))
            }
        };
        self.spaced(given.or_else(data))
    }

    fn spaced(&self, range: Option<Range>) -> Range {
        let range = range.unwrap_or(Range { low: 0.0, high: 1.0 });
        if self.cells.is_some() { range } else { range.padded() }
    }

    /// Values to mark on the horizontal axis of the given length; one without a label is minor.
    fn x_ticks(&self, width: f64) -> Result<Vec<(f64, String)>, Error> {
        const GAP: f64 = 16.0;
        let axis = self.x_axis();
        // The space between the labels of two neighbours.
        let space = |ticks: &[(f64, String)]| -> Result<f64, Error> {
            let mut ends = Vec::new();
            for (value, label) in ticks.iter().filter(|(_, label)| !label.is_empty()) {
                let (at, half) = (width * axis.fraction(self.x_scale.place(*value)), text_width(label, TICK)? / 2.0);
                ends.push((at - half, at + half));
            }
            Ok(headflow_model::smallest(ends.windows(2).map(|pair| pair[1].0 - pair[0].1)))
        };
        let marks = marked(&self.x_marks);
        if !marks.is_empty() && space(&marks)? >= GAP {
            return Ok(marks);
        }
        let mut count = (width / 95.0).min(8.0);
        let ticks = |count| self.x_scale.ticks(axis, count);
        let numbers = |ticks: &[(f64, String)]| ticks.iter().filter(|(_, label)| !label.is_empty()).count();
        // One step finer where there would be hardly a number, coarser where they would overlap.
        let finer = ticks(1.7 * count);
        if numbers(&ticks(count)) < 4 && space(&finer)? >= 2.0 * GAP {
            return Ok(finer);
        }
        while count > 2.5 && space(&ticks(count))? < 4.0 {
            count -= 1.0;
        }
        Ok(ticks(count))
    }

    fn y_ticks(&self, height: f64) -> Vec<(f64, String)> {
        const GAP: f64 = 34.0;
        let axis = self.y_axis();
        let places: Vec<_> = self.y_marks.iter().map(|&y| height * axis.fraction(self.y_scale.place(y))).collect();
        if !places.is_empty() && places.windows(2).all(|pair| pair[1] - pair[0] >= GAP) {
            return marked(&self.y_marks);
        }
        self.y_scale.ticks(axis, height / 50.0)
    }

    /// Space left of the area for a plotting area of the given height.
    fn left_margin(&self, height: f64) -> Result<f64, Error> {
        if self.y_label.is_empty() {
            // Without space around the data, numbers stand at the corners.
            return Ok(if self.cells.is_some() { 52.0 } else { 36.0 });
        }
        let labels = self.y_ticks(height);
        let widths = labels.iter().map(|(_, label)| text_width(label, TICK)).collect::<Result<Vec<_>, _>>()?;
        Ok(headflow_model::largest_size(widths) + 86.0)
    }

    /// The width taken from the area by its scale of colours.
    fn bar_space(&self) -> Result<f64, Error> {
        self.bar.as_ref().map_or(Ok(0.0), |bar| Ok(BAR_GAP + BAR_HEIGHT + bar.number_width()?))
    }

    fn draw<DB: DrawingBackend>(&self, canvas: &Canvas<'_, DB>, area: Area) -> Result<(), Error> {
        if self.blank {
            return Ok(());
        }
        let Area { left, top, width, height, left_margin, remarks } = area;
        let width = width - self.bar_space()?;
        let (right, bottom) = (left + width, top + height);
        let (x_axis, y_axis) = (self.x_axis(), self.y_axis());
        let place = |v: f64| self.x_scale.place(v);
        let x = |v: f64| left + width * x_axis.fraction(place(v));
        let y = |v: f64| bottom - height * y_axis.fraction(self.y_scale.place(v));
        let to_pixel = |p: Point| (x(p.0), y(p.1));
        let frame = Frame { left, top, right, bottom };
        let solid = |color, width| Stroke { color, width, dash: Dash::Solid };

        let x_ticks = self.x_ticks(width)?;
        let y_ticks = self.y_ticks(height);
        for band in &self.bands {
            let (from, to) = (x(band.low).clamp(left, right), x(band.high).clamp(left, right));
            canvas.rectangle((from, top), (to, bottom), SHADE)?;
        }
        for (value, _) in x_ticks.iter().filter(|(_, label)| !label.is_empty()) {
            canvas.line(&[(x(*value), top), (x(*value), bottom)], solid(GRID, 1.5))?;
        }
        for (value, _) in y_ticks.iter().filter(|(_, label)| !label.is_empty()) {
            canvas.line(&[(left, y(*value)), (right, y(*value))], solid(GRID, 1.5))?;
        }
        if let Some(cells) = &self.cells {
            cells.draw(canvas, &to_pixel)?;
            cells.draw_contours(canvas, &to_pixel)?;
        }
        let bands = self.curves.iter().filter_map(|curve| match curve {
            Curve::Band { points, color } => Some((points, *color)),
            _ => None,
        });
        for (points, color) in bands {
            let shown = |p: &(f64, f64, f64)| [place(p.0), y(p.1), y(p.2)].into_iter().all(drawable);
            for run in points.split(|p| !shown(p)).filter(|run| !run.is_empty()) {
                if let [(at, low, high)] = *run {
                    canvas.rectangle((x(at) - ALONE, y(high)), (x(at) + ALONE, y(low)), color)?;
                    continue;
                }
                let (low, high) = (run.iter().map(|p| (x(p.0), y(p.1))), run.iter().map(|p| (x(p.0), y(p.2))));
                canvas.polygon(&low.chain(high.rev()).collect::<Vec<_>>(), color)?;
            }
        }
        for &(value, stroke) in self.guides.iter().filter(|g| drawable(self.y_scale.place(g.0))) {
            canvas.line(&[(left, y(value)), (right, y(value))], stroke)?;
        }
        for rule in self.rules.iter().filter(|rule| x_axis.holds(place(rule.at))) {
            let at = x(rule.at);
            canvas.line(&[(at, bottom), (at, bottom - height * rule.height)], rule.stroke)?;
        }

        let mut empty = self.cells.is_none();
        let mut boundaries = Vec::new();
        for curve in &self.curves {
            match curve {
                Curve::Line { points, stroke } => {
                    for run in points
                        .split(|p| !drawable(place(p.0)) || !drawable(self.y_scale.place(p.1)))
                        .filter(|run| !run.is_empty())
                    {
                        empty = false;
                        let run: Vec<_> = run.iter().map(|p| (x(p.0), y(p.1))).collect();
                        match run[..] {
                            // A line of one point would not show.
                            [(x, y)] => canvas.line(&[(x - ALONE, y), (x + ALONE, y)], *stroke)?,
                            _ => canvas.line(&run, *stroke)?,
                        }
                    }
                }
                Curve::Markers { points, stamp, shift } => {
                    // Exactly what is asked for, so that none lies on the frame.
                    let y_place = |v: f64| self.y_scale.place(v);
                    let given = self.y_range.map(|r| Range { low: y_place(r.low), high: y_place(r.high) });
                    let y_shown = given.unwrap_or(y_axis);
                    let points = points.iter().filter(|p| x_axis.holds(place(p.0)) && y_shown.holds(y_place(p.1)));
                    for &(at, value, error) in points {
                        empty = false;
                        let center = (x(at) + shift, y(value));
                        if drawable(error) {
                            let lower = y(value - error);
                            // On a logarithmic axis it may reach below everything.
                            let lower = match self.y_scale {
                                Scale::Linear => lower,
                                Scale::Logarithmic if lower < bottom => lower,
                                Scale::Logarithmic => bottom,
                            };
                            bar(canvas, center.0, (lower, y(value + error)), stamp.color)?;
                        }
                        canvas.stamp(center, *stamp)?;
                    }
                }
                Curve::Band { points, .. } => empty &= points.is_empty(),
                Curve::Boundary { points, stroke } => {
                    let pixels: Vec<_> = points.iter().copied().map(to_pixel).collect();
                    for line in clipped(&pixels, frame) {
                        let rim = Stroke { color: WHITE, width: stroke.width + 3.6, dash: Dash::Solid };
                        canvas.line(&line, rim)?;
                        canvas.line(&line, *stroke)?;
                        boundaries.push(line);
                    }
                }
            }
        }
        if let Some(cells) = &self.cells {
            cells.draw_labels(canvas, &to_pixel, frame, &boundaries)?;
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

        let outline = [(left, top), (right, top), (right, bottom), (left, bottom), (left, top), (right, top)];
        canvas.line(&outline, solid(INK, 2.0))?;
        if let Some(bar) = &self.bar {
            let from = right + BAR_GAP;
            bar.draw_scale(canvas, Frame { left: from, top, right: from + BAR_HEIGHT, bottom }, Direction::Upward)?;
        }
        // Outside of cells, which fill the area.
        let tick = if self.cells.is_some() { -6.0 } else { 8.0 };
        for (value, label) in &x_ticks {
            let length = if label.is_empty() { 0.6 * tick } else { tick };
            canvas.line(&[(x(*value), bottom), (x(*value), bottom - length)], solid(INK, 2.0))?;
            if !self.bare && !label.is_empty() {
                canvas.text(label, (x(*value), bottom + 22.0), TICK, Align::Center, INK)?;
            }
        }
        for (value, label) in &y_ticks {
            let length = if label.is_empty() { 0.6 * tick } else { tick };
            canvas.line(&[(left, y(*value)), (left + length, y(*value))], solid(INK, 2.0))?;
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
        // The first line of every remark in the row at one height.
        for (below, line) in self.remark.iter().enumerate() {
            let at = (left + width / 2.0, top - 20.0 - NOTE_LINE * (remarks - below - 1) as f64);
            canvas.text(line, at, NOTE, Align::Center, INK)?;
        }
        let title_bottom = top - remark_height(remarks);
        for (above, line) in self.title.iter().rev().enumerate() {
            let at = (left + width / 2.0, title_bottom - 24.0 - LABEL_LINE * above as f64);
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
    /// Lines of remarks in the row.
    remarks: usize,
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
    /// A colour that stands for something.
    Patch(RGBColor),
    /// Cells without a value.
    Hatch,
    /// Cells whose value is provisional.
    Stripes,
    /// A line with marks on it.
    Marked(Stroke, Stamp),
    /// Nothing: the text speaks for itself.
    Remark,
}

impl Key {
    fn width(self) -> f64 {
        match self {
            Self::Line(_) | Self::Marked(..) => 52.0,
            Self::Marker(..) | Self::Rule(_) => 18.0,
            Self::Band | Self::Patch(_) | Self::Hatch | Self::Stripes => 40.0,
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
#[derive(Debug, Clone, Default)]
pub struct Row {
    /// Above the whole row, set in lines that fit.
    pub heading: Vec<String>,
    /// Height of the plotting areas.
    pub height: f64,
    pub panels: Vec<Panel>,
}

/// A scale of colours with round values and lines of equal height marked.
#[derive(Debug, Clone)]
pub struct Bar {
    /// Set in lines that fit.
    pub label: Vec<String>,
    pub shades: Shades,
    /// Heights of the contours in the panels.
    pub levels: Vec<f64>,
}

/// Panels in rows of equal length, at most three in each, with the heights of rows of one, two and
/// three.
pub fn grid(panels: Vec<Panel>, heights: [f64; 3]) -> Vec<Row> {
    let columns = match panels.len() {
        0 | 1 => 1,
        2 | 4 => 2,
        _ => 3,
    };
    let blank = Panel { blank: true, ..Panel::default() };
    let mut rows: Vec<Row> = panels
        .chunks(columns)
        .map(|row| Row { height: heights[columns - 1], panels: row.to_vec(), ..Row::default() })
        .collect();
    for row in &mut rows {
        row.panels.resize(columns, blank.clone());
    }
    rows
}

/// A title, rows of panels and a legend below them, outside the data.
#[derive(Debug, Clone)]
pub struct Figure {
    width: f64,
    title: Vec<String>,
    rows: Vec<Row>,
    /// Between the rows and the legend.
    bars: Vec<Bar>,
    /// Lines of entries, each with its place from the left.
    legend: Vec<Vec<(f64, Key, String)>>,
}

/// Space at the figure's edges.
const EDGE: f64 = 24.0;
const TITLE_LINE: f64 = 44.0;
const LABEL_LINE: f64 = 38.0;
const LEGEND_LINE: f64 = 42.0;
/// Space between entries of the legend, and after the short name of a group of them.
const ENTRY_GAP: f64 = 42.0;
const NAME_GAP: f64 = 20.0;
/// Names of groups that are wider are entries as any.
const SHORT_NAME: f64 = 100.0;
const NOTE_LINE: f64 = 32.0;
/// Height of a scale of colours, and of the scale with its numbers.
const BAR_HEIGHT: f64 = 30.0;
const BAR_LINE: f64 = 94.0;
/// Space between a panel and the scale of colours on its right.
const BAR_GAP: f64 = 24.0;
/// Space between a scale of colours and the numbers beside it.
const BAR_NUMBERS: f64 = 14.0;

/// Height of the remarks above a panel.
fn remark_height(lines: usize) -> f64 {
    if lines > 0 { 2.0 + NOTE_LINE * lines as f64 } else { 0.0 }
}

/// Each line broken between words where it is wider than `width`.
fn broken(lines: &[String], size: f64, width: f64) -> Result<Vec<String>, Error> {
    let lines = lines.iter().map(|line| filled(line, size, width)).collect::<Result<Vec<_>, _>>()?;
    Ok(lines.concat())
}

/// The lines, cut with an ellipsis where even one word is wider than `width`.
fn fitted(lines: Vec<String>, size: f64, width: f64) -> Result<Vec<String>, Error> {
    let fit = |line: String| {
        if text_width(&line, size)? <= width {
            return Ok(line);
        }
        let ends: Vec<usize> = line.char_indices().map(|(end, _)| end).collect();
        // The longest beginning that fits: widths grow with the text.
        let (mut fits, mut too_long) = (0, ends.len());
        while too_long - fits > 1 {
            let middle = usize::midpoint(fits, too_long);
            if text_width(&format!("{}…", &line[..ends[middle]]), size)? <= width {
                fits = middle;
            } else {
                too_long = middle;
            }
        }
        Ok(format!("{}…", &line[..ends[fits]]))
    };
    lines.into_iter().map(fit).collect()
}

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

/// Breaks a text between words into lines that are at most `width` wide; what no line can hold is cut.
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
    fitted(lines, size, width)
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
            let mut start = EDGE;
            let mut end = EDGE;
            if let [(Key::Remark, name), _, ..] = &group[..] {
                // What follows a short name never stands below it.
                let space = text_width(name, LABEL)? + NAME_GAP;
                start += if space <= SHORT_NAME { space } else { 0.0 };
            }
            for (number, (key, label)) in group.into_iter().enumerate() {
                let mut lines = filled(&label, LABEL, width - start - EDGE - key.indent())?.into_iter();
                let label = lines.next().unwrap_or_default();
                let space = key.indent() + text_width(&label, LABEL)?;
                if !line.is_empty() && end + space > width - EDGE {
                    placed.push(std::mem::take(&mut line));
                    end = start;
                }
                line.push((end, key, label));
                end += space + if number == 0 && start > EDGE { NAME_GAP } else { ENTRY_GAP };
                for rest in lines {
                    placed.push(std::mem::take(&mut line));
                    line.push((start + key.indent(), Key::Remark, rest));
                    end = width;
                }
            }
            if !line.is_empty() {
                placed.push(line);
            }
        }
        let room = width - 2.0 * EDGE;
        let title = broken(&wrapped(title, TITLE, room)?, TITLE, room)?;
        let mut figure = Self { width, title, rows, bars: Vec::new(), legend: placed };
        let margins = figure.left_margins()?;
        for row in &mut figure.rows {
            let widths = panel_width(width, &margins, row.panels.len());
            row.heading = broken(&row.heading, TITLE, width - 2.0 * EDGE)?;
            for panel in &mut row.panels {
                let width = widths - panel.bar_space()?;
                panel.title = broken(&wrapped(&panel.title, LABEL, width)?, LABEL, width)?;
                panel.remark = broken(&panel.remark, NOTE, width)?;
            }
        }
        Ok(figure)
    }

    /// With scales of colours below the panels.
    ///
    /// # Errors
    /// When the font is missing.
    pub fn with_bars(mut self, bars: Vec<Bar>) -> Result<Self, Error> {
        let half = self.width / 2.0 - 2.0 * EDGE;
        for bar in bars {
            self.bars.push(Bar { label: broken(&bar.label, LABEL, half)?, ..bar });
        }
        Ok(self)
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
        let titles = if lines > 0 { 14.0 + LABEL_LINE * lines as f64 } else { 18.0 };
        titles + TITLE_LINE * row.heading.len() as f64 + remark_height(Self::remarks(row))
    }

    /// Lines of remarks above the panels.
    fn remarks(row: &Row) -> usize {
        row.panels.iter().map(|p| p.remark.len()).max().unwrap_or(0)
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

/// Where a scale of colours runs from its lowest to its highest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Rightward,
    Upward,
}

impl Bar {
    /// Width of the numbers beside an upright scale, with the gap before them.
    fn number_width(&self) -> Result<f64, Error> {
        let ticks = self.shades.ticks();
        let widths = ticks.iter().map(|(_, label)| text_width(label, TICK)).collect::<Result<Vec<_>, _>>()?;
        Ok(headflow_model::largest_size(widths) + BAR_NUMBERS)
    }

    /// Draws the label and the scale beside it, in the middle of a figure `width` wide.
    fn draw<DB: DrawingBackend>(&self, canvas: &Canvas<'_, DB>, width: f64, top: f64) -> Result<(), Error> {
        const GAP: f64 = 22.0;
        let widths = self.label.iter().map(|line| text_width(line, LABEL)).collect::<Result<Vec<_>, _>>()?;
        let label = headflow_model::largest_size(widths);
        let length = (width - 4.0 * EDGE - label - GAP).min(760.0);
        let left = (width - label - GAP - length) / 2.0 + label + GAP;
        let (top, bottom) = (top + 8.0, top + 8.0 + BAR_HEIGHT);
        for (number, line) in self.label.iter().enumerate() {
            let above = (number as f64 - (self.label.len() - 1) as f64 / 2.0) * LABEL_LINE;
            canvas.text(line, (left - GAP, f64::midpoint(top, bottom) + above), LABEL, Align::Right, INK)?;
        }
        self.draw_scale(canvas, Frame { left, top, right: left + length, bottom }, Direction::Rightward)
    }

    /// Draws the scale in `frame`, with its numbers below or on the right.
    fn draw_scale<DB: DrawingBackend>(
        &self,
        canvas: &Canvas<'_, DB>,
        frame: Frame,
        direction: Direction,
    ) -> Result<(), Error> {
        const STEPS: usize = 160;
        let Frame { left, top, right, bottom } = frame;
        // The ends of a line across the scale, at a part of the way along it.
        let across = |part: f64| match direction {
            Direction::Rightward => {
                let x = left + (right - left) * part;
                ((x, top), (x, bottom))
            }
            Direction::Upward => {
                let y = bottom + (top - bottom) * part;
                ((left, y), (right, y))
            }
        };
        let seam = 1.0 / (right - left).max(bottom - top);
        for step in 0..STEPS {
            let part = |step: usize| step as f64 / STEPS as f64;
            let color = viridis((step as f64 + 0.5) / STEPS as f64);
            // Neighbours overlap, so that no seam shows.
            let end = (part(step + 1) + seam).min(1.0);
            canvas.rectangle(across(part(step)).0, across(end).1, color)?;
        }
        let solid = |color, width| Stroke { color, width, dash: Dash::Solid };
        for &level in &self.levels {
            let (from, to) = across(self.shades.part(level));
            canvas.line(&[from, to], solid(ink_on(self.shades.color(level)), CONTOUR_WIDTH))?;
        }
        canvas.line(
            &[(left, top), (right, top), (right, bottom), (left, bottom), (left, top), (right, top)],
            solid(INK, 1.6),
        )?;
        for (value, label) in self.shades.ticks() {
            let tick = if label.is_empty() { 4.0 } else { 6.0 };
            let (_, (x, y)) = across(self.shades.part(value));
            match direction {
                Direction::Rightward => {
                    canvas.line(&[(x, y), (x, y + tick)], solid(INK, 2.0))?;
                    canvas.text(&label, (x, y + 22.0), TICK, Align::Center, INK)?;
                }
                Direction::Upward => {
                    canvas.line(&[(x, y), (x + tick, y)], solid(INK, 2.0))?;
                    canvas.text(&label, (x + BAR_NUMBERS, y), TICK, Align::Left, INK)?;
                }
            }
        }
        Ok(())
    }
}

impl Drawing for Figure {
    fn size(&self) -> (u32, u32) {
        let rows: f64 = self.rows.iter().map(|row| Self::above(row) + row.height + Self::below(row)).sum();
        let bars = BAR_LINE * self.bars.len() as f64;
        let height = self.title_height() + rows + bars + LEGEND_LINE * self.legend.len() as f64 + EDGE;
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
            for (number, line) in row.heading.iter().enumerate() {
                let at = (self.width / 2.0, top + 10.0 + TITLE_LINE * (number as f64 + 0.5));
                canvas.text(line, at, TITLE, Align::Center, INK)?;
            }
            top += Self::above(row);
            let remarks = Self::remarks(row);
            let width = panel_width(self.width, &margins, row.panels.len());
            let mut left = 0.0;
            for (panel, &left_margin) in row.panels.iter().zip(&margins) {
                left += left_margin;
                panel.draw(canvas, Area { left, top, width, height: row.height, left_margin, remarks })?;
                left += width;
            }
            top += row.height + Self::below(row);
        }
        for bar in &self.bars {
            bar.draw(canvas, self.width, top)?;
            top += BAR_LINE;
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
                    Key::Patch(_) | Key::Hatch | Key::Stripes => {
                        let frame =
                            Frame { left: *left, top: middle - 13.0, right: left + key.width(), bottom: middle + 13.0 };
                        match *key {
                            Key::Patch(color) => {
                                canvas.rectangle((frame.left, frame.top), (frame.right, frame.bottom), color)?;
                            }
                            Key::Stripes => {
                                canvas.rectangle((frame.left, frame.top), (frame.right, frame.bottom), SHADE)?;
                                stripe(canvas, frame, SHADE)?;
                            }
                            _ => hatch(canvas, frame)?,
                        }
                    }
                    Key::Marked(stroke, stamp) => {
                        canvas.line(&[(*left, middle), (left + key.width(), middle)], stroke)?;
                        canvas.stamp((left + key.width() / 2.0, middle), stamp)?;
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
    fn numbers_are_as_short_as_can_be() {
        let numbers = [0.0, -0.5, 0.1 + 0.2, 1.0 / 3.0, 16.0, 99_999.0, 1e5, 2.5e7, 1e-4, -1e-7];
        let labels = ["0", "−0.5", "0.3", "0.333333", "16", "99999", "10⁵", "2.5·10⁷", "10⁻⁴", "−1·10⁻⁷"];
        assert_eq!(numbers.map(plain), labels);
        let labels = |values: &[f64]| marked(values).into_iter().map(|(_, label)| label).collect::<Vec<_>>();
        assert_eq!(labels(&[10.0, 1e3, 1e5]), ["10¹", "10³", "10⁵"]);
        assert_eq!(labels(&[10.0, 100.0]), ["10", "100"]);
        assert_eq!(labels(&[0.0, 16.0, 1e5]), ["0", "16", "10⁵"]);
        assert!(labels(&[]).is_empty());
    }

    #[test]
    fn labels_find_room_or_are_left_out() {
        let panel = |marks: &[f64], high: f64| Panel {
            x_marks: marks.to_vec(),
            x_range: Some(Range { low: 0.0, high }),
            ..Panel::default()
        };
        let labels = |panel: &Panel, width: f64| -> Vec<String> {
            let ticks = panel.x_ticks(width).unwrap().into_iter();
            ticks.map(|(_, label)| label).collect()
        };
        assert_eq!(labels(&panel(&[0.0, 1.0, 4.0], 4.0), 400.0), ["0", "1", "4"]);
        assert_eq!(labels(&panel(&[0.0, 0.01, 4.0], 4.0), 400.0), ["0", "1", "2", "3", "4"]);
        // Long labels are fewer.
        assert!(labels(&panel(&[], 1.3e6), 400.0).len() <= 4);
        assert!(labels(&panel(&[], 9.3), 440.0).len() >= 4);
    }

    #[test]
    fn panels_stand_in_even_rows() {
        for (panels, rows, columns) in [(1, 1, 1), (2, 1, 2), (3, 1, 3), (4, 2, 2), (5, 2, 3), (6, 2, 3), (7, 3, 3)] {
            let grid = grid(vec![Panel::default(); panels], [3.0, 2.0, 1.0]);
            assert_eq!(grid.len(), rows);
            assert!(grid.iter().all(|row| row.panels.len() == columns));
            let shown = grid.iter().flat_map(|row| &row.panels).filter(|panel| !panel.blank).count();
            assert_eq!(shown, panels);
        }
    }

    #[test]
    fn every_range_gives_a_usable_axis() {
        for values in [
            vec![0.0],
            vec![-3.0],
            vec![1e-300],
            vec![1e120],
            vec![-1e149, 1e149],
            vec![0.5, 0.5 + 1e-12],
            vec![0.0, 5e-324],
        ] {
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
    fn what_no_line_can_hold_is_cut() {
        let name = "x".repeat(1000);
        let figure = Figure::new(1600.0, &[name.clone(), "512 tokens".into()], Vec::new(), Vec::new()).unwrap();
        assert_eq!(figure.title.len(), 2);
        let (cut, room) = (&figure.title[0], 1600.0 - 2.0 * EDGE);
        assert!(cut.ends_with('…') && text_width(cut, TITLE).unwrap() <= room);
        // Not a character less than fits.
        let longer = cut.replace('…', "x…");
        assert!(text_width(&longer, TITLE).unwrap() > room, "{}", cut.len());
        assert_eq!(figure.title[1], "512 tokens");
        let legend = vec![vec![(Key::Band, name)]];
        let figure = Figure::new(1600.0, &[], Vec::new(), legend).unwrap();
        assert!(
            figure
                .legend
                .iter()
                .flatten()
                .all(|(start, key, label)| { start + key.indent() + text_width(label, LABEL).unwrap() <= 1600.0 })
        );
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

    #[test]
    fn nothing_stands_below_the_short_name_of_a_legend_group() {
        let legend = |name: &str| {
            let entry = || (Key::Band, "an entry of some length".to_string());
            let group = [(Key::Remark, name.to_string())].into_iter().chain((0..8).map(|_| entry())).collect();
            Figure::new(1600.0, &[], Vec::new(), vec![group]).unwrap().legend
        };
        let short = legend("(b)");
        assert!(short.len() > 1);
        assert_eq!(short[0][0].0, EDGE);
        let start = short[0][1].0;
        assert!(start > EDGE && short[1..].iter().all(|line| line[0].0 == start));
        let long = legend("a name that takes more room than it is worth:");
        assert!(long.len() > 1 && long.iter().all(|line| line[0].0 == EDGE));
    }

    #[test]
    fn an_upright_scale_takes_room_for_its_numbers() {
        let panel = |high: f64| {
            let shades = Shades::of([0.0, high].into_iter(), Scale::Linear);
            Panel {
                bar: shades.map(|shades| Bar { label: Vec::new(), shades, levels: Vec::new() }),
                ..Panel::default()
            }
        };
        let space = |panel: Panel| panel.bar_space().unwrap();
        assert_eq!(space(Panel::default()), 0.0);
        assert!(space(panel(1.0)) > BAR_GAP + BAR_HEIGHT && space(panel(1e-3)) > space(panel(1.0)));
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
