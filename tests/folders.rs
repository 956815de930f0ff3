//! Result folders as a user meets them: what is replaced, what stays, and disks that are full.

mod common;

use std::path::Path;

use common::{headflow, ok, refused};

const SHORT: [&str; 8] = ["flow", "--tau", "1", "--records", "3", "--points", "64", "--gamma=0"];

fn write(folder: &Path, name: &str) {
    std::fs::write(folder.join(name), "mine").unwrap();
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// A run in a folder with files of the user's own, whatever their names, leaves them alone.
#[test]
fn files_of_the_user_stay() {
    let root = tempfile::tempdir().unwrap();
    let own = ["pruning.png", "phase.svg", "heads.png", "positions.npz", "xsa-model.svg", "checkpoint.json"];
    own.iter().for_each(|name| write(root.path(), name));
    ok(root.path(), &[&SHORT[..], &["--out", "."]].concat());
    for name in own {
        assert_eq!(std::fs::read_to_string(root.path().join(name)).unwrap(), "mine", "{name}");
    }
    // Not even when the result is replaced by one of another kind, which takes the old one's files with it.
    ok(root.path(), &["bayes", "--out", ".", "--force"]);
    let mut left: Vec<String> = own.iter().map(ToString::to_string).chain(["result.json".into()]).collect();
    left.sort();
    assert_eq!(names(root.path()), left);
    // Names that the run needs are not taken unasked.
    std::fs::remove_file(root.path().join("result.json")).unwrap();
    for name in ["series.csv", "comparison.svg", "result.json"] {
        write(root.path(), name);
        refused(root.path(), &[&SHORT[..], &["--out", "."]].concat(), name);
        assert_eq!(std::fs::read_to_string(root.path().join(name)).unwrap(), "mine");
        std::fs::remove_file(root.path().join(name)).unwrap();
    }
    write(root.path(), "series.csv");
    ok(root.path(), &[&SHORT[..], &["--out", ".", "--force"]].concat());
    assert_ne!(std::fs::read_to_string(root.path().join("series.csv")).unwrap(), "mine");
}

/// A shell runs the program under a limit on the size of files: beyond it every write fails.
#[cfg(unix)]
fn limited(folder: &Path, blocks: usize, arguments: &str) -> (Option<i32>, String) {
    let program = env!("CARGO_BIN_EXE_headflow");
    let run = format!("trap '' XFSZ; ulimit -f {blocks}; exec {program} {arguments}");
    let output = std::process::Command::new("sh").args(["-c", &run]).current_dir(folder).output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

/// Room for a result is looked for before any work.
#[cfg(unix)]
#[test]
fn a_full_disk_is_found_at_the_start() {
    let root = tempfile::tempdir().unwrap();
    let work = "flow --tau 1e6 --records 10000 --points 65536 --heads 8";
    let (code, error) = limited(root.path(), 8, &format!("{work} --out o"));
    assert_eq!((code, error.lines().count()), (Some(2), 1), "{error}");
    assert!(error.starts_with("headflow: o: cannot be written: ") && error.contains("too large"), "{error}");
    let (code, error) = limited(root.path(), 8, work);
    assert_eq!(code, Some(2), "{error}");
    assert!(names(root.path()).is_empty(), "{:?}", names(root.path()));
}

/// A disk that is full for the result leaves the checkpoint: the run is not lost.
#[cfg(unix)]
#[test]
fn a_full_disk_leaves_the_checkpoint() {
    let root = tempfile::tempdir().unwrap();
    let whole = ["simulate", "--engine", "overlap", "--dimension", "100000000", "--tau", "1e-5", "--records", "30001"];
    let whole = [&whole[..], &["--heads", "2", "--theta", "flip:2", "--length", "4", "--test-samples", "2"]].concat();
    ok(root.path(), &[&whole[..], &["--out", "whole", "--replicas", "2"]].concat());
    // A checkpoint at the start of the same run, as an interruption writes it.
    let spec = ok(root.path(), &[&whole[..], &["--print-spec", "--replicas", "2"]].concat());
    let header = serde_json::json!({
        "format": "headflow-checkpoint", "version": env!("CARGO_PKG_VERSION"), "spec": common::document(&spec),
        "checkpoint": {"runs": []},
    });
    let mut saved = header;
    let result = std::fs::read_to_string(root.path().join("whole/result.json")).unwrap();
    let first = &common::document(&result)["routes"][0];
    // Given starts are alike in all replicas, and so is their state at the first record.
    let m: Vec<f64> = first["m"][0].as_array().unwrap().iter().map(|row| row[0].as_f64().unwrap()).collect();
    let r = |h: usize, k: usize| first["r"][0][h][k].as_f64().unwrap() - m[h] * m[k];
    let c00 = r(0, 0).sqrt();
    let c10 = r(1, 0) / c00;
    let state = serde_json::json!({
        "step": 0, "m": m, "c": [c00, 0.0, c10, (r(1, 1) - c10 * c10).sqrt()], "b": [0.0, 0.0],
    });
    saved["checkpoint"]["runs"] = serde_json::json!([{"state": state, "rows": []}, {"state": state, "rows": []}]);
    std::fs::create_dir(root.path().join("o")).unwrap();
    std::fs::write(root.path().join("o/checkpoint.json"), saved.to_string()).unwrap();

    let (code, error) = limited(root.path(), 4096, "simulate --resume o");
    assert_eq!((code, error.lines().count()), (Some(2), 1), "{error}");
    assert!(error.contains("o/series.csv: cannot be written: ") && error.contains("too large"), "{error}");
    assert_eq!(names(&root.path().join("o")), ["checkpoint.json"]);
    ok(root.path(), &["simulate", "--resume", "o"]);
    assert!(!root.path().join("o/checkpoint.json").exists() && root.path().join("o/result.json").exists());
}

/// Results are as private, or as shared, as the user's other new files.
#[cfg(unix)]
#[test]
fn the_mask_of_new_files_is_kept() {
    use std::os::unix::fs::PermissionsExt;
    let program = env!("CARGO_BIN_EXE_headflow");
    for (mask, mode) in [("077", 0o600), ("002", 0o664), ("027", 0o640)] {
        let root = tempfile::tempdir().unwrap();
        let run = format!("umask {mask}; exec {program} {} --out o", SHORT.join(" "));
        assert!(
            std::process::Command::new("sh")
                .args(["-c", &run])
                .current_dir(root.path())
                .output()
                .unwrap()
                .status
                .success()
        );
        let files = names(&root.path().join("o"));
        assert_eq!(files.len(), 5, "{files:?}");
        for name in files {
            let found = std::fs::metadata(root.path().join("o").join(&name)).unwrap().permissions().mode() & 0o777;
            assert_eq!(found, mode, "{name} under {mask}");
        }
    }
}

/// What a killed process left of a file on its way is swept up by the next run there.
#[test]
fn leftovers_of_killed_runs_are_swept_up() {
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir(root.path().join("o")).unwrap();
    write(&root.path().join("o"), ".headflow-a1b2c3.tmp");
    write(&root.path().join("o"), "notes.tmp");
    ok(root.path(), &[&SHORT[..], &["--out", "o"]].concat());
    let left = names(&root.path().join("o"));
    assert!(!left.contains(&".headflow-a1b2c3.tmp".into()) && left.contains(&"notes.tmp".into()), "{left:?}");
}

/// A failed write is told as one.
#[cfg(unix)]
#[test]
fn a_folder_that_cannot_be_written_is_told_as_such() {
    let root = tempfile::tempdir().unwrap();
    write(root.path(), "file");
    let output = headflow(root.path(), &[&SHORT[..], &["--out", "file/below"]].concat());
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(error.starts_with("headflow: file/below: cannot be written: "), "{error}");
}
