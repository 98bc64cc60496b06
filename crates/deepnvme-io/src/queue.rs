//! The queue between requests and workers.
//!
//! Requests take turns: a worker claims one block of the first request and moves that request to the end. A small
//! request therefore never waits for all of a large one. Read-ahead comes last, until a caller waits for it.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::backend::Wake;
use crate::error::{Error, ErrorKind, Result};
use crate::job::{Cancelled, Durability, Job};
use crate::op::OpKind;
use crate::split::Channel;
use crate::sync::thread::{self, Thread};
use crate::sync::{AtomicU8, AtomicU64, Mutex, OnceLock, lock};
use crate::trace::{Recorder, What};

/// Maximum number of queued requests.
pub const REQUESTS_MAX: usize = 1 << 20;

/// One work item of a job. Its holder must [end](Queue::end) it. Workers hold it as a [`Work`](crate::claim::Work),
/// which guarantees that.
#[derive(Debug)]
#[must_use = "a piece that nobody ends keeps its job for ever"]
pub(crate) enum Piece {
    Prepare(Arc<Job>),
    Block(Arc<Job>, u64),
    Sync(Arc<Job>, SyncTarget),
}

/// The kind of a work item.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Duty {
    /// Give the file its final size.
    Prepare,
    /// Move one block.
    Block,
    /// Sync one file or folder.
    Sync,
}

#[derive(Debug)]
pub(crate) struct SyncTarget {
    pub(crate) file: Arc<OwnedFd>,
    pub(crate) kind: OpKind,
    pub(crate) path: std::path::PathBuf,
}

#[derive(Debug)]
enum Entry {
    Prepare(Arc<Job>),
    Blocks(Arc<Job>),
    Sync(Arc<Job>, SyncTarget),
}

#[derive(Debug)]
struct State {
    entries: VecDeque<Entry>,
    /// For workers without other work.
    later: VecDeque<Arc<Job>>,
    is_closed: bool,
    /// Callers that run small transfers themselves. Their syncs go to the workers.
    callers: u32,
    /// Workers that have left or failed.
    workers_gone: usize,
    /// The error of the last failed worker.
    loss: Option<Error>,
}

impl State {
    fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.later.is_empty()
    }
}

/// When a request is served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Turn {
    /// In turn with other requests.
    Now,
    /// Once the blocks of all other requests are in flight. Only for reads.
    Later,
}

/// Shared by the engine, its workers and its pending requests.
#[derive(Debug)]
pub(crate) struct Queue {
    state: Mutex<State>,
    seats: Vec<Seat>,
    pid: u32,
    requests: AtomicU64,
    requests_failed: AtomicU64,
    recorder: Arc<Recorder>,
}

/// The handle that wakes one worker.
#[derive(Default)]
pub(crate) struct Seat {
    posture: AtomicU8,
    thread: OnceLock<Thread>,
    waker: OnceLock<Arc<dyn Wake>>,
}

impl std::fmt::Debug for Seat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Seat").field("posture", &self.posture).finish_non_exhaustive()
    }
}

const RUNNING: u8 = 0;
const PARKED: u8 = 1;
const REAPING: u8 = 2;
const NOTIFIED: u8 = 3;

impl Seat {
    pub(crate) fn sit(&self, waker: Arc<dyn Wake>) {
        let _ = self.thread.set(thread::current());
        let _ = self.waker.set(waker);
    }

    /// Starts a search for work, which will find everything notified before. All changes are exchanges, so that each
    /// one reads the previous value.
    pub(crate) fn run(&self) {
        self.posture.swap(RUNNING, Ordering::SeqCst);
    }

    /// Sleeps until notified. Returns immediately if a notification came since `run`.
    pub(crate) fn park(&self) {
        if self.posture.compare_exchange(RUNNING, PARKED, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            return;
        }
        while self.posture.load(Ordering::SeqCst) == PARKED {
            thread::park();
        }
    }

