//! The threads of a save: put pieces together while the engine writes earlier ones.
//!
//! Bounce memory is bounded by [`POOL_BYTES_MAX`]. It is small on purpose: a slot that is written while it is still in the
//! processor's cache costs the memory bus one trip less.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use deepnvme_format::sums::sums_of;
use deepnvme_io::mem::{Pool, Region, Slot};
use deepnvme_io::{
    Access, DirectMode, Durability, Engine, Error as IoError, ErrorKind, OpenOptions, Pending, Target, TensorFile,
    WriteExtent, WriteOptions, stream::Replacement,
};

use super::Saved;
use super::fill::{Filler, Layout, Source};
use super::spans::{Content, Pieces, Spans};
use crate::error::{Error, Result};
use crate::progress::Progress;

/// Bytes of a piece: one request to the disk.
pub(crate) const PIECE_BYTES: u64 = 1 << 20;
/// Slots for each thread: one is being filled, the others are on their way.
const SLOTS: usize = 6;
/// Threads at most: each copies and hashes several gigabytes a second.
const THREADS_MAX: usize = 8;
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
        let slots = (bytes.div_ceil(PIECE_BYTES) as usize).max(threads(usize::MAX) * 2);
        Ok(Self(Arc::new(Pool::new(PIECE_BYTES as usize, slots, true).map_err(no_memory)?)))
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.0.bound_bytes() as u64
    }
}

/// A file that is to be written.
pub(crate) struct Job<'a> {
    pub(crate) spans: Spans,
    pub(crate) sources: Vec<Source>,
    pub(crate) layout: &'a dyn Layout,
    pub(crate) durability: Durability,
    pub(crate) staging: Option<Staging>,
}

impl Job<'_> {
    /// Writes the whole file under a private name, and gives it its own.
    pub(crate) fn run(&self, engine: &Engine, target: &Target, progress: &Progress) -> Result<Saved> {
        let file_bytes = self.spans.file_bytes();
        progress.expect(file_bytes);
        let replacement = Replacement::new(target)?;
        let at_target = |error: Error| named(error, &replacement, file_bytes);
        let direct = match engine.config().direct {
            // A file whose end is ragged cannot be written past the page cache alone.
            DirectMode::Required | DirectMode::Preferred => DirectMode::Preferred,
            DirectMode::Disabled => DirectMode::Disabled,
        };
        let options = OpenOptions { access: Access::ReadWrite, create: false, direct };
        let file = TensorFile::open(&replacement.temporary(), options)?;
        // The room first: a full disk is found out before anything is written, and writes land inside the file.
        file.set_len(file_bytes).map_err(|error| error.at_path(replacement.target()))?;
        let index = self.write(engine, &file, progress).map_err(at_target)?;
        if self.durability != Durability::None {
            sync(engine, &file).map_err(at_target)?;
        }
        progress.check()?;
        replacement.commit(self.durability == Durability::Full)?;
        Ok(Saved { bytes: file_bytes, index_offset: index.0, index_bytes: index.1, index_crc64: index.2 })
    }

    /// Writes all pieces; where the index is, how long, and its sum.
    fn write(&self, engine: &Engine, file: &Arc<TensorFile>, progress: &Progress) -> Result<(u64, u64, u64)> {
        let is_late = |content| match content {
            Content::Header(record) => !self.sources[record].is_small(),
            Content::Index => true,
            Content::Record(_) | Content::Gap => false,
        };
        let pieces = self.spans.pieces(PIECE_BYTES, is_late);
        let threads = threads(pieces.early.len());
        let pool = match &self.staging {
            Some(staging) => Arc::clone(&staging.0),
            None => Arc::new(Pool::new(PIECE_BYTES as usize, threads * SLOTS, true).map_err(no_memory)?),
        };
        let filler = Filler { spans: &self.spans, sources: &self.sources, layout: self.layout, index: OnceLock::new() };
        let crew = Crew {
            engine,
            file,
            pool: &pool,
            filler: &filler,
            progress,
            in_flight: Mutex::default(),
            failed: Mutex::default(),
        };
        let filled = crew.fill_all(&pieces, threads);
        // Nobody looks at the caller's memory any more.
        progress.mark_filled();
        // What was started is waited for, whatever happened: the slots belong to the kernel until then.
        filled.and(crew.land_all())?;
        let index = filler.index.get().map_or(&[][..], Vec::as_slice);
        let offset = self.spans.offset_of_index().unwrap_or(0);
        Ok((offset, index.len() as u64, sums_of(index).crc64))
    }
}

