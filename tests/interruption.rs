//! Signals and the program: it answers soon wherever it is, keeps what it has, and says what happened.
//!
//! Where a run is told by the processor time that it has used, so that signals land within the work; each answer
//! is timed, one run at a time.
#![cfg(target_os = "linux")]

mod common;

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use common::{document, headflow, ok};
use serde_json::Value;

/// The longest that an answer to a signal may take.
const LIMIT: Duration = Duration::from_secs(2);

/// One timed run at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn start(folder: &Path, arguments: &[&str]) -> Child {
    Command::new(env!("CARGO_BIN_EXE_headflow"))
        .args(arguments)
        .current_dir(folder)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Processor time that a process has used so far, in its ticks of a hundredth of a second.
fn ticks(child: &Child) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
    // Behind the name: state, ..., and as the 12th and 13th the times in user and system mode.
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

/// Waits until a process has worked for so long.
fn worked(child: &mut Child, seconds: f64) {
    while (ticks(child) as f64) < 100.0 * seconds {
        assert!(child.try_wait().unwrap().is_none(), "it ended before the signal: choose a longer run");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn signal(child: &Child, name: &str) {
    assert!(Command::new("kill").args([name, &child.id().to_string()]).status().unwrap().success());
}

/// Interrupts a run once it has worked for `seconds`: what it says, within the limit.
fn interrupted(folder: &Path, arguments: &[&str], seconds: f64) -> Output {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut child = start(folder, arguments);
    worked(&mut child, seconds);
    let asked = Instant::now();
    signal(&child, "-INT");
    let output = child.wait_with_output().unwrap();
    let took = asked.elapsed();
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(130), "{arguments:?}: {error}");
    assert!(took <= LIMIT, "{arguments:?}: {took:?}");
    assert_eq!(error.lines().count(), 1, "{arguments:?}: {error}");
    output
}

/// A run that has nothing to keep says so and leaves nothing.
fn nothing(arguments: &[&str], seconds: f64) {
    let root = tempfile::tempdir().unwrap();
    let output = interrupted(root.path(), &[arguments, &["--out", "o"]].concat(), seconds);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("interrupted before there was a result"), "{error}");
    assert!(output.stdout.is_empty() && !root.path().join("o").exists());
}

/// A run that has recorded something keeps it, and its result says that it was interrupted.
fn kept(arguments: &[&str], seconds: f64) -> Value {
    let root = tempfile::tempdir().unwrap();
    interrupted(root.path(), &[arguments, &["--out", "o"]].concat(), seconds);
    let result = document(&std::fs::read_to_string(root.path().join("o/result.json")).unwrap());
    assert_eq!(result["stop"]["reason"], "interrupted");
    let recorded = result["routes"][0]["times"].as_array().unwrap();
    assert!(!recorded.is_empty());
    let losses = result["routes"][0]["loss"].as_array().unwrap();
    assert!(losses.iter().all(Value::is_f64), "{losses:?}");
    result
}

#[test]
fn flows_of_many_heads_answer_within_an_average() {
    // Before the first average is there: checks of the start, points, an evaluation.
    nothing(&["flow", "--heads", "1024", "--points", "1024", "--memory", "200"], 2.0);
    // Within later ones: the first loss, of each of 8 scrambles, is there after less than a second of work.
    let result = kept(&["flow", "--heads", "96", "--points", "8192", "--scrambles", "1", "--length", "24"], 14.0);
    assert_eq!(result["routes"][0]["statistics"]["rejected"], 0, "a step broken off is none rejected");
}

/// A step without numbers would be tried again and again, each time with a matrix of 900 rows to factor.
#[test]
fn implicit_flows_answer_within_a_step() {
    let heads = ["flow", "--heads", "40", "--theta", "flip:1.6", "--length", "3", "--attention", "bayes-softmax"];
    let method = ["--gamma", "0", "--points", "64", "--scrambles", "1", "--method", "esdirk34", "--records", "5"];
    kept(&[&heads[..], &method].concat(), 4.0);
}

