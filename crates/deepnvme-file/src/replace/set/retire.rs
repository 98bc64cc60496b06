//! Removing a set that was replaced by one file, or that is removed with its folder.

use std::collections::HashSet;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::lock::{Locked, lock_current};
use super::owned::{Owned, clean_up, sync_folders_of};
use super::record::{Record, insert_record, intended_members, read};
use super::{RACES_MAX, index_path, is_link};
use crate::replace::temporary::{self, Temporary, unlink_if};
use deepnvme_io::fs::{self, FileKind, OFlags};
use deepnvme_io::op::Errno;
use deepnvme_io::{Error, ErrorKind, Result};

/// The outcome of retiring a set.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Retired {
    /// No set existed.
    Absent,
    /// Removed the index and the files that it recorded as its own.
    Removed {
        /// Files that it listed and that stay: they are not its own, or somebody has changed them.
        kept: Vec<PathBuf>,
    },
    /// The set stays: the index is not known to be ours. It may be another program's, a copy, or a symbolic link.
    Foreign,
}

/// Removes a replaced set: first the remains of killed saves, then the index, then the files that it recorded as its
/// own.
///
/// # Errors
/// The error of the file system, `PermissionDenied` if the index cannot be removed, or `Busy` if a commit of the set
/// holds the index for over a minute, or if the index is replaced a thousand times meanwhile. If the index is gone, the
/// next save removes the rest.
pub fn retire_set(index: &Path, record_at: &[&str]) -> Result<Retired> {
    if is_link(index) {
        return Ok(Retired::Foreign);
    }
    let index = index_path(index)?;
    let record_at: Vec<String> = record_at.iter().map(|key| (*key).to_owned()).collect();
    clean_up(&index, &record_at);
    for _ in 0..RACES_MAX {
        let Some(current) = lock_current(&index)? else { continue };
        let Some(file) = current else { return Ok(Retired::Absent) };
        let stat = fs::stat_of(file.0.as_fd()).map_err(|errno| Error::os("read", errno).at_path(&index))?;
        let old = Owned::of(&file.0, &index, &record_at)?.unwrap_or_default();
        if old.members.is_empty() {
            return Ok(Retired::Foreign);
        }
        let record = Record { members: old.replaced_by(&index), ..Record::default() };
        let mut intent = Value::Object(Map::new());
        insert_record(&mut intent, &record_at, &record).map_err(|error| error.at_path(&index))?;
        let written = Temporary::new(&index)?;
        written.fill(intent.to_string().as_bytes()).map_err(|error| error.at_path(&index))?;
        let folder = fs::OpenedFolder::new(fs::folder_of(&index))?;
        folder.sync()?;
        if !unlink_if(&index, stat.identity) {
            let detail = "the index of files that are out of date could not be removed; remove it";
            return Err(Error::new(ErrorKind::PermissionDenied, "replace", detail).at_path(&index));
        }
        // Remove the index before its files, also on disk: an index without its files would be an unreadable set.
        if let Err(error) = folder.sync() {
            written.leave();
            return Err(error);
        }
        let removal = old.remove(&HashSet::new());
        if !removal.is_complete || !sync_folders_of(old.paths()) {
            written.leave();
        }
        return Ok(Retired::Removed { kept: [old.foreign, removal.changed].concat() });
    }
    Err(Error::new(ErrorKind::Busy, "replace", "the index was replaced again and again meanwhile; save again")
        .at_path(&index))
}

/// Removes a stripe set like [`remove_whole_set`]. Returns whether neither the manifest nor a killed save's
/// intent is still needed to tell which files are its own.
pub(in crate::replace) fn remove_stripes(manifest: &Path) -> bool {
    let record_at = [crate::stripe_set::RECORD_KEY.to_owned()];
    clean_up(manifest, &record_at);
    remove_owned(manifest, &record_at);
    let intents = temporary::leftovers_of(manifest, FileKind::File);
    let is_empty = |intent: &temporary::Proof| {
        let text = read(&intent.file, &intent.path);
        text.is_ok_and(|text| text.is_none_or(|list| intended_members(&list.value, &record_at, manifest).is_empty()))
    };
    let owns_nothing = match fs::open(manifest, OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK, 0) {
        Ok(file) => {
            Owned::of(&file, manifest, &record_at).is_ok_and(|owned| owned.is_none_or(|owned| owned.members.is_empty()))
        }
        Err(errno) => matches!(errno, Errno::NOENT | Errno::LOOP),
    };
    owns_nothing && intents.iter().all(is_empty)
}

/// Removes a set together with its folder: the remains of killed saves, the files that its index recorded as its own,
/// and the index. An index without records stays.
pub fn remove_whole_set(index: &Path, record_at: &[&str]) {
    let record_at: Vec<String> = record_at.iter().map(|key| (*key).to_owned()).collect();
    clean_up(index, &record_at);
    remove_owned(index, &record_at);
}

fn remove_owned(manifest: &Path, record_at: &[String]) {
    let Ok(file) = fs::open(manifest, OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK, 0) else { return };
    let Ok(stat) = fs::stat_of(file.as_fd()) else { return };
    let file = Locked(file);
    if fs::try_lock(file.0.as_fd()) != Ok(false) {
        let Ok(Some(owned)) = Owned::of(&file.0, manifest, record_at) else { return };
        // Remove the manifest last, also on disk: it lists the other files.
        if !owned.members.is_empty() && owned.remove(&HashSet::new()).is_complete && sync_folders_of(owned.paths()) {
            unlink_if(manifest, stat.identity);
        }
    }
}
