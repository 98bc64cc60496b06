//! The poll of the waker's eventfd. Each call of `enter` puts it into the ring if it is not there. It does not count as
//! an op.
#![allow(unsafe_code)]

use io_uring::{cqueue, opcode, types};

use super::ring::Ring;
use crate::backend::eventfd::ReceivedWakes;
use crate::error::{Error, Result};
use crate::op::Errno;

/// The `user_data` of the poll's completions. Those of ops have a slot number there.
pub(super) const WAKE_DATA: u64 = u64::MAX;

/// The poll, and the wakes that it has announced.
pub(super) struct WakePoll {
    pub(super) wakes: ReceivedWakes,
    armed: bool,
    /// One poll for many wakes. Off on kernels before 5.13.
    multishot: bool,
}

impl WakePoll {
    pub(super) fn new() -> Result<Self> {
        Ok(Self { wakes: ReceivedWakes::new()?, armed: false, multishot: true })
    }

    /// Adds the poll to the ring if it is not there.
    pub(super) fn arm(&mut self, ring: &mut Ring) {
        if self.armed {
            return;
        }
        let poll = opcode::PollAdd::new(types::Fd(self.wakes.event().raw_fd()), libc::POLLIN as u32)
            .multi(self.multishot)
            .build()
            .user_data(WAKE_DATA);
        // SAFETY: a poll touches no memory of ours. `wakes` keeps the eventfd open until the kernel has accepted the
        // poll, and then the kernel's own reference does.
        self.armed = unsafe { ring.push(&poll) };
    }

    /// Records a completion of the poll.
    pub(super) fn complete_poll(&mut self, entry: &cqueue::Entry) -> Result<()> {
        if !cqueue::more(entry.flags()) {
            self.armed = false;
        }
        if entry.result() >= 0 {
            self.wakes.set();
        } else if self.multishot {
            self.multishot = false;
        } else {
            let errno = Errno::from_raw_os_error(-entry.result());
            return Err(Error::os("io_uring poll", errno));
        }
        Ok(())
    }
}
