//! The bounce buffers of a worker, and the bounced reads that wait to be copied out of them.

use std::collections::VecDeque;

use deepnvme_mem::{Pool, Region, Slot};

use super::in_flight::CompletedBlock;
use crate::error::{Error, Result};
use crate::op::Errno;

/// The bounce buffers that a worker may allocate.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BounceSetup {
    pub(crate) buffer_bytes: usize,
    pub(crate) buffers: usize,
    pub(crate) lock_pool: bool,
    /// Whether to register them with the backend.
    pub(crate) register: bool,
}

/// The bounce buffers of a worker.
pub(super) struct BouncePool {
    setup: BounceSetup,
    /// Created for the first block that needs it, since most workers never do.
    pool: Option<Pool>,
    /// Bounced reads in flight.
    pub(super) reads_in_flight: usize,
    /// Bounced reads whose bytes are in their buffer, in order of completion.
    pub(super) completed_reads: VecDeque<CompletedBlock>,
}

impl BouncePool {
    pub(super) fn new(setup: BounceSetup) -> Self {
        let completed_reads = VecDeque::with_capacity(setup.buffers);
        Self { setup, pool: None, reads_in_flight: 0, completed_reads }
    }

    pub(super) fn buffer_bytes(&self) -> usize {
        self.setup.buffer_bytes
    }

    /// Returns the memory of all buffers, if it is allocated.
    pub(super) fn arena(&self) -> Option<Region> {
        self.pool.as_ref().map(Pool::arena)
    }

    /// Returns whether another bounced read may start. A third of the buffers may be in flight, while the others are
    /// copied out. Devices often report completions in bursts: if all buffers are in flight, they complete together, and
    /// the device idles until the first is copied. The buffers in use should also fit in the CPU's caches.
    ///
    /// A GPU's copy engine keeps up with any disk, so reads to a GPU get two thirds.
    pub(super) fn may_start_read(&self, to_gpu: bool) -> bool {
        let third = self.setup.buffers.div_ceil(3);
        let reads_max = if to_gpu { (2 * third).min(self.setup.buffers) } else { third };
        self.reads_in_flight < reads_max
    }

    /// Takes a buffer, or returns `None` while all are in use. On first use, allocates the buffers on the NUMA node that
    /// `node` returns, and calls `created` with them and with whether to register them.
    pub(super) fn take(
        &mut self,
        node: impl FnOnce() -> Option<u32>,
        created: impl FnOnce(&Pool, bool),
    ) -> Result<Option<Slot>> {
        let pool = match &mut self.pool {
            Some(pool) => pool,
            none => {
                let BounceSetup { buffer_bytes, buffers, lock_pool, register } = self.setup;
                let allocated = match node() {
                    Some(node) => Pool::on_node(buffer_bytes, buffers, lock_pool, node),
                    None => Pool::new(buffer_bytes, buffers, lock_pool),
                };
                let pool = allocated.map_err(|error| {
                    let errno = Errno::from_io_error(&error).unwrap_or(Errno::NOMEM);
                    Error::os("allocate the bounce pool", errno)
                })?;
                created(&pool, register);
                none.insert(pool)
            }
        };
        Ok(pool.try_take())
    }
}
