//! A backend whose schedule is a function of a seed, over a disk whose power can be cut.
//!
//! [`SimBackend`] decides when an op takes effect and in which order completions come home; time is
//! counted in calls of `reap`, so nothing sleeps and every schedule can be had again. [`SimDisk`] keeps a
//! journal of what was written and what was synced, from which [`SimDisk::crash_image`] draws contents
//! that a power cut could leave.
//!
//! The bytes themselves go to the file that the op names (put it on tmpfs for speed), moved by a carrier:
//! a real backend that is given one op at a time. So this crate needs no unsafe code of its own to write
//! an op's memory, and sizes, truncation and reopening by path stay true for the engine above.

mod backend;
mod journal;

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use backend::SimBackend;
use deepnvme_io::backend::{Backend, BackendSetup};
use deepnvme_io::op::Op;
use journal::Journal;
use rustix::fs::{AtFlags, StatxFlags};

use crate::rng::Rng;

/// The disk that the simulated backends of one engine share. Cheap to clone.
#[derive(Clone, Debug)]
pub struct SimDisk {
    seed: u64,
    files: Arc<Mutex<HashMap<FileKey, Journal>>>,
}

/// What stays the same when a file is opened twice, and differs when its inode is used again.
type FileKey = (u32, u32, u64, i64, u32);

impl SimDisk {
    /// A disk on which every file is durable as it is when a backend first touches it.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { seed, files: Arc::default() }
    }

    /// A backend on this disk. `carrier` moves the bytes of one op at a time.
    pub fn backend(&self, setup: &BackendSetup, carrier: Box<dyn Backend>) -> SimBackend {
        let rng = Rng::keyed(self.seed, &[u64::from(setup.worker_index)]);
        SimBackend::new(self.clone(), setup.queue_depth, carrier, rng)
    }

    /// A content that the file could have after a power cut now: synced writes are there; each other one is
    /// there, lost, or torn between sectors. `None` for a file that no backend has touched.
    ///
    /// # Panics
    /// When the file cannot be examined.
    #[must_use]
    pub fn crash_image(&self, file: impl AsFd, crash_seed: u64) -> Option<Vec<u8>> {
        let key = file_key(file).expect("statx of an open file");
        self.files().get(&key).map(|journal| journal.crash_image(&mut Rng::keyed(self.seed, &[crash_seed])))
    }

    /// Writes to the file that a power cut now could lose.
    ///
    /// # Panics
    /// When the file cannot be examined.
    #[must_use]
    pub fn unsynced_writes(&self, file: impl AsFd) -> usize {
        let key = file_key(file).expect("statx of an open file");
        self.files().get(&key).map_or(0, Journal::unsynced)
    }

    /// Runs `change` on the journal of the op's file, which starts with what the file holds now.
    /// Ops on things that have no content (folders, pipes) have no journal.
    fn with_journal<T>(&self, op: &Op, change: impl FnOnce(&mut Journal) -> T) -> Option<T> {
        let key = file_key(&*op.file).ok()?;
        let mut files = self.files();
        if let std::collections::hash_map::Entry::Vacant(vacant) = files.entry(key) {
            vacant.insert(Journal::of_file(&op.file)?);
        }
        files.get_mut(&key).map(change)
    }

    fn files(&self) -> MutexGuard<'_, HashMap<FileKey, Journal>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn file_key(file: impl AsFd) -> rustix::io::Result<FileKey> {
    let flags = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    let stat = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, flags)?;
    Ok((stat.stx_dev_major, stat.stx_dev_minor, stat.stx_ino, stat.stx_btime.tv_sec, stat.stx_btime.tv_nsec))
}
