//! A safetensors file into which the caller clones tensors: they share blocks with other files (reflinks). `commit`
//! reads the file once if it gets checksums, and writes the header last.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use deepnvme_file::aligned_range::read_range;
use deepnvme_file::{Replacement, Target};
use deepnvme_format::checksums::{CHUNK_BYTES, Hasher, chunk_count};
use deepnvme_format::safetensors::{SafetensorsPlan, TensorSpec};
use deepnvme_io::fs::{self, OFlags};
use deepnvme_io::mem::Region;
use deepnvme_io::{Durability, Engine, Error as IoError, TensorFile, WriteOptions};

use super::STEP_BYTES;
use crate::error::{Error, Result};
use crate::progress::Progress;
use crate::work_queue;

/// Size of a thread's reads: whole chunks. Small, since a saving process may have little memory left and each thread
/// allocates one.
const RUN_BYTES: u64 = 2 << 20;

/// A new file under a private name. It is removed unless committed.
pub struct ReflinkTarget {
    engine: Arc<Engine>,
    plan: SafetensorsPlan,
    has_checksums: bool,
    replacement: Replacement,
    file: Arc<TensorFile>,
    descriptor: OwnedFd,
}

impl ReflinkTarget {
    /// Creates the file at its final length, with these tensors in order. Allocates no space, since shared blocks need
    /// none.
    ///
    /// # Errors
    /// `Format` if the format cannot hold the tensors, or `Io` as for [`Replacement::new`].
    pub fn new(
        engine: Arc<Engine>,
        target: &Target,
        tensors: Vec<TensorSpec>,
        metadata: Vec<(String, String)>,
        has_checksums: bool,
    ) -> Result<Self> {
        let plan = SafetensorsPlan::in_order(tensors, metadata, has_checksums)
            .map_err(|error| Error::format(target.path(), error))?;
        let replacement = Replacement::new(target)?;
        let refused = |errno| IoError::os("open for writing", errno).at_path(target.path());
        let file = replacement.open(engine.config().direct)?;
        let descriptor = fs::open(&replacement.temporary().path(), OFlags::RDWR | OFlags::NOFOLLOW, 0);
        let descriptor = descriptor.map_err(refused)?;
        fs::truncate(descriptor.as_fd(), plan.file_bytes()).map_err(refused)?;
        Ok(Self { engine, plan, has_checksums, replacement, file, descriptor })
    }

    /// Returns the open file to place the tensors in.
    #[must_use]
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    /// Returns the private path of the file until it is committed.
    #[must_use]
    pub fn private_path(&self) -> PathBuf {
        self.replacement.temporary().path()
    }

    /// Returns the offset of the first tensor.
    #[must_use]
    pub fn data_offset(&self) -> u64 {
        self.plan.data_offset()
    }

    /// Reads the tensors for their checksums, if the file gets any, writes the header, syncs, and gives the file its
    /// name.
    ///
    /// # Errors
    /// `Io` for errors of the disk, or `Interrupted` if `progress` was stopped. The new file is then removed.
    pub fn commit(self, progress: &Progress) -> Result<()> {
        let target: PathBuf = self.replacement.target().to_path_buf();
        let named = |error: IoError| Error::from(error.at_path(&target));
        let chunks = if self.has_checksums {
            self.checksums(progress).map_err(|error| at_target(error, &named))?
        } else {
            Vec::new()
        };
        let none = vec![&[][..]; self.plan.tensors().len()];
        let chunks: Vec<&[u64]> = if self.has_checksums { chunks.iter().map(Vec::as_slice).collect() } else { none };
        let header = Region::from_vec(self.plan.header(&chunks));
        let options = WriteOptions::default();
        let written = self.engine.write(&self.file, 0, header, options).and_then(|pending| pending.wait().1);
        written.and_then(|_| self.engine.sync(&self.file, Durability::Data)).map_err(named)?;
        progress.check()?;
        self.replacement.commit(true)?;
        Ok(())
    }

    /// Computes the chunk checksums of each tensor.
    fn checksums(&self, progress: &Progress) -> Result<Vec<Vec<u64>>> {
        let runs = runs(&self.plan);
        progress.expect(runs.iter().map(|run| run.bytes).sum());
        let checksums: Vec<Vec<AtomicU64>> = self
            .plan
            .tensors()
            .iter()
            .map(|tensor| (0..chunk_count(tensor.bytes)).map(|_| AtomicU64::new(0)).collect())
            .collect();
        let scratch = || vec![0; STEP_BYTES as usize];
        // One thread more than can hash at a time, so that one is always reading.
        work_queue::for_each(work_queue::thread_count(runs.len()) + 1, &runs, scratch, |scratch, run| {
            progress.check()?;
            let view = read_range(&self.engine, &self.file, &(run.offset..run.offset + run.bytes))?;
            let mut at = 0;
            for &(tensor, chunk, bytes) in &run.chunks {
                let (mut hasher, end) = (Hasher::of_chunks(), at + bytes);
                while at < end {
                    let step = &mut scratch[..STEP_BYTES.min(end - at) as usize];
                    view.copy_to_slice(at as usize, step);
                    hasher.update(step);
                    at += step.len() as u64;
                }
                checksums[tensor][chunk].store(hasher.finish().crc64, Ordering::Relaxed);
            }
            progress.advance(run.bytes);
            Ok(())
        })?;
        Ok(checksums.into_iter().map(|chunks| chunks.into_iter().map(AtomicU64::into_inner).collect()).collect())
    }
}

/// Adds the path of the target to an error of the disk.
fn at_target(error: Error, named: &impl Fn(IoError) -> Error) -> Error {
    match error {
        Error::Io(error) => named(error),
        other => other,
    }
}

/// A byte range of the file, as adjacent chunks: tensor, chunk index, size.
struct ChunkRun {
    offset: u64,
    bytes: u64,
    chunks: Vec<(usize, usize, u64)>,
}

fn runs(plan: &SafetensorsPlan) -> Vec<ChunkRun> {
    let mut runs: Vec<ChunkRun> = Vec::new();
    for (index, tensor) in plan.tensors().iter().enumerate() {
        for chunk in 0..chunk_count(tensor.bytes) {
            let start = chunk as u64 * CHUNK_BYTES;
            let bytes = CHUNK_BYTES.min(tensor.bytes - start);
            match runs.last_mut().filter(|last| last.bytes + bytes <= RUN_BYTES) {
                Some(last) => {
                    last.bytes += bytes;
                    last.chunks.push((index, chunk, bytes));
                }
                None => {
                    runs.push(ChunkRun { offset: tensor.offset + start, bytes, chunks: vec![(index, chunk, bytes)] });
                }
            }
        }
    }
    runs
}
