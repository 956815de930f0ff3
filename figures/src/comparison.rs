//! One run: theory against SGD.

use std::path::{Path, PathBuf};

use crate::curves::{Look, Manner, Shown, common_range};
use crate::error::Error;
use crate::panel::{Figure, Row};
use crate::record::ResultFolder;
use crate::style::WIDTH;

/// Panels of alignments side by side.
const COLUMNS: usize = 3;

/// Draws one run against the time `tau`: every alignment `m_hf` (a panel per feature, a colour per
/// head), the loss and `tr r`. Theory as lines, means of direct SGD with standard errors as markers,
/// those of the overlap chain as open markers of other shapes at other records (beside them where
/// records are few), one replica of the largest dimension as a thin pale line. A run that lacks some
/// of these shows the others; without direct SGD the overlap chain takes its place.
///
/// Writes `<out>.png` (1600 pixels wide, for 17 cm) and `<out>.svg`, and returns their paths. The
/// folder of `out` must exist; each file appears whole or not at all.
///
/// # Errors
/// [`Error::Drawing`] when the drawing fails, [`Error::File`] when a file cannot be written.
pub fn comparison(folder: &ResultFolder, out: &Path) -> Result<Vec<PathBuf>, Error> {
    let folders = std::slice::from_ref(folder);
    let look = Look::of(folders, Manner::MeansAndReplica);
    let features = folder.features();
    let mut alignments: Vec<_> =
        (0..features).map(|feature| look.panel(folder, Shown::Alignments { feature })).collect();
    let range = common_range(alignments.iter());
    let columns = if features == 4 { 2 } else { COLUMNS };
    for (feature, panel) in alignments.iter_mut().enumerate() {
        panel.y_range = range;
        if features > 1 {
            panel.title = vec![format!("feature f = {feature}")];
        }
        if feature % columns > 0 {
            panel.y_label.clear();
        }
    }
    let mut rows: Vec<_> = alignments
        .chunks(columns)
        .map(|panels| Row { height: 420.0, panels: panels.to_vec(), ..Row::default() })
        .collect();
    rows.push(Row {
        height: 300.0,
        panels: vec![look.panel(folder, Shown::Loss), look.panel(folder, Shown::Trace)],
        ..Row::default()
    });
    Figure::new(WIDTH, &folder.spec().words(), rows, look.legend(folders))?.write(out)
}

#[cfg(test)]
mod tests {
    use headflow_model::Activation;

    use super::*;
    use crate::fixture::{Fixture, Routes, assert_drawn};

    fn draw(fixture: &Fixture) -> Vec<PathBuf> {
        let folder = ResultFolder::open(fixture.path()).unwrap();
        let files = comparison(&folder, &fixture.path().join("comparison.v1")).unwrap();
        assert_eq!(files, ["png", "svg"].map(|extension| fixture.path().join(format!("comparison.v1.{extension}"))));
        // No temporary file stays behind.
        assert_eq!(std::fs::read_dir(fixture.path()).unwrap().count(), 4);
        files
    }

    #[test]
    fn theory_and_direct_routes_give_a_full_figure() {
        let fixture = Fixture::new(Activation::Softmax, Routes::All, 101);
        let labels = [
            "alignment  m_hf = k_h·k*_f",
            "loss  E",
            "tr r",
            "τ",
            "feature f = 1",
            "head 3",
            "theory, D → ∞",
            "SGD, D = 1000, mean ± standard error",
            "SGD, D = 500, mean ± standard error",
            "one replica, D = 1000",
            "uniform attention",
            "flips θ = (±1.5, ±1)",
        ];
        assert_drawn(&draw(&fixture), &labels, &[]);
    }

    #[test]
    fn the_theory_alone_gives_a_figure() {
        let fixture = Fixture::new(Activation::Softmax1, Routes::Theory, 101);
        assert_drawn(&draw(&fixture), &["theory, D → ∞", "softmax1"], &["SGD", "replica"]);
    }

    #[test]
    fn direct_routes_alone_give_a_figure() {
        let fixture = Fixture::new(Activation::BayesSoftmax, Routes::Direct, 101);
        assert_drawn(&draw(&fixture), &["SGD, D = 500", "bayes-softmax"], &["theory"]);
    }

    #[test]
    fn the_overlap_chain_stands_beside_direct_sgd() {
        let fixture = Fixture::new(Activation::Softmax, Routes::AllEngines, 101);
        let labels = [
            "direct SGD, D = 1000, mean ± standard error",
            "overlap chain, D = 1000, mean ± standard error",
            "overlap chain, D = 500, mean ± standard error",
            "one replica, D = 1000",
        ];
        assert_drawn(&draw(&fixture), &labels, &["NaN"]);
    }

    #[test]
    fn few_records_of_several_engines_stand_beside_each_other() {
        let fixture = Fixture::new(Activation::Softmax, Routes::AllEngines, 11);
        assert_drawn(&draw(&fixture), &["direct SGD, D = 500", "overlap chain, D = 1000", "side by side"], &["NaN"]);
    }

    #[test]
    fn the_overlap_chain_takes_the_place_of_direct_sgd() {
        let fixture = Fixture::new(Activation::Softmax, Routes::TheoryAndOverlap, 101);
        assert_drawn(&draw(&fixture), &["overlap chain, D = 500, mean", "one replica, D = 1000"], &["SGD"]);
    }

    #[test]
    fn the_overlap_chain_alone_gives_a_figure() {
        let fixture = Fixture::new(Activation::Softmax, Routes::Overlap, 101);
        assert_drawn(&draw(&fixture), &["overlap chain, D = 500, mean", "one replica"], &["SGD", "theory"]);
    }

    #[test]
    fn one_replica_alone_gives_a_figure() {
        let fixture = Fixture::new(Activation::Softmax, Routes::TheoryAndReplica, 101);
        assert_drawn(&draw(&fixture), &["overlap chain, D = 1000, one replica"], &["SGD", "standard error"]);
    }

    #[test]
    fn a_theory_per_dimension_is_told_apart() {
        let fixture = Fixture::new(Activation::Softmax, Routes::TheoryPerDimension, 101);
        assert_drawn(&draw(&fixture), &["start as at D = 500", "start as at D = 1000"], &[]);
    }

    #[test]
    fn one_time_gives_a_figure() {
        for routes in [Routes::All, Routes::Theory, Routes::Direct] {
            let fixture = Fixture::new(Activation::Softmax, routes, 1);
            assert_drawn(&draw(&fixture), &["τ", "loss  E"], &[]);
        }
    }

    #[test]
    fn values_that_are_not_finite_are_refused() {
        let fixture = Fixture::new(Activation::Softmax, Routes::All, 21);
        fixture.spoil(|time, quantity| quantity == "m" && time > 200.0);
        let error = ResultFolder::open(fixture.path()).err().map(|e| e.to_string()).unwrap_or_default();
        assert!(error.contains("series.csv") && error.contains("NaN"), "{error}");
    }

    #[test]
    fn constant_values_give_a_figure() {
        let fixture = Fixture::new(Activation::Softmax, Routes::Constant, 21);
        assert_drawn(&draw(&fixture), &["tr r"], &["NaN"]);
    }

    #[test]
    fn a_folder_that_does_not_exist_is_named() {
        let fixture = Fixture::new(Activation::Softmax, Routes::Theory, 5);
        let folder = ResultFolder::open(fixture.path()).unwrap();
        let message = comparison(&folder, &fixture.path().join("absent/figure")).unwrap_err().to_string();
        assert!(message.contains("absent/figure.png"), "{message}");
    }
}
