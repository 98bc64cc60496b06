//! Locks that ignore poison, of the standard library, of `loom` or of the simulation.
//!
//! A panic does not poison these locks for others: use them only where every critical section leaves its state
//! consistent.

use std::sync::{LockResult, PoisonError};

#[cfg(loom)]
pub(crate) use loom::sync::{Arc, Condvar, Mutex, MutexGuard};
#[cfg(not(any(loom, simulated)))]
pub(crate) use std::sync::{Arc, Condvar, Mutex, MutexGuard};
#[cfg(not(simulated))]
pub(crate) use std::time::Instant;
#[cfg(simulated)]
pub(crate) use {
    deepnvme_simulation_runtime::sync::{Condvar, Mutex, MutexGuard},
    deepnvme_simulation_runtime::time::Instant,
    std::sync::Arc,
};

/// Locks a mutex, even if a holder panicked.
///
/// The mutex is `std::sync::Mutex`, or its counterpart in a build for `loom` or the simulation.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    ignore_poison(mutex.lock())
}

/// Returns the guard or value of any lock, even if a holder panicked.
///
/// ```
/// use std::sync::RwLock;
/// assert_eq!(*deepnvme_mem::sync::ignore_poison(RwLock::new(7).read()), 7);
/// ```
pub fn ignore_poison<T>(result: LockResult<T>) -> T {
    result.unwrap_or_else(PoisonError::into_inner)
}
