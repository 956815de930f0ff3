//! Exact numbers as a user meets them: losses by quadrature, Bayes risk, optimum, phase diagrams and their figures.

mod common;

use common::{document, headflow, ok, printed, refused};
use serde_json::{Value, json};

#[test]
fn losses_are_exact_and_say_how_exact() {
    let root = tempfile::tempdir().unwrap();
    let point = ["loss", "--theta", "flip:2", "--length", "5", "--m", "1.5;-1.2", "--r", "2.55,-1.75;-1.75,1.64"];
    let exact = printed(root.path(), &[&point[..], &["--tolerance", "1e-11"]].concat());
    assert_eq!(exact["spec"]["evaluator"], "quadrature");
    let number = |document: &Value, name: &str| document[name].as_f64().unwrap();
    assert!((number(&exact, "loss") - 0.642_073_964_649_958_9).abs() < 1e-11);
    assert!((number(&exact, "mean_attention_on_relevant") - 0.319_557_474_325_738_5).abs() < 1e-11);
    assert!((number(&exact, "second_moment") - 0.281_188_913_301_435_9).abs() < 1e-11);
    assert!(number(&exact, "error_estimate") <= 1e-11);
    let sampled = printed(root.path(), &[&point[..], &["--evaluator", "qmc"]].concat());
    assert_eq!(sampled["spec"]["evaluator"], "qmc");
    let difference = (number(&sampled, "loss") - number(&exact, "loss")).abs();
    assert!(difference < 5.0 * number(&sampled, "error_estimate"));
    // The spec of a result gives the same bits.
    std::fs::write(root.path().join("spec.json"), exact["spec"].to_string()).unwrap();
    let again = printed(root.path(), &["loss", "--spec", "spec.json", "--threads", "1"]);
    assert_eq!(again["loss"], exact["loss"]);
}

#[test]
fn bayes_risk_and_floors() {
    let root = tempfile::tempdir().unwrap();
    let found = printed(root.path(), &["bayes", "--theta", "flip:2", "--length", "5", "--heads", "2"]);
    assert!((found["bayes_risk"].as_f64().unwrap() - 0.432_367_226_781_33).abs() < 1e-10);
    assert!(found["identity"].as_f64().unwrap().abs() < 1e-10);
    assert!(found["floors"]["softmax"].as_f64() > found["bayes_risk"].as_f64());
    assert_eq!(found["floors"]["bayes-softmax"], found["bayes_risk"]);
    assert!(ok(root.path(), &["bayes"]).contains("losses that 4 heads cannot pass"));
}

#[test]
fn the_optimum_lists_its_minima() {
    let root = tempfile::tempdir().unwrap();
    let search = ["optimum", "--theta", "flip:2", "--heads", "2", "--length", "5", "--starts", "4", "--attention"];
    let bayes = printed(root.path(), &[&search[..], &["bayes-softmax"]].concat());
    assert!((bayes["loss"].as_f64().unwrap() - bayes["bayes_risk"].as_f64().unwrap()).abs() < 1e-6);
    assert!(bayes["m"][0][0].as_f64().unwrap().abs() > 1.9 && bayes["b"].as_array().unwrap().len() == 2);
    let found = bayes["minima"].as_array().unwrap();
    assert_eq!(found.iter().map(|m| m["found"].as_u64().unwrap()).sum::<u64>(), 4);
    let softmax = printed(root.path(), &[&search[..], &["softmax"]].concat());
    assert!((softmax["loss"].as_f64().unwrap() - 0.608_548_36).abs() < 1e-6, "{}", softmax["loss"]);
    assert!(softmax["loss"].as_f64() > softmax["floor"].as_f64());
}

const DIAGRAM: &[&str] =
    &["phase", "--quantity", "bayes-risk", "--theta", "flip:1", "--x", "theta.nu=1:4:4", "--y", "length=log:3:1e9:3"];

