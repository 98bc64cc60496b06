//! Parts of an item: read and written in memory where it is there, else on disk, without the rest of it.

use std::ops::Range;

use deepnvme_io::mem::{Region, RegionMut};
use deepnvme_io::{ReadItem, WriteItem, WriteOptions};

use crate::borrowed::Lend;
use crate::error::{Error, Result};
use crate::store::{Piece, Stored};

/// Bytes that are copied at once.
const COPY_BYTES: usize = 1 << 20;

impl Lend {
    /// Reads the bytes from `from` on into `target`, in memory of the host or of a GPU; there, when its stream has come so
    /// far.
    ///
    /// # Errors
    /// `Invalid` where there are not so many; `Io`.
    pub fn read_part(&self, from: usize, target: RegionMut) -> Result<()> {
        let range = self.check(from, target.len())?;
        if self.offset().is_some() {
            let (source, gpus) = (self.region(), self.shared().engine.gpu_access());
            // What the caller's stream still computes with is not overwritten.
            gpus.points([&target.region()])?.wait()?;
            return copy(range.len(), |at, step| {
                source.copy_to_slice(from + at, step);
                gpus.copy_from_slice(&target, at, step).map_err(Error::from)
            });
        }
        let (_, pieces) = self.pieces(range)?;
        let mut items = Vec::with_capacity(pieces.len());
        let (mut rest, mut bytes) = (Some(target), 0);
        let last = pieces.len().saturating_sub(1);
        for (index, (file, offset, _, len)) in pieces.into_iter().enumerate() {
            let Some(whole) = rest.take() else { break };
            let target = if index == last {
                whole
            } else if whole.is_contiguous() {
                let (part, behind) = whole.split_at(len);
                rest = Some(behind);
                part
            } else {
                return Err(scattered());
            };
            bytes += len as u64;
            items.push(ReadItem { file, offset, target });
        }
        if bytes > 0 {
            let read = self.shared().engine.read_batch(items)?.wait().1;
            let mut core = self.shared().desk.lock();
            // Closing empties the files, also under a transfer.
            if core.is_closed {
                return Err(Error::SHUT);
            }
            read?;
            core.stats.bytes_read += bytes;
        }
        Ok(())
    }

    /// Writes `source`, from memory of the host or of a GPU, over the bytes from `from` on; of a GPU, when its stream has
    /// come so far.
    ///
    /// # Errors
    /// `Invalid` where there are not so many, or it was not lent to be changed; `Io`: of an item on disk, a part of the range
    /// may have been written.
    pub fn write_part(&self, from: usize, source: &Region) -> Result<()> {
        if !self.is_exclusive() {
            return Err(Error::Invalid("what is lent shared cannot be written to; lend it exclusively".into()));
        }
        let range = self.check(from, source.len())?;
        if self.offset().is_some() {
            let (target, gpus) = (self.target(), self.shared().engine.gpu_access());
            gpus.points([source])?.wait()?;
            return copy(range.len(), |at, step| {
                gpus.copy_to_slice(source, at, step)?;
                target.copy_from_slice(from + at, step);
                Ok(())
            });
        }
        let (_, pieces) = self.pieces(range)?;
        if pieces.len() > 1 && !source.is_contiguous() {
            return Err(scattered());
        }
        let part =
            |at: usize, len: usize| if source.is_contiguous() { source.slice(at..at + len) } else { source.clone() };
        let item = |(file, offset, at, len): Piece| WriteItem { file, offset, source: part(at, len) };
        let items: Vec<WriteItem> = pieces.into_iter().map(item).collect();
        if !items.is_empty() {
            let written = self.shared().engine.write_batch(items, WriteOptions::default())?.wait().1;
            let mut core = self.shared().desk.lock();
            if core.is_closed {
                return Err(Error::SHUT);
            }
            // Also after a failure: what memory may have is not what the disk has now.
            core.residency.rewritten(self.id());
            core.stats.bytes_written += written?.bytes;
        }
        Ok(())
    }

    fn check(&self, from: usize, bytes: usize) -> Result<Range<usize>> {
        match from.checked_add(bytes).filter(|end| *end <= self.len()) {
            Some(end) => Ok(from..end),
            None => {
                Err(Error::Invalid(format!("{bytes} bytes at offset {from} are outside an item of {}", self.len())))
            }
        }
    }

    fn pieces(&self, range: Range<usize>) -> Result<(Stored, Vec<Piece>)> {
        let store = self.shared().store();
        let stored = store.get(self.id()).cloned().ok_or(Error::SHUT)?;
        let pieces = store.pieces(&stored, range, false);
        Ok((stored, pieces))
    }
}

/// Copies so many bytes, some at a time.
fn copy(bytes: usize, mut each: impl FnMut(usize, &mut [u8]) -> Result<()>) -> Result<()> {
    let mut step = vec![0; COPY_BYTES.min(bytes)];
    (0..bytes).step_by(COPY_BYTES).try_for_each(|at| each(at, &mut step[..COPY_BYTES.min(bytes - at)]))
}

fn scattered() -> Error {
    Error::Invalid("this range is in several pieces on disk, for which the memory has to be contiguous".into())
}
