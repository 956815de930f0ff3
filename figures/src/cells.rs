//! A table of coloured cells that fills a panel, with lines of equal height and their labels.

use plotters::prelude::{DrawingBackend, RGBColor, WHITE};

use crate::canvas::{Align, Canvas, Point, Stroke, clipped, text_width};
use crate::error::Error;
use crate::shade::ink_on;
use crate::style::{CONTOUR, Dash, INK};

/// Cells without a value.
const MISSING: RGBColor = RGBColor(212, 212, 212);
/// Hatching of cells without a value.
const HATCH: RGBColor = RGBColor(140, 140, 140);
const HATCH_GAP: f64 = 13.0;
/// Between stripes over cells with a provisional value: wider than the hatching, and the other way.
const STRIPE_GAP: f64 = 26.0;
/// Neighbours overlap by this, so that no seam shows between them where a viewer smooths edges.
const OVERLAP: f64 = 1.0;

/// Width of contours, and what a rim adds to it.
pub const CONTOUR_WIDTH: f64 = 1.9;
const RIM: f64 = 2.8;

/// Cells and contours, in units of the axes.
#[derive(Debug, Clone, Default)]
pub struct Cells {
    /// Of columns, one more than there are.
    pub x_edges: Vec<f64>,
    /// Of rows, one more than there are.
    pub y_edges: Vec<f64>,
    /// Row by row; `None` for a cell without a value.
    pub colors: Vec<Vec<Option<RGBColor>>>,
    /// Columns and rows of cells whose value is provisional: they are striped.
    pub striped: Vec<(usize, usize)>,
    pub contours: Vec<Contour>,
}

/// Lines of equal height.
#[derive(Debug, Clone, PartialEq)]
pub struct Contour {
    pub lines: Vec<Vec<Point>>,
    pub label: String,
    /// The colour of the height.
    pub color: RGBColor,
    /// Drawn in ink with a white rim: the cells below may have any colour, not that of the height.
    pub rimmed: bool,
}

/// A rectangle in pixels.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Frame {
    pub left: f64,
    pub top: f64,
    pub right: f64,
    pub bottom: f64,
}

impl Frame {
    fn around(center: Point, width: f64, height: f64) -> Self {
        let (x, y) = (width / 2.0, height / 2.0);
        Self { left: center.0 - x, top: center.1 - y, right: center.0 + x, bottom: center.1 + y }
    }

    fn within(self, other: Self) -> bool {
        self.left >= other.left && self.right <= other.right && self.top >= other.top && self.bottom <= other.bottom
    }

    fn grown(self, by: f64) -> Self {
        Self { left: self.left - by, top: self.top - by, right: self.right + by, bottom: self.bottom + by }
    }

    fn overlaps(self, other: Self) -> bool {
        self.left < other.right && other.left < self.right && self.top < other.bottom && other.top < self.bottom
    }

    fn holds(self, point: Point) -> bool {
        (self.left..=self.right).contains(&point.0) && (self.top..=self.bottom).contains(&point.1)
    }
}

/// Fills a rectangle as cells without a value.
pub fn hatch<DB: DrawingBackend>(canvas: &Canvas<'_, DB>, frame: Frame) -> Result<(), Error> {
    canvas.rectangle((frame.left, frame.top), (frame.right, frame.bottom), MISSING)?;
    // Along x + y = k gap, so that the lines of neighbours meet.
    let (first, last) = ((frame.left + frame.top) / HATCH_GAP, (frame.right + frame.bottom) / HATCH_GAP);
    for k in first.ceil() as i64..=last.floor() as i64 {
        let sum = k as f64 * HATCH_GAP;
        let ends = [(sum - frame.bottom, frame.bottom), (sum - frame.top, frame.top)];
        for line in clipped(&ends, frame) {
            canvas.line(&line, Stroke { color: HATCH, width: 1.4, dash: Dash::Solid })?;
        }
    }
    Ok(())
}

/// Stripes over a rectangle of a colour, in an ink that shows on it.
pub fn stripe<DB: DrawingBackend>(canvas: &Canvas<'_, DB>, frame: Frame, below: RGBColor) -> Result<(), Error> {
    // Along x - y = k gap, so that the stripes of neighbours meet and cross the hatching.
    let (first, last) = ((frame.left - frame.bottom) / STRIPE_GAP, (frame.right - frame.top) / STRIPE_GAP);
    for k in first.ceil() as i64..=last.floor() as i64 {
        let difference = k as f64 * STRIPE_GAP;
        let ends = [(difference + frame.top, frame.top), (difference + frame.bottom, frame.bottom)];
        for line in clipped(&ends, frame) {
            canvas.line(&line, Stroke { color: ink_on(below), width: 2.6, dash: Dash::Solid })?;
        }
    }
    Ok(())
}

impl Cells {
    /// Draws the cells; `place` gives the pixel of a point in units of the axes.
    pub fn draw<DB: DrawingBackend>(
        &self,
        canvas: &Canvas<'_, DB>,
        place: &dyn Fn(Point) -> Point,
    ) -> Result<(), Error> {
        // From below: what reaches over an upper or a right neighbour is covered by it.
        for (row, y) in self.colors.iter().zip(self.y_edges.windows(2)) {
            let mut first = 0;
            // Cells of one colour in one piece.
            for run in row.chunk_by(|a, b| a == b) {
                let ((left, bottom), (right, top)) =
                    (place((self.x_edges[first], y[0])), place((self.x_edges[first + run.len()], y[1])));
                first += run.len();
                match run[0] {
                    Some(color) => canvas.rectangle((left, bottom), (right + OVERLAP, top - OVERLAP), color)?,
                    None => hatch(canvas, Frame { left, top: top - OVERLAP, right: right + OVERLAP, bottom })?,
                }
            }
        }
        for &(column, row) in &self.striped {
            let color = self.colors.get(row).and_then(|row| row.get(column)).copied().flatten();
            let edges = (self.x_edges.get(column..column + 2), self.y_edges.get(row..row + 2));
            if let (Some(color), (Some(x), Some(y))) = (color, edges) {
                let ((left, bottom), (right, top)) = (place((x[0], y[0])), place((x[1], y[1])));
                stripe(canvas, Frame { left, top, right, bottom }, color)?;
            }
        }
        Ok(())
    }

