//! One run in stages: which feature is learned when, observed and predicted.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::canvas::Stroke;
use crate::curves::{Look, Manner, Shown, common_range};
use crate::error::Error;
use crate::panel::{Figure, Key, Panel, Range, Row, Rule};
use crate::record::ResultFolder;
use crate::stages::{self, Stages};
use crate::style::{Dash, INK, WIDTH};

/// When a feature should specialise: an element of the field `predicted`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
struct Predicted {
    feature: usize,
    /// `None` when it should never.
    time: Option<f64>,
    label: String,
}

/// Draws the stages of one run against the time `tau`: a panel per feature with the alignments
/// `m_hf` of all heads, and the loss below. Theory as lines, one replica (or the mean) of the leading
/// simulation as thin pale lines. The plateaus of the first route are shaded, with every head's
/// pattern in its colour beside the loss (numbered and explained in the legend where that has no
/// room). A thin vertical line is the time at which the first route learned the feature, a short
/// thick one that of a further route, a broken one the predicted time; a bar at the lower edge is an
/// excursion of the head of that colour.
///
/// Beside the routes it reads the fields `stages` and, if there, `predicted` of `result.json`.
///
/// Writes `<out>.png` (1600 pixels wide, for 17 cm) and `<out>.svg`, and returns their paths. The
/// folder of `out` must exist; each file appears whole or not at all.
///
/// # Errors
/// [`Error::Unreadable`] when `stages` is missing or a field does not fit the run,
/// [`Error::Drawing`] when the drawing fails, [`Error::File`] when a file cannot be written.
pub fn hierarchy(folder: &ResultFolder, out: &Path) -> Result<Vec<PathBuf>, Error> {
    let stages = stages::read(folder)?.ok_or_else(|| Error::lacking(folder.header(), "stages"))?;
    let predicted: Vec<Predicted> = folder.field("predicted")?.unwrap_or_default();
    let features = folder.features();
    if let Some(wrong) = predicted.iter().find(|p| p.feature >= features) {
        let problem = format!("field \"predicted\": feature {} of {features} (counted from zero)", wrong.feature);
        return Err(Error::unreadable(folder.header(), problem));
    }
    let folders = std::slice::from_ref(folder);
    let look = Look::of(folders, Manner::Path);
    let times = Range::of(folder.times()).unwrap_or(Range { low: 0.0, high: 1.0 });

    let mut panels: Vec<_> = (0..features).map(|feature| look.panel(folder, Shown::Alignments { feature })).collect();
    let range = common_range(panels.iter());
    for (feature, panel) in panels.iter_mut().enumerate() {
        panel.y_range = range;
        panel.y_label = format!("m_h{feature}  with s{}", feature + 1);
        panel.x_label.clear();
        panel.bare = true;
        for (rank, route) in stages.iter().enumerate() {
            let of_feature = route.order.iter().filter(|learned| learned.feature == feature);
            panel.rules.extend(of_feature.filter_map(|l| l.time).map(|time| stages::learned(rank, time)));
        }
        let of_feature = predicted.iter().filter(|p| p.feature == feature).enumerate();
        panel.rules.extend(of_feature.filter_map(|(rank, p)| {
            let stroke = predicted_stroke(rank);
            p.time.map(|at| Rule { at, height: 1.0, stroke })
        }));
    }
    panels.push(look.panel(folder, Shown::Loss));
    for panel in &mut panels {
        panel.x_range = Some(times);
        stages::shade(panel, stages::plateaus(&stages), times);
    }
    let excursions = stages.first().map_or(&[][..], |route| &route.excursions);
    for excursion in excursions {
        let named = excursion.features();
        // A pattern that names no feature, say "off", concerns the loss alone.
        let places = if named.is_empty() { vec![features] } else { named };
        for place in places {
            if let Some(panel) = panels.get_mut(place) {
                stages::add_excursion(panel, excursion, times);
            }
        }
    }
    let explained = match panels.last_mut() {
        Some(loss) => stages::label(loss, stages::plateaus(&stages), times)?,
        None => Vec::new(),
    };

    let mut legend = look.legend(folders);
    legend.push(marks(&look, &stages, &predicted));
    legend.extend(explained);
    let height = if features > 2 { 270.0 } else { 330.0 };
    let rows = panels.into_iter().map(|panel: Panel| Row { height, panels: vec![panel], ..Row::default() }).collect();
    Figure::new(WIDTH, &folder.spec().words(), rows, legend)?.write(out)
}

/// The predictions for one feature differ in their dashes.
fn predicted_stroke(rank: usize) -> Stroke {
    Stroke { color: INK, width: 3.0, dash: Dash::broken(rank) }
}

