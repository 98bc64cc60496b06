//! The poll of the waker's eventfd. It is always in the queue, and does not count as an op.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::sys::{Context, ControlBlock, Event};
use crate::backend::eventfd::WakeEvent;
use crate::error::Result;
use crate::op::Errno;

/// The `data` of the poll's events. Events of ops have a slot number there.
pub(super) const WAKE_DATA: u64 = u64::MAX;
/// Interval of checks if the kernel cannot poll with AIO (before 4.18, some sandboxes).
const CHECK_INTERVAL_NS: libc::c_long = 1_000_000;

/// The eventfd, its poll, and whether it has fired.
pub(super) struct Waker {
    event: Arc<WakeEvent>,
    /// Boxed to keep its address while the kernel has it: `io_cancel` identifies the block by its address.
    block: Box<ControlBlock>,
    armed: bool,
    /// Whether this kernel can poll with AIO.
    supported: bool,
    /// A wake arrived, and no blocking `reap` has returned for it yet.
    woken: bool,
}

impl Waker {
    pub(super) fn new() -> Result<Self> {
        let event = WakeEvent::new()?;
        let block = Box::new(ControlBlock::poll(event.raw_fd()).carrying(WAKE_DATA));
        Ok(Self { event, block, armed: false, supported: true, woken: false })
    }

    /// Returns the event that other threads wake with.
    pub(super) fn event(&self) -> &Arc<WakeEvent> {
        &self.event
    }

    /// Returns whether a blocking `reap` must return.
    pub(super) fn is_woken(&self) -> bool {
        self.woken
    }

    /// Clears the wakes so far, when a blocking `reap` returns for them.
    pub(super) fn clear(&mut self) {
        if self.woken {
            self.woken = false;
            self.event.drain();
        }
    }

    /// Adds the poll to the queue if it is not there.
    pub(super) fn arm(&mut self, context: &Context) {
        if self.armed || self.woken || !self.supported {
            return;
        }
        let mut block = [std::ptr::from_mut(&mut *self.block)];
        // SAFETY: a poll touches no memory. The block is boxed and lives until the queue is destroyed.
        match unsafe { context.submit(&mut block) } {
            Ok(taken) => self.armed = taken == 1,
            // The queue is full. The next reap tries again.
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(_) => self.supported = false,
        }
    }

    /// Returns the maximum wait for events. Without a poll, the wait must end to check for a wake.
    pub(super) fn wait_max(&self) -> Option<libc::timespec> {
        (!self.armed).then_some(libc::timespec { tv_sec: 0, tv_nsec: CHECK_INTERVAL_NS })
    }

    /// Records an event of the poll.
    pub(super) fn complete_poll(&mut self, event: &Event) {
        self.armed = false;
        self.supported = event.result >= 0;
        self.check();
    }

    /// Checks for a wake that no event could announce.
    pub(super) fn check(&mut self) {
        self.woken |= !self.armed && self.event.is_pending();
    }

    /// Simulates a kernel that cannot poll.
    #[cfg(test)]
    pub(super) fn disable_polling(&mut self) {
        self.supported = false;
    }

    /// Cancels the poll. Destroying the queue would do so later.
    pub(super) fn cancel_poll(&mut self, context: &Context) {
        if self.armed {
            let _ = context.cancel(&mut self.block);
        }
    }
}
