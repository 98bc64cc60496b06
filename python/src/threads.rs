//! The extension's own threads. A process may reach its thread limit: that is an error, never a panic.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use deepnvme_io::start_thread;
use deepnvme_mem::sync::ignore_poison;
use pyo3::prelude::*;

use crate::error;

/// Interval at which a call that waits checks for signals.
pub(crate) const SIGNAL_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Work on its own thread, which sends its result.
pub(crate) struct BackgroundTask<T>(Mutex<Receiver<T>>);

/// Runs `work` on its own thread.
pub(crate) fn start<T: Send + 'static>(
    py: Python<'_>,
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> PyResult<BackgroundTask<T>> {
    let (sender, receiver) = mpsc::channel();
    let run = move || drop(sender.send(work()));
    let started = start_thread(|| std::thread::Builder::new().name(name.into()).spawn(run));
    error::check(py, started.map(|_| BackgroundTask(Mutex::new(receiver))))
}

impl<T: Send> BackgroundTask<T> {
    /// Waits for the result without the GIL. `Disconnected` means that the work panicked, or that an earlier call took
    /// the result.
    pub(crate) fn wait(&self, py: Python<'_>, timeout: Duration) -> Result<T, RecvTimeoutError> {
        py.detach(|| ignore_poison(self.0.lock()).recv_timeout(timeout))
    }
}

/// Drops a value on its own thread, since its drop waits for the disk. If no thread can start, it is dropped here.
pub(crate) fn drop_in_background<T: Send + 'static>(value: T) {
    let _ = start_thread(|| std::thread::Builder::new().name("deepnvme-release".into()).spawn(move || drop(value)));
}

/// Holds a value until it is taken. Using or dropping it may wait for the disk: both run without the GIL, and no caller
/// waits for the lock with the GIL held.
pub(crate) struct UntilTaken<T: Send>(Mutex<Option<T>>);

impl<T: Send> UntilTaken<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(Mutex::new(Some(value)))
    }

    /// Uses the value; `None` if it was taken.
    pub(crate) fn with<R: Send>(&self, py: Python<'_>, act: impl FnOnce(&mut T) -> R + Send) -> Option<R> {
        py.detach(|| self.lock().as_mut().map(act))
    }

    /// Takes the value.
    pub(crate) fn take(&self, py: Python<'_>) -> Option<T> {
        py.detach(|| self.lock().take())
    }

    fn lock(&self) -> MutexGuard<'_, Option<T>> {
        ignore_poison(self.0.lock())
    }
}

impl<T: Send> Drop for UntilTaken<T> {
    fn drop(&mut self) {
        if let Some(value) = ignore_poison(self.0.get_mut()).take() {
            Python::try_attach(|py| py.detach(|| drop(value)));
        }
    }
}
