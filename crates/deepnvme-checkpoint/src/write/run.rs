//! The threads of a save: put pieces together while the engine writes earlier ones.
//!
//! Bounce memory is bounded by [`POOL_BYTES_MAX`]. It is small on purpose: a slot that is written while it is still in the
//! processor's cache costs the memory bus one trip less.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use deepnvme_io::mem::{Pool, Region};
use deepnvme_io::{
    Access, DirectMode, Durability, Engine, Error as IoError, ErrorKind, OpenOptions, Pending, Target, TensorFile,
    WriteExtent, WriteOptions, stream::Replacement,
};

use super::fill::{Filler, Layout, Source};
use super::spans::{Content, Spans};
use crate::error::{Error, Result};
use crate::progress::Progress;

/// Bytes of a piece: one request to the disk.
pub(crate) const PIECE_BYTES: u64 = 1 << 20;
/// Pieces of a thread that are on their way while it puts together the next one.
const IN_FLIGHT: usize = 5;
/// Threads at most: each copies and hashes several gigabytes a second.
const THREADS_MAX: usize = 8;
/// The most memory that a save uses for itself.
pub const POOL_BYTES_MAX: u64 = THREADS_MAX as u64 * (IN_FLIGHT as u64 + 1) * PIECE_BYTES;
/// A slot comes back when a write is done; that takes no longer than the disk does.
const SLOT_WAIT: Duration = Duration::from_secs(3600);

/// A file that is to be written.
pub(crate) struct Job<'a> {
    pub(crate) spans: Spans,
    pub(crate) sources: Vec<Source>,
    pub(crate) layout: &'a dyn Layout,
    pub(crate) durability: Durability,
}

impl Job<'_> {
    /// Writes the whole file under a private name, and gives it its own.
    pub(crate) fn run(&self, engine: &Engine, target: &Target, progress: &Progress) -> Result<u64> {
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
        self.write(engine, &file, progress).map_err(at_target)?;
        if self.durability != Durability::None {
            sync(engine, &file).map_err(at_target)?;
        }
        progress.check()?;
        replacement.commit(self.durability == Durability::Full)?;
        Ok(file_bytes)
    }

    fn write(&self, engine: &Engine, file: &Arc<TensorFile>, progress: &Progress) -> Result<()> {
        let is_late = |content| match content {
            Content::Header(record) => !self.sources[record].is_small(),
            Content::Index => true,
            Content::Record(_) | Content::Gap => false,
        };
        let pieces = self.spans.pieces(PIECE_BYTES, is_late);
        let threads = threads(pieces.early.len());
        let pool = Pool::new(PIECE_BYTES as usize, threads * (IN_FLIGHT + 1), true).map_err(no_memory)?;
        let filler = Filler { spans: &self.spans, sources: &self.sources, layout: self.layout, index: OnceLock::new() };
        let crew = Crew { engine, file, pool: &pool, filler: &filler, progress, failed: Mutex::new(None) };
        // The sums of the late pieces' records are complete when the early pieces have been hashed.
        filler.hash_late(&pieces.late);
        crew.write(&pieces.early, threads)?;
        filler.finish_sums().map_err(|error| Error::format(file.path(), error))?;
        crew.write(&pieces.late, threads.min(pieces.late.len()).max(1))
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
    failed: Mutex<Option<Error>>,
}

impl Crew<'_> {
    fn write(&self, pieces: &[Range<u64>], threads: usize) -> Result<()> {
        let (next, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
        let work = || {
            let mut in_flight = VecDeque::with_capacity(IN_FLIGHT);
            let worked = self.work(pieces, &next, &is_over, &mut in_flight);
            // What was started is waited for, whatever happened: the slots belong to the kernel until then.
            let landed = in_flight.into_iter().map(|flight| self.land(flight)).fold(Ok(()), Result::and);
            if let Err(error) = worked.and(landed) {
                is_over.store(true, Ordering::Relaxed);
                self.failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
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
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).take().map_or(Ok(()), Err)
    }

    fn work(
        &self,
        pieces: &[Range<u64>],
        next: &AtomicUsize,
        is_over: &AtomicBool,
        in_flight: &mut VecDeque<Pending<Region>>,
    ) -> Result<()> {
        while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
            self.progress.check()?;
            if is_over.load(Ordering::Relaxed) {
                return Ok(());
            }
            while in_flight.len() >= IN_FLIGHT || in_flight.front().is_some_and(Pending::is_done) {
                if let Some(oldest) = in_flight.pop_front() {
                    self.land(oldest)?;
                }
            }
            let Some(mut slot) = self.pool.take_timeout(SLOT_WAIT) else {
                return Err(IoError::new(ErrorKind::Busy, "write", "the disk has not answered for an hour").into());
            };
            self.filler.fill(piece, &mut slot);
            let source = slot.region().slice(0..(piece.end - piece.start) as usize);
            let options = WriteOptions { durability: Durability::None, extent: WriteExtent::InPlace };
            in_flight.push_back(self.engine.write(self.file, piece.start, source, options)?);
        }
        Ok(())
    }

    fn land(&self, pending: Pending<Region>) -> Result<()> {
        let (_, written) = pending.wait();
        self.progress.advance(written?.bytes);
        Ok(())
    }
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
