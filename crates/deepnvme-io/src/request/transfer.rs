//! The caller's handle of a request.

use std::marker::PhantomData;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use super::memory::{OpaqueMemory, TransferMemory};
use super::queue::RequestQueue;
use super::{Progress, Request, Transferred};
use crate::error::{Error, ErrorKind, Result};

/// A request in flight. Dropping this does not affect the request: the engine keeps the file and memory until it is
/// done.
#[must_use = "without waiting, a failure goes unnoticed"]
pub struct Transfer<T> {
    request: Arc<Request>,
    queue: Arc<RequestQueue>,
    memory: PhantomData<fn() -> T>,
}

impl<T> std::fmt::Debug for Transfer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Transfer").field("done", &self.is_done()).field("progress", &self.progress()).finish()
    }
}

impl<T> Transfer<T> {
    pub(crate) fn new(request: Arc<Request>, queue: Arc<RequestQueue>) -> Self {
        Self { request, queue, memory: PhantomData }
    }

    /// Returns whether the request is done.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.request.result.get().is_some()
    }

    /// Returns the progress of the request.
    #[must_use]
    pub fn progress(&self) -> Progress {
        self.request.progress()
    }

    /// Returns the result, if the request is done.
    #[must_use]
    pub fn result(&self) -> Option<Result<Transferred>> {
        self.request.result.get()
    }

    /// Checks that this is not a forked child, where nothing completes the request.
    ///
    /// # Errors
    /// `Closed`.
    pub fn check_process(&self) -> Result<()> {
        self.queue.check_process()
    }

    /// Waits up to `timeout`. Returns whether the request is done. In a forked child it returns at once: see
    /// [`check_process`](Self::check_process).
    #[must_use]
    pub fn wait_timeout(&self, timeout: Duration) -> bool {
        if self.queue.is_forked() {
            return self.is_done();
        }
        self.request.result.wait_timeout(timeout).is_some()
    }

    /// Cancels the work that no worker has started. Returns true if there was any: the request then ends as `Cancelled`
    /// once the started work is done.
    pub fn cancel(&self) -> bool {
        if self.queue.is_forked() || self.is_done() {
            return false;
        }
        let detail = "cancelled by the caller; the part that had been started was finished";
        let error = Error::new(ErrorKind::Cancelled, self.request.plan.direction().name(), detail);
        self.queue.cancel(&self.request, error)
    }

    /// Raises a request to normal priority, because a caller is about to wait for it.
    pub fn prioritise(&self) {
        if !self.queue.is_forked() && !self.is_done() {
            self.queue.prioritise(&self.request);
        }
    }

    /// Writes to this eventfd once, when the request is done (immediately, if it is done already).
    pub fn notify(&self, eventfd: OwnedFd) {
        self.request.result.notify(eventfd);
    }

    /// Calls `watcher` once, when the request is done (immediately, if it is done already). It usually runs on a thread
    /// of the engine, so it must return at once, without calling the engine and without a panic.
    pub fn on_done(&self, watcher: impl FnOnce() + Send + 'static) {
        self.request.result.on_set(watcher);
    }
}

impl<T: TransferMemory> Transfer<T> {
    /// Returns the memory and the result, if the request is done. Only the first call returns the memory. In a forked
    /// child, the result of a request that was not done is a `Closed` error.
    pub fn finish(&self) -> Option<(Option<T>, Result<Transferred>)> {
        if self.queue.is_forked() && !self.is_done() {
            return Some((None, Err(Error::forked())));
        }
        let outcome = self.request.result.get()?;
        Some((take_memory(&self.request), outcome))
    }

    /// Waits, and returns the memory with the result, on success and on failure. In a process that was forked before
    /// the request was done, the result is a `Closed` error, and the memory stays with the parent's engine (`None`).
    pub fn wait(self) -> (Option<T>, Result<Transferred>) {
        if self.queue.is_forked() && !self.is_done() {
            return (None, Err(Error::forked()));
        }
        let outcome = self.request.result.wait();
        (take_memory(&self.request), outcome)
    }
}

/// Takes the memory of a request. It is available once.
pub(crate) fn take_memory<T: TransferMemory>(request: &Request) -> Option<T> {
    request.take_memory().and_then(|memory| T::from_memory(OpaqueMemory::of(memory)))
}
