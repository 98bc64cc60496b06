//! The folder of a `Checkpointer`: which checkpoints count, who may write, and retention.
//!
//! ```text
//! manifest    manifest.json: current and retired checkpoints    (pure)
//! names       names of checkpoints                              (pure)
//! plan        transitions of the manifest                       (pure)
//! members     files that a list or an index names               (pure)
//! files       renames files; removes retired ones if they verify
//! listed      current checkpoints, for readers
//! lock        one writer at a time
//! private     cleanup after killed writers; unnamed folders
//! ```
//!
//! Replacing the manifest is the one moment of change. It lists a new checkpoint while its files still have private
//! names. The writer renames them afterwards. If it dies, the next process that opens the folder does. A checkpoint
//! that stops counting moves to the retired list in the same write. Its files are removed after that, each only if it
//! matches the manifest's record. No file is removed because of its name.
//!
//! A failed replacement may have happened nevertheless, and may not be on disk. Then the manifest is not acted on until
//! it was read again and synced, and no name is assigned twice.

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use deepnvme_file::{Replacement, Target};
use deepnvme_io::fs::{self, Kind, OFlags};
use deepnvme_io::mem::sync::ignore_poison;
use deepnvme_io::op::Errno;
use deepnvme_io::{Error as IoError, ErrorKind};

use crate::error::{Error, Result};
use crate::sync::{Mutex, MutexGuard, thread};

mod files;
mod listed;
mod lock;
mod manifest;
mod members;
mod names;
mod plan;
mod private;
#[cfg(test)]
mod tests;

pub use files::HEAD_BYTES;
pub use listed::{Listed, is_as_listed, listed, place_of};
pub use lock::{Holder, LOCK};
pub use manifest::{Entry, MANIFEST, MANIFEST_BYTES_MAX, Manifest, Part};
pub use names::{PARTS_LIST, SHARDS_LIST, SHARDS_RECORD, is_checkpoint};
pub use private::PrivateFolder;

use deepnvme_io::start_thread;
use lock::{Lock, Taken};

/// How often a reader retries while a writer keeps replacing the manifest.
const READS_MAX: u32 = 100;

/// The result of taking the lock.
#[derive(Debug, Default)]
pub struct Claim {
    /// Checkpoints in the folder that the manifest does not list. They stay.
    pub unlisted: Vec<String>,
    /// Whether the file system lacks locks.
    pub is_unlocked: bool,
}

/// The outcome of renaming new files and removing retired ones in this folder.
#[derive(Debug, Default)]
pub struct Settled {
    /// Names of files that differ from the manifest's record. They stay.
    pub foreign: Vec<String>,
    /// Files that could not be examined, renamed or removed. They are retried.
    pub failures: Vec<String>,
    /// Checkpoints whose files have their final names here.
    pub placed: Vec<String>,
    /// Retired checkpoints with no files of ours left here.
    pub gone: Vec<String>,
}

/// A folder of checkpoints, as one process sees it.
#[derive(Debug)]
pub struct History {
    folder: PathBuf,
    keep: Option<usize>,
    /// Whether `settle` syncs names. The list of checkpoints never depends on it.
    is_synced: bool,
    /// Held while files change, so that commits take turns. Only commits wait for it.
    turn: Mutex<()>,
    /// Held briefly only.
    state: Mutex<State>,
    lock: Mutex<Option<Lock>>,
}

#[derive(Debug)]
struct State {
    manifest: Manifest,
    /// The manifest on disk, as this process last read or wrote it. `manifest` may be newer.
    on_disk: Manifest,
    /// Names of saves in progress, and of saves with unknown outcome.
    reserved: BTreeSet<String>,
    /// Names of saves with unknown outcome: freed while the manifest was in doubt.
    doubtful: BTreeSet<String>,
    /// Checkpoints in the manifest, when it was last read, that have no file.
    missing: Vec<Missing>,
    known: Known,
}

/// A checkpoint in the manifest that has no file: step and name.
pub type Missing = (u64, String);

