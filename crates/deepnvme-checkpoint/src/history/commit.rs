//! The commit of a checkpoint: reserving its name, publishing it in the manifest, renaming its files, and removing
//! retired ones.

use deepnvme_file::Replacement;
use deepnvme_io::fs;
use deepnvme_io::op::Errno;
use deepnvme_io::{Error as IoError, ErrorKind, start_thread};

use super::manifest::{Manifest, ManifestEntry};
use super::state::{History, ManifestKnowledge};
use super::{files, names, retention};
use crate::error::{Error, Result};
use crate::sync::{lock, thread};

/// The outcome of renaming new files and removing retired ones in this folder.
#[derive(Debug, Default)]
pub struct Settled {
    /// Names of files that differ from the manifest's record. They stay.
    pub foreign: Vec<String>,
    /// Texts about files that could not be examined, renamed or removed. These are retried.
    pub failures: Vec<String>,
    /// Checkpoints whose files have their final names here.
    pub placed: Vec<String>,
    /// Retired checkpoints with no files of ours left here.
    pub gone: Vec<String>,
}

impl History {
    /// Runs [`publish`](Self::publish), [`settle`](Self::settle) and [`record_settled`](Self::record_settled) for a
    /// single process, and frees the reserved name. `new` is the file, or `None` for a folder, which was kept already.
    ///
    /// # Errors
    /// As [`publish`](Self::publish). The file is then removed, unless the manifest on disk lists the checkpoint or may
    /// list it. The name stays reserved: the caller frees it, once, since another save may reserve it then.
    pub fn commit(&self, mut entry: ManifestEntry, new: Option<Replacement>, newer: &[u64]) -> Result<Settled> {
        let mode = new.as_ref().map_or(Ok(()), Replacement::take_mode);
        if let Some(private) = new.as_ref().and_then(private_name) {
            entry.pending.insert(entry.file.clone(), private);
        }
        let published = mode.map_err(Error::from).and_then(|()| self.publish(&entry, newer));
        if (published.is_ok() || self.is_committed(&entry.file) != Some(false))
            && let Some(new) = new
        {
            new.keep();
        }
        published?;
        self.release_name(&entry.file);
        let settled = self.settle();
        self.record_settled(&settled.placed, &settled.gone);
        Ok(settled)
    }

    /// Returns the names in the folder that begin like the names of a step.
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
    /// [`release_name`](Self::release_name).
    ///
    /// # Errors
    /// `Io` for errors of the folder.
    pub fn reserve(&self, step: u64, suffix: &str, taken: &[String]) -> Result<String> {
        let here = self.names_of(step)?;
        let mut state = lock(&self.state);
        let name = names::free_name(step, suffix, |is_of_it| {
            let names = here.iter().chain(taken).chain(&state.reserved);
            names.map(String::as_str).any(is_of_it) || {
                let entries = state.manifest.checkpoints.iter().chain(&state.manifest.retired);
                entries.flat_map(ManifestEntry::names).any(is_of_it)
            }
        });
        state.reserved.insert(name.clone());
        Ok(name)
    }

    /// Frees a reserved name. It stays reserved while it is unknown whether the manifest on disk lists its
    /// checkpoint.
    pub fn release_name(&self, name: &str) {
        let mut state = lock(&self.state);
        if state.known == ManifestKnowledge::Doubtful {
            state.release_pending.insert(name.to_owned());
        } else {
            state.reserved.remove(name);
        }
    }

    /// Makes a checkpoint current by replacing the manifest. Its files are on disk and may have private names.
    ///
    /// # Errors
    /// `Io` for errors of the folder, and if another program has replaced the folder or changed the manifest.
    /// `Manifest` if the manifest is damaged. [`is_committed`](Self::is_committed) then tells whether the checkpoint
    /// is current anyway.
    pub fn publish(&self, entry: &ManifestEntry, newer: &[u64]) -> Result<()> {
        let _turn = lock(&self.turn);
        self.ensure_durable()?;
        self.check_written(entry)?;
        self.check_manifest()?;
        let now = self.manifest();
        let mut entry = entry.clone();
        if entry.parts.is_empty() {
            entry.written_ns = Some(files::written_ns(&self.folder, &entry)?);
        }
        let next = retention::next(&now, &entry, self.keep, newer, |entry| files::is_there(&self.folder, entry));
        // Sync the names before the manifest that lists them.
        fs::sync_folder(&self.folder)?;
        self.write(&next)
    }

    /// Refuses a checkpoint whose file lies in another folder: the folder was renamed or replaced while it was written.
    fn check_written(&self, entry: &ManifestEntry) -> Result<()> {
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

    /// Returns whether the manifest lists that file, whatever failed while it was written. `None`: it cannot be read, and
    /// the last write may have replaced it or not.
    #[must_use]
    pub fn is_committed(&self, file: &str) -> Option<bool> {
        // No commit may replace the manifest between reading and adopting it.
        let _turn = lock(&self.turn);
        let lists = |manifest: &Manifest| manifest.checkpoints.iter().any(|entry| entry.file == file);
        let Ok(manifest) = self.read_file() else {
            // Somebody damaged it, after a write whose outcome is known.
            let is_known = lock(&self.state).known != ManifestKnowledge::Doubtful;
            return is_known.then(|| lists(&self.manifest()));
        };
        let is_listed = lists(&manifest);
        if lock(&self.state).known == ManifestKnowledge::Doubtful {
            self.adopt(manifest);
        }
        Some(is_listed)
    }

    /// Renames files here and removes retired ones. The manifest is on disk by now.
    pub fn settle(&self) -> Settled {
        let _turn = lock(&self.turn);
        let mut settled = Settled::default();
        let manifest = self.manifest();
        let is_nothing_to_do =
            manifest.retired.is_empty() && manifest.checkpoints.iter().all(|entry| entry.pending.is_empty());
        let known = lock(&self.state).known;
        if is_nothing_to_do && known != ManifestKnowledge::Doubtful {
            return settled;
        }
        if let Err(failure) = self.ensure_durable() {
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
    pub fn record_settled(&self, placed: &[String], gone: &[String]) {
        let mut state = lock(&self.state);
        state.manifest = retention::forgotten(&retention::placed(&state.manifest, placed), gone);
    }

    /// Renames a checkpoint of one file whose name was taken meanwhile.
    fn rename(&self, entry: &ManifestEntry) -> Result<()> {
        let name = self.reserve(entry.step, names::suffix_of(&entry.file), &[])?;
        let next = retention::renamed(&self.manifest(), &entry.file, &name);
        let renamed = self.write(&next);
        self.release_name(&name);
        renamed?;
        for entry in next.checkpoints.iter().filter(|entry| entry.file == name) {
            files::place(&self.folder, entry)?;
        }
        self.record_settled(&[name], &[]);
        Ok(())
    }
}

/// Returns the current, private name of a replacement's file.
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
