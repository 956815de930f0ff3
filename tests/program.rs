//! The program as a user meets it: results on disk, documents on standard output, bad input.

mod common;

use std::path::Path;
use std::process::Command;

#[cfg(unix)]
use common::worked;
use common::{document, headflow, ok, refused};
use headflow::model::series::read_csv;
use serde_json::Value;

/// A short comparison.
const SHORT: &[&str] = &[
    "--tau",
    "4",
    "--records",
    "5",
    "--points",
    "256",
    "--scrambles",
    "2",
    "--dimensions",
    "50,100",
    "--replicas",
    "4",
    "--test-samples",
    "64",
];

fn with<'a>(command: &[&'a str], rest: &[&'a str]) -> Vec<&'a str> {
    [command, rest].concat()
}

fn read(path: impl AsRef<Path>) -> Vec<u8> {
    let path = path.as_ref();
    std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

#[test]
fn compare_writes_a_complete_folder() {
    let root = tempfile::tempdir().unwrap();
    let text = ok(root.path(), &with(&["compare", "--out", "c"], SHORT));
    assert!(text.contains("verdict: "), "{text}");
    let folder = root.path().join("c");
    for file in ["result.json", "series.csv", "series.npz", "comparison.png", "comparison.svg"] {
        assert!(!read(folder.join(file)).is_empty(), "{file}");
    }
    let result = document(&String::from_utf8(read(folder.join("result.json"))).unwrap());
    assert_eq!(result["format"], "headflow-result");
    assert_eq!(result["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(result["spec"]["dimensions"], serde_json::json!([50, 100]));
    assert_eq!(result["stop"]["reason"], "completed");
    assert!(result["git_revision"].is_string() && result["wall_time_seconds"].as_f64().unwrap() > 0.0);
    assert!(result["verdict"]["rows"].as_array().unwrap().len() > 10);
    assert!(result["routes"][0]["statistics"]["evaluations"].as_u64().unwrap() > 0);

    let series = read_csv(&read(folder.join("series.csv"))[..], "series.csv").unwrap();
    let routes: Vec<_> = series.iter().map(|s| s.route.as_str()).collect();
    let simulated =
        |engine: &str| ["50", "50 replica=0", "100", "100 replica=0"].map(|d| format!("{engine} D={d}")).to_vec();
    assert_eq!(routes[0], "theory");
    assert_eq!(routes[1..], [simulated("direct"), simulated("overlap")].concat());
    // Theory against each engine, and the engines against each other.
    let verdicts = result["verdicts"].as_object().unwrap();
    assert_eq!(verdicts.len(), 3);
    assert!(verdicts.values().all(|v| v["outcome"].is_string()));
    assert_eq!(series[0].values.times, [0.0, 1.0, 2.0, 3.0, 4.0]);

    let mut npz = ndarray_npy::NpzReader::new(std::fs::File::open(folder.join("series.npz")).unwrap()).unwrap();
    let m: ndarray::Array3<f64> = npz.by_name("theory.m").unwrap();
    assert_eq!(m.shape(), [5, 4, 2]);
    assert_eq!(m[(4, 1, 0)], series[0].values.m(4)[(1, 0)]);
    let replicas: ndarray::Array4<f64> = npz.by_name("direct_D=100.replica_m").unwrap();
    assert_eq!(replicas.shape(), [4, 5, 4, 2]);
    assert_eq!(replicas[(0, 3, 2, 1)], series[4].values.m(3)[(2, 1)]);
}

#[test]
fn a_result_is_kept_unless_forced() {
    let root = tempfile::tempdir().unwrap();
    let arguments = with(&["compare", "--out", "c"], SHORT);
    ok(root.path(), &arguments);
    let before = read(root.path().join("c/result.json"));
    refused(root.path(), &arguments, "--force");
    assert_eq!(read(root.path().join("c/result.json")), before);
    ok(root.path(), &with(&arguments, &["--force"]));
    // Without --out every run finds a place of its own.
    let short = ["flow", "--tau", "2", "--records", "3", "--points", "64", "--scrambles", "2"];
    ok(root.path(), &short);
    ok(root.path(), &short);
    assert!(root.path().join("results/flow/result.json").exists());
    assert!(root.path().join("results/flow-2/result.json").exists());
}

#[test]
fn a_result_repeats_bit_for_bit_from_its_own_spec_at_any_thread_count() {
    let root = tempfile::tempdir().unwrap();
    let run = |name: &str, arguments: &[&str]| {
        ok(root.path(), &with(arguments, &["--out", name]));
        (
            read(root.path().join(name).join("series.csv")),
            document(&String::from_utf8(read(root.path().join(name).join("result.json"))).unwrap()),
        )
    };
    let (first, result) = run("a", &with(&["compare", "--attention", "softmax1", "--seed", "7"], SHORT));
    std::fs::write(root.path().join("spec.json"), result["spec"].to_string()).unwrap();
    for threads in ["1", "2", "3"] {
        let (again, other) = run(&format!("b{threads}"), &["compare", "--spec", "spec.json", "--threads", threads]);
        assert_eq!(first, again, "{threads} threads");
        assert_eq!(result["verdict"], other["verdict"]);
    }
    let (other, _) = run("c", &["compare", "--spec", "spec.json", "--seed", "8"]);
    assert_ne!(first, other);
}

#[test]
fn json_is_the_document_alone() {
    let root = tempfile::tempdir().unwrap();
    let flow = document(&ok(
        root.path(),
        &["flow", "--json", "--gamma", "0", "--times", "0,1,2.5", "--points", "64", "--scrambles", "2", "--out", "f"],
    ));
    assert_eq!(flow["routes"][0]["times"], serde_json::json!([0.0, 1.0, 2.5]));
    assert_eq!(flow, document(&String::from_utf8(read(root.path().join("f/result.json"))).unwrap()));

    let loss = document(&ok(
        root.path(),
        &["loss", "--json", "--theta", "flip:2", "--length", "5", "--m", "1.5;-1.2", "--r", "2.55,-1.75;-1.75,1.64"],
    ));
    assert!((loss["loss"].as_f64().unwrap() - 0.642_073_964_65).abs() < 1e-8);
    assert!(!root.path().join("results").exists(), "loss writes only where it is told to");

    assert_eq!(ok(root.path(), &["flow", "-q", "--tau", "1", "--points", "64", "--scrambles", "2", "--out", "q"]), "");

    let doctor = document(&ok(root.path(), &["doctor", "--json"]));
    assert_eq!(doctor["random_generator_known_answer"], true);
}

#[test]
fn print_spec_gives_a_spec_that_means_the_same() {
    let root = tempfile::tempdir().unwrap();
    let text = ok(
        root.path(),
        &[
            "simulate",
            "--print-spec",
            "--heads",
            "3",
            "--theta",
            "sphere:nu=2:features=3",
            "--attention",
            "bayes-softmax",
        ],
    );
    std::fs::write(root.path().join("s.json"), &text).unwrap();
    assert_eq!(ok(root.path(), &["simulate", "--print-spec", "--spec", "s.json"]), text);
    let spec = document(&text);
    assert_eq!(spec["bias"], "trained");
    assert_eq!(spec["m0"].as_array().unwrap().len(), 3);
    assert!(!root.path().join("results").exists());
}

#[test]
fn simulate_and_random_starts_work() {
    let root = tempfile::tempdir().unwrap();
    let text = ok(
        root.path(),
        &[
            "simulate",
            "--dimension",
            "40",
            "--tau",
            "2",
            "--records",
            "3",
            "--replicas",
            "3",
            "--initial",
            "random",
            "--out",
            "s",
        ],
    );
    assert!(text.contains("steps/s"), "{text}");
    let text = ok(root.path(), &with(&["compare", "--initial", "random", "--out", "c"], SHORT));
    assert!(text.contains("verdict"), "{text}");
    let series = read_csv(&read(root.path().join("c/series.csv"))[..], "series.csv").unwrap();
    assert!(series.iter().any(|s| s.route == "theory D=50") && series.iter().any(|s| s.route == "theory D=100"));
}

#[test]
fn the_overlap_chain_is_an_engine_at_any_dimension() {
    let root = tempfile::tempdir().unwrap();
    let short = ["--records", "3", "--replicas", "2", "--test-samples", "64"];
    let far = ["simulate", "--engine", "overlap", "--dimension", "1000000000", "--tau", "1e-5", "--out", "far"];
    let text = ok(root.path(), &with(&far, &short));
    assert!(text.contains("20000 steps"), "{text}");
    let series = read_csv(&read(root.path().join("far/series.csv"))[..], "series.csv").unwrap();
    assert_eq!(series[0].route, "overlap D=1000000000");
    assert!(root.path().join("far/comparison.png").exists() && !root.path().join("far/checkpoint.json").exists());
    // L = 6, H = 4, F = 2: direct SGD runs at D = 6, the chain from 12 on; compare runs what can be run.
    refused(root.path(), &["simulate", "--engine", "overlap", "--dimension", "11"], "F + H + L = 12");
    refused(root.path(), &["compare", "--engine", "both", "--dimensions", "11,100"], "F + H + L = 12");
    refused(root.path(), &["simulate", "--engine", "both"], "only compare runs both");
    refused(root.path(), &["simulate", "--engine", "overlapp"], "engine");
    let small = ["compare", "--dimensions", "8,100", "--out", "small", "--json"];
    let result =
        document(&ok(root.path(), &with(&small, &SHORT[..8].iter().chain(&SHORT[10..]).copied().collect::<Vec<_>>())));
    assert_eq!(result["spec"]["engine"], "direct");
}

/// A chain that is interrupted and resumed writes the same series as one that is not; a checkpoint of
/// another spec or version is refused.
#[cfg(unix)]
#[test]
fn an_interrupted_chain_is_resumed_bit_for_bit() {
    let root = tempfile::tempdir().unwrap();
    let run = [
        "simulate",
        "--engine",
        "overlap",
        "--dimension",
        "1000000",
        "--tau",
        "5",
        "--records",
        "6",
        "--heads",
        "2",
        "--theta",
        "flip:2",
        "--length",
        "4",
        "--replicas",
        "2",
        "--test-samples",
        "64",
    ];
    let mut child = Command::new(env!("CARGO_BIN_EXE_headflow"))
        .args(run)
        .args(["--out", "broken"])
        .current_dir(root.path())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    worked(&mut child, 1);
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(String::from_utf8_lossy(&output.stdout).contains("--resume broken"));

    let checkpoint = root.path().join("broken/checkpoint.json");
    let whole = String::from_utf8(read(&checkpoint)).unwrap();
    refused(root.path(), &["simulate", "--resume", "broken", "--gamma", "2"], "gamma: is 2.0 here but 1.0");
    refused(root.path(), &with(&run, &["--out", "broken"]), "--force");
    assert_eq!(String::from_utf8(read(&checkpoint)).unwrap(), whole);
    refused(root.path(), &["simulate", "--resume", "nowhere"], "nothing to resume");
    refused(root.path(), &["simulate", "--resume", "broken", "--out", "x"], "--out");
    let other = whole.replacen(env!("CARGO_PKG_VERSION"), "0.0.1", 1);
    for (broken, expected) in [
        (&whole[..whole.len() / 2], "truncated"),
        (&other[..], "0.0.1"),
        ("{\"format\": \"x\"}", "not a headflow checkpoint"),
    ] {
        std::fs::write(&checkpoint, broken).unwrap();
        refused(root.path(), &["simulate", "--resume", "broken"], expected);
    }
    std::fs::write(&checkpoint, whole).unwrap();
    ok(root.path(), &["simulate", "--resume", "broken"]);
    assert!(!checkpoint.exists());
    ok(root.path(), &with(&run, &["--out", "unbroken"]));
    assert_eq!(read(root.path().join("broken/series.csv")), read(root.path().join("unbroken/series.csv")));
    let stop = document(&String::from_utf8(read(root.path().join("broken/result.json"))).unwrap())["stop"].clone();
    assert_eq!(stop["reason"], "completed");
}

#[test]
fn stability_reports_rates_and_refuses_what_is_not_stationary() {
    let root = tempfile::tempdir().unwrap();
    let small = ["--points", "4096", "--scrambles", "2"];
    let result = document(&ok(root.path(), &with(&["stability", "--json", "--attention", "bayes-softmax"], &small)));
    let points = result["points"].as_array().unwrap();
    assert_eq!(
        points.iter().map(|p| p["name"].as_str().unwrap()).collect::<Vec<_>>(),
        ["zero", "unspecialised-with-noise"]
    );
    // omega lambda with omega = 2 / (H L) (1 - 1 / L).
    let fastest = &points[0]["modes"][0];
    assert!((fastest["rate"].as_f64().unwrap() - 0.225).abs() < 1e-3, "{fastest}");
    assert_eq!((&fastest["kind"], &fastest["degeneracy"]), (&Value::from("specialising"), &Value::from(3)));
    assert!(points[0]["escapes"][0]["times"][2].as_f64().unwrap() > 20.0);
    assert!(!root.path().join("results").exists(), "stability writes only where it is told to");

    let at_zero = ["stability", "--theta", "flip:2", "--m", "0;0", "--r", "0,0;0,0", "--out", "s"];
    let text = ok(root.path(), &with(&at_zero, &small));
    assert!(text.contains("specialising along s1") && root.path().join("s/result.json").exists(), "{text}");
    refused(root.path(), &with(&["stability", "--theta", "flip:2", "--m", "1;-1"], &small), "not stationary: d");
    refused(root.path(), &with(&["stability", "--at", "nowhere"], &small), "at");
    refused(root.path(), &with(&["stability", "--at", "point"], &small), "m: ");
    refused(root.path(), &["flow", "--at", "point"], "at: flow does not read it (read by stability); leave it out");
    let runaway = ["stability", "--attention", "softmax1", "--heads", "1", "--theta", "flip:2"];
    refused(root.path(), &with(&runaway, &small), "without bound");
}

#[test]
fn stages_are_found_in_flows_chains_and_folders() {
    let root = tempfile::tempdir().unwrap();
    let heads = ["--theta", "flip:3", "--heads", "2"];
    let task = with(&heads, &["--points", "1024"]);
    let simulated = with(&heads, &["--test-samples", "64"]);
    let flow =
        ["stages", "--gamma", "0", "--m0", "0.02;-0.01", "--key-scale", "0.05", "--tau", "60", "--out", "f", "--json"];
    let result = document(&ok(root.path(), &with(&flow, &task)));
    let plateaus = result["stages"][0]["plateaus"].as_array().unwrap();
    let patterns: Vec<String> = plateaus.iter().map(|p| p["patterns"].to_string()).collect();
    assert_eq!(patterns.first().unwrap(), "[\"off\",\"off\"]");
    assert_eq!(patterns.last().unwrap(), "[\"+s1\",\"-s1\"]");
    assert_eq!(result["stages"][0]["order"][0]["feature"], 0);
    let again = document(&ok(root.path(), &["stages", "--from", "f", "--json"]));
    assert_eq!(again["stages"][0]["plateaus"], result["stages"][0]["plateaus"]);

    let chain =
        ["stages", "--engine", "overlap", "--dimension", "2000", "--replicas", "4", "--tau", "60", "--out", "c"];
    let text = ok(root.path(), &with(&with(&chain, &["--initial", "random"]), &simulated));
    assert!(text.contains("4 of 4  +s1, -s1") && text.contains("order of learning"), "{text}");

    refused(root.path(), &with(&["stages", "--records", "5"], &task), "records");
    let coarse =
        ["stages", "--gamma", "0", "--key-scale", "0.05", "--tau", "4000", "--records", "12", "--m0", "0.02;-0.01"];
    refused(root.path(), &with(&coarse, &task), "records");
    let short = [
        "stages",
        "--gamma",
        "0",
        "--key-scale",
        "0.05",
        "--times",
        "3,3.4,3.8,4.2,4.6,5,5.4,5.8,6.2,6.6",
        "--m0",
        "0.02;-0.01",
    ];
    refused(root.path(), &with(&short, &task), "tau");
    refused(root.path(), &with(&["stages", "--motion", "2"], &task), "motion");
    refused(root.path(), &with(&["stages", "--contrast", "-1"], &task), "contrast");
    let few = ["stages", "--engine", "overlap", "--dimension", "100", "--records", "5", "--tau", "5", "--out", "few"];
    refused(root.path(), &with(&few, &simulated), "records");
    refused(root.path(), &with(&["stages", "--max-steps", "3"], &task), "--max-steps");
    refused(root.path(), &["stages", "--from", "nowhere"], "nowhere");
    refused(root.path(), &["stages", "--from", "f", "--gamma", "2"], "gamma");
    let left: Vec<_> = std::fs::read_dir(root.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left.len(), 2, "a refused run leaves nothing: {left:?}");
}

#[test]
fn figures_of_the_dynamics_are_computed_and_redrawn() {
    let root = tempfile::tempdir().unwrap();
    let escape =
        ["figure", "escape", "--dimensions", "1000,2000", "--replicas", "3", "--points", "1024", "--scrambles", "2"];
    let text = ok(root.path(), &with(&escape, &["--out", "escape"]));
    assert!(text.contains("slope in ln D") && text.contains("stationary point with"), "{text}");
    let hierarchy = ["figure", "hierarchy", "--tau", "60", "--records", "61", "--points", "512", "--dimension", "1000"];
    let text = ok(root.path(), &with(&hierarchy, &["--test-samples", "64", "--out", "hierarchy"]));
    assert!(text.contains("s1 predicted from plateau 1"), "{text}");
    ok(root.path(), &["figure", "spectrum", "--tau", "30", "--records", "13", "--points", "256", "--out", "spectrum"]);
    for name in ["escape", "hierarchy", "spectrum"] {
        let picture = root.path().join(name).join(format!("{name}.png"));
        let drawn = read(&picture);
        std::fs::remove_file(&picture).unwrap();
        ok(root.path(), &["figure", name, "--from", name]);
        assert_eq!(read(&picture), drawn, "{name}");
    }
    refused(root.path(), &["figure", "escape", "--theta", "gaussian:mean=1:sd=1"], "mean 0");
    refused(root.path(), &["figure", "escape", "--engine", "direct"], "engine");
    refused(root.path(), &["figure", "escape", "--initial", "given"], "initial");
    refused(root.path(), &["figure", "hierarchy", "--initial", "random"], "initial");
    refused(root.path(), &["figure", "spectrum", "--from", "escape"], "escape");
    refused(root.path(), &["figure", "escape", "--from", "spectrum"], "escape");
}

#[test]
fn figures_redraw_from_results_alone() {
    let root = tempfile::tempdir().unwrap();
    ok(root.path(), &with(&["figure", "specialization", "--out", "s"], SHORT));
    let drawn = read(root.path().join("s/specialization.png"));
    std::fs::remove_file(root.path().join("s/specialization.png")).unwrap();
    ok(root.path(), &["figure", "specialization", "--from", "s"]);
    assert_eq!(read(root.path().join("s/specialization.png")), drawn);
    ok(root.path(), &["figure", "comparison", "--from", "s/softmax", "--out", "elsewhere"]);
    assert!(root.path().join("elsewhere/comparison.svg").exists());

    let csv = root.path().join("s/softmax/series.csv");
    let whole = read(&csv);
    std::fs::write(&csv, &whole[..whole.len() / 2]).unwrap();
    refused(root.path(), &["figure", "comparison", "--from", "s/softmax"], "series.csv");
    std::fs::write(&csv, whole).unwrap();
    std::fs::write(root.path().join("s/softmax/result.json"), "{\"format\": \"other\"}").unwrap();
    refused(root.path(), &["figure", "comparison", "--from", "s/softmax"], "result.json");
    refused(root.path(), &["figure", "comparison", "--from", "nowhere"], "nowhere");
    refused(root.path(), &["figure", "comparison"], "--from");
    refused(root.path(), &["figure", "specialisation"], "did you mean \"specialization\"");
}

#[test]
fn bad_input_is_one_line_and_exit_code_2() {
    let root = tempfile::tempdir().unwrap();
    let at = root.path();
    std::fs::write(at.join("typo.json"), r#"{"lenght": 6}"#).unwrap();
    std::fs::write(at.join("broken.json"), r#"{"length": 6"#).unwrap();
    std::fs::write(at.join("newline.json"), r#"{"aa\nbb": 1}"#).unwrap();
    std::fs::write(at.join("file"), "").unwrap();
    let cases: &[(&[&str], &str)] = &[
        (&["flow", "--m0", "1,0;0,1", "--r0", "1,0;0,0.5"], "positive semi-definite"),
        (&["loss", "--m", "1,0", "--r", "0.5"], "positive semi-definite"),
        (&["loss"], "m: the loss, or stability at a point, needs"),
        (&["loss", "--m", "1,0", "--b", "1"], "b: the bias rule is none"),
        (&["flow", "--length", "1"], "length"),
        (&["simulate", "--dimension", "5"], "D >= H + F = 6"),
        (&["compare", "--dimensions", "5,100"], "D >= H + F = 6"),
        (&["flow", "--m0", "0.1;0.2"], "m0"),
        (&["flow", "--theta", "gaussian:mean=1,0:sd=1"], "theta.sd"),
        (&["flow", "--theta", "flop:1"], "theta"),
        (&["flow", "--gamma", "nan"], "gamma"),
        (&["flow", "--gamma", "-1"], "gamma"),
        (&["simulate", "--gamma", "0"], "gamma"),
        (&["flow", "--tau", "inf"], "tau"),
        (&["flow", "--times", "0,2,1"], "times"),
        (&["flow", "--batch", "0"], "batch"),
        (&["flow", "--method", "euler"], "tsit45"),
        (&["flow", "--points", "1000"], "power of two"),
        (&["flow", "--initial", "random"], "initial"),
        (&["flow", "--stop-alignment", "9,0,1"], "stop_alignment"),
        (&["compare", "--stop-loss", "0.5"], "stop_loss"),
        (&["flow", "--spec", "typo.json"], "did you mean \"length\""),
        (&["flow", "--spec", "broken.json"], "not valid JSON"),
        (&["flow", "--spec", "missing.json"], "missing.json"),
        (&["flow", "--out", "file/below"], "cannot be written"),
        (&["flow", "--out", "file"], "cannot be written"),
        (&["flow", "--lenght", "6"], "--length"),
        (&["flwo"], "flow"),
        (&["flow", "--threads", "0"], "threads"),
        (&["flow", "--threads", "100000000"], "threads"),
        (&["flow", "--out", ""], "out"),
        (&["flow", "--spec", "newline.json"], "unknown field"),
        (&["simulate", "--tau", "1e300"], "tau"),
        (&["figure", "specialization", "--from", "file", "--gamma", "2"], "gamma"),
        (&["flow", "--heads", "1000000"], "heads"),
        (&["simulate", "--test-samples", "18446744073709551615"], "test_samples"),
        (&["simulate", "--replicas", "4294967295"], "replicas"),
        (&["simulate", "--dimension", "1000000000000"], "dimension"),
        (&["simulate", "--dimension", "10000000", "--replicas", "1000"], "replicas"),
        (&["simulate", "--gamma", "1e300"], "gamma"),
        (&["flow", "--theta", "flip:1e200,1"], "theta"),
        (&["flow", "--m0", "1e150,0"], "m0"),
        (&["flow", "--tau", "1e-16"], "times"),
    ];
    for (arguments, expected) in cases {
        refused(at, arguments, expected);
    }
    assert!(!at.join("results").exists(), "nothing half-written is left");
}

#[test]
fn a_diverging_learning_rate_keeps_what_was_recorded() {
    let root = tempfile::tempdir().unwrap();
    let output = headflow(
        root.path(),
        &["simulate", "--gamma", "1e10", "--dimension", "30", "--times", "0,1e12", "--out", "d", "--replicas", "2"],
    );
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("diverged at step") && error.contains("tau"), "{error}");
    assert!(String::from_utf8(output.stdout).unwrap().contains("last finite state"));
    let result = document(&String::from_utf8(read(root.path().join("d/result.json"))).unwrap());
    assert_eq!(result["stop"]["reason"], "diverged");
    assert_eq!(result["routes"][0]["times"], serde_json::json!([0.0]));
    assert!(result["routes"][0]["last_finite"][0]["r"].is_array());
}

#[test]
fn a_flow_that_runs_out_of_steps_says_what_to_do() {
    let root = tempfile::tempdir().unwrap();
    let output =
        headflow(root.path(), &["flow", "--points", "64", "--scrambles", "2", "--max-steps", "3", "--out", "f"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8(output.stderr).unwrap().contains("--max-steps"));
    assert!(root.path().join("f/series.csv").exists());
    // Nothing recorded: still the reason, not a complaint about the figure.
    let output = headflow(
        root.path(),
        &["flow", "--times", "5,10", "--points", "64", "--scrambles", "2", "--max-steps", "1", "--out", "g"],
    );
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(error.contains("--max-steps") && error.trim_end().lines().count() == 1, "{error}");
}

/// Ctrl-C ends work early, with more replicas or scrambles than threads; what was recorded is written
/// and readable.
#[cfg(unix)]
#[test]
fn ctrl_c_keeps_what_was_recorded() {
    let root = tempfile::tempdir().unwrap();
    let long_simulation = [
        "simulate",
        "--dimension",
        "200",
        "--tau",
        "100000",
        "--records",
        "10001",
        "--replicas",
        "5",
        "--test-samples",
        "16",
    ];
    let long_flow = ["flow", "--tau", "20000", "--records", "20001", "--points", "65536", "--scrambles", "5"];
    let long_comparison = [
        "compare",
        "--dimensions",
        "200,400",
        "--tau",
        "100000",
        "--records",
        "2001",
        "--points",
        "64",
        "--test-samples",
        "16",
    ];
    for (name, arguments) in [("s", &long_simulation[..]), ("f", &long_flow[..]), ("c", &long_comparison[..])] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_headflow"))
            .args(arguments)
            .args(["--threads", "2", "--out", name])
            .current_dir(root.path())
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        // Under way, and nowhere near the end.
        worked(&mut child, 4);
        let sent = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
        assert!(sent.success());
        let output = child.wait_with_output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(130), "{name}: {error}");
        assert_eq!(error.trim_end().lines().count(), 1, "{name}: {error}");
        let folder = root.path().join(name);
        let series = read_csv(&read(folder.join("series.csv"))[..], "series.csv").unwrap();
        assert!(
            series.iter().all(|s| s.values.times.len() > 2),
            "{name}: {:?}",
            series.iter().map(|s| s.values.times.len()).collect::<Vec<_>>()
        );
        let result = document(&String::from_utf8(read(folder.join("result.json"))).unwrap());
        assert_eq!(result["stop"]["reason"], "interrupted", "{name}");
    }
}

#[test]
fn help_teaches_by_example() {
    let root = tempfile::tempdir().unwrap();
    for command in [
        "compare",
        "flow",
        "simulate",
        "stability",
        "stages",
        "prune",
        "loss",
        "bayes",
        "optimum",
        "phase",
        "figure",
        "doctor",
    ] {
        let help = ok(root.path(), &[command, "--help"]);
        assert!(help.contains("Example"), "{command}");
    }
    let help = ok(root.path(), &["flow", "--help"]);
    for field in headflow::spec::FIELDS {
        assert!(help.contains(&format!("--{}", field.name.replace('_', "-"))), "{}", field.name);
    }
}
