//! Long work on a thread of its own, while Python looks for Ctrl-C and at the progress.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use pyo3::prelude::*;

use crate::{error, threads};

/// How often Python may look for a signal.
const SLICE: Duration = Duration::from_millis(50);

/// Runs `work` on a thread. A signal that Python turns into an exception interrupts it, and is raised when it has ended.
pub(crate) fn run<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce(&(dyn Fn() -> bool + Sync)) -> T + Send + 'static,
) -> PyResult<T> {
    let interrupted = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&interrupted);
    let stop = move || interrupted.store(true, Ordering::SeqCst);
    watch(py, move || work(&|| seen.load(Ordering::SeqCst)), &mut || Ok(()), &stop)
}

/// Runs `work`, which changes nothing, on a thread. A signal that Python turns into an exception is raised at once: the
/// thread ends by itself, and what it found is dropped there.
pub(crate) fn read_only<T: Send + 'static>(py: Python<'_>, work: impl FnOnce() -> T + Send + 'static) -> PyResult<T> {
    let (report, mut over) = mpsc::channel();
    threads::start(py, "deepnvme-open", move || {
        let _ = report.send(work());
    })?;
    loop {
        let waited;
        (over, waited) = py.detach(move || {
            let waited = over.recv_timeout(SLICE);
            (over, waited)
        });
        match waited {
            Ok(value) => return Ok(value),
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                return Err(error::plain(py, "Error", "the thread that did the work stopped".into()));
            }
            Err(mpsc::RecvTimeoutError::Timeout) => py.check_signals()?,
        }
    }
}

/// Runs `work` on a thread. `look` is called now and then; what it raises, or a signal, calls `stop`, and is raised when
/// the work has ended.
pub(crate) fn watch<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> T + Send + 'static,
    look: &mut dyn FnMut() -> PyResult<()>,
    stop: &dyn Fn(),
) -> PyResult<T> {
    let (report, mut over) = mpsc::channel();
    threads::start(py, "deepnvme-work", move || {
        let _ = report.send(work());
    })?;
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
                return Err(error::plain(py, "Error", "the thread that did the work stopped".into()));
            }
            (Err(mpsc::RecvTimeoutError::Timeout), before) => raised = before,
        }
        if let Err(signal) = py.check_signals().and_then(|()| if raised.is_none() { look() } else { Ok(()) }) {
            stop();
            raised = Some(signal);
        }
    }
}
