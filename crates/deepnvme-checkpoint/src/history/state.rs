//! One process's view of a checkpoint folder: its knowledge of the manifest on disk, and the manifest's replacement.

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use deepnvme_file::{Replacement, Target};
use deepnvme_io::fs::{self, FileKind, OFlags};
use deepnvme_io::op::Errno;
use deepnvme_io::{Error as IoError, ErrorKind};

use super::listed;
use super::lock::Lock;
use super::manifest::{MANIFEST, Manifest, ManifestEntry};
use crate::error::{Error, Result};
use crate::sync::{Mutex, lock};

/// A folder of checkpoints, as one process sees it. `turn` is locked before `state` and `lock`, which are never held
/// together.
#[derive(Debug)]
pub struct History {
    pub(super) folder: PathBuf,
    pub(super) keep: Option<usize>,
    /// Whether `settle` syncs names. The manifest is always synced.
    pub(super) is_synced: bool,
    /// Held while the manifest is read or files change, so that claims, reads and commits take turns.
    pub(super) turn: Mutex<()>,
    /// Never held during I/O.
    pub(super) state: Mutex<HistoryState>,
    /// The writer's lock of the folder, while this process holds it.
    pub(super) lock: Mutex<Option<Lock>>,
}

#[derive(Debug)]
pub(super) struct HistoryState {
    pub(super) manifest: Manifest,
    /// The manifest on disk, as this process last read or wrote it. `manifest` may be newer.
    on_disk: Manifest,
    /// Names of saves in progress, and of saves with unknown outcome.
    pub(super) reserved: BTreeSet<String>,
    /// Reserved names to free once the manifest has been read again: their saves ended while its state was unknown.
    pub(super) release_pending: BTreeSet<String>,
    /// Checkpoints in the manifest, when it was last read, that have no file.
    pub(super) missing: Vec<MissingCheckpoint>,
    pub(super) known: ManifestKnowledge,
}

/// A checkpoint in the manifest that has no file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingCheckpoint {
    /// The step of its save.
    pub step: u64,
    /// The name of its file, list or folder.
    pub file: String,
}

impl MissingCheckpoint {
    pub(super) fn of(entry: &ManifestEntry) -> Self {
        Self { step: entry.step, file: entry.file.clone() }
    }
}

/// How well the manifest on disk is known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ManifestKnowledge {
    /// It equals `HistoryState::manifest`, and survives a power cut.
    Durable,
    /// It equals `HistoryState::manifest`, but a power cut may bring back its predecessor.
    Read,
    /// A write failed, so it may be the old one or the new one.
    Doubtful,
}

impl History {
    /// Creates the history of a folder. Retention keeps the last `keep` checkpoints, or all. With `is_synced`, settling
    /// syncs the final names. Does no I/O.
    #[must_use]
    pub fn new(folder: PathBuf, keep: Option<usize>, is_synced: bool) -> Self {
        let state = HistoryState {
            manifest: Manifest::empty(),
            on_disk: Manifest::empty(),
            reserved: BTreeSet::new(),
            release_pending: BTreeSet::new(),
            missing: Vec::new(),
            known: ManifestKnowledge::Read,
        };
        // The process may change its folder before the next save.
        let folder = std::path::absolute(&folder).unwrap_or(folder);
        Self { folder, keep, is_synced, turn: Mutex::new(()), state: Mutex::new(state), lock: Mutex::new(None) }
    }

    /// Returns the folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the manifest, as far as this process knows.
    #[must_use]
    pub fn manifest(&self) -> Manifest {
        lock(&self.state).manifest.clone()
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
        let mut state = lock(&self.state);
        (state.manifest, state.known) = (manifest, ManifestKnowledge::Read);
    }

    /// Adopts a manifest that was read from disk.
    pub(super) fn adopt(&self, manifest: Manifest) {
        let mut state = lock(&self.state);
        for name in std::mem::take(&mut state.release_pending) {
            state.reserved.remove(&name);
        }
        state.on_disk = manifest.clone();
        (state.manifest, state.known) = (manifest, ManifestKnowledge::Read);
    }

    /// Ensures that the manifest survives a power cut before acting on it, for example by removing files.
    pub(super) fn ensure_durable(&self) -> Result<()> {
        let known = lock(&self.state).known;
        if known == ManifestKnowledge::Doubtful {
            self.adopt(self.read_file()?);
        }
        if known != ManifestKnowledge::Durable {
            fs::sync_folder(&self.folder)?;
            lock(&self.state).known = ManifestKnowledge::Durable;
        }
        Ok(())
    }

    /// Refuses to replace a manifest that another program changed since this process last read or wrote it.
    pub(super) fn check_manifest(&self) -> Result<()> {
        if self.read_file()? == lock(&self.state).on_disk {
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
        lock(&self.state).known = ManifestKnowledge::Doubtful;
        replacement.commit(true)?;
        let mut state = lock(&self.state);
        state.on_disk = next.clone();
        (state.manifest, state.known) = (next.clone(), ManifestKnowledge::Durable);
        Ok(())
    }

    pub(super) fn refused(&self, operation: &'static str, errno: Errno) -> Error {
        IoError::os(operation, errno).at_path(&self.folder).into()
    }
}
