//! Work items, each with a guard that ensures its end.
//!
//! A guard that is dropped without a result, because its worker failed or panicked, fails the request. So no caller
//! waits forever.

use std::sync::Arc;

use super::Request;
use super::queue::{ClaimedItem, RequestQueue, WorkKind};
use super::sync_targets::SyncTarget;
use crate::error::{Error, ErrorKind, Result};

/// A part of a request that one worker does.
#[derive(Debug)]
pub(crate) enum WorkItem {
    /// Give the files their final size, or space.
    Prepare(WorkGuard),
    /// Move this block.
    Block(WorkGuard, u64),
    /// Sync this descriptor.
    Sync(WorkGuard, SyncTarget),
}

/// Ensures that a work item ends exactly once.
#[derive(Debug)]
pub(crate) struct WorkGuard {
    request: Arc<Request>,
    queue: Arc<RequestQueue>,
    kind: WorkKind,
    is_ended: bool,
}

impl WorkItem {
    /// Takes the next work item, if any.
    pub(crate) fn next(queue: &Arc<RequestQueue>) -> Option<Self> {
        let guard = |request, kind| WorkGuard::new(request, Arc::clone(queue), kind);
        Some(match queue.next()? {
            ClaimedItem::Prepare(request) => Self::Prepare(guard(request, WorkKind::Prepare)),
            ClaimedItem::Block(request, index) => Self::Block(guard(request, WorkKind::Block), index),
            ClaimedItem::Sync(request, target) => Self::Sync(guard(request, WorkKind::Sync), target),
        })
    }
}

impl WorkGuard {
    pub(crate) fn new(request: Arc<Request>, queue: Arc<RequestQueue>, kind: WorkKind) -> Self {
        Self { request, queue, kind, is_ended: false }
    }

    pub(crate) fn request(&self) -> &Request {
        &self.request
    }

    /// Splits a block into `count` work items, each ended separately. `count` is at least one.
    pub(crate) fn split(self, count: u64) -> Vec<Self> {
        assert!(self.kind == WorkKind::Block && count > 0, "only blocks are split");
        self.request.add_items(count - 1);
        let part = |_| Self::new(Arc::clone(&self.request), Arc::clone(&self.queue), WorkKind::Block);
        let mut parts: Vec<_> = (1..count).map(part).collect();
        parts.push(self);
        parts
    }

    /// Reports the result: the bytes moved for the caller, or the failure. The work item must not use the request's
    /// memory any more.
    pub(crate) fn end(mut self, result: Result<u64>) {
        self.report(result);
    }

    fn report(&mut self, result: Result<u64>) {
        self.is_ended = true;
        self.queue.end(&self.request, self.kind, result);
    }
}

impl Drop for WorkGuard {
    fn drop(&mut self) {
        if !self.is_ended {
            let detail = "the worker that moved this block stopped; make a new engine, and report this as a bug";
            self.report(Err(Error::new(ErrorKind::Io, self.request.plan.direction().name(), detail)));
        }
    }
}
