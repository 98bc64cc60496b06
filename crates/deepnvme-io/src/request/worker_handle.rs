//! The handle that wakes one worker, from its sleep or from a blocking reap.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::backend::Wake;
use crate::sync::thread::{self, Thread};
use crate::sync::{AtomicU8, OnceLock};

/// Wakes one worker if it sleeps or waits for the backend.
#[derive(Default)]
pub(crate) struct WorkerHandle {
    state: AtomicU8,
    thread: OnceLock<Thread>,
    waker: OnceLock<Arc<dyn Wake>>,
}

impl std::fmt::Debug for WorkerHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WorkerHandle").field("state", &self.state).finish_non_exhaustive()
    }
}

/// Looks for work or handles completions.
const RUNNING: u8 = 0;
/// Sleeps.
const PARKED: u8 = 1;
/// Waits for a completion.
const REAPING: u8 = 2;
/// Is about to look for work again.
const NOTIFIED: u8 = 3;

impl WorkerHandle {
    /// Makes the calling thread the worker to wake. `waker` interrupts its blocking reaps.
    pub(crate) fn register(&self, waker: Arc<dyn Wake>) {
        let _ = self.thread.set(thread::current());
        let _ = self.waker.set(waker);
    }

    /// Starts a search for work, which finds all work whose notification came before. All changes of the state are
    /// exchanges, so that each one reads the previous value.
    pub(crate) fn run(&self) {
        self.state.swap(RUNNING, Ordering::SeqCst);
    }

    /// Sleeps until notified. Returns immediately if a notification came since `run`.
    pub(crate) fn park(&self) {
        if self.state.compare_exchange(RUNNING, PARKED, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            return;
        }
        while self.state.load(Ordering::SeqCst) == PARKED {
            thread::park();
        }
    }

    /// Announces a blocking reap. Returns false if a notification came since `run`: then do not block.
    pub(crate) fn may_reap(&self) -> bool {
        self.state.compare_exchange(RUNNING, REAPING, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Notifies the worker. Returns true if this woke it.
    pub(super) fn notify(&self) -> bool {
        match self.state.swap(NOTIFIED, Ordering::SeqCst) {
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
