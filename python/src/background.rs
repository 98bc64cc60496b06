//! Run long work on its own thread while Python polls for Ctrl-C and progress.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use pyo3::prelude::*;

use deepnvme_mem::CreatorProcess;

use crate::{error, threads};

/// Interval between signal checks.
const SIGNAL_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Runs `work` on a thread. If a signal raises a Python exception, `work` is interrupted and the exception is raised
/// once it ends.
pub(crate) fn run<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce(&(dyn Fn() -> bool + Sync)) -> T + Send + 'static,
) -> PyResult<T> {
    let interrupted = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&interrupted);
    let stop = move || interrupted.store(true, Ordering::SeqCst);
    run_polling(py, move || work(&|| seen.load(Ordering::SeqCst)), &mut || Ok(()), &stop)
}

/// Runs `work`, which changes no file, on a thread. An exception from a signal is raised at once: the thread ends by
/// itself and drops its result.
pub(crate) fn run_read_only<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    let creator = CreatorProcess::current();
    let started = threads::start(py, "deepnvme-open", work)?;
    loop {
        check_process(py, creator)?;
        match started.wait(py, SIGNAL_CHECK_INTERVAL) {
            Ok(value) => return Ok(value),
            Err(RecvTimeoutError::Disconnected) => {
                return Err(error::plain(py, "Error", "the thread that did the work stopped".into()));
            }
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
        }
    }
}

/// Runs `work` on a thread and calls `poll` at intervals. After an exception from `poll` or a signal, it calls `stop`,
/// and raises the exception once the work ends.
pub(crate) fn run_polling<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> T + Send + 'static,
    poll: &mut dyn FnMut() -> PyResult<()>,
    stop: &dyn Fn(),
) -> PyResult<T> {
    let creator = CreatorProcess::current();
    let started = threads::start(py, "deepnvme-work", work)?;
    let mut raised = None;
    loop {
        if let Err(forked) = check_process(py, creator) {
            return Err(raised.unwrap_or(forked));
        }
        match (started.wait(py, SIGNAL_CHECK_INTERVAL), raised) {
            (Ok(_), Some(signal)) => return Err(signal),
            (Ok(value), None) => return Ok(value),
            (Err(RecvTimeoutError::Disconnected), _) => {
                return Err(error::plain(py, "Error", "the thread that did the work stopped".into()));
            }
            (Err(RecvTimeoutError::Timeout), before) => raised = before,
        }
        if let Err(signal) = py.check_signals().and_then(|()| if raised.is_none() { poll() } else { Ok(()) }) {
            stop();
            raised = Some(signal);
        }
    }
}

/// Raises `ClosedError` in a child that a signal handler or a callback has forked: the work goes on in the parent only.
pub(crate) fn check_process(py: Python<'_>, creator: CreatorProcess) -> PyResult<()> {
    if creator.is_current() {
        return Ok(());
    }
    let text = "the call began in the parent of this forked process, and goes on there only";
    Err(error::plain(py, "ClosedError", text.into()))
}
