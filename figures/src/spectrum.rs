//! Growth rates along a run: the spectrum of the flow's linearisation.

use std::path::{Path, PathBuf};

use headflow_model::text::rounded;
use serde::Deserialize;

use crate::canvas::{Stamp, Stroke};
use crate::curves::{Look, Manner, Shown};
use crate::error::Error;
use crate::panel::{Curve, Figure, Key, Panel, Range, Row};
use crate::record::ResultFolder;
use crate::stages;
use crate::style::{Dash, INK, Marker, ORANGE, SKY, WIDTH};

/// How far below zero the axis goes, as a part of how far it goes above: what shrinks fast matters
/// less than what grows.
const BELOW: f64 = 0.6;

/// The field `spectrum`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
struct Spectrum {
    times: Vec<f64>,
    /// By time and mode.
    rates: Vec<Vec<Option<f64>>>,
    kinds: Vec<Vec<Kind>>,
}

/// What growth along a mode does to the heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    Specialising,
    Symmetric,
    Mixed,
}

impl Kind {
    /// In the order of drawing: what matters most on top.
    const ALL: [Self; 3] = [Self::Mixed, Self::Symmetric, Self::Specialising];

    fn label(self) -> &'static str {
        match self {
            Self::Specialising => "specialising mode",
            Self::Symmetric => "symmetric mode",
            Self::Mixed => "mixed mode",
        }
    }

    /// Colours that few heads have.
    fn stamp(self) -> Stamp {
        let (color, marker, radius) = match self {
            Self::Specialising => (ORANGE, Marker::Circle, 5.0),
            Self::Symmetric => (SKY, Marker::Square, 4.0),
            Self::Mixed => (INK, Marker::Triangle, 4.0),
        };
        Stamp { color, marker, filled: true, radius }
    }
}

impl Spectrum {
    /// `(time, rate)` of every mode of one kind.
    fn of(&self, kind: Kind) -> impl Iterator<Item = (f64, f64)> + '_ {
        let at = self.times.iter().zip(self.rates.iter().zip(&self.kinds));
        at.flat_map(|(&time, (rates, kinds))| rates.iter().zip(kinds).map(move |(&rate, &of)| (time, rate, of)))
            .filter(move |&(_, _, of)| of == kind)
            .filter_map(|(time, rate, _)| Some((time, rate?)))
    }

    fn check(&self) -> Result<(), String> {
        let counts = (self.times.len(), self.rates.len(), self.kinds.len());
        if counts.0 != counts.1 || counts.0 != counts.2 {
            return Err(format!("{} times, but rates at {} and kinds at {}", counts.0, counts.1, counts.2));
        }
        for (time, (rates, kinds)) in self.times.iter().zip(self.rates.iter().zip(&self.kinds)) {
            if rates.len() != kinds.len() {
                return Err(format!("{} rates, but {} kinds at time {time}", rates.len(), kinds.len()));
            }
        }
        Ok(())
    }

    /// The rates that are shown: from the largest down to some way below zero.
    fn shown(&self, all: Range) -> Range {
        // Without growth the slowest decay sets the scale.
        let reach = if all.high > 0.0 { all.high } else { (-all.high).max(0.1 * -all.low) * 2.0 };
        Range { low: all.low.max(-BELOW * reach).min(0.0), high: all.high.max(0.05 * reach) }
    }
}

