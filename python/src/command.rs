//! The command line: the program of the Rust crates, run on a thread while Python looks for Ctrl-C.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use deepnvme_perf::Error;
use deepnvme_perf::bench::Launcher;
use deepnvme_perf::command::{self, Session};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::error;

/// How often Python may look for a signal.
const SLICE: Duration = Duration::from_millis(50);

/// Runs ``deepnvme ARGUMENTS...`` and returns its exit status.
#[pyfunction]
pub(crate) fn _command(py: Python<'_>, arguments: Vec<String>) -> PyResult<u8> {
    let python = interpreter(py)?;
    run(py, move |interrupted| {
        let (mut output, mut talk) = (std::io::stdout(), std::io::stderr());
        command::run(with_name(arguments), &mut session(&python, &mut output, &mut talk, interrupted))
    })
}

/// What ``deepnvme ARGUMENTS...`` found out, as JSON and as text.
#[pyfunction]
pub(crate) fn _answer(py: Python<'_>, arguments: Vec<String>) -> PyResult<(String, String)> {
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

fn with_name(arguments: Vec<String>) -> impl Iterator<Item = String> {
    std::iter::once("deepnvme".to_owned()).chain(arguments)
}

fn interpreter(py: Python<'_>) -> PyResult<String> {
    py.import("sys")?.getattr("executable")?.extract()
}

fn session<'a>(
    python: &str,
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

/// Runs `work` on a thread. A signal that Python turns into an exception interrupts it, and is raised when it has ended.
fn run<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce(&(dyn Fn() -> bool + Sync)) -> T + Send + 'static,
) -> PyResult<T> {
    let interrupted = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&interrupted);
    let (report, mut over) = mpsc::channel();
    std::thread::spawn(move || {
        let _ = report.send(work(&|| seen.load(Ordering::SeqCst)));
    });
    let mut raised = None;
    loop {
        let waited;
        (over, waited) = py.detach(move || {
            let waited = over.recv_timeout(SLICE);
            (over, waited)
        });
        match (waited, raised) {
            (Ok(_), Some(signal)) => return Err(signal),
            (Ok(value), None) => return Ok(value),
            (Err(mpsc::RecvTimeoutError::Disconnected), _) => {
                return Err(error::plain(py, "Error", "the thread of the command stopped".into()));
            }
            (Err(mpsc::RecvTimeoutError::Timeout), before) => raised = before,
        }
        if let Err(signal) = py.check_signals() {
            interrupted.store(true, Ordering::SeqCst);
            raised = Some(signal);
        }
    }
}