    /// Announces a blocking reap. Returns false if a notification came since `run`: then do not block.
    pub(crate) fn may_reap(&self) -> bool {
        self.posture.compare_exchange(RUNNING, REAPING, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Returns true if this woke the worker.
    fn notify(&self) -> bool {
        match self.posture.swap(NOTIFIED, Ordering::SeqCst) {
            PARKED => {
                if let Some(thread) = self.thread.get() {
                    thread.unpark();
                }
                true
            }
            REAPING => {
                if let Some(waker) = self.waker.get() {
                    waker.wake();
                }
                true
            }
            _ => false,
        }
    }
}

impl Queue {
    pub(crate) fn new(workers: u32, recorder: &Arc<Recorder>) -> Self {
        let state = State {
            entries: VecDeque::new(),
            later: VecDeque::new(),
            is_closed: false,
            callers: 0,
            workers_gone: 0,
            loss: None,
        };
        Self {
            state: Mutex::new(state),
            seats: (0..workers).map(|_| Seat::default()).collect(),
            pid: std::process::id(),
            requests: AtomicU64::new(0),
            requests_failed: AtomicU64::new(0),
            recorder: Arc::clone(recorder),
        }
    }

    pub(crate) fn seat(&self, worker_index: u32) -> &Seat {
        &self.seats[worker_index as usize]
    }

    /// Returns whether this process was forked from the one that owns the threads.
    pub(crate) fn is_foreign(&self) -> bool {
        self.pid != std::process::id()
    }

    /// Queues a new request.
    pub(crate) fn push(&self, job: &Arc<Job>, turn: Turn) -> Result<()> {
        {
            let mut state = lock(&self.state);
            if state.is_closed {
                return Err(closed(job));
            }
            if state.entries.len() + state.later.len() >= REQUESTS_MAX {
                let detail = format!("{REQUESTS_MAX} requests are waiting; wait for some of them first");
                return Err(Error::new(ErrorKind::Busy, job.plan.direction().name(), detail));
            }
            match turn {
                _ if job.needs_preparing() => state.entries.push_back(Entry::Prepare(Arc::clone(job))),
                Turn::Now => state.entries.push_back(Entry::Blocks(Arc::clone(job))),
                Turn::Later => state.later.push_back(Arc::clone(job)),
            }
        }
        let hands = if job.needs_preparing() { 1 } else { job.plan.block_count().max(1) };
        self.rouse(hands);
        Ok(())
    }

    /// Returns the next work item, if any.
    pub(crate) fn next(&self) -> Option<Piece> {
        let mut state = lock(&self.state);
        loop {
            let Some(entry) = state.entries.pop_front() else { break };
            match entry {
                // A cancelled request has nothing to prepare.
                Entry::Prepare(job) if !job.claim_preparation() => {}
                Entry::Prepare(job) => return Some(Piece::Prepare(job)),
                Entry::Sync(job, target) => return Some(Piece::Sync(job, target)),
                Entry::Blocks(job) => {
                    if let Some(index) = job.claim() {
                        state.entries.push_back(Entry::Blocks(Arc::clone(&job)));
                        return Some(Piece::Block(job, index));
                    }
                }
            }
        }
        // In order of submission, since read-ahead is used in that order.
        while let Some(job) = state.later.front() {
            if let Some(index) = job.claim() {
                return Some(Piece::Block(Arc::clone(job), index));
            }
            state.later.pop_front();
        }
        None
    }

    /// Moves a low-priority request to the normal queue, because a caller waits for it.
    pub(crate) fn hurry(&self, job: &Arc<Job>) {
        let mut state = lock(&self.state);
        if let Some(place) = state.later.iter().position(|other| Arc::ptr_eq(other, job)) {
            state.later.remove(place);
            state.entries.push_back(Entry::Blocks(Arc::clone(job)));
        }
    }

    /// Returns whether an idle worker leaves. It leaves once no work can arrive.
    pub(crate) fn leave(&self) -> bool {
        let is_over = {
            let mut state = lock(&self.state);
            let is_over = state.is_closed && state.is_empty() && state.callers == 0;
            state.workers_gone += usize::from(is_over);
            is_over
        };
        if is_over {
            // Other workers may have gone to sleep since `close`, while remaining work was assigned to a woken one.
            self.rouse(u64::MAX);
        }
        is_over
    }

    /// Keeps the workers alive while the caller runs a request itself.
    pub(crate) fn enter(&self, job: &Job) -> Result<Caller<'_>> {
        self.check_open(job, |state| state.callers += 1)?;
        Ok(Caller { queue: self })
    }

    /// Accepts a request that moves and prepares nothing. Its syncs follow, or its completion.
    pub(crate) fn push_empty(&self, job: &Arc<Job>) -> Result<()> {
        self.check_open(job, |_| ())?;
        self.blocks_done(job);
        Ok(())
    }

    fn check_open(&self, job: &Job, then: impl FnOnce(&mut State)) -> Result<()> {
        let mut state = lock(&self.state);
        if state.is_closed {
            return Err(closed(job));
        }
        then(&mut state);
        Ok(())
    }

    /// Refuses new requests. The workers leave when the queued ones are done.
    pub(crate) fn close(&self) {
        lock(&self.state).is_closed = true;
        self.rouse(u64::MAX);
    }

    /// Offers the unclaimed blocks of a job whose files are prepared.
    pub(crate) fn prepared(&self, job: &Arc<Job>) {
        if job.has_unclaimed()
            && let Err(error) = self.offer([Entry::Blocks(Arc::clone(job))], job, job.plan.block_count())
        {
            self.cancel(job, error);
        }
    }

    /// Offers work on a started job. Fails if no worker is left.
    fn offer(&self, entries: impl IntoIterator<Item = Entry>, job: &Job, hands: u64) -> Result<()> {
        {
            let mut state = lock(&self.state);
            if state.workers_gone == self.seats.len() {
                return Err(state.loss.clone().unwrap_or_else(|| closed(job)));
            }
            state.entries.extend(entries);
        }
        self.rouse(hands);
        Ok(())
    }

    /// Records the result of a work item: the bytes moved for the caller, or the failure.
    pub(crate) fn end(&self, job: &Arc<Job>, duty: Duty, result: Result<u64>) {
        let bytes = result.unwrap_or_else(|error| {
            job.fail(error);
            0
        });
        match duty {
            Duty::Prepare | Duty::Block => {
                if job.finish_piece(bytes) {
                    self.blocks_done(job);
                } else if duty == Duty::Prepare {
                    self.prepared(job);
                }
            }
            Duty::Sync => {
                if job.finish_sync() {
                    self.complete(job);
                }
            }
        }
    }

    /// Starts a job's syncs after its last work item, or completes it.
    pub(crate) fn blocks_done(&self, job: &Arc<Job>) {
        let targets = if job.has_failed() { Ok(Vec::new()) } else { sync_targets(job) };
        let targets = targets.unwrap_or_else(|error| {
            job.fail(error);
            Vec::new()
        });
        if targets.is_empty() {
            return self.complete(job);
        }
        let hands = targets.len() as u64;
        job.expect_syncs(hands);
        let entries = targets.into_iter().map(|target| Entry::Sync(Arc::clone(job), target));
        if let Err(error) = self.offer(entries, job, hands) {
            job.fail(error);
            self.complete(job);
        }
    }

    /// Reports a job whose work items have all ended.
    pub(crate) fn complete(&self, job: &Job) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.requests_failed.fetch_add(u64::from(job.has_failed()), Ordering::Relaxed);
        if let Some(now) = self.recorder.now() {
            self.note(job, now);
        }
        job.complete();
    }

