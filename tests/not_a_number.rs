//! The program says what it could not compute: no number that is none, no convergence that was not reached.

mod common;

use common::{headflow, ok, printed, refused};

/// A point that the noise of SGD drives is stationary for no evaluator: one refuses the point, one the noise.
#[test]
fn stability_at_a_point_needs_the_noise_that_it_is_asked_for() {
    let root = tempfile::tempdir().unwrap();
    let at = |evaluator: &'static str, gamma: &'static str, r: &'static str| {
        let mut all = vec!["stability", "--evaluator", evaluator, "--gamma", gamma, "--key-scale", "0"];
        all.extend(["--theta", "flip:2", "--length", "5", "--heads", "2", "--m", "0;0", "--r", r]);
        all
    };
    let drifting = "0.5,0;0,0.5";
    refused(root.path(), &at("quadrature", "1", drifting), "evaluator: quadrature gives no noise of SGD");
    refused(root.path(), &at("quadrature", "0", drifting), "not stationary: d");
    refused(root.path(), &at("qmc", "1", drifting), "not stationary: d");
    refused(root.path(), &at("quadrature", "1", "0,0;0,0"), "evaluator: quadrature gives no noise of SGD");
    assert!(ok(root.path(), &at("quadrature", "0", "0,0;0,0")).contains("specialising along s1"));
    for at in ["unspecialised", "plateaus"] {
        refused(root.path(), &["stability", "--at", at, "--evaluator", "quadrature"], "gives no noise of SGD");
    }
}

/// Four heads on three flips: whether keys gain outside the spikes asks for rank 4, where bayes-softmax samples, for no
/// more than 4096 tokens. Nothing is printed, and the line says what to do; a shorter length has an answer.
#[test]
fn an_optimum_that_cannot_be_looked_at_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let search = |length: &'static str| {
        ["optimum", "--attention", "bayes-softmax", "--theta", "flip:1,1,1", "--heads", "4", "--length", length]
            .into_iter()
            .chain(["--tolerance", "1e-3", "--starts", "1"])
            .collect::<Vec<_>>()
    };
    refused(root.path(), &search("5000"), "optimum: whether keys outside the spikes lower the loss");
    let short = printed(root.path(), &search("20"));
    assert!(short["loss"].as_f64().unwrap() < 0.95 && short["outside"].is_number());
    let note = short["note"].as_str().unwrap();
    assert!(!note.contains("inf") && !note.contains("NaN"), "{note}");
}

/// Losses that are no numbers are refused wherever they would come out.
#[test]
fn losses_beyond_the_quadrature_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let far = ["--evaluator", "quadrature", "--theta", "flip:2", "--m", "1e5;-1e5"];
    refused(root.path(), &[&["loss"][..], &far].concat(), "r: needs at least ");
    let output = headflow(root.path(), &[&["prune"][..], &["--theta", "flip:2", "--m", "1e5;-1e5"]].concat());
    assert_eq!(output.status.code(), Some(2), "{}", String::from_utf8_lossy(&output.stdout));
}
