//! One process's view of a checkpoint folder: its knowledge of the manifest on disk, and the manifest's replacement.

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use deepnvme_file::{Replacement, Target};
use deepnvme_io::fs::{self, FileKind, OFlags};
use deepnvme_io::mem::sync::ignore_poison;
use deepnvme_io::op::Errno;
use deepnvme_io::{Error as IoError, ErrorKind};

use super::listed;
use super::lock::Lock;
use super::manifest::{MANIFEST, Manifest};
use crate::error::{Error, Result};
use crate::sync::{Mutex, MutexGuard};

/// A folder of checkpoints, as one process sees it.
#[derive(Debug)]
pub struct History {
    pub(super) folder: PathBuf,
    pub(super) keep: Option<usize>,
    /// Whether `settle` syncs names. The manifest is always synced.
    pub(super) is_synced: bool,
    /// Held while the manifest is read or files change, so that claims, reads and commits take turns.
    pub(super) turn: Mutex<()>,
    /// Held briefly only.
    pub(super) state: Mutex<HistoryState>,
    pub(super) lock: Mutex<Option<Lock>>,
}

#[derive(Debug)]
pub(super) struct HistoryState {
    pub(super) manifest: Manifest,
    /// The manifest on disk, as this process last read or wrote it. `manifest` may be newer.
    on_disk: Manifest,
    /// Names of saves in progress, and of saves with unknown outcome.
    pub(super) reserved: BTreeSet<String>,
    /// Names of saves with unknown outcome: freed while the manifest was in doubt.
    pub(super) doubtful: BTreeSet<String>,
    /// Checkpoints in the manifest, when it was last read, that have no file.
    pub(super) missing: Vec<Missing>,
    pub(super) known: Known,
}

/// A checkpoint in the manifest that has no file: step and name.
pub type Missing = (u64, String);

/// How well the manifest on disk is known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Known {
    /// It is this one, and survives a power cut.
    Durable,
    /// It is this one, but a power cut may bring back its predecessor.
    Read,
    /// It may be the one whose write failed.
    Doubtful,
}

impl History {
    /// Creates the history of a folder. Retention keeps the last `keep` checkpoints, or all. With `is_synced`, settling
    /// syncs the final names. Does no I/O.
    #[must_use]
    pub fn new(folder: PathBuf, keep: Option<usize>, is_synced: bool) -> Self {
        let [reserved, doubtful] = [BTreeSet::new(), BTreeSet::new()];
        let (manifest, on_disk, missing, known) = (Manifest::empty(), Manifest::empty(), Vec::new(), Known::Read);
        let state = HistoryState { manifest, on_disk, reserved, doubtful, missing, known };
        // The process may change its folder before the next save.
        let folder = std::path::absolute(&folder).unwrap_or(folder);
        Self { folder, keep, is_synced, turn: Mutex::new(()), state: Mutex::new(state), lock: Mutex::new(None) }
    }

    /// The folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The manifest, as far as this process knows.
    #[must_use]
    pub fn manifest(&self) -> Manifest {
        locked(&self.state).manifest.clone()
    }

    /// Creates the folder.
    ///
    /// # Errors
    /// `Io` with the folder's path.
    pub fn make(&self) -> Result<()> {
        Ok(fs::make_folders(&self.folder)?)
    }

    /// Adopts the manifest of another process that shares this history.
    pub fn adopt_shared(&self, manifest: Manifest) {
        let mut state = locked(&self.state);
        (state.manifest, state.known) = (manifest, Known::Read);
    }

    /// Adopts a manifest that was read from disk.
    pub(super) fn adopt(&self, manifest: Manifest) {
        let mut state = locked(&self.state);
        for name in std::mem::take(&mut state.doubtful) {
            state.reserved.remove(&name);
        }
        state.on_disk = manifest.clone();
        (state.manifest, state.known) = (manifest, Known::Read);
    }

    /// Ensures that the manifest survives a power cut before acting on it, for example by removing files.
    pub(super) fn ensure_durable(&self) -> Result<()> {
        let known = locked(&self.state).known;
        if known == Known::Doubtful {
            self.adopt(self.read_file()?);
        }
        if known != Known::Durable {
            fs::sync_folder(&self.folder)?;
            locked(&self.state).known = Known::Durable;
        }
        Ok(())
    }

    /// Refuses to replace a manifest that another program changed since this process last read or wrote it.
    pub(super) fn check_manifest(&self) -> Result<()> {
        if self.read_file()? == locked(&self.state).on_disk {
            return Ok(());
        }
        let detail = "it was changed while this Checkpointer had the folder; it stays. Close the Checkpointer, and open the \
                      folder again";
        Err(IoError::new(ErrorKind::Busy, "save a checkpoint", detail).at_path(self.folder.join(MANIFEST)).into())
    }

    /// Refuses a manifest that is a symbolic link: two folders would share one history but have two locks.
    pub(super) fn refuse_link(&self) -> Result<()> {
        let path = self.folder.join(MANIFEST);
        if fs::stat_link(&path).is_ok_and(|stat| stat.kind == FileKind::Link) {
            let detail = "it is a symbolic link to the manifest of another folder: save into that folder, or remove the \
                          link";
            return Err(IoError::new(ErrorKind::InvalidInput, "save a checkpoint", detail).at_path(path).into());
        }
        Ok(())
    }

    pub(super) fn read_file(&self) -> Result<Manifest> {
        let found = listed::read(&self.folder.join(MANIFEST))?;
        Ok(found.map_or_else(Manifest::empty, |(_, manifest)| manifest))
    }

    /// Replaces the manifest. Always syncs its data and name, at any durability: files are removed because it no longer
    /// lists them.
    pub(super) fn write(&self, next: &Manifest) -> Result<()> {
        self.refuse_link()?;
        let path = self.folder.join(MANIFEST);
        let refused = |errno| Error::from(IoError::os("write", errno).at_path(&path));
        let replacement = Replacement::new(&Target::Path(path.clone()))?;
        let file = fs::open(&replacement.temporary().path(), OFlags::WRONLY, 0).map_err(refused)?;
        fs::write_all(file.as_fd(), next.text().as_bytes()).map_err(refused)?;
        fs::sync(file.as_fd()).map_err(refused)?;
        drop(file);
        // From here on it may be the manifest, even after an error.
        locked(&self.state).known = Known::Doubtful;
        replacement.commit(true)?;
        let mut state = locked(&self.state);
        state.on_disk = next.clone();
        (state.manifest, state.known) = (next.clone(), Known::Durable);
        Ok(())
    }

    pub(super) fn refused(&self, operation: &'static str, errno: Errno) -> Error {
        IoError::os(operation, errno).at_path(&self.folder).into()
    }
}

pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    ignore_poison(mutex.lock())
}
