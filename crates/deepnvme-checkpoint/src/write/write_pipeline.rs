//! The write pipeline of a save: threads assemble pieces while the engine writes earlier ones.
//!
//! [`POOL_BYTES_MAX`] bounds the buffers of a save without a [`Staging`]. It is small on purpose: the device reads a
//! slot that is still in the CPU cache without another trip over the memory bus.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use deepnvme_io::mem::{Pool, Region, Slot};
use deepnvme_io::{
    Durability, Engine, Error as IoError, GpuAccess, HostRegistration, TensorFile, Transfer, WriteMode, WriteOptions,
};

use super::PIECE_BYTES;
use super::file_layout::FileLayout;
use crate::error::Result;
use crate::progress::Progress;
use crate::sync::{Mutex, OnceLock, lock};
use crate::work_queue::{self, THREADS_MAX};

/// Writes in flight per thread. Virtual devices report completions in batches. Meanwhile the next batch is assembled,
/// so the device does not idle.
const IN_FLIGHT: usize = 6;
/// Slots per thread, within [`POOL_BYTES_MAX`].
const SLOTS_PER_THREAD: usize = 2 * IN_FLIGHT;
/// Maximum memory of a save without a [`Staging`].
// With direct I/O, `thread_count_with_engine` uses half of the threads.
pub const POOL_BYTES_MAX: u64 = (THREADS_MAX / 2 * SLOTS_PER_THREAD) as u64 * PIECE_BYTES;
const SLOTS_MAX: usize = (POOL_BYTES_MAX / PIECE_BYTES) as usize;
/// How often a thread that waits for a slot polls.
const SLOT_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Reusable memory into which a save copies tensors. A copied tensor may change while the save goes on.
#[derive(Debug, Clone)]
pub struct Staging {
    pool: Arc<Pool>,
    /// The registration with the GPU driver, created by the first save that needs it because it is slow.
    registration: Arc<OnceLock<Option<HostRegistration>>>,
}

impl Staging {
    /// Allocates `bytes` bytes, but at least two slots per thread of a save with direct I/O. The memory is pinned if
    /// `RLIMIT_MEMLOCK` allows.
    ///
    /// # Errors
    /// `Io` if the memory cannot be allocated.
    pub fn new(bytes: u64) -> Result<Self> {
        let slots = (bytes.div_ceil(PIECE_BYTES) as usize).max(work_queue::thread_count_with_engine(usize::MAX) * 2);
        Ok(Self { pool: pool(slots)?, registration: Arc::default() })
    }

    /// Returns the size of the memory.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.pool.bound_bytes() as u64
    }
}

fn pool(slots: usize) -> Result<Arc<Pool>> {
    let pool = Pool::new(PIECE_BYTES as usize, slots, true);
    let pool = pool.map_err(|error| IoError::from_io("allocate the buffers of a save", &error))?;
    Ok(Arc::new(pool))
}

/// The file that a pipeline writes, and the engine that writes it.
pub(super) struct Destination {
    pub(super) engine: Arc<Engine>,
    pub(super) file: Arc<TensorFile>,
    /// Offset in the layout of the file's first byte.
    pub(super) base: u64,
}

/// Writes pieces of a layout into a file.
pub(super) struct WritePipeline {
    destination: Destination,
    pool: Arc<Pool>,
    /// The registration of the pool with the GPU driver.
    registration: Arc<OnceLock<Option<HostRegistration>>>,
    threads: usize,
    progress: Arc<Progress>,
    state: Mutex<PipelineState>,
    in_flight_max: usize,
}

/// The pieces in the pipeline, oldest first.
#[derive(Default)]
struct PipelineState {
    /// Writes that the engine has accepted, until a thread waits for them.
    started: VecDeque<Transfer<Region>>,
    /// Number of writes started but not completed.
    in_flight: usize,
    /// Assembled pieces with their offsets in the file.
    ready: VecDeque<(u64, Region)>,
}

impl WritePipeline {
    pub(super) fn new(
        destination: Destination,
        threads: usize,
        staging: Option<&Staging>,
        progress: Arc<Progress>,
    ) -> Result<Self> {
        let (pool, registration) = match staging {
            Some(staging) => (Arc::clone(&staging.pool), Arc::clone(&staging.registration)),
            None => (pool((threads * SLOTS_PER_THREAD).min(SLOTS_MAX))?, Arc::default()),
        };
        let slots = (pool.bound_bytes() as u64 / PIECE_BYTES) as usize;
        let in_flight_max = (slots / 2).clamp(1, threads * IN_FLIGHT);
        Ok(Self { destination, pool, registration, threads, progress, state: Mutex::default(), in_flight_max })
    }

