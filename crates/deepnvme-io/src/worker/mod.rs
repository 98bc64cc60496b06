//! The worker loop: one thread and one backend. It fills the queue to its depth, reaps at least one op, and repeats.
//!
//! Workers implement the rules above the backends: they continue short transfers, retry interrupted ones, fall back
//! from direct to buffered I/O, and copy to and from bounce buffers. `mover` has the backend and everything in flight.
//! `flight` is one block of it. `window` limits the ops in flight, and `verdict` classifies completions; both are pure.
//! `settle` handles completions. `hands` runs small transfers on the caller's own thread, by the same rules.

use std::sync::Arc;
use std::time::Duration;

use self::window::Window;
use crate::backend::Backend;
use crate::config::WindowMode;
use crate::error::Result;
use crate::gpu::EngineGpus;
use crate::request::{RequestQueue, WorkGuard, WorkItem, WorkerHandle};
use crate::stats::WorkerStats;
use crate::trace::Tape;

mod flight;
mod hands;
mod mover;
mod settle;
mod verdict;
mod window;

pub(crate) use hands::Hands;
pub(crate) use mover::{GdsSetup, Mover, SlotSetup, gds_required};

/// Maximum resubmissions of one op without progress. After that, its error is reported.
pub const RETRIES_MAX: u32 = 100;
/// Retries of [`RETRIES_MAX`] that run immediately. Later ones are spaced by [`RETRY_PAUSE`].
pub const RETRIES_AT_ONCE: u32 = 10;
/// Pause before a late retry.
pub const RETRY_PAUSE: Duration = Duration::from_millis(1);
/// Collected bytes that trigger a flush to the kernel although more ops could follow. It is small because the disk does
/// not know of collected ops. With 64 KiB, the latency of 4 KiB blocks equals that of submitting each one immediately.
const FLUSH_BYTES: u64 = 64 << 10;

/// The parameters of a worker.
pub(crate) struct WorkerSetup {
    pub(crate) queue: Arc<RequestQueue>,
    pub(crate) stats: Arc<WorkerStats>,
    pub(crate) worker_index: u32,
    pub(crate) slots: SlotSetup,
    pub(crate) gpus: Arc<EngineGpus>,
    pub(crate) gds: GdsSetup,
    pub(crate) window: WindowMode,
    pub(crate) tape: Tape,
}

/// The state of the loop.
pub(crate) struct Worker<'a> {
    queue: &'a Arc<RequestQueue>,
    handle: &'a WorkerHandle,
    mover: Mover<Box<dyn Backend>>,
    window: WindowMode,
    /// A claimed block that waits for a bounce buffer.
    waiting: Option<(WorkGuard, u64)>,
}

impl<'a> Worker<'a> {
    pub(crate) fn new(setup: &'a WorkerSetup, backend: Box<dyn Backend>) -> Self {
        let handle = setup.queue.handle(setup.worker_index);
        handle.register(backend.waker());
        let depth = backend.depth();
        let window = match setup.window {
            WindowMode::Sliding => Window::adapting(depth),
            WindowMode::Wave => Window::fixed(depth),
        };
        let accounts = (Arc::clone(&setup.stats), setup.tape.clone());
        let mover = Mover::new(backend, window, accounts, setup.slots, &setup.gpus);
        let mover = mover.with_gds(setup.gds.clone());
        Self { queue: &setup.queue, handle, mover, window: setup.window, waiting: None }
    }

    /// Works until the queue is closed and empty. An error means that the backend itself failed. Every request that
    /// this worker holds has then failed with it.
    pub(crate) fn run(mut self) -> Result<()> {
        loop {
            self.handle.run();
            match self.fill().and_then(|()| self.rest_or_reap()) {
                Ok(true) => {}
                Ok(false) => return Ok(()),
                Err(error) => {
                    self.mover.abandon(&error);
                    if let Some((guard, _)) = self.waiting {
                        guard.end(Err(error.clone()));
                    }
                    return Err(error);
                }
            }
        }
    }

    /// Submits as much as fits.
    fn fill(&mut self) -> Result<()> {
        if !self.may_take_work() {
            return Ok(());
        }
        while self.mover.has_room() {
            if !self.mover.start_refused()? {
                break;
            }
            let work = match self.waiting.take() {
                Some((guard, index)) => Some(WorkItem::Block(guard, index)),
                None => WorkItem::next(self.queue),
            };
            match work {
                None => break,
                Some(WorkItem::Prepare(guard)) => prepare(guard),
                Some(WorkItem::Sync(guard, target)) => self.mover.start_sync(guard, &target)?,
                Some(WorkItem::Block(guard, index)) => {
                    if let Some(guard) = self.mover.start_block(guard, index)? {
                        self.waiting = Some((guard, index));
                        break;
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns whether to take new work. In wave mode, the last wave must be complete.
    fn may_take_work(&self) -> bool {
        self.window == WindowMode::Sliding || self.mover.is_idle() || self.mover.has_refused()
    }

    /// Copies, sleeps or reaps. Returns false if the worker must end.
    fn rest_or_reap(&mut self) -> Result<bool> {
        // Copies one block and returns to `fill`. Its bounce buffer then carries the next block while the following one
        // is copied.
        if self.mover.unload()? || self.mover.settle_copies()? {
            return Ok(true);
        }
        // A GPU copies a block faster than a disk reads one, and the disk already has all the work it can get.
        if self.mover.is_copying() {
            self.mover.reap(false)?;
            if !self.mover.has_landed() {
                self.mover.wait_for_copy();
            }
            return Ok(true);
        }
        if self.mover.is_idle() && self.waiting.is_none() {
            if self.queue.try_exit() {
                return Ok(false);
            }
            self.handle.park();
            return Ok(true);
        }
        // With a full queue or no free bounce buffer, only a completion can make room, so no wake is needed.
        let is_held_up = self.waiting.is_some() || self.mover.has_refused();
        let can_take_more = self.mover.has_room() && !is_held_up && self.may_take_work();
        let may_block = !self.mover.has_news() && (!can_take_more || self.handle.may_reap());
        self.mover.reap(may_block)?;
        Ok(true)
    }
}

/// Gives the files of a request their size.
pub(crate) fn prepare(guard: WorkGuard) {
    let request = guard.request();
    let sized = if request.has_failed() { Ok(()) } else { request.set_file_sizes() };
    guard.end(sized.map(|()| 0));
}
