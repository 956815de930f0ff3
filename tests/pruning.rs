//! Pruning as a user meets it: trained systems, given points, the figure, and bad input.

mod common;

use headflow::model::{largest_size, smallest};

use common::{ok, printed, refused};
use serde_json::{Value, json};

fn numbers(rows: &Value, field: &str) -> Vec<f64> {
    rows.as_array().unwrap().iter().map(|row| row[field].as_f64().unwrap()).collect()
}

const SMALL: &[&str] = &["--theta", "flip:2.5", "--heads", "3"];

fn small<'a>(rest: &[&'a str]) -> Vec<&'a str> {
    [&["prune"], SMALL, rest].concat()
}

/// The same after flows.
fn small_flows<'a>(rest: &[&'a str]) -> Vec<&'a str> {
    [&small(&["--points", "512"])[..], rest].concat()
}

/// A point's rows: every number by the command that gives losses of points, up to the error of both.
#[test]
fn a_given_point_is_pruned_as_the_losses_of_its_parts() {
    let root = tempfile::tempdir().unwrap();
    let task = ["--theta", "flip:2"];
    let prune = ["prune", "--m", "1.5;-1.2;1.4", "--out", "p"];
    let result = printed(root.path(), &[&prune[..], &task].concat());
    let pruning = &result["pruning"];
    assert_eq!((&pruning["heads"], &pruning["support"]), (&json!(3), &json!(2)));
    assert_eq!((&pruning["heads_minus_features"], &pruning["heads_minus_support"]), (&json!(2), &json!(1)));
    let rows = &pruning["systems"][0]["rows"];
    assert_eq!(numbers(rows, "subsets"), [1.0, 3.0, 3.0]);
    let parts = [vec!["1.5;-1.2;1.4"], vec!["1.5;-1.2", "1.5;1.4", "-1.2;1.4"], vec!["1.5", "-1.2", "1.4"]];
    for (n, parts) in parts.iter().enumerate() {
        let losses: Vec<f64> = parts
            .iter()
            .map(|m| {
                let loss = printed(root.path(), &[&["loss", "--m", m, "--points", "4096"][..], &task].concat());
                loss["loss"].as_f64().unwrap()
            })
            .collect();
        let close = |field: &str, expected: f64| {
            let value = rows[n][field].as_f64().unwrap();
            assert!((value - expected).abs() < 3e-3, "{n} removed, {field}: {value} against {expected}");
        };
        close("mean", losses.iter().sum::<f64>() / losses.len() as f64);
        close("best", smallest(losses.iter().copied()));
        close("worst", largest_size(losses.iter().copied()));
    }
    assert_eq!(rows[1]["best_kept"].as_array().unwrap().len(), 2);
    assert_eq!(pruning["rows"][1]["standard_error"], Value::Null, "one system has no error");
    assert!(root.path().join("p/result.json").exists() && !root.path().join("p/series.csv").exists());
}

/// Flows from random keys, as many as replicas: two heads of three are enough for two signs.
#[test]
fn flows_from_random_keys_are_pruned() {
    let root = tempfile::tempdir().unwrap();
    let flows =
        small_flows(&["--initial", "random", "--replicas", "4", "--attention", "softmax1", "--dimension", "300"]);
    let times = ["--tau", "150", "--records", "3"];
    let result = printed(root.path(), &[&flows, &times[..], &["--out", "a"]].concat());
    let pruning = &result["pruning"];
    assert_eq!((&pruning["route"], pruning["systems"].as_array().unwrap().len()), (&json!("theory"), 4));
    let can_go = &pruning["can_go"][1];
    assert_eq!(can_go["tolerance"], 0.05);
    assert_eq!(can_go["by_choice"], json!({"mean": 1.0, "standard_error": 0.0}), "{pruning}");
    assert_eq!(can_go["together"], can_go["by_choice"]);
    assert_eq!(can_go["at_random"]["mean"], 0.0);
    let (best, worst) = (numbers(&pruning["rows"], "best"), numbers(&pruning["rows"], "worst"));
    assert!(best[1] < 1.05 * best[0] && worst[1] > 1.2 * best[0] && best[2] > 1.2 * best[0], "{best:?} {worst:?}");
    // The rows are averages over the systems.
    let of_systems: Vec<f64> =
        pruning["systems"].as_array().unwrap().iter().map(|s| s["rows"][1]["mean"].as_f64().unwrap()).collect();
    let mean = of_systems.iter().sum::<f64>() / 4.0;
    assert!((mean - pruning["rows"][1]["mean"].as_f64().unwrap()).abs() < 1e-12);
    for file in ["result.json", "series.csv", "series.npz", "comparison.png"] {
        assert!(root.path().join("a").join(file).exists(), "{file}");
    }
    // The same spec, the same bits, at any number of threads; and a system is a point.
    std::fs::write(root.path().join("spec.json"), result["spec"].to_string()).unwrap();
    let again = printed(root.path(), &["prune", "--spec", "spec.json", "--out", "b", "--threads", "1"]);
    assert_eq!(again["pruning"], *pruning);
    let system = &pruning["systems"][2];
    let point = json!({
        "theta": {"kind": "flip", "nu": [2.5]}, "attention": "softmax1",
        "m": system["m"], "r": system["r"], "b": system["b"],
    });
    std::fs::write(root.path().join("point.json"), point.to_string()).unwrap();
    let alone = printed(root.path(), &["prune", "--spec", "point.json", "--out", "c"]);
    assert_eq!(alone["pruning"]["systems"][0]["rows"], system["rows"]);
}

