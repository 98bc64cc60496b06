//! Items that become parts of other files and the reverse, without a trip through memory where the kernel can.
//!
//! First the file system is asked to share the blocks, which costs nothing (`FICLONERANGE`: XFS, Btrfs); else the kernel
//! copies (`copy_file_range`); else the bytes go through memory of the engine.

use std::os::fd::{AsFd, BorrowedFd};

use deepnvme_io::backend::clone_range;
use deepnvme_io::mem::Buffer;
use deepnvme_io::{Access, DirectMode, Engine, Error as IoError, ErrorKind, TensorFile, WriteOptions, fs};
use rustix::io::Errno;

#[cfg(doc)]
use crate::borrowed::Lend;
use crate::error::{Error, Result};
use crate::residency::Mode;
use crate::store::Home;
use crate::swap_files::Located;
use crate::swapper::{Look, Swapper};

/// Bytes that pass through memory at once where the kernel does not copy.
const COPY_BYTES: u64 = 8 << 20;

/// How bytes got from one file into another.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Copied {
    /// Bytes whose blocks both files share.
    pub shared_bytes: u64,
    /// Bytes that the kernel copied.
    pub kernel_bytes: u64,
    /// Bytes that went through memory.
    pub memory_bytes: u64,
}

impl Swapper {
    /// Where on disk an item is, once all that was changed has been written. That is so until it is changed or forgotten.
    ///
    /// # Errors
    /// As [`flush`](Self::flush); `NotFound`.
    pub fn locate(&self, key: &str, look: Look<'_>) -> Result<Vec<Located>> {
        let lend = self.hold(key, Mode::Pin, look)?;
        self.flush_ids(&[(lend.id(), key.into())], look)?;
        let store = self.shared().store();
        let stored = store.get(lend.id()).ok_or_else(|| Error::NotFound { key: key.into() })?;
        Ok(store.locate(stored)?)
    }

    /// Copies an item into a file, from `offset` on, as it is now: what was changed is written first, and nobody changes it
    /// meanwhile.
    ///
    /// # Errors
    /// As [`locate`](Self::locate); `Io` where the file cannot be written.
    pub fn export(&self, key: &str, target: BorrowedFd<'_>, offset: u64, look: Look<'_>) -> Result<Copied> {
        let lend = self.hold(key, Mode::Pin, look)?;
        self.flush_ids(&[(lend.id(), key.into())], look)?;
        let parts = {
            let store = self.shared().store();
            let stored = store.get(lend.id()).ok_or_else(|| Error::NotFound { key: key.into() })?;
            store.locate(stored)?
        };
        let (mut copied, mut at) = (Copied::default(), offset);
        for part in parts {
            let (source, target) = ((part.fd.as_fd(), part.offset), (target, at));
            copy(&self.shared().engine, source, target, part.bytes, &mut copied).map_err(|error| {
                // Whoever closes the swapper meanwhile cuts its file off.
                if self.shared().desk.lock().is_closed { Error::SHUT } else { named(error, &part, at) }
            })?;
            at += part.bytes;
        }
        Ok(copied)
    }

