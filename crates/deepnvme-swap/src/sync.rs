//! Locks that `loom` can replace. Every critical section leaves its state whole, so that a panic poisons nothing.

use std::time::Duration;

#[cfg(loom)]
pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};
#[cfg(not(loom))]
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Waits, for about that long at most. A model has no clock: there it is the one who changes something that wakes.
pub(crate) fn wait<'a, T>(changed: &Condvar, guard: MutexGuard<'a, T>, at_most: Duration) -> MutexGuard<'a, T> {
    #[cfg(loom)]
    {
        let _ = at_most;
        changed.wait(guard).unwrap_or_else(std::sync::PoisonError::into_inner)
    }
    #[cfg(not(loom))]
    {
        changed.wait_timeout(guard, at_most).unwrap_or_else(std::sync::PoisonError::into_inner).0
    }
}
