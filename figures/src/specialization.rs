//! Several runs side by side: how heads specialise under different attentions.

use std::path::{Path, PathBuf};

use crate::curves::{Look, Manner, Shown, common_range};
use crate::error::Error;
use crate::panel::{Figure, Row};
use crate::record::ResultFolder;
use crate::style::WIDTH;

/// Draws a column per run (say softmax, softmax1 and bayes-softmax): the alignments `m_hf` against
/// the time `tau`, a row per feature and a colour per head, and the loss. Theory as lines, means of
/// direct SGD with standard errors as markers, those of the overlap chain as open markers of other
/// shapes; without direct SGD the overlap chain takes its place. Panels of a row share their vertical range; what the runs have
/// in common stands in the title, the rest above the columns.
///
/// Writes `<out>.png` (1600 pixels wide for up to four runs, for 17 cm) and `<out>.svg`, and returns
/// their paths. The folder of `out` must exist; each file appears whole or not at all.
///
/// # Errors
/// [`Error::NoResult`] without folders, [`Error::Drawing`] when the drawing fails, [`Error::File`]
/// when a file cannot be written.
pub fn specialization(folders: &[ResultFolder], out: &Path) -> Result<Vec<PathBuf>, Error> {
    let features = folders.iter().map(ResultFolder::features).max().ok_or(Error::NoResult)?;
    let look = Look::of(folders, Manner::Means);
    let words: Vec<_> = folders.iter().map(|folder| folder.spec().words()).collect();
    let common = |word: &String| words.iter().all(|others| others.contains(word));
    let title: Vec<String> = words[0].iter().filter(|word| common(word)).cloned().collect();
    let columns: Vec<_> =
        words.iter().map(|words| words.iter().filter(|word| !common(word)).cloned().collect::<Vec<_>>()).collect();

    let shown = (0..features).map(|feature| Shown::Alignments { feature }).chain([Shown::Loss]);
    let mut rows: Vec<Row> = shown
        .enumerate()
        .map(|(row, shown)| {
            let mut panels: Vec<_> = folders.iter().map(|folder| look.panel(folder, shown)).collect();
            for (column, panel) in panels.iter_mut().enumerate() {
                panel.y_label = match (column, shown) {
                    (1.., _) => String::new(),
                    // Rows are too low for the long label.
                    (_, Shown::Alignments { feature }) if features > 1 => {
                        format!("m_hf = k_h·k*_f,  f = {feature}")
                    }
                    _ => shown.label(),
                };
                if shown != Shown::Loss {
                    panel.x_label.clear();
                }
                if row == 0 {
                    panel.title.clone_from(&columns[column]);
                }
            }
            let height = if features > 1 { 330.0 } else { 400.0 };
            Row { height, panels, ..Row::default() }
        })
        .collect();
    let (alignments, losses) = rows.split_at_mut(features);
    for group in [alignments, losses] {
        let range = common_range(group.iter().flat_map(|row| &row.panels));
        for panel in group.iter_mut().flat_map(|row| &mut row.panels) {
            panel.y_range = range;
        }
    }
    let width = WIDTH.max(400.0 * folders.len() as f64);
    Figure::new(width, &title, rows, look.legend(folders))?.write(out)
}

#[cfg(test)]
mod tests {
    use headflow_model::Activation;

    use super::*;
    use crate::fixture::{Fixture, Routes, assert_drawn};

    #[test]
    fn three_attentions_stand_side_by_side() {
        let fixtures: Vec<_> = Activation::ALL.iter().map(|&a| Fixture::new(a, Routes::All, 101)).collect();
        let folders: Vec<_> = fixtures.iter().map(|f| ResultFolder::open(f.path()).unwrap()).collect();
        let files = specialization(&folders, &fixtures[0].path().join("specialization")).unwrap();
        let labels = ["softmax", "softmax1", "bayes-softmax", "m_hf = k_h·k*_f,  f = 1", "loss  E", "τ", "head 3"];
        assert_drawn(&files, &labels, &["replica"]);
        let svg = std::fs::read_to_string(&files[1]).unwrap();
        // What the runs share is stated once.
        assert_eq!(svg.matches("flips θ").count(), 1);
        assert_eq!(svg.matches("bayes-softmax").count(), 1);
    }

    #[test]
    fn one_run_or_mixed_runs_give_a_figure() {
        let fixtures = [
            Fixture::new(Activation::Softmax, Routes::Theory, 1),
            Fixture::new(Activation::Softmax1, Routes::Direct, 11),
            Fixture::with_shape(Activation::Softmax, Routes::Theory, 11, 10, 1),
        ];
        let folders: Vec<_> = fixtures.iter().map(|f| ResultFolder::open(f.path()).unwrap()).collect();
        for (i, chosen) in [&folders[..], &folders[..1], &folders[2..]].into_iter().enumerate() {
            let files = specialization(chosen, &fixtures[0].path().join(format!("figure{i}"))).unwrap();
            assert_drawn(&files, &["loss  E"], &["NaN"]);
        }
    }

    #[test]
    fn all_engines_stand_side_by_side() {
        let fixtures: Vec<_> = Activation::ALL.iter().map(|&a| Fixture::new(a, Routes::AllEngines, 101)).collect();
        let folders: Vec<_> = fixtures.iter().map(|f| ResultFolder::open(f.path()).unwrap()).collect();
        let files = specialization(&folders, &fixtures[0].path().join("specialization")).unwrap();
        let labels = ["direct SGD, D = 500, mean ± standard error", "overlap chain, D = 1000, mean ± standard error"];
        assert_drawn(&files, &labels, &["replica"]);
    }

    #[test]
    fn no_run_is_an_error() {
        assert!(matches!(specialization(&[], Path::new("figure")), Err(Error::NoResult)));
    }
}
