//! Run long work on its own thread while Python polls for Ctrl-C and progress.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use pyo3::prelude::*;

use deepnvme_mem::CreatorProcess;

use crate::threads::SIGNAL_CHECK_INTERVAL;
use crate::{error, threads};

/// Signals are checked at most this often: a check takes the GIL.
const SIGNAL_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Less memory than this is there before a thread would be.
const BACKGROUND_BYTES_MIN: usize = 64 << 20;

/// Runs `work` on a thread. If a signal raises a Python exception, `work` is interrupted and the exception is raised
/// once it ends.
pub(crate) fn run<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce(&(dyn Fn() -> bool + Sync)) -> T + Send + 'static,
) -> PyResult<T> {
    let interrupted = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&interrupted);
    let stop = move || interrupted.store(true, Ordering::SeqCst);
    run_polling(py, move || work(&|| seen.load(Ordering::SeqCst)), &mut || Ok(()), &stop, None)
}

/// Like [`run`], for work that says itself whether it was interrupted: returns its result instead of the exception.
pub(crate) fn run_to_end<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce(&(dyn Fn() -> bool + Sync)) -> T + Send + 'static,
) -> PyResult<T> {
    run_interruptible(py, "deepnvme-work", OnSignal::Finish, work)
}

/// Runs `work`, which changes no file, on a thread. An exception from a signal is raised immediately: the thread ends
/// by itself and drops its result.
pub(crate) fn run_read_only<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    run_stoppable_read_only(py, move |_| work())
}

/// Like [`run_read_only`], for work that ends sooner when it is interrupted.
pub(crate) fn run_stoppable_read_only<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce(&(dyn Fn() -> bool + Sync)) -> T + Send + 'static,
) -> PyResult<T> {
    run_interruptible(py, "deepnvme-open", OnSignal::Raise, work)
}

/// The end of a call whose work a signal has interrupted.
#[derive(Clone, Copy, PartialEq, Eq)]
enum OnSignal {
    /// Raise the signal's exception immediately.
    Raise,
    /// Wait for the work, and return its result.
    Finish,
}

fn run_interruptible<T: Send + 'static>(
    py: Python<'_>,
    thread: &str,
    on_signal: OnSignal,
    work: impl FnOnce(&(dyn Fn() -> bool + Sync)) -> T + Send + 'static,
) -> PyResult<T> {
    let creator = CreatorProcess::current();
    let interrupted = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&interrupted);
    let started = threads::start(py, thread, move || work(&|| seen.load(Ordering::SeqCst)))?;
    loop {
        check_process(py, creator)?;
        let waited = started.wait(py, SIGNAL_CHECK_INTERVAL);
        // `Finish` checks also once the work has ended: an exception after it would replace the result.
        let is_checked = on_signal == OnSignal::Finish || matches!(waited, Err(RecvTimeoutError::Timeout));
        if is_checked && let Err(signal) = py.check_signals() {
            interrupted.store(true, Ordering::SeqCst);
            if on_signal == OnSignal::Raise {
                return Err(signal);
            }
        }
        match waited {
            Ok(value) => return Ok(value),
            Err(RecvTimeoutError::Disconnected) => return Err(thread_stopped(py)),
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

/// The error for work that panicked.
fn thread_stopped(py: Python<'_>) -> PyErr {
    error::plain(py, "Error", "the thread that did the work stopped".into())
}

/// Runs `work`, which allocates `nbytes` of locked memory: the kernel provides each page, which takes a second for some
/// gigabytes. An exception from a signal is raised immediately, as by [`run_read_only`].
pub(crate) fn allocate<T: Send + 'static>(
    py: Python<'_>,
    nbytes: usize,
    work: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    if nbytes < BACKGROUND_BYTES_MIN { Ok(py.detach(work)) } else { run_read_only(py, work) }
}

/// Runs `work` on a thread and calls `poll` at intervals. After an exception from `poll` or a signal, it calls `stop`,
/// and raises the exception once the work ends. With `patience`, for work that changes no file, it raises after that time
/// at the latest: the kernel may take longer to finish the reads that it has begun. The thread then ends by itself.
pub(crate) fn run_polling<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> T + Send + 'static,
    poll: &mut dyn FnMut() -> PyResult<()>,
    stop: &dyn Fn(),
    patience: Option<Duration>,
) -> PyResult<T> {
    let creator = CreatorProcess::current();
    let started = threads::start(py, "deepnvme-work", work)?;
    let (mut raised, mut stopped): (Option<PyErr>, Option<Instant>) = (None, None);
    loop {
        if let Err(forked) = check_process(py, creator) {
            return Err(raised.unwrap_or(forked));
        }
        match (started.wait(py, SIGNAL_CHECK_INTERVAL), raised) {
            (Ok(_), Some(signal)) => return Err(signal),
            (Ok(value), None) => return Ok(value),
            (Err(RecvTimeoutError::Disconnected), _) => return Err(thread_stopped(py)),
            (Err(RecvTimeoutError::Timeout), before) => raised = before,
        }
        let is_late = || stopped.zip(patience).is_some_and(|(since, patience)| since.elapsed() >= patience);
        if let Some(signal) = raised.take_if(|_| is_late()) {
            return Err(signal);
        }
        if let Err(signal) = py.check_signals().and_then(|()| if raised.is_none() { poll() } else { Ok(()) }) {
            stop();
            stopped.get_or_insert_with(Instant::now);
            raised = Some(signal);
        }
    }
}

/// Runs `act` on this thread without the GIL. It asks from time to time whether to stop, because a signal has raised an
/// exception, which is raised then.
pub(crate) fn with_signals<T: Send>(py: Python<'_>, act: impl FnOnce(&dyn Fn() -> bool) -> T + Send) -> PyResult<T> {
    let (result, interrupt) = py.detach(|| {
        let last = Cell::new(Instant::now());
        let interrupt: Cell<Option<PyErr>> = Cell::new(None);
        let is_interrupted = Cell::new(false);
        let should_stop = || {
            if !is_interrupted.get() && last.get().elapsed() >= SIGNAL_POLL_INTERVAL {
                last.set(Instant::now());
                if let Err(signal) = Python::attach(|py| py.check_signals()) {
                    interrupt.set(Some(signal));
                    is_interrupted.set(true);
                }
            }
            is_interrupted.get()
        };
        (act(&should_stop), interrupt.take())
    });
    interrupt.map_or(Ok(result), Err)
}

/// Raises `ClosedError` in a child that a signal handler or a callback has forked: the work goes on in the parent only.
pub(crate) fn check_process(py: Python<'_>, creator: CreatorProcess) -> PyResult<()> {
    if creator.is_current() {
        return Ok(());
    }
    let text = "the call began in the parent of this forked process, and goes on there only";
    Err(error::plain(py, "ClosedError", text.into()))
}
