//! The files that an index owns, and their removal. Nothing else is removed.

use std::collections::{BTreeSet, HashSet};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use deepnvme_format::file_list::SealState;
use deepnvme_io::fs::{self, FileId, FileKind, OFlags, Stat};
use deepnvme_io::op::Errno;
use deepnvme_io::{Error, ErrorKind, Result};
use serde::Deserialize;

use super::identity::{is_as_written, is_marked, name_of};
use super::record::{
    IntendedMember, List, Record, RecordedMember, contains, find_record, has_any_token, intended_members, is_token,
    listed_files, read, recorded_path, resolve_paths,
};
use crate::replace::temporary::{self, mark_of, unlink_if};

/// The files that the current index owns.
#[derive(Default)]
pub(super) struct Owned {
    pub(super) members: Vec<RecordedMember>,
    pub(super) replaced: Vec<RecordedMember>,
    /// Files that it lists but does not own.
    pub(super) foreign: Vec<PathBuf>,
}

impl Owned {
    /// Returns `None` if the index is damaged or not an index: it may list anything.
    pub(super) fn of(index: &OwnedFd, path: &Path, record_at: &[String]) -> Result<Option<Self>> {
        let stat = fs::stat_of(index.as_fd()).map_err(|errno| Error::os("read", errno).at_path(path))?;
        let Some(List { value, state }) = read(index, path)? else { return Ok(None) };
        if state == SealState::Damaged {
            return Ok(None);
        }
        let listed = listed_files(&value, path);
        let record = find_record(&value, record_at).and_then(|record| Record::deserialize(record).ok());
        let record = record.filter(|_| state == SealState::Sealed);
        // A foreign or edited index, a copy, another name of an index, or the index of another user owns nothing here.
        let is_own =
            |record: &Record| record.index == mark_of(&stat) && stat.user == fs::user() && record.is_at(path, &stat);
        let Some(record) = record.filter(is_own) else {
            return Ok(Some(Self { foreign: listed, ..Self::default() }));
        };
        let has_token =
            |member: &RecordedMember| is_token(&record.token) && contains(name_of(&member.path), &record.token);
        let members: Vec<_> = resolve_paths(record.members, path).into_iter().filter(has_token).collect();
        let own: HashSet<&Path> = members.iter().map(|member| member.path.as_path()).collect();
        let foreign = listed.into_iter().filter(|path| !own.contains(path.as_path())).collect();
        // Tokens of earlier saves. A name of another form was not given by this library.
        let replaced = resolve_paths(record.replaces, path);
        let replaced = replaced.into_iter().filter(|member| has_any_token(&member.path)).collect();
        Ok(Some(Self { members, replaced, foreign }))
    }

    /// Returns the `replaces` of the next index: this index's members, and earlier ones whose removal is still due.
    pub(super) fn replaced_by(&self, index: &Path) -> Vec<RecordedMember> {
        let all = self.members.iter().cloned().chain(not_yet_removed(&self.replaced));
        all.map(|member| RecordedMember { path: recorded_path(&member.path, index), ..member }).collect()
    }

    /// Its members, and members of earlier indexes whose removal failed.
    pub(super) fn all(&self) -> impl Iterator<Item = &RecordedMember> {
        self.members.iter().chain(&self.replaced)
    }

    pub(super) fn paths(&self) -> impl Iterator<Item = &Path> {
        self.all().map(|member| member.path.as_path())
    }

    /// Removes all files except those in use (`live`), and those that somebody has replaced or written to.
    pub(super) fn remove(&self, live: &HashSet<FileId>) -> Removal {
        remove_members(self.all(), live)
    }
}

fn remove_members<'a>(members: impl IntoIterator<Item = &'a RecordedMember>, live: &HashSet<FileId>) -> Removal {
    let mut removal = Removal { is_complete: true, changed: Vec::new() };
    for RecordedMember { path, mark } in members {
        match fs::stat_link(path) {
            Ok(stat) if live.contains(&stat.identity) => {}
            Ok(stat) if !is_marked(&stat, mark) || !is_as_written(&stat, mark) => removal.changed.push(path.clone()),
            Ok(stat) => {
                let file = temporary::held(path);
                removal.is_complete &= unlink_if(path, stat.identity);
                temporary::release(file);
            }
            Err(Errno::NOENT | Errno::NOTDIR) => {}
            Err(_) => removal.is_complete = false,
        }
    }
    removal
}

