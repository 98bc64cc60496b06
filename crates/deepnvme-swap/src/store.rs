//! Where each item is on disk: extents of the swap file, or a range of an attached file.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use deepnvme_io::TensorFile;

use crate::error::{Error, Result};
use crate::extent_allocator::{Extent, ExtentAllocator};
use crate::slot_allocator::ItemId;
use crate::swap_files::{FileExtent, SwapFiles};

/// Unused bytes that a file may keep.
const SPARE_BYTES: u64 = 64 << 20;

/// Where the bytes of an item are on disk.
#[derive(Clone, Debug)]
pub(crate) enum DiskLocation {
    /// Extents of the swap file, in the order of the item's bytes.
    Swap(Vec<Extent>),
    /// Part of an attached file, which is only read.
    Attached { file: Arc<TensorFile>, offset: u64 },
    /// Part of an attached file that was given up, since the swapper is closed.
    Detached,
}

/// An item on disk.
#[derive(Clone, Debug)]
pub(crate) struct StoredItem {
    pub(crate) key: Arc<str>,
    /// The caller's text.
    pub(crate) label: Arc<str>,
    pub(crate) bytes: usize,
    /// Bytes of its slot before the first one, so that an attached file has the same offset within a page in memory and
    /// on disk.
    pub(crate) padding: usize,
    pub(crate) location: DiskLocation,
    /// The checksums of the last write, if enabled.
    pub(crate) checksums: Option<Arc<[u64]>>,
}

impl StoredItem {
    pub(crate) fn new((key, label): (&str, &str), bytes: usize, padding: usize, location: DiskLocation) -> Self {
        Self { key: key.into(), label: label.into(), bytes, padding, location, checksums: None }
    }
}

/// A contiguous part of an item on disk.
#[derive(Clone, Debug)]
pub(crate) struct DiskRange {
    pub(crate) file: Arc<TensorFile>,
    /// Offset in the file.
    pub(crate) offset: u64,
    /// Offset from the start of the requested range.
    pub(crate) start: usize,
    pub(crate) bytes: usize,
}

/// All items on disk.
#[derive(Debug)]
pub(crate) struct Store {
    /// None once the swapper is closed.
    files: Option<Arc<SwapFiles>>,
    /// The alignment of extents and slots.
    pub(crate) alignment: u64,
    pub(crate) extents: ExtentAllocator,
    /// Bytes that the file system has preallocated.
    pub(crate) allocated: u64,
    items: HashMap<ItemId, StoredItem>,
    attached: Vec<(PathBuf, std::sync::Weak<TensorFile>)>,
}

impl Store {
    pub(crate) fn new(files: SwapFiles) -> Self {
        let alignment = files.alignment();
        let (files, extents) = (Some(Arc::new(files)), ExtentAllocator::new(alignment));
        Self { files, alignment, extents, allocated: 0, items: HashMap::new(), attached: Vec::new() }
    }

    /// The swap files.
    ///
    /// # Errors
    /// `Closed`.
    pub(crate) fn files(&self) -> Result<&Arc<SwapFiles>> {
        self.files.as_ref().ok_or(Error::CLOSED)
    }

    /// Gives up all files, for the caller to close them without the lock. The items keep their labels.
    pub(crate) fn close(&mut self) -> (Option<Arc<SwapFiles>>, Vec<DiskLocation>) {
        self.allocated = 0;
        let is_attached = |stored: &&mut StoredItem| matches!(stored.location, DiskLocation::Attached { .. });
        let attached = self.items.values_mut().filter(is_attached);
        let attached = attached.map(|stored| std::mem::replace(&mut stored.location, DiskLocation::Detached)).collect();
        (self.files.take(), attached)
    }

    /// Bytes of the swap file in use.
    pub(crate) fn used(&self) -> u64 {
        self.extents.used()
    }

    /// Whether much more is preallocated than used.
    pub(crate) fn has_much_unused(&self) -> bool {
        self.allocated > 2 * self.extents.end() + SPARE_BYTES
    }

    pub(crate) fn insert(&mut self, id: ItemId, stored: StoredItem) {
        self.items.insert(id, stored);
    }

    pub(crate) fn get(&self, id: ItemId) -> Option<&StoredItem> {
        self.items.get(&id)
    }

    pub(crate) fn set_label(&mut self, id: ItemId, label: &str) {
        if let Some(stored) = self.items.get_mut(&id) {
            stored.label = label.into();
        }
    }

    pub(crate) fn set_checksums(&mut self, id: ItemId, checksums: Vec<u64>) {
        if let Some(stored) = self.items.get_mut(&id) {
            stored.checksums = Some(checksums.into());
        }
    }

    /// Removes an item; the caller frees its extents.
    pub(crate) fn remove(&mut self, id: ItemId) -> Option<StoredItem> {
        self.items.remove(&id)
    }

    /// Returns the places on disk of a range of an item. With `is_whole`, the last one of a swapped item extends to the
    /// alignment, so direct I/O needs no partial block.
    ///
    /// # Errors
    /// `Closed`.
    pub(crate) fn disk_ranges(
        &self,
        stored: &StoredItem,
        range: std::ops::Range<usize>,
        is_whole: bool,
    ) -> Result<Vec<DiskRange>> {
        let files = self.files()?;
        let extents = match &stored.location {
            DiskLocation::Attached { file, offset } => {
                let (file, offset) = (Arc::clone(file), offset + range.start as u64);
                return Ok(vec![DiskRange { file, offset, start: 0, bytes: range.len() }]);
            }
            DiskLocation::Swap(extents) => extents,
            DiskLocation::Detached => return Err(Error::CLOSED),
        };
        let (mut ranges, mut at) = (Vec::new(), 0_usize);
        for extent in extents {
            let len = (extent.end - extent.start) as usize;
            let (from, to) = (range.start.max(at), if is_whole { at + len } else { range.end.min(at + len) });
            if from < to {
                let offset = extent.start + (from - at) as u64;
                let file = Arc::clone(files.file());
                ranges.push(DiskRange { file, offset, start: from - range.start, bytes: to - from });
            }
            at += len;
        }
        Ok(ranges)
    }

    /// The place of an item, with descriptors for others to use.
    ///
    /// # Errors
    /// `Closed`; `Io`.
    pub(crate) fn file_extents(&self, stored: &StoredItem) -> Result<Vec<FileExtent>> {
        let (files, mut found) = (self.files()?, Vec::new());
        for DiskRange { file, offset, bytes, .. } in self.disk_ranges(stored, 0..stored.bytes, false)? {
            let end = offset + bytes as u64;
            match &stored.location {
                DiskLocation::Swap(_) => found.extend(files.file_extents(&(offset..end))?),
                DiskLocation::Attached { .. } | DiskLocation::Detached => {
                    let mut at = offset;
                    while at < end {
                        let (fd, path, offset, together) = file.locate(at)?;
                        let bytes = together.min(end - at);
                        found.push(FileExtent { fd, path: path.to_path_buf(), offset, bytes });
                        at += bytes;
                    }
                }
            }
        }
        Ok(found)
    }

    /// An attached file that is open already.
    pub(crate) fn find_attached(&mut self, path: &Path) -> Option<Arc<TensorFile>> {
        self.attached.retain(|(_, file)| file.strong_count() > 0);
        self.attached.iter().find(|(other, _)| other == path).and_then(|(_, file)| file.upgrade())
    }

    /// Records an attached file that was opened.
    pub(crate) fn add_attached(&mut self, path: PathBuf, file: &Arc<TensorFile>) {
        self.attached.push((path, Arc::downgrade(file)));
    }
}
