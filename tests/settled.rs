//! Labels that do not depend on how long one looked, states at events, flows that go on until they have settled.

mod common;

use common::{headflow, ok, printed, refused};
use serde_json::{Value, json};

/// `bayes-softmax`: with a weak second feature the fourth head comes on late.
const LATE: &[&str] = &[
    "phase",
    "--quantity",
    "specialised-heads",
    "--x",
    "theta.nu[1]=0.9,1.5",
    "--y",
    "length=4,6",
    "--attention",
    "bayes-softmax",
    "--gamma",
    "0",
    "--points",
    "512",
];

/// Values and whether they had settled, by rows.
fn cells(map: &Value) -> Vec<(f64, bool)> {
    let flat = |name: &str| -> Vec<Value> {
        map[name].as_array().unwrap().iter().flat_map(|row| row.as_array().unwrap().clone()).collect()
    };
    let settled = flat("settled");
    let each = flat("values").into_iter().zip(settled);
    each.map(|(value, settled)| (value.as_f64().unwrap(), settled["settled"].as_bool().unwrap())).collect()
}

#[test]
fn labels_of_settled_cells_do_not_depend_on_tau() {
    let root = tempfile::tempdir().unwrap();
    let run = |name: &str, more: &[&str]| printed(root.path(), &[LATE, &["--out", name], more].concat());
    let times = [
        run("a", &["--tau", "120", "--records", "121"]),
        run("b", &["--tau", "3200", "--records", "1601"]),
        run("c", &["--until", "settled", "--tau", "20000"]),
    ];
    let all: Vec<Vec<(f64, bool)>> = times.iter().map(|document| cells(&document["maps"][0])).collect();
    let mut settled = 0;
    for earlier in 0..3 {
        for cell in (0..4).filter(|&cell| all[earlier][cell].1) {
            settled += 1;
            for later in &all[earlier + 1..] {
                assert_eq!(later[cell], all[earlier][cell], "cell {cell}");
            }
        }
    }
    assert!(settled >= 3, "{all:?}");
    // The label moved somewhere, and there the early cell says that it had not settled.
    let moved: Vec<usize> = (0..4).filter(|&cell| all[0][cell].0 != all[2][cell].0).collect();
    assert!(!moved.is_empty() && moved.iter().all(|&cell| !all[0][cell].1), "{all:?}");
    // Those cells are listed, drawn and told.
    for (document, cells) in times.iter().zip(&all) {
        let listed = document["unsettled"].as_array().unwrap();
        assert_eq!(listed.len(), cells.iter().filter(|cell| !cell.1).count());
        assert_eq!(document["maps"][0]["unsettled"].as_array().unwrap().len(), listed.len());
        for entry in listed {
            let at = 2 * entry["row"].as_u64().unwrap() + entry["column"].as_u64().unwrap();
            assert!(!cells[at as usize].1 && entry["settled"]["drift"].is_number());
        }
    }
    let svg = std::fs::read_to_string(root.path().join("a/phase.svg")).unwrap();
    assert!(svg.contains("not settled"));
    let text = ok(root.path(), &[LATE, &["--tau", "120", "--records", "121", "--out", "d"]].concat());
    assert!(text.contains("of 4 cells had not settled (hatched); use --until settled, or a larger --tau"), "{text}");
}

/// Cells that an earlier version saved without saying whether their flow had settled are computed again.
#[test]
fn saved_cells_say_whether_they_had_settled() {
    let root = tempfile::tempdir().unwrap();
    let flows = [LATE, &["--tau", "30", "--records", "61"]].concat();
    let whole = printed(root.path(), &[&flows[..], &["--out", "whole"]].concat());
    std::fs::create_dir(root.path().join("u")).unwrap();
    let of = |i: usize| json!({"value": 7.0, "settled": whole["maps"][0]["settled"][i / 2][i % 2]});
    let saved = json!({
        "format": "headflow-cells", "version": env!("CARGO_PKG_VERSION"), "request": whole["request"],
        "cells": [{"Ok": 7.0}, {"Ok": of(1)}, null, null],
    });
    std::fs::write(root.path().join("u/checkpoint.json"), saved.to_string()).unwrap();
    let resumed = printed(root.path(), &[&flows[..], &["--resume", "u"]].concat());
    let mut expected = whole["maps"][0].clone();
    expected["values"][0][1] = json!(7.0);
    assert_eq!(resumed["maps"][0], expected);
}

