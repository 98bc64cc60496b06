//! The waker of backends that wait in the kernel: an eventfd that their queue polls.
//!
//! `pending` bounds two costs. Many wakes before the queue's thread runs cost one system call. The kernel never has
//! more than one event of a waker, so wakes cannot flood a completion queue.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{EventfdFlags, eventfd};

use super::contract::Wake;
use crate::error::{Error, Result};

/// An eventfd that is readable from the first `wake` until the next `drain`.
#[derive(Debug)]
pub(super) struct WakeEvent {
    event: OwnedFd,
    pending: AtomicBool,
}

impl WakeEvent {
    /// Creates an event that is not readable yet.
    pub(super) fn new() -> Result<Arc<Self>> {
        let event =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|errno| Error::os("eventfd", errno))?;
        Ok(Arc::new(Self { event, pending: AtomicBool::new(false) }))
    }

    /// Returns the descriptor to poll for reading.
    pub(super) fn raw_fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }

    /// Returns whether a wake waits for `drain`.
    pub(super) fn is_pending(&self) -> bool {
        self.pending.load(Ordering::Acquire)
    }

    /// Clears the wakes so far. The queue's thread calls this before it looks for work.
    ///
    /// The counter is read first: a wake between the two steps still finds `pending` set and writes nothing, and the
    /// swap makes its work visible. The other order would lose an event while `pending` stays set, and with it every
    /// later wake.
    pub(super) fn drain(&self) {
        let mut count = [0u8; 8];
        // A stale event leaves an empty counter (EAGAIN), and needs no action.
        let _ = rustix::io::read(&self.event, &mut count);
        self.pending.swap(false, Ordering::AcqRel);
    }
}

/// The wakes that a backend has received.
pub(super) struct ReceivedWakes {
    event: Arc<WakeEvent>,
    /// A wake arrived, and no blocking `reap` has returned for it yet.
    is_woken: bool,
}

impl ReceivedWakes {
    pub(super) fn new() -> Result<Self> {
        Ok(Self { event: WakeEvent::new()?, is_woken: false })
    }

    /// Returns the event that other threads wake with.
    pub(super) fn event(&self) -> &Arc<WakeEvent> {
        &self.event
    }

    /// Returns whether a blocking `reap` must return.
    pub(super) fn is_woken(&self) -> bool {
        self.is_woken
    }

    /// Records a wake.
    pub(super) fn set(&mut self) {
        self.is_woken = true;
    }

    /// Clears the wakes so far, when a blocking `reap` returns for them.
    pub(super) fn clear(&mut self) {
        if self.is_woken {
            self.is_woken = false;
            self.event.drain();
        }
    }
}

impl Wake for WakeEvent {
    fn wake(&self) {
        if !self.pending.swap(true, Ordering::AcqRel) {
            // Cannot fail: the eventfd contains at most one count.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    fn is_readable(event: &WakeEvent) -> bool {
        let mut fds = [PollFd::new(&event.event, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
    }

    #[test]
    fn is_readable_from_a_wake_until_drained() {
        let event = WakeEvent::new().unwrap();
        assert!(!is_readable(&event) && !event.is_pending());
        event.wake();
        event.wake();
        assert!(is_readable(&event) && event.is_pending());
        event.drain();
        assert!(!is_readable(&event) && !event.is_pending());
        event.drain();
        event.wake();
        assert!(is_readable(&event), "a stale drain must not swallow the next wake");
    }

    #[test]
    fn no_wake_is_lost_between_threads() {
        const WAKES: u64 = 20_000;
        let event = WakeEvent::new().unwrap();
        let announced = std::sync::atomic::AtomicU64::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 1..=WAKES {
                    announced.store(number, Ordering::Relaxed);
                    event.wake();
                }
            });
            let mut seen = 0;
            while seen < WAKES {
                let mut fds = [PollFd::new(&event.event, PollFlags::IN)];
                let ready = poll(&mut fds, Some(&Timespec { tv_sec: 10, tv_nsec: 0 })).unwrap();
                assert_eq!(ready, 1, "a wake was lost after {seen} of {WAKES}");
                event.drain();
                seen = announced.load(Ordering::Relaxed);
            }
        });
    }
}
