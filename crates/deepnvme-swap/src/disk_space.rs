//! Disk space for items: allocates extents and resizes the swap files.
//!
//! Resizing a file may take long, so it has its own lock. The store is locked only briefly: threads that want an item
//! in memory never wait for a disk.

use std::path::Path;
use std::sync::Arc;

use deepnvme_file::Target;
use deepnvme_io::{Access, DirectMode, Error as IoError, ErrorKind, OpenOptions, TensorFile, fs};

use crate::error::Result;
use crate::extent_allocator::Extent;
use crate::slot_allocator::ItemId;
use crate::store::{DiskLocation, Store};
use crate::swap_files::SwapFiles;
use crate::sync::outer::{Mutex, MutexGuard};
use crate::sync::recover;

/// The store and its files.
#[derive(Debug)]
pub(crate) struct DiskSpace {
    store: Mutex<Store>,
    /// Held while the files are resized; taken before the store.
    resizing: Mutex<()>,
}

impl DiskSpace {
    pub(crate) fn new(files: SwapFiles) -> Self {
        Self { store: Mutex::new(Store::new(files)), resizing: Mutex::new(()) }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Store> {
        recover(self.store.lock())
    }

    /// Allocates extents, and preallocates them in the file. A full disk is an error here, so write-back cannot fail
    /// for lack of space, unless the file system cannot preallocate.
    pub(crate) fn allocate(&self, bytes: usize) -> Result<Vec<Extent>> {
        let too_large = || IoError::new(ErrorKind::InvalidInput, "grow a swap file", "more bytes than a file can have");
        let extents = self.lock().extents.allocate(bytes as u64, i64::MAX as u64).ok_or_else(too_large)?;
        let Err(error) = self.grow_to(end_of(&extents)) else { return Ok(extents) };
        let mut store = self.lock();
        extents.into_iter().for_each(|extent| store.extents.free(extent));
        // The space that is preallocated already may be enough, in fragments.
        let allocated = store.allocated;
        let extents = store.extents.allocate(bytes as u64, allocated).unwrap_or_default();
        // A gap may lie in a part of the file that another thread is still preallocating.
        if bytes == 0 || (!extents.is_empty() && end_of(&extents) <= allocated) {
            return Ok(extents);
        }
        extents.into_iter().for_each(|extent| store.extents.free(extent));
        Err(error)
    }

    /// Frees extents, and shrinks the files if much space is unused.
    pub(crate) fn free(&self, extents: Vec<Extent>) {
        let is_oversized = {
            let mut store = self.lock();
            extents.into_iter().for_each(|extent| store.extents.free(extent));
            store.has_much_unused()
        };
        if is_oversized {
            self.shrink();
        }
    }

    /// Removes items and frees their extents.
    pub(crate) fn remove(&self, ids: &[ItemId]) {
        // This may close an attached file, which must not happen under the lock.
        let removed: Vec<DiskLocation> = {
            let mut store = self.lock();
            ids.iter().filter_map(|id| store.remove(*id)).map(|stored| stored.location).collect()
        };
        for location in removed {
            if let DiskLocation::Swap(extents) = location {
                self.free(extents);
            }
        }
    }

    /// Opens a file for reading, or reuses an open one. This may take long on a network, so it happens outside the
    /// lock.
    pub(crate) fn open_attached(&self, target: &Target, direct: DirectMode) -> Result<Arc<TensorFile>, IoError> {
        let path = target.path();
        let known = self.lock().find_attached(&path);
        // The path may name another file by now.
        if let Some(file) = known.filter(|file| is_same(file, &path)) {
            return Ok(file);
        }
        let file = deepnvme_file::open(target, OpenOptions { access: Access::Read, create: false, direct })?;
        self.lock().add_attached(path, &file);
        Ok(file)
    }

    /// Deletes the swap files, and closes them and the attached files. A transfer that others still wait for keeps its
    /// file open until it ends.
    pub(crate) fn delete_files(&self) {
        let _growth = recover(self.resizing.lock());
        let (files, _attached) = self.lock().close();
        if let Some(files) = files {
            files.remove();
        }
    }

    fn grow_to(&self, end: u64) -> Result<()> {
        if end <= self.lock().allocated {
            return Ok(());
        }
        let _growth = recover(self.resizing.lock());
        let files = {
            let store = self.lock();
            if end <= store.allocated {
                return Ok(());
            }
            Arc::clone(store.files()?)
        };
        let reached = files.preallocate(end)?;
        self.lock().allocated = reached;
        Ok(())
    }

    fn shrink(&self) {
        let _growth = recover(self.resizing.lock());
        let (files, end) = {
            let mut store = self.lock();
            let Ok(files) = store.files().cloned() else { return };
            if !store.has_much_unused() {
                return;
            }
            // Set before the file shrinks: allocations behind the end have to preallocate again.
            store.allocated = store.extents.end();
            (files, store.allocated)
        };
        files.truncate(end);
    }
}

fn is_same(file: &TensorFile, path: &Path) -> bool {
    let (Ok(open), Ok(named)) = (fs::stat_of(file.descriptor()), fs::stat(path)) else { return false };
    open.identity == named.identity
}

fn end_of(extents: &[Extent]) -> u64 {
    extents.iter().map(|extent| extent.end).max().unwrap_or(0)
}

#[cfg(all(test, not(loom), not(simulated)))]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use std::thread;

    use super::*;

    fn disk(folder: &std::path::Path) -> DiskSpace {
        DiskSpace::new(SwapFiles::new(&[folder.to_path_buf()], 1 << 20, false, DirectMode::Preferred).unwrap())
    }

    #[test]
    fn allocated_extents_are_preallocated() {
        let folder = tempfile::tempdir().unwrap();
        let disk = Arc::new(disk(folder.path()));
        let threads: Vec<_> = (0..4_u64)
            .map(|seed| {
                let disk = Arc::clone(&disk);
                thread::spawn(move || {
                    let mut rng = deepnvme_testkit::rng::Rng::new(seed);
                    let mut held: Vec<Vec<Extent>> = Vec::new();
                    for _ in 0..400 {
                        if held.len() > 6 || (rng.chance(400) && !held.is_empty()) {
                            let index = rng.below(held.len() as u64) as usize;
                            disk.free(held.swap_remove(index));
                        } else {
                            held.push(disk.allocate(rng.within(1..24 << 20) as usize).unwrap());
                        }
                        // The extents of this thread stay preallocated, whatever the other threads do.
                        let file = Arc::clone(disk.lock().files().unwrap().file());
                        let end = held.iter().map(|extents| end_of(extents)).max().unwrap_or(0);
                        let bytes = fs::stat_of(file.descriptor()).unwrap().bytes;
                        assert!(end <= bytes, "{end} of {bytes}");
                    }
                    held.into_iter().for_each(|extents| disk.free(extents));
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(disk.lock().used(), 0);
    }

    #[test]
    fn the_store_is_unlocked_while_a_file_grows() {
        let folder = tempfile::tempdir().unwrap();
        let disk = disk(folder.path());
        let held = disk.allocate(1 << 20).unwrap();
        let resizing = recover(disk.resizing.lock());
        thread::scope(|scope| {
            let waits = scope.spawn(|| disk.allocate(1 << 30).unwrap());
            while disk.lock().extents.end() < 1 << 30 {
                thread::yield_now();
            }
            // An existing gap needs no resize.
            disk.free(held);
            let again = disk.allocate(1 << 20).unwrap();
            assert_eq!(end_of(&again), 1 << 20);
            drop(resizing);
            disk.free(waits.join().unwrap());
        });
    }
}
