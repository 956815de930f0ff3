//! The stages of learning that a result names: plateaus, the order in which features are learned,
//! and how they look in panels.

use plotters::style::RGBColor;
use serde::Deserialize;

use crate::canvas::{Stroke, text_width};
use crate::error::Error;
use crate::panel::{Curve, Key, Legend, Note, Panel, Range, Rule};
use crate::record::ResultFolder;
use crate::style::{Dash, INK, NOTE, WIDTH, head_color, head_ink, paler};

/// Lines of patterns that fit into a panel, and their height.
const LINES: usize = 4;
const LINE: f64 = 28.0;
/// Pixels between patterns side by side.
const GAP: f64 = 14.0;
/// Pixels by which patterns may exceed their plateau.
const OVERHANG: f64 = 26.0;
/// Pixels of the figure's width that are not plotting area, generously.
const MARGINS: f64 = 190.0;

/// A route's stages: an element of the field `stages`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(crate) struct Stages {
    pub route: String,
    #[serde(default)]
    pub plateaus: Vec<Plateau>,
    #[serde(default)]
    pub order: Vec<Learned>,
    #[serde(default)]
    pub excursions: Vec<Excursion>,
}

/// An interval of almost constant loss.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(crate) struct Plateau {
    pub start: f64,
    /// `None` when it lasts to the end.
    pub end: Option<f64>,
    pub loss: Option<f64>,
    /// What each head has learned.
    pub patterns: Vec<String>,
}

/// When a feature is learned.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(crate) struct Learned {
    pub feature: usize,
    /// `None` when it is never learned.
    pub time: Option<f64>,
}

/// A head that leaves its place for a while.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(crate) struct Excursion {
    pub head: usize,
    pub start: f64,
    pub end: Option<f64>,
    pub pattern: String,
}

impl Excursion {
    /// The features that the pattern names: "+s2" names feature 1.
    pub fn features(&self) -> Vec<usize> {
        let numbers = self.pattern.split('s').skip(1);
        let digits = |text: &str| text.chars().take_while(char::is_ascii_digit).collect::<String>();
        numbers.filter_map(|text| digits(text).parse::<usize>().ok()?.checked_sub(1)).collect()
    }
}

/// The field `stages`, checked against the spec; `None` where it is absent.
pub(crate) fn read(folder: &ResultFolder) -> Result<Option<Vec<Stages>>, Error> {
    let Some(stages) = folder.field::<Vec<Stages>>("stages")? else { return Ok(None) };
    let (heads, features) = (folder.spec().heads, folder.features());
    let wrong = |problem: String| Err(Error::unreadable(folder.header(), format!("field \"stages\": {problem}")));
    for route in &stages {
        if let Some(plateau) = route.plateaus.iter().find(|p| p.patterns.len() != heads) {
            return wrong(format!(
                "the plateau at time {} has {} patterns for {heads} heads",
                plateau.start,
                plateau.patterns.len()
            ));
        }
        if let Some(learned) = route.order.iter().find(|l| l.feature >= features) {
            return wrong(format!("feature {} of {features} features (counted from zero)", learned.feature));
        }
        if let Some(excursion) = route.excursions.iter().find(|e| e.head >= heads) {
            return wrong(format!("head {} of {heads} heads (counted from zero)", excursion.head));
        }
    }
    Ok(Some(stages))
}

/// The plateaus of the first route.
pub(crate) fn plateaus(stages: &[Stages]) -> &[Plateau] {
    stages.first().map_or(&[], |route| &route.plateaus)
}

/// Shades the plateaus.
pub(crate) fn shade(panel: &mut Panel, plateaus: &[Plateau], times: Range) {
    panel.bands = plateaus.iter().map(|p| p.range(times)).collect();
}

impl Plateau {
    fn range(&self, times: Range) -> Range {
        Range { low: self.start, high: self.end.unwrap_or(times.high) }
    }

    /// Middle and width of the part within `times`.
    fn visible(&self, times: Range) -> (f64, f64) {
        let Range { low, high } = self.range(times);
        let (low, high) = (low.clamp(times.low, times.high), high.clamp(times.low, times.high));
        ((low + high) / 2.0, high - low)
    }
}

fn minus(text: &str) -> String {
    text.replace('-', "−")
}

/// What stands beside the loss at a plateau.
struct Written {
    /// Width of a column.
    column: f64,
    /// Lines of texts with their colours.
    lines: Vec<Vec<(String, RGBColor)>>,
}

/// The patterns, set for a plateau `width` pixels wide; `None` where they do not fit.
fn written(plateau: &Plateau, width: f64) -> Result<Option<Written>, Error> {
    let mut texts: Vec<_> =
        plateau.patterns.iter().enumerate().map(|(head, pattern)| (minus(pattern), head_ink(head))).collect();
    if texts.iter().all(|(text, _)| *text == texts[0].0) {
        texts.truncate(1);
        texts.iter_mut().for_each(|(_, color)| *color = INK);
    }
    let mut column: f64 = 0.0;
    for (text, _) in &texts {
        column = column.max(text_width(text, NOTE)? + GAP);
    }
    let columns = (((width + OVERHANG) / column.max(1.0)) as usize).min(texts.len());
    if columns == 0 || texts.len().div_ceil(columns) > LINES {
        return Ok(None);
    }
    // Lines of about the same length.
    let each = texts.len().div_ceil(texts.len().div_ceil(columns));
    Ok(Some(Written { column, lines: texts.chunks(each).map(<[_]>::to_vec).collect() }))
}

