//! A net for wrong numbers, hangs and aborts: random calls of the program as a user meets it.
//!
//! ```text
//! every call ends within 10 s and 2 GiB
//!   with exit 0 and numbers that are numbers, within their ranges and their stated errors of a second evaluator,
//!   or with exit 2, one line, and nothing left behind
//! ```
//!
//! Each call is a pure function of a seed and its index. `HEADFLOW_FUZZ_CALLS`, `HEADFLOW_FUZZ_SEED`, `HEADFLOW_FUZZ_FIRST`
//! (the first index) and `HEADFLOW_FUZZ_JOBS` (calls at once) choose others than a plain `cargo test` does;
//! `HEADFLOW_FUZZ_PROGRAM` names another program, `HEADFLOW_FUZZ_LOG` a file for every call and what came of it. `scripts/fuzz` is the long form.
#![cfg(target_os = "linux")]

mod call;
mod check;
mod draw;
mod generate;
mod second;

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use call::Call;
use check::{End, Fault};
use draw::Draw;
use generate::Material;

/// Calls of a plain `cargo test`.
const CALLS: u64 = 150;

/// Failures after which no further call begins.
const MOST_FAILURES: usize = 200;

/// How long a failing call is made smaller.
const SHRINKING: Duration = Duration::from_secs(60);

fn setting(name: &str, default: u64) -> u64 {
    let name = format!("HEADFLOW_FUZZ_{name}");
    match std::env::var(&name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name} is \"{text}\", not a whole number")),
        Err(_) => default,
    }
}

#[derive(Default)]
struct Summary {
    log: Option<std::fs::File>,
    calls: u64,
    ends: BTreeMap<String, u64>,
    commands: BTreeMap<String, [u64; 2]>,
    again: u64,
    slowest: (f64, String),
    largest: (u64, String),
    interrupted: Vec<String>,
    disagreed: Vec<String>,
    failures: Vec<String>,
    kinds: BTreeMap<&'static str, u64>,
    /// Refusals by the field that they name.
    refused: BTreeMap<String, u64>,
}

/// One call with all its checks.
fn examine(call: &Call, draw: &mut Draw, program: &str, summary: Option<&Mutex<Summary>>) -> Result<End, Fault> {
    let outcome = call.run(program);
    if let Some(summary) = summary {
        let mut summary = summary.lock().unwrap();
        if let (Some(2), Some((field, _))) =
            (outcome.code(), outcome.error.trim_start_matches("headflow: ").split_once(':'))
        {
            *summary.refused.entry(field.chars().take(40).collect()).or_default() += 1;
        }
        if let Some(log) = &mut summary.log {
            let problem: String = outcome.error.chars().take(300).collect();
            let _ =
                writeln!(log, "{:?} {:.2} s  {}\n    {}", outcome.code(), outcome.seconds, call.line(), problem.trim());
        }
        if outcome.seconds > summary.slowest.0 {
            summary.slowest = (outcome.seconds, call.line());
        }
        if outcome.memory > summary.largest.0 {
            summary.largest = (outcome.memory, call.line());
        }
    }
    let (end, document) = check::check(call, &outcome)?;
    if let (Some(document), End::Done) = (&document, end) {
        let mut again = second::check_again(call, document, draw, program)?;
        if outcome.seconds < 2.0 && draw.chance(0.2) {
            again |= second::check_bits(call, document, draw, program)?;
        }
        if let (Some(summary), true) = (summary, again) {
            summary.lock().unwrap().again += 1;
        }
    }
    Ok(end)
}

/// The call with as few words as still fail in the same way.
fn shrunk(call: &Call, kind: &str, program: &str, draw: impl Fn() -> Draw) -> (Call, Option<Fault>) {
    let begin = Instant::now();
    let (mut smallest, mut found) = (call.clone(), None);
    let mut at = 0;
    loop {
        let mut fewer = smallest.clone();
        let flags = fewer.flags.len();
        let fields = fewer.file.as_ref().map_or(0, |(_, fields)| fields.len());
        if at < flags {
            fewer.flags.remove(at);
        } else if let (Some((_, all)), true) = (&mut fewer.file, at < flags + fields) {
            all.remove(at - flags);
        } else {
            break;
        }
        if begin.elapsed() > SHRINKING {
            break;
        }
        match examine(&fewer, &mut draw(), program, None) {
            Err(fault) if fault.kind == kind => {
                smallest = fewer;
                found = Some(fault);
            }
            _ => at += 1,
        }
    }
    (smallest, found)
}

