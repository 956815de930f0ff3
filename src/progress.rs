//! Progress on a terminal, silence in a pipe, and Ctrl-C.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use headflow::model::Watch;
use indicatif::{ProgressBar, ProgressStyle};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Makes the first Ctrl-C end the work with what it has, and the second end the program.
pub fn catch_interrupts() {
    // Without a handler Ctrl-C simply ends the program: nothing to report.
    let _ = ctrlc::set_handler(|| {
        if INTERRUPTED.swap(true, Ordering::SeqCst) {
            std::process::exit(130);
        }
    });
}

/// Whether Ctrl-C was pressed.
pub fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::SeqCst)
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