/// Legend entries of what is not a curve.
fn marks(look: &Look, stages: &[Stages], predicted: &[Predicted]) -> Vec<(Key, String)> {
    let mut entries: Vec<(Key, String)> = Vec::new();
    if !stages::plateaus(stages).is_empty() {
        entries.push((Key::Band, "plateau, pattern of each head".into()));
    }
    for (rank, route) in stages.iter().enumerate() {
        if route.order.iter().any(|learned| learned.time.is_some()) {
            let key = Key::Rule(stages::learned_stroke(rank));
            entries.push((key, format!("learned, {}", look.route_name(&route.route))));
        }
    }
    if stages.first().is_some_and(|route| !route.excursions.is_empty()) {
        entries.push((Key::Line(stages::excursion_stroke(INK)), "excursion of a head".into()));
    }
    for (index, prediction) in predicted.iter().enumerate().filter(|(_, p)| p.time.is_some()) {
        let rank = predicted[..index].iter().filter(|p| p.feature == prediction.feature).count();
        let entry = (Key::Rule(predicted_stroke(rank)), prediction.label.clone());
        if !entries.contains(&entry) {
            entries.push(entry);
        }
    }
    entries
}

#[cfg(test)]
mod tests {
    use std::fs;

    use headflow_model::Activation;
    use serde_json::{Value, json};

    use super::*;
    use crate::fixture::{Fixture, Routes, assert_drawn};

    fn staged(routes: Routes, heads: usize) -> Fixture {
        let fixture = Fixture::with_shape(Activation::Softmax, routes, 201, heads, 3);
        fixture.add("stages", Fixture::stages(heads));
        fixture.add(
            "predicted",
            json!([
                {"time": 26.5, "feature": 0, "label": "s1: predicted"},
                {"time": 178.0, "feature": 1, "label": "s2: predicted"},
                {"time": 322.0, "feature": 2, "label": "s3: predicted"},
                {"time": 301.0, "feature": 2, "label": "s3: predicted without noise"},
                {"time": null, "feature": 2, "label": "s3: never"},
            ]),
        );
        fixture
    }

    fn draw(fixture: &Fixture) -> Result<Vec<PathBuf>, Error> {
        hierarchy(&ResultFolder::open(fixture.path())?, &fixture.path().join("hierarchy"))
    }

    #[test]
    fn stages_of_theory_and_a_replica_give_a_figure() {
        let labels = [
            "m_h0  with s1",
            "m_h2  with s3",
            "loss  E",
            "overlap chain, D = 1000, one replica",
            "plateau, pattern of each head",
            "learned, theory",
            "learned, overlap chain, D = 1000",
            "s2: predicted",
            "s3: predicted without noise",
            "−s1+s2",
            "excursion",
        ];
        assert_drawn(&draw(&staged(Routes::TheoryAndReplica, 4)).unwrap(), &labels, &["never", "NaN"]);
    }

    #[test]
    fn many_heads_get_numbered_plateaus() {
        let fixture = staged(Routes::Theory, 10);
        let labels = ["plateau 3:", "+s1+s2+s3 (heads 0, 4, 8)", "plateau 4:"];
        assert_drawn(&draw(&fixture).unwrap(), &labels, &["plateau 1:"]);
    }

    #[test]
    fn runs_without_theory_without_predictions_and_without_stages_give_a_figure() {
        for routes in [Routes::Overlap, Routes::Direct, Routes::AllEngines] {
            let fixture = staged(routes, 4);
            fixture.add("predicted", Value::Null);
            fixture.add("stages", json!([]));
            assert_drawn(&draw(&fixture).unwrap(), &["one replica"], &["plateau", "predicted", "learned"]);
        }
        let fixture = Fixture::new(Activation::Softmax, Routes::Theory, 1);
        fixture.add(
            "stages",
            json!([{"route": "theory", "plateaus": [
                {"start": 0.0, "end": null, "loss": null, "patterns": ["off", "off", "off", "off"]}
            ]}]),
        );
        assert_drawn(&draw(&fixture).unwrap(), &["loss  E"], &["NaN"]);
    }

    #[test]
    fn fields_that_do_not_fit_are_refused_in_one_line_that_names_the_file() {
        let refused = |name: &str, value: Value, what: &str| {
            let fixture = staged(Routes::Theory, 4);
            fixture.add(name, value);
            let message = draw(&fixture).unwrap_err().to_string();
            assert!(message.contains("result.json") && !message.contains('\n'), "{message}");
            assert!(message.contains(&format!("\"{name}\"")) && message.contains(what), "{message}");
            assert!(!fs::exists(fixture.path().join("hierarchy.png")).unwrap());
        };
        refused("stages", Value::Null, "holds no");
        refused("stages", json!({"route": "theory"}), "invalid type");
        refused("stages", json!([{"plateaus": []}]), "route");
        refused("stages", json!([{"route": "theory", "order": [{"feature": 3, "time": 1.0}]}]), "feature 3 of 3");
        let plateau = json!({"start": 1.0, "end": 2.0, "loss": 0.5, "patterns": ["off"]});
        refused("stages", json!([{"route": "theory", "plateaus": [plateau]}]), "1 patterns for 4 heads");
        let excursion = json!({"head": 4, "start": 1.0, "end": 2.0, "pattern": "+s1"});
        refused("stages", json!([{"route": "theory", "excursions": [excursion]}]), "head 4 of 4");
        refused("predicted", json!([{"time": 1.0, "feature": 9, "label": "x"}]), "feature 9 of 3");
        refused("predicted", json!([{"time": "soon", "feature": 0, "label": "x"}]), "invalid type");
    }
}
