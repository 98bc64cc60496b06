//! A backend with a seeded schedule, over real files whose writes and syncs are recorded. `deepnvme-simulation`
//! simulates the whole file system instead, with its names and metadata.
//!
//! [`ScheduledBackend`] decides when an op takes effect and in which order completions are returned. Time is counted in
//! calls of `reap`, so nothing sleeps and every schedule is reproducible. A [`SimDevice`] performs the ops, for example
//! a [`JournaledDevice`]. [`SimDisk`] keeps a journal of writes and syncs, from which [`SimDisk::crash_image`] draws
//! possible contents after a power cut.
//!
//! The bytes go to the real file of the op (tmpfs is fastest), one op at a time through a real backend. So this
//! crate needs no unsafe code to write an op's memory, and file sizes, truncation and reopening by path are real.

mod device;
mod journal;
mod schedule;

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard};

use deepnvme_io::backend::{Backend, BackendSetup};
use deepnvme_io::op::Op;
use deepnvme_mem::sync::ignore_poison;
pub use device::JournaledDevice;
use journal::Journal;
use rustix::fs::{AtFlags, StatxFlags};
pub use schedule::{ScheduledBackend, SimDevice};

use crate::rng::Rng;

/// A disk shared by the scheduled backends of one engine. Cheap to clone.
#[derive(Clone, Debug)]
pub struct SimDisk {
    seed: u64,
    files: Arc<Mutex<HashMap<FileKey, Journal>>>,
}

/// Identifies a file: constant across opens, different when the inode is reused.
type FileKey = (u32, u32, u64, i64, u32);

impl SimDisk {
    /// Creates a disk. The contents of a file when a backend first uses it count as durable.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { seed, files: Arc::default() }
    }

    /// Creates a backend on this disk. `real_backend` moves the bytes of one op at a time.
    pub fn backend(&self, setup: &BackendSetup, real_backend: Box<dyn Backend>) -> ScheduledBackend<JournaledDevice> {
        let rng = Rng::keyed(self.seed, &[u64::from(setup.worker_index)]);
        ScheduledBackend::new(JournaledDevice { disk: self.clone(), real_backend }, setup.queue_depth, rng)
    }

    /// Returns possible contents of the file after a power cut now: synced writes are present, others are present,
    /// lost, or torn between sectors. `None` for a file that no backend used.
    ///
    /// # Panics
    /// If the file cannot be examined.
    #[must_use]
    pub fn crash_image(&self, file: impl AsFd, crash_seed: u64) -> Option<Vec<u8>> {
        let key = file_key(file).expect("statx of an open file");
        self.files().get(&key).map(|journal| journal.crash_image(&mut Rng::keyed(self.seed, &[crash_seed])))
    }

    /// Returns the number of writes that a power cut now could lose.
    ///
    /// # Panics
    /// If the file cannot be examined.
    #[must_use]
    pub fn unsynced_writes(&self, file: impl AsFd) -> usize {
        let key = file_key(file).expect("statx of an open file");
        self.files().get(&key).map_or(0, Journal::unsynced)
    }

    /// Runs `change` on the journal of the op's file, which starts with the current contents. Folders and pipes have
    /// no journal.
    fn with_journal<T>(&self, op: &Op, change: impl FnOnce(&mut Journal) -> T) -> Option<T> {
        let key = file_key(&*op.file).ok()?;
        let mut files = self.files();
        if let std::collections::hash_map::Entry::Vacant(vacant) = files.entry(key) {
            vacant.insert(Journal::of_file(&op.file)?);
        }
        files.get_mut(&key).map(change)
    }

    fn files(&self) -> MutexGuard<'_, HashMap<FileKey, Journal>> {
        ignore_poison(self.files.lock())
    }
}

fn file_key(file: impl AsFd) -> rustix::io::Result<FileKey> {
    let flags = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    let stat = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, flags)?;
    Ok((stat.stx_dev_major, stat.stx_dev_minor, stat.stx_ino, stat.stx_btime.tv_sec, stat.stx_btime.tv_nsec))
}