/// Draws growth rates, the eigenvalues of minus the Hessian of the loss, against the time `tau`: a
/// dot per mode and time, with colour and shape for the kind of mode; what decays faster than an
/// axis scaled to the growing modes can show is left out, and the legend says so. Below, on the same
/// axis, the theory's alignments (a colour per head, a dash per feature) and the loss. Plateaus are
/// shaded where `result.json` names them.
///
/// Beside the routes it reads the fields `spectrum` and, if there, `stages` of `result.json`.
///
/// Writes `<out>.png` (1600 pixels wide, for 17 cm) and `<out>.svg`, and returns their paths. The
/// folder of `out` must exist; each file appears whole or not at all.
///
/// # Errors
/// [`Error::Unreadable`] when `spectrum` is missing or a field does not fit the run,
/// [`Error::Drawing`] when the drawing fails, [`Error::File`] when a file cannot be written.
pub fn spectrum(folder: &ResultFolder, out: &Path) -> Result<Vec<PathBuf>, Error> {
    let spectrum: Spectrum = folder.field("spectrum")?.ok_or_else(|| Error::lacking(folder.header(), "spectrum"))?;
    spectrum.check().map_err(|problem| Error::unreadable(folder.header(), format!("field \"spectrum\": {problem}")))?;
    let stages = stages::read(folder)?.unwrap_or_default();
    let folders = std::slice::from_ref(folder);
    let look = Look::of(folders, Manner::Hidden);
    let times = folder.times().chain(spectrum.times.iter().copied());
    let times = Range::of(times).unwrap_or(Range { low: 0.0, high: 1.0 });

    let (rates, mut legend) = rates(&spectrum);
    let mut panels = [rates, look.panel(folder, Shown::AllAlignments), look.panel(folder, Shown::Loss)];
    for panel in &mut panels {
        panel.x_range = Some(times);
        stages::shade(panel, stages::plateaus(&stages), times);
    }
    for panel in &mut panels[..2] {
        panel.x_label.clear();
        panel.bare = true;
    }
    let explained = stages::label(&mut panels[2], stages::plateaus(&stages), times)?;
    legend.extend(look.legend(folders));
    let mut features = Look::feature_legend(folder.features());
    if !stages::plateaus(&stages).is_empty() {
        features.push((Key::Band, "plateau".into()));
    }
    legend.push(features);
    legend.extend(explained);
    let rows = panels.into_iter().zip([470.0, 290.0, 250.0]);
    let rows = rows.map(|(panel, height)| Row { height, panels: vec![panel], ..Row::default() }).collect();
    Figure::new(WIDTH, &folder.spec().words(), rows, legend)?.write(out)
}

/// The panel of the rates and its part of the legend.
fn rates(spectrum: &Spectrum) -> (Panel, Vec<Vec<(Key, String)>>) {
    let mut panel = Panel {
        y_label: "growth rate κ".into(),
        guides: vec![(0.0, Stroke { color: INK, width: 2.6, dash: Dash::Solid })],
        ..Panel::default()
    };
    let mut kinds = Vec::new();
    for kind in Kind::ALL {
        let points: Vec<_> = spectrum.of(kind).map(|(time, rate)| (time, rate, f64::NAN)).collect();
        if !points.is_empty() {
            kinds.insert(0, (Key::Marker(kind.stamp(), false), kind.label().to_string()));
            panel.curves.push(Curve::Markers { points, stamp: kind.stamp(), shift: 0.0 });
        }
    }
    let mut legend = vec![kinds];
    let mut remark = "κ: eigenvalues of minus the Hessian of the loss".to_string();
    if let Some(all) = Range::of(Kind::ALL.into_iter().flat_map(|k| spectrum.of(k)).map(|(_, rate)| rate)) {
        let shown = spectrum.shown(all);
        panel.y_range = Some(shown);
        if shown.low > all.low {
            let number = |v: f64| rounded(v, 2).replace('-', "−");
            remark += &format!("; those below {} are not shown (lowest: {})", number(shown.low), number(all.low));
        }
    }
    legend.push(vec![(Key::Remark, remark)]);
    (panel, legend)
}

#[cfg(test)]
mod tests {
    use headflow_model::Activation;
    use serde_json::{Value, json};

    use super::*;
    use crate::fixture::{Fixture, Routes, assert_drawn};

