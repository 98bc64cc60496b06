//! The waker of the backends that wait in the kernel: an eventfd that their queue polls.
//!
//! `pending` keeps two things cheap: many wakes before the queue's thread looks cost one system call,
//! and the kernel never holds more than one event of it, so wakes cannot flood a completion queue.

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
    /// Makes one that is not readable yet.
    pub(super) fn new() -> Result<Arc<Self>> {
        let event =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|errno| Error::os("eventfd", errno))?;
        Ok(Arc::new(Self { event, pending: AtomicBool::new(false) }))
    }

    /// The descriptor to poll for reading.
    pub(super) fn raw_fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }

    /// Whether a wake is waiting for `drain`.
    pub(super) fn is_pending(&self) -> bool {
        self.pending.load(Ordering::Acquire)
    }

    /// Forgets the wakes so far. Called by the queue's thread before it looks at what it was woken for.
    ///
    /// The counter is read first: a wake that comes between the two steps still finds `pending` set and
    /// writes nothing, and the swap makes what it announced visible. The other order would lose an event
    /// while leaving `pending` set, and with it every later wake.
    pub(super) fn drain(&self) {
        let mut count = [0u8; 8];
        // An empty counter (EAGAIN) is what a stale event looks like; nothing is owed then.
        let _ = rustix::io::read(&self.event, &mut count);
        self.pending.swap(false, Ordering::AcqRel);
    }
}

impl Wake for WakeEvent {
    fn wake(&self) {
        if !self.pending.swap(true, Ordering::AcqRel) {
            // Cannot fail: at most one count is ever in the eventfd.
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
