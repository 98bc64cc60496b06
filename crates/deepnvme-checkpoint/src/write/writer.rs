//! The threads of a save: put pieces together while the engine writes earlier ones.
//!
//! Bounce memory is bounded by [`POOL_BYTES_MAX`]. It is small on purpose: a slot that is written while it is still in the
//! processor's cache costs the memory bus one trip less.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use deepnvme_io::mem::sync::ignore_poison;
use deepnvme_io::mem::{Pool, Region, Slot};
use deepnvme_io::{
    Durability, Engine, Error as IoError, GpuAccess, KnownMemory, Pending, TensorFile, WriteExtent, WriteOptions,
};

use super::PIECE_BYTES;
use super::image::Image;
use crate::crew::{self, THREADS_MAX};
use crate::error::Result;
use crate::progress::Progress;
use crate::sync::{Mutex, MutexGuard, OnceLock};

/// Pieces on their way, for each thread. Devices of virtual machines report all that they have at once, so that as many
/// more are put together meanwhile, for the device to have something to do at that moment.
const IN_AIR: usize = 6;
/// Slots for each thread, as far as [`POOL_BYTES_MAX`] goes.
const SLOTS: usize = 2 * IN_AIR;
/// The most memory that a save uses for itself, unless it is given a [`Staging`].
pub const POOL_BYTES_MAX: u64 = (THREADS_MAX / 2 * SLOTS) as u64 * PIECE_BYTES;
const SLOTS_MAX: usize = (POOL_BYTES_MAX / PIECE_BYTES) as usize;
/// How often a thread that waits for a slot looks again.
const SLOT_WAIT: Duration = Duration::from_millis(20);

/// Memory that takes the bytes of a save before the disk does, to be used again and again: so much of a state can be
/// changed while the rest of the save goes on.
#[derive(Debug, Clone)]
pub struct Staging {
    pool: Arc<Pool>,
    /// That the drivers of GPUs know it: made with the first save that needs it, since it takes long.
    known: Arc<OnceLock<Option<KnownMemory>>>,
}

impl Staging {
    /// Page-locked memory of so many bytes, where `RLIMIT_MEMLOCK` allows; what a save needs at least if that is more.
    ///
    /// # Errors
    /// `Io` when there is no such memory.
    pub fn new(bytes: u64) -> Result<Self> {
        let slots = (bytes.div_ceil(PIECE_BYTES) as usize).max(crew::threads_beside_workers(usize::MAX) * 2);
        Ok(Self { pool: pool(slots)?, known: Arc::default() })
    }

    /// Its bytes.
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

/// Writes pieces of an image into a file.
pub(super) struct Writer {
    engine: Arc<Engine>,
    file: Arc<TensorFile>,
    /// Which byte of the image is the file's first.
    base: u64,
    pool: Arc<Pool>,
    /// That the drivers of GPUs know the pool.
    known: Arc<OnceLock<Option<KnownMemory>>>,
    threads: usize,
    progress: Arc<Progress>,
    line: Mutex<Line>,
    in_air_max: usize,
}

/// Pieces that are put together, the oldest first.
#[derive(Default)]
struct Line {
    /// What the engine has, and nobody has waited for.
    started: VecDeque<Pending<Region>>,
    /// How many have been started and have not landed.
    in_air: usize,
    /// With their places in the file.
    ready: VecDeque<(u64, Region)>,
}

impl Writer {
    pub(super) fn new(
        engine: Arc<Engine>,
        file: Arc<TensorFile>,
        base: u64,
        threads: usize,
        staging: Option<&Staging>,
        progress: Arc<Progress>,
    ) -> Result<Self> {
        let (pool, known) = match staging {
            Some(staging) => (Arc::clone(&staging.pool), Arc::clone(&staging.known)),
            None => (pool((threads * SLOTS).min(SLOTS_MAX))?, Arc::default()),
        };
        let slots = (pool.bound_bytes() as u64 / PIECE_BYTES) as usize;
        let in_air_max = (slots / 2).clamp(1, threads * IN_AIR);
        Ok(Self { engine, file, base, pool, known, threads, progress, line: Mutex::default(), in_air_max })
    }

