//! A request in flight of any kind, and the rules by which Python waits for it.
//!
//! A thread waits in slices without the GIL, so that Ctrl-C works. A forked child never touches its parent's requests:
//! the threads that complete them do not exist there.

use std::time::{Duration, Instant};

use deepnvme_io::{Error, ErrorKind, Progress, Result, Transfer};
use deepnvme_mem::{Region, RegionMut};
use pyo3::prelude::*;

use crate::threads::SIGNAL_CHECK_INTERVAL;

/// Time that an interrupted call waits for ops that the kernel has begun. Unless a device hangs, nothing touches
/// the tensor after the interrupt.
pub(crate) const CANCEL_TIMEOUT: Duration = Duration::from_secs(1);

/// A transfer of one of the four kinds of requests.
pub(crate) enum AnyTransfer {
    Read(Transfer<RegionMut>),
    Write(Transfer<Region>),
    ReadBatch(Transfer<Vec<RegionMut>>),
    WriteBatch(Transfer<Vec<Region>>),
}

macro_rules! with_transfer {
    ($any:expr, $transfer:ident => $then:expr) => {
        match $any {
            AnyTransfer::Read($transfer) => $then,
            AnyTransfer::Write($transfer) => $then,
            AnyTransfer::ReadBatch($transfer) => $then,
            AnyTransfer::WriteBatch($transfer) => $then,
        }
    };
}

/// A request in flight. Drop it with the GIL held if possible: it releases Python objects. Without the GIL, their
/// release waits for a thread that holds it.
pub(crate) struct PendingRequest {
    transfer: Option<AnyTransfer>,
    pid: u32,
}

impl PendingRequest {
    pub(crate) fn new(transfer: AnyTransfer) -> Self {
        Self { transfer: Some(transfer), pid: deepnvme_mem::process_id() }
    }

    /// Returns whether this process was forked from the one that made the request.
    pub(crate) fn is_from_before_fork(&self) -> bool {
        self.pid != deepnvme_mem::process_id()
    }

    pub(crate) fn is_done(&self) -> bool {
        !self.is_from_before_fork()
            && self.transfer().is_some_and(|transfer| with_transfer!(transfer, transfer => transfer.is_done()))
    }

    /// Returns the bytes moved or the error; `None` while in flight.
    pub(crate) fn result(&self) -> Option<Result<u64>> {
        if self.is_from_before_fork() {
            return Some(Err(forked()));
        }
        let result = with_transfer!(self.transfer()?, transfer => transfer.result())?;
        Some(result.map(|transfer| transfer.bytes))
    }

    pub(crate) fn progress(&self) -> Progress {
        let none = Progress { bytes_done: 0, bytes_total: 0 };
        self.transfer().map_or(none, |transfer| with_transfer!(transfer, transfer => transfer.progress()))
    }

    /// Cancels the part that is not started yet. Returns whether there was any.
    pub(crate) fn cancel(&self) -> bool {
        !self.is_from_before_fork()
            && self.transfer().is_some_and(|transfer| with_transfer!(transfer, transfer => transfer.cancel()))
    }

    /// Writes to the eventfd once the request is done.
    pub(crate) fn notify(&self, eventfd: std::os::fd::OwnedFd) {
        if let Some(transfer) = self.transfer() {
            with_transfer!(transfer, transfer => transfer.notify(eventfd));
        }
    }

    /// Waits without checking signals. Returns whether the request is done, or belongs to the process before a fork.
    /// Call it without the GIL.
    pub(crate) fn wait_ignoring_signals(&self, timeout: Duration) -> bool {
        if self.is_from_before_fork() {
            return true;
        }
        self.transfer().is_none_or(|transfer| with_transfer!(transfer, transfer => transfer.wait_timeout(timeout)))
    }

    /// Waits without the GIL, checking signals at intervals. Returns false on timeout.
    pub(crate) fn wait(&self, py: Python<'_>, timeout: Option<Duration>) -> PyResult<bool> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let left =
                deadline.map_or(SIGNAL_CHECK_INTERVAL, |deadline| deadline.saturating_duration_since(Instant::now()));
            if py.detach(|| self.wait_ignoring_signals(left.min(SIGNAL_CHECK_INTERVAL))) {
                return Ok(true);
            }
            py.check_signals()?;
            if left.is_zero() {
                return Ok(false);
            }
        }
    }

    /// Cancels the rest after an interrupt, and waits for ops that the kernel has begun. Returns whether all are
    /// done.
    pub(crate) fn cancel_and_wait(&self, py: Python<'_>) -> bool {
        self.cancel();
        py.detach(|| self.wait_ignoring_signals(CANCEL_TIMEOUT))
    }

    fn transfer(&self) -> Option<&AnyTransfer> {
        self.transfer.as_ref()
    }
}

impl Drop for PendingRequest {
    /// Takes the memory back, so that its Python owners are released here and not on an engine thread.
    fn drop(&mut self) {
        if self.is_done()
            && let Some(transfer) = self.transfer.take()
        {
            with_transfer!(transfer, transfer => drop(transfer.wait()));
        }
    }
}

/// The error for requests that belong to the parent process.
fn forked() -> Error {
    let detail = "the request belongs to the process before the fork, which finishes it; make a new one here";
    Error::new(ErrorKind::Closed, "wait", detail)
}