    /// Draws the contours without their labels.
    pub fn draw_contours<DB: DrawingBackend>(
        &self,
        canvas: &Canvas<'_, DB>,
        place: &dyn Fn(Point) -> Point,
    ) -> Result<(), Error> {
        for contour in &self.contours {
            let color = if contour.rimmed { INK } else { ink_on(contour.color) };
            for line in &contour.lines {
                let pixels: Vec<_> = line.iter().copied().map(place).collect();
                if contour.rimmed {
                    canvas.line(&pixels, Stroke { color: WHITE, width: CONTOUR_WIDTH + RIM, dash: Dash::Solid })?;
                }
                canvas.line(&pixels, Stroke { color, width: CONTOUR_WIDTH, dash: Dash::Solid })?;
            }
        }
        Ok(())
    }

    /// Draws the labels, each on a patch of its height's colour where it hides least: inside `frame`,
    /// off each other, and if possible off the other contours and the lines `above`.
    pub fn draw_labels<DB: DrawingBackend>(
        &self,
        canvas: &Canvas<'_, DB>,
        place: &dyn Fn(Point) -> Point,
        frame: Frame,
        above: &[Vec<Point>],
    ) -> Result<(), Error> {
        let pixels = |line: &Vec<Point>| dense(&line.iter().copied().map(place).collect::<Vec<_>>());
        let above: Vec<_> = above.iter().flat_map(|line| dense(line)).collect();
        let contours: Vec<Vec<Vec<Point>>> =
            self.contours.iter().map(|contour| contour.lines.iter().map(pixels).collect()).collect();
        let mut taken: Vec<Frame> = Vec::new();
        for (number, contour) in self.contours.iter().enumerate() {
            let (width, height) = (text_width(&contour.label, CONTOUR)? + 8.0, CONTOUR + 2.0);
            let others = || contours.iter().enumerate().filter(|&(n, _)| n != number).flat_map(|(_, lines)| lines);
            let mut best: Option<(f64, Frame, Point)> = None;
            for line in &contours[number] {
                for (k, &center) in line.iter().enumerate() {
                    let chip = Frame::around(center, width, height);
                    let free = chip.within(frame.grown(-4.0)) && !taken.iter().any(|t| t.overlaps(chip.grown(10.0)));
                    if !free {
                        continue;
                    }
                    let hidden = |points: &[Point]| points.iter().filter(|&&p| chip.grown(3.0).holds(p)).count() as f64;
                    let crossed = hidden(&above) + others().map(|line| hidden(line)).sum::<f64>();
                    // Short lines vanish below their label; the middle of a long one is best.
                    let short = (width + 30.0 - STEP * line.len() as f64).max(0.0);
                    let aside = (k as f64 / line.len() as f64 - 0.5).abs() * 10.0;
                    let cost = 20.0 * crossed + 10.0 * short + aside;
                    if best.is_none_or(|(least, ..)| cost < least) {
                        best = Some((cost, chip, center));
                    }
                }
            }
            if let Some((_, chip, center)) = best {
                canvas.rectangle((chip.left, chip.top), (chip.right, chip.bottom), contour.color)?;
                canvas.text(&contour.label, center, CONTOUR, Align::Center, ink_on(contour.color))?;
                taken.push(chip);
            }
        }
        Ok(())
    }
}

/// Pixels between the points of a dense line.
const STEP: f64 = 6.0;

/// The line by points about [`STEP`] apart.
fn dense(line: &[Point]) -> Vec<Point> {
    let mut points: Vec<Point> = line.first().copied().into_iter().collect();
    let mut before = 0.0;
    for pair in line.windows(2) {
        let ((x0, y0), (x1, y1)) = (pair[0], pair[1]);
        let length = (x1 - x0).hypot(y1 - y0);
        let mut at = STEP - before;
        while at <= length {
            points.push((x0 + (x1 - x0) * at / length, y0 + (y1 - y0) * at / length));
            at += STEP;
        }
        before = length - (at - STEP);
    }
    points
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dense_lines_keep_their_steps_round_corners() {
        let points = dense(&[(0.0, 0.0), (9.0, 0.0), (9.0, 9.0)]);
        assert_eq!(points, [(0.0, 0.0), (6.0, 0.0), (9.0, 3.0), (9.0, 9.0)]);
        assert!(dense(&[]).is_empty());
        assert_eq!(dense(&[(1.0, 1.0), (1.0, 1.0)]), [(1.0, 1.0)]);
    }

    #[test]
    fn frames_overlap_only_inside() {
        let frame = Frame::around((10.0, 10.0), 4.0, 2.0);
        assert!(frame.within(frame) && frame.overlaps(frame) && frame.holds((8.0, 11.0)));
        assert!(!frame.overlaps(Frame::around((14.0, 10.0), 4.0, 2.0)));
        assert!(!frame.grown(1.0).within(frame));
    }
}