    /// Adds the request to recordings. This precedes its completion, so a caller that has waited finds it there.
    fn note(&self, job: &Job, now: u64) {
        let files = job.files();
        self.recorder.note(self.recorder.at(job.submitted), now, |names| What::Request {
            direction: job.plan.direction(),
            file: files.first().map(|file| names.file(file.path())),
            files: files.len() as u32,
            bytes: job.plan.bytes_total(),
            failed: job.has_failed(),
        });
    }

    /// Returns the number of ended requests and of failed ones.
    pub(crate) fn ended(&self) -> (u64, u64) {
        (self.requests.load(Ordering::Relaxed), self.requests_failed.load(Ordering::Relaxed))
    }

    /// Cancels a job's unclaimed work items.
    pub(crate) fn cancel(&self, job: &Arc<Job>, error: Error) -> bool {
        match job.cancel(error) {
            Cancelled::Nothing => false,
            Cancelled::Rest => true,
            Cancelled::All => {
                self.complete(job);
                true
            }
        }
    }

    /// Records that a worker's backend failed for good. The last worker's failure cancels the queued requests.
    pub(crate) fn worker_lost(&self, error: &Error) {
        let entries = {
            let mut state = lock(&self.state);
            state.workers_gone += 1;
            if state.workers_gone < self.seats.len() {
                return;
            }
            state.loss = Some(error.clone());
            state.is_closed = true;
            let later = std::mem::take(&mut state.later);
            let mut entries = std::mem::take(&mut state.entries);
            entries.extend(later.into_iter().map(Entry::Blocks));
            entries
        };
        for entry in entries {
            match entry {
                Entry::Prepare(job) | Entry::Blocks(job) => {
                    self.cancel(&job, error.clone());
                }
                Entry::Sync(job, _) => self.end(&job, Duty::Sync, Err(error.clone())),
            }
        }
    }