    /// Modes that grow before each feature is learned and shrink once it is.
    fn example(modes: usize) -> Value {
        let times: Vec<f64> = (0..=100).map(|t| 4.0 * f64::from(t)).collect();
        let middles = [25.0, 190.0, 310.0];
        let rate = |time: f64, mode: usize| {
            let feature = mode % 3;
            let size = [0.8, 0.22, 0.1][feature];
            let learned = 1.0 / (1.0 + (-(time - middles[feature]) * [0.25, 0.06, 0.08][feature]).exp());
            let later = if feature > 0 && time > 35.0 { 1.4 } else { 1.0 };
            match mode / 3 {
                0 | 1 => size * later * (1.0 - 0.1 * (mode / 3) as f64) * (1.0 - 2.6 * learned),
                2 => -0.3 * size - 0.5 * learned,
                _ => -0.05 - 4.0 * learned * size,
            }
        };
        let kind = |mode: usize| ["specialising", "specialising", "symmetric", "mixed"][mode / 3 % 4];
        let rates: Vec<Vec<f64>> = times.iter().map(|&t| (0..modes).map(|mode| rate(t, mode)).collect()).collect();
        let kinds: Vec<Vec<&str>> = times.iter().map(|_| (0..modes).map(kind).collect()).collect();
        json!({"times": times, "rates": rates, "kinds": kinds})
    }

    fn draw(fixture: &Fixture) -> Result<Vec<PathBuf>, Error> {
        spectrum(&ResultFolder::open(fixture.path())?, &fixture.path().join("spectrum"))
    }

    #[test]
    fn a_spectrum_with_plateaus_gives_a_figure() {
        let fixture = Fixture::with_shape(Activation::Softmax, Routes::Theory, 201, 4, 3);
        fixture.add("stages", Fixture::stages(4));
        fixture.add("spectrum", example(12));
        let labels = [
            "growth rate κ",
            "specialising mode",
            "symmetric mode",
            "mixed mode",
            "those below −0.48 are not shown",
            "alignment with s3",
            "plateau",
            "loss  E",
        ];
        assert_drawn(&draw(&fixture).unwrap(), &labels, &["NaN"]);
    }

    #[test]
    fn sparse_spectra_give_a_figure() {
        for routes in [Routes::AllEngines, Routes::Overlap] {
            for spectrum in [
                json!({"times": [], "rates": [], "kinds": []}),
                json!({"times": [5.0], "rates": [[null, -0.4, -3.0]], "kinds": [["mixed", "mixed", "symmetric"]]}),
                json!({"times": [5.0, 9.0], "rates": [[0.0], []], "kinds": [["specialising"], []]}),
            ] {
                let fixture = Fixture::new(Activation::Softmax, routes, 21);
                fixture.add("spectrum", spectrum);
                assert_drawn(&draw(&fixture).unwrap(), &["growth rate κ"], &["plateau", "NaN"]);
            }
        }
    }

    #[test]
    fn the_axis_shows_what_grows() {
        let spectrum: Spectrum = serde_json::from_value(example(12)).unwrap();
        let shown = |low, high| spectrum.shown(Range { low, high });
        assert_eq!(shown(-10.0, 1.0), Range { low: -0.6, high: 1.0 });
        assert_eq!(shown(-0.2, 1.0), Range { low: -0.2, high: 1.0 });
        assert_eq!(shown(0.5, 1.0), Range { low: 0.0, high: 1.0 });
        let without_growth = shown(-10.0, -0.1);
        assert!((-10.0..-0.1).contains(&without_growth.low) && without_growth.high > 0.0);
        let nothing = shown(0.0, 0.0);
        assert!(nothing.low <= 0.0 && nothing.high >= 0.0);
    }

    #[test]
    fn fields_that_do_not_fit_are_refused_in_one_line_that_names_the_file() {
        let refused = |value: Value, what: &str| {
            let fixture = Fixture::new(Activation::Softmax, Routes::Theory, 11);
            fixture.add("spectrum", value);
            let message = draw(&fixture).unwrap_err().to_string();
            assert!(message.contains("result.json") && !message.contains('\n') && message.contains(what), "{message}");
        };
        refused(Value::Null, "holds no \"spectrum\"");
        refused(json!([1]), "\"spectrum\"");
        refused(json!({"times": [1.0], "rates": [[1.0]]}), "kinds");
        refused(json!({"times": [1.0], "rates": [[1.0]], "kinds": [["odd"]]}), "odd");
        refused(json!({"times": [1.0], "rates": [], "kinds": [[]]}), "rates at 0");
        refused(json!({"times": [1.0], "rates": [[1.0]], "kinds": [[]]}), "0 kinds at time 1");
    }
}
