//! Backends: one contract, and its implementations on Linux.
//!
//! A backend is the queue of one thread. It does not split, retry or align; `worker` does. `contract` is the interface.
//! Workers use `uring`, `aio` or `threads`. `inline` serves callers that run small requests themselves. `uring` and
//! `aio` share a slab of ops (`op_slots`) and a waker (`eventfd`). `threads` and `inline` perform an op with one system
//! call (`call`). `gds` adds cuFile to a backend. `cachestat`, `clone` and `close` are single system calls.

use crate::error::{Error, Result};

pub mod aio;
#[cfg(not(simulated))]
pub(crate) mod cachestat;
pub(crate) mod call;
mod clone;
pub(crate) mod close;
mod contract;
mod eventfd;
pub mod gds;
pub mod inline;
mod op_slots;
pub mod threads;
pub mod uring;

pub use clone::clone_range;
pub use contract::{Backend, BackendKind, BackendSetup, Wake};

/// Opens a backend of the given kind, on the thread that will use it.
///
/// # Errors
/// The error of the backend's `open`. `InvalidInput` for kinds that only tests create.
pub fn open(kind: BackendKind, setup: &BackendSetup) -> Result<Box<dyn Backend>> {
    Ok(match kind {
        BackendKind::Uring => Box::new(uring::UringBackend::open(setup)?),
        BackendKind::Aio => Box::new(aio::AioBackend::open(setup)?),
        BackendKind::Threads => Box::new(threads::ThreadsBackend::open(setup)?),
        BackendKind::Simulated => {
            return Err(Error::invalid("a simulated backend is made by a test, not by its name"));
        }
    })
}
