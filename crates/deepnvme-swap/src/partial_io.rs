//! Reads and writes ranges of an item, in memory or directly on disk.

use std::ops::Range;
use std::sync::Arc;

use deepnvme_io::mem::{Region, RegionMut};
use deepnvme_io::{ReadItem, WriteItem, WriteOptions};

use crate::borrowed::Borrowed;
use crate::error::{Error, Result};
use crate::options::CancelCheck;
use crate::stop_check::StopCheck;
use crate::store::DiskRange;

/// Bytes per copy.
const COPY_BYTES: usize = 1 << 20;

impl Borrowed {
    /// Reads the bytes from `from` on into `target`, in CPU or GPU memory. GPU memory is written once its stream has
    /// reached this point.
    ///
    /// # Errors
    /// `Invalid` for a range outside the item, or in several places on disk if `target` is not contiguous; `Io`;
    /// `Interrupted`; `Closed`.
    pub fn read_at(&self, from: usize, target: RegionMut, is_cancelled: CancelCheck<'_>) -> Result<()> {
        let range = self.check(from, target.len())?;
        if self.offset().is_some() {
            let (source, gpus) = (self.region(), self.scheduler().engine.gpu_access());
            // The caller's stream may still use the memory.
            gpus.record_events([&target.region()])?.wait()?;
            return copy(range.len(), |at, step| {
                source.copy_to_slice(from + at, step);
                gpus.copy_from_slice(&target, at, step).map_err(Error::from)
            });
        }
        let ranges = self.disk_ranges(range)?;
        let mut items = Vec::with_capacity(ranges.len());
        let (mut rest, mut bytes) = (Some(target), 0);
        let last = ranges.len().saturating_sub(1);
        for (index, DiskRange { file, offset, bytes: len, .. }) in ranges.into_iter().enumerate() {
            let Some(whole) = rest.take() else { break };
            let target = if index == last {
                whole
            } else if whole.is_contiguous() {
                let (part, behind) = whole.split_at(len);
                rest = Some(behind);
                part
            } else {
                return Err(not_contiguous());
            };
            bytes += len as u64;
            items.push(ReadItem { file, offset, target });
        }
        if bytes > 0 {
            let mut stop = StopCheck::new(self.scheduler(), is_cancelled);
            let read = stop.wait(self.scheduler().engine.read_batch(items)?).1;
            stop.outcome(&self.key(), read.map_err(Error::from))?;
            self.scheduler().items.lock().stats.bytes_read += bytes;
        }
        Ok(())
    }

    /// Writes `source`, in CPU or GPU memory, over the bytes from `from` on. GPU memory is read once its stream has
    /// reached this point.
    ///
    /// # Errors
    /// `Invalid` for a shared borrow, for a range outside the item, or in several places on disk if `source` is not
    /// contiguous; `Io`; `Interrupted`; `Closed`. After a failure on disk or an interrupt, part of the range may have
    /// been written.
    pub fn write_at(&self, from: usize, source: &Region, is_cancelled: CancelCheck<'_>) -> Result<()> {
        if !self.is_exclusive() {
            return Err(Error::Invalid(
                "an item that is borrowed shared cannot be written to; borrow it exclusively".into(),
            ));
        }
        let range = self.check(from, source.len())?;
        if self.offset().is_some() {
            let (target, gpus) = (self.target(), self.scheduler().engine.gpu_access());
            gpus.record_events([source])?.wait()?;
            return copy(range.len(), |at, step| {
                gpus.copy_to_slice(source, at, step)?;
                target.copy_from_slice(from + at, step);
                Ok(())
            });
        }
        let ranges = self.disk_ranges(range)?;
        if ranges.len() > 1 && !source.is_contiguous() {
            return Err(not_contiguous());
        }
        let part =
            |at: usize, len: usize| if source.is_contiguous() { source.slice(at..at + len) } else { source.clone() };
        let item = |range: DiskRange| WriteItem {
            file: range.file,
            offset: range.offset,
            source: part(range.start, range.bytes),
        };
        let items: Vec<WriteItem> = ranges.into_iter().map(item).collect();
        if !items.is_empty() {
            let mut stop = StopCheck::new(self.scheduler(), is_cancelled);
            let written = stop.wait(self.scheduler().engine.write_batch(items, WriteOptions::default())?).1;
            // Even after a failure, the disk may differ from the copy in memory.
            self.scheduler().items.lock().residency.disk_changed(self.id());
            let bytes = stop.outcome(&self.key(), written.map_err(Error::from))?.bytes;
            self.scheduler().items.lock().stats.bytes_written += bytes;
        }
        Ok(())
    }

    fn check(&self, from: usize, bytes: usize) -> Result<Range<usize>> {
        match from.checked_add(bytes).filter(|end| *end <= self.len()) {
            Some(end) => Ok(from..end),
            None => {
                Err(Error::Invalid(format!("{bytes} bytes at offset {from} exceed an item of {} bytes", self.len())))
            }
        }
    }

    fn key(&self) -> Arc<str> {
        self.scheduler().store().get(self.id()).map_or_else(|| Arc::from(""), |stored| Arc::clone(&stored.key))
    }

    fn disk_ranges(&self, range: Range<usize>) -> Result<Vec<DiskRange>> {
        let store = self.scheduler().store();
        let stored = store.get(self.id()).ok_or(Error::CLOSED)?;
        store.disk_ranges(stored, range, false)
    }
}

/// Copies in steps of bounded size.
fn copy(bytes: usize, mut each: impl FnMut(usize, &mut [u8]) -> Result<()>) -> Result<()> {
    let mut step = vec![0; COPY_BYTES.min(bytes)];
    (0..bytes).step_by(COPY_BYTES).try_for_each(|at| each(at, &mut step[..COPY_BYTES.min(bytes - at)]))
}

fn not_contiguous() -> Error {
    Error::Invalid("this range is in several places on disk; use contiguous memory for it".into())
}
