//! Combines a backend with cuFile. Ops with GPU memory go to cuFile, on separate threads, since its calls block. All
//! others go to the main backend.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use deepnvme_cuda::CuFile;
use deepnvme_mem::{Device, RegistrableRange};

use super::cufile::Gds;
use super::submission::ENTRIES_MAX;
use crate::backend::contract::{Backend, BackendKind, BackendSetup, Wake};
use crate::backend::threads::pool::{Perform, Pool};
use crate::error::Result;
use crate::op::{Completion, Op, Submit};

/// Maximum concurrent transfers of one worker, if each takes a thread.
const THREADS_MAX: u32 = 8;
/// Maximum concurrent batches of one worker. While one completes, the others keep the device busy.
const BATCHES_MAX: u32 = 4;

/// A main backend and cuFile.
pub(crate) struct GdsBackend {
    // Dropped first: it waits for cuFile's work. Created for the first op with GPU memory, when cuFile's features are
    // known.
    pool: Option<Pool>,
    main: Box<dyn Backend>,
    wake: Arc<Waker>,
    gds: Arc<Gds>,
    setup: BackendSetup,
    collected: Vec<Op>,
    in_flight: u32,
}

/// Distinguishes wakes by other threads from those of completed transfers.
struct Waker {
    main: Arc<dyn Wake>,
    is_wanted: AtomicBool,
}

impl Wake for Waker {
    fn wake(&self) {
        self.is_wanted.store(true, Ordering::Release);
        self.main.wake();
    }
}

impl GdsBackend {
    pub(crate) fn new(main: Box<dyn Backend>, setup: &BackendSetup, gds: &Arc<Gds>) -> Self {
        let (gds, setup) = (Arc::clone(gds), setup.clone());
        let wake = Arc::new(Waker { main: main.waker(), is_wanted: AtomicBool::new(false) });
        Self { pool: None, main, wake, gds, setup, collected: Vec::new(), in_flight: 0 }
    }

    /// Passes the collected ops to the threads.
    fn run(&mut self) {
        if self.collected.is_empty() {
            return;
        }
        let (setup, gds, main) = (&self.setup, &self.gds, &self.main);
        let pool = self.pool.get_or_insert_with(|| {
            let has_batches = gds.cufile().is_ok_and(CuFile::has_batches);
            let (threads, most) = if has_batches { (BATCHES_MAX, ENTRIES_MAX) } else { (THREADS_MAX, 1) };
            let gds = Arc::clone(gds);
            let perform: Perform = Box::new(move |ops, finish| gds.perform_all(ops, finish));
            Pool::new(setup.worker_index, threads.min(setup.queue_depth), most, perform, Some(main.waker()))
        });
        pool.run(&mut self.collected);
    }

    fn take_completions(&mut self, completions: &mut Vec<Completion>) {
        let Some(pool) = &self.pool else { return };
        let before = completions.len();
        pool.shared().take_completions(0, completions);
        self.in_flight -= (completions.len() - before) as u32;
    }
}

impl Backend for GdsBackend {
    fn kind(&self) -> BackendKind {
        self.main.kind()
    }

    fn depth(&self) -> u32 {
        self.main.depth()
    }

    fn in_flight(&self) -> u32 {
        self.main.in_flight() + self.in_flight
    }

    fn submit(&mut self, op: Op) -> Submit {
        if self.in_flight() >= self.depth() {
            return Submit::Busy(op);
        }
        if op.iovecs.first().is_none_or(|memory| memory.device() == Device::Host) {
            return self.main.submit(op);
        }
        self.in_flight += 1;
        self.collected.push(op);
        Submit::Queued
    }

    fn flush(&mut self) -> Result<()> {
        self.run();
        self.main.flush()
    }

    fn reap(&mut self, min: u32, completions: &mut Vec<Completion>) -> Result<()> {
        self.run();
        let (before, min) = (completions.len(), min as usize);
        loop {
            self.take_completions(completions);
            // A transfer that completes from here on wakes the main backend, even before the backend has begun to wait.
            let missing = min.saturating_sub(completions.len() - before);
            self.main.reap(missing as u32, completions)?;
            self.take_completions(completions);
            let is_over = completions.len() - before >= min;
            // A wake by another thread also ends the wait, and counts for one reap.
            if is_over || self.wake.is_wanted.swap(false, Ordering::AcqRel) {
                return Ok(());
            }
        }
    }

    fn waker(&self) -> Arc<dyn Wake> {
        Arc::<Waker>::clone(&self.wake)
    }

    fn register(&mut self, memory: &RegistrableRange) -> bool {
        self.main.register(memory)
    }

    fn unregister(&mut self, memory: &RegistrableRange) {
        self.main.unregister(memory);
    }
}

impl Drop for GdsBackend {
    fn drop(&mut self) {
        self.run();
    }
}
