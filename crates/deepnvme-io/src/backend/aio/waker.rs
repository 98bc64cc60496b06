//! The poll of the waker's eventfd that is always in the queue, and in no one's count of ops.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::sys::{Context, ControlBlock, Event};
use crate::backend::eventfd::WakeEvent;
use crate::error::Result;
use crate::op::Errno;

/// What events of the poll carry where those of ops carry their slot.
pub(super) const WAKE_DATA: u64 = u64::MAX;
/// How long to wait at a time where the kernel cannot poll with AIO (before 4.18, some sandboxes).
const LOOK_EVERY_NS: libc::c_long = 1_000_000;

/// The eventfd, its poll, and whether it has fired.
pub(super) struct Waker {
    event: Arc<WakeEvent>,
    /// Stays at one address while the kernel has it, since `io_cancel` knows it by that.
    block: Box<ControlBlock>,
    armed: bool,
    /// Whether this kernel can poll with AIO.
    supported: bool,
    /// A wake has been seen and no blocking `reap` has ended by it yet.
    woken: bool,
}

impl Waker {
    pub(super) fn new() -> Result<Self> {
        let event = WakeEvent::new()?;
        let block = Box::new(ControlBlock::poll(event.raw_fd()).carrying(WAKE_DATA));
        Ok(Self { event, block, armed: false, supported: true, woken: false })
    }

    /// What other threads wake with.
    pub(super) fn event(&self) -> &Arc<WakeEvent> {
        &self.event
    }

    /// Whether a blocking `reap` is to end.
    pub(super) fn is_woken(&self) -> bool {
        self.woken
    }

    /// A blocking `reap` ends by the wakes so far.
    pub(super) fn clear(&mut self) {
        if self.woken {
            self.woken = false;
            self.event.drain();
        }
    }

    /// Puts the poll into the queue if it is not there.
    pub(super) fn arm(&mut self, context: &Context) {
        if self.armed || self.woken || !self.supported {
            return;
        }
        let mut block = [std::ptr::from_mut(&mut *self.block)];
        // SAFETY: a poll touches no memory; the block is boxed and lives until the queue is destroyed.
        match unsafe { context.submit(&mut block) } {
            Ok(taken) => self.armed = taken == 1,
            // No room just now; the next reap tries again.
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(_) => self.supported = false,
        }
    }

    /// The longest that a wait for events may take; without a poll it has to end to look for a wake.
    pub(super) fn patience(&self) -> Option<libc::timespec> {
        (!self.armed).then_some(libc::timespec { tv_sec: 0, tv_nsec: LOOK_EVERY_NS })
    }

    /// Takes note of an event of the poll.
    pub(super) fn note(&mut self, event: &Event) {
        self.armed = false;
        self.supported = event.result >= 0;
        self.look();
    }

    /// Looks for a wake that no event could announce.
    pub(super) fn look(&mut self) {
        self.woken |= !self.armed && self.event.is_pending();
    }

    /// As on a kernel that cannot poll.
    #[cfg(test)]
    pub(super) fn give_up_polling(&mut self) {
        self.supported = false;
    }

    /// Withdraws the poll. Destroying the queue would do so too, only later.
    pub(super) fn withdraw(&mut self, context: &Context) {
        if self.armed {
            let _ = context.cancel(&mut self.block);
        }
    }
}
