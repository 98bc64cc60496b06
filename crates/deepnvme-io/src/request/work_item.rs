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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::backend::Wake;
    use crate::op::Direction;
    use crate::request::{PlannedRequest, Priority, RequestMemory, WriteMode, WriteOptions};
    use crate::split::{BlockPlan, BlockSizes, FileGeometry, Segment};
    use crate::stripe_layout::StripeLayout;
    use crate::sync::{mpsc, thread};
    use crate::trace::Recorder;

    struct NoWake;

    impl Wake for NoWake {
        fn wake(&self) {}
    }

    /// A request of one block, to be prepared first. It has no file and no memory.
    #[allow(clippy::unwrap_used, reason = "it is a part of the test")]
    fn request() -> Arc<Request> {
        let segment = Segment { file: 0, item: 0, offset: 0, len: 4096, address: None, is_contiguous_gpu: false };
        let geometry = FileGeometry { direct: None, layout: StripeLayout::SINGLE, has_gds: false };
        let sizes = BlockSizes { block_bytes: 4096, bounce_bytes: 4096, gds_bytes: 4096 };
        let plan = BlockPlan::new(Direction::Write, &[geometry], vec![segment], sizes).unwrap();
        let options = WriteOptions { mode: WriteMode::WholeFile, ..WriteOptions::default() };
        let planned = PlannedRequest::without_files(plan, Vec::new());
        Arc::new(Request::new(planned, RequestMemory::Sources(Vec::new()), options))
    }

    #[test]
    fn a_worker_that_went_to_sleep_after_the_close_exits_with_the_others() {
        let queue = Arc::new(RequestQueue::new(2, &Arc::new(Recorder::new())));
        let (busy, idle) = (queue.handle(0), queue.handle(1));
        busy.register(Arc::new(NoWake));
        idle.register(Arc::new(NoWake));
        queue.push(&request(), Priority::Normal).unwrap();
        let Some(WorkItem::Prepare(preparation)) = WorkItem::next(&queue) else { panic!("a file is prepared first") };
        queue.close();
        idle.run();
        assert!(queue.next().is_none());
        // The request continues while its worker reaps, so that worker is the one to wake.
        busy.run();
        assert!(busy.may_reap());
        preparation.end(Ok(0));
        assert!(!queue.try_exit(), "the request still has a block");
        busy.run();
        let Some(WorkItem::Block(block, _)) = WorkItem::next(&queue) else { panic!("a block comes next") };
        block.end(Ok(4096));
        assert!(queue.next().is_none() && queue.try_exit());
        let (woken, wakes) = mpsc::channel();
        let asleep = Arc::clone(&queue);
        thread::spawn(move || {
            asleep.handle(1).park();
            woken.send(())
        });
        assert!(wakes.recv_timeout(std::time::Duration::from_secs(60)).is_ok(), "the idle worker sleeps forever");
        assert!(queue.try_exit());
    }
}
