//! The worker loop: one thread and one backend. It fills the window of ops in flight, reaps at least one op, and
//! repeats.
//!
//! Workers implement the rules above the backends: they continue short transfers, retry interrupted ones, fall back
//! from direct to buffered I/O and from cuFile to bounce buffers, and copy to and from bounce buffers. `io_loop` drives
//! the backend, and `in_flight` has its ops. `window` limits the ops in flight, and `outcome` decides what follows a
//! completion; both are pure. `accounts` is where a worker counts and records. `bounce` has the bounce buffers,
//! `gpu_stage` the copies to and from GPUs, and `gds` the route past both. `inline` runs small requests on the caller's
//! own thread, by the same rules.

use std::sync::Arc;

use self::io_loop::IoLoop;
use self::window::Window;
use crate::backend::Backend;
use crate::config::WindowMode;
use crate::error::Result;
use crate::gpu::EngineGpus;
use crate::request::{RequestQueue, WorkGuard, WorkItem, WorkerHandle};

mod accounts;
mod bounce;
mod gds;
mod gpu_stage;
mod in_flight;
mod inline;
mod io_loop;
mod outcome;
mod window;

pub(crate) use accounts::Accounts;
pub(crate) use bounce::BounceSetup;
pub(crate) use gds::{GdsSetup, gds_required};
pub use in_flight::{RETRIES_AT_ONCE, RETRY_PAUSE};
pub(crate) use inline::InlineExecutor;
pub use outcome::RETRIES_MAX;

/// The parameters of a worker.
pub(crate) struct WorkerSetup {
    pub(crate) queue: Arc<RequestQueue>,
    pub(crate) accounts: Accounts,
    pub(crate) worker_index: u32,
    pub(crate) bounce: BounceSetup,
    pub(crate) gpus: Arc<EngineGpus>,
    pub(crate) gds: GdsSetup,
    pub(crate) window: WindowMode,
}

/// The state of the loop.
pub(crate) struct Worker<'a> {
    queue: &'a Arc<RequestQueue>,
    handle: &'a WorkerHandle,
    io_loop: IoLoop<Box<dyn Backend>>,
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
            WindowMode::Drain => Window::fixed(depth),
        };
        let io_loop = IoLoop::new(backend, window, setup.accounts.clone(), setup.bounce, &setup.gpus);
        let io_loop = io_loop.with_gds(setup.gds.clone());
        Self { queue: &setup.queue, handle, io_loop, window: setup.window, waiting: None }
    }

    /// Works until the queue is closed and empty. An error means that the backend itself failed. Every request that
    /// this worker holds has then failed with it.
    pub(crate) fn run(mut self) -> Result<()> {
        loop {
            self.handle.run();
            match self.fill().and_then(|()| self.sleep_or_reap()) {
                Ok(true) => {}
                Ok(false) => return Ok(()),
                Err(error) => {
                    self.io_loop.abandon(&error);
                    if let Some((guard, _)) = self.waiting {
                        guard.end(Err(error.clone()));
                    }
                    return Err(error);
                }
            }
        }
    }

    /// Takes and submits work until the window is full or a block must wait for a bounce buffer.
    fn fill(&mut self) -> Result<()> {
        let may_take_work = self.may_take_work();
        while self.io_loop.has_room() {
            // Blocks that cuFile refused come first; they may fill the window.
            if !self.io_loop.start_refused()? || !may_take_work || !self.io_loop.has_room() {
                break;
            }
            let work = match self.waiting.take() {
                Some((guard, index)) => Some(WorkItem::Block(guard, index)),
                None => WorkItem::next(self.queue),
            };
            match work {
                None => break,
                Some(WorkItem::Prepare(guard)) => prepare(guard),
                Some(WorkItem::Sync(guard, target)) => self.io_loop.start_sync(guard, &target)?,
                Some(WorkItem::Block(guard, index)) => {
                    if let Some(guard) = self.io_loop.start_block(guard, index)? {
                        self.waiting = Some((guard, index));
                        break;
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns whether to take new work. In drain mode, all ops must have completed.
    fn may_take_work(&self) -> bool {
        self.window == WindowMode::Sliding || self.io_loop.is_idle()
    }

    /// Copies, sleeps or reaps. Returns false if the worker must end.
    fn sleep_or_reap(&mut self) -> Result<bool> {
        // Copies one block and returns to `fill`, so that its bounce buffer takes a new read before the next completed
        // block is copied.
        if self.io_loop.copy_completed_read()? || self.io_loop.handle_gpu_copies()? {
            return Ok(true);
        }
        // Wait for the GPU, not for the disk: the GPU copies a block faster than the disk reads one, and the disk
        // already has all the work it can get.
        if self.io_loop.has_gpu_copies() {
            self.io_loop.reap(false)?;
            if !self.io_loop.has_completed_reads() {
                self.io_loop.wait_for_gpu_copy();
            }
            return Ok(true);
        }
        if self.io_loop.is_idle() && self.waiting.is_none() {
            if self.queue.try_exit() {
                return Ok(false);
            }
            self.handle.park();
            return Ok(true);
        }
        // With a full queue or no free bounce buffer, only a completion can make room, so no wake is needed.
        let is_held_up = self.waiting.is_some() || self.io_loop.has_refused();
        let can_take_more = self.io_loop.has_room() && !is_held_up && self.may_take_work();
        let may_block = !self.io_loop.has_completions() && (!can_take_more || self.handle.may_reap());
        self.io_loop.reap(may_block)?;
        Ok(true)
    }
}

/// Gives the files of a request their final size, or space.
pub(crate) fn prepare(guard: WorkGuard) {
    let request = guard.request();
    let sized = if request.has_failed() { Ok(()) } else { request.set_file_sizes() };
    guard.end(sized.map(|()| 0));
}
