//! Room on disk: who has which stretch of the swap files, and how much of them the file system has set aside.
//!
//! Growing and cutting a file may take as long as the file system likes, so they have a lock of their own. The store is
//! locked for moments only: nobody who wants an item in memory waits for a disk.

use std::path::Path;
use std::sync::Arc;

use deepnvme_io::{Access, DirectMode, Error as IoError, ErrorKind, OpenOptions, Target, TensorFile, fs};

use crate::extent_allocator::Extent;
use crate::slot_allocator::Id;
use crate::store::{Home, Store};
use crate::swap_files::Files;
use crate::sync::outer::{Mutex, MutexGuard};
use crate::sync::recover;

/// The store, and the files that it is about.
#[derive(Debug)]
pub(crate) struct Room {
    store: Mutex<Store>,
    /// Of whoever grows or cuts the files; taken before the store.
    growth: Mutex<()>,
}

impl Room {
    pub(crate) fn new(files: Files) -> Self {
        Self { store: Mutex::new(Store::new(files)), growth: Mutex::new(()) }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Store> {
        recover(self.store.lock())
    }

    /// Stretches for so many bytes. A full disk is an error here, so that writing back will not find one.
    pub(crate) fn allocate(&self, bytes: usize) -> Result<Vec<Extent>, IoError> {
        let too_large = || IoError::new(ErrorKind::InvalidInput, "grow a swap file", "more than any file has");
        let extents = self.lock().extents.allocate(bytes as u64, i64::MAX as u64).ok_or_else(too_large)?;
        let Err(error) = self.reach(end_of(&extents)) else { return Ok(extents) };
        let mut store = self.lock();
        extents.into_iter().for_each(|extent| store.extents.free(extent));
        // What is there already may be enough, in pieces.
        let allocated = store.allocated;
        let extents = store.extents.allocate(bytes as u64, allocated).unwrap_or_default();
        // A gap may lie where another thread has not come to growing the file yet.
        if bytes == 0 || (!extents.is_empty() && end_of(&extents) <= allocated) {
            return Ok(extents);
        }
        extents.into_iter().for_each(|extent| store.extents.free(extent));
        Err(error)
    }

    /// Gives stretches back.
    pub(crate) fn free(&self, extents: Vec<Extent>) {
        let is_far = {
            let mut store = self.lock();
            extents.into_iter().for_each(|extent| store.extents.free(extent));
            store.is_far_from_its_end()
        };
        if is_far {
            self.cut();
        }
    }

    /// These items are no more.
    pub(crate) fn remove(&self, ids: &[Id]) {
        // A file that was adopted may be closed here, which is not done under the lock.
        let removed: Vec<Home> = {
            let mut store = self.lock();
            ids.iter().filter_map(|id| store.take(*id)).map(|stored| stored.home).collect()
        };
        for home in removed {
            if let Home::Swap(extents) = home {
                self.free(extents);
            }
        }
    }

    /// A file that is only read; one that is open already is opened once. Opening it may take a while, on a network.
    pub(crate) fn adopt(&self, target: &Target, direct: DirectMode) -> Result<Arc<TensorFile>, IoError> {
        let path = target.path();
        let known = self.lock().adopted(&path);
        // Under the same name there may be another file by now.
        if let Some(file) = known.filter(|file| is_same(file, &path)) {
            return Ok(file);
        }
        let file = TensorFile::open(target, OpenOptions { access: Access::Read, create: false, direct })?;
        self.lock().add_adopted(path, &file);
        Ok(file)
    }

    /// Does away with the files; what they had is gone.
    pub(crate) fn end(&self) {
        let _growth = recover(self.growth.lock());
        let files = {
            let mut store = self.lock();
            store.allocated = 0;
            Arc::clone(&store.files)
        };
        files.remove();
    }

    fn reach(&self, end: u64) -> Result<(), IoError> {
        if end <= self.lock().allocated {
            return Ok(());
        }
        let _growth = recover(self.growth.lock());
        let files = {
            let store = self.lock();
            if end <= store.allocated {
                return Ok(());
            }
            Arc::clone(&store.files)
        };
        let reached = files.reach(end)?;
        self.lock().allocated = reached;
        Ok(())
    }

    fn cut(&self) {
        let _growth = recover(self.growth.lock());
        let (files, end) = {
            let mut store = self.lock();
            if !store.is_far_from_its_end() {
                return;
            }
            // Whoever is given bytes behind the end from now on waits for the file to grow again.
            store.allocated = store.extents.end();
            (Arc::clone(&store.files), store.allocated)
        };
        files.cut(end);
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

    fn room(folder: &std::path::Path) -> Room {
        Room::new(Files::new(&[folder.to_path_buf()], 1 << 20, false, DirectMode::Preferred).unwrap())
    }

    #[test]
    fn the_file_reaches_as_far_as_everybody_was_given() {
        let folder = tempfile::tempdir().unwrap();
        let room = Arc::new(room(folder.path()));
        let threads: Vec<_> = (0..4_u64)
            .map(|seed| {
                let room = Arc::clone(&room);
                thread::spawn(move || {
                    let mut rng = deepnvme_testkit::rng::Rng::new(seed);
                    let mut held: Vec<Vec<Extent>> = Vec::new();
                    for _ in 0..400 {
                        if held.len() > 6 || (rng.chance(400) && !held.is_empty()) {
                            let index = rng.below(held.len() as u64) as usize;
                            room.free(held.swap_remove(index));
                        } else {
                            held.push(room.allocate(rng.within(1..24 << 20) as usize).unwrap());
                        }
                        // What this thread has is set aside, whatever the others do.
                        let file = Arc::clone(room.lock().files.file());
                        let end = held.iter().map(|extents| end_of(extents)).max().unwrap_or(0);
                        let bytes = fs::stat_of(file.descriptor()).unwrap().bytes;
                        assert!(end <= bytes, "{end} of {bytes}");
                    }
                    held.into_iter().for_each(|extents| room.free(extents));
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(room.lock().used(), 0);
    }

    #[test]
    fn nobody_waits_for_the_store_while_a_file_grows() {
        let folder = tempfile::tempdir().unwrap();
        let room = room(folder.path());
        let held = room.allocate(1 << 20).unwrap();
        let growth = recover(room.growth.lock());
        thread::scope(|scope| {
            let waits = scope.spawn(|| room.allocate(1 << 30).unwrap());
            while room.lock().extents.end() < 1 << 30 {
                thread::yield_now();
            }
            // A gap that is there needs no growing.
            room.free(held);
            let again = room.allocate(1 << 20).unwrap();
            assert_eq!(end_of(&again), 1 << 20);
            drop(growth);
            room.free(waits.join().unwrap());
        });
    }
}
