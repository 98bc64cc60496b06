//! The queue between requests and workers.
//!
//! Requests take turns: a worker claims one block of the first request and moves that request to the end. A small
//! request therefore never waits for all of a large one. Read-ahead comes last, until a caller waits for it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use deepnvme_mem::CreatorProcess;

use super::sync_targets::{SyncTarget, sync_targets};
use super::worker_handle::WorkerHandle;
use super::{Cancelled, Request};
use crate::error::{Error, ErrorKind, Result};
use crate::sync::{AtomicU64, Mutex, lock};
use crate::trace::{EventKind, Recorder};

/// Maximum number of queued requests.
pub const REQUESTS_MAX: usize = 1 << 20;

/// One work item of a request, without a guard. Its holder must [end](RequestQueue::end) it. Workers hold it as a
/// [`WorkItem`](super::WorkItem), which guarantees that.
#[derive(Debug)]
#[must_use = "an item that does not end keeps its request forever"]
pub(crate) enum ClaimedItem {
    Prepare(Arc<Request>),
    Block(Arc<Request>, u64),
    Sync(Arc<Request>, SyncTarget),
}

/// The kind of a work item.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum WorkKind {
    /// Give the files their final size, or space.
    Prepare,
    /// Move one block.
    Block,
    /// Sync one file or folder.
    Sync,
}

/// The queued work of a request.
#[derive(Debug)]
enum Entry {
    Prepare(Arc<Request>),
    /// Its unclaimed blocks.
    Blocks(Arc<Request>),
    Sync(Arc<Request>, SyncTarget),
}

#[derive(Debug)]
struct State {
    entries: VecDeque<Entry>,
    /// Low-priority reads, for workers without other work.
    read_ahead: VecDeque<Arc<Request>>,
    is_closed: bool,
    /// Callers that run small requests themselves. The syncs of these go to the workers.
    inline_callers: u32,
    /// Workers that have exited or failed.
    workers_ended: usize,
    /// The error of the worker that failed when no other was left.
    failure: Option<Error>,
}

impl State {
    fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.read_ahead.is_empty()
    }
}

/// When a request gets its turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Priority {
    /// In turn with other requests.
    Normal,
    /// Once the blocks of all other requests are in flight. Only for reads.
    ReadAhead,
}

/// Shared by the engine, its workers and the handles of its requests.
#[derive(Debug)]
pub(crate) struct RequestQueue {
    state: Mutex<State>,
    workers: Vec<WorkerHandle>,
    creator: CreatorProcess,
    requests: AtomicU64,
    requests_failed: AtomicU64,
    recorder: Arc<Recorder>,
}

impl RequestQueue {
    pub(crate) fn new(workers: u32, recorder: &Arc<Recorder>) -> Self {
        let state = State {
            entries: VecDeque::new(),
            read_ahead: VecDeque::new(),
            is_closed: false,
            inline_callers: 0,
            workers_ended: 0,
            failure: None,
        };
        Self {
            state: Mutex::new(state),
            workers: (0..workers).map(|_| WorkerHandle::default()).collect(),
            creator: CreatorProcess::current(),
            requests: AtomicU64::new(0),
            requests_failed: AtomicU64::new(0),
            recorder: Arc::clone(recorder),
        }
    }

    pub(crate) fn handle(&self, worker_index: u32) -> &WorkerHandle {
        &self.workers[worker_index as usize]
    }

    /// Returns whether this process was forked from the one that owns the threads.
    pub(crate) fn is_forked(&self) -> bool {
        !self.creator.is_current()
    }

    /// Refuses calls in a process that was forked from the one that owns the threads.
    ///
    /// # Errors
    /// `Closed`.
    pub(crate) fn check_process(&self) -> Result<()> {
        if self.is_forked() { Err(Error::forked()) } else { Ok(()) }
    }

    /// Queues a new request. Fails if the queue is closed or full.
    pub(crate) fn push(&self, request: &Arc<Request>, priority: Priority) -> Result<()> {
        {
            let mut state = lock(&self.state);
            if state.is_closed {
                return Err(closed(request));
            }
            if state.entries.len() + state.read_ahead.len() >= REQUESTS_MAX {
                let detail = format!("{REQUESTS_MAX} requests are waiting; wait for some of them first");
                return Err(Error::new(ErrorKind::Busy, request.plan.direction().name(), detail));
            }
            match priority {
                _ if request.needs_preparing() => state.entries.push_back(Entry::Prepare(Arc::clone(request))),
                Priority::Normal => state.entries.push_back(Entry::Blocks(Arc::clone(request))),
                Priority::ReadAhead => state.read_ahead.push_back(Arc::clone(request)),
            }
        }
        let items = if request.needs_preparing() { 1 } else { request.plan.block_count().max(1) };
        self.wake(items);
        Ok(())
    }

