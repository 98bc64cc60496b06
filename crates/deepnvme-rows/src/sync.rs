//! Locks and clocks: the standard library's, or those of the simulation.

#[cfg(simulated)]
pub(crate) use deepnvme_simulation_runtime::{
    sync::{Condvar, Mutex, MutexGuard},
    thread,
    time::Instant,
};
#[cfg(not(simulated))]
pub(crate) use std::{
    sync::{Condvar, Mutex, MutexGuard},
    thread,
    time::Instant,
};

/// Locks. A panic elsewhere leaves no value half changed here.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
