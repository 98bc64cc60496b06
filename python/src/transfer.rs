//! `deepnvme.Transfer`: a started request.

use std::os::fd::IntoRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use deepnvme_io::{Error, Result};
use deepnvme_mem::sync::ignore_poison;
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use rustix::event::{EventfdFlags, eventfd};

use crate::ignored::Ignored;
use crate::once::intern;
use crate::pending_request::PendingRequest;
use crate::settings::Timeout;
use crate::{detached_requests, error, exit, reaper};

/// A request in flight, from ``start_read``, ``start_write`` or their batches.
///
/// The tensor and the file stay alive until the request is done, even if the ``Transfer`` is dropped. In that case,
/// they are released soon after it is done, and a failure becomes a ``ResourceWarning``. Until the request is done,
/// don't change a tensor that is being written, and don't use a tensor that is being read into.
///
/// ``await transfer`` waits in a coroutine, and a ``with`` block waits at its end.
///
/// Example:
///     >>> transfer = deepnvme.start_write(torch.ones(1024), "weights.bin")
///     >>> transfer.result(timeout=60)
///     4096
///     >>> transfer.done(), transfer.progress()
///     (True, Progress(bytes_done=4096, bytes_total=4096))
#[pyclass(frozen, weakref, name = "Transfer", module = "deepnvme")]
pub(crate) struct PyTransfer {
    verb: &'static str,
    bytes_total: u64,
    request: Mutex<Option<Arc<PendingRequest>>>,
    outcome: OnceLock<Result<u64>>,
    is_observed: AtomicBool,
}

#[pymethods]
impl PyTransfer {
    /// Wait until the request is done.
    ///
    /// The call releases the GIL and handles signals (Ctrl-C).
    ///
    /// Args:
    ///     timeout: seconds to wait at most; ``None`` (default) waits without limit.
    ///
    /// Returns:
    ///     The number of bytes moved.
    ///
    /// Raises:
    ///     TimeoutError: the request is still in flight (``deepnvme.errors.WaitTimeoutError``). It continues: wait
    ///         again, or cancel it.
    ///     ValueError: ``timeout`` is negative, or not a number.
    ///     deepnvme.Error: the transfer failed. Each later ``result`` raises it again.
    ///
    /// Example:
    ///     >>> deepnvme.start_write(torch.ones(1024), "weights.bin").result()
    ///     4096
    #[pyo3(signature = (timeout=None))]
    fn result(&self, py: Python<'_>, timeout: Option<Timeout>) -> PyResult<u64> {
        detached_requests::reap(py);
        // Durations that overflow mean no limit.
        let limit = timeout.and_then(|timeout| Duration::try_from_secs_f64(timeout.0).ok());
        if let Some(request) = self.request() {
            let is_done = request.wait(py, limit)?;
            if !is_done {
                return Err(self.timed_out(py, timeout.map_or(0.0, |timeout| timeout.0)));
            }
        }
        self.handle_completion();
        self.is_observed.store(true, Ordering::Relaxed);
        match self.outcome.get() {
            Some(Ok(bytes)) => Ok(*bytes),
            Some(Err(error)) => Err(error::to_exception(py, error)),
            None => Err(error::plain(py, "Error", "the request ended without a result".into())),
        }
    }

    /// Return whether the request is done: it succeeded, failed or was cancelled. Never blocks.
    fn done(&self, py: Python<'_>) -> bool {
        detached_requests::reap(py);
        self.handle_completion();
        self.outcome.get().is_some()
    }

    /// Return the request's progress, even while it is in flight.
    fn progress(&self) -> Progress {
        let bytes_total = self.bytes_total;
        self.handle_completion();
        match (self.outcome.get(), self.request()) {
            (Some(Ok(bytes)), _) => Progress { bytes_done: *bytes, bytes_total },
            (Some(Err(error)), _) => Progress { bytes_done: error.bytes_done(), bytes_total },
            (None, Some(request)) => Progress { bytes_done: request.progress().bytes_done, bytes_total },
            (None, None) => Progress { bytes_done: 0, bytes_total },
        }
    }

    /// Cancel the part that has not started yet.
    ///
    /// Returns True if anything was cancelled. ``result`` then raises ``deepnvme.errors.CancelledError`` once the
    /// started part is done. A cancelled write leaves the file half written.
    fn cancel(&self) -> bool {
        self.request().is_some_and(|request| request.cancel())
    }

