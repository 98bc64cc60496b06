//! Removing a set of which one file has taken the place.

use std::collections::HashSet;
use std::os::fd::AsFd;
use std::path::Path;

use serde_json::{Map, Value};

use super::{Owned, RACES_MAX, Record, clean_up, lock_current, put, sync_folders_of};
use crate::error::{Error, ErrorKind, Result};
use crate::fs;
use crate::stream::temporary::{self, Temporary, unlink_if};

/// What became of a set that was to go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Retired {
    /// There was none.
    Absent,
    /// It is gone: the index, and the files that it recorded as its own.
    Removed,
    /// It stays: the index is not known to be ours, as that of another program, or a copy.
    Foreign,
}

/// Removes a set that something else has taken the place of: the index, then the files that it recorded as its own. First,
/// what killed saves of the set have left goes.
///
/// # Errors
/// The refusal of the file system; `Busy` where a commit of the set holds the index for longer than a minute. Of a set whose
/// index is gone the next save removes the rest.
pub fn retire_set(index: &Path, record_at: &[&str]) -> Result<Retired> {
    let index = temporary::resolve(index)?;
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
        let mut list = Value::Object(Map::new());
        put(&mut list, &record_at, &record).map_err(|error| error.at_path(&index))?;
        let written = Temporary::new(&index)?;
        written.fill(list.to_string().as_bytes()).map_err(|error| error.at_path(&index))?;
        let folder = fs::OpenedFolder::new(fs::folder_of(&index))?;
        folder.sync()?;
        if !unlink_if(&index, stat.identity) {
            let detail = "the index of files that are out of date could not be removed; remove it";
            return Err(Error::new(ErrorKind::PermissionDenied, "replace", detail).at_path(&index));
        }
        // Before the files, also on the disk: an index without them would be a set that cannot be read.
        let synced = folder.sync();
        let is_gone = synced.is_ok() && old.remove(&HashSet::new()) && sync_folders_of(old.paths());
        if !is_gone {
            written.leave();
        }
        return synced.map(|()| Retired::Removed);
    }
    Err(Error::new(ErrorKind::Busy, "replace", "the index was replaced again and again meanwhile; save again")
        .at_path(&index))
}
