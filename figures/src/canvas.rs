//! Strokes, markers and text on either backend, and the writing of a figure's files.
//!
//! Plotters' coordinates are whole pixels. Both backends therefore draw [`SCALE`] times larger: the
//! PNG is averaged down (smooth edges), the SVG is declared at its true size (fine coordinates).

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use image::ImageEncoder;
use image::codecs::png::PngEncoder;
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::cells::Frame;
use crate::error::Error;
use crate::style::{Dash, FONT, Marker, register};

/// Device pixels per pixel of the figure, along each side.
const SCALE: u32 = 3;

/// A point, in pixels of the figure from the upper left corner.
pub type Point = (f64, f64);

/// How a line looks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Stroke {
    pub color: RGBColor,
    pub width: f64,
    pub dash: Dash,
}

/// How a marker looks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Stamp {
    pub color: RGBColor,
    pub marker: Marker,
    /// Filled with its colour, or with white.
    pub filled: bool,
    pub radius: f64,
}

/// Horizontal place of a text's anchor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    Left,
    Center,
    Right,
}

fn failed(error: impl std::fmt::Display) -> Error {
    Error::Drawing(error.to_string())
}

fn device(point: Point) -> (i32, i32) {
    let pixel = |v: f64| (v * f64::from(SCALE)).round() as i32;
    (pixel(point.0), pixel(point.1))
}

/// Width of `text` in pixels.
///
/// # Errors
/// When the font is missing.
pub fn text_width(text: &str, size: f64) -> Result<f64, Error> {
    register()?;
    let scale = f64::from(SCALE);
    let (width, _) = (FONT, size * scale).into_font().box_size(text).map_err(failed)?;
    Ok(f64::from(width) / scale)
}

/// Draws on one backend.
pub struct Canvas<'a, DB: DrawingBackend> {
    area: &'a DrawingArea<DB, Shift>,
    /// The bitmap backend joins the segments of a wide path badly at sharp corners, and centres text
    /// too high.
    bitmap: bool,
}

