//! What is where on disk: each item's stretches of the swap file, or of the file that it was adopted from.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use deepnvme_io::{Error as IoError, TensorFile};

use crate::error::Result;
use crate::extent_allocator::{Extent, Extents};
use crate::slot_allocator::Id;
use crate::swap_files::{Files, Located};

/// Bytes behind the end that are kept for items to come.
const SPARE_BYTES: u64 = 64 << 20;

/// Where the bytes of an item are on disk.
#[derive(Clone, Debug)]
pub(crate) enum Home {
    /// Stretches of the swap file, in the order in which they hold it.
    Swap(Vec<Extent>),
    /// Part of somebody else's file, which is only read.
    Adopted { file: Arc<TensorFile>, offset: u64 },
}

/// An item on disk.
#[derive(Clone, Debug)]
pub(crate) struct Stored {
    pub(crate) key: Arc<str>,
    /// What the caller says of it.
    pub(crate) label: Arc<str>,
    pub(crate) bytes: usize,
    /// Bytes of its place in memory in front of the first one: those of an adopted file lie there as within a page of it.
    pub(crate) head: usize,
    pub(crate) home: Home,
    /// Of what was written last, where sums are kept.
    pub(crate) sums: Option<Arc<[u64]>>,
}

/// A file, where in it, which of the item's bytes begin there, and how many.
pub(crate) type Piece = (Arc<TensorFile>, u64, usize, usize);

/// All items on disk.
#[derive(Debug)]
pub(crate) struct Store {
    pub(crate) files: Arc<Files>,
    pub(crate) extents: Extents,
    /// Bytes that the file system has set aside.
    pub(crate) allocated: u64,
    items: HashMap<Id, Stored>,
    adopted: Vec<(PathBuf, std::sync::Weak<TensorFile>)>,
}

impl Store {
    pub(crate) fn new(files: Files) -> Self {
        let extents = Extents::new(files.grain());
        Self { files: Arc::new(files), extents, allocated: 0, items: HashMap::new(), adopted: Vec::new() }
    }

    /// Bytes of the swap file that belong to somebody.
    pub(crate) fn used(&self) -> u64 {
        self.extents.used()
    }

    /// Whether much more is set aside than anybody has.
    pub(crate) fn is_far_from_its_end(&self) -> bool {
        self.allocated > 2 * self.extents.end() + SPARE_BYTES
    }

    pub(crate) fn insert(&mut self, id: Id, stored: Stored) {
        self.items.insert(id, stored);
    }

    pub(crate) fn get(&self, id: Id) -> Option<&Stored> {
        self.items.get(&id)
    }

    pub(crate) fn set_label(&mut self, id: Id, label: &str) {
        if let Some(stored) = self.items.get_mut(&id) {
            stored.label = label.into();
        }
    }

    pub(crate) fn set_sums(&mut self, id: Id, sums: Vec<u64>) {
        if let Some(stored) = self.items.get_mut(&id) {
            stored.sums = Some(sums.into());
        }
    }

    /// An item is no more; its stretches are still the caller's to free.
    pub(crate) fn take(&mut self, id: Id) -> Option<Stored> {
        self.items.remove(&id)
    }

    /// Where a range of an item's bytes is: file, offset there, offset from the range's start, bytes. Of whole items in the
    /// swap file with the rest of the last grain, so that nothing of it is ragged.
    pub(crate) fn pieces(&self, stored: &Stored, range: std::ops::Range<usize>, is_whole: bool) -> Vec<Piece> {
        let extents = match &stored.home {
            Home::Adopted { file, offset } => {
                return vec![(Arc::clone(file), offset + range.start as u64, 0, range.len())];
            }
            Home::Swap(extents) => extents,
        };
        let (mut pieces, mut at) = (Vec::new(), 0_usize);
        for extent in extents {
            let len = (extent.end - extent.start) as usize;
            let (from, to) = (range.start.max(at), if is_whole { at + len } else { range.end.min(at + len) });
            if from < to {
                let offset = extent.start + (from - at) as u64;
                pieces.push((Arc::clone(self.files.file()), offset, from - range.start, to - from));
            }
            at += len;
        }
        pieces
    }

    /// The same as files that others can use.
    pub(crate) fn locate(&self, stored: &Stored) -> Result<Vec<Located>, IoError> {
        let mut located = Vec::new();
        for (file, offset, _, bytes) in self.pieces(stored, 0..stored.bytes, false) {
            let end = offset + bytes as u64;
            match &stored.home {
                Home::Swap(_) => located.extend(self.files.locate(&(offset..end))?),
                Home::Adopted { .. } => {
                    let mut at = offset;
                    while at < end {
                        let (fd, path, offset, together) = file.locate(at)?;
                        let bytes = together.min(end - at);
                        located.push(Located { fd, path: path.to_path_buf(), offset, bytes });
                        at += bytes;
                    }
                }
            }
        }
        Ok(located)
    }

    /// A file that is only read, if it is open already.
    pub(crate) fn adopted(&mut self, path: &Path) -> Option<Arc<TensorFile>> {
        self.adopted.retain(|(_, file)| file.strong_count() > 0);
        self.adopted.iter().find(|(other, _)| other == path).and_then(|(_, file)| file.upgrade())
    }

    /// A file that is open now.
    pub(crate) fn add_adopted(&mut self, path: PathBuf, file: &Arc<TensorFile>) {
        self.adopted.push((path, Arc::downgrade(file)));
    }
}
