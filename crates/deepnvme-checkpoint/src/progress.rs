//! How far a save or a load is, for somebody who looks on, and may have it stopped.

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::sync::{AtomicBool, AtomicU64, Condvar, Mutex};
use deepnvme_io::mem::sync::ignore_poison;

/// Shared between who works and who looks on.
#[derive(Debug, Default)]
pub struct Progress {
    bytes_done: AtomicU64,
    bytes_total: AtomicU64,
    is_stopped: AtomicBool,
    is_filled: Mutex<bool>,
    filled: Condvar,
}

impl Progress {
    /// Bytes moved so far, and in all.
    #[must_use]
    pub fn bytes(&self) -> (u64, u64) {
        (self.bytes_done.load(Ordering::Relaxed), self.bytes_total.load(Ordering::Relaxed))
    }

    /// Has the work end soon, with [`Error::Interrupted`].
    pub fn stop(&self) {
        self.is_stopped.store(true, Ordering::Relaxed);
    }

    /// Whether it should.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Relaxed)
    }

    /// Waits at most that long; whether a save has taken all bytes out of the caller's memory, which may change from then on.
    #[must_use]
    pub fn wait_filled(&self, timeout: Duration) -> bool {
        let is_filled = ignore_poison(self.is_filled.lock());
        let waited = self.filled.wait_timeout_while(is_filled, timeout, |is_filled| !*is_filled);
        *ignore_poison(waited).0
    }

    /// Also of a save that has failed: nobody looks at the memory any more.
    pub fn mark_filled(&self) {
        *ignore_poison(self.is_filled.lock()) = true;
        self.filled.notify_all();
    }

    /// So many bytes more will be moved.
    pub fn expect(&self, bytes: u64) {
        self.bytes_total.fetch_add(bytes, Ordering::Relaxed);
    }

    /// So many have been.
    pub fn advance(&self, bytes: u64) {
        self.bytes_done.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Ends the work of who was asked to stop.
    ///
    /// # Errors
    /// [`Error::Interrupted`].
    pub fn check(&self) -> Result<()> {
        if self.is_stopped() { Err(Error::Interrupted) } else { Ok(()) }
    }
}