impl<DB: DrawingBackend> Canvas<'_, DB> {
    /// A line through `points`.
    pub fn line(&self, points: &[Point], stroke: Stroke) -> Result<(), Error> {
        match stroke.dash.lengths() {
            [] => self.path(points, stroke),
            lengths => dashes(points, lengths).iter().try_for_each(|dash| self.path(dash, stroke)),
        }
    }

    fn path(&self, points: &[Point], stroke: Stroke) -> Result<(), Error> {
        let mut pixels: Vec<_> = points.iter().copied().map(device).collect();
        pixels.dedup();
        let width = (stroke.width * f64::from(SCALE)).round().max(1.0) as u32;
        let style = stroke.color.stroke_width(width);
        if !self.bitmap {
            return self.area.draw(&PathElement::new(pixels, style)).map_err(failed);
        }
        for pair in pixels.windows(2) {
            self.area.draw(&PathElement::new(pair, style)).map_err(failed)?;
        }
        if pixels.len() > 2 {
            for &joint in &pixels[1..pixels.len() - 1] {
                self.area.draw(&Circle::new(joint, width / 2, stroke.color.filled())).map_err(failed)?;
            }
        }
        Ok(())
    }

    /// A filled rectangle between two opposite corners.
    pub fn rectangle(&self, from: Point, to: Point, color: RGBColor) -> Result<(), Error> {
        self.area.draw(&Rectangle::new([device(from), device(to)], color.filled())).map_err(failed)
    }

    /// A filled polygon.
    pub fn polygon(&self, points: &[Point], color: RGBColor) -> Result<(), Error> {
        let pixels: Vec<_> = points.iter().copied().map(device).collect();
        self.area.draw(&Polygon::new(pixels, color)).map_err(failed)
    }

    /// A marker, set off from what lies below by a white rim.
    pub fn stamp(&self, center: Point, stamp: Stamp) -> Result<(), Error> {
        const RIM: f64 = 1.2;
        const EDGE: f64 = 2.6;
        let radius = stamp.radius;
        if stamp.filled {
            self.shape(center, radius + RIM, stamp.marker, WHITE)?;
            self.shape(center, radius, stamp.marker, stamp.color)
        } else {
            self.shape(center, radius, stamp.marker, stamp.color)?;
            self.shape(center, radius - EDGE, stamp.marker, WHITE)
        }
    }

    fn shape(&self, center: Point, radius: f64, marker: Marker, color: RGBColor) -> Result<(), Error> {
        // Corners and the factors that make the areas look alike.
        let (corners, turn, factor) = match marker {
            Marker::Circle => {
                let circle = Circle::new(device(center), radius * f64::from(SCALE), color.filled());
                return self.area.draw(&circle).map_err(failed);
            }
            Marker::Square => (4, 0.5, 1.2),
            Marker::Triangle => (3, -0.75, 1.3),
            Marker::Diamond => (4, 0.0, 1.3),
            Marker::Wedge => (3, 0.75, 1.3),
            Marker::Pentagon => (5, -1.25, 1.15),
            Marker::Hexagon => (6, 0.0, 1.1),
        };
        let corner = |i: usize| {
            let angle = (i as f64 + turn) * std::f64::consts::TAU / corners as f64;
            device((center.0 + factor * radius * angle.cos(), center.1 + factor * radius * angle.sin()))
        };
        self.area.draw(&Polygon::new((0..corners).map(corner).collect::<Vec<_>>(), color)).map_err(failed)
    }

    /// Text anchored at its vertical middle.
    pub fn text(&self, text: &str, at: Point, size: f64, align: Align, color: RGBColor) -> Result<(), Error> {
        self.draw_text(text, at, size, align, color, FontTransform::None)
    }

    /// Text that reads upwards, centred at `at`.
    pub fn upward_text(&self, text: &str, at: Point, size: f64, color: RGBColor) -> Result<(), Error> {
        self.draw_text(text, at, size, Align::Center, color, FontTransform::Rotate270)
    }

    fn draw_text(
        &self,
        text: &str,
        at: Point,
        size: f64,
        align: Align,
        color: RGBColor,
        transform: FontTransform,
    ) -> Result<(), Error> {
        // Puts the middle between the heights of small and capital letters at `at`.
        let lower = size * if self.bitmap { 0.17 } else { 0.05 };
        let at = match transform {
            FontTransform::None => (at.0, at.1 + lower),
            _ => (at.0 + lower, at.1),
        };
        let horizontal = match align {
            Align::Left => HPos::Left,
            Align::Center => HPos::Center,
            Align::Right => HPos::Right,
        };
        let style = (FONT, size * f64::from(SCALE))
            .into_font()
            .transform(transform)
            .color(&color)
            .pos(Pos::new(horizontal, VPos::Center));
        self.area.draw_text(text, &style, device(at)).map_err(failed)
    }
}

/// Cuts a line into dashes: `lengths` of strokes and gaps by turns.
fn dashes(points: &[Point], lengths: &[f64]) -> Vec<Vec<Point>> {
    let mut pieces = Vec::new();
    let mut piece = points.first().map_or(Vec::new(), |&p| vec![p]);
    let mut turns = lengths.iter().cycle().copied();
    let mut next = || turns.next().unwrap_or(f64::INFINITY);
    let (mut drawing, mut left) = (true, next());
    for pair in points.windows(2) {
        let ((x0, y0), (x1, y1)) = (pair[0], pair[1]);
        let length = (x1 - x0).hypot(y1 - y0);
        let mut done = 0.0;
        while length - done > left {
            done += left;
            let at = (x0 + (x1 - x0) * done / length, y0 + (y1 - y0) * done / length);
            if drawing {
                piece.push(at);
                pieces.push(std::mem::take(&mut piece));
            } else {
                piece = vec![at];
            }
            drawing = !drawing;
            left = next();
        }
        left -= length - done;
        if drawing {
            piece.push(pair[1]);
        }
    }
    if piece.len() > 1 {
        pieces.push(piece);
    }
    pieces
}