#[test]
fn a_flow_until_settled_ends_where_it_has_or_says_that_it_has_not() {
    let root = tempfile::tempdir().unwrap();
    let flow = ["flow", "--heads", "2", "--theta", "flip:2", "--gamma", "0", "--evaluator", "quadrature"];
    let until = [&flow[..], &["--until", "settled"]].concat();
    let document = printed(root.path(), &[&until[..], &["--out", "a"]].concat());
    assert_eq!(document["stop"]["reason"], "settled");
    assert_eq!(document["settled"]["settled"], true);
    let times: Vec<f64> =
        document["routes"][0]["times"].as_array().unwrap().iter().map(|t| t.as_f64().unwrap()).collect();
    assert_eq!(document["stop"]["time"].as_f64(), times.last().copied());
    assert!(times.is_sorted_by(|a, b| a < b) && times.contains(&400.0));
    // Records are as far apart, relative to the time, as at the end of the even ones, or closer.
    assert!(times.windows(2).filter(|t| t[0] >= 400.0).all(|t| t[1] / t[0] <= 1.0100001));

    // Heads that start equal stay equal: a saddle, for ever.
    let (m0, row) = ("0.1,0;0.1,0;0.1,0;0.1,0", "0.01,0.01,0.01,0.01");
    let r0 = [row; 4].join(";");
    let equal = ["flow", "--gamma", "0", "--points", "1024", "--scrambles", "1", "--until", "settled", "--tau", "4000"];
    let equal = [&equal[..], &["--m0", m0, "--r0", &r0, "--out", "b"]].concat();
    let output = headflow(root.path(), &equal);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.trim_end().lines().count() == 1 && error.contains("has not settled by tau = 4000"), "{error}");
    let kept: Value =
        serde_json::from_str(&std::fs::read_to_string(root.path().join("b/result.json")).unwrap()).unwrap();
    assert_eq!((&kept["stop"]["reason"], &kept["settled"]["settled"]), (&json!("not-settled"), &json!(false)));
    assert!(kept["stop"]["growth_rate"].as_f64().unwrap() > 0.01);

    // Without the word nothing else changes: the flow ends at tau, and says what it is.
    let text = ok(root.path(), &[&flow[..], &["--tau", "10", "--out", "c"]].concat());
    assert!(
        text.contains("not settled at tau = 10") && text.contains("use --until settled, or a larger --tau"),
        "{text}"
    );

    for (arguments, expected) in [
        (vec!["flow", "--until", "rest"], "until: "),
        (vec!["flow", "--until", "settled", "--times", "1,2"], "give tau, the latest, instead of times"),
        (vec!["compare", "--until", "settled"], "does not read it"),
        (vec!["loss", "--m", "1,0", "--until", "settled"], "does not read it"),
        (vec!["stages", "--engine", "overlap", "--until", "settled"], "does not read it"),
        (vec!["prune", "--m", "1,0;0,1;1,0;0,1", "--until", "settled"], "does not read it"),
        (vec!["phase", "--x", "length=3,4", "--y", "theta.scale=1,2", "--until", "settled"], "does not read it"),
    ] {
        refused(root.path(), &arguments, expected);
    }
}

#[test]
fn pruning_says_which_systems_had_settled() {
    let root = tempfile::tempdir().unwrap();
    let prune = ["prune", "--heads", "2", "--theta", "flip:2", "--gamma", "0", "--points", "512"];
    let document = printed(root.path(), &[&prune[..], &["--tau", "5", "--out", "a"]].concat());
    assert_eq!(document["pruning"]["systems"][0]["settled"]["settled"], false);
    let text = ok(root.path(), &[&prune[..], &["--until", "settled", "--out", "b"]].concat());
    assert!(!text.contains("not settled"), "{text}");
}

/// The loss of the last record is the one that was asked for, at the time that is told.
#[test]
fn the_state_at_an_event_is_the_last_record() {
    let root = tempfile::tempdir().unwrap();
    let flow = ["flow", "--points", "1024", "--scrambles", "3"];
    let document = printed(root.path(), &[&flow[..], &["--stop-loss", "0.7", "--out", "a"]].concat());
    let route = &document["routes"][0];
    let last = |name: &str| route[name].as_array().unwrap().last().unwrap().clone();
    assert_eq!(last("times"), document["stop"]["time"]);
    assert!((last("loss").as_f64().unwrap() - 0.7).abs() < 1e-6, "{}", last("loss"));
    let document = printed(root.path(), &[&flow[..], &["--stop-alignment", "1,0,-1.5", "--out", "b"]].concat());
    assert_eq!(document["stop"]["reason"], "alignment-crossed");
    let m = document["routes"][0]["m"].as_array().unwrap().last().unwrap()[1][0].as_f64().unwrap();
    assert!((m + 1.5).abs() < 1e-6, "{m}");
    let output =
        headflow(root.path(), &["flow", "--gamma", "1e300", "--points", "256", "--scrambles", "1", "--out", "c"]);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2));
    assert!(error.contains("makes no progress at tau = 0") && error.contains("lower --gamma"), "{error}");
}
