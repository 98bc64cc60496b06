//! The ways of moving bytes: one contract, and its three implementations on Linux.
//!
//! A backend is one thread's queue and nothing more: it does not split, retry or align; `worker` does.
//! `contract` says what each of them keeps; `uring` and `aio` share a slab of ops (`inflight`) and a waker (`eventfd`). `copies`
//! moves bytes between bounce slots and GPUs, which it has from `device`, and `gds` puts cuFile beside a backend. This folder is
//! the crate's only home of unsafe code.

use crate::error::{Error, Result};

pub mod aio;
pub(crate) mod cachestat;
pub(crate) mod call;
mod clone;
pub(crate) mod close;
mod contract;
pub(crate) mod copies;
pub(crate) mod device;
mod eventfd;
pub mod gds;
mod inflight;
pub mod inline;
pub mod threads;
pub mod uring;

pub use clone::clone_range;
pub use contract::{Backend, BackendKind, BackendSetup, Wake};

/// Opens a backend of the given kind, on the thread that will use it.
///
/// # Errors
/// What the kernel said to it; of the kinds that only tests make, `InvalidInput`.
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