/// The parts of the line through `points` inside `frame`, after Liang and Barsky; interrupted where a
/// point is not finite.
pub fn clipped(points: &[Point], frame: Frame) -> Vec<Vec<Point>> {
    let mut pieces: Vec<Vec<Point>> = Vec::new();
    for pair in points.windows(2) {
        let ((x0, y0), (x1, y1)) = (pair[0], pair[1]);
        let (dx, dy) = (x1 - x0, y1 - y0);
        let (mut from, mut to) = (0.0, 1.0);
        // The part of the segment on the inner side of each edge.
        let sides = [(-dx, x0 - frame.left), (dx, frame.right - x0), (-dy, y0 - frame.top), (dy, frame.bottom - y0)];
        for (speed, room) in sides {
            if speed < 0.0 {
                from = f64::max(from, room / speed);
            } else if speed > 0.0 {
                to = f64::min(to, room / speed);
            } else if !speed.is_finite() || room < 0.0 {
                to = -1.0;
            }
        }
        if !(dx + dy).is_finite() || from > to {
            continue;
        }
        let at = |part: f64| (x0 + dx * part, y0 + dy * part);
        match pieces.last_mut() {
            Some(piece) if from == 0.0 && piece.last() == Some(&pair[0]) => piece.push(at(to)),
            _ => pieces.push(vec![at(from), at(to)]),
        }
    }
    pieces
}