/// Both engines, and random sets where all would be too many.
#[test]
fn simulations_are_pruned() {
    let root = tempfile::tempdir().unwrap();
    for engine in ["direct", "overlap"] {
        let run = small(&["--engine", engine, "--dimension", "60", "--replicas", "2", "--tau", "5", "--records", "3"]);
        let more = ["--test-samples", "64", "--subsets", "2", "--most-removed", "1", "--prune-tolerances", "0.2"];
        let result = printed(root.path(), &[&run, &more[..], &["--out", engine]].concat());
        let pruning = &result["pruning"];
        assert_eq!(pruning["route"], format!("{engine} D=60"));
        assert_eq!(numbers(&pruning["rows"], "subsets"), [1.0, 2.0]);
        assert_eq!(pruning["rows"][1]["exhaustive"], false);
        assert_eq!(pruning["can_go"].as_array().unwrap().len(), 1);
        assert!(pruning["rows"][1]["standard_error"].as_f64().unwrap() > 0.0);
        assert!(root.path().join(engine).join("series.npz").exists());
    }
    let text = ok(root.path(), &small_flows(&["--tau", "2", "--records", "2", "--prune-tolerances", "0.07,0.001"]));
    assert!(text.contains("1 system") && text.contains("at 7% of the loss") && text.contains("at 0.1% of"), "{text}");
    assert!(text.contains("H - F = 2, H - |support| = 1"), "{text}");
    assert!(root.path().join("results/prune/result.json").exists());
}

#[test]
fn the_figure_holds_both_thetas_all_activations_and_both_routes() {
    let root = tempfile::tempdir().unwrap();
    let quick = [
        "figure",
        "pruning",
        "--dimension",
        "40",
        "--replicas",
        "2",
        "--tau",
        "2",
        "--records",
        "2",
        "--points",
        "64",
        "--test-samples",
        "16",
        "--subsets",
        "3",
        "--quiet",
        "--out",
        "f",
    ];
    ok(root.path(), &quick);
    let text = std::fs::read_to_string(root.path().join("f/result.json")).unwrap();
    let result: Value = serde_json::from_str(&text).unwrap();
    let panels = result["pruning"].as_array().unwrap();
    assert_eq!(panels.len(), 2);
    assert_eq!((&panels[0]["support"], &panels[1]["support"]), (&Value::Null, &json!(4)));
    for panel in panels {
        let curves = panel["curves"].as_array().unwrap();
        let named: Vec<_> =
            curves.iter().map(|c| (c["attention"].as_str().unwrap(), c["route"].as_str().unwrap())).collect();
        let expected = ["softmax", "softmax1", "bayes-softmax"].map(|a| [(a, "theory"), (a, "direct D=40")]);
        assert_eq!(named, expected.concat());
        for curve in curves {
            let count = panel["heads"].as_u64().unwrap() as usize;
            for field in ["removed", "mean", "standard_error", "standard_deviation", "best", "worst"] {
                assert_eq!(curve[field].as_array().unwrap().len(), count, "{field}");
            }
            assert_eq!(curve["unpruned"], curve["mean"][0]);
        }
    }
    refused(
        root.path(),
        &["figure", "pruning", "--theta", "flip:2"],
        "theta: figure pruning varies it, or needs its own; leave it out",
    );
    refused(root.path(), &["figure", "pruning", "--from", "f", "--tau", "3"], "tau");
}

#[test]
fn impossible_prunings_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let cases: &[(&[&str], &str)] = &[
        (&["--most-removed", "3"], "most_removed: of 3 heads at most 2 can be removed, got 3"),
        (&["--subsets", "0"], "subsets: must be from 1"),
        (&["--prune-tolerances", "-0.1"], "prune_tolerances: "),
        (&["--b", "1,2,3"], "b: belongs to a point"),
        (&["--m", "1;2;3", "--engine", "direct"], "engine: the point m is not trained"),
        (&["--m", "1;2;3", "--r", "1,0,0;0,1,0;0,0,1"], "positive semi-definite"),
        (&["--m", "1;2"], "m: has 2 rows but there are 3 heads"),
        (&["--engine", "both"], "engine"),
        (&["--engine", "direct", "--gamma", "0"], "gamma"),
        (&["--engine", "direct", "--dimension", "3"], "D >= H + F = 4"),
        (&["--initial", "random", "--dimension", "3"], "D >= H + F = 4"),
        (&["--initial", "random", "--m0", "1;2;3"], "initial"),
        (&["--stop-loss", "0.5"], "stop_loss"),
        (&["--max-steps", "3"], "--max-steps"),
    ];
    for (arguments, expected) in cases {
        refused(root.path(), &small(arguments), expected);
    }
    let left: Vec<_> = std::fs::read_dir(root.path()).unwrap().collect();
    assert!(left.is_empty(), "a refused run leaves nothing: {left:?}");
}