/// Results for calls that read some.
fn material(program: &str) -> Material {
    let task = "--heads 2 --theta flip:2 --length 3 --points 64 --scrambles 2";
    let short = format!("{task} --tau 4 --records 5");
    let simulated = "--replicas 2 --test-samples 16";
    let makers = [
        ("flow", format!("flow {short}")),
        ("compare", format!("compare {short} {simulated} --dimensions 10,20")),
        ("stages", format!("stages {task} --tau 60 --records 60")),
        ("spectrum", "figure spectrum --heads 2 --theta flip:2 --length 3 --points 64 --tau 4 --records 5".into()),
        ("prune", "prune --heads 3 --theta flip:2 --length 3 --points 64 --tau 4 --records 5".into()),
        ("phase", "phase --quantity bayes-risk --theta flip:1 --x theta.nu=1,2 --y length=2,3".into()),
        (
            "xsa-bias",
            "xsa bias --rho 0,0.5 --self-attention 0.1,0.5 --lengths 4 --sequences 2 --key-size 4 --value-size 4"
                .into(),
        ),
    ];
    let mut results = Vec::new();
    for (name, words) in makers {
        let command = words.split(' ').map(str::to_string).collect();
        let call = Call { command, ..Call::default() }.with(&["--out", "made", "-q"]);
        let outcome = call.run(program);
        assert!(matches!(outcome.code(), Some(0 | 1)), "{}: {}", call.line(), outcome.error);
        let made = outcome.folder.path().join("work/made");
        let files: Vec<(String, Vec<u8>)> = ["result.json", "series.csv"]
            .iter()
            .filter_map(|file| Some((file.to_string(), std::fs::read(made.join(file)).ok()?)))
            .collect();
        assert!(!files.is_empty(), "{} wrote nothing", call.line());
        results.push((name.to_string(), files));
    }
    results.push((
        "checkpoint".into(),
        vec![("checkpoint.json".into(), br#"{"format": "headflow-checkpoint"}"#.to_vec())],
    ));
    Material { results }
}

#[test]
fn every_call_ends_with_numbers_or_one_line() {
    let program = std::env::var("HEADFLOW_FUZZ_PROGRAM").unwrap_or(env!("CARGO_BIN_EXE_headflow").into());
    assert!(Path::new(&program).exists(), "{program} does not exist");
    let (calls, seed, first) = (setting("CALLS", CALLS), setting("SEED", 1), setting("FIRST", 0));
    let jobs = setting("JOBS", std::thread::available_parallelism().map_or(1, |n| n.get() as u64));
    let (next, begin) = (AtomicU64::new(first), Instant::now());
    let log = std::env::var("HEADFLOW_FUZZ_LOG").ok().map(|path| std::fs::File::create(path).unwrap());
    let summary = Mutex::new(Summary { log, ..Summary::default() });
    let material = material(&program);
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    if index >= first + calls || summary.lock().unwrap().failures.len() >= MOST_FAILURES {
                        break;
                    }
                    one(seed, index, &program, &material, &summary);
                }
            });
        }
    });
    let summary = summary.into_inner().unwrap();
    println!("{}", report(&summary, seed, begin.elapsed()));
    assert!(summary.failures.is_empty(), "{} of {} calls failed", summary.failures.len(), summary.calls);
}

fn one(seed: u64, index: u64, program: &str, material: &Material, summary: &Mutex<Summary>) {
    let mut draw = Draw::new(seed, index);
    let call = generate::call(&mut draw, material);
    let again = || Draw::new(seed, index);
    let outcome = examine(&call, &mut again(), program, Some(summary));
    {
        let mut summary = summary.lock().unwrap();
        summary.calls += 1;
        let command = summary.commands.entry(call.command.join(" ")).or_default();
        command[0] += 1;
        command[1] += u64::from(outcome == Ok(End::Done));
        let end = outcome.as_ref().map_or("failed".to_string(), |end| format!("{end:?}").to_lowercase());
        *summary.ends.entry(end).or_default() += 1;
        match outcome {
            Ok(End::Interrupted) => summary.interrupted.push(call.line()),
            Ok(End::Disagreed) => summary.disagreed.push(call.line()),
            _ => {}
        }
    }
    if let Err(fault) = outcome {
        let (small, found) = shrunk(&call, fault.kind, program, again);
        let Fault { kind, what } = found.unwrap_or(fault);
        let what: String = what.chars().take(600).collect();
        let text = format!("{kind} (seed {seed}, call {index})\n  {}\n  {what}", small.line());
        eprintln!("{text}");
        let mut summary = summary.lock().unwrap();
        *summary.kinds.entry(kind).or_default() += 1;
        summary.failures.push(text);
    }
}

fn report(summary: &Summary, seed: u64, time: Duration) -> String {
    let mut text = format!("{} calls in {:.0} s, seed {seed}:", summary.calls, time.as_secs_f64());
    for (end, count) in &summary.ends {
        text += &format!(" {count} {end},");
    }
    text += &format!(" {} checked by a second evaluator or run\n", summary.again);
    for (command, [all, done]) in &summary.commands {
        text += &format!("  {command}: {done} of {all} done\n");
    }
    let mut refused: Vec<_> = summary.refused.iter().collect();
    refused.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
    let refused: Vec<String> = refused.iter().take(30).map(|(field, count)| format!("{field} {count}")).collect();
    text += &format!("refused for: {}\n", refused.join(", "));
    text += &format!("slowest {:.1} s: {}\n", summary.slowest.0, summary.slowest.1);
    text += &format!("most memory {} MiB: {}\n", summary.largest.0 >> 20, summary.largest.1);
    for (what, lines) in [("interrupted as long work", &summary.interrupted), ("disagreed", &summary.disagreed)] {
        for line in lines {
            text += &format!("{what}: {line}\n");
        }
    }
    for (kind, count) in &summary.kinds {
        text += &format!("FAILED {count} x {kind}\n");
    }
    for failure in &summary.failures {
        text += &format!("{failure}\n");
    }
    text
}
