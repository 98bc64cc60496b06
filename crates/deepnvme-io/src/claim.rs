//! Claims: guards that ensure each work item of a job ends.
//!
//! Each work item from the queue comes with a claim. A claim dropped before its end, because its worker failed or
//! panicked, fails the job, so no caller waits forever.

use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result};
use crate::job::Job;
use crate::queue::{Duty, Piece, Queue, SyncTarget};

/// One work item.
#[derive(Debug)]
pub(crate) enum Work {
    /// Give the file its final size.
    Prepare(Claim),
    /// Move this block.
    Block(Claim, u64),
    /// Sync this descriptor.
    Sync(Claim, SyncTarget),
}

/// Holds one work item of a job, which must end exactly once.
#[derive(Debug)]
pub(crate) struct Claim {
    job: Arc<Job>,
    queue: Arc<Queue>,
    duty: Duty,
    is_ended: bool,
}

impl Work {
    /// Takes the next work item, if any.
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

    /// Splits the claim of one block into `count` claims, each ended separately. `count` is at least one.
    pub(crate) fn split(self, count: u64) -> Vec<Self> {
        assert!(self.duty == Duty::Block && count > 0, "only blocks have parts");
        self.job.expect_parts(count - 1);
        let part = |_| Self::new(Arc::clone(&self.job), Arc::clone(&self.queue), Duty::Block);
        let mut parts: Vec<_> = (1..count).map(part).collect();
        parts.push(self);
        parts
    }

    /// Reports the result: the bytes moved for the caller, or the failure. The work item must not use the job's memory
    /// any more.
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