#[test]
fn quadratures_answer_within_an_average() {
    // A key of size 1e4: the table of one head takes seconds.
    let points = r#"{"kind":"discrete","points":[[1.469],[2.907],[2.704],[-1.575]],"weights":[0.25,0.25,0.25,0.25]}"#;
    let wide =
        ["flow", "--length", "300", "--theta", points, "--attention", "softmax1", "--heads", "1", "--gamma", "0"];
    let loose = ["--m0", "0.45167594728298943", "--records", "2", "--tolerance", "1e-3", "--absolute-tolerance", "1e9"];
    kept(&[&wide[..], &loose, &["--method", "tr-bdf2"]].concat(), 3.0);
    // A loss says one line too, and takes its empty folder away.
    let m = "98,-56.3;16.3,181.4;-120.9,-232.2;161.8,-40.6";
    nothing(&["loss", "--m", m], 1.0);
    let many = ["flow", "--evaluator", "quadrature", "--gamma", "0", "--heads", "48", "--tolerance", "1e-10"];
    nothing(&[&many[..], &["--theta", "gaussian:mean=0,0:sd=3,2", "--attention", "softmax1"]].concat(), 2.0);
}

#[test]
fn simulations_answer_within_a_record_and_within_a_step() {
    nothing(&["simulate", "--test-samples", "100000000"], 1.0);
    nothing(&["simulate", "--engine", "overlap", "--test-samples", "100000000"], 1.0);
    let batch = ["simulate", "--dimension", "1000000", "--batch", "1000", "--length", "30", "--test-samples", "64"];
    kept(&[&batch[..], &["--tau", "1e-4", "--records", "3", "--replicas", "2"]].concat(), 3.0);
}

/// Within steps of seconds the chain stays where it was, and goes on from there.
#[test]
fn a_chain_of_many_heads_keeps_its_checkpoint() {
    let root = tempfile::tempdir().unwrap();
    let heads = ["simulate", "--engine", "overlap", "--heads", "384", "--dimension", "2000", "--initial", "random"];
    let rest = ["--replicas", "1", "--test-samples", "2", "--tau", "10", "--records", "2", "--out", "o"];
    interrupted(root.path(), &[&heads[..], &rest].concat(), 8.0);
    assert!(root.path().join("o/checkpoint.json").exists());
    let result = document(&std::fs::read_to_string(root.path().join("o/result.json")).unwrap());
    assert_eq!(result["stop"]["reason"], "interrupted");
}

#[test]
fn searches_and_spectra_answer() {
    nothing(&["optimum", "--heads", "6", "--length", "1000", "--attention", "softmax"], 2.0);
    // Most of it is one factorisation that nothing breaks into.
    let heads = 43;
    let m = ["0,0"; 43].join(";");
    let row = |h: usize| (0..heads).map(|k| if k == h { "1" } else { "0" }).collect::<Vec<_>>().join(",");
    let r = (0..heads).map(row).collect::<Vec<_>>().join(";");
    let point = ["--at", "point", "--m", &m, "--r", &r, "--stationary-tolerance", "1e9"];
    nothing(&[&["stability", "--heads", "43", "--points", "64", "--scrambles", "1"], &point[..]].concat(), 6.0);
    let train = ["prune", "--heads", "24", "--points", "65536", "--tau", "1000", "--gamma", "0"];
    nothing(&train, 2.0);
}

#[test]
fn attention_answers_within_a_cell() {
    nothing(&["xsa", "bias", "--lengths", "16384", "--sequences", "100", "--memory", "8"], 1.0);
    nothing(&["xsa", "bias", "--lengths", "16384", "--sequences", "16", "--memory", "8"], 6.0);
}

/// Cells that are there are kept at once, however long those on their way take, and the diagram goes on with them.
#[test]
fn a_diagram_keeps_its_cells() {
    let root = tempfile::tempdir().unwrap();
    // Two quick cells and, in the second row, two of hundreds of support points.
    let run =
        ["phase", "--quantity", "optimal-loss", "--x", "theta.nu=1,2", "--y", "heads=1,12", "--theta", "flip:1,1"];
    let run = [&run[..], &["--attention", "bayes-softmax", "--starts", "64", "--threads", "1", "--out", "o"]].concat();
    let output = interrupted(root.path(), &run, 3.0);
    assert!(String::from_utf8_lossy(&output.stderr).contains("--resume o"));
    let saved = document(&std::fs::read_to_string(root.path().join("o/checkpoint.json")).unwrap());
    let there = saved["cells"].as_array().unwrap().iter().filter(|cell| cell["Ok"].is_f64()).count();
    assert!((1..4).contains(&there), "{saved}");
}

