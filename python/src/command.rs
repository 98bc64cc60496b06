//! The command line: the program of the Rust crates, run on a thread while Python looks for Ctrl-C.

use std::ffi::{OsStr, OsString};

use deepnvme_cli::commands::{self as command, Session};
use deepnvme_cli::{Error, Launcher};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::background::run;
use crate::error;

/// Runs ``deepnvme ARGUMENTS...`` and returns its exit status.
#[pyfunction]
pub(crate) fn _command(py: Python<'_>, arguments: Vec<OsString>) -> PyResult<u8> {
    let python = interpreter(py)?;
    command::keep_numbers();
    run(py, move |interrupted| {
        let (mut output, mut talk) = (command::Output::new(), std::io::stderr());
        command::run(with_name(arguments), &mut session(&python, &mut output, &mut talk, interrupted))
    })
}

/// The name and the options, as JSON, of a command that Python itself runs; ``None`` for all others.
#[pyfunction]
pub(crate) fn _python_command(arguments: Vec<OsString>) -> Option<(&'static str, String)> {
    command::keep_numbers();
    command::for_python(with_name(arguments))
}

/// What ``deepnvme ARGUMENTS...`` found out, as JSON and as text.
#[pyfunction]
pub(crate) fn _answer(py: Python<'_>, arguments: Vec<OsString>) -> PyResult<(String, String)> {
    let python = interpreter(py)?;
    let answer = run(py, move |interrupted| {
        let (mut output, mut talk) = (std::io::sink(), std::io::stderr());
        command::answer(with_name(arguments), &mut session(&python, &mut output, &mut talk, interrupted))
    })?;
    match answer {
        Ok(answer) => Ok((answer.json, answer.text)),
        Err(Error::Usage(text)) => Err(PyValueError::new_err(text)),
        Err(Error::Engine(failure)) => Err(error::raise(py, &failure)),
        Err(other) => Err(error::plain(py, "Error", other.to_string())),
    }
}

fn with_name(arguments: Vec<OsString>) -> impl Iterator<Item = OsString> {
    std::iter::once("deepnvme".into()).chain(arguments)
}

fn interpreter(py: Python<'_>) -> PyResult<OsString> {
    py.import("sys")?.getattr("executable")?.extract()
}

fn session<'a>(
    python: &OsStr,
    output: &'a mut (dyn std::io::Write + Send),
    talk: &'a mut (dyn std::io::Write + Send),
    interrupted: &'a (dyn Fn() -> bool + Sync),
) -> Session<'a> {
    Session {
        output,
        talk,
        interrupted,
        launcher: Launcher { program: python.into(), arguments: vec!["-m".into(), "deepnvme".into()] },
        python: python.into(),
    }
}