    /// Returns the next work item, if any.
    pub(crate) fn next(&self) -> Option<ClaimedItem> {
        let mut state = lock(&self.state);
        loop {
            let Some(entry) = state.entries.pop_front() else { break };
            match entry {
                // A cancelled request has nothing to prepare.
                Entry::Prepare(request) if !request.claim_preparation() => {}
                Entry::Prepare(request) => return Some(ClaimedItem::Prepare(request)),
                Entry::Sync(request, target) => return Some(ClaimedItem::Sync(request, target)),
                Entry::Blocks(request) => {
                    if let Some(index) = request.claim_block() {
                        state.entries.push_back(Entry::Blocks(Arc::clone(&request)));
                        return Some(ClaimedItem::Block(request, index));
                    }
                }
            }
        }
        // In order of submission, since read-ahead is used in that order.
        while let Some(request) = state.read_ahead.front() {
            if let Some(index) = request.claim_block() {
                return Some(ClaimedItem::Block(Arc::clone(request), index));
            }
            state.read_ahead.pop_front();
        }
        None
    }

    /// Moves a low-priority request to the normal queue, because a caller waits for it.
    pub(crate) fn prioritise(&self, request: &Arc<Request>) {
        let mut state = lock(&self.state);
        if let Some(place) = state.read_ahead.iter().position(|other| Arc::ptr_eq(other, request)) {
            state.read_ahead.remove(place);
            state.entries.push_back(Entry::Blocks(Arc::clone(request)));
        }
    }

    /// Returns whether an idle worker must exit, and counts it as ended. It exits once no work can arrive.
    pub(crate) fn try_exit(&self) -> bool {
        let exits = {
            let mut state = lock(&self.state);
            let exits = state.is_closed && state.is_empty() && state.inline_callers == 0;
            state.workers_ended += usize::from(exits);
            exits
        };
        if exits {
            // Other workers may have gone to sleep since `close`, while remaining work was assigned to a woken one.
            self.wake(u64::MAX);
        }
        exits
    }