    /// Registers the pool with a GPU's driver. If that fails, the driver copies through its own buffer, which is
    /// slower.
    pub(super) fn register_pool(&self, access: &GpuAccess, index: u32) {
        self.registration.get_or_init(|| access.register_host(index, &self.pool.arena()).ok());
    }

    pub(super) fn file(&self) -> &Arc<TensorFile> {
        &self.destination.file
    }

    pub(super) fn engine(&self) -> &Engine {
        &self.destination.engine
    }

    pub(super) fn progress(&self) -> &Progress {
        &self.progress
    }

    /// Assembles the pieces and starts to write them. The layout's memory has been read when it returns.
    pub(super) fn write(&self, layout: &FileLayout, pieces: &[Range<u64>]) -> Result<()> {
        let threads = self.threads.min(pieces.len()).max(1);
        work_queue::for_each(
            threads,
            pieces,
            || (),
            |(), piece| {
                let mut slot = self.take_slot()?;
                layout.fill(piece, &mut slot)?;
                let source = slot.region().slice(0..(piece.end - piece.start) as usize);
                let mut state = lock(&self.state);
                state.ready.push_back((piece.start - self.destination.base, source));
                self.start(&mut state, self.in_flight_max)
            },
        )?;
        // No thread will assemble more and start the rest, so start all of it now.
        self.start(&mut lock(&self.state), usize::MAX)
    }

    /// Submits ready pieces up to `in_flight_max` in flight.
    fn start(&self, state: &mut PipelineState, in_flight_max: usize) -> Result<()> {
        while state.in_flight < in_flight_max
            && let Some((offset, source)) = state.ready.pop_front()
        {
            let options = WriteOptions { durability: Durability::None, mode: WriteMode::InPlace };
            match self.destination.engine.write(&self.destination.file, offset, source, options) {
                Ok(pending) => state.started.push_back(pending),
                Err(error) => {
                    // The other pieces will never start, and threads that wait for their slots would hang.
                    state.ready.clear();
                    return Err(error.into());
                }
            }
            state.in_flight += 1;
        }
        Ok(())
    }

    /// Takes a slot. If all are in use, waits for the oldest write.
    fn take_slot(&self) -> Result<Slot> {
        loop {
            self.progress.check()?;
            let completed = {
                let started = &mut lock(&self.state).started;
                let done = started.iter().take_while(|pending| pending.is_done()).count();
                let must_wait = done == 0 && self.pool.free_slots() == 0;
                let count = if must_wait { started.len().min(1) } else { done };
                started.drain(..count).collect::<Vec<_>>()
            };
            if !completed.is_empty() {
                self.wait_for(completed)?;
            } else if let Some(slot) = self.pool.take_timeout(SLOT_POLL_INTERVAL) {
                return Ok(slot);
            }
        }
    }

    /// Waits for all started writes. Returns the first failure. Drops unstarted pieces, which only a failure leaves.
    pub(super) fn wait_all(&self) -> Result<()> {
        let started = {
            let mut state = lock(&self.state);
            state.ready.clear();
            std::mem::take(&mut state.started)
        };
        self.wait_for(started)
    }

    /// Waits for these writes and starts as many others. Returns the first failure.
    fn wait_for(&self, started: impl IntoIterator<Item = Transfer<Region>>) -> Result<()> {
        let mut outcome = Ok(());
        for pending in started {
            let (_, written) = pending.wait();
            let mut state = lock(&self.state);
            state.in_flight -= 1;
            match written {
                Ok(transfer) => self.progress.advance(transfer.bytes),
                Err(error) => outcome = outcome.and(Err(error.into())),
            }
            if outcome.is_ok() {
                outcome = self.start(&mut state, self.in_flight_max);
            } else {
                state.ready.clear();
            }
        }
        outcome
    }
}

impl Drop for WritePipeline {
    /// Waits for all writes: the kernel uses the slots until then.
    fn drop(&mut self) {
        let _ = self.wait_all();
    }
}
