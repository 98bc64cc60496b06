//! Copies items to and from other files, inside the kernel where it can.
//!
//! First the file system is asked to share the blocks, which copies nothing (`FICLONERANGE`: XFS, Btrfs), then the
//! kernel to copy (`copy_file_range`). Otherwise the engine copies through memory.

use std::os::fd::{AsFd, BorrowedFd};

use deepnvme_io::backend::clone_range;
use deepnvme_io::mem::Buffer;
use deepnvme_io::{Access, DirectMode, Engine, Error as IoError, ErrorKind, TensorFile, WriteOptions, fs};
use rustix::io::Errno;

use crate::borrowed::Borrowed;
use crate::error::{Error, Result};
use crate::options::CancelCheck;
use crate::residency::BorrowMode;
use crate::stop_check::StopCheck;
use crate::store::{DiskLocation, StoredItem};
use crate::swap_files::FileExtent;
use crate::swapper::Swapper;

/// Bytes per copy through memory.
const COPY_BYTES: u64 = 8 << 20;
/// Bytes per copy inside the kernel, which nothing stops: a fraction of a second, even on a slow disk.
const KERNEL_COPY_BYTES: usize = 32 << 20;

/// How bytes were copied between files.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CopyStats {
    /// Bytes whose blocks both files share.
    pub shared_bytes: u64,
    /// Bytes that the kernel copied.
    pub kernel_bytes: u64,
    /// Bytes copied through memory.
    pub memory_bytes: u64,
}

/// A range of an open file.
#[derive(Clone, Copy, Debug)]
pub struct FileRange<'a> {
    /// The file.
    pub file: BorrowedFd<'a>,
    /// Offset in the file.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: usize,
}

impl Swapper {
    /// Writes an item back and returns its place on disk, which is valid until the item is changed or deleted.
    ///
    /// # Errors
    /// As [`flush`](Self::flush); `NotFound`.
    pub fn extents(&self, key: &str, is_cancelled: CancelCheck<'_>) -> Result<Vec<FileExtent>> {
        let borrowed = self.borrow_key(key, BorrowMode::DiskShared, is_cancelled)?;
        self.flush_borrowed(&borrowed, key, is_cancelled)?;
        let store = self.scheduler().store();
        let stored = store.get(borrowed.id()).ok_or_else(|| Error::NotFound { key: key.into() })?;
        store.file_extents(stored)
    }

    /// Copies an item into a file, at `offset`. Changes are written back first, and the item cannot change meanwhile.
    ///
    /// # Errors
    /// As [`extents`](Self::extents), and if the item is deleted before it is written back; `Io` if the file cannot be
    /// written; `Interrupted` and `Closed`, even in the middle of the copy. Part of it is in the file then.
    pub fn export(
        &self,
        key: &str,
        target: BorrowedFd<'_>,
        offset: u64,
        is_cancelled: CancelCheck<'_>,
    ) -> Result<CopyStats> {
        let borrowed = self.borrow_key(key, BorrowMode::DiskShared, is_cancelled)?;
        self.flush_borrowed(&borrowed, key, is_cancelled)?;
        let parts = {
            let store = self.scheduler().store();
            let stored = store.get(borrowed.id()).ok_or_else(|| Error::NotFound { key: key.into() })?;
            store.file_extents(stored)?
        };
        let (mut stats, mut at) = (CopyStats::default(), offset);
        let mut stop = StopCheck::new(self.scheduler(), is_cancelled);
        let copied_all = parts.into_iter().try_for_each(|part| {
            let (source, target) = ((part.fd.as_fd(), part.offset), (target, at));
            copy(&self.scheduler().engine, source, target, part.bytes, (&mut stats, &mut stop))
                .map_err(|error| with_path(error, &part, at))?;
            at += part.bytes;
            Ok(())
        });
        stop.outcome(key, copied_all).map(|()| stats)
    }

    /// Waits until a borrowed item is on disk.
    fn flush_borrowed(&self, borrowed: &Borrowed, key: &str, is_cancelled: CancelCheck<'_>) -> Result<()> {
        self.flush_ids(&[(borrowed.id(), key.into())], is_cancelled)?;
        // A delete ends the flush as well. Bytes that were not written then never are.
        if self.scheduler().items.lock().residency.needs_flush(borrowed.id()) {
            return Err(Error::NotFound { key: key.into() });
        }
        Ok(())
    }

