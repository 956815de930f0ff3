//! The program `headflow`: reads a command line, runs one command, says what came of it.

mod cli;
mod commands;
mod progress;

use std::process::ExitCode;
use std::time::Duration;

use headflow::model::Error;
use headflow::model::text::shown;

fn main() -> ExitCode {
    // A panic is a bug of ours; the user gets one line all the same.
    std::panic::set_hook(Box::new(|info| {
        let place = info.location().map(|l| format!(" at {}:{}", l.file(), l.line())).unwrap_or_default();
        eprintln!(
            "headflow: internal error{place}: {}; please report it with the command line",
            shown(info.payload_as_str().unwrap_or("panic"))
        );
    }));
    let matches = match cli::build().try_get_matches() {
        Ok(matches) => matches,
        Err(error)
            if error.use_stderr()
                && error.kind() != clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand =>
        {
            return fail(&one_line(&error.to_string()));
        }
        Err(error) => {
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(2) } else { ExitCode::SUCCESS };
        }
    };
    let outcome = cli::request(&matches).and_then(|request| {
        if let Some(threads) = request.threads {
            rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build_global()
                .map_err(|e| Error::invalid("threads", e.to_string()))?;
        }
        let (what, keeps_records) = commands::interrupted(&request);
        // These have no work that stops by itself.
        let at_once = ["loss", "bayes", "doctor"].contains(&request.command.as_str());
        progress::catch_interrupts(&what, keeps_records, if at_once { Duration::ZERO } else { progress::PATIENCE });
        commands::run(&request)
    });
    if outcome.is_err() {
        progress::work_has_stopped();
    }
    match outcome {
        Ok(code) => ExitCode::from(code),
        // Only an interruption is one: a full disk after Ctrl-C is still a full disk.
        Err(error @ Error::Interrupted { .. }) => {
            fail(&error.to_string());
            ExitCode::from(130)
        }
        Err(error) => fail(&error.to_string()),
    }
}

fn fail(message: &str) -> ExitCode {
    commands::complain(message);
    ExitCode::from(2)
}

/// The parser's message without its usage text: what is wrong, and its tip.
fn one_line(message: &str) -> String {
    let mut text = String::new();
    for line in message.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:")).filter(|l| !l.is_empty())
    {
        if !text.is_empty() {
            text += if text.ends_with(':') { " " } else { "; " };
        }
        text += line;
    }
    format!("{} (see headflow --help)", text.strip_prefix("error: ").unwrap_or(&text))
}