/// How many threads so many pieces are worth.
pub(crate) fn threads(pieces: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    cores.min(THREADS_MAX).min(pieces).max(1)
}

/// What the threads share.
struct Crew<'a> {
    engine: &'a Engine,
    file: &'a Arc<TensorFile>,
    pool: &'a Pool,
    filler: &'a Filler<'a>,
    progress: &'a Progress,
    /// The oldest first.
    in_flight: Mutex<VecDeque<Pending<Region>>>,
    failed: Mutex<Option<Error>>,
}

impl Crew<'_> {
    fn fill_all(&self, pieces: &Pieces, threads: usize) -> Result<()> {
        // The sums of the late pieces' records are complete when the early pieces have been hashed.
        self.filler.hash_late(&pieces.late);
        self.fill(&pieces.early, threads)?;
        self.filler.finish_sums().map_err(|error| Error::format(self.file.path(), error))?;
        self.fill(&pieces.late, threads.min(pieces.late.len()).max(1))
    }

    fn fill(&self, pieces: &[Range<u64>], threads: usize) -> Result<()> {
        let (next, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
        let work = || {
            if let Err(error) = self.work(pieces, &next, &is_over) {
                is_over.store(true, Ordering::Relaxed);
                lock(&self.failed).get_or_insert(error);
            }
        };
        if threads == 1 {
            work();
        } else {
            std::thread::scope(|scope| {
                for _ in 0..threads {
                    scope.spawn(work);
                }
            });
        }
        lock(&self.failed).take().map_or(Ok(()), Err)
    }

    fn work(&self, pieces: &[Range<u64>], next: &AtomicUsize, is_over: &AtomicBool) -> Result<()> {
        while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
            if is_over.load(Ordering::Relaxed) {
                return Ok(());
            }
            let mut slot = self.take_slot()?;
            self.filler.fill(piece, &mut slot);
            let source = slot.region().slice(0..(piece.end - piece.start) as usize);
            let options = WriteOptions { durability: Durability::None, extent: WriteExtent::InPlace };
            let pending = self.engine.write(self.file, piece.start, source, options)?;
            lock(&self.in_flight).push_back(pending);
        }
        Ok(())
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

    fn land_all(&self) -> Result<()> {
        let in_flight = std::mem::take(&mut *lock(&self.in_flight));
        in_flight.into_iter().map(|pending| self.land(pending)).fold(Ok(()), Result::and)
    }

    fn land(&self, pending: Pending<Region>) -> Result<()> {
        let (_, written) = pending.wait();
        self.progress.advance(written?.bytes);
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A write of nothing: what it waits for is the sync.
fn sync(engine: &Engine, file: &Arc<TensorFile>) -> Result<()> {
    let options = WriteOptions { durability: Durability::Data, extent: WriteExtent::InPlace };
    engine.write(file, 0, Region::from_vec(Vec::new()), options)?.wait().1?;
    Ok(())
}

/// An error of the temporary, as one of the file that was to be; a full disk with what was needed.
fn named(error: Error, replacement: &Replacement, file_bytes: u64) -> Error {
    let Error::Io(error) = error else { return error };
    let error = error.at_path(replacement.target());
    if error.kind() != ErrorKind::NoSpace {
        return error.into();
    }
    let text = format!(
        "the checkpoint needs {file_bytes} bytes, and there is not so much room; free some space or choose another \
         folder. What was there under that name before is untouched"
    );
    error.because(text).into()
}

#[expect(clippy::needless_pass_by_value, reason = "so that `map_err` takes it by name")]
fn no_memory(error: std::io::Error) -> Error {
    IoError::new(ErrorKind::Io, "allocate the save's buffers", format!("{error}; free some memory")).into()
}