/// A comparison keeps the flows that are there.
#[test]
fn a_comparison_keeps_its_theory() {
    let run = ["compare", "--engine", "direct", "--dimensions", "100000", "--tau", "10", "--points", "256"];
    let result = kept(&[&run[..], &["--replicas", "2", "--test-samples", "64"]].concat(), 3.0);
    assert_eq!(result["routes"][0]["route"], "theory");
    assert_eq!(result["routes"][0]["stop"]["reason"], "completed");
}

/// Two signals at once, as some programs send them, are one: the run is kept.
#[test]
fn two_signals_at_once_are_one() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let root = tempfile::tempdir().unwrap();
    let run = ["simulate", "--engine", "overlap", "--dimension", "100000", "--tau", "100000", "--out", "o"];
    let mut child = start(root.path(), &run);
    worked(&mut child, 1.0);
    let pair = format!("kill -TERM {0}; kill -TERM {0}", child.id());
    assert!(Command::new("sh").args(["-c", &pair]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(root.path().join("o/checkpoint.json").exists() && root.path().join("o/result.json").exists());
    assert!(String::from_utf8_lossy(&output.stdout).contains("--resume o"));
    // The hidden files of writes are gone as well.
    let hidden = |name: &str| name.starts_with('.');
    let left = std::fs::read_dir(root.path().join("o")).unwrap().map(|e| e.unwrap().file_name());
    assert!(left.into_iter().all(|name| !hidden(name.to_str().unwrap())));
}

/// An error after Ctrl-C is that error: here a disk that is full for the result, as a limit on the size of files.
#[test]
fn an_error_after_an_interruption_is_told_as_it_is() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let root = tempfile::tempdir().unwrap();
    let program = env!("CARGO_BIN_EXE_headflow");
    // At most 2 or 4 MiB a file, as shells count; the table of 32 heads takes 60 KiB a record.
    let run = format!(
        "trap '' XFSZ; ulimit -f 4096; exec {program} flow --heads 32 --points 64 --scrambles 1 --tau 1e7 --records 100000 \
         --gamma 0 --memory 99 --out o"
    );
    let mut child = Command::new("sh")
        .args(["-c", &run])
        .current_dir(root.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    worked(&mut child, 3.0);
    signal(&child, "-INT");
    let output = child.wait_with_output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("o/series.csv: cannot be written: ") && error.contains("too large"), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
}

/// A process that is killed leaves its checkpoint, also once it goes on from it; the end is that of an unbroken run.
#[test]
fn a_killed_chain_goes_on() {
    let root = tempfile::tempdir().unwrap();
    let run = ["simulate", "--engine", "overlap", "--dimension", "1000000", "--tau", "8", "--records", "3"];
    let run = [&run[..], &["--heads", "2", "--theta", "flip:2", "--length", "4", "--test-samples", "64"]].concat();
    let read = |path: &str| std::fs::read(root.path().join(path)).unwrap();
    interrupted(root.path(), &[&run[..], &["--out", "o"]].concat(), 0.5);
    let checkpoint = read("o/checkpoint.json");
    {
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let mut child = start(root.path(), &["simulate", "--resume", "o"]);
        worked(&mut child, 0.5);
        // Meanwhile nobody else goes on with it, or begins anew there.
        for arguments in [&["simulate", "--resume", "o"][..], &["flow", "--out", "o", "--force"]] {
            let output = headflow(root.path(), arguments);
            let error = String::from_utf8(output.stderr).unwrap();
            assert_eq!(output.status.code(), Some(2), "{error}");
            assert!(error.contains("another run is writing to it"), "{error}");
        }
        signal(&child, "-KILL");
        child.wait_with_output().unwrap();
    }
    assert_eq!(read("o/checkpoint.json"), checkpoint);
    ok(root.path(), &["simulate", "--resume", "o"]);
    assert!(!root.path().join("o/checkpoint.json").exists());
    ok(root.path(), &[&run[..], &["--out", "unbroken"]].concat());
    assert_eq!(read("o/series.csv"), read("unbroken/series.csv"));
}
