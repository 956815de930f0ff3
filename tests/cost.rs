//! Work without bound, as a user meets it: refused in one line that names the field and what would be cheaper, at once,
//! with nothing left behind.

mod common;

use common::{ok, refused};

/// Refused for `field`, for what would be cheaper, and without a trace.
fn too_costly(arguments: &str, field: &str, advice: &str) {
    let root = tempfile::tempdir().unwrap();
    let words: Vec<&str> = arguments.split(' ').collect();
    refused(root.path(), &words, &format!("headflow: {field}: needs "));
    refused(root.path(), &words, ", above the limit of ");
    refused(root.path(), &words, advice);
    assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0, "{arguments} left something behind");
}

#[test]
fn points_are_bounded() {
    // 2^30 points of 6 tokens with 6 numbers: 1.5e11 bytes a scramble.
    too_costly("flow --points 1073741824 --scrambles 1", "points", "use fewer points");
    too_costly("flow --points 16384 --scrambles 65536", "scrambles", "--memory");
    too_costly("stability --length 100000000 --points 64", "length", "a shorter sequence");
    too_costly("stability --evaluator qmc --points 1024 --scrambles 65536 --length 50", "scrambles", "--memory");
    too_costly("loss --m 1,0;0,1 --evaluator qmc --points 67108864 --scrambles 64", "points", "--evaluator quadrature");
}

#[test]
fn records_are_bounded() {
    // A million overlaps at each of 101 times.
    too_costly("flow --heads 1024 --points 64", "heads", "record fewer times");
    too_costly("simulate --replicas 100000 --records 10000 --tau 1", "records", "record fewer times");
    too_costly("compare --initial random --replicas 1000 --records 10000 --points 64", "records", "fewer heads");
    too_costly("stages --engine overlap --replicas 100000 --records 10000", "records", "record fewer times");
}

#[test]
fn solvers_are_bounded() {
    // 300^2 variables have a matrix of 8e9 numbers.
    too_costly("flow --heads 300 --points 64 --times 0,1 --method bdf", "method", "--method tsit45");
}

#[test]
fn simulations_are_bounded() {
    too_costly("simulate --batch 1000000 --dimension 100000", "batch", "smaller dimension, batch or tau");
    too_costly("simulate --dimension 1000000000 --tau 1e-6", "dimension", "--engine overlap");
    too_costly("simulate --dimension 10000000 --replicas 100 --tau 1e-4 --records 2", "replicas", "fewer replicas");
    too_costly(
        "simulate --heads 10 --test-samples 100000000 --tau 1 --records 5001",
        "test_samples",
        "use fewer test samples",
    );
    too_costly("simulate --engine overlap --dimension 1000000000000 --tau 1000", "tau", "a smaller tau");
    too_costly("compare --engine overlap --dimensions 1000,1000000000000 --tau 1000", "tau", "a larger gamma");
}

#[test]
fn diagrams_sets_and_maps_are_bounded() {
    too_costly("phase --x theta.nu=0:1:10000 --y length=2:20000:10000", "x, y", "give fewer values");
    too_costly("prune --heads 200 --times 1 --points 64 --subsets 1000000", "subsets", "take fewer subsets");
    too_costly("xsa bias --lengths 16384 --sequences 1000", "lengths", "shorter or fewer sequences");
    // Cell by cell, before any.
    let root = tempfile::tempdir().unwrap();
    let words = "phase --quantity flow-loss --x theta.nu=1,2 --y points=64,1073741824 --gamma 0 --scrambles 1";
    refused(
        root.path(),
        &words.split(' ').collect::<Vec<_>>(),
        "at theta.nu = 1, points = 1073741824: points: needs 1.5e11 bytes",
    );
    assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0);
}

#[test]
fn more_memory_can_be_allowed_and_less() {
    let root = tempfile::tempdir().unwrap();
    let short = ["flow", "--points", "65536", "--scrambles", "2", "--times", "0", "--out", "f"];
    // 2^16 points of 36 numbers in single precision, twice: 18 MiB.
    refused(root.path(), &[&short[..], &["--memory", "0.01"]].concat(), "scrambles: needs 1.9e7 bytes");
    assert!(!root.path().join("f").exists());
    ok(root.path(), &[&short[..], &["--memory", "0.05"]].concat());
    for wrong in ["0", "-1", "nan", "inf", "1e300", "", "much"] {
        refused(root.path(), &["flow", "--memory", wrong], "memory: ");
    }
}