/// The outcome of removing the members of an index.
pub(super) struct Removal {
    /// Whether all members that may be removed are gone.
    pub(super) is_complete: bool,
    /// Members that somebody has replaced or written to. They stay.
    pub(super) changed: Vec<PathBuf>,
}

/// Cleans up after killed saves of this set: removes members that an intent lists, and members that the index records
/// as replaced.
pub(super) fn clean_up(index: &Path, record_at: &[String]) {
    // Lock the intents before reading the index: a member listed by them can no longer come into use.
    let intents = temporary::leftovers_of(index, FileKind::File);
    let current = fs::open(index, OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK, 0);
    let owned = match &current {
        Ok(current) => Owned::of(current, index, record_at).ok().flatten(),
        Err(Errno::NOENT) => Some(Owned::default()),
        Err(_) => None,
    };
    // Without the index, the members in use are unknown.
    let Some(Owned { members, replaced, foreign }) = owned else { return };
    let mut live = HashSet::new();
    for path in members.iter().map(|member| &member.path).chain(&foreign) {
        match fs::stat_link(path) {
            Ok(stat) => drop(live.insert(stat.identity)),
            Err(Errno::NOENT | Errno::NOTDIR) => {}
            Err(_) => return,
        }
    }
    let is_there = |path: &Path| !matches!(fs::stat_link(path), Err(Errno::NOENT | Errno::NOTDIR));
    let left: Vec<_> = replaced.into_iter().filter(|member| is_there(&member.path)).collect();
    // The process that renamed the index may have died before the sync. A power cut would bring back the older index,
    // which may need members that this one does not.
    if (intents.is_empty() && left.is_empty()) || fs::sync_folder(fs::folder_of(index)).is_err() {
        return;
    }
    for intent in intents {
        // An intent is on disk before its members are created, so an unreadable text has none. After a power cut, the
        // intent of a committed set may reappear.
        let Ok(text) = read(&intent.file, &intent.path) else { continue };
        let members = text.map(|list| intended_members(&list.value, record_at, index)).unwrap_or_default();
        // Remove the intent only once its members are gone from the disk.
        if remove_intended(&members, &live) {
            intent.remove();
        }
    }
    let _ = remove_members(&left, &live);
}

/// Removes the members of an intent and their temporaries. Returns whether all removals are on disk.
pub(super) fn remove_intended(members: &[IntendedMember], live: &HashSet<FileId>) -> bool {
    let mut are_gone = true;
    for IntendedMember { path, mark } in members {
        // The member may not have its name yet, or may itself have been about to be replaced.
        are_gone &= temporary::remove_all_leftovers(path);
        are_gone &= mark.as_ref().is_none_or(|mark| remove_member(path, mark, live));
    }
    are_gone && sync_folders_of(members.iter().map(|member| member.path.as_path()))
}

/// Removes a member if the mark is its own, unless the current index uses it (`live`). Returns false if it may be left.
pub(super) fn remove_member(path: &Path, mark: &str, live: &HashSet<FileId>) -> bool {
    let is_ours = |stat: &Stat| {
        stat.user == fs::user() && is_marked(stat, mark) && is_as_written(stat, mark) && !live.contains(&stat.identity)
    };
    match fs::stat_link(path) {
        Ok(stat) if is_ours(&stat) => unlink_if(path, stat.identity),
        Ok(_) | Err(Errno::NOENT | Errno::NOTDIR) => true,
        Err(_) => false,
    }
}

/// Returns the files whose removal may not be on disk yet. They stay recorded until it is, or until somebody writes to
/// them.
pub(super) fn not_yet_removed(replaced: &[RecordedMember]) -> Vec<RecordedMember> {
    let is_due = |RecordedMember { path, mark }: &&RecordedMember| match fs::stat_link(path) {
        Ok(stat) => is_marked(&stat, mark) && is_as_written(&stat, mark),
        Err(Errno::NOENT | Errno::NOTDIR) => !sync_folders_of([path.as_path()]),
        Err(_) => true,
    };
    replaced.iter().filter(is_due).cloned().collect()
}

/// Syncs the folders of these names. Returns whether it succeeded.
pub(super) fn sync_folders_of<'a>(paths: impl IntoIterator<Item = &'a Path>) -> bool {
    let folders: BTreeSet<&Path> = paths.into_iter().map(fs::folder_of).collect();
    // A removed folder contains nothing.
    folders
        .into_iter()
        .all(|folder| fs::sync_folder(folder).map_or_else(|error| error.kind() == ErrorKind::NotFound, |()| true))
}
