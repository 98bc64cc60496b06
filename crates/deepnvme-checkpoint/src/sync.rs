//! Locks, atomics, threads and clocks: from the standard library, or simulated.

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
