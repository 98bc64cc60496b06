//! Locks, threads and clocks: the standard library's, or those of the simulation.

#[cfg(simulated)]
pub(crate) use deepnvme_simulation_runtime::{
    sync::{Condvar, Mutex, MutexGuard, atomic::AtomicUsize},
    thread::{self, JoinHandle},
    time::Instant,
};
#[cfg(not(simulated))]
pub(crate) use std::{
    sync::{Condvar, Mutex, MutexGuard, atomic::AtomicUsize},
    thread::{self, JoinHandle},
    time::Instant,
};