    /// Adds an item whose bytes are a copy of those of a file, from `offset` on, and of which [`Lend::label`] will say
    /// `label`. With checksums they go through memory. Its number, and how they came.
    ///
    /// # Errors
    /// `Io` where there are not so many bytes, or the disk is full; `TooLarge`.
    pub fn import(
        &self,
        (key, label): (&str, &str),
        source: BorrowedFd<'_>,
        offset: u64,
        bytes: usize,
        look: Look<'_>,
    ) -> Result<(u64, Copied)> {
        self.check_process()?;
        let place_bytes = self.place_bytes(key, 0, bytes)?;
        let mut copied = Copied::default();
        if self.shared().has_sums {
            let lend = self.fill(key, bytes, look)?;
            let direct = self.shared().engine.config().direct;
            let file = TensorFile::from_fd(source, None, Access::Read, direct);
            file.and_then(|file| self.shared().engine.read(&file, offset, lend.target())?.wait().1)?;
            copied.memory_bytes = bytes as u64;
            let id = lend.id();
            lend.commit_as(label);
            return Ok((id, copied));
        }
        let extents = self.allocate(key, bytes, look)?;
        let stored = self.stored((key, label), bytes, 0, Home::Swap(extents.clone()));
        let filled = (|| {
            let parts = self.shared().store().locate(&stored)?;
            let mut at = offset;
            for part in parts {
                let (from, to) = ((source, at), (part.fd.as_fd(), part.offset));
                copy(&self.shared().engine, from, to, part.bytes, &mut copied)
                    .map_err(|error| named(error, &part, at))?;
                at += part.bytes;
            }
            Ok(())
        })();
        if let Err(error) = filled {
            self.shared().room().free(extents);
            return Err(error);
        }
        let id = self.replace(key, place_bytes, stored, true, look)?;
        self.shared().stir();
        Ok((id, copied))
    }
}

fn named(error: IoError, part: &Located, at: u64) -> Error {
    let error = if error.path().is_none() { error.at_path(&part.path) } else { error };
    Error::Io(if error.offset().is_none() { error.at_offset(at) } else { error })
}

/// Copies a range between two files, each with where it begins there, by the cheapest way that works.
fn copy(
    engine: &Engine,
    (source, source_offset): (BorrowedFd<'_>, u64),
    (target, target_offset): (BorrowedFd<'_>, u64),
    bytes: u64,
    copied: &mut Copied,
) -> Result<(), IoError> {
    let block = fs::space(target).map_or(4096, |space| space.block_bytes.max(512));
    let whole = bytes / block * block;
    let is_aligned = source_offset.is_multiple_of(block) && target_offset.is_multiple_of(block);
    let mut done = 0;
    if is_aligned && whole > 0 && clone_range(source, source_offset, target, target_offset, whole).is_ok() {
        copied.shared_bytes += whole;
        done = whole;
    }
    while done < bytes {
        let len = usize::try_from(bytes - done).unwrap_or(usize::MAX).min(1 << 30);
        match fs::copy_between((source, source_offset + done), (target, target_offset + done), len) {
            Ok(0) => {
                let detail = format!("the file ends {} bytes before the range that was to be copied", bytes - done);
                return Err(IoError::new(ErrorKind::UnexpectedEof, "copy", detail).after_bytes(done));
            }
            Ok(count) => {
                copied.kernel_bytes += count as u64;
                done += count as u64;
            }
            Err(Errno::INTR | Errno::AGAIN) => {}
            // Of other file systems, of files in memory, of kernels that cannot: the same by hand, which says what is wrong.
            Err(_) => {
                return through_memory(engine, (source, source_offset), (target, target_offset), done..bytes, copied);
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
    copied: &mut Copied,
) -> Result<(), IoError> {
    let source = TensorFile::from_fd(source, None, Access::Read, DirectMode::Preferred)?;
    let target = TensorFile::from_fd(target, None, Access::Write, DirectMode::Preferred)?;
    let buffer = Buffer::zeroed(COPY_BYTES.min(range.end - range.start) as usize);
    let mut rest = Some(buffer.map_err(|error| IoError::from_io("allocate", &error))?.into_region());
    let mut at = range.start;
    while at < range.end {
        let lost = || IoError::new(ErrorKind::Io, "copy", "the memory of a transfer did not come home");
        let whole = rest.take().ok_or_else(lost)?;
        let (part, behind) = whole.split_at(COPY_BYTES.min(range.end - at) as usize);
        let (part, read) = engine.read(&source, source_offset + at, part)?.wait();
        read?;
        let part = part.ok_or_else(lost)?;
        engine.write(&target, target_offset + at, part.region(), WriteOptions::default())?.wait().1?;
        let bytes = part.len() as u64;
        copied.memory_bytes += bytes;
        at += bytes;
        rest = part.join(behind).ok();
    }
    Ok(())
}
