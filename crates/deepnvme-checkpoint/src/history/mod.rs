//! The folder of a `Checkpointer`: which checkpoints count, who may write, and what goes.
//!
//! ```text
//! manifest    manifest.json: what counts, what was retired      (pure)
//! names       what checkpoints are called                       (pure)
//! plan        what a list becomes                               (pure)
//! members     which files a list or an index names              (pure)
//! files       files get their names; retired ones are removed, if they verify
//! listed      which checkpoints count, for whoever only looks
//! lock        one writer at a time
//! private     what killed writers left; folders that have no name yet
//! ```
//!
//! One moment changes everything: the replacement of the manifest. It lists a new checkpoint while its files have
//! private names; they get their own names afterwards, from whoever opens the folder next if the writer dies. A
//! checkpoint that stops counting moves to a second list in the same write, and its files are removed after that, each
//! only if it is what the manifest recorded of it. Nothing is removed because of its name.
//!
//! A replacement that fails may have been made nevertheless, and may not be on the disk. Then nothing follows from the
//! manifest until it has been read again and is on the disk, and no name is given out twice.

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

/// How often a reader follows a writer that replaces the manifest again and again.
const READS_MAX: u32 = 100;

/// The result of taking the lock.
#[derive(Debug, Default)]
pub struct Claim {
    /// Checkpoints in the folder that no list has. They stay.
    pub unlisted: Vec<String>,
    /// Whether the file system has no locks.
    pub is_unlocked: bool,
}

/// What became of names and of retired files in this folder.
#[derive(Debug, Default)]
pub struct Settled {
    /// Names of which something else was found than what was recorded: those files stay.
    pub foreign: Vec<String>,
    /// What could not be looked at, named or removed; it is tried again.
    pub failures: Vec<String>,
    /// Checkpoints whose files have their names, here.
    pub placed: Vec<String>,
    /// Retired checkpoints of which nothing is left here that is ours.
    pub gone: Vec<String>,
}

/// A folder of checkpoints, as one process sees it.
#[derive(Debug)]
pub struct History {
    folder: PathBuf,
    keep: Option<usize>,
    /// Whether names are on the disk before `settle` returns. What is listed never depends on it.
    is_synced: bool,
    /// Held while files are changed, so that commits take turns. Nothing waits for it but other commits.
    turn: Mutex<()>,
    /// Held for a moment only.
    state: Mutex<State>,
    lock: Mutex<Option<Lock>>,
}

#[derive(Debug)]
struct State {
    manifest: Manifest,
    /// The manifest in the folder, as this process last read or wrote it. `manifest` may already say more.
    on_disk: Manifest,
    /// Names of saves that are under way, and of those of which nobody knows yet whether they count.
    reserved: BTreeSet<String>,
    /// The latter: they were given back while the manifest was in doubt.
    doubtful: BTreeSet<String>,
    /// Checkpoints that the manifest listed when it was last read, and of which no file was there.
    missing: Vec<Missing>,
    known: Known,
}

/// A checkpoint that the manifest lists, and of which no file is there: step and name.
pub type Missing = (u64, String);

/// How well the manifest on the disk is known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Known {
    /// It is this one, and a power cut leaves it.
    Durable,
    /// It is this one, as far as it was read: a power cut may bring back the one before.
    Read,
    /// It may be the one whose writing failed.
    Doubtful,
}

impl History {
    /// The history of a folder, of which the last `keep` checkpoints stay, or all; with `is_synced` the final names of
    /// files are on the disk when they are settled. Nothing is looked at yet.
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

    /// What counts, as far as this process knows.
    #[must_use]
    pub fn manifest(&self) -> Manifest {
        locked(&self.state).manifest.clone()
    }

    /// Makes the folder.
    ///
    /// # Errors
    /// `Io` with the folder's path.
    pub fn make(&self) -> Result<()> {
        fs::make_folders(&self.folder).map_err(|errno| IoError::os("make folder", errno).at_path(&self.folder).into())
    }

