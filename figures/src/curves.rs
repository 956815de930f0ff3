//! What the routes of a run look like: curves of one quantity, and the legend.
//!
//! Theory is a line, an SGD mean a row of markers, one replica a thin pale line. The largest
//! dimension has full colour and filled markers, smaller ones are paler and open.

use headflow_model::Quantity;
use headflow_model::series::Series;
use plotters::style::RGBColor;

use crate::canvas::{Stamp, Stroke};
use crate::panel::{Curve, Key, Legend, Panel, Range};
use crate::record::ResultFolder;
use crate::style::{Dash, GUIDE, NEUTRAL, dimension_marker, head_color, head_dash, paler};

/// Number of markers along a curve.
const MARKERS: usize = 20;

/// The loss of uniform attention.
const UNIFORM: Stroke = Stroke { color: GUIDE, width: 2.2, dash: Dash::Dashed };
/// No alignment.
const ZERO: Stroke = Stroke { color: GUIDE, width: 1.6, dash: Dash::Solid };

/// What a panel shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shown {
    Loss,
    /// Alignments of every head with one feature.
    Alignments {
        feature: usize,
    },
    Trace,
}

impl Shown {
    /// The label of the vertical axis.
    pub fn label(self) -> String {
        match self {
            Self::Loss => "loss  E".into(),
            Self::Alignments { .. } => "alignment  m_hf = k_h·k*_f".into(),
            Self::Trace => "tr r".into(),
        }
    }