/// Writes each plateau's patterns into `panel` of the loss, every head's in its colour and in the
/// order of heads, or once where all are the same. A plateau without room for that gets its number,
/// which the legend explains.
pub(crate) fn label(panel: &mut Panel, plateaus: &[Plateau], times: Range) -> Result<Legend, Error> {
    let Some(values) = panel.data_range() else { return Ok(Legend::new()) };
    let pixels = (WIDTH - MARGINS) / (times.high - times.low);
    let mut legend = Legend::new();
    for (number, plateau) in (1..).zip(plateaus) {
        let (middle, duration) = plateau.visible(times);
        let Written { column, lines } = match written(plateau, duration * pixels)? {
            Some(written) => written,
            None => {
                let parts = grouped(&plateau.patterns).into_iter().map(|part| (Key::Remark, part));
                legend.push([(Key::Remark, format!("plateau {number}:"))].into_iter().chain(parts).collect());
                Written { column: 0.0, lines: vec![vec![(number.to_string(), INK)]] }
            }
        };
        let half = (duration + OVERHANG / pixels) / 2.0;
        let around = panel.lines_between(Range { low: middle - half, high: middle + half });
        let known = plateau.loss.map(|loss| Range { low: loss, high: loss });
        let curves = around.or(known).unwrap_or(values);
        // On the side of the curves with more room.
        let (loss, first) = if curves.low - values.low > values.high - curves.high {
            (curves.low, LINE * 0.8)
        } else {
            (curves.high, -LINE * (lines.len() as f64 - 0.2))
        };
        for (row, line) in lines.into_iter().enumerate() {
            let leftmost = -column * (line.len() as f64 - 1.0) / 2.0;
            panel.notes.extend(line.into_iter().enumerate().map(|(place, (text, color))| Note {
                at: (middle, loss),
                shift: (leftmost + column * place as f64, first + LINE * row as f64),
                text,
                color,
            }));
        }
    }
    Ok(legend)
}

/// The patterns, each with the heads that have it.
fn grouped(patterns: &[String]) -> Vec<String> {
    let mut groups: Vec<(&String, Vec<String>)> = Vec::new();
    for (head, pattern) in patterns.iter().enumerate() {
        match groups.iter_mut().find(|(known, _)| *known == pattern) {
            Some((_, heads)) => heads.push(head.to_string()),
            None => groups.push((pattern, vec![head.to_string()])),
        }
    }
    let words = |(pattern, heads): (&String, Vec<String>)| {
        let noun = if heads.len() == 1 { "head" } else { "heads" };
        format!("{} ({noun} {})", minus(pattern), heads.join(", "))
    };
    groups.into_iter().map(words).collect()
}

/// Marks an excursion near the lower edge, in the head's colour.
pub(crate) fn add_excursion(panel: &mut Panel, excursion: &Excursion, times: Range) {
    let Some(values) = panel.y_range.or_else(|| panel.data_range()) else { return };
    let at = values.low + 0.03 * (values.high - values.low) * (excursion.head % 3) as f64;
    let (start, end) = (excursion.start.max(times.low), excursion.end.unwrap_or(times.high).min(times.high));
    if start > end {
        return;
    }
    let color = head_color(excursion.head);
    panel.curves.push(Curve::Line { points: vec![(start, at), (end, at)], stroke: excursion_stroke(color) });
    let shift = (0.0, -20.0);
    let (text, color) = (minus(&excursion.pattern), head_ink(excursion.head));
    panel.notes.push(Note { at: ((start + end) / 2.0, at), shift, text, color });
}

/// The line of [`add_excursion`].
pub(crate) fn excursion_stroke(color: RGBColor) -> Stroke {
    Stroke { color, width: 8.0, dash: Dash::Solid }
}

/// Marks when the route of the given rank learned the feature: a thin line, ticks for further routes.
pub(crate) fn learned(rank: usize, at: f64) -> Rule {
    let height = if rank == 0 { 1.0 } else { 0.2 };
    Rule { at, height, stroke: learned_stroke(rank) }
}

/// The line of [`learned`].
pub(crate) fn learned_stroke(rank: usize) -> Stroke {
    let color = if rank < 2 { INK } else { paler(INK, 0.45) };
    Stroke { color, width: if rank == 0 { 1.8 } else { 4.0 }, dash: Dash::Solid }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_grouped_by_head() {
        let patterns = ["+s1", "-s1", "+s1", "off"].map(String::from);
        assert_eq!(grouped(&patterns), ["+s1 (heads 0, 2)", "−s1 (head 1)", "off (head 3)"]);
    }

    #[test]
    fn an_excursion_names_its_features() {
        let features = |pattern: &str| Excursion { head: 0, start: 0.0, end: None, pattern: pattern.into() }.features();
        assert_eq!(features("+s2"), [1]);
        assert_eq!(features("+s1-s12"), [0, 11]);
        assert!(features("off").is_empty() && features("+s0").is_empty() && features("s").is_empty());
    }
}