    /// Keeps the workers alive while the caller runs a request itself.
    pub(crate) fn enter_inline(&self, request: &Request) -> Result<InlineCaller<'_>> {
        self.check_open(request, |state| state.inline_callers += 1)?;
        Ok(InlineCaller { queue: self })
    }

    /// Accepts a request without blocks or preparation. Its syncs follow; without syncs it completes.
    pub(crate) fn push_empty(&self, request: &Arc<Request>) -> Result<()> {
        self.check_open(request, |_| ())?;
        self.blocks_done(request);
        Ok(())
    }

    fn check_open(&self, request: &Request, then: impl FnOnce(&mut State)) -> Result<()> {
        let mut state = lock(&self.state);
        if state.is_closed {
            return Err(closed(request));
        }
        then(&mut state);
        Ok(())
    }

    /// Refuses new requests. The workers exit when the queued ones are done.
    pub(crate) fn close(&self) {
        lock(&self.state).is_closed = true;
        self.wake(u64::MAX);
    }

    /// Offers the unclaimed blocks of a request whose files are prepared.
    pub(crate) fn offer_blocks(&self, request: &Arc<Request>) {
        if request.has_unclaimed()
            && let Err(error) = self.offer([Entry::Blocks(Arc::clone(request))], request, request.plan.block_count())
        {
            self.cancel(request, error);
        }
    }

    /// Offers `items` work items of a started request. Fails if no worker is left.
    fn offer(&self, entries: impl IntoIterator<Item = Entry>, request: &Request, items: u64) -> Result<()> {
        {
            let mut state = lock(&self.state);
            if state.workers_ended == self.workers.len() {
                return Err(state.failure.clone().unwrap_or_else(|| closed(request)));
            }
            state.entries.extend(entries);
        }
        self.wake(items);
        Ok(())
    }

    /// Records the result of a work item: the bytes moved for the caller, or the failure.
    pub(crate) fn end(&self, request: &Arc<Request>, kind: WorkKind, result: Result<u64>) {
        let bytes = result.unwrap_or_else(|error| {
            request.fail(error);
            0
        });
        match kind {
            WorkKind::Prepare | WorkKind::Block => {
                if request.finish_item(bytes) {
                    self.blocks_done(request);
                } else if kind == WorkKind::Prepare {
                    self.offer_blocks(request);
                }
            }
            WorkKind::Sync => {
                if request.finish_sync() {
                    self.complete(request);
                }
            }
        }
    }

    /// Starts a request's syncs after its last block, or completes the request.
    pub(crate) fn blocks_done(&self, request: &Arc<Request>) {
        let targets = if request.has_failed() { Ok(Vec::new()) } else { sync_targets(request) };
        let targets = targets.unwrap_or_else(|error| {
            request.fail(error);
            Vec::new()
        });
        if targets.is_empty() {
            return self.complete(request);
        }
        let items = targets.len() as u64;
        request.expect_syncs(items);
        let entries = targets.into_iter().map(|target| Entry::Sync(Arc::clone(request), target));
        if let Err(error) = self.offer(entries, request, items) {
            request.fail(error);
            self.complete(request);
        }
    }

    /// Completes a request whose work items have all ended.
    pub(crate) fn complete(&self, request: &Request) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.requests_failed.fetch_add(u64::from(request.has_failed()), Ordering::Relaxed);
        if let Some(now) = self.recorder.now() {
            self.record(request, now);
        }
        request.complete();
    }

    /// Adds the request to recordings. This precedes the request's completion, so a caller that has waited finds it
    /// there.
    fn record(&self, request: &Request, now: u64) {
        let files = request.files();
        self.recorder.record(self.recorder.time_of(request.submitted), now, |names| EventKind::Request {
            direction: request.plan.direction(),
            file: files.first().map(|file| names.file(file.path())),
            files: files.len() as u32,
            bytes: request.plan.bytes_total(),
            failed: request.has_failed(),
        });
    }

    /// Returns the number of ended requests and of failed ones.
    pub(crate) fn ended(&self) -> (u64, u64) {
        (self.requests.load(Ordering::Relaxed), self.requests_failed.load(Ordering::Relaxed))
    }

    /// Cancels a request's unclaimed work items. Returns whether there were any.
    pub(crate) fn cancel(&self, request: &Arc<Request>, error: Error) -> bool {
        match request.cancel(error) {
            Cancelled::Nothing => false,
            Cancelled::Rest => true,
            Cancelled::All => {
                self.complete(request);
                true
            }
        }
    }

    /// Records that a worker's backend failed for good. If no worker is left, cancels the queued requests and closes
    /// the queue.
    pub(crate) fn worker_failed(&self, error: &Error) {
        let entries = {
            let mut state = lock(&self.state);
            state.workers_ended += 1;
            if state.workers_ended < self.workers.len() {
                return;
            }
            state.failure = Some(error.clone());
            state.is_closed = true;
            let read_ahead = std::mem::take(&mut state.read_ahead);
            let mut entries = std::mem::take(&mut state.entries);
            entries.extend(read_ahead.into_iter().map(Entry::Blocks));
            entries
        };
        for entry in entries {
            match entry {
                Entry::Prepare(request) | Entry::Blocks(request) => {
                    self.cancel(&request, error.clone());
                }
                Entry::Sync(request, _) => self.end(&request, WorkKind::Sync, Err(error.clone())),
            }
        }
    }

    /// Wakes one worker per work item, until no idle worker is left.
    fn wake(&self, items: u64) {
        let mut left = items;
        for handle in &self.workers {
            if left == 0 {
                return;
            }
            left -= u64::from(handle.notify());
        }
    }
}

/// A caller that runs a request itself. The workers stay until it is done.
#[derive(Debug)]
pub(crate) struct InlineCaller<'a> {
    queue: &'a RequestQueue,
}

impl Drop for InlineCaller<'_> {
    fn drop(&mut self) {
        let is_awaited = {
            let mut state = lock(&self.queue.state);
            state.inline_callers -= 1;
            state.is_closed && state.inline_callers == 0
        };
        if is_awaited {
            self.queue.wake(u64::MAX);
        }
    }
}

/// The error of a request that a closed engine refuses.
pub(super) fn closed(request: &Request) -> Error {
    let error =
        Error::new(ErrorKind::Closed, request.plan.direction().name(), "the engine is closed; create another one");
    match request.files().first() {
        Some(file) => error.at_path(file.path()),
        None => error,
    }
}