    /// Reads the manifest, and gives files their names that a killed writer had no time for. Checkpoints of which no
    /// file is here any more do not count. The holder of the lock knows what is in the manifest already.
    ///
    /// # Errors
    /// `Manifest` for one that is damaged, `Io` for what the folder refuses.
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
                // Where this process may not rename, the file is found under its private name.
                let _ = files::place(&self.folder, entry);
            }
            let present = self.present(&manifest);
            // A writer replaces the manifest before it removes a file. If the manifest is another one now, a missing
            // file means that this list is old, and not that there is no checkpoint.
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

    /// The checkpoints that [`read`](Self::read) left out because no file of them is there.
    #[must_use]
    pub fn missing(&self) -> Vec<Missing> {
        locked(&self.state).missing.clone()
    }

    fn note_missing(&self, listed: &Manifest, present: &Manifest) {
        let is_missing = |entry: &&Entry| !present.checkpoints.iter().any(|there| there.file == entry.file);
        let missing = listed.checkpoints.iter().filter(is_missing);
        locked(&self.state).missing = missing.map(|entry| (entry.step, entry.file.clone())).collect();
    }

    /// A manifest without the checkpoints of which no file is here.
    fn present(&self, manifest: &Manifest) -> Manifest {
        let mut present = manifest.clone();
        present.checkpoints.retain(|entry| files::is_there(&self.folder, entry));
        present
    }

    /// Takes over what another process, which shares this history, knows of it.
    pub fn follow(&self, manifest: Manifest) {
        let mut state = locked(&self.state);
        (state.manifest, state.known) = (manifest, Known::Read);
    }

    /// Takes the lock, if this process does not hold it yet; the leader of several processes reads the manifest again
    /// then, and all clear away what killed writers left here.
    ///
    /// # Errors
    /// `Locked` where somebody else saves into the folder.
    pub fn claim(&self, holder: &Holder, is_leader: bool) -> Result<Claim> {
        let _turn = locked(&self.turn);
        self.refuse_link()?;
        if locked(&self.lock).as_ref().is_some_and(Lock::is_there) {
            return Ok(Claim::default());
        }
        // The file was removed: only who can lock the new one goes on.
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
        // Without a lock, what looks left may be another writer's.
        if !claim.is_unlocked {
            private::remove_stale(&self.folder, &names, |name| manifest.knows(name));
        }
        Ok(claim)
    }

    /// Refuses a manifest that is a symbolic link: two folders would have one history and two locks.
    fn refuse_link(&self) -> Result<()> {
        let path = self.folder.join(MANIFEST);
        if fs::stat_link(&path).is_ok_and(|stat| stat.kind == Kind::Link) {
            let detail = "it is a symbolic link to the manifest of another folder: save into that folder, or remove the \
                          link";
            return Err(IoError::new(ErrorKind::InvalidInput, "save a checkpoint", detail).at_path(path).into());
        }
        Ok(())
    }

    /// Whether this process holds the lock.
    #[must_use]
    pub fn is_claimed(&self) -> bool {
        locked(&self.lock).is_some()
    }

    /// Lets go of the lock.
    pub fn release(&self) {
        let _turn = locked(&self.turn);
        drop(locked(&self.lock).take());
    }

    /// In a forked child: closes the lock's file, which the parent goes on to hold. Never waits.
    pub fn abandon(&self) {
        if let Ok(mut lock) = self.lock.try_lock() {
            drop(lock.take());
        }
    }

    /// Names in the folder that belong to that step.
    ///
    /// # Errors
    /// `Io` for what the folder refuses.
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

    /// A name for a checkpoint of that step that no file has, here or among `taken`; nobody gets it again until
    /// [`free`](Self::free).
    ///
    /// # Errors
    /// `Io` for what the folder refuses.
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

    /// Gives a reserved name back. While nobody knows whether the checkpoint of that name counts, it stays reserved.
    pub fn free(&self, name: &str) {
        let mut state = locked(&self.state);
        if state.known == Known::Doubtful {
            state.doubtful.insert(name.to_owned());
        } else {
            state.reserved.remove(name);
        }
    }

    /// Has a checkpoint count whose files are on the disk: replaces the manifest. The files may have private names.
    ///
    /// # Errors
    /// `Io` for what the folder refuses; [`counts`](Self::counts) says whether it counts nevertheless, and `Locked`.
    pub fn publish(&self, entry: &Entry) -> Result<()> {
        let _turn = locked(&self.turn);
        self.make_sure()?;
        self.check_written(entry)?;
        self.check_manifest()?;
        let now = self.manifest();
        let next = plan::next(&now, entry, self.keep, |entry| files::is_there(&self.folder, entry));
        // The manifest must not be on the disk before the names that it lists.
        fs::sync_folder(&self.folder)?;
        self.write(&next)
    }

    /// Refuses to replace a manifest that somebody else put into the folder since this process last read or wrote it.
    fn check_manifest(&self) -> Result<()> {
        if self.read_file()? == locked(&self.state).on_disk {
            return Ok(());
        }
        let detail = "it was changed while this Checkpointer had the folder; it stays. Close the Checkpointer, and open the \
                      folder again";
        Err(IoError::new(ErrorKind::Busy, "save a checkpoint", detail).at_path(self.folder.join(MANIFEST)).into())
    }

    /// Refuses a checkpoint whose file lies in another folder: one that had this folder's name when the file was made.
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

    /// Whether the manifest on the disk lists that file, whatever went wrong while it was written. `None`: it cannot be
    /// read.
    #[must_use]
    pub fn counts(&self, file: &str) -> Option<bool> {
        // Between reading and adopting it, nobody may replace it.
        let _turn = locked(&self.turn);
        let manifest = self.read_file().ok()?;
        let is_listed = manifest.checkpoints.iter().any(|entry| entry.file == file);
        if locked(&self.state).known == Known::Doubtful {
            self.adopt(manifest);
        }
        Some(is_listed)
    }

    /// Takes what was read from the disk for what the folder holds.
    fn adopt(&self, manifest: Manifest) {
        let mut state = locked(&self.state);
        for name in std::mem::take(&mut state.doubtful) {
            state.reserved.remove(&name);
        }
        state.on_disk = manifest.clone();
        (state.manifest, state.known) = (manifest, Known::Read);
    }

    /// Sees to it that what follows from the manifest, such as the removal of files, follows from the one that a power cut
    /// leaves.
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

    /// Gives files here their names, and removes retired ones. The manifest is on disk by now.
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
                // Somebody made a file of that name since it was found free. One of one file can have another name.
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

    /// Takes note of what all who share the history have settled; the next manifest says so.
    pub fn note(&self, placed: &[String], gone: &[String]) {
        let mut state = locked(&self.state);
        state.manifest = plan::forgotten(&plan::placed(&state.manifest, placed), gone);
    }

    /// [`publish`](Self::publish), [`settle`](Self::settle) and [`note`](Self::note) for a process alone: `new` is the
    /// file, or nothing for a folder, which has been kept. Whether it counts, and what became of the rest.
    ///
    /// # Errors
    /// As [`publish`](Self::publish). The file is gone, unless the checkpoint counts or that cannot be found out.
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

    /// Gives a checkpoint of one file, whose name was taken meanwhile, another one.
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

    /// Replaces the manifest. Its bytes and its name are on the disk when this returns, whatever else need not be:
    /// files are removed because it does not list them any more.
    fn write(&self, next: &Manifest) -> Result<()> {
        self.refuse_link()?;
        let path = self.folder.join(MANIFEST);
        let refused = |errno| Error::from(IoError::os("write", errno).at_path(&path));
        let replacement = Replacement::new(&Target::Path(path.clone()))?;
        let file = fs::open(&replacement.temporary().path(), OFlags::WRONLY, 0).map_err(refused)?;
        fs::write_all(file.as_fd(), next.text().as_bytes()).map_err(refused)?;
        fs::sync(file.as_fd()).map_err(refused)?;
        drop(file);
        // From here on it may be the manifest, whatever a failure says.
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

/// The name that the private file of a replacement has now.
#[must_use]
pub fn private_name(new: &Replacement) -> Option<String> {
    new.temporary().path().file_name().and_then(|name| name.to_str()).map(str::to_owned)
}

/// Closes files without names on a thread of its own: to free a large file takes some file systems long.
fn release(held: Vec<std::os::fd::OwnedFd>) {
    if !held.is_empty() {
        // Where no thread is to be had, the closure is dropped here, and with it the files.
        let _ = start_thread(|| thread::Builder::new().name("deepnvme-release".into()).spawn(move || drop(held)));
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    ignore_poison(mutex.lock())
}
