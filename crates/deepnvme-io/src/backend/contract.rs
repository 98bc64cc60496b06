//! The backend interface: the trait that every backend implements, and its values.

use std::sync::Arc;

use deepnvme_mem::RegistrableRange;

use crate::error::Result;
use crate::op::{Completion, Op, Submit, SubmitMode};

/// The implementation that moves the bytes. `GdsBackend` wraps one of these, so cuFile is not a kind.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum BackendKind {
    /// `io_uring`.
    Uring,
    /// Linux native AIO.
    Aio,
    /// `preadv`/`pwritev` on threads.
    Threads,
    /// Created by a test.
    Simulated,
}

impl BackendKind {
    /// Returns the name for settings, stats and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Uring => "io_uring",
            Self::Aio => "aio",
            Self::Threads => "threads",
            Self::Simulated => "simulated",
        }
    }
}

/// The settings of a backend.
#[derive(Clone, Debug)]
pub struct BackendSetup {
    /// Maximum ops in flight.
    pub queue_depth: u32,
    /// Whether `submit` collects ops for the next `flush` or `reap`, or submits each to the kernel immediately.
    pub submit: SubmitMode,
    /// The worker that it serves, from 0.
    pub worker_index: u32,
}

/// Ends a blocking `reap` of another thread's backend. Harmless after the backend is dropped.
pub trait Wake: Send + Sync {
    /// Makes the current or the next blocking `reap` return, with or without completions.
    fn wake(&self);
}

/// A queue of file operations, used by one thread at a time.
///
/// An op accepted by `submit` comes back from `reap` exactly once. Until then the backend owns it. Dropping the backend
/// waits for every op in flight, or leaks their memory if it cannot wait. A worker creates, uses and drops its backend
/// on one thread.
pub trait Backend {
    /// Returns the implementation's kind.
    fn kind(&self) -> BackendKind;

    /// Returns the maximum number of ops in flight.
    fn depth(&self) -> u32;

    /// Returns the number of accepted ops that are not yet reaped.
    fn in_flight(&self) -> u32;

    /// Accepts the op, or returns it if `depth` ops are in flight or the queue has no room.
    fn submit(&mut self, op: Op) -> Submit;

    /// Submits the collected ops, as many as the kernel accepts now, without waiting for completions.
    ///
    /// # Errors
    /// If the kernel refuses the queue itself. The failure of a single op is its completion's result.
    fn flush(&mut self) -> Result<()>;

    /// Flushes, then waits until at least `min` ops have completed or a wake arrives, and appends all completed ops.
    /// With `min` 0 it does not wait. With `min` above `in_flight` it waits for a wake.
    ///
    /// # Errors
    /// If the kernel refuses the queue itself.
    fn reap(&mut self, min: u32, completions: &mut Vec<Completion>) -> Result<()>;

    /// Returns a handle that ends a blocking `reap` from other threads.
    fn waker(&self) -> Arc<dyn Wake>;

    /// Announces memory that many ops will use, so that the backend can pin it once (`io_uring`'s registered buffers).
    /// Returns true if it did. The memory stays registered until `unregister` or drop.
    fn register(&mut self, _memory: &RegistrableRange) -> bool {
        false
    }

    /// Unregisters memory, once no op in flight uses it.
    fn unregister(&mut self, _memory: &RegistrableRange) {}
}

impl<B: Backend + ?Sized> Backend for Box<B> {
    fn kind(&self) -> BackendKind {
        (**self).kind()
    }

    fn depth(&self) -> u32 {
        (**self).depth()
    }

    fn in_flight(&self) -> u32 {
        (**self).in_flight()
    }

    fn submit(&mut self, op: Op) -> Submit {
        (**self).submit(op)
    }

    fn flush(&mut self) -> Result<()> {
        (**self).flush()
    }

    fn reap(&mut self, min: u32, completions: &mut Vec<Completion>) -> Result<()> {
        (**self).reap(min, completions)
    }

    fn waker(&self) -> Arc<dyn Wake> {
        (**self).waker()
    }

    fn register(&mut self, memory: &RegistrableRange) -> bool {
        (**self).register(memory)
    }

    fn unregister(&mut self, memory: &RegistrableRange) {
        (**self).unregister(memory);
    }
}