    /// Wakes one worker per work item, as far as there are any.
    fn rouse(&self, hands: u64) {
        let mut left = hands;
        for seat in &self.seats {
            if left == 0 {
                return;
            }
            left -= u64::from(seat.notify());
        }
    }
}

/// A caller that runs a request itself. The workers stay until it is done.
#[derive(Debug)]
pub(crate) struct Caller<'a> {
    queue: &'a Queue,
}

impl Drop for Caller<'_> {
    fn drop(&mut self) {
        let is_awaited = {
            let mut state = lock(&self.queue.state);
            state.callers -= 1;
            state.is_closed && state.callers == 0
        };
        if is_awaited {
            self.queue.rouse(u64::MAX);
        }
    }
}

fn closed(job: &Job) -> Error {
    Error::new(ErrorKind::Closed, job.plan.direction().name(), "the engine is closed")
}

/// Returns the descriptors to sync after a write: each part, and each folder for full durability.
fn sync_targets(job: &Job) -> Result<Vec<SyncTarget>> {
    let kind = match job.options.durability {
        Durability::None => return Ok(Vec::new()),
        Durability::Data => OpKind::SyncData,
        Durability::Full => OpKind::SyncAll,
    };
    let mut targets = Vec::new();
    let mut folders = std::collections::BTreeSet::new();
    for file in job.files().iter() {
        for part in file.parts() {
            let (descriptor, path) = (part.descriptor(Channel::Direct)?, part.path().to_path_buf());
            if job.options.durability == Durability::Full && part.has_name() {
                folders.extend(part.folder().map(std::path::Path::to_path_buf));
            }
            targets.push(SyncTarget { file: descriptor, kind, path });
        }
    }
    for folder in folders {
        let fd = crate::fs::open_folder(&folder)
            .map_err(|errno| Error::os("open folder to sync", errno).at_path(&folder))?;
        targets.push(SyncTarget { file: Arc::new(fd), kind: OpKind::SyncAll, path: folder });
    }
    Ok(targets)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::claim::Work;
    use crate::job::{Memory, WriteExtent, WriteOptions};
    use crate::layout::Layout;
    use crate::split::{BlockSizes, Direction, Geometry, Plan, Segment};
    use crate::sync::mpsc;

    struct NoWake;

    impl Wake for NoWake {
        fn wake(&self) {}
    }

    /// A request of one block, to be prepared first. It has no file and no memory.
    #[allow(clippy::unwrap_used, reason = "it is a part of the test")]
    fn job() -> Arc<Job> {
        let segment = Segment { file: 0, item: 0, offset: 0, len: 4096, address: None, is_flat_gpu: false };
        let geometry = Geometry { direct: None, layout: Layout::SINGLE, has_gds: false };
        let sizes = BlockSizes { block_bytes: 4096, slot_bytes: 4096, gds_bytes: 4096 };
        let plan = Plan::new(Direction::Write, &[geometry], vec![segment], sizes).unwrap();
        let options = WriteOptions { extent: WriteExtent::WholeFile, ..WriteOptions::default() };
        let memory = (Memory::Sources(Vec::new()), false);
        Arc::new(Job::new(plan, (Vec::new(), Vec::new()), memory, Vec::new(), options, tracing::Span::none()))
    }

    #[test]
    fn a_worker_that_went_to_sleep_after_the_close_leaves_with_the_others() {
        let queue = Arc::new(Queue::new(2, &Arc::new(Recorder::new())));
        let (busy, idle) = (queue.seat(0), queue.seat(1));
        busy.sit(Arc::new(NoWake));
        idle.sit(Arc::new(NoWake));
        queue.push(&job(), Turn::Now).unwrap();
        let Some(Work::Prepare(preparation)) = Work::next(&queue) else { panic!("a file is prepared first") };
        queue.close();
        idle.run();
        assert!(queue.next().is_none());
        // The request continues while its worker reaps, so that worker is the one to wake.
        busy.run();
        assert!(busy.may_reap());
        preparation.end(Ok(0));
        assert!(!queue.leave(), "a block is left, when the idle one looks");
        busy.run();
        let Some(Work::Block(block, _)) = Work::next(&queue) else { panic!("a block comes next") };
        block.end(Ok(4096));
        assert!(queue.next().is_none() && queue.leave());
        let (woken, wakes) = mpsc::channel();
        let asleep = Arc::clone(&queue);
        thread::spawn(move || {
            asleep.seat(1).park();
            woken.send(())
        });
        assert!(wakes.recv_timeout(std::time::Duration::from_secs(60)).is_ok(), "the idle worker sleeps for ever");
        assert!(queue.leave());
    }
}
