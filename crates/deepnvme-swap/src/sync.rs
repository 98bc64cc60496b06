//! Locks, threads and clocks: the standard library's, or those of `loom` or the simulation.
//!
//! Every critical section leaves its state consistent, so poisoned locks are used as they are.

#[cfg(not(simulated))]
use std::cell::Cell;
use std::os::fd::OwnedFd;
#[cfg(not(simulated))]
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

#[cfg(simulated)]
use rustix::event::Timespec;
use rustix::event::{PollFd, PollFlags, poll};

use crate::deadlock::ThreadNumber;

#[cfg(simulated)]
pub(crate) use deepnvme_simulation_runtime::sync::{Condvar, Mutex, MutexGuard};
#[cfg(loom)]
pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};
#[cfg(not(any(loom, simulated)))]
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};

/// Types that the simulation replaces, and `loom` does not.
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

/// The calling thread's number.
#[cfg(not(simulated))]
pub(crate) fn current_thread() -> ThreadNumber {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    thread_local! {
        static NUMBER: Cell<Option<ThreadNumber>> = const { Cell::new(None) };
    }
    NUMBER.with(|number| {
        let mine = number.get().unwrap_or_else(|| NEXT.fetch_add(1, Ordering::Relaxed));
        number.set(Some(mine));
        mine
    })
}

/// The calling thread's number in the simulation, whose threads share one thread of the system.
#[cfg(simulated)]
pub(crate) fn current_thread() -> ThreadNumber {
    usize::from(outer::thread::current().id()) as ThreadNumber
}

/// Waits for a write to the eventfd. An interrupted wait ends early.
pub(crate) fn wait_for_wake(wake: &OwnedFd) {
    let mut wake = [PollFd::new(wake, PollFlags::IN)];
    #[cfg(not(simulated))]
    let _ = poll(&mut wake, None);
    #[cfg(simulated)]
    loop {
        outer::thread::yield_now();
        if poll(&mut wake, Some(&Timespec::default())).is_ok_and(|ready| ready > 0) {
            return;
        }
    }
}

/// Unwraps a guard, even of a poisoned lock.
pub(crate) fn recover<G>(locked: std::sync::LockResult<G>) -> G {
    deepnvme_io::mem::sync::ignore_poison(locked)
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    deepnvme_io::mem::sync::ignore_poison(mutex.lock())
}

/// Waits for a notification, for about `at_most` at the longest. A `loom` model has no clock, so there only a
/// notification ends the wait.
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
