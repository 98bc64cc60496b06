//! The duty to end one piece of a job's work.
//!
//! Whoever takes work from the queue takes a claim with it. A claim that is dropped without having been ended (its worker broke
//! down, or panicked) fails the job, so that nobody waits for ever.

use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result};
use crate::job::Job;
use crate::queue::{Duty, Piece, Queue, SyncTarget};

/// One thing for a worker to do.
#[derive(Debug)]
pub(crate) enum Work {
    /// Give the file its final size.
    Prepare(Claim),
    /// Move that block.
    Block(Claim, u64),
    /// Sync that descriptor.
    Sync(Claim, SyncTarget),
}

/// One piece of a job, to be ended exactly once.
#[derive(Debug)]
pub(crate) struct Claim {
    job: Arc<Job>,
    queue: Arc<Queue>,
    duty: Duty,
    is_ended: bool,
}

impl Work {
    /// The next thing to do, if there is one.
    pub(crate) fn next(queue: &Arc<Queue>) -> Option<Self> {
        let claim = |job, duty| Claim::new(job, Arc::clone(queue), duty);
        Some(match queue.next()? {
            Piece::Prepare(job) => Self::Prepare(claim(job, Duty::Prepare)),
            Piece::Block(job, index) => Self::Block(claim(job, Duty::Block), index),
            Piece::Sync(job, target) => Self::Sync(claim(job, Duty::Sync), target),
        })
    }
}

impl Claim {
    pub(crate) fn new(job: Arc<Job>, queue: Arc<Queue>, duty: Duty) -> Self {
        Self { job, queue, duty, is_ended: false }
    }

    pub(crate) fn job(&self) -> &Job {
        &self.job
    }

    /// Makes several claims of one block's, each to be ended by itself. There is one at least.
    pub(crate) fn split(self, count: u64) -> Vec<Self> {
        assert!(self.duty == Duty::Block && count > 0, "only blocks have parts");
        self.job.expect_parts(count - 1);
        let part = |_| Self::new(Arc::clone(&self.job), Arc::clone(&self.queue), Duty::Block);
        let mut parts: Vec<_> = (1..count).map(part).collect();
        parts.push(self);
        parts
    }

    /// Reports how it went: the bytes that the caller got or gave, or the failure. Nothing of the job's memory may be
    /// in use by this piece any more.
    pub(crate) fn end(mut self, result: Result<u64>) {
        self.report(result);
    }

    fn report(&mut self, result: Result<u64>) {
        self.is_ended = true;
        self.queue.end(&self.job, self.duty, result);
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if !self.is_ended {
            let detail = "the worker that moved this block stopped; make a new engine, and report this as a bug";
            self.report(Err(Error::new(ErrorKind::Io, self.job.plan.direction().name(), detail)));
        }
    }
}
