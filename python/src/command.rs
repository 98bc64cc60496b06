//! Run `deepnvme-cli` on a thread while Python checks for Ctrl-C.

use std::ffi::{OsStr, OsString};

use deepnvme_cli::commands::{self, Session};
use deepnvme_cli::{CheckedStdout, Error, Launcher, reserve_standard_streams};
use pyo3::prelude::*;

use crate::checkpoint;
use crate::error::{self, InvalidArgumentError};
use crate::interruptible::{run, run_stoppable_read_only, run_to_end};

/// Run ``deepnvme ARGUMENTS...`` and return its exit status.
#[pyfunction]
pub(crate) fn _run_command(py: Python<'_>, arguments: Vec<OsString>) -> PyResult<u8> {
    let python = interpreter(py)?;
    reserve_standard_streams();
    run_to_end(py, move |interrupted| {
        let (mut stdout, mut stderr) = (CheckedStdout::new(), std::io::stderr());
        commands::run(with_program_name(arguments), &mut session(&python, &mut stdout, &mut stderr, interrupted))
    })
}

/// Return the name and the options, as JSON, of a command that Python runs; ``None`` for all others.
#[pyfunction]
pub(crate) fn _python_command(arguments: Vec<OsString>) -> Option<(&'static str, String)> {
    reserve_standard_streams();
    commands::python_command(with_program_name(arguments))
}

/// Run ``deepnvme ARGUMENTS...`` and return its result as JSON and as text.
#[pyfunction]
pub(crate) fn _command_result(py: Python<'_>, arguments: Vec<OsString>) -> PyResult<(String, String)> {
    let python = interpreter(py)?;
    // With a folder of many checkpoints, they end seconds after they were interrupted.
    let is_read_only = arguments.first().is_some_and(|command| command == "verify" || command == "inspect");
    let work = move |interrupted: &(dyn Fn() -> bool + Sync)| {
        let (mut stdout, mut stderr) = (std::io::sink(), std::io::sink());
        commands::result(with_program_name(arguments), &mut session(&python, &mut stdout, &mut stderr, interrupted))
    };
    let result = if is_read_only { run_stoppable_read_only(py, work)? } else { run(py, work)? };
    match result {
        Ok(result) => Ok((result.json, result.text)),
        Err(Error::Usage(text)) => Err(InvalidArgumentError::new_err(text)),
        Err(Error::Engine(error)) => Err(error::to_exception(py, &error)),
        Err(Error::Library(error)) => Err(match error.downcast_ref() {
            Some(error) => checkpoint::to_exception(py, error),
            None => error::plain(py, "Error", error.to_string()),
        }),
        Err(other) => Err(error::plain(py, "Error", other.to_string())),
    }
}

fn with_program_name(arguments: Vec<OsString>) -> impl Iterator<Item = OsString> {
    std::iter::once("deepnvme".into()).chain(arguments)
}

fn interpreter(py: Python<'_>) -> PyResult<OsString> {
    py.import("sys")?.getattr("executable")?.extract()
}

fn session<'a>(
    python: &OsStr,
    stdout: &'a mut (dyn std::io::Write + Send),
    stderr: &'a mut (dyn std::io::Write + Send),
    interrupted: &'a (dyn Fn() -> bool + Sync),
) -> Session<'a> {
    Session {
        stdout,
        stderr,
        interrupted,
        launcher: Launcher { program: python.into(), arguments: vec!["-m".into(), "deepnvme".into()] },
        python: python.into(),
    }
}