#[test]
fn a_diagram_is_written_drawn_and_resumed() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("d");
    let document = printed(root.path(), &[DIAGRAM, &["--out", "d"]].concat());
    for file in ["result.json", "phase.png", "phase.svg"] {
        assert!(std::fs::metadata(folder.join(file)).unwrap().len() > 100, "{file}");
    }
    assert!(!folder.join("checkpoint.json").exists());
    let map = &document["maps"][0];
    let risk = |i: usize, j: usize| map["values"][j][i].as_f64().unwrap();
    assert_eq!((map["x"]["values"].as_array().unwrap().len(), map["values"].as_array().unwrap().len()), (4, 3));
    assert!(risk(3, 0) < risk(0, 0) && risk(0, 2) > risk(0, 0), "{map}");
    let one: Value = printed(root.path(), &["bayes", "--theta", "flip:2", "--length", "3", "--tolerance", "1e-10"]);
    assert!((risk(1, 0) - one["bayes_risk"].as_f64().unwrap()).abs() < 1e-10);
    assert!(map["boundaries"][0]["label"].as_str().unwrap().contains("2 ln L"));

    // Half of the cells are lost; what is there is kept, what is not comes back the same.
    let cells: Vec<Value> = (0..12)
        .map(|i| match i {
            0 => json!({"Ok": 0.123}),
            1..=5 => json!({"Ok": map["values"][i / 4][i % 4]}),
            _ => Value::Null,
        })
        .collect();
    let unfinished = root.path().join("u");
    std::fs::create_dir(&unfinished).unwrap();
    let saved = json!({
        "format": "headflow-cells", "version": env!("CARGO_PKG_VERSION"), "request": document["request"], "cells": cells,
    });
    std::fs::write(unfinished.join("checkpoint.json"), saved.to_string()).unwrap();
    let output = headflow(root.path(), &[DIAGRAM, &["--out", "u"]].concat());
    assert!(String::from_utf8_lossy(&output.stderr).contains("--resume"));
    let other = headflow(root.path(), &[DIAGRAM, &["--resume", "u", "--tolerance", "1e-6"]].concat());
    assert!(String::from_utf8_lossy(&other.stderr).contains("another request"));
    let resumed = printed(root.path(), &[DIAGRAM, &["--resume", "u"]].concat());
    let mut expected = map["values"].clone();
    expected[0][0] = json!(0.123);
    assert_eq!(resumed["maps"][0]["values"], expected);
}

#[test]
fn cells_that_fail_are_listed() {
    let root = tempfile::tempdir().unwrap();
    // So few steps that the longer flow does not arrive.
    let flows = [
        "phase",
        "--quantity",
        "flow-loss",
        "--x",
        "tau=0.001,400",
        "--y",
        "gamma=0.5,1",
        "--points",
        "64",
        "--scrambles",
        "1",
        "--max-steps",
        "3",
        "--out",
        "f",
    ];
    let output = headflow(root.path(), &flows);
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(error.contains("2 of 4 cells failed; the first at tau = 400"), "{error}");
    let result: Value =
        serde_json::from_str(&std::fs::read_to_string(root.path().join("f/result.json")).unwrap()).unwrap();
    assert_eq!(result["failed"].as_array().unwrap().len(), 2);
    assert!(result["maps"][0]["values"][0][0].is_number() && result["maps"][0]["values"][0][1].is_null());
}

/// Where every cell fails there is nothing to draw, and still one line.
#[test]
fn a_diagram_of_failures_is_one_line() {
    let root = tempfile::tempdir().unwrap();
    // Plateaus take at least 10 records; nothing but the flow finds that out.
    let words =
        "phase --quantity stages --records 5 --tau 1 --points 64 --x theta.nu=0,1 --y length=2,4 --json --out p";
    let output = headflow(root.path(), &words.split(' ').collect::<Vec<_>>());
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
    assert!(error.starts_with("headflow: 4 of 4 cells failed; the first at theta.nu = 0, length = 2: "), "{error}");
    assert!(error.contains("no finite value"), "{error}");
    let result = document(&String::from_utf8(output.stdout).unwrap());
    assert_eq!(result["failed"].as_array().unwrap().len(), 4);
    assert!(root.path().join("p/result.json").exists() && !root.path().join("p/phase.png").exists());
}

/// A figure that cannot be drawn leaves no folder for it.
#[test]
fn folders_of_figures_that_fail_go_again() {
    let root = tempfile::tempdir().unwrap();
    for figure in
        ["retrieval", "activations", "xsa-bias", "xsa-model", "escape", "spectrum", "pruning", "specialization"]
    {
        refused(root.path(), &["figure", figure, "--from", "none"], "none");
        refused(root.path(), &["figure", figure, "--from", "none", "--out", "a/b"], "none");
        assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0, "{figure}");
    }
}

