//! The program as a user meets it: runs of it, and what they say.

// Each test program uses a part of this.
#![allow(dead_code)]

use std::path::Path;
use std::process::{Child, Command, Output};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Runs the program in a folder.
pub fn headflow(folder: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_headflow")).args(arguments).current_dir(folder).output().unwrap()
}

/// What a run prints that succeeds and has nothing to complain of.
pub fn ok(folder: &Path, arguments: &[&str]) -> String {
    let output = headflow(folder, arguments);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{arguments:?} failed: {error}");
    assert!(error.is_empty(), "{arguments:?} said: {error}");
    String::from_utf8(output.stdout).unwrap()
}

/// Reads a document.
pub fn document(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

/// The document that a run prints.
pub fn printed(folder: &Path, arguments: &[&str]) -> Value {
    document(&ok(folder, &[arguments, &["--json"]].concat()))
}

/// Bad input: exit code 2, one line, which says `expected`, nothing on standard output.
pub fn refused(folder: &Path, arguments: &[&str], expected: &str) {
    let output = headflow(folder, arguments);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
    assert_eq!(error.trim_end().lines().count(), 1, "{arguments:?}: {error}");
    assert!(error.contains(expected), "{arguments:?}: {error}");
    assert!(output.stdout.is_empty(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stdout));
}

/// Waits until a run has worked for so many seconds of processor time: under way, however busy the machine is.
#[cfg(unix)]
pub fn worked(child: &mut Child, seconds: u64) {
    let began = Instant::now();
    loop {
        // One that has ended, and is not waited for, still has its time.
        if let Some(status) = child.try_wait().unwrap() {
            panic!("the run ended before it had worked for {seconds} s: {status}");
        }
        // `[[days-]hours:]minutes:seconds`, the same on every Unix.
        let output = Command::new("ps").args(["-o", "time=", "-p", &child.id().to_string()]).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let parts = text.trim().split(['-', ':']).map(|part| part.parse::<u64>().ok());
        let parts: Option<Vec<u64>> = parts.collect();
        let units = [1, 60, 3600, 86_400];
        let spent: u64 =
            parts.iter().flat_map(|parts| parts.iter().rev().zip(units)).map(|(part, unit)| part * unit).sum();
        if spent >= seconds {
            return;
        }
        assert!(parts.is_some(), "the run ended before it had worked for {seconds} s: {text:?}");
        assert!(began.elapsed() < Duration::from_secs(600), "no work in ten minutes: {text:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
