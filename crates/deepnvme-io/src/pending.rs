//! The caller's end of a request in flight.

use std::marker::PhantomData;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use deepnvme_mem::{Region, RegionMut};

use crate::error::{Error, ErrorKind, Result};
use crate::job::{Job, Memory, Progress, Transfer};
use crate::queue::Queue;

/// What comes home with the result: the memory that the request was given.
pub trait Home: Sized + sealed::Sealed {
    #[doc(hidden)]
    fn from_memory(memory: MemoryHome) -> Option<Self>;
}

/// Opaque: the memory of a finished request.
#[doc(hidden)]
#[derive(Debug)]
pub struct MemoryHome(Memory);

impl MemoryHome {
    pub(crate) fn of(memory: Memory) -> Self {
        Self(memory)
    }
}

/// The memory of a request, which comes once.
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

/// A request in flight. Dropping it changes nothing for the request: the engine keeps file and memory until it is done.
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

    /// Whether the result is there.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.job.outcome.get().is_some()
    }

    /// How far the request is.
    #[must_use]
    pub fn progress(&self) -> Progress {
        self.job.progress()
    }

    /// The result, if it is there.
    #[must_use]
    pub fn result(&self) -> Option<Result<Transfer>> {
        self.job.outcome.get()
    }

    /// Waits at most that long; whether the request is done.
    #[must_use]
    pub fn wait_timeout(&self, timeout: Duration) -> bool {
        if self.queue.is_foreign() {
            return self.is_done();
        }
        self.job.outcome.wait_timeout(timeout).is_some()
    }

    /// Gives up what no worker has started. True when that was anything: the request then ends as `Cancelled`,
    /// as soon as what had been started is done.
    pub fn cancel(&self) -> bool {
        if self.queue.is_foreign() || self.is_done() {
            return false;
        }
        let detail = "cancelled by the caller; the part that had been started was finished";
        let error = Error::new(ErrorKind::Cancelled, self.job.plan.direction().name(), detail);
        self.queue.cancel(&self.job, error)
    }

    /// Has a request that was to be served later served now, since somebody is about to wait for it.
    pub fn hurry(&self) {
        if !self.queue.is_foreign() && !self.is_done() {
            self.queue.hurry(&self.job);
        }
    }

    /// Writes to that eventfd once, when the request is done.
    pub fn notify(&self, eventfd: OwnedFd) {
        self.job.outcome.notify(eventfd);
    }
}

impl<T: Home> Pending<T> {
    /// The memory and the result, if they are there. The memory comes once, to the first who asks.
    pub fn finish(&self) -> Option<(Option<T>, Result<Transfer>)> {
        if self.queue.is_foreign() && !self.is_done() {
            return Some((None, Err(Error::forked())));
        }
        let outcome = self.job.outcome.get()?;
        Some((memory_of(&self.job), outcome))
    }

    /// Waits, and returns the memory together with the result: it comes home on success and on failure.
    /// In a process forked since the request was made, the result is an error of kind `Closed`, and the memory stays
    /// with the parent's engine (`None`).
    pub fn wait(self) -> (Option<T>, Result<Transfer>) {
        if self.queue.is_foreign() && !self.is_done() {
            return (None, Err(Error::forked()));
        }
        let outcome = self.job.outcome.wait();
        (memory_of(&self.job), outcome)
    }
}