    /// Adds an item with a copy of a file's bytes. `label` is the text that [`Borrowed::label`] returns.
    /// With checksums, the bytes are copied through memory. Returns the item's id, and how the bytes were copied.
    ///
    /// # Errors
    /// `Io` if the file is too short or the disk is full; `TooLarge`; `Deadlock`, `Interrupted` and `Closed` as for
    /// [`create`](Self::create), even in the middle of the copy. The key then has no new item.
    pub fn import(
        &self,
        key: &str,
        label: &str,
        range: &FileRange<'_>,
        is_cancelled: CancelCheck<'_>,
    ) -> Result<(u64, CopyStats)> {
        let FileRange { file: source, offset, bytes } = *range;
        self.check_open()?;
        let slot_bytes = self.slot_bytes(key, 0, bytes)?;
        let mut stats = CopyStats::default();
        if self.scheduler().has_checksums {
            let borrowed = self.create(key, bytes, is_cancelled)?;
            let direct = self.scheduler().engine.config().direct;
            let file = TensorFile::from_fd(source, None, Access::Read, direct)?;
            let mut stop = StopCheck::new(self.scheduler(), is_cancelled);
            let read = stop.wait(self.scheduler().engine.read(&file, offset, borrowed.target())?).1;
            stop.outcome(key, read.map_err(Error::from))?;
            stats.memory_bytes = bytes as u64;
            let id = borrowed.id();
            borrowed.commit_as(label);
            return Ok((id, stats));
        }
        let extents = self.allocate(key, bytes, is_cancelled)?;
        let stored = StoredItem::new((key, label), bytes, 0, DiskLocation::Swap(extents.clone()));
        let mut stop = StopCheck::new(self.scheduler(), is_cancelled);
        let copied_all = (|| {
            let parts = self.scheduler().store().file_extents(&stored)?;
            let mut at = offset;
            for part in parts {
                let (from, to) = ((source, at), (part.fd.as_fd(), part.offset));
                copy(&self.scheduler().engine, from, to, part.bytes, (&mut stats, &mut stop))
                    .map_err(|error| with_path(error, &part, at))?;
                at += part.bytes;
            }
            Ok(())
        })();
        if let Err(error) = stop.outcome(key, copied_all) {
            self.scheduler().disk().free(extents);
            return Err(error);
        }
        let id = self.replace_item(key, slot_bytes, stored, true, is_cancelled)?;
        self.scheduler().run_or_wake();
        Ok((id, stats))
    }
}

fn with_path(error: IoError, part: &FileExtent, at: u64) -> Error {
    let error = if error.path().is_none() { error.at_path(&part.path) } else { error };
    Error::Io(if error.offset().is_none() { error.at_offset(at) } else { error })
}

/// Copies a range between two files, each given with its offset, by the cheapest way that works.
fn copy(
    engine: &Engine,
    (source, source_offset): (BorrowedFd<'_>, u64),
    (target, target_offset): (BorrowedFd<'_>, u64),
    bytes: u64,
    (stats, stop): (&mut CopyStats, &mut StopCheck<'_>),
) -> Result<(), IoError> {
    let block = fs::space(target).map_or(4096, |space| space.block_bytes.max(512));
    let whole = bytes / block * block;
    let is_aligned = source_offset.is_multiple_of(block) && target_offset.is_multiple_of(block);
    let mut done = 0;
    if is_aligned && whole > 0 && clone_range(source, source_offset, target, target_offset, whole).is_ok() {
        stats.shared_bytes += whole;
        done = whole;
    }
    while done < bytes {
        stop.check("copy")?;
        let len = usize::try_from(bytes - done).unwrap_or(usize::MAX).min(KERNEL_COPY_BYTES);
        match fs::copy_between((source, source_offset + done), (target, target_offset + done), len) {
            Ok(0) => {
                let file_bytes = fs::stat_of(source).map_or(source_offset + done, |stat| stat.bytes);
                let error = IoError::end_of_file("copy", file_bytes, source_offset, bytes);
                // The caller takes an error without a path for one of the swap file.
                return Err(match fs::resolved_path(source) {
                    Ok(path) => error.at_path(&path),
                    Err(_) => error,
                });
            }
            Ok(count) => {
                stats.kernel_bytes += count as u64;
                done += count as u64;
            }
            Err(Errno::INTR | Errno::AGAIN) => {}
            // Different file systems, files in memory, or an old kernel. Copying by hand works, or gives the true
            // error.
            Err(_) => {
                let (source, target) = ((source, source_offset), (target, target_offset));
                return through_memory(engine, source, target, done..bytes, (stats, stop));
            }
        }
    }
    Ok(())
}

fn through_memory(
    engine: &Engine,
    (source, source_offset): (BorrowedFd<'_>, u64),
    (target, target_offset): (BorrowedFd<'_>, u64),
    range: std::ops::Range<u64>,
    (stats, stop): (&mut CopyStats, &mut StopCheck<'_>),
) -> Result<(), IoError> {
    let source = TensorFile::from_fd(source, None, Access::Read, DirectMode::Preferred)?;
    let target = TensorFile::from_fd(target, None, Access::Write, DirectMode::Preferred)?;
    let buffer = Buffer::zeroed(COPY_BYTES.min(range.end - range.start) as usize);
    let mut rest = Some(buffer.map_err(|error| IoError::from_io("allocate", &error))?.into_region());
    let mut at = range.start;
    while at < range.end {
        let lost = || IoError::new(ErrorKind::Io, "copy", "an error lost the memory of a transfer");
        let whole = rest.take().ok_or_else(lost)?;
        let (part, behind) = whole.split_at(COPY_BYTES.min(range.end - at) as usize);
        stop.check("copy")?;
        let (part, read) = stop.wait(engine.read(&source, source_offset + at, part)?);
        read?;
        let part = part.ok_or_else(lost)?;
        stop.wait(engine.write(&target, target_offset + at, part.region(), WriteOptions::default())?).1?;
        let bytes = part.len() as u64;
        stats.memory_bytes += bytes;
        at += bytes;
        rest = part.join(behind).ok();
    }
    Ok(())
}
