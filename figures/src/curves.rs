//! What the routes of a run look like: curves of one quantity, and the legend.
//!
//! Theory is a line, an SGD mean a row of markers, one replica a thin pale line. The largest
//! dimension has full colour and filled markers, smaller ones are paler and open. The overlap chain
//! has open markers of its own shapes; where there is no direct SGD it takes its place.

use headflow_model::Quantity;
use headflow_model::series::Series;
use plotters::style::RGBColor;

use crate::canvas::{Stamp, Stroke};
use crate::panel::{Curve, Key, Legend, Panel, Range};
use crate::record::{Engine, ResultFolder, Route, Simulation, in_order};
use crate::style::{Dash, GUIDE, NEUTRAL, dimension_marker, head_color, head_dash, paler, second_marker};

/// Pixels between the first and the last simulation's markers where records are too few to alternate.
const APART: f64 = 18.0;

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
    /// Alignments of every head with every feature, a dash per feature.
    AllAlignments,
    Trace,
}

impl Shown {
    /// The label of the vertical axis.
    pub fn label(self) -> String {
        match self {
            Self::Loss => "loss  E".into(),
            Self::Alignments { .. } => "alignment  m_hf = k_h·k*_f".into(),
            Self::AllAlignments => "alignment  m_hf".into(),
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
            Self::AllAlignments => (0..heads)
                .flat_map(|head| (0..features).map(move |feature| (head, feature)))
                .map(|(head, feature)| {
                    let scalar = Scalar::Entry(Quantity::Alignment { head, feature });
                    (scalar, head_color(head), feature_dash(feature))
                })
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

/// Dash of a feature, where colours are the heads'.
fn feature_dash(feature: usize) -> Dash {
    Dash::ALL[feature % Dash::ALL.len()]
}

/// Number of markers along a curve, so that those of all simulations find room.
fn marker_count(simulations: usize) -> usize {
    (40 / simulations.max(1)).clamp(12, 20)
}

/// About `count` points, evenly spread over the times. `shift` (0 to 1) moves them by a part of
/// their distance, so that the markers of several simulations and heads do not hide each other.
fn thinned(path: &[(f64, f64, f64)], count: usize, shift: f64) -> Vec<(f64, f64, f64)> {
    let (Some(first), Some(last)) = (path.first(), path.last()) else { return Vec::new() };
    if path.len() <= count {
        return path.to_vec();
    }
    let mut chosen: Vec<usize> = (0..count)
        .map(|k| {
            let time = first.0 + (last.0 - first.0) * (k as f64 + shift) / count as f64;
            let after = path.partition_point(|p| p.0 < time).min(path.len() - 1);
            if after > 0 && time - path[after - 1].0 < path[after].0 - time { after - 1 } else { after }
        })
        .collect();
    chosen.dedup();
    chosen.into_iter().map(|i| path[i]).collect()
}

/// Where the markers of a head lie between those of the first head and simulation: different for
/// every pair, and far apart for the simulations of one head.
fn place((head, heads): (usize, usize), (simulation, simulations): (usize, usize)) -> f64 {
    let (heads, simulations) = (heads as f64, simulations as f64);
    let jump = simulation as f64 * (heads / simulations).round();
    ((head as f64 + jump + simulation as f64 / simulations) / heads).fract()
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

/// How a figure shows the simulations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manner {
    /// Means as markers.
    Means,
    /// Means as markers, and one replica of the leading simulation as a thin pale line.
    MeansAndReplica,
    /// One replica of the leading simulation, or its mean, as a line.
    Path,
    /// Not at all, unless there is no theory.
    Hidden,
}

/// The look of all routes of some runs.
pub struct Look {
    simulations: Vec<Simulation>,
    /// Dimensions of the simulations, largest first.
    dimensions: Vec<usize>,
    /// The engine with the filled markers.
    first: Engine,
    manner: Manner,
}

impl Look {
    /// One look for all `folders`.
    pub fn of(folders: &[ResultFolder], manner: Manner) -> Self {
        let simulations = in_order(folders.iter().flat_map(ResultFolder::simulations));
        let mut dimensions: Vec<_> = simulations.iter().map(|s| s.dimension).collect();
        dimensions.dedup();
        let first = simulations.iter().map(|s| s.engine).min().unwrap_or(Engine::Direct);
        Self { simulations, dimensions, first, manner }
    }

    fn rank(&self, dimension: Option<usize>) -> usize {
        dimension.and_then(|d| self.dimensions.iter().position(|&x| x == d)).unwrap_or(0)
    }

    fn stamp(&self, color: RGBColor, simulation: Simulation) -> Stamp {
        let rank = self.rank(Some(simulation.dimension));
        let color = if rank == 0 { color } else { paler(color, 0.25) };
        let first = simulation.engine == self.first;
        let marker = if first { dimension_marker(rank) } else { second_marker(rank) };
        Stamp { color, marker, filled: first && rank == 0, radius: 6.0 }
    }

    /// What the legend calls the simulation.
    fn name(&self, Simulation { engine, dimension }: Simulation) -> String {
        let engine = match engine {
            Engine::Overlap => "overlap chain",
            Engine::Direct if self.simulations.iter().any(|s| s.engine == Engine::Overlap) => "direct SGD",
            Engine::Direct => "SGD",
        };
        format!("{engine}, D = {dimension}")
    }

    /// What the legend calls the route of that name, without what the whole figure has in common.
    pub fn route_name(&self, route: &str) -> String {
        match Route::parse(route) {
            Some(Route::Theory { dimension: None }) => "theory".into(),
            Some(Route::Theory { dimension: Some(d) }) => format!("theory, start as at D = {d}"),
            Some(Route::Simulation { simulation, .. }) => self.name(simulation),
            None => route.into(),
        }
    }

    fn shows_means(&self) -> bool {
        matches!(self.manner, Manner::Means | Manner::MeansAndReplica)
    }

    /// The simulation shown as a line, and whether it is one replica.
    fn path<'a>(&self, folder: &'a ResultFolder) -> Option<(Simulation, &'a Series, bool)> {
        let leading = folder.leading()?;
        let (mean, replica) = (folder.mean(leading), folder.replica(leading));
        let either = || replica.map(|s| (s, true)).or(mean.map(|s| (s, false)));
        let (series, one) = match self.manner {
            Manner::Means => None,
            // Not where the replica is all that is known.
            Manner::MeansAndReplica => mean.and(replica).map(|s| (s, true)),
            Manner::Path => either(),
            Manner::Hidden => folder.theory().is_empty().then(either).flatten(),
        }?;
        Some((leading, series, one))
    }

    fn path_stroke(&self, folder: &ResultFolder, color: RGBColor, dash: Dash) -> Stroke {
        if folder.theory().is_empty() && !self.shows_means() {
            Stroke { color, width: 2.6, dash }
        } else {
            replica_stroke(color, dash)
        }
    }

    /// The mean, or the one replica if there is no mean.
    fn markers(folder: &ResultFolder, simulation: Simulation) -> Option<&Series> {
        folder.mean(simulation).or_else(|| folder.replica(simulation))
    }

    /// A panel of `folder`'s numbers against `tau`.
    pub fn panel(&self, folder: &ResultFolder, shown: Shown) -> Panel {
        let scalars = shown.scalars(folder.spec().heads, folder.features());
        let mut curves = Vec::new();
        if let Some((_, series, _)) = self.path(folder) {
            for &(scalar, color, dash) in &scalars {
                curves.push(line(&scalar.path(series), self.path_stroke(folder, color, dash)));
            }
        }
        let theory = folder.theory();
        // The most prominent last, on top of the others.
        for (dimension, series) in theory.iter().rev() {
            for &(scalar, color, dash) in &scalars {
                curves.push(line(&scalar.path(series), theory_stroke(color, dash, self.rank(*dimension))));
            }
        }
        if self.shows_means() {
            for (slot, &simulation) in self.simulations.iter().enumerate().rev() {
                let Some(series) = Self::markers(folder, simulation) else { continue };
                let connected = theory.is_empty() && folder.leading().is_some_and(|l| l.engine == simulation.engine);
                self.add_markers(&mut curves, &scalars, series, slot, connected);
            }
        }
        let guides = match shown {
            Shown::Loss => vec![(1.0 - 1.0 / folder.spec().length as f64, UNIFORM)],
            Shown::Alignments { .. } | Shown::AllAlignments => vec![(0.0, ZERO)],
            Shown::Trace => Vec::new(),
        };
        Panel { x_label: "τ".into(), y_label: shown.label(), guides, curves, ..Panel::default() }
    }

    /// Whether all records are shown, so that those of several simulations share their times.
    fn side_by_side(&self, series: &Series) -> bool {
        let slots = self.simulations.len();
        slots > 1 && series.values.times.len() <= marker_count(slots)
    }

    /// Markers of the simulation in the given place of the list.
    fn add_markers(
        &self,
        curves: &mut Vec<Curve>,
        scalars: &[(Scalar, RGBColor, Dash)],
        series: &Series,
        slot: usize,
        connected: bool,
    ) {
        let slots = self.simulations.len();
        let count = marker_count(slots);
        for (head, &(scalar, color, dash)) in scalars.iter().enumerate() {
            let (path, stamp) = (scalar.path(series), self.stamp(color, self.simulations[slot]));
            if connected {
                curves.push(line(&path, connecting_stroke(stamp.color, dash)));
            }
            let shift = if self.side_by_side(series) { APART * (slot as f64 / (slots - 1) as f64 - 0.5) } else { 0.0 };
            let points = thinned(&path, count, place((head, scalars.len()), (slot, slots)));
            curves.push(Curve::Markers { points, stamp, shift });
        }
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
        let mut moved = false;
        for &simulation in self.simulations.iter().filter(|_| self.shows_means()) {
            let series: Vec<_> = folders.iter().filter_map(|f| Self::markers(f, simulation)).collect();
            let with_errors = series.iter().any(|s| s.errors.is_some());
            let meaning = match (folders.iter().any(|f| f.mean(simulation).is_some()), with_errors) {
                (true, true) => ", mean ± standard error",
                (true, false) => "",
                (false, _) => ", one replica",
            };
            let key = Key::Marker(self.stamp(NEUTRAL, simulation), with_errors);
            add(key, format!("{}{meaning}", self.name(simulation)));
            moved |= series.iter().any(|s| self.side_by_side(s));
        }
        for folder in folders {
            let Some((simulation, _, one)) = self.path(folder) else { continue };
            let key = Key::Line(self.path_stroke(folder, NEUTRAL, Dash::Solid));
            match (self.shows_means(), one) {
                (true, _) => add(key, format!("one replica, D = {}", simulation.dimension)),
                (false, true) => add(key, format!("{}, one replica", self.name(simulation))),
                (false, false) => add(key, format!("{}, mean", self.name(simulation))),
            }
        }
        add(Key::Line(UNIFORM), "uniform attention, E = 1 − 1/L".into());
        if moved {
            add(Key::Remark, "markers of one time stand side by side".into());
        }
        vec![heads.collect(), routes]
    }

    /// What the dashes of [`Shown::AllAlignments`] mean.
    pub fn feature_legend(features: usize) -> Vec<(Key, String)> {
        let entry = |feature| {
            let stroke = theory_stroke(NEUTRAL, feature_dash(feature), 0);
            (Key::Line(stroke), format!("alignment with s{}", feature + 1))
        };
        (0..features).map(entry).collect()
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
        let (a, b) = (thinned(&path, 20, 0.0), thinned(&path, 20, 0.25));
        assert_eq!((a.len(), b.len()), (20, 20));
        assert!(a.iter().all(|p| !b.contains(p)));
        assert_eq!(thinned(&path[..5], 20, 0.25).len(), 5);
        assert!(thinned(&[], 20, 0.0).is_empty());
        // Times that crowd at the start do not pile up markers there.
        let crowded: Vec<_> = (0..101).map(|t| ((t as f64 / 10.0).exp(), 0.0, 0.1)).collect();
        assert!(thinned(&crowded, 20, 0.0).iter().filter(|p| p.0 < 1000.0).count() < 3);
    }

    #[test]
    fn every_head_and_simulation_has_its_place() {
        for (heads, simulations) in [(1, 1), (1, 4), (4, 1), (4, 2), (4, 4), (5, 3), (2, 6)] {
            let of_head = |head| (0..simulations).map(move |s| place((head, heads), (s, simulations)));
            let mut places: Vec<_> = (0..heads).flat_map(of_head).collect();
            places.sort_by(f64::total_cmp);
            let closest = headflow_model::smallest(
                places.windows(2).map(|p| p[1] - p[0]).chain([1.0 - places[places.len() - 1]]),
            );
            assert!(places[0] >= 0.0 && closest > 0.99 / (heads * simulations) as f64, "{heads} {simulations}");
        }
        let of_head: Vec<_> = (0..2).map(|s| place((0, 4), (s, 2))).collect();
        assert!(of_head[1] - of_head[0] > 0.3);
    }
}