    /// The scalars in the panel, each with its colour and dash; none for a feature that the run lacks.
    fn scalars(self, heads: usize, features: usize) -> Vec<(Scalar, RGBColor, Dash)> {
        match self {
            Self::Loss => vec![(Scalar::Entry(Quantity::Loss), NEUTRAL, Dash::Solid)],
            Self::Trace => vec![(Scalar::Trace, NEUTRAL, Dash::Solid)],
            Self::Alignments { feature } if feature >= features => Vec::new(),
            Self::Alignments { feature } => (0..heads)
                .map(|head| (Scalar::Entry(Quantity::Alignment { head, feature }), head_color(head), head_dash(head)))
                .collect(),
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Scalar {
    Entry(Quantity),
    Trace,
}

impl Scalar {
    /// `(time, value, standard error)`, the last NaN where unknown.
    fn path(self, series: &Series) -> Vec<(f64, f64, f64)> {
        let times = series.values.times.iter().enumerate();
        match self {
            Self::Trace => times.zip(&series.trace).map(|((_, &t), &(v, e))| (t, v, e)).collect(),
            Self::Entry(quantity) => {
                let index = series.values.shape.index(quantity);
                let error = |t: usize| series.errors.as_ref().map_or(f64::NAN, |e| e.rows[t][index]);
                times.map(|(i, &t)| (t, series.values.rows[i][index], error(i))).collect()
            }
        }
    }
}

fn line(path: &[(f64, f64, f64)], stroke: Stroke) -> Curve {
    Curve::Line { points: path.iter().map(|&(t, v, _)| (t, v)).collect(), stroke }
}

/// About [`MARKERS`] points, evenly spread over the times. `shift` (0 to 1) moves them by a part of
/// their distance, so that the markers of several dimensions and heads do not hide each other.
fn thinned(path: &[(f64, f64, f64)], shift: f64) -> Vec<(f64, f64, f64)> {
    let (Some(first), Some(last)) = (path.first(), path.last()) else { return Vec::new() };
    if path.len() <= MARKERS {
        return path.to_vec();
    }
    let mut chosen: Vec<usize> = (0..MARKERS)
        .map(|k| {
            let time = first.0 + (last.0 - first.0) * (k as f64 + shift) / MARKERS as f64;
            let after = path.partition_point(|p| p.0 < time).min(path.len() - 1);
            if after > 0 && time - path[after - 1].0 < path[after].0 - time { after - 1 } else { after }
        })
        .collect();
    chosen.dedup();
    chosen.into_iter().map(|i| path[i]).collect()
}

fn theory_stroke(color: RGBColor, dash: Dash, rank: usize) -> Stroke {
    if rank == 0 { Stroke { color, width: 3.2, dash } } else { Stroke { color: paler(color, 0.4), width: 2.4, dash } }
}

fn replica_stroke(color: RGBColor, dash: Dash) -> Stroke {
    Stroke { color: paler(color, 0.6), width: 1.8, dash }
}

fn connecting_stroke(color: RGBColor, dash: Dash) -> Stroke {
    Stroke { color, width: 1.6, dash }
}

fn stamp(color: RGBColor, rank: usize) -> Stamp {
    let color = if rank == 0 { color } else { paler(color, 0.25) };
    Stamp { color, marker: dimension_marker(rank), filled: rank == 0 }
}

/// The look of all routes of some runs.
pub struct Look {
    /// Dimensions of the direct routes, largest first.
    dimensions: Vec<usize>,
    /// Whether to draw one replica behind the means.
    replica: bool,
}

impl Look {
    /// One look for all `folders`.
    pub fn of(folders: &[ResultFolder], replica: bool) -> Self {
        let mut dimensions: Vec<_> = folders.iter().flat_map(ResultFolder::dimensions).collect();
        dimensions.sort_unstable_by(|a, b| b.cmp(a));
        dimensions.dedup();
        Self { dimensions, replica }
    }

    fn rank(&self, dimension: Option<usize>) -> usize {
        dimension.and_then(|d| self.dimensions.iter().position(|&x| x == d)).unwrap_or(0)
    }

    /// One replica of the largest dimension, where it is not the only thing known of it.
    fn replica_of<'a>(&self, folder: &'a ResultFolder) -> Option<(usize, &'a Series)> {
        let dimension = *folder.dimensions().first().filter(|_| self.replica)?;
        folder.mean(dimension)?;
        Some((dimension, folder.replica(dimension)?))
    }

    /// The mean at `dimension`, or the one replica if there is no mean.
    fn direct(folder: &ResultFolder, dimension: usize) -> Option<&Series> {
        folder.mean(dimension).or_else(|| folder.replica(dimension))
    }

    /// A panel of `folder`'s numbers against `tau`.
    pub fn panel(&self, folder: &ResultFolder, shown: Shown) -> Panel {
        let scalars = shown.scalars(folder.spec().heads, folder.features());
        let mut curves = Vec::new();
        if let Some((_, series)) = self.replica_of(folder) {
            for &(scalar, color, dash) in &scalars {
                curves.push(line(&scalar.path(series), replica_stroke(color, dash)));
            }
        }
        let theory = folder.theory();
        // The most prominent last, on top of the others.
        for (dimension, series) in theory.iter().rev() {
            for &(scalar, color, dash) in &scalars {
                curves.push(line(&scalar.path(series), theory_stroke(color, dash, self.rank(*dimension))));
            }
        }
        for &dimension in folder.dimensions().iter().rev() {
            let Some(series) = Self::direct(folder, dimension) else { continue };
            let rank = self.rank(Some(dimension));
            for (head, &(scalar, color, dash)) in scalars.iter().enumerate() {
                let (path, stamp) = (scalar.path(series), stamp(color, rank));
                if theory.is_empty() {
                    curves.push(line(&path, connecting_stroke(stamp.color, dash)));
                }
                let place = (head as f64 + rank as f64 / self.dimensions.len() as f64) / scalars.len() as f64;
                curves.push(Curve::Markers { points: thinned(&path, place), stamp });
            }
        }
        let guides = match shown {
            Shown::Loss => vec![(1.0 - 1.0 / folder.spec().length as f64, UNIFORM)],
            Shown::Alignments { .. } => vec![(0.0, ZERO)],
            Shown::Trace => Vec::new(),
        };
        Panel { x_label: "τ".into(), y_label: shown.label(), guides, curves, ..Panel::default() }
    }

    /// Heads in one group, routes and reference lines in another.
    pub fn legend(&self, folders: &[ResultFolder]) -> Legend {
        let heads = folders.iter().map(|f| f.spec().heads).max().unwrap_or(0);
        let heads = (0..heads).map(|head| {
            let stroke = Stroke { color: head_color(head), width: 6.0, dash: head_dash(head) };
            (Key::Line(stroke), format!("head {head}"))
        });
        let mut routes: Vec<(Key, String)> = Vec::new();
        let mut add = |key, label: String| {
            if !routes.iter().any(|(_, known)| *known == label) {
                routes.push((key, label));
            }
        };
        for (dimension, _) in folders.iter().flat_map(ResultFolder::theory) {
            let stroke = theory_stroke(NEUTRAL, Dash::Solid, self.rank(dimension));
            match dimension {
                None => add(Key::Line(stroke), "theory, D → ∞".into()),
                Some(d) => add(Key::Line(stroke), format!("theory, D → ∞, start as at D = {d}")),
            }
        }
        for (rank, &dimension) in self.dimensions.iter().enumerate() {
            let series: Vec<_> = folders.iter().filter_map(|f| Self::direct(f, dimension)).collect();
            let with_errors = series.iter().any(|s| s.errors.is_some());
            let meaning = match (folders.iter().any(|f| f.mean(dimension).is_some()), with_errors) {
                (true, true) => ", mean ± standard error",
                (true, false) => "",
                (false, _) => ", one replica",
            };
            let key = Key::Marker(stamp(NEUTRAL, rank), with_errors);
            add(key, format!("SGD, D = {dimension}{meaning}"));
        }
        for (dimension, _) in folders.iter().filter_map(|f| self.replica_of(f)) {
            add(Key::Line(replica_stroke(NEUTRAL, Dash::Solid)), format!("one replica, D = {dimension}"));
        }
        add(Key::Line(UNIFORM), "uniform attention, E = 1 − 1/L".into());
        vec![heads.collect(), routes]
    }
}

/// The range that holds the data of all `panels`.
pub fn common_range<'a>(panels: impl Iterator<Item = &'a Panel>) -> Option<Range> {
    Range::of(panels.filter_map(Panel::data_range).flat_map(|r| [r.low, r.high]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markers_are_thinned_and_interleaved() {
        let path: Vec<_> = (0..101).map(|t| (t as f64, 0.0, 0.1)).collect();
        let (a, b) = (thinned(&path, 0.0), thinned(&path, 0.25));
        assert_eq!((a.len(), b.len()), (20, 20));
        assert!(a.iter().all(|p| !b.contains(p)));
        assert_eq!(thinned(&path[..5], 0.25).len(), 5);
        assert!(thinned(&[], 0.0).is_empty());
        // Times that crowd at the start do not pile up markers there.
        let crowded: Vec<_> = (0..101).map(|t| ((t as f64 / 10.0).exp(), 0.0, 0.1)).collect();
        assert!(thinned(&crowded, 0.0).iter().filter(|p| p.0 < 1000.0).count() < 3);
    }
}
