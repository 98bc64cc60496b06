//! The synchronisation that the pool uses: the standard library's, or that of `loom` or of the simulation.

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
