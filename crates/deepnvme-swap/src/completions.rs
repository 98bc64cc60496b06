//! The transfers that have completed, and the wake-up of the swapper's thread.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};

use deepnvme_io::Error as IoError;
use rustix::event::{EventfdFlags, eventfd};

use crate::error::Result;
use crate::slot_allocator::ItemId;
use crate::sync::outer::Mutex;
use crate::sync::{recover, wait_for_wake};

/// Filled by the engine's threads. An item has one transfer at a time, so the item's id identifies the transfer.
#[derive(Debug)]
pub(crate) struct Completions {
    items: Mutex<Vec<ItemId>>,
    wake: OwnedFd,
    /// Whether a wake-up waits for the thread. Many of them cost one system call.
    is_pending: AtomicBool,
}

impl Completions {
    pub(crate) fn new() -> Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let wake = wake.map_err(|errno| IoError::os("make an eventfd", errno))?;
        Ok(Self { items: Mutex::default(), wake, is_pending: AtomicBool::new(false) })
    }

    /// Records that the transfer of an item has completed, and wakes the thread.
    pub(crate) fn push(&self, id: ItemId) {
        recover(self.items.lock()).push(id);
        self.wake();
    }

    /// The items whose transfers have completed since the last call.
    pub(crate) fn take(&self) -> Vec<ItemId> {
        std::mem::take(&mut *recover(self.items.lock()))
    }

    /// Wakes the thread.
    pub(crate) fn wake(&self) {
        if !self.is_pending.swap(true, Ordering::AcqRel) {
            // Cannot fail: the counter is at most one.
            let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        }
    }

    /// Waits for a wake-up.
    pub(crate) fn wait(&self) {
        wait_for_wake(&self.wake);
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.wake, &mut count);
        // After the read: a wake-up between the two finds one pending, and its work is found now.
        self.is_pending.swap(false, Ordering::AcqRel);
    }
}
