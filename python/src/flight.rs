//! A request in flight, whatever its kind, and the rules by which Python waits for it.
//!
//! A thread waits without the GIL and in slices, so that Ctrl-C arrives. A process that was forked from the one
//! that made the request never touches it: the threads that would finish it are not there.

use std::time::{Duration, Instant};

use deepnvme_io::{Error, ErrorKind, Pending, Progress, Result};
use deepnvme_mem::{Region, RegionMut};
use pyo3::prelude::*;

/// How long a thread waits before it looks for signals.
pub(crate) const SLICE: Duration = Duration::from_millis(50);

/// How long an interrupted call waits for what the kernel has already begun, so that nothing touches the tensor
/// after the interrupt in any case but a device that hangs.
pub(crate) const GRACE: Duration = Duration::from_secs(1);

/// The four kinds of request.
pub(crate) enum Kind {
    Read(Pending<RegionMut>),
    Write(Pending<Region>),
    ReadBatch(Pending<Vec<RegionMut>>),
    WriteBatch(Pending<Vec<Region>>),
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

/// A request in flight. To be dropped by a thread that holds the GIL: it lets go of Python objects.
pub(crate) struct Flight {
    kind: Option<Kind>,
    pid: u32,
}

impl Flight {
    pub(crate) fn new(kind: Kind) -> Self {
        Self { kind: Some(kind), pid: std::process::id() }
    }

    /// Whether this process was forked from the one that made the request.
    pub(crate) fn is_foreign(&self) -> bool {
        self.pid != std::process::id()
    }

    pub(crate) fn is_done(&self) -> bool {
        !self.is_foreign() && self.kind().is_some_and(|kind| with_pending!(kind, pending => pending.is_done()))
    }

    /// The bytes moved, or why not; `None` while in flight.
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

    /// Gives up what has not been started.
    pub(crate) fn cancel(&self) -> bool {
        !self.is_foreign() && self.kind().is_some_and(|kind| with_pending!(kind, pending => pending.cancel()))
    }

    /// Writes to the eventfd when the request is done.
    pub(crate) fn notify(&self, eventfd: std::os::fd::OwnedFd) {
        if let Some(kind) = self.kind() {
            with_pending!(kind, pending => pending.notify(eventfd));
        }
    }

    /// Waits without looking at signals; whether the request is done. For threads that have let go of the GIL.
    pub(crate) fn wait_quietly(&self, timeout: Duration) -> bool {
        if self.is_foreign() {
            return true;
        }
        self.kind().is_none_or(|kind| with_pending!(kind, pending => pending.wait_timeout(timeout)))
    }

    /// Waits with the GIL released, but for a look at signals now and then. False when the time was up.
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

    /// After an interrupt: gives up the rest, and waits for what the kernel has begun. Whether all is quiet now.
    pub(crate) fn abandon(&self, py: Python<'_>) -> bool {
        self.cancel();
        py.detach(|| self.wait_quietly(GRACE))
    }

    fn kind(&self) -> Option<&Kind> {
        self.kind.as_ref()
    }
}

impl Drop for Flight {
    /// Takes the memory home, so that its Python owners are let go here and not on one of the engine's threads.
    fn drop(&mut self) {
        if self.is_done()
            && let Some(kind) = self.kind.take()
        {
            with_pending!(kind, pending => drop(pending.wait()));
        }
    }
}

/// What a forked process is told about its parent's requests.
fn forked() -> Error {
    let detail = "the request belongs to the process before the fork, which finishes it; make a new one here";
    Error::new(ErrorKind::Closed, "wait", detail)
}