#[test]
fn every_quantity_has_a_diagram() {
    let root = tempfile::tempdir().unwrap();
    let common = ["--x", "theta.scale=0.8,1.2", "--y", "length=4,6", "--heads", "2", "--theta", "flip:2"];
    let flows = ["--tau", "30", "--points", "256", "--scrambles", "1"];
    for quantity in ["optimal-loss", "regret", "flow-loss", "specialised-heads", "stages", "growth-rate"] {
        let more: &[&str] = match quantity {
            "optimal-loss" | "regret" => &["--starts", "2"],
            "growth-rate" => &flows[2..],
            _ => &flows,
        };
        let found =
            printed(root.path(), &[&["phase", "--quantity", quantity, "--out", quantity], &common[..], more].concat());
        let values = found["maps"][0]["values"].as_array().unwrap().clone();
        assert!(values.iter().flat_map(|row| row.as_array().unwrap()).all(Value::is_number), "{quantity}: {values:?}");
    }
}

#[test]
fn bad_input_is_refused_in_one_line() {
    let root = tempfile::tempdir().unwrap();
    let phase = |x: &'static str, y: &'static str| ["phase", "--x", x, "--y", y];
    let cases: Vec<(Vec<&str>, &str)> = vec![
        (phase("theta.nu=1:2:1", "length=3:5:3").to_vec(), "x: \"1:2:1\" is one point"),
        (phase("theta.nu=1:2:5", "length=9:5:3").to_vec(), "y: the range goes from 9 down to 5"),
        (phase("theta.nuu=1:2:5", "length=3:5:3").to_vec(), "did you mean \"theta.nu\"?"),
        (phase("lengt=3:5:3", "theta.nu=1:2:5").to_vec(), "did you mean \"length\"?"),
        (phase("length=3:5:3", "length=3:5:3").to_vec(), "give another parameter"),
        (phase("theta.nu[7]=1:2:5", "length=3:5:3").to_vec(), "entries, counted from 0"),
        (phase("length=1:5:3", "theta.nu=1:2:5").to_vec(), "at least 2 tokens"),
        (vec!["phase", "--y", "length=3:5:3"], "x: is missing"),
        (
            [&phase("theta.nu=1:2:3", "length=3:5:3")[..], &["--quantity", "optimal-los"]].concat(),
            "did you mean \"optimal-loss\"",
        ),
        (vec!["loss", "--m", "1,0", "--tolerance", "1e-20"], "tolerance: "),
        (vec!["loss", "--m", "1,0", "--tolerance", "1e-8", "--points", "64"], "points: belongs to evaluator qmc"),
        (vec!["loss", "--m", "1,0", "--evaluator", "quadratur"], "evaluator: "),
        (vec!["flow", "--evaluator", "quadrature"], "use --gamma 0"),
        (vec!["compare", "--evaluator", "quadrature"], "compare needs the noise"),
        (vec!["optimum", "--starts", "0"], "starts: must be from 1"),
        (vec!["flow", "--starts", "3"], "starts: flow does not read it (read by optimum, phase)"),
        (vec!["bayes", "--evaluator", "qmc"], "computed by quadrature"),
        (vec!["figure", "retrieval", "--theta", "flip:2"], "figure retrieval varies it"),
        (vec!["prune", "--most-removed", "4"], "of 4 heads at most 3"),
        (
            vec![
                "loss",
                "--attention",
                "bayes-softmax",
                "--m",
                "1,0;0,1;-1,0;0,-1",
                "--r",
                "1.5,0,-1,0;0,1.5,0,-1;-1,0,1.5,0;0,-1,0,1.5",
                "--tolerance",
                "1e-11",
            ],
            "cannot be met here: reached",
        ),
    ];
    for (arguments, expected) in cases {
        refused(root.path(), &arguments, expected);
        assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0, "{arguments:?} wrote something");
    }
}

/// Gradient flow by quadrature is that by quasi-Monte Carlo, to its errors.
#[test]
fn gradient_flow_by_quadrature() {
    let root = tempfile::tempdir().unwrap();
    let flow = ["flow", "--gamma", "0", "--heads", "2", "--theta", "flip:2", "--times", "0,20,40"];
    let exact = printed(root.path(), &[&flow[..], &["--evaluator", "quadrature", "--out", "q"]].concat());
    let sampled = printed(root.path(), &[&flow[..], &["--points", "4096", "--out", "s"]].concat());
    assert_eq!(exact["spec"]["tolerance"], 1e-8);
    for t in 0..3 {
        let route = |document: &Value, name: &str| document["routes"][0][name].clone();
        let at = |document: &Value| route(document, "m")[t][0][0].as_f64().unwrap();
        let error = sampled["routes"][0]["standard_error"]["m"][t][0][0].as_f64().unwrap();
        assert!(
            (at(&exact) - at(&sampled)).abs() <= 5.0 * error + 1e-6,
            "at record {t}: {} {} +- {error}",
            at(&exact),
            at(&sampled)
        );
    }
}
