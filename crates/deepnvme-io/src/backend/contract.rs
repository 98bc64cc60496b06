//! The contract of a backend: the trait that every way of moving bytes implements, and the values that it speaks in.

use std::sync::Arc;

use deepnvme_mem::Region;

use crate::config::SubmitMode;
use crate::error::Result;
use crate::op::{Completion, Op, Submit};

/// Which implementation moves the bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum BackendKind {
    /// `io_uring`.
    Uring,
    /// Linux native AIO.
    Aio,
    /// `preadv`/`pwritev` on threads.
    Threads,
    /// Something that a test made.
    Simulated,
}

impl BackendKind {
    /// The name that settings, stats and reports use.
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
    /// Ops in flight at once, at the most.
    pub queue_depth: u32,
    /// Whether `submit` collects ops for the next `reap` or hands each to the kernel at once.
    pub submit: SubmitMode,
    /// Which worker of the engine it serves, from 0.
    pub worker_index: u32,
}

/// Ends a `reap` of another thread's backend early. Cheap to clone; harmless after the backend is gone.
pub trait Wake: Send + Sync {
    /// Makes the current or the next blocking `reap` return, with or without completions.
    fn wake(&self);
}

/// One thread's queue of file operations.
///
/// An op accepted by `submit` comes back from `reap` exactly once; until then the backend owns it.
/// Dropping the backend waits for every op in flight (and leaks their memory if it cannot).
/// It is made, used and dropped on one thread.
pub trait Backend {
    /// Which implementation this is.
    fn kind(&self) -> BackendKind;

    /// Ops in flight at once, at the most.
    fn depth(&self) -> u32;

    /// Ops accepted and not yet reaped.
    fn in_flight(&self) -> u32;

    /// Takes the op, or hands it back when `depth` ops are in flight.
    fn submit(&mut self, op: Op) -> Submit;

    /// Gives all that `submit` has collected to the kernel, without waiting for anything.
    ///
    /// # Errors
    /// When the kernel refuses the queue itself (never for a single op: that is its completion's result).
    fn flush(&mut self) -> Result<()>;

    /// Flushes, then waits until at least `min` ops have completed (or a wake), and appends all that have.
    /// `min` 0 only looks. `min` above `in_flight` waits for a wake.
    ///
    /// # Errors
    /// When the kernel refuses the queue itself.
    fn reap(&mut self, min: u32, completions: &mut Vec<Completion>) -> Result<()>;

    /// A handle by which other threads end a blocking `reap`.
    fn waker(&self) -> Arc<dyn Wake>;

    /// Tells the backend that much I/O will use this memory, so that it can pin it once (`io_uring`'s
    /// registered buffers). True when it did. The region stays registered until `unregister` or drop.
    fn register(&mut self, _memory: &Region) -> bool {
        false
    }

    /// Forgets memory that `register` took, once no op in flight uses it.
    fn unregister(&mut self, _memory: &Region) {}
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

    fn register(&mut self, memory: &Region) -> bool {
        (**self).register(memory)
    }

    fn unregister(&mut self, memory: &Region) {
        (**self).unregister(memory);
    }
}
