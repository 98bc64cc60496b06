//! A request in flight of any kind, and the rules by which Python waits for it.
//!
//! A thread waits in slices without the GIL, so that Ctrl-C works. A forked child never touches its parent's requests:
//! the threads that complete them do not exist there.

use std::time::{Duration, Instant};

use deepnvme_io::{Error, ErrorKind, Progress, Result, Transfer};
use deepnvme_mem::{Region, RegionMut};
use pyo3::prelude::*;

/// Interval between signal checks.
pub(crate) const SLICE: Duration = Duration::from_millis(50);

/// Time that an interrupted call waits for transfers that the kernel has begun. Unless a device hangs, nothing touches
/// the tensor after the interrupt.
pub(crate) const GRACE: Duration = Duration::from_secs(1);

/// The four kinds of requests.
pub(crate) enum Kind {
    Read(Transfer<RegionMut>),
    Write(Transfer<Region>),
    ReadBatch(Transfer<Vec<RegionMut>>),
    WriteBatch(Transfer<Vec<Region>>),
}

macro_rules! with_pending {
    ($kind:expr, $pending:ident => $then:expr) => {
        match $kind {
            Kind::Read($pending) => $then,
            Kind::Write($pending) => $then,
            Kind::ReadBatch($pending) => $then,
            Kind::WriteBatch($pending) => $then,
        }
    };
}

/// A request in flight. Drop it with the GIL held: it releases Python objects.
pub(crate) struct Flight {
    kind: Option<Kind>,
    pid: u32,
}

impl Flight {
    pub(crate) fn new(kind: Kind) -> Self {
        Self { kind: Some(kind), pid: std::process::id() }
    }

    /// Return whether this process was forked from the one that made the request.
    pub(crate) fn is_foreign(&self) -> bool {
        self.pid != std::process::id()
    }

    pub(crate) fn is_done(&self) -> bool {
        !self.is_foreign() && self.kind().is_some_and(|kind| with_pending!(kind, pending => pending.is_done()))
    }

    /// Return the bytes moved or the error; `None` while in flight.
    pub(crate) fn result(&self) -> Option<Result<u64>> {
        if self.is_foreign() {
            return Some(Err(forked()));
        }
        let result = with_pending!(self.kind()?, pending => pending.result())?;
        Some(result.map(|transfer| transfer.bytes))
    }

    pub(crate) fn progress(&self) -> Progress {
        let none = Progress { bytes_done: 0, bytes_total: 0 };
        self.kind().map_or(none, |kind| with_pending!(kind, pending => pending.progress()))
    }

    /// Cancel the part that is not started yet.
    pub(crate) fn cancel(&self) -> bool {
        !self.is_foreign() && self.kind().is_some_and(|kind| with_pending!(kind, pending => pending.cancel()))
    }

    /// Write to the eventfd once the request is done.
    pub(crate) fn notify(&self, eventfd: std::os::fd::OwnedFd) {
        if let Some(kind) = self.kind() {
            with_pending!(kind, pending => pending.notify(eventfd));
        }
    }

    /// Wait without checking signals. Returns whether the request is done. Call it without the GIL.
    pub(crate) fn wait_quietly(&self, timeout: Duration) -> bool {
        if self.is_foreign() {
            return true;
        }
        self.kind().is_none_or(|kind| with_pending!(kind, pending => pending.wait_timeout(timeout)))
    }

    /// Wait without the GIL, checking signals at intervals. Returns false on timeout.
    pub(crate) fn wait(&self, py: Python<'_>, timeout: Option<Duration>) -> PyResult<bool> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let left = deadline.map_or(SLICE, |deadline| deadline.saturating_duration_since(Instant::now()));
            if py.detach(|| self.wait_quietly(left.min(SLICE))) {
                return Ok(true);
            }
            py.check_signals()?;
            if left.is_zero() {
                return Ok(false);
            }
        }
    }

    /// Cancel the rest after an interrupt, and wait for transfers that the kernel has begun. Returns whether all are
    /// done.
    pub(crate) fn abandon(&self, py: Python<'_>) -> bool {
        self.cancel();
        py.detach(|| self.wait_quietly(GRACE))
    }

    fn kind(&self) -> Option<&Kind> {
        self.kind.as_ref()
    }
}

impl Drop for Flight {
    /// Take the memory back, so that its Python owners are released here and not on an engine thread.
    fn drop(&mut self) {
        if self.is_done()
            && let Some(kind) = self.kind.take()
        {
            with_pending!(kind, pending => drop(pending.wait()));
        }
    }
}

/// The error for requests that belong to the parent process.
fn forked() -> Error {
    let detail = "the request belongs to the process before the fork, which finishes it; make a new one here";
    Error::new(ErrorKind::Closed, "wait", detail)
}
