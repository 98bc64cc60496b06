//! Runs the commands.
//!
//! [`run`] is the whole program of the Rust binary and of the wheel's entry point: it takes the arguments and returns
//! the exit status. `session` is the environment of a command and its result. Each command has a file that turns its
//! arguments into a call of a library. Results go to standard output, messages to standard error.

use std::ffi::OsString;
use std::io::IsTerminal;

use clap::Parser;
use clap::error::ErrorKind;
use deepnvme_io::display;
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
mod tune;

pub use python::python_command;
pub use session::{CommandResult, Session};
use session::{output_error, print};

/// Runs the command of these arguments; the first is the program's name. Returns the exit status: 0 success, 1 failure,
/// 2 usage error.
pub fn run(arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>, session: &mut Session<'_>) -> u8 {
    let arguments: Vec<OsString> = arguments.into_iter().map(Into::into).collect();
    let parsed = match Cli::try_parse_from(&arguments) {
        Ok(parsed) => parsed,
        Err(error) => return print_parse_error(&error, session),
    };
    let done = execute(parsed.command, &arguments, session);
    // Flush after a failure as well: its result has been written.
    let done = session.stdout.flush().map_err(output_error).and(done);
    exit_status(done, session)
}

/// Prints the error, and returns the exit status.
fn exit_status(done: Result<()>, session: &mut Session<'_>) -> u8 {
    match done {
        Ok(()) => 0,
        Err(Error::OutputClosed) => 0,
        Err(Error::Told(status)) => status,
        Err(error) => {
            let _ = writeln!(session.stderr, "deepnvme: {}", sanitised(&error.to_string()));
            error.exit_status()
        }
    }
}

/// Runs a command that has a result, and returns it instead of printing it.
///
/// # Errors
/// `Usage` for invalid arguments, and the error of the command.
pub fn result(
    arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    session: &mut Session<'_>,
) -> Result<CommandResult> {
    let parsed = Cli::try_parse_from(arguments).map_err(|error| Error::usage(error.render().to_string()))?;
    match parsed.command {
        Command::Report(options) => report::run(&options, session),
        Command::Bench(options) => bench::run(&options, session),
        Command::Tune(options) => tune::run(&options, session),
        Command::Inspect(options) => checkpoint::run_inspect(&options, session),
        Command::Verify(options) => checkpoint::run_verify(&options, session),
        Command::Convert(options) => checkpoint::run_convert(&options, session),
        Command::Pack(options) => pack::run(&options, session),
        _ => Err(Error::usage("this command has no result")),
    }
}

fn execute(command: Command, arguments: &[OsString], session: &mut Session<'_>) -> Result<()> {
    let is_read_only = match &command {
        Command::Report(_) | Command::Inspect(_) | Command::Verify(_) => true,
        Command::Pack(options) => options.dry_run,
        _ => false,
    };
    let result = match command {
        Command::Report(options) => report::run(&options, session)?,
        Command::Bench(options) => bench::run(&options, session)?,
        Command::Tune(options) => tune::run(&options, session)?,
        Command::Inspect(options) => checkpoint::run_inspect(&options, session)?,
        Command::Verify(options) => checkpoint::run_verify(&options, session)?,
        Command::Convert(options) => checkpoint::run_convert(&options, session)?,
        Command::Demo(_) | Command::Generate(_) | Command::StreamBench(_) | Command::Rows(_) => {
            return python::run(&arguments[1..], session);
        }
        Command::Pack(options) => pack::run(&options, session)?,
        Command::DsIo(options) => return deepspeed::run_io(*options, session),
        Command::DsNvmeTune(options) => return deepspeed::run_tune(*options, session),
        Command::BenchProcess => {
            let mut input = std::io::stdin().lock();
            return processes::serve(&mut input, session.stdout, session.interrupted).map_err(|_| Error::OutputClosed);
        }
        Command::Completions { shell } => return shell::completions(shell, session),
        Command::Man => return shell::man(session),
    };
    // Nothing of these commands stays, so that their end tells the user nothing. Others have ended their work.
    if is_read_only && (session.interrupted)() && !result.is_interrupted {
        return Err(Error::Interrupted);
    }
    print(session, &if result.wants_json { result.json + "\n" } else { result.text })?;
    match (result.is_interrupted, result.failure) {
        (true, _) => Err(Error::InterruptedWithResult),
        (false, Some(failure)) => Err(Error::Failure(failure)),
        (false, None) => Ok(()),
    }
}

/// Prints help and versions to standard output, and usage errors to standard error. Returns the exit status.
fn print_parse_error(error: &clap::Error, session: &mut Session<'_>) -> u8 {
    let text = error.render();
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        let styled = std::io::stdout().is_terminal();
        let shown = if styled { write!(session.stdout, "{}", text.ansi()) } else { write!(session.stdout, "{text}") };
        let shown = shown.and_then(|()| session.stdout.flush()).map_err(output_error);
        return exit_status(shown, session);
    }
    let _ = write!(session.stderr, "{text}");
    2
}

/// Escapes control characters and indents further lines: an error may quote text from a file, which must not move the
/// cursor or look like a message of ours.
fn sanitised(text: &str) -> String {
    let lines: Vec<String> = text.split('\n').map(|line| display::text(line).to_string()).collect();
    lines.join("\n  ")
}
