//! The bounce buffers of a worker, and the bounced reads that wait to be copied out of them.

use std::collections::VecDeque;

use deepnvme_mem::{Pool, RegistrableRange, Slot};

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

/// Bytes of the part of a buffer that a small block gets. Small blocks need little memory each, and a deep queue.
const SMALL_BUFFER_BYTES: usize = 32 << 10;
/// The smallest buffer that is divided.
const DIVIDED_BYTES_MIN: usize = 4 * SMALL_BUFFER_BYTES;

/// The bounce buffers of a worker.
pub(super) struct BouncePool {
    setup: BounceSetup,
    /// Created for the first block that needs one, since most workers have no such block.
    buffers: Option<Buffers>,
    /// Bytes of the buffers of bounced reads in flight.
    read_bytes_in_flight: usize,
    /// Bounced reads whose bytes are in their buffer, in order of completion.
    pub(super) completed_reads: VecDeque<CompletedBlock>,
}

/// Whole buffers, and some that are divided for small blocks.
struct Buffers {
    whole: Pool,
    /// In the order in which they were divided.
    divided: Vec<Pool>,
}

impl BouncePool {
    pub(super) fn new(setup: BounceSetup) -> Self {
        let completed_reads = VecDeque::with_capacity(setup.buffers);
        Self { setup, buffers: None, read_bytes_in_flight: 0, completed_reads }
    }

    pub(super) fn buffer_bytes(&self) -> usize {
        self.setup.buffer_bytes
    }

    /// Returns the addresses of all buffers, if they are allocated.
    pub(super) fn arena(&self) -> Option<RegistrableRange> {
        self.buffers.as_ref().map(|buffers| buffers.whole.arena())
    }

    /// Returns whether another bounced read may start. A third of the buffers may be in flight, while the others are
    /// copied out. Devices often report completions in bursts: if all buffers are in flight, they complete together,
    /// and the device idles until the first is copied. The buffers in use should also fit in the CPU's caches.
    ///
    /// A GPU's copy engine keeps up with any disk, so reads to a GPU get two thirds.
    pub(super) fn may_start_read(&self, to_gpu: bool) -> bool {
        let third = self.setup.buffers.div_ceil(3);
        let reads_max = if to_gpu { (2 * third).min(self.setup.buffers) } else { third };
        self.read_bytes_in_flight < reads_max * self.setup.buffer_bytes
    }

    /// Counts a bounced read that starts.
    pub(super) fn read_started(&mut self, buffer: &Slot) {
        self.read_bytes_in_flight += buffer.len();
    }

    /// Counts a bounced read that has ended.
    pub(super) fn read_ended(&mut self, buffer: &Slot) {
        self.read_bytes_in_flight -= buffer.len();
    }

    /// Takes a buffer for a block of this many bytes, or returns `None` while all are in use. On first use, allocates
    /// the buffers on the NUMA node that `node` returns, and calls `created` with them and with whether to register
    /// them.
    pub(super) fn take(
        &mut self,
        block_bytes: u64,
        node: impl FnOnce() -> Option<u32>,
        created: impl FnOnce(&Pool, bool),
    ) -> Result<Option<Slot>> {
        let buffers = match &mut self.buffers {
            Some(buffers) => buffers,
            none => {
                let BounceSetup { buffer_bytes, buffers, lock_pool, register } = self.setup;
                let allocated = match node() {
                    Some(node) => Pool::on_node(buffer_bytes, buffers, lock_pool, node),
                    None => Pool::new(buffer_bytes, buffers, lock_pool),
                };
                let whole = allocated.map_err(|error| {
                    let errno = Errno::from_io_error(&error).unwrap_or(Errno::NOMEM);
                    Error::os("allocate the bounce pool", errno)
                })?;
                created(&whole, register);
                none.insert(Buffers { whole, divided: Vec::new() })
            }
        };
        let is_small = block_bytes <= SMALL_BUFFER_BYTES as u64 && self.setup.buffer_bytes >= DIVIDED_BYTES_MIN;
        Ok(if is_small { buffers.take_small() } else { buffers.take_whole() })
    }
}

impl Buffers {
    /// Takes a whole buffer. Divided ones that nobody uses become whole again.
    fn take_whole(&mut self) -> Option<Slot> {
        self.whole.try_take().or_else(|| {
            self.divided.retain(|parts| parts.free_slots() < parts.slots());
            self.whole.try_take()
        })
    }

    /// Takes a part of a buffer. The first divided buffers are used first, so that the last ones become free.
    fn take_small(&mut self) -> Option<Slot> {
        if let Some(part) = self.divided.iter().find_map(Pool::try_take) {
            return Some(part);
        }
        let parts = self.whole.divide(self.whole.try_take()?, SMALL_BUFFER_BYTES);
        let part = parts.try_take();
        self.divided.push(parts);
        part
    }
}

#[cfg(all(test, not(any(loom, simulated))))]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    const BUFFER_BYTES: usize = 1 << 19;
    const PARTS: usize = BUFFER_BYTES / SMALL_BUFFER_BYTES;

    fn pool(buffer_bytes: usize, buffers: usize) -> BouncePool {
        BouncePool::new(BounceSetup { buffer_bytes, buffers, lock_pool: false, register: false })
    }

    fn take(pool: &mut BouncePool, block_bytes: u64) -> Option<Slot> {
        pool.take(block_bytes, || None, |_, _| ()).unwrap()
    }

    #[test]
    fn small_blocks_share_a_buffer_and_large_ones_get_it_back() {
        let mut pool = pool(BUFFER_BYTES, 2);
        let mut small: Vec<Slot> = (0..2 * PARTS).map(|_| take(&mut pool, 4096).unwrap()).collect();
        assert!(take(&mut pool, 1).is_none() && take(&mut pool, 1 << 19).is_none(), "all are in use");
        assert!(small.iter().all(|part| part.len() == SMALL_BUFFER_BYTES));
        let mut starts: Vec<_> = small.iter().map(|part| part.region().addr()).collect();
        starts.sort_unstable();
        starts.dedup();
        assert_eq!(starts.len(), 2 * PARTS, "each has memory of its own");
        // The second buffer becomes whole once its last part is back.
        small.truncate(PARTS + 1);
        assert!(take(&mut pool, 1 << 19).is_none());
        small.truncate(PARTS);
        let whole = take(&mut pool, 1 << 19).unwrap();
        assert_eq!(whole.len(), BUFFER_BYTES);
        assert!(take(&mut pool, 4096).is_none());
        drop(small);
        assert_eq!(take(&mut pool, SMALL_BUFFER_BYTES as u64).unwrap().len(), SMALL_BUFFER_BYTES);
    }

    #[test]
    fn small_buffers_are_not_divided() {
        let mut pool = pool(DIVIDED_BYTES_MIN / 2, 1);
        assert_eq!(take(&mut pool, 1).unwrap().len(), DIVIDED_BYTES_MIN / 2);
    }

    #[test]
    fn reads_in_flight_are_bounded_by_their_bytes() {
        let mut pool = pool(BUFFER_BYTES, 6);
        let mut reads = Vec::new();
        while pool.may_start_read(false) {
            let buffer = take(&mut pool, 4096).unwrap();
            pool.read_started(&buffer);
            reads.push(buffer);
        }
        assert_eq!(reads.len(), 2 * PARTS, "a third of six buffers");
        assert!(pool.may_start_read(true));
        pool.read_ended(&reads[0]);
        assert!(pool.may_start_read(false));
        let whole = take(&mut pool, 1 << 19).unwrap();
        pool.read_started(&whole);
        assert!(!pool.may_start_read(false));
    }
}