    /// Create an eventfd that becomes readable when the request is done. The caller closes it.
    fn _completion_fd(&self) -> PyResult<i32> {
        let failed = |error: rustix::io::Errno| PyOSError::new_err((error.raw_os_error(), "eventfd was refused"));
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(failed)?;
        let own = event.try_clone()?;
        match self.request() {
            Some(request) if !request.is_from_before_fork() => request.notify(own),
            _ => drop(rustix::io::write(&own, &1u64.to_ne_bytes())),
        }
        Ok(event.into_raw_fd())
    }

    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        let module = py.import(intern!(py, "deepnvme._utils.awaiting"))?;
        let coroutine = module.call_method1(intern!(py, "completion"), (slf,))?;
        coroutine.call_method0(intern!(py, "__await__"))
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    /// Wait. Raises the request's failure unless another exception is already propagating.
    fn __exit__(&self, exc_type: &Bound<'_, PyAny>, exc_value: Ignored, traceback: Ignored) -> PyResult<()> {
        let _ = (exc_value, traceback);
        let py = exc_type.py();
        if exc_type.is_none() {
            return self.result(py, None).map(drop);
        }
        if let Some(request) = self.request() {
            request.wait(py, None)?;
        }
        Ok(())
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let Progress { bytes_done, bytes_total } = self.progress();
        let state = match self.outcome.get() {
            None => "in flight".to_owned(),
            Some(Ok(_)) => "done".to_owned(),
            Some(Err(error)) => error::to_exception(py, error).value(py).get_type().to_string(),
        };
        format!("<deepnvme.Transfer {}: {state}, {bytes_done} of {bytes_total} bytes>", self.verb)
    }
}

impl PyTransfer {
    pub(crate) fn new(verb: &'static str, request: PendingRequest) -> Self {
        let request = Arc::new(request);
        exit::register(&request);
        Self {
            verb,
            bytes_total: request.progress().bytes_total,
            request: Mutex::new(Some(request)),
            outcome: OnceLock::new(),
            is_observed: AtomicBool::new(false),
        }
    }

    fn request(&self) -> Option<Arc<PendingRequest>> {
        ignore_poison(self.request.lock()).clone()
    }

    /// Keeps the outcome of a finished request, and releases its memory.
    fn handle_completion(&self) {
        let mut slot = ignore_poison(self.request.lock());
        let Some(outcome) = slot.as_ref().and_then(|request| request.result()) else { return };
        let _ = self.outcome.set(outcome);
        let request = slot.take();
        drop(slot);
        drop(request);
    }

    fn timed_out(&self, py: Python<'_>, seconds: f64) -> PyErr {
        let Progress { bytes_done, bytes_total } = self.progress();
        let message = format!(
            "{} still in flight after {seconds} s, {bytes_done} of {bytes_total} bytes done; wait again, or cancel it",
            self.verb
        );
        error::plain_after(py, "WaitTimeoutError", message, bytes_done)
    }

    fn unobserved_failure(&self) -> Option<&Error> {
        let is_observed = self.is_observed.load(Ordering::Relaxed);
        self.outcome.get().and_then(|outcome| outcome.as_ref().err()).filter(|_| !is_observed)
    }
}

impl Drop for PyTransfer {
    fn drop(&mut self) {
        self.handle_completion();
        if let Some(request) = self.request() {
            return reaper::detach(request);
        }
        if let Some(error) = self.unobserved_failure() {
            Python::try_attach(|py| detached_requests::warn_of_failure(py, error));
        }
    }
}

/// Progress of a request, in bytes. ``Transfer.progress`` returns it.
///
/// Example:
///     >>> with deepnvme.start_write(torch.ones(1024), "weights.bin") as transfer:
///     ...     pass
///     >>> transfer.progress().bytes_done
///     4096
#[pyclass(frozen, eq, get_all, module = "deepnvme")]
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Bytes moved so far.
    bytes_done: u64,
    /// Bytes of the whole request.
    bytes_total: u64,
}

#[pymethods]
impl Progress {
    fn __repr__(&self) -> String {
        format!("Progress(bytes_done={}, bytes_total={})", self.bytes_done, self.bytes_total)
    }
}