/// How well the manifest on disk is known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Known {
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
        let state = State { manifest, on_disk, reserved, doubtful, missing, known };
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
        fs::make_folders(&self.folder).map_err(|errno| IoError::os("make folder", errno).at_path(&self.folder).into())
    }

    /// Reads the manifest and renames files that a killed writer could not rename. Checkpoints without any file here do
    /// not count. The holder of the lock knows the manifest already.
    ///
    /// # Errors
    /// `Manifest` if it is damaged, `Io` for errors of the folder.
    pub fn read(&self) -> Result<Manifest> {
        let _turn = locked(&self.turn);
        if locked(&self.lock).is_some() {
            let manifest = self.manifest();
            let shown = self.present(&manifest);
            self.note_missing(&manifest, &shown);
            return Ok(shown);
        }
        let mut manifest = self.read_file()?;
        let mut shown = manifest.clone();
        for _ in 0..READS_MAX {
            for entry in manifest.checkpoints.iter().filter(|entry| !entry.pending.is_empty()) {
                // If this process may not rename the file, it is found under its private name.
                let _ = files::place(&self.folder, entry);
            }
            let present = self.present(&manifest);
            // A writer replaces the manifest before it removes a file. If the manifest has changed, a missing file
            // means that this list is outdated, not that the checkpoint is lost.
            let now = if present == manifest { manifest.clone() } else { self.read_file()? };
            if now == manifest {
                shown = present;
                break;
            }
            (manifest, shown) = (now.clone(), now);
        }
        self.note_missing(&manifest, &shown);
        self.adopt(manifest);
        Ok(shown)
    }

    /// The checkpoints that [`read`](Self::read) omitted because they have no file.
    #[must_use]
    pub fn missing(&self) -> Vec<Missing> {
        locked(&self.state).missing.clone()
    }

    fn note_missing(&self, listed: &Manifest, present: &Manifest) {
        let is_missing = |entry: &&Entry| !present.checkpoints.iter().any(|there| there.file == entry.file);
        let missing = listed.checkpoints.iter().filter(is_missing);
        locked(&self.state).missing = missing.map(|entry| (entry.step, entry.file.clone())).collect();
    }

    /// Returns the manifest without the checkpoints that have no file here.
    fn present(&self, manifest: &Manifest) -> Manifest {
        let mut present = manifest.clone();
        present.checkpoints.retain(|entry| files::is_there(&self.folder, entry));
        present
    }

    /// Adopts the manifest of another process that shares this history.
    pub fn follow(&self, manifest: Manifest) {
        let mut state = locked(&self.state);
        (state.manifest, state.known) = (manifest, Known::Read);
    }

    /// Takes the lock unless this process holds it. The leader of several processes then reads the manifest again. All
    /// processes clean up after killed writers here.
    ///
    /// # Errors
    /// `Locked` if another process saves into the folder.
    pub fn claim(&self, holder: &Holder, is_leader: bool) -> Result<Claim> {
        let _turn = locked(&self.turn);
        self.refuse_link()?;
        if locked(&self.lock).as_ref().is_some_and(Lock::is_there) {
            return Ok(Claim::default());
        }
        // The lock file was removed, so this process must lock the new one.
        drop(locked(&self.lock).take());
        let mut claim = Claim::default();
        match Lock::take(&self.folder, holder)? {
            Taken::Held(lock) => *locked(&self.lock) = Some(lock),
            Taken::Shared => return Ok(claim),
            Taken::Unsupported => claim.is_unlocked = true,
        }
        if is_leader {
            let read = self.read_file();
            if read.is_err() {
                drop(locked(&self.lock).take());
            }
            self.adopt(read?);
        }
        let manifest = self.manifest();
        let names = fs::entries(&self.folder).map_err(|errno| self.refused("list", errno))?;
        claim.unlisted = plan::unlisted(&manifest, names.iter().filter_map(|name| name.to_str()));
        // Without a lock, private files may be in use by another writer.
        if !claim.is_unlocked {
            private::remove_stale(&self.folder, &names, |name| manifest.knows(name));
        }
        Ok(claim)
    }

    /// Refuses a manifest that is a symbolic link: two folders would share one history but have two locks.
    fn refuse_link(&self) -> Result<()> {
        let path = self.folder.join(MANIFEST);
        if fs::stat_link(&path).is_ok_and(|stat| stat.kind == Kind::Link) {
            let detail = "it is a symbolic link to the manifest of another folder: save into that folder, or remove the \
                          link";
            return Err(IoError::new(ErrorKind::InvalidInput, "save a checkpoint", detail).at_path(path).into());
        }
        Ok(())
    }

    /// Returns whether this process holds the lock.
    #[must_use]
    pub fn is_claimed(&self) -> bool {
        locked(&self.lock).is_some()
    }

    /// Releases the lock.
    pub fn release(&self) {
        let _turn = locked(&self.turn);
        drop(locked(&self.lock).take());
    }

    /// In a forked child: closes the lock file, which the parent still holds. Never waits.
    pub fn abandon(&self) {
        if let Ok(mut lock) = self.lock.try_lock() {
            drop(lock.take());
        }
    }

    /// Names in the folder that belong to a step.
    ///
    /// # Errors
    /// `Io` for errors of the folder.
    pub fn names_of(&self, step: u64) -> Result<Vec<String>> {
        let prefix = names::name(step, "", 0);
        let names = fs::entries(&self.folder).map_err(|errno| self.refused("list", errno))?;
        Ok(names
            .iter()
            .filter_map(|name| name.to_str())
            .filter(|name| name.starts_with(&prefix))
            .map(str::to_owned)
            .collect())
    }

    /// Reserves a name for a checkpoint of this step. No file here or in `taken` has it. It stays reserved until
    /// [`free`](Self::free).
    ///
    /// # Errors
    /// `Io` for errors of the folder.
    pub fn reserve(&self, step: u64, suffix: &str, taken: &[String]) -> Result<String> {
        let here = self.names_of(step)?;
        let mut state = locked(&self.state);
        let name = names::free(step, suffix, |is_of_it| {
            let names = here.iter().chain(taken).chain(&state.reserved);
            names.map(String::as_str).any(is_of_it) || {
                let entries = state.manifest.checkpoints.iter().chain(&state.manifest.retired);
                entries.flat_map(Entry::names).any(is_of_it)
            }
        });
        state.reserved.insert(name.clone());
        Ok(name)
    }

    /// Frees a reserved name. It stays reserved while it is unknown whether its checkpoint counts.
    pub fn free(&self, name: &str) {
        let mut state = locked(&self.state);
        if state.known == Known::Doubtful {
            state.doubtful.insert(name.to_owned());
        } else {
            state.reserved.remove(name);
        }
    }

    /// Makes a checkpoint count by replacing the manifest. Its files are on disk and may have private names.
    ///
    /// # Errors
    /// `Io` for errors of the folder, or `Locked`. [`counts`](Self::counts) then tells whether it counts anyway.
    pub fn publish(&self, entry: &Entry) -> Result<()> {
        let _turn = locked(&self.turn);
        self.make_sure()?;
        self.check_written(entry)?;
        self.check_manifest()?;
        let now = self.manifest();
        let mut entry = entry.clone();
        if entry.parts.is_empty() {
            entry.written_ns = Some(files::written_ns(&self.folder, &entry)?);
        }
        let next = plan::next(&now, &entry, self.keep, |entry| files::is_there(&self.folder, entry));
        // Sync the names before the manifest that lists them.
        fs::sync_folder(&self.folder)?;
        self.write(&next)
    }

    /// Refuses to replace a manifest that another program changed since this process last read or wrote it.
    fn check_manifest(&self) -> Result<()> {
        if self.read_file()? == locked(&self.state).on_disk {
            return Ok(());
        }
        let detail = "it was changed while this Checkpointer had the folder; it stays. Close the Checkpointer, and open the \
                      folder again";
        Err(IoError::new(ErrorKind::Busy, "save a checkpoint", detail).at_path(self.folder.join(MANIFEST)).into())
    }

    /// Refuses a checkpoint whose file lies in another folder: the folder was renamed or replaced while it was written.
    fn check_written(&self, entry: &Entry) -> Result<()> {
        let Some(private) = entry.pending.get(&entry.file) else { return Ok(()) };
        match fs::stat_link(&self.folder.join(private)) {
            Err(Errno::NOENT | Errno::NOTDIR) => {
                let detail = "the new checkpoint is not in this folder: somebody renamed the folder, or put another one in \
                              its place, while the checkpoint was written; save it again";
                Err(IoError::new(ErrorKind::NotFound, "save a checkpoint", detail).at_path(&self.folder).into())
            }
            _ => Ok(()),
        }
    }

    /// Returns whether the manifest on disk lists that file, whatever failed while it was written. `None`: it cannot be
    /// read.
    #[must_use]
    pub fn counts(&self, file: &str) -> Option<bool> {
        // No commit may replace the manifest between reading and adopting it.
        let _turn = locked(&self.turn);
        let manifest = self.read_file().ok()?;
        let is_listed = manifest.checkpoints.iter().any(|entry| entry.file == file);
        if locked(&self.state).known == Known::Doubtful {
            self.adopt(manifest);
        }
        Some(is_listed)
    }

    /// Adopts a manifest that was read from disk.
    fn adopt(&self, manifest: Manifest) {
        let mut state = locked(&self.state);
        for name in std::mem::take(&mut state.doubtful) {
            state.reserved.remove(&name);
        }
        state.on_disk = manifest.clone();
        (state.manifest, state.known) = (manifest, Known::Read);
    }

    /// Ensures that the manifest survives a power cut before acting on it, for example by removing files.
    fn make_sure(&self) -> Result<()> {
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

    /// Renames files here and removes retired ones. The manifest is on disk by now.
    pub fn settle(&self) -> Settled {
        let _turn = locked(&self.turn);
        let mut settled = Settled::default();
        let manifest = self.manifest();
        let is_nothing_to_do =
            manifest.retired.is_empty() && manifest.checkpoints.iter().all(|entry| entry.pending.is_empty());
        let known = locked(&self.state).known;
        if is_nothing_to_do && known != Known::Doubtful {
            return settled;
        }
        if let Err(failure) = self.make_sure() {
            settled.failures.push(failure.to_string());
            return settled;
        }
        let mut is_changed = false;
        for entry in self.manifest().checkpoints.iter().filter(|entry| !entry.pending.is_empty()) {
            match files::place(&self.folder, entry) {
                Ok(in_the_way) if in_the_way.is_empty() => settled.placed.push(entry.file.clone()),
                // Another program took the name after it was found free. A checkpoint of one file can get another name.
                Ok(_) if entry.parts.is_empty() && self.is_claimed() => match self.rename(entry) {
                    Ok(()) => settled.placed.push(entry.file.clone()),
                    Err(failure) => settled.failures.push(failure.to_string()),
                },
                Ok(in_the_way) => settled.failures.extend(in_the_way.iter().map(|name| {
                    format!("{name}: something else has this name; move it away, and open the folder again")
                })),
                Err(failure) => settled.failures.push(failure.to_string()),
            }
            is_changed = true;
        }
        let mut held = Vec::new();
        for entry in &self.manifest().retired {
            let mut removal = files::remove(&self.folder, entry);
            held.append(&mut removal.held);
            if removal.failures.is_empty() {
                settled.gone.push(entry.file.clone());
            }
            settled.foreign.append(&mut removal.foreign);
            settled.failures.append(&mut removal.failures);
            is_changed = true;
        }
        if is_changed
            && self.is_synced
            && let Err(failure) = fs::sync_folder(&self.folder)
        {
            settled.failures.push(failure.to_string());
        }
        release(held);
        settled
    }

    /// Records what all processes that share the history have settled. The next manifest states it.
    pub fn note(&self, placed: &[String], gone: &[String]) {
        let mut state = locked(&self.state);
        state.manifest = plan::forgotten(&plan::placed(&state.manifest, placed), gone);
    }

    /// Runs [`publish`](Self::publish), [`settle`](Self::settle) and [`note`](Self::note) for a single process. `new`
    /// is the file, or `None` for a folder, which was kept already.
    ///
    /// # Errors
    /// As [`publish`](Self::publish). The file is then removed, unless the checkpoint counts or this is unknown.
    pub fn commit(&self, mut entry: Entry, new: Option<Replacement>) -> Result<Settled> {
        let mode = new.as_ref().map_or(Ok(()), Replacement::take_mode);
        if let Some(private) = new.as_ref().and_then(private_name) {
            entry.pending.insert(entry.file.clone(), private);
        }
        let published = mode.map_err(Error::from).and_then(|()| self.publish(&entry));
        if (published.is_ok() || self.counts(&entry.file) != Some(false))
            && let Some(new) = new
        {
            new.keep();
        }
        self.free(&entry.file);
        published?;
        let settled = self.settle();
        self.note(&settled.placed, &settled.gone);
        Ok(settled)
    }

    /// Renames a checkpoint of one file whose name was taken meanwhile.
    fn rename(&self, entry: &Entry) -> Result<()> {
        let name = self.reserve(entry.step, names::suffix_of(&entry.file), &[])?;
        let next = plan::renamed(&self.manifest(), &entry.file, &name);
        let renamed = self.write(&next);
        self.free(&name);
        renamed?;
        for entry in next.checkpoints.iter().filter(|entry| entry.file == name) {
            files::place(&self.folder, entry)?;
        }
        self.note(&[name], &[]);
        Ok(())
    }

    fn read_file(&self) -> Result<Manifest> {
        let found = listed::read(&self.folder.join(MANIFEST))?;
        Ok(found.map_or_else(Manifest::empty, |(_, manifest)| manifest))
    }

    /// Replaces the manifest. Always syncs its data and name, at any durability: files are removed because it no longer
    /// lists them.
    fn write(&self, next: &Manifest) -> Result<()> {
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

    fn refused(&self, operation: &'static str, errno: Errno) -> Error {
        IoError::os(operation, errno).at_path(&self.folder).into()
    }
}

/// The current, private name of a replacement's file.
#[must_use]
pub fn private_name(new: &Replacement) -> Option<String> {
    new.temporary().path().file_name().and_then(|name| name.to_str()).map(str::to_owned)
}

/// Closes nameless files on a thread of its own: some file systems take long to free a large file.
fn release(held: Vec<std::os::fd::OwnedFd>) {
    if !held.is_empty() {
        // If no thread can be started, dropping the closure closes the files here.
        let _ = start_thread(|| thread::Builder::new().name("deepnvme-release".into()).spawn(move || drop(held)));
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    ignore_poison(mutex.lock())
}
