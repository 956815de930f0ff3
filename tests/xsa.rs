//! `headflow xsa bias` as a user meets it, its figure, and bad input.

mod common;

use std::fs;

use common::{document, headflow, ok, printed, refused};
use serde_json::Value;

const SMALL: [&str; 14] = [
    "xsa",
    "bias",
    "--rho",
    "0,0.4",
    "--self-attention",
    "0.1,0.5,0.8",
    "--lengths",
    "8,40",
    "--sequences",
    "4",
    "--key-size",
    "32",
    "--value-size",
    "256",
];

fn rows(map: &Value, name: &str) -> Vec<Vec<f64>> {
    serde_json::from_value(map[name].clone()).unwrap()
}

#[test]
fn bias_maps_hold_measurement_and_theory() {
    let folder = tempfile::tempdir().unwrap();
    let result = printed(folder.path(), &SMALL);
    assert_eq!(result["command"], "xsa bias");
    assert!(result["positions"].as_str().unwrap().contains("position 0"));
    let maps = result["maps"].as_array().unwrap();
    assert_eq!(maps.len(), 2);
    for map in maps {
        let (cos, theory, error) = (rows(map, "values"), rows(map, "contours_of"), rows(map, "standard_error"));
        assert_eq!((cos.len(), cos[0].len()), (3, 2));
        for (j, i) in (0..3).flat_map(|j| (0..2).map(move |i| (j, i))) {
            // Values of 256 numbers: what the closed form leaves out is of order 1/256 beside the noise.
            assert!((cos[j][i] - theory[j][i]).abs() < 4.0 * error[j][i] + 4.0 / 256.0, "{j} {i}: {cos:?} {theory:?}");
        }
        // More attention to oneself is more bias.
        assert!(cos[0][0] < cos[1][0] && cos[1][0] < cos[2][0]);
    }
    let out = folder.path().join("results/xsa-bias");
    for file in ["result.json", "xsa-bias.png", "xsa-bias.svg"] {
        assert!(fs::metadata(out.join(file)).unwrap().len() > 1000, "{file}");
    }
    // Drawn again from the result alone, the same picture.
    let before = fs::read(out.join("xsa-bias.svg")).unwrap();
    fs::remove_file(out.join("xsa-bias.svg")).unwrap();
    ok(folder.path(), &["figure", "xsa-bias", "--from", "results/xsa-bias"]);
    assert_eq!(before, fs::read(out.join("xsa-bias.svg")).unwrap());
}

/// The same bits at any number of threads, and for the same seed only.
#[test]
fn bias_is_reproducible() {
    let folder = tempfile::tempdir().unwrap();
    let maps = |extra: &[&str]| printed(folder.path(), &[&SMALL, extra].concat())["maps"].clone();
    let one = maps(&["--threads", "1"]);
    assert_eq!(one, maps(&["--threads", "3"]));
    assert_ne!(one, maps(&["--seed", "1"]));
}

#[test]
fn bad_input_is_one_line_and_nothing_written() {
    let folder = tempfile::tempdir().unwrap();
    let bias = |arguments: &[&str], expected: &str| {
        refused(folder.path(), &[&["xsa", "bias"], arguments].concat(), expected);
        assert!(!folder.path().join("results").exists(), "{arguments:?}");
    };
    bias(&["--rho", "0.5"], "rho: has one point");
    bias(&["--rho", "0.5:0.1:4"], "rho: the range goes from 0.5 down to 0.1");
    bias(&["--rho", "0,1.5"], "rho: 1.5 is not between 0 and 1");
    bias(&["--rho", "a:b"], "rho: ");
    bias(&["--self-attention", "0,0.5"], "self-attention: 0 is not between");
    bias(&["--lengths", "1"], "lengths: \"1\" is not a whole number from 2 to 16384");
    bias(&["--sequences", "0"], "sequences: \"0\" is not a whole number");
    bias(&["--spread", "-1"], "spread: \"-1\" is not a number from 0 to 10");
    bias(&["--seed", "x"], "seed");
    bias(&["--rho", "0:1:200", "--self-attention", "0.1:0.9:200"], "at most 10000 cells");
    bias(&["--key-size", "2", "--self-attention", "0.5,0.9999"], "key-size: 2 is too small");
    bias(&["--modle", "x"], "--modle");
    refused(folder.path(), &["figure", "xsa-model"], "--from FOLDER");
    refused(folder.path(), &["figure", "xsa-bias", "--heads", "3"], "heads: has no effect");
    refused(folder.path(), &["figure", "xsa-model", "--from", "nowhere"], "nowhere");
    refused(folder.path(), &["figure", "xsa-modle"], "did you mean \"xsa-model\"?");
    let help = String::from_utf8(headflow(folder.path(), &["xsa", "measure", "--help"]).stdout).unwrap();
    assert!(help.contains("--features gguf") && help.contains("position 0 is left out"));
}

#[test]
#[cfg(not(feature = "gguf"))]
fn without_the_reader_measure_says_how_to_get_it() {
    let folder = tempfile::tempdir().unwrap();
    refused(
        folder.path(),
        &["xsa", "measure", "--model", "a.gguf", "--text", "b"],
        "cargo build --release --features gguf",
    );
}

/// A result of another command is refused by its missing field.
#[test]
fn a_figure_of_another_result_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    ok(folder.path(), &["bayes", "--theta", "flip:2", "--out", "bayes", "--quiet"]);
    refused(folder.path(), &["figure", "xsa-model", "--from", "bayes"], "bayes/result.json: holds no");
    let text = fs::read_to_string(folder.path().join("bayes/result.json")).unwrap();
    assert_eq!(document(&text)["command"], "bayes");
}
