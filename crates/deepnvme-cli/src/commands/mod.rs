//! The command `deepnvme`: what was typed, and what it means.
//!
//! [`run`] is the whole program behind the Rust binary and the wheel's entry point: arguments in, an exit status out.
//! `cli` is what may be typed, `session` what all commands share; each command's file turns that into a value of the
//! library, and the value that comes back into lines. Data goes to standard output, talk to standard error.

use std::ffi::OsString;
use std::io::IsTerminal;

use clap::Parser;
use clap::error::ErrorKind;
use deepnvme_io::shown;
use deepnvme_perf::bench::processes;
use deepnvme_perf::{Error, Result};

use crate::arguments::{Cli, Command};

mod bench;
mod checkpoint;
mod deepspeed;
mod gds;
mod pack;
mod progress_bar;
mod python;
mod report;
mod session;
mod shell;
mod streams;
mod tune;

pub use python::for_python;
pub use session::{Answer, Session};
use session::{closed, print};
pub use streams::{Output, keep_numbers};

/// Runs the command of these arguments; the first is the program's name. Returns the exit status: 0 done, 1 refused
/// by the machine or interrupted, 2 asked wrongly.
pub fn run(arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>, session: &mut Session<'_>) -> u8 {
    let arguments: Vec<OsString> = arguments.into_iter().map(Into::into).collect();
    let parsed = match Cli::try_parse_from(&arguments) {
        Ok(parsed) => parsed,
        Err(error) => return explain(&error, session),
    };
    let done = execute(parsed.command, &arguments, session);
    // Also after bad news: what was written may not have come anywhere.
    let done = session.output.flush().map_err(closed).and(done);
    ended(done, session)
}

fn ended(done: Result<()>, session: &mut Session<'_>) -> u8 {
    match done {
        Ok(()) => 0,
        Err(Error::Closed) => 0,
        Err(error) => {
            let _ = writeln!(session.talk, "deepnvme: {}", plain(&error.to_string()));
            error.exit_status()
        }
    }
}

/// As [`run`], for callers that want the value instead of its printing: `report`, `bench` and `tune` only.
///
/// # Errors
/// `Usage` for arguments that cannot be understood, and what the command ended with.
pub fn answer(
    arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    session: &mut Session<'_>,
) -> Result<Answer> {
    let parsed = Cli::try_parse_from(arguments).map_err(|error| Error::usage(error.render().to_string()))?;
    match parsed.command {
        Command::Report(options) => report::answer(&options, session),
        Command::Bench(options) => bench::answer(&options, session),
        Command::Tune(options) => tune::answer(&options, session),
        _ => Err(Error::usage("only report, bench and tune have an answer")),
    }
}

fn execute(command: Command, arguments: &[OsString], session: &mut Session<'_>) -> Result<()> {
    let answer = match command {
        Command::Report(options) => report::answer(&options, session)?,
        Command::Bench(options) => bench::answer(&options, session)?,
        Command::Tune(options) => tune::answer(&options, session)?,
        Command::Inspect(options) => checkpoint::inspection(&options, session)?,
        Command::Verify(options) => checkpoint::verification(&options, session)?,
        Command::Convert(options) => checkpoint::conversion(&options, session)?,
        Command::Generate(_) | Command::StreamBench(_) => return python::run(&arguments[1..], session),
        Command::Pack(options) => pack::answer(&options, session)?,
        Command::DsIo(options) => return deepspeed::run_io(*options, session),
        Command::DsNvmeTune(options) => return deepspeed::run_tune(*options, session),
        Command::BenchWorker => {
            let mut input = std::io::stdin().lock();
            return processes::serve(&mut input, session.output, session.interrupted).map_err(|_| Error::Closed);
        }
        Command::Completions { shell } => return shell::completions(shell, session),
        Command::Man => return shell::man(session),
    };
    print(session, &if answer.wants_json { answer.json + "\n" } else { answer.text })?;
    match (answer.is_cut_short, answer.bad_news) {
        (true, _) => Err(Error::CutShort),
        (false, Some(news)) => Err(Error::BadNews(news)),
        (false, None) => Ok(()),
    }
}

/// Help and versions are data; everything else clap says is talk, and a wrong use.
fn explain(error: &clap::Error, session: &mut Session<'_>) -> u8 {
    let text = error.render();
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        let styled = std::io::stdout().is_terminal();
        let shown = if styled { write!(session.output, "{}", text.ansi()) } else { write!(session.output, "{text}") };
        let shown = shown.and_then(|()| session.output.flush()).map_err(closed);
        return ended(shown, session);
    }
    let _ = write!(session.talk, "{text}");
    2
}

/// What a file says of itself may stand in an error: it moves no cursor, and begins no line that looks like one of ours.
fn plain(text: &str) -> String {
    let lines: Vec<String> = text.split('\n').map(|line| shown::text(line).to_string()).collect();
    lines.join("\n  ")
}
