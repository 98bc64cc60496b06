//! What is where on disk: each item's stretches of the swap file, or of the file that it was adopted from.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};

use deepnvme_io::{Access, DirectMode, Error as IoError, ErrorKind, OpenOptions, Target, TensorFile, fs};

use crate::error::Result;
use crate::extents::{Extent, Extents};
use crate::files::{Files, Located};
use crate::places::Id;
use crate::sync::outer::Mutex;

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
    pub(crate) files: Files,
    extents: Extents,
    items: HashMap<Id, Stored>,
    adopted: Vec<(PathBuf, std::sync::Weak<TensorFile>)>,
}

impl Store {
    pub(crate) fn new(files: Files) -> Self {
        let extents = Extents::new(files.grain());
        Self { files, extents, items: HashMap::new(), adopted: Vec::new() }
    }

    /// Bytes of the swap file that belong to somebody.
    pub(crate) fn used(&self) -> u64 {
        self.extents.used()
    }

    /// Stretches for so many bytes. A full disk is an error here, so that writing back will not find one.
    pub(crate) fn allocate(&mut self, bytes: usize) -> Result<Vec<Extent>, IoError> {
        let too_large = || IoError::new(ErrorKind::InvalidInput, "grow a swap file", "more than any file has");
        let extents = self.extents.allocate(bytes as u64, i64::MAX as u64).ok_or_else(too_large)?;
        let Err(error) = self.files.reach(self.extents.end()) else { return Ok(extents) };
        extents.into_iter().for_each(|extent| self.extents.free(extent));
        // What is there already may be enough, in pieces.
        self.extents.allocate(bytes as u64, self.files.allocated()).ok_or(error)
    }

    pub(crate) fn free(&mut self, extents: Vec<Extent>) {
        extents.into_iter().for_each(|extent| self.extents.free(extent));
        self.files.shrink(self.extents.end());
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

    /// An item is no more.
    pub(crate) fn remove(&mut self, id: Id) {
        if let Some(Stored { home: Home::Swap(extents), .. }) = self.items.remove(&id) {
            self.free(extents);
        }
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
    fn adopted(&mut self, path: &Path) -> Option<Arc<TensorFile>> {
        self.adopted.retain(|(_, file)| file.strong_count() > 0);
        self.adopted.iter().find(|(other, _)| other == path).and_then(|(_, file)| file.upgrade())
    }
}

/// A file that is only read; one that is open already is opened once. The store is locked for moments only: a network file
/// system may take its time.
pub(crate) fn adopt(store: &Mutex<Store>, target: &Target, direct: DirectMode) -> Result<Arc<TensorFile>, IoError> {
    let lock = || store.lock().unwrap_or_else(PoisonError::into_inner);
    let path = target.path();
    let known = lock().adopted(&path);
    // Under the same name there may be another file by now.
    if let Some(file) = known.filter(|file| is_same(file, &path)) {
        return Ok(file);
    }
    let file = TensorFile::open(target, OpenOptions { access: Access::Read, create: false, direct })?;
    lock().adopted.push((path, Arc::downgrade(&file)));
    Ok(file)
}

fn is_same(file: &TensorFile, path: &Path) -> bool {
    let (Ok(open), Ok(named)) = (fs::stat_of(file.descriptor()), fs::stat(path)) else { return false };
    open.identity == named.identity
}
