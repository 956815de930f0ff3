//! Progress on a terminal, silence in a pipe, and Ctrl-C.
//!
//! A first signal (Ctrl-C, SIGTERM, SIGHUP) asks the work to stop. Where nothing is recorded that would be lost, the program
//! ends after [`PATIENCE`] even if the work has not noticed; a further signal, from then on, ends it whatever there is. Neither
//! breaks into a write.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use headflow::model::{Error, Watch};
use indicatif::{ProgressBar, ProgressStyle};

/// How long work has to stop by itself, and signals count as the same one: some programs send two at once.
pub const PATIENCE: Duration = Duration::from_secs(1);

/// Between two looks at what the program is doing.
const BETWEEN_LOOKS: Duration = Duration::from_millis(20);

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Whether the command keeps what it has recorded when it is interrupted.
static KEEPS_RECORDS: AtomicBool = AtomicBool::new(false);

/// What would be lost if the program ended now.
static STAGE: AtomicU8 = AtomicU8::new(NOTHING);
/// Nothing: there is no result yet, or it is on the disk.
const NOTHING: u8 = 0;
/// Records.
const RECORDS: u8 = 1;
/// A result that is being written, or words on why there is none.
const RESULT: u8 = 2;

static GLOBAL: Mutex<Global> =
    Mutex::new(Global { writes: 0, written: None, made: Vec::new(), last_words: String::new() });
static WRITTEN: Condvar = Condvar::new();

struct Global {
    /// Writes that have begun and not ended.
    writes: usize,
    /// When the result was written: the program then ends by itself, as soon as it is told.
    written: Option<Instant>,
    /// Folders that were made for results: those without any go again.
    made: Vec<PathBuf>,
    /// What to say when the program ends early.
    last_words: String,
}

fn global() -> MutexGuard<'static, Global> {
    GLOBAL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes a first signal end the work, called `what`, with what it has; where it would lose nothing, after `patience`.
pub fn catch_interrupts(what: &str, keeps_records: bool, patience: Duration) {
    KEEPS_RECORDS.store(keeps_records, Ordering::SeqCst);
    global().last_words = Error::interrupted(what).to_string();
    let mut first: Option<Instant> = None;
    // Without a handler Ctrl-C simply ends the program: nothing to report.
    let _ = ctrlc::set_handler(move || match first {
        None => {
            first = Some(Instant::now());
            INTERRUPTED.store(true, Ordering::SeqCst);
            // Without it the work ends when it notices.
            let _ = std::thread::Builder::new().spawn(move || end_when_nothing_is_lost(patience));
        }
        Some(first) if first.elapsed() < PATIENCE => {}
        Some(_) => end(|_| true),
    });
}

/// Ends the program once the work has had its time and nothing would be lost.
fn end_when_nothing_is_lost(patience: Duration) {
    std::thread::sleep(patience);
    loop {
        end(|global| {
            STAGE.load(Ordering::SeqCst) == NOTHING && global.written.is_none_or(|at| at.elapsed() >= PATIENCE)
        });
        std::thread::sleep(BETWEEN_LOOKS);
    }
}

/// Ends the program if it may, after the writes that have begun.
fn end(may: impl Fn(&Global) -> bool) {
    let mut global = global();
    while global.writes > 0 {
        global = WRITTEN.wait(global).unwrap_or_else(PoisonError::into_inner);
    }
    // No write can begin from here on.
    if may(&global) {
        for folder in &global.made {
            // Fails, as it should, when something is in it.
            let _ = std::fs::remove_dir(folder);
        }
        eprintln!("headflow: {}", global.last_words);
        std::process::exit(130);
    }
}

/// Whether a signal asked the work to stop.
pub fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::SeqCst)
}

/// Folders to remove if the program ends before anything is in them.
pub fn remove_if_empty(folders: &[PathBuf]) {
    global().made.extend_from_slice(folders);
}

/// A write that signals do not break into, while it lives.
#[must_use]
pub struct Write {
    result: bool,
}

/// Begins to write something on the way, say a checkpoint.
pub fn writing() -> Write {
    global().writes += 1;
    Write { result: false }
}

/// Begins to write the result, all its files.
pub fn writing_result() -> Write {
    STAGE.store(RESULT, Ordering::SeqCst);
    global().writes += 1;
    Write { result: true }
}

/// All that is recorded is on the disk: the program may end, and says so.
pub fn all_is_kept(last_words: &str) {
    global().last_words = last_words.into();
    STAGE.store(NOTHING, Ordering::SeqCst);
}

/// The work has stopped by itself, and the program is about to end: it says why, nobody else.
pub fn work_has_stopped() {
    let _global = global();
    STAGE.store(RESULT, Ordering::SeqCst);
}

impl Drop for Write {
    fn drop(&mut self) {
        let mut global = global();
        global.writes -= 1;
        if self.result {
            global.last_words = "interrupted after the result was written".into();
            global.written = Some(Instant::now());
            STAGE.store(NOTHING, Ordering::SeqCst);
        }
        WRITTEN.notify_all();
    }
}

/// A progress bar that passes Ctrl-C on to the work.
pub struct Progress(ProgressBar);

impl Progress {
    /// A bar for `total` units; `steps` shows them as steps a second.
    pub fn new(label: &str, total: u64, steps: bool, quiet: bool) -> Self {
        if quiet {
            return Self(ProgressBar::hidden());
        }
        let template = if steps {
            "{prefix:<16} [{bar:30}] {percent:>3}%  {per_sec}, {eta} left"
        } else {
            "{prefix:<16} [{bar:30}] {percent:>3}%  {eta} left"
        };
        let bar = ProgressBar::new(total);
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> ").with_key(
                "per_sec",
                |state: &indicatif::ProgressState, to: &mut dyn std::fmt::Write| {
                    let _ = write!(to, "{:.0} steps/s", state.per_sec());
                },
            ));
        }
        bar.set_prefix(label.to_string());
        bar.enable_steady_tick(Duration::from_millis(200));
        Self(bar)
    }
}

impl Watch for Progress {
    fn advance(&self, amount: u64) {
        if KEEPS_RECORDS.load(Ordering::Relaxed) && STAGE.load(Ordering::Relaxed) == NOTHING && !interrupted() {
            STAGE.store(RECORDS, Ordering::SeqCst);
        }
        self.0.inc(amount);
    }

    fn interrupted(&self) -> bool {
        interrupted()
    }
}

/// Passes Ctrl-C on to work without a bar.
pub struct Interruptible;

impl Watch for Interruptible {
    fn advance(&self, _: u64) {}

    fn interrupted(&self) -> bool {
        interrupted()
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
