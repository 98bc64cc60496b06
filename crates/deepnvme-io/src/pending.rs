//! The caller's handle of a request in flight.

use std::marker::PhantomData;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use deepnvme_mem::{Region, RegionMut};

use crate::error::{Error, ErrorKind, Result};
use crate::job::{Job, Memory, Progress, Transfer};
use crate::queue::Queue;

/// Memory that returns to the caller with the result.
pub trait Home: Sized + sealed::Sealed {
    #[doc(hidden)]
    fn from_memory(memory: MemoryHome) -> Option<Self>;
}

/// The memory of a finished request. Opaque.
#[doc(hidden)]
#[derive(Debug)]
pub struct MemoryHome(Memory);

impl MemoryHome {
    pub(crate) fn of(memory: Memory) -> Self {
        Self(memory)
    }
}

/// Takes the memory of a request. It is available once.
pub(crate) fn memory_of<T: Home>(job: &Job) -> Option<T> {
    job.take_memory().and_then(|memory| T::from_memory(MemoryHome(memory)))
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for deepnvme_mem::RegionMut {}
    impl Sealed for deepnvme_mem::Region {}
    impl Sealed for Vec<deepnvme_mem::RegionMut> {}
    impl Sealed for Vec<deepnvme_mem::Region> {}
}

impl Home for Vec<RegionMut> {
    fn from_memory(memory: MemoryHome) -> Option<Self> {
        if let Memory::Targets(targets) = memory.0 { Some(targets) } else { None }
    }
}

impl Home for Vec<Region> {
    fn from_memory(memory: MemoryHome) -> Option<Self> {
        if let Memory::Sources(sources) = memory.0 { Some(sources) } else { None }
    }
}

impl Home for RegionMut {
    fn from_memory(memory: MemoryHome) -> Option<Self> {
        Vec::<Self>::from_memory(memory)?.pop()
    }
}

impl Home for Region {
    fn from_memory(memory: MemoryHome) -> Option<Self> {
        Vec::<Self>::from_memory(memory)?.pop()
    }
}

/// A request in flight. Dropping this does not affect the request: the engine keeps the file and memory until it is
/// done.
#[must_use = "a request that nobody waits for fails unnoticed"]
pub struct Pending<T> {
    job: Arc<Job>,
    queue: Arc<Queue>,
    home: PhantomData<fn() -> T>,
}

impl<T> std::fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pending").field("done", &self.is_done()).field("progress", &self.progress()).finish()
    }
}

impl<T> Pending<T> {
    pub(crate) fn new(job: Arc<Job>, queue: Arc<Queue>) -> Self {
        Self { job, queue, home: PhantomData }
    }

    /// Returns whether the request is done.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.job.outcome.get().is_some()
    }

    /// Returns the progress of the request.
    #[must_use]
    pub fn progress(&self) -> Progress {
        self.job.progress()
    }

    /// Returns the result, if the request is done.
    #[must_use]
    pub fn result(&self) -> Option<Result<Transfer>> {
        self.job.outcome.get()
    }

    /// Waits up to `timeout`. Returns whether the request is done.
    #[must_use]
    pub fn wait_timeout(&self, timeout: Duration) -> bool {
        if self.queue.is_foreign() {
            return self.is_done();
        }
        self.job.outcome.wait_timeout(timeout).is_some()
    }

    /// Cancels the work that no worker has started. Returns true if there was any: the request then ends as `Cancelled`
    /// once the started work is done.
    pub fn cancel(&self) -> bool {
        if self.queue.is_foreign() || self.is_done() {
            return false;
        }
        let detail = "cancelled by the caller; the part that had been started was finished";
        let error = Error::new(ErrorKind::Cancelled, self.job.plan.direction().name(), detail);
        self.queue.cancel(&self.job, error)
    }

    /// Raises a request to normal priority, because a caller is about to wait for it.
    pub fn hurry(&self) {
        if !self.queue.is_foreign() && !self.is_done() {
            self.queue.hurry(&self.job);
        }
    }

    /// Writes to this eventfd once, when the request is done.
    pub fn notify(&self, eventfd: OwnedFd) {
        self.job.outcome.notify(eventfd);
    }
}

impl<T: Home> Pending<T> {
    /// Returns the memory and the result, if the request is done. Only the first call returns the memory.
    pub fn finish(&self) -> Option<(Option<T>, Result<Transfer>)> {
        if self.queue.is_foreign() && !self.is_done() {
            return Some((None, Err(Error::forked())));
        }
        let outcome = self.job.outcome.get()?;
        Some((memory_of(&self.job), outcome))
    }

    /// Waits, and returns the memory with the result, on success and on failure. In a process forked since the request
    /// was submitted, the result is a `Closed` error, and the memory stays with the parent's engine (`None`).
    pub fn wait(self) -> (Option<T>, Result<Transfer>) {
        if self.queue.is_foreign() && !self.is_done() {
            return (None, Err(Error::forked()));
        }
        let outcome = self.job.outcome.wait();
        (memory_of(&self.job), outcome)
    }
}
