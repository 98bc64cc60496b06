//! Locks that `loom` can replace. Every critical section leaves its state whole, so that a panic poisons nothing.

use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

#[cfg(simulated)]
pub(crate) use deepnvme_simulation_runtime::sync::{Condvar, Mutex, MutexGuard};
#[cfg(loom)]
pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};
#[cfg(not(any(loom, simulated)))]
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};

/// What no model of `loom`'s has, and the simulation does.
#[cfg(not(simulated))]
pub(crate) mod outer {
    pub(crate) use std::sync::{Mutex, MutexGuard};
    pub(crate) use std::thread;
    pub(crate) use std::time::Instant;
}
#[cfg(simulated)]
pub(crate) mod outer {
    pub(crate) use deepnvme_simulation_runtime::sync::{Mutex, MutexGuard};
    pub(crate) use deepnvme_simulation_runtime::thread;
    pub(crate) use deepnvme_simulation_runtime::time::Instant;
}

/// Waits until somebody has written to the eventfd, that long at most. A wait that is interrupted ends early.
pub(crate) fn wait_for_wake(wake: &OwnedFd, at_most: Option<&Timespec>) {
    let mut wake = [PollFd::new(wake, PollFlags::IN)];
    #[cfg(not(simulated))]
    let _ = poll(&mut wake, at_most);
    #[cfg(simulated)]
    for _ in 0..at_most.map_or(u32::MAX, |_| LOOKS) {
        outer::thread::yield_now();
        if poll(&mut wake, Some(&Timespec::default())).is_ok_and(|ready| ready > 0) {
            return;
        }
    }
}

/// Looks at the eventfd, for a wait that has a limit.
#[cfg(simulated)]
const LOOKS: u32 = 8;

/// A guard, also of a lock under which somebody panicked.
pub(crate) fn recover<G>(locked: std::sync::LockResult<G>) -> G {
    deepnvme_io::mem::sync::ignore_poison(locked)
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    deepnvme_io::mem::sync::ignore_poison(mutex.lock())
}

/// Waits, for about that long at most. A model has no clock: there it is the one who changes something that wakes.
pub(crate) fn wait<'a, T>(changed: &Condvar, guard: MutexGuard<'a, T>, at_most: Duration) -> MutexGuard<'a, T> {
    #[cfg(loom)]
    {
        let _ = at_most;
        deepnvme_io::mem::sync::ignore_poison(changed.wait(guard))
    }
    #[cfg(not(loom))]
    {
        deepnvme_io::mem::sync::ignore_poison(changed.wait_timeout(guard, at_most)).0
    }
}