/// Something that can be drawn on any backend.
pub trait Drawing {
    /// Width and height in pixels.
    fn size(&self) -> (u32, u32);
    /// Draws it.
    fn draw<DB: DrawingBackend>(&self, canvas: &Canvas<'_, DB>) -> Result<(), Error>;
}

fn paint<DB: DrawingBackend>(backend: DB, bitmap: bool, drawing: &impl Drawing) -> Result<(), Error> {
    let area = backend.into_drawing_area();
    area.fill(&WHITE).map_err(failed)?;
    drawing.draw(&Canvas { area: &area, bitmap })?;
    area.present().map_err(failed)
}

fn png(drawing: &impl Drawing) -> Result<Vec<u8>, Error> {
    let (width, height) = drawing.size();
    let large = (width * SCALE, height * SCALE);
    let mut pixels = vec![0; (large.0 * large.1 * 3) as usize];
    paint(BitMapBackend::with_buffer(&mut pixels, large), true, drawing)?;
    let (columns, rows, scale) = (width as usize, height as usize, SCALE as usize);
    let mut small = Vec::with_capacity(columns * rows * 3);
    for y in 0..rows {
        for x in 0..columns {
            for channel in 0..3 {
                let sum: u32 = (0..scale * scale)
                    .map(|k| (y * scale + k / scale) * columns * scale + x * scale + k % scale)
                    .map(|pixel| u32::from(pixels[pixel * 3 + channel]))
                    .sum();
                small.push((sum / (SCALE * SCALE)) as u8);
            }
        }
    }
    let mut file = Vec::new();
    PngEncoder::new(&mut file).write_image(&small, width, height, image::ColorType::Rgb8).map_err(failed)?;
    Ok(file)
}

fn svg(drawing: &impl Drawing) -> Result<Vec<u8>, Error> {
    let (width, height) = drawing.size();
    let large = (width * SCALE, height * SCALE);
    let mut text = String::new();
    paint(SVGBackend::with_string(&mut text, large), false, drawing)?;
    let declared = format!("width=\"{}\" height=\"{}\" viewBox", large.0, large.1);
    // Joins of thick lines are round, as in the PNG.
    let wanted = format!("width=\"{width}\" height=\"{height}\" stroke-linejoin=\"round\" viewBox");
    Ok(text.replacen(&declared, &wanted, 1).into_bytes())
}

/// Writes `<stem>.png` and `<stem>.svg`. Both are complete before either is written, and each
/// appears whole: a failure leaves earlier files as they were.
///
/// # Errors
/// When the drawing fails, or a file cannot be written.
pub fn write(drawing: &impl Drawing, stem: &Path) -> Result<Vec<PathBuf>, Error> {
    register()?;
    let files = [("png", png(drawing)?), ("svg", svg(drawing)?)];
    files
        .iter()
        .map(|(extension, content)| {
            // Appended: a dot in the stem is part of the name.
            let mut name = OsString::from(stem);
            name.push(".");
            name.push(extension);
            let path = PathBuf::from(name);
            write_whole(&path, content).map_err(|source| Error::Unwritable { path: path.clone(), source })?;
            Ok(path)
        })
        .collect()
}

/// Writes a temporary file next to `path` and renames it. Its name is that of all files on their way to a result folder,
/// and it is locked meanwhile: what a killed process leaves is swept up by the next run there.
fn write_whole(path: &Path, content: &[u8]) -> std::io::Result<()> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let (partial, mut file) = loop {
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let partial = path.with_file_name(format!(".headflow-{}-{number}.tmp", std::process::id()));
        match File::create_new(&partial) {
            // Left by a process that had this number before.
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            created => break (partial, created?),
        }
    };
    // Where files cannot be locked it may be swept up early, and is then an error.
    let _ = file.try_lock();
    let written = file.write_all(content).and_then(|()| file.sync_all()).and_then(|()| fs::rename(&partial, path));
    if written.is_err() {
        // The first error is the one to report.
        let _ = fs::remove_file(&partial);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dashes_cover_their_share_of_a_line() {
        let points: Vec<_> = (0..=100).map(|i| (i as f64, 0.0)).collect();
        let pieces = dashes(&points, &[14.0, 6.0]);
        assert_eq!(pieces.len(), 5);
        let covered: f64 = pieces.iter().map(|p| p[p.len() - 1].0 - p[0].0).sum();
        assert!((covered - 70.0).abs() < 1e-9);
        assert!(dashes(&[], &[1.0, 1.0]).is_empty() && dashes(&[(0.0, 0.0)], &[1.0, 1.0]).is_empty());
        let mixed = dashes(&points, &[10.0, 5.0, 2.0, 3.0]);
        let lengths: Vec<_> = mixed.iter().map(|p| (p[p.len() - 1].0 - p[0].0).round()).collect();
        assert_eq!(lengths, [10.0, 2.0].repeat(5));
    }

    #[test]
    fn lines_are_cut_at_the_frame() {
        let frame = Frame { left: 0.0, top: 0.0, right: 10.0, bottom: 10.0 };
        let inside = [(1.0, 1.0), (5.0, 2.0), (9.0, 9.0)];
        assert_eq!(clipped(&inside, frame), [inside.to_vec()]);
        assert_eq!(clipped(&[(-5.0, 5.0), (15.0, 5.0)], frame), [vec![(0.0, 5.0), (10.0, 5.0)]]);
        // Out at the right, back in below.
        let bent = [(5.0, 5.0), (15.0, 5.0), (15.0, 9.0), (5.0, 9.0)];
        assert_eq!(clipped(&bent, frame), [vec![(5.0, 5.0), (10.0, 5.0)], vec![(10.0, 9.0), (5.0, 9.0)]]);
        assert!(clipped(&[(-5.0, 0.0), (0.0, -5.0)], frame).is_empty());
        assert!(clipped(&[(20.0, 3.0), (20.0, 4.0)], frame).is_empty());
        let broken = [(1.0, 1.0), (f64::NAN, 2.0), (3.0, 3.0), (4.0, f64::NEG_INFINITY), (4.0, 4.0), (5.0, 5.0)];
        assert_eq!(clipped(&broken, frame), [vec![(4.0, 4.0), (5.0, 5.0)]]);
        assert!(clipped(&[], frame).is_empty());
    }

    #[test]
    fn a_failed_write_leaves_nothing_behind() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("taken")).unwrap();
        assert!(write_whole(&folder.path().join("taken"), b"x").is_err());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        assert!(write_whole(&folder.path().join("absent/file"), b"x").is_err());
    }
}
