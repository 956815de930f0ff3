//! What is given counts, or is refused: fields and flags that a command does not read, axes without effect, counts,
//! repeated fields, and documents that are read back.

mod common;

use std::path::Path;

use common::{document, headflow, ok, printed, refused};
use headflow::phase::{Axis, Diagram, Quantity};
use headflow::spec::{FIELDS, Purpose, Reader, Spec};
use serde_json::{Map, Value, json};

fn map(value: Value) -> Map<String, Value> {
    value.as_object().unwrap().clone()
}

/// What is refused, in full: the field, the readers, what to do.
#[test]
fn what_is_not_read_is_refused_with_its_readers() {
    let root = tempfile::tempdir().unwrap();
    let at = root.path();
    std::fs::write(at.join("many.json"), r#"{"length": 6, "replicas": 8, "m": [[1, 2]], "on": 0.5}"#).unwrap();
    let phase = ["phase", "--quantity", "bayes-risk", "--theta", "flip:1", "--x", "theta.nu=1,2", "--y", "length=3,4"];
    let risk = |more: &[&'static str]| [&phase[..], more].concat();
    let cases: Vec<(Vec<&str>, &str)> = vec![
        (vec!["flow", "--m", "1;2"], "m: flow does not read it (read by loss, stability, prune); leave it out"),
        (vec!["flow", "--starts", "3"], "starts: flow does not read it (read by optimum, phase); leave it out"),
        (
            vec!["simulate", "--points", "64"],
            "points: simulate does not read it (read by flow, loss, compare, stability, stages, optimum, prune, phase); \
             leave it out",
        ),
        // A default is given all the same; one line for all of them.
        (
            vec!["flow", "--spec", "many.json"],
            "m, on, replicas: flow does not read them (m: read by loss, stability, prune; on: read by stability, \
             stages, phase; replicas: read by simulate, compare, stages, prune); leave them out",
        ),
        // What is impossible is impossible everywhere.
        (vec!["flow", "--replicas", "0"], "replicas: must be from 1 to 100000, got 0"),
        (vec!["flow", "--subsets", "0"], "subsets: must be from 1 to 1000000, got 0"),
        (vec!["simulate", "--points", "3"], "points: 3 is not a power of two from 64 on"),
        (vec!["bayes", "--max-steps", "0"], "max_steps: must be at least 1"),
        (vec!["bayes", "--tau", "-1"], "tau: the last time must be positive and finite, got -1"),
        (vec!["bayes", "--dimensions", "0,5"], "dimensions: must be from 1 to"),
        (vec!["loss", "--m", "1,0", "--test-samples", "1"], "test_samples: must be from 2"),
        (vec!["loss", "--m", "1,0", "--prune-tolerances", "-1"], "prune_tolerances: must be finite and not negative"),
        (vec!["prune", "--prune-tolerances", "1e301"], "prune_tolerances: must be at most 1e300"),
        (vec!["stability", "--records", "1"], "records: must be from 2"),
        (vec!["compare", "--stationary-tolerance", "0"], "stationary_tolerance: must be positive and finite"),
        // What is chosen decides what is read.
        (
            vec!["flow", "--gamma", "0", "--evaluator", "quadrature", "--seed", "2"],
            "seed: flow does not read it (read with evaluator qmc); leave it out",
        ),
        (
            vec!["flow", "--gamma", "0", "--batch", "2"],
            "batch: flow does not read it (read with gamma above 0); leave it out",
        ),
        (
            vec!["flow", "--r0", "1,0;0,1", "--m0", "0.1,0;0,0.1", "--key-scale", "2"],
            "key_scale: flow does not read it (read without r0); leave it out",
        ),
        (
            vec!["stages", "--engine", "overlap", "--points", "64", "--method", "bdf"],
            "points, method: stages does not read them (points: read without an engine, with evaluator qmc; method: read \
             without an engine); leave them out",
        ),
        (vec!["bayes", "--bias", "none"], "bias: bayes does not read it (read by flow, loss, simulate, compare,"),
        (
            vec!["bayes", "--attention", "softmax1"],
            "attention: bayes does not read it (read with aggregation); leave it out",
        ),
        (
            vec!["stages", "--engine", "direct", "--tolerance", "1e-6"],
            "tolerance: stages does not read it (read without an engine, with evaluator quadrature); leave it out",
        ),
        (vec!["stages", "--replicas", "3"], "replicas: stages does not read it (read with an engine); leave it out"),
        (
            vec!["prune", "--replicas", "3"],
            "replicas: prune does not read it (read with an engine or initial random); leave it out",
        ),
        (
            vec!["prune", "--m", "1,0;0,1", "--gamma", "0.5"],
            "gamma: prune does not read it (read without a point m); leave it out",
        ),
        (vec!["prune", "--scrambles", "2"], "scrambles: prune uses one set of points: leave it out, or give 1"),
        (vec!["stability", "--tau", "5"], "tau: stability does not read it (read at plateaus); leave it out"),
        (
            vec!["stability", "--r", "1,0;0,1", "--heads", "2"],
            "r: stability does not read it (read at point); leave it out",
        ),
        (
            risk(&["--gamma", "0.5"]),
            "gamma: phase --quantity bayes-risk does not read it (read by flow, simulate, compare, stability, stages, \
             prune, phase --quantity flow-loss, phase --quantity specialised-heads, phase --quantity stages); leave it out",
        ),
        (risk(&["--length", "5"]), "length: the axis y sets it in every cell; leave it out"),
        // Figures.
        (
            vec!["figure", "retrieval", "--theta", "flip:1", "--length", "5"],
            "length, theta: figure retrieval varies them, or needs its own; leave them out",
        ),
        (vec!["figure", "stages", "--tolerance", "1e-6"], "tolerance: figure stages varies it, or needs its own"),
        (vec!["figure", "escape", "--records", "11"], "records: figure escape varies it, or needs its own"),
        (vec!["figure", "spectrum", "--scrambles", "2"], "scrambles: figure spectrum varies it, or needs its own"),
        (vec!["figure", "hierarchy", "--subsets", "2"], "subsets: figure hierarchy does not read it (read by prune)"),
        (vec!["figure", "comparison", "--length", "6"], "length: has no effect on figure comparison; leave it out"),
        // Flags of the run.
        (vec!["figure", "spectrum", "--resume", "nowhere"], "resume: figure spectrum cannot be resumed"),
        (vec!["figure", "comparison", "--resume", "nowhere"], "resume: figure comparison cannot be resumed"),
        (
            vec!["figure", "retrieval", "--from", "nowhere", "--heads", "3"],
            "heads: has no effect on results that exist",
        ),
        (vec!["figure", "retrieval", "--from", "a", "--resume", "b"], "resume: has no use when results that exist"),
        (vec!["figure", "escape", "--from", "nowhere", "--print-spec"], "print-spec: has no use when results"),
        (vec!["stages", "--from", "nowhere", "--force"], "force: has no use when results that exist"),
        (vec!["figure", "xsa-bias", "--print-spec"], "print-spec: figure xsa-bias has no spec"),
        (vec!["simulate", "--force"], "force: replaces the result in the folder of --out: name it"),
        (vec!["loss", "--m", "1,0", "--force"], "force: replaces the result in the folder of --out: name it"),
        (vec!["simulate", "--resume", "nowhere", "--force"], "force: a resumed run goes on in its own folder"),
        (vec!["phase", "--resume", "nowhere", "--out", "x"], "out: a resumed run goes on in its own folder"),
        // Two ways to say one thing.
        (vec!["simulate", "--dimension", "50", "--dimensions", "60"], "dimension: give either dimension or dimensions"),
        (vec!["compare", "--dimensions", "500,500"], "dimensions: 500 is given twice"),
        (vec!["flow", "--theta", "flip:1:nu=2"], "theta: \"flip:1:nu=2\" is not a distribution"),
        (vec!["stability", "--attention", "softmax1", "--b0", "1"], "b0: has length 1 but there are 4 heads"),
    ];
    for (arguments, expected) in cases {
        refused(at, &arguments, expected);
    }
    assert_eq!(std::fs::read_dir(at).unwrap().count(), 1, "a refused run leaves nothing");
}

/// A value other than the default and than those of the specs below.
fn other(field: &str) -> Value {
    match field {
        "length" => json!(4),
        "heads" => json!(3),
        "theta" => json!({"kind": "flip", "nu": [2.2, 1.1]}),
        "attention" => json!("softmax"),
        "bias" => json!("half-norm"),
        "aggregation" => json!("mean"),
        "gamma" => json!(0.5),
        "batch" => json!(2),
        "initial" => json!("random"),
        "m0" => json!([[0.2, 0.1], [-0.1, 0.05]]),
        "r0" => json!([[1.0, 0.1], [0.1, 1.0]]),
        "b0" => json!([0.1, -0.2]),
        "key_scale" => json!(0.4),
        "tau" => json!(2.5),
        "records" => json!(4),
        "times" => json!([0, 1]),
        "stop_loss" => json!(0.8),
        "stop_alignment" => json!([0, 0, 0.2]),
        "m" => json!([[1.0, 0.5], [-0.5, 1.0]]),
        "r" => json!([[5.0, 0.0], [0.0, 5.0]]),
        "b" => json!([0.3, -0.3]),
        "at" => json!("plateaus"),
        "stationary_tolerance" => json!(1000),
        "until" => json!("settled"),
        "on" => json!(0.4),
        "motion" => json!(0.2),
        "contrast" => json!(3.0),
        "subsets" => json!(1),
        "most_removed" => json!(0),
        "prune_tolerances" => json!([0.2]),
        "evaluator" => json!("quadrature"),
        "tolerance" => json!(1e-4),
        "points" => json!(128),
        "scrambles" => json!(3),
        "method" => json!("bdf"),
        "relative_tolerance" => json!(1e-3),
        "absolute_tolerance" => json!(1e-3),
        "max_steps" => json!(1),
        "starts" => json!(3),
        "engine" => json!("overlap"),
        "dimension" => json!(25),
        "dimensions" => json!([26]),
        "replicas" => json!(3),
        "test_samples" => json!(32),
        "seed" => json!(2),
        other => panic!("no other value for {other}"),
    }
}

const TASK: &str = "length heads theta attention bias aggregation";
const FLOW: &str = "gamma batch initial m0 r0 b0 key_scale tau records times evaluator points scrambles seed method \
                    relative_tolerance absolute_tolerance max_steps";
/// Of flows that may settle.
const SETTLING: &str = "until stationary_tolerance";
const SIMULATION: &str =
    "gamma batch initial m0 r0 b0 key_scale tau records times engine dimension dimensions replicas test_samples seed";

/// Commands with a spec each, and all the fields that they read with it.
fn readings() -> Vec<(Purpose, Value, String)> {
    let task = json!({"length": 3, "theta": {"kind": "flip", "nu": [2, 1]}, "heads": 2, "attention": "softmax1"});
    let with = |more: Value| {
        let mut all = map(task.clone());
        all.extend(map(more));
        Value::Object(all)
    };
    let times = json!({"tau": 2, "records": 3, "points": 64});
    let point = json!({"m": [[1.5, 0.2], [-1.2, 0.1]]});
    let phase = Purpose::Phase;
    let read = |groups: &[&str]| groups.join(" ");
    let without = |groups: &str, gone: &str| -> String {
        groups
            .split_whitespace()
            .filter(|name| !gone.split_whitespace().any(|g| g == *name))
            .collect::<Vec<_>>()
            .join(" ")
    };
    vec![
        (Purpose::Flow, with(times.clone()), read(&[TASK, FLOW, SETTLING, "stop_loss stop_alignment"])),
        (
            Purpose::Flow,
            with(json!({"gamma": 0, "evaluator": "quadrature", "tau": 2, "records": 3})),
            read(&[
                TASK,
                &without(FLOW, "batch points scrambles seed"),
                SETTLING,
                "tolerance stop_loss stop_alignment",
            ]),
        ),
        (
            Purpose::Loss,
            with(json!({"m": point["m"], "evaluator": "quadrature"})),
            read(&[TASK, "m r b evaluator tolerance"]),
        ),
        (
            Purpose::Loss,
            with(json!({"m": point["m"], "evaluator": "qmc", "points": 64})),
            read(&[TASK, "m r b evaluator points scrambles seed"]),
        ),
        (
            Purpose::Simulate,
            with(json!({"tau": 1, "records": 3, "dimension": 20, "replicas": 2, "test_samples": 16})),
            read(&[TASK, SIMULATION]),
        ),
        (
            Purpose::Simulate,
            with(
                json!({"initial": "random", "tau": 1, "records": 3, "dimension": 20, "replicas": 2, "test_samples": 16}),
            ),
            read(&[TASK, &without(SIMULATION, "m0 r0")]),
        ),
        (
            Purpose::Compare,
            with(times.clone()),
            read(&[TASK, FLOW, "engine dimension dimensions replicas test_samples"]),
        ),
        (
            Purpose::Stability,
            json!({"length": 3, "theta": {"kind": "flip", "nu": [3, 2]}, "heads": 2, "attention": "bayes-softmax",
                   "points": 256, "scrambles": 2}),
            read(&[TASK, "gamma batch at m b0 key_scale evaluator points scrambles dimension dimensions seed"]),
        ),
        (
            Purpose::Stability,
            with(json!({"m": point["m"], "points": 64})),
            read(&[TASK, "gamma batch at m r b stationary_tolerance evaluator points scrambles seed"]),
        ),
        (
            Purpose::Stability,
            with(json!({"at": "plateaus", "points": 64, "tau": 2, "records": 9})),
            read(&[TASK, FLOW, "at on motion contrast"]),
        ),
        (Purpose::Stages, with(times.clone()), read(&[TASK, FLOW, SETTLING, "on motion contrast engine"])),
        (
            Purpose::Stages,
            with(json!({"engine": "direct", "dimension": 20, "tau": 1, "records": 9})),
            read(&[TASK, SIMULATION, "on motion contrast"]),
        ),
        (
            Purpose::Bayes,
            with(json!({"attention": "bayes-softmax", "aggregation": "mean", "evaluator": "quadrature"})),
            read(&[&without(TASK, "bias"), "evaluator tolerance"]),
        ),
        (
            Purpose::Optimum,
            with(json!({"starts": 2, "tolerance": 1e-3, "evaluator": "quadrature"})),
            read(&[TASK, "evaluator tolerance starts seed"]),
        ),
        (
            Purpose::Prune,
            with(times.clone()),
            read(&[TASK, FLOW, SETTLING, "tolerance m r b subsets most_removed prune_tolerances engine"]),
        ),
        (
            Purpose::Prune,
            with(json!({"initial": "random", "tau": 2, "records": 3, "points": 64, "dimension": 20, "replicas": 2})),
            read(&[
                TASK,
                &without(FLOW, "m0 r0"),
                SETTLING,
                "tolerance m r b subsets most_removed prune_tolerances engine dimension dimensions replicas",
            ]),
        ),
        (
            Purpose::Prune,
            with(
                json!({"engine": "direct", "tau": 1, "records": 3, "dimension": 20, "replicas": 2, "test_samples": 16}),
            ),
            read(&[TASK, SIMULATION, "tolerance m r b subsets most_removed prune_tolerances"]),
        ),
        (
            Purpose::Prune,
            with(point.clone()),
            read(&[TASK, "m r b tolerance subsets most_removed prune_tolerances seed"]),
        ),
        (phase(Quantity::BayesRisk), json!({"length": 3}), "length theta tolerance".into()),
        (
            phase(Quantity::OptimalLoss),
            with(json!({"evaluator": "quadrature"})),
            read(&[TASK, "evaluator tolerance starts seed"]),
        ),
        (
            phase(Quantity::Regret),
            with(json!({"evaluator": "quadrature"})),
            read(&[TASK, "evaluator tolerance starts seed"]),
        ),
        (
            phase(Quantity::FlowLoss),
            with(json!({"tau": 2, "points": 64})),
            read(&[TASK, &without(FLOW, "records"), SETTLING, "stop_loss stop_alignment"]),
        ),
        (phase(Quantity::SpecialisedHeads), with(times.clone()), read(&[TASK, FLOW, SETTLING, "on motion contrast"])),
        (phase(Quantity::Stages), with(times), read(&[TASK, FLOW, SETTLING, "on motion contrast"])),
        (phase(Quantity::GrowthRate), task.clone(), read(&[TASK, "evaluator tolerance points scrambles seed"])),
    ]
}

/// A spec with another value of one field, and without what would contradict it.
fn changed(base: &Value, field: &str) -> Map<String, Value> {
    let mut fields = map(base.clone());
    let gone: &[&str] = match field {
        "times" => &["tau", "records"],
        "dimension" => &["dimensions"],
        "dimensions" => &["dimension"],
        "evaluator" => &["tolerance"],
        "engine" => &["points"],
        _ => &[],
    };
    gone.iter().for_each(|name| {
        fields.remove(*name);
    });
    let value = match (field, &base[field]) {
        ("evaluator", Value::String(name)) if name == "quadrature" => json!("qmc"),
        ("aggregation", Value::String(name)) if name == "mean" => json!("sum"),
        ("initial", Value::String(name)) if name == "random" => json!("given"),
        ("at", Value::String(name)) if name == "plateaus" => json!("point"),
        _ => other(field),
    };
    fields.insert(field.into(), value);
    fields
}

/// Over all fields and all commands: what is said to be read is taken up in the completed spec, or refused for its value;
/// what is not said to be read is refused as such.
#[test]
fn every_field_is_read_or_refused() {
    let mut read_somewhere: Vec<(Purpose, &str)> = Vec::new();
    for (purpose, base, reads) in readings() {
        let reads: Vec<&str> = reads.split_whitespace().collect();
        let plain = Spec::completed(&map(base.clone()), purpose).unwrap_or_else(|e| panic!("{purpose}: {e}"));
        // A completed spec is its own, and so is what is left of it in a document.
        let document = plain.document().unwrap();
        assert_eq!(Spec::completed(&document, purpose).unwrap(), plain, "{purpose} {base}");
        assert_eq!(plain.clone().complete(purpose).unwrap(), plain, "{purpose} {base}");
        for field in FIELDS {
            let fields = changed(&base, field.name);
            let found = Spec::completed(&fields, purpose);
            let case = format!("{purpose} with {}", Value::Object(fields));
            if !reads.contains(&field.name) {
                let message = found.expect_err(&case).to_string();
                let (names, why) = message.split_once(": ").unwrap();
                // Of two fields that exclude each other, either is to blame.
                let excluded = [
                    "belongs to evaluator",
                    "random keys have no given",
                    "point of its own",
                    "is not trained",
                    "one set of points",
                ];
                let blamed = why.contains("does not read") && names.split(", ").any(|name| name == field.name);
                assert!(blamed || excluded.iter().any(|words| why.contains(words)), "{case}: {message}");
                continue;
            }
            read_somewhere.push((purpose, field.name));
            match found {
                Ok(spec) => assert_ne!(spec.document().unwrap(), document, "{case}"),
                // Read, and its value refused; the field to blame may be the one it does not go with.
                Err(error) => assert!(!error.to_string().contains("does not read it"), "{case}: {error}"),
            }
        }
    }
    // Nothing is said to be readable that is read with none of these specs.
    for purpose in Purpose::ALL {
        for field in FIELDS.iter().filter(|field| Reader::from(purpose).may_read(field)) {
            let exceptions: &[&str] = match purpose {
                // With --evaluator quadrature, or qmc, instead.
                Purpose::Compare | Purpose::Stages | Purpose::Stability => &["tolerance"],
                Purpose::Optimum => &["points", "scrambles"],
                Purpose::Phase(_) => &["points", "scrambles", "tolerance"],
                _ => &[],
            };
            assert!(
                read_somewhere.contains(&(purpose, field.name)) || exceptions.contains(&field.name),
                "{purpose} {}",
                field.name
            );
        }
    }
}

/// What a run found, without what it was asked and when.
fn findings(folder: &Path, command: &str, fields: &Map<String, Value>) -> Result<Value, String> {
    std::fs::write(folder.join("spec.json"), Value::Object(fields.clone()).to_string()).unwrap();
    let output = headflow(folder, &[command, "--spec", "spec.json", "--json", "--out", "out", "--force"]);
    if output.stdout.is_empty() {
        return Err(String::from_utf8(output.stderr).unwrap());
    }
    let mut result = document(&String::from_utf8(output.stdout).unwrap());
    for name in ["spec", "seed", "started_unix_seconds", "wall_time_seconds"] {
        result.as_object_mut().unwrap().remove(name);
    }
    Ok(result)
}

/// The table is true: for the commands that are quick, each field that is read changes what is found.
#[test]
fn what_is_read_has_an_effect() {
    let root = tempfile::tempdir().unwrap();
    let mut looks = 0;
    for (purpose, base, reads) in readings() {
        // Fields with a single possible value here, or whose other value goes with other fields.
        let left: &[&str] = match purpose {
            Purpose::Flow if base["gamma"] == 0 => &["initial", "gamma", "evaluator"],
            Purpose::Flow => &["initial", "evaluator"],
            Purpose::Loss => &["heads", "evaluator"],
            Purpose::Simulate if base["initial"] == "random" => &["initial", "attention", "b0"],
            Purpose::Simulate => &["attention", "b0"],
            Purpose::Stability if base.get("at").is_none() && base.get("m").is_none() => {
                &["at", "m", "evaluator", "attention"]
            }
            Purpose::Bayes => &["evaluator"],
            Purpose::Optimum => &["evaluator", "seed"],
            Purpose::Prune if base.get("m").is_some() => &["heads", "seed"],
            _ => continue,
        };
        let plain = findings(root.path(), purpose.command(), &map(base.clone())).unwrap();
        for field in reads.split_whitespace().filter(|field| !left.contains(field)) {
            let fields = changed(&base, field);
            let found = findings(root.path(), purpose.command(), &fields)
                .unwrap_or_else(|e| panic!("{purpose} {}: {e}", Value::Object(fields.clone())));
            assert_ne!(found, plain, "{purpose}: {field} has no effect in {}", Value::Object(fields));
            looks += 1;
        }
    }
    assert!(looks > 100, "{looks}");
}

/// `--print-spec` of every command and figure, and the spec of a result, are read back by it and mean the same.
#[test]
fn what_is_written_is_read_back() {
    let root = tempfile::tempdir().unwrap();
    let at = root.path();
    let axes = ["--x", "theta.nu[0]=1,2", "--y", "heads=1,2"];
    let more = ["--x", "gamma=0.5,1", "--y", "key-scale=0.1,0.2", "--quantity", "stages"];
    let mut cases: Vec<Vec<&str>> = vec![
        vec!["loss", "--m", "1,0;0,1"],
        vec!["prune", "--m", "1,0;0,1"],
        vec!["prune", "--engine", "overlap"],
        vec!["stages", "--engine", "direct"],
        vec!["simulate", "--initial", "random"],
        vec!["stability", "--at", "plateaus", "--gamma", "0", "--evaluator", "quadrature"],
        vec!["flow", "--times", "0,1,3"],
        [&["phase"][..], &axes].concat(),
        [&["phase"][..], &more].concat(),
    ];
    cases.extend(["flow", "simulate", "compare", "stability", "stages", "bayes", "optimum", "prune"].map(|c| vec![c]));
    let figures = ["escape", "hierarchy", "spectrum", "pruning", "retrieval", "heads", "specialised", "stages"];
    cases.extend(figures.map(|figure| vec!["figure", figure]));
    cases.extend(["activations", "specialization"].map(|figure| vec!["figure", figure]));
    for case in cases {
        let first = ok(at, &[&case[..], &["--print-spec"]].concat());
        std::fs::write(at.join("spec.json"), &first).unwrap();
        let command: Vec<&str> = match case[0] {
            "phase" => case.clone(),
            "figure" => case[..2].to_vec(),
            command => vec![command],
        };
        assert_eq!(ok(at, &[&command[..], &["--spec", "spec.json", "--print-spec"]].concat()), first, "{case:?}");
    }
    // What all cells have in common, and no more.
    let common = document(&ok(at, &[&["phase", "--theta", "flip:1,2"][..], &axes, &["--print-spec"]].concat()));
    assert_eq!(common["theta"], json!({"kind": "flip", "nu": [1, 2]}));
    assert!(common.get("heads").is_none() && common["starts"] == 6);
}

/// The size of the keys gives the overlaps, so as a flag it replaces those of a file.
#[test]
fn a_flag_replaces_what_followed_from_its_field() {
    let root = tempfile::tempdir().unwrap();
    std::fs::write(root.path().join("spec.json"), ok(root.path(), &["flow", "--print-spec"])).unwrap();
    let over = |flags: &[&str]| ok(root.path(), &[&["flow", "--print-spec"], flags].concat());
    assert_eq!(over(&["--spec", "spec.json", "--key-scale", "0.1"]), over(&["--key-scale", "0.1"]));
    // Of prune, the tolerance goes with either evaluator.
    std::fs::write(root.path().join("prune.json"), r#"{"tolerance": 1e-3}"#).unwrap();
    let spec = document(&ok(root.path(), &["prune", "--spec", "prune.json", "--points", "64", "--print-spec"]));
    assert_eq!((&spec["tolerance"], &spec["points"]), (&json!(1e-3), &json!(64)));
    let spec = document(&ok(root.path(), &["figure", "pruning", "--tolerance", "1e-3", "--print-spec"]));
    assert_eq!((&spec["tolerance"], &spec["points"]), (&json!(1e-3), &json!(4096)));
}

/// Counts in any exact form, in flags, lists, axes and JSON; nothing else.
#[test]
fn counts_are_whole_numbers_in_any_form() {
    let root = tempfile::tempdir().unwrap();
    let at = root.path();
    let spec = |arguments: &[&str]| document(&ok(at, &[arguments, &["--print-spec"]].concat()));
    let found = spec(&["simulate", "--dimension", "1e3", "--length", "5.0", "--seed", "18446744073709551615"]);
    assert_eq!((&found["dimension"], &found["length"]), (&json!(1000), &json!(5)));
    assert_eq!(found["seed"], json!(u64::MAX));
    assert_eq!(spec(&["compare", "--dimensions", "1e3,500.0"])["dimensions"], json!([500, 1000]));
    assert_eq!(spec(&["compare", "--dimensions", "[1e3, 500.0]"])["dimensions"], json!([500, 1000]));
    let sphere = json!({"kind": "sphere", "nu": 2.0, "features": 3});
    assert_eq!(spec(&["flow", "--theta", "sphere:nu=2:features=3e0"])["theta"], sphere);
    assert_eq!(spec(&["flow", "--stop-alignment", "1.0,0,0.5"])["stop_alignment"], json!([1, 0, 0.5]));
    std::fs::write(
        at.join("floats.json"),
        r#"{"dimension": 1000.0, "replicas": 8e0, "length": 6, "seed": 9007199254740992.0,
            "theta": {"kind": "sphere", "nu": 2, "features": 3.0}}"#,
    )
    .unwrap();
    let found = spec(&["simulate", "--spec", "floats.json"]);
    assert_eq!((&found["dimension"], &found["replicas"]), (&json!(1000), &json!(8)));
    assert_eq!((&found["theta"], &found["seed"]), (&sphere, &json!(1u64 << 53)));

    for (name, text, expected) in [
        ("a", r#"{"dimension": 1000.5}"#, "dimension: 1000.5 is not a whole number"),
        ("b", r#"{"dimension": -1}"#, "dimension: -1 is not a whole number"),
        ("c", r#"{"dimension": 1e300}"#, "dimension: 1e300 is too large for a count"),
        ("d", r#"{"theta": {"kind": "sphere", "nu": 2, "features": 2.5}}"#, "theta: 2.5 is not a whole number"),
        ("e", r#"{"dimensions": [500.5]}"#, "dimensions: 500.5 is not a whole number"),
        ("f", r#"{"dimension": "1000"}"#, "dimension: invalid type: string"),
        ("g", r#"{"seed": 9007199254740994.0}"#, "seed: 9.007199254740994e15 is too large for a count"),
    ] {
        std::fs::write(at.join(name), text).unwrap();
        refused(at, &["simulate", "--spec", name], expected);
    }
    for (arguments, expected) in [
        (&["flow", "--length", "1.5"][..], "length: \"1.5\" is not a whole number"),
        (&["flow", "--length", "1e400"], "length: \"1e400\" is not a whole number"),
        (&["flow", "--length", "nan"], "length: \"nan\" is not a whole number"),
        (&["compare", "--dimensions", "500,1000.5"], "dimensions: \"500,1000.5\" is not a list of whole numbers"),
        (&["doctor", "--threads", "1.5"], "threads: \"1.5\" is not a whole number"),
        (&["phase", "--x", "theta.nu=1:2:2.5", "--y", "length=3,4"], "x: the number of values \"2.5\""),
    ] {
        refused(at, arguments, expected);
    }
    ok(at, &["doctor", "--threads", "2e0"]);
}

/// A byte order mark, a null, a field given twice.
#[test]
fn json_is_read_as_it_is_written() {
    let root = tempfile::tempdir().unwrap();
    let at = root.path();
    let plain = ok(at, &["flow", "--print-spec"]);
    for (name, text) in [
        ("bom.json", "\u{feff}{\"length\": 6}"),
        ("null.json", r#"{"theta": null, "times": null, "dimension": null, "m": null, "length": 6}"#),
        ("null_part.json", r#"{"theta": {"kind": "flip", "nu": [1.8, 1.5], "sd": null}}"#),
    ] {
        std::fs::write(at.join(name), text).unwrap();
        assert_eq!(ok(at, &["flow", "--spec", name, "--print-spec"]), plain, "{name}");
    }
    // A null is not given, to any command.
    let commands: &[&[&str]] = &[
        &["compare"],
        &["simulate", "--tau", "1"],
        &["bayes"],
        &["optimum"],
        &["loss", "--m", "1,0;0,1"],
        &["phase", "--x", "theta.nu=1,2", "--y", "length=3,4"],
        &["figure", "retrieval"],
        &["figure", "specialization"],
        &["figure", "hierarchy"],
        &["figure", "pruning"],
    ];
    std::fs::write(at.join("null.json"), r#"{"theta": null, "times": null, "attention": null, "m0": null}"#).unwrap();
    for command in commands {
        let spec = ok(at, &[command, &["--print-spec"][..]].concat());
        assert_eq!(ok(at, &[command, &["--spec", "null.json", "--print-spec"][..]].concat()), spec, "{command:?}");
    }
    for text in [
        r#"{"length": 6, "length": 9}"#,
        r#"{"length": 6, "length": 6}"#,
        r#"{"theta": {"kind": "flip", "nu": [1], "nu": [2]}}"#,
        r#"{"length": 6, "lengt\u0068": 9}"#,
    ] {
        std::fs::write(at.join("twice.json"), text).unwrap();
        refused(at, &["flow", "--spec", "twice.json"], "\" is given twice at line 1 column");
    }
    refused(at, &["flow", "--theta", r#"{"kind": "flip", "nu": [1], "nu": [2]}"#], "\"nu\" is given twice");
    refused(at, &["flow", "--theta", r#"{"kind": "flip", "nu": [1], "features": 1}"#], "theta: unknown field");
}

/// Bayes risks over two parameters, by rows of y.
fn risks(folder: &Path, theta: &str, x: &str, y: &str) -> Vec<Vec<f64>> {
    let phase = ["phase", "--quantity", "bayes-risk", "--theta", theta, "--tolerance", "1e-8", "--out", "d", "--force"];
    let found = printed(folder, &[&phase[..], &["--x", x, "--y", y]].concat());
    serde_json::from_value(found["maps"][0]["values"].clone()).unwrap()
}

/// Neither axis is lost, whichever way round: the general comes before the part, the scale multiplies both.
#[test]
fn axes_do_not_overwrite_each_other() {
    let root = tempfile::tempdir().unwrap();
    let at = root.path();
    let alone = |theta: &str| {
        let found = printed(at, &["bayes", "--theta", theta, "--tolerance", "1e-8"]);
        found["bayes_risk"].as_f64().unwrap()
    };
    let gaussian = |scale: f64, sd: f64| alone(&format!("gaussian:mean={scale}:sd={}", scale * sd));
    let flips = |whole: f64, second: f64| alone(&format!("flip:{whole},{second}"));
    type Expected<'a> = &'a dyn Fn(f64, f64) -> f64;
    let cases: [(&str, &str, &str, Expected); 2] = [
        ("gaussian:mean=1:sd=1", "theta.scale", "theta.sd", &gaussian),
        ("flip:1,1", "theta.nu", "theta.nu[1]", &flips),
    ];
    for (theta, general, part, expected) in cases {
        let (general, part) = (format!("{general}=1,2"), format!("{part}=1.5,2.5"));
        let across = risks(at, theta, &general, &part);
        let upwards = risks(at, theta, &part, &general);
        for (i, a) in [1.0, 2.0].into_iter().enumerate() {
            for (j, b) in [1.5, 2.5].into_iter().enumerate() {
                assert_eq!(across[j][i], upwards[i][j]);
                // Each number to the tolerance, twice.
                let difference = across[j][i] - expected(a, b);
                assert!(difference.abs() <= 2e-8, "{general} {part} at {a}, {b}: {difference:e}");
            }
        }
    }
    // Entries, then their scale.
    let found = risks(at, "flip:1,1", "theta.scale=1,2", "theta.nu[0]=1,2");
    assert!((found[1][1] - flips(4.0, 2.0)).abs() <= 2e-8);
}

#[test]
fn an_axis_without_effect_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let phase = |arguments: &[&str], expected: &str| {
        refused(root.path(), &[&["phase"][..], arguments].concat(), expected);
    };
    let risk = ["--quantity", "bayes-risk", "--theta", "flip:1"];
    let reads = "phase --quantity bayes-risk does not read gamma; it reads length, theta, tolerance";
    phase(&[&risk[..], &["--x", "gamma=1,2", "--y", "seed=1,2"]].concat(), &format!("x: {reads}"));
    phase(&[&risk[..], &["--x", "length=3,4", "--y", "gamma=1,2"]].concat(), &format!("y: {reads}"));
    phase(&[&risk[..], &["--x", "length=3,4", "--y", "heads=1,2"]].concat(), "y: phase --quantity bayes-risk does not");
    phase(
        &[&risk[..], &["--x", "theta.nu=1,2", "--y", "theta.nu[0]=1,2"]].concat(),
        "x: theta.nu has no effect on bayes-risk (theta.nu[0] sets it again)",
    );
    phase(
        &[&risk[..], &["--x", "theta.nu[0]=1,2", "--y", "theta.nu[00]=1,2"]].concat(),
        "y: is theta.nu[0], like x: give another parameter",
    );
    phase(
        &["--quantity", "bayes-risk", "--theta", "flip:0", "--x", "theta.scale=1,2", "--y", "length=3,4"],
        "x: theta.scale has no effect on bayes-risk (all its cells are the same)",
    );
    let flow = ["--quantity", "flow-loss"];
    phase(
        &[&flow[..], &["--gamma", "0", "--x", "batch=1,2", "--y", "length=3,4"]].concat(),
        "x: batch has no effect on flow-loss (read with gamma above 0)",
    );
    phase(
        &[&flow[..], &["--x", "records=3,4", "--y", "length=3,4"]].concat(),
        "x: phase --quantity flow-loss does not",
    );
    phase(&["--quantity", "stages", "--x", "scrambles=1,2", "--y", "length=3,4"], "uses one set of points");
    phase(&["--quantity", "growth-rate", "--x", "gamma=0,1", "--y", "length=3,4"], "x: phase --quantity growth-rate");
    phase(&["--x", "theta.nu=1:2:1000", "--y", "length=2:1001:1000"], "x, y: needs 1000000 cells, above the limit of");
    assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0, "a refused run leaves nothing");

    // What has an effect in some cells has one.
    let axis = |side: &str, text: &str| Axis::parse(side, text).unwrap();
    let diagram = Diagram {
        quantity: Quantity::FlowLoss,
        x: axis("x", "batch=1,2"),
        y: axis("y", "gamma=0,1"),
        fields: Map::new(),
    };
    let most = headflow::model::Cost::MOST_BYTES;
    diagram.check(most).unwrap();
    // What follows from a field does not undo that it is read.
    let fields = map(json!({"key_scale": 0.1, "tau": 3}));
    let common =
        Diagram { x: axis("x", "length=3,4"), y: axis("y", "gamma=0,1"), fields, ..diagram }.check(most).unwrap();
    assert!(common.contains_key("r0") && common["tau"] == 3.0);
    // A list is logarithmic where its steps are.
    for (list, log) in [
        ("length=10,100,1000", true),
        ("length=10,32,100,316", true),
        ("theta.nu=0.25,0.5,1", true),
        ("theta.nu=1,3,10,30", true),
        ("length=10,20,30", false),
        ("length=10,100", false),
        ("theta.nu=0,1,10", false),
        ("theta.nu=1,1.1,5", false),
        ("length=100,101,102", false),
    ] {
        assert_eq!(axis("x", list).log, log, "{list}");
    }
}

/// A diagram goes on with its folder alone; what is given again must be what it was.
#[test]
fn a_diagram_is_resumed_without_more() {
    let root = tempfile::tempdir().unwrap();
    let at = root.path();
    let diagram = [
        "phase",
        "--quantity",
        "bayes-risk",
        "--theta",
        "flip:1",
        "--x",
        "theta.nu=1,2,4",
        "--y",
        "length=3,4",
        "--tolerance",
        "1e-6",
    ];
    let whole = printed(at, &[&diagram[..], &["--out", "whole"]].concat());
    assert_eq!(whole["maps"][0]["x"]["log"], true);
    let unfinished = |name: &str, request: Value| {
        let cells = [json!({"Ok": 0.125}), Value::Null, Value::Null, Value::Null, Value::Null, Value::Null];
        std::fs::create_dir_all(at.join(name)).unwrap();
        let saved = json!({
            "format": "headflow-cells", "version": env!("CARGO_PKG_VERSION"), "request": request, "cells": cells,
        });
        std::fs::write(at.join(name).join("checkpoint.json"), saved.to_string()).unwrap();
    };
    let mut expected = whole["maps"].clone();
    expected[0]["values"][0][0] = json!(0.125);
    for arguments in [vec!["phase"], diagram.to_vec(), vec!["phase", "--tolerance", "1e-6", "--y", "length=3,4"]] {
        unfinished("u", whole["request"].clone());
        for other in [
            &["--tolerance", "1e-5"][..],
            &["--quantity", "regret"],
            &["--x", "theta.nu=1,2,5"],
            &["--y", "length=3,4,5"],
            &["--length", "6"],
        ] {
            refused(at, &[&["phase", "--resume", "u"][..], other].concat(), "belongs to another request");
        }
        let resumed = printed(at, &[&arguments[..], &["--resume", "u"]].concat());
        assert_eq!(resumed["maps"], expected, "{arguments:?}");
        assert_eq!(resumed["spec"], whole["spec"]);
        std::fs::remove_dir_all(at.join("u")).unwrap();
    }
    // A checkpoint of an older version of the table: fields that were ignored then are ignored now.
    let mut request = whole["request"].clone();
    request["fields"]["gamma"] = json!(0.5);
    unfinished("old", request);
    assert_eq!(printed(at, &["phase", "--resume", "old"])["maps"], expected);
    // Of a figure.
    unfinished("f", json!({"figure": "retrieval", "fields": {}}));
    refused(at, &["phase", "--resume", "f"], "belongs to another request");
    refused(at, &["figure", "heads", "--resume", "f"], "belongs to another request");
    refused(at, &["figure", "retrieval", "--resume", "f", "--starts", "3"], "belongs to another request");
    refused(at, &["figure", "retrieval", "--resume", "f"], "holds 6 cells, not");
}

/// Results of older versions name every field: they are records, and are read.
#[test]
fn older_results_are_read() {
    let root = tempfile::tempdir().unwrap();
    let at = root.path();
    let flow =
        ["flow", "--theta", "flip:3", "--heads", "2", "--gamma", "0", "--m0", "0.02;-0.01", "--key-scale", "0.05"];
    ok(
        at,
        &[&flow[..], &["--tau", "60", "--records", "401", "--points", "64", "--scrambles", "1", "--out", "f"]].concat(),
    );
    let stages = ok(at, &["stages", "--from", "f"]);
    let path = at.join("f/result.json");
    let mut result = document(&std::fs::read_to_string(&path).unwrap());
    let mut spec = map(serde_json::to_value(Spec::default()).unwrap());
    spec.extend(map(result["spec"].clone()));
    result["spec"] = Value::Object(spec.clone());
    std::fs::write(&path, result.to_string()).unwrap();
    assert_eq!(ok(at, &["stages", "--from", "f"]), stages);
    ok(at, &["figure", "comparison", "--from", "f"]);
    // As an order it is refused, and says all that is in the way.
    std::fs::write(at.join("spec.json"), Value::Object(spec).to_string()).unwrap();
    refused(at, &["flow", "--spec", "spec.json"], "replicas, test_samples: flow does not read them");
}
