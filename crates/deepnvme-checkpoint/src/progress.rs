//! The progress of a save or load, for an observer that may stop it.

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::sync::{AtomicBool, AtomicU64, Condvar, Mutex, lock};
use deepnvme_io::mem::sync::ignore_poison;

/// Shared between the worker and the observer.
#[derive(Debug, Default)]
pub struct Progress {
    bytes_done: AtomicU64,
    bytes_total: AtomicU64,
    is_stopped: AtomicBool,
    is_filled: Mutex<bool>,
    filled: Condvar,
}

impl Progress {
    /// Returns the bytes moved so far, and the expected total.
    #[must_use]
    pub fn bytes(&self) -> (u64, u64) {
        (self.bytes_done.load(Ordering::Relaxed), self.bytes_total.load(Ordering::Relaxed))
    }

    /// Stops the work soon, with [`Error::Interrupted`].
    pub fn stop(&self) {
        self.is_stopped.store(true, Ordering::Relaxed);
    }

    /// Returns whether a stop was requested.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Relaxed)
    }

    /// Waits up to `timeout`. Returns whether a save has copied all data from the caller's memory, which may then
    /// change.
    #[must_use]
    pub fn wait_filled(&self, timeout: Duration) -> bool {
        let is_filled = lock(&self.is_filled);
        let waited = self.filled.wait_timeout_while(is_filled, timeout, |is_filled| !*is_filled);
        *ignore_poison(waited).0
    }

    /// Marks the memory as no longer read. If a save fails before its last pieces, its caller does this.
    pub fn mark_filled(&self) {
        *lock(&self.is_filled) = true;
        self.filled.notify_all();
    }

    /// Adds to the expected total.
    pub fn expect(&self, bytes: u64) {
        self.bytes_total.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Adds to the bytes moved.
    pub fn advance(&self, bytes: u64) {
        self.bytes_done.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Fails if a stop was requested.
    ///
    /// # Errors
    /// [`Error::Interrupted`].
    pub fn check(&self) -> Result<()> {
        if self.is_stopped() { Err(Error::Interrupted) } else { Ok(()) }
    }
}
