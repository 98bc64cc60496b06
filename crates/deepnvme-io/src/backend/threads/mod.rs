//! Ordinary system calls on a few threads. This backend works everywhere.
//!
//! `pool` has the threads and the queues to and from them, and `call` performs one op. This file is the worker's view
//! of the queue. The depth bounds the ops in flight, and [`THREADS_MAX`] bounds the concurrent calls.

pub(super) mod pool;

use std::sync::Arc;

use self::pool::{Pool, Shared};
use super::call;
use super::contract::{Backend, BackendKind, BackendSetup, Wake};
use crate::error::Result;
use crate::op::{Completion, Op, Submit, SubmitMode};

/// Maximum threads of one backend.
pub const THREADS_MAX: u32 = 16;

/// The threads backend.
pub struct ThreadsBackend {
    pool: Pool,
    /// Ops that wait for the next flush, oldest first.
    collected: Vec<Op>,
    depth: u32,
    in_flight: u32,
    submit: SubmitMode,
}

impl ThreadsBackend {
    /// Creates the queue. Threads start when there is work.
    ///
    /// # Errors
    /// None today, unlike other backends.
    pub fn open(setup: &BackendSetup) -> Result<Self> {
        let depth = setup.queue_depth.max(1);
        let pool = Pool::new(setup.worker_index, depth.min(THREADS_MAX), 1, pool::one_by_one(call::perform), None);
        Ok(Self { pool, collected: Vec::new(), depth, in_flight: 0, submit: setup.submit })
    }
}

impl Backend for ThreadsBackend {
    fn kind(&self) -> BackendKind {
        BackendKind::Threads
    }

    fn depth(&self) -> u32 {
        self.depth
    }

    fn in_flight(&self) -> u32 {
        self.in_flight
    }

    fn submit(&mut self, op: Op) -> Submit {
        if self.in_flight >= self.depth {
            return Submit::Busy(op);
        }
        self.in_flight += 1;
        self.collected.push(op);
        if self.submit == SubmitMode::Single {
            self.pool.run(&mut self.collected);
        }
        Submit::Queued
    }

    fn flush(&mut self) -> Result<()> {
        self.pool.run(&mut self.collected);
        Ok(())
    }

    fn reap(&mut self, min: u32, completions: &mut Vec<Completion>) -> Result<()> {
        self.pool.run(&mut self.collected);
        let before = completions.len();
        self.pool.shared().take_completions(min, completions);
        self.in_flight -= (completions.len() - before) as u32;
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Wake> {
        Arc::<Shared>::clone(self.pool.shared())
    }
}

impl Drop for ThreadsBackend {
    fn drop(&mut self) {
        // Passes the collected ops to the threads. The pool's own drop waits until all ops are done.
        self.pool.run(&mut self.collected);
    }
}
