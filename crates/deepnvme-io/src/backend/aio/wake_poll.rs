//! The poll of the waker's eventfd. Each `reap` puts it into the queue if it is not there. It does not count as an op.
#![allow(unsafe_code)]

use super::sys::{Context, ControlBlock, IoEvent};
use crate::backend::eventfd::ReceivedWakes;
use crate::error::Result;
use crate::op::Errno;

/// The `data` of the poll's events. Events of ops have a slot number there.
pub(super) const WAKE_DATA: u64 = u64::MAX;
/// Interval of checks for a wake while no poll is in the queue. The kernel cannot poll with AIO (before Linux 4.19,
/// some sandboxes), or its queue has no room.
const CHECK_INTERVAL_NS: libc::c_long = 1_000_000;

/// The poll, and the wakes that it has announced.
pub(super) struct WakePoll {
    pub(super) wakes: ReceivedWakes,
    /// Boxed to keep its address while the kernel has it: `io_cancel` identifies the block by its address.
    block: Box<ControlBlock>,
    armed: bool,
    /// Whether this kernel can poll with AIO.
    supported: bool,
}

impl WakePoll {
    pub(super) fn new() -> Result<Self> {
        let wakes = ReceivedWakes::new()?;
        let block = Box::new(ControlBlock::poll(wakes.event().raw_fd()).carrying(WAKE_DATA));
        Ok(Self { wakes, block, armed: false, supported: true })
    }

    /// Adds the poll to the queue if it is not there.
    pub(super) fn arm(&mut self, context: &Context) {
        if self.armed || self.wakes.is_woken() || !self.supported {
            return;
        }
        let mut block = [std::ptr::from_mut(&mut *self.block)];
        // SAFETY: the block is valid, and a poll touches no memory. The block is boxed, and the backend destroys the
        // queue before it drops this poll.
        match unsafe { context.submit(&mut block) } {
            Ok(taken) => self.armed = taken == 1,
            // No room now, or a signal. The next reap tries again.
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(_) => self.supported = false,
        }
    }

    /// Returns the maximum wait for events: without a poll, the wait must end to check for a wake. `None`: no limit.
    pub(super) fn wait_max(&self) -> Option<libc::timespec> {
        (!self.armed).then_some(libc::timespec { tv_sec: 0, tv_nsec: CHECK_INTERVAL_NS })
    }

    /// Records an event of the poll.
    pub(super) fn complete_poll(&mut self, event: &IoEvent) {
        self.armed = false;
        self.supported = event.result >= 0;
        self.check();
    }

    /// Checks for a wake while no poll is in the queue to announce it.
    pub(super) fn check(&mut self) {
        if !self.armed && self.wakes.event().is_pending() {
            self.wakes.set();
        }
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
