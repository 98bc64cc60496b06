//! Locks, atomics, threads and clocks: from the standard library, or simulated.

use deepnvme_io::mem::sync::ignore_poison;

#[cfg(simulated)]
pub(crate) use deepnvme_simulation_runtime::{
    sync::{
        Condvar, Mutex, MutexGuard, OnceLock,
        atomic::{AtomicBool, AtomicU64, AtomicUsize},
    },
    thread,
    time::Instant,
};
#[cfg(not(simulated))]
pub(crate) use std::{
    sync::{
        Condvar, Mutex, MutexGuard, OnceLock,
        atomic::{AtomicBool, AtomicU64, AtomicUsize},
    },
    thread,
    time::Instant,
};

/// Locks a mutex, even if a holder panicked: every critical section leaves its state consistent.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    ignore_poison(mutex.lock())
}