    /// Has the driver of a GPU know the pool. Where it refuses, it stages copies, which is slower and as right.
    pub(super) fn make_known(&self, access: &GpuAccess, index: u32) {
        self.known.get_or_init(|| access.make_known(index, &self.pool.arena()).ok());
    }

    pub(super) fn file(&self) -> &Arc<TensorFile> {
        &self.file
    }

    pub(super) fn engine(&self) -> &Engine {
        &self.engine
    }

    pub(super) fn progress(&self) -> &Progress {
        &self.progress
    }

    /// Puts the pieces together and starts to write them. When it returns, the image's memory has been read.
    pub(super) fn write(&self, image: &Image, pieces: &[Range<u64>]) -> Result<()> {
        let threads = self.threads.min(pieces.len()).max(1);
        crew::each(
            threads,
            pieces,
            || (),
            |(), piece| {
                let mut slot = self.take_slot()?;
                image.fill(piece, &mut slot)?;
                let source = slot.region().slice(0..(piece.end - piece.start) as usize);
                let mut line = lock(&self.line);
                line.ready.push_back((piece.start - self.base, source));
                self.start(&mut line, self.in_air_max)
            },
        )?;
        // Nobody puts anything together now, who would start them one after the other.
        self.start(&mut lock(&self.line), usize::MAX)
    }

    /// Hands over what is ready, until so many are in the air.
    fn start(&self, line: &mut Line, in_air_max: usize) -> Result<()> {
        while line.in_air < in_air_max
            && let Some((offset, source)) = line.ready.pop_front()
        {
            let options = WriteOptions { durability: Durability::None, extent: WriteExtent::InPlace };
            match self.engine.write(&self.file, offset, source, options) {
                Ok(pending) => line.started.push_back(pending),
                Err(error) => {
                    // Nobody will start the others. Threads that wait for a slot would wait for theirs for ever.
                    line.ready.clear();
                    return Err(error.into());
                }
            }
            line.in_air += 1;
        }
        Ok(())
    }

    /// A slot; when all are in use, the oldest piece is waited for.
    fn take_slot(&self) -> Result<Slot> {
        loop {
            self.progress.check()?;
            let landed = {
                let started = &mut lock(&self.line).started;
                let done = started.iter().take_while(|pending| pending.is_done()).count();
                let must_wait = done == 0 && self.pool.free() == 0;
                let count = if must_wait { started.len().min(1) } else { done };
                started.drain(..count).collect::<Vec<_>>()
            };
            if !landed.is_empty() {
                self.land(landed)?;
            } else if let Some(slot) = self.pool.take_timeout(SLOT_WAIT) {
                return Ok(slot);
            }
        }
    }

    /// Waits for all that was started; the first failure. After a failure there may be pieces that nobody has started, and
    /// nobody will.
    pub(super) fn land_all(&self) -> Result<()> {
        let started = {
            let mut line = lock(&self.line);
            line.ready.clear();
            std::mem::take(&mut line.started)
        };
        self.land(started)
    }

    /// Waits for these, and starts as many others; the first failure.
    fn land(&self, started: impl IntoIterator<Item = Pending<Region>>) -> Result<()> {
        let mut outcome = Ok(());
        for pending in started {
            let (_, written) = pending.wait();
            let mut line = lock(&self.line);
            line.in_air -= 1;
            match written {
                Ok(transfer) => self.progress.advance(transfer.bytes),
                Err(error) => outcome = outcome.and(Err(error.into())),
            }
            if outcome.is_ok() {
                outcome = self.start(&mut line, self.in_air_max);
            } else {
                line.ready.clear();
            }
        }
        outcome
    }
}

impl Drop for Writer {
    /// The slots belong to the kernel until then, whatever happened.
    fn drop(&mut self) {
        let _ = self.land_all();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    ignore_poison(mutex.lock())
}
