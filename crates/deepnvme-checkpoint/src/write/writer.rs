//! The threads of a save: put pieces together while the engine writes earlier ones.
//!
//! Bounce memory is bounded by [`POOL_BYTES_MAX`]. It is small on purpose: a slot that is written while it is still in the
//! processor's cache costs the memory bus one trip less.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use deepnvme_io::mem::{Pool, Region, Slot};
use deepnvme_io::{Durability, Engine, Error as IoError, Pending, TensorFile, WriteExtent, WriteOptions};

use super::PIECE_BYTES;
use super::image::Image;
use crate::crew::{self, THREADS_MAX};
use crate::error::Result;
use crate::progress::Progress;

/// Slots for each thread: one is being filled, the others are on their way.
const SLOTS: usize = 6;
/// The most memory that a save uses for itself, unless it is given a [`Staging`].
pub const POOL_BYTES_MAX: u64 = (THREADS_MAX * SLOTS) as u64 * PIECE_BYTES;
/// How often a thread that waits for a slot looks again.
const SLOT_WAIT: Duration = Duration::from_millis(20);

/// Memory that takes the bytes of a save before the disk does, to be used again and again: so much of a state can be
/// changed while the rest of the save goes on.
#[derive(Debug, Clone)]
pub struct Staging(Arc<Pool>);

impl Staging {
    /// Page-locked memory of so many bytes, where `RLIMIT_MEMLOCK` allows; what a save needs at least if that is more.
    ///
    /// # Errors
    /// `Io` when there is no such memory.
    pub fn new(bytes: u64) -> Result<Self> {
        let slots = (bytes.div_ceil(PIECE_BYTES) as usize).max(crew::threads(usize::MAX) * 2);
        Ok(Self(pool(slots)?))
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.0.bound_bytes() as u64
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
    threads: usize,
    progress: Arc<Progress>,
    /// The oldest first.
    in_flight: Mutex<VecDeque<Pending<Region>>>,
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
        let pool = staging.map_or_else(|| pool(threads * SLOTS), |staging| Ok(Arc::clone(&staging.0)))?;
        Ok(Self { engine, file, base, pool, threads, progress, in_flight: Mutex::default() })
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
                let options = WriteOptions { durability: Durability::None, extent: WriteExtent::InPlace };
                let pending = self.engine.write(&self.file, piece.start - self.base, source, options)?;
                lock(&self.in_flight).push_back(pending);
                Ok(())
            },
        )
    }

    /// A slot; when all are on their way, the oldest is waited for.
    fn take_slot(&self) -> Result<Slot> {
        loop {
            self.progress.check()?;
            let oldest = {
                let mut in_flight = lock(&self.in_flight);
                let is_landed = in_flight.front().is_some_and(Pending::is_done);
                if is_landed || self.pool.free() == 0 { in_flight.pop_front() } else { None }
            };
            match oldest {
                Some(oldest) => self.land(oldest)?,
                None => {
                    if let Some(slot) = self.pool.take_timeout(SLOT_WAIT) {
                        return Ok(slot);
                    }
                }
            }
        }
    }

    /// Waits for all that was started; the first failure.
    pub(super) fn land_all(&self) -> Result<()> {
        let in_flight = std::mem::take(&mut *lock(&self.in_flight));
        in_flight.into_iter().map(|pending| self.land(pending)).fold(Ok(()), Result::and)
    }

    fn land(&self, pending: Pending<Region>) -> Result<()> {
        let (_, written) = pending.wait();
        self.progress.advance(written?.bytes);
        Ok(())
    }
}

impl Drop for Writer {
    /// The slots belong to the kernel until then, whatever happened.
    fn drop(&mut self) {
        let _ = self.land_all();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
