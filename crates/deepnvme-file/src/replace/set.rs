//! Replacing several files and the index that lists them, at once: the parts of a stripe set, or the shards of a model.
//!
//! The members of each save have names of their own, with a random token. Replacing the index is the moment of change.
//!
//! ```text
//! begin    an intent (a temporary of the index) lists the names of the members; create the members under private names
//! write    the caller writes the members
//! commit   an intent lists the marks of the members; rename them to their names; lock the index; write its text to a
//!          new temporary; rename; sync; remove the old members and the intent
//! retire   lock the index; list its members in an intent; remove the index; sync; remove the members and the intent
//! ```
//!
//! Each intent is locked until its members are removed or the index lists them. A process that locks an intent and then
//! reads the index knows which members are in use.
//!
//! No file is found by searching a folder. A member is removed only in one of three cases: this object created it, a
//! proven intent ([`Temporary`]) lists it, or the index recorded it as its own. The record states the mark of its
//! index, so a copy or a foreign index owns nothing. An index with several names (hard links) owns its members under
//! the name and in the folder that its record states. Intent and record also state the mark of each member, so a new
//! file under a reused name stays. The mark in the record includes the modification time, so that a member which
//! somebody has written to stays. Members in the index's own folder are recorded by name only: the folder may be
//! moved, or appear under another path in a container.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use deepnvme_format::file_list;
use deepnvme_io::display;
use deepnvme_io::fs::{self, FileId, FileKind, OFlags, Permissions, Stat};
use deepnvme_io::mem::CreatorProcess;
use deepnvme_io::op::Errno;
use deepnvme_io::{Error, ErrorKind, Result};
use serde_json::Value;

use self::identity::{folder_mark, name_of, written_mark};
use self::lock::{Locked, lock_current};
use self::owned::{Owned, clean_up, remove_intended};
use self::record::{
    INTENT, IntendedMember, Intent, Record, RecordedMember, TOKEN_DIGITS, insert_record, not_text, recorded_path,
    render,
};
use super::temporary::{self, Temporary, mark_of};
use std::os::fd::AsFd;

/// How often an index may change between open and lock.
const RACES_MAX: usize = 1000;

/// The prefix and suffix of a member's path. The token of the save goes between them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Member {
    /// The folder, and the start of the name.
    pub prefix: PathBuf,
    /// The end of the name.
    pub suffix: OsString,
}

/// The new files of a set and its new index. They are removed unless committed.
#[derive(Debug)]
pub struct SetReplacement {
    index: PathBuf,
    record_at: Vec<String>,
    token: String,
    /// The final names of all members.
    paths: Vec<PathBuf>,
    /// The members, until they get these names.
    files: Vec<Temporary>,
    /// The marks of the members that have their names.
    marks: Vec<String>,
    /// Lists the members until the index does, then `None`.
    intent: Option<Temporary>,
    creator: CreatorProcess,
}

impl SetReplacement {
    /// Cleans up after killed saves of the same set and creates the new members, empty. `record_at` is the path of
    /// keys, in the JSON object of the index, where the record of its own files goes.
    ///
    /// # Errors
    /// The error of a folder, with the path. `InvalidInput` if two members would get one name. For the index: as
    /// [`Replacement::new`](super::Replacement::new), and `InvalidInput` for a symbolic link.
    pub fn begin(index: &Path, members: &[Member], record_at: &[&str]) -> Result<Self> {
        let index = index_path(index)?;
        let record_at: Vec<String> = record_at.iter().map(|key| (*key).to_owned()).collect();
        clean_up(&index, &record_at);
        let random = fs::random_bits().map_err(|errno| Error::os("getrandom", errno))?;
        let token = format!("{random:0TOKEN_DIGITS$x}");
        let paths = members.iter().map(|member| member_path(member, &token)).collect::<Result<Vec<_>>>()?;
        // Check the final names now. Private names are cut to a length that fits, so a final name that is too long
        // would fail only after all writes.
        if let Some(path) = paths.iter().find(|path| fs::stat_link(path) == Err(Errno::NAMETOOLONG)) {
            return Err(Error::os("open for writing", Errno::NAMETOOLONG).at_path(path));
        }
        let (files, marks, intent) = (Vec::with_capacity(paths.len()), Vec::with_capacity(paths.len()), None);
        let creator = CreatorProcess::current();
        let mut new = Self { index, record_at, token, paths, files, marks, intent, creator };
        // List the members first. After a crash, the intent tells which private names to look for. Each contains the
        // inode of its file.
        new.write_intent(&[])?;
        for path in &new.paths {
            new.files.push(Temporary::new(path)?);
        }
        new.refuse_equal_names()?;
        Ok(new)
    }

    /// Refuses two members that would get one name, before they are written. Two paths may name one folder.
    fn refuse_equal_names(&self) -> Result<()> {
        let mut seen = BTreeMap::new();
        for path in &self.paths {
            let folder = fs::stat(fs::folder_of(path)).map_err(|errno| Error::os("open", errno).at_path(path))?;
            if let Some(other) = seen.insert((folder.identity, path.file_name()), path) {
                let (one, two) = (display::path(other), display::path(path));
                let detail = format!("{one} and {two} are one file; name a file of its own for each");
                return Err(Error::new(ErrorKind::InvalidInput, "open for writing", detail).at_path(&self.index));
            }
        }
        Ok(())
    }

    /// Gives the members their names, with the permissions `allowed`. First lists them with their marks in an intent.
    /// Returns their metadata.
    fn place(&mut self, allowed: Permissions) -> Result<Vec<Stat>> {
        let stats =
            self.files.iter().map(|file| set_member_permissions(file.path(), allowed)).collect::<Result<Vec<_>>>()?;
        let marks: Vec<String> = stats.iter().map(mark_of).collect();
        self.write_intent(&marks)?;
        for ((file, path), mark) in self.files.iter_mut().zip(&self.paths).zip(marks) {
            // Recorded first: the file may get its name although the call fails.
            self.marks.push(mark);
            file.rename_new(path).map_err(|errno| temporary::rename_error(errno, path))?;
        }
        let folders: BTreeSet<&Path> = self.paths.iter().map(|path| fs::folder_of(path)).collect();
        folders.into_iter().try_for_each(fs::sync_folder)?;
        Ok(stats)
    }

    /// Returns the members for an intent. Those at the end may have no marks.
    fn intended(&self, marks: &[String]) -> Vec<IntendedMember> {
        let marks = marks.iter().cloned().map(Some).chain(std::iter::repeat(None));
        self.paths.iter().cloned().zip(marks).map(IntendedMember::from).collect()
    }

    /// Writes the intent. It is on disk when this returns.
    fn write_intent(&mut self, marks: &[String]) -> Result<()> {
        let mut members = self.intended(marks);
        for member in &mut members {
            member.path = recorded_path(&member.path, &self.index);
        }
        let intent = Intent { format: INTENT.into(), version: 1, members };
        let text = serde_json::to_vec(&intent).map_err(|error| not_text(&self.index, &error))?;
        let written = Temporary::new(&self.index)?;
        written.fill(&text).map_err(|error| error.at_path(&self.index))?;
        fs::sync_folder(fs::folder_of(&self.index))?;
        self.intent = Some(written);
        Ok(())
    }

    /// Returns the index to replace.
    #[must_use]
    pub fn index(&self) -> &Path {
        &self.index
    }

    /// Returns the new members in order: empty files to write to, under private names until the commit.
    pub fn members(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(Temporary::path)
    }

    /// Returns the names that the members get, in the same order.
    pub fn names(&self) -> impl Iterator<Item = &Path> {
        self.paths.iter().map(PathBuf::as_path)
    }

    /// Commits: the index becomes this JSON object, plus the record of its own files and a checksum. The caller has
    /// synced the members' bytes as far as required. The members' names and the index are on disk when this returns.
    /// Then the members that the old index recorded as its own are removed. Returns the other files that the old index
    /// listed: they stay.
    ///
    /// # Errors
    /// The error of the file system, or `Busy` if another commit of the set holds the index for over a minute, or if
    /// the index is replaced a thousand times meanwhile. The old set is intact, unless only the last sync failed.
    pub fn commit(self, index: Value) -> Result<Vec<PathBuf>> {
        self.commit_index(index, false, Permissions::EVERYBODY)
    }

    pub(super) fn commit_index(
        mut self,
        mut index: Value,
        is_one_line: bool,
        most: Permissions,
    ) -> Result<Vec<PathBuf>> {
        let folder = fs::OpenedFolder::new(fs::folder_of(&self.index))?;
        let allowed = temporary::permissions_of(&self.index, most).map_err(|errno| self.refused(errno))?;
        let members = self.place(allowed)?;
        // Keep every intent locked until the change: an unlocked one is taken for that of a killed save.
        let mut tried = Vec::new();
        for _ in 0..RACES_MAX {
            let Some(current) = lock_current(&self.index)? else { continue };
            let old = self.owned_by(current.as_ref())?;
            let mut written = Temporary::new(&self.index)?;
            let record = self.record(&written, &members, &old)?;
            insert_record(&mut index, &self.record_at, &record).map_err(|error| error.at_path(&self.index))?;
            self.fill(&written, &index, is_one_line, allowed)?;
            if !self.rename_index(&mut written, current.as_ref())? {
                tried.push(written);
                continue;
            }
            let identities = members.iter().map(|stat| stat.identity).collect();
            return self.finish(&folder, old, &identities);
        }
        Err(Error::new(ErrorKind::Busy, "replace", "the index was replaced again and again meanwhile; save again")
            .at_path(&self.index))
    }

    /// Returns what the current index owns: the set that this one replaces.
    fn owned_by(&self, current: Option<&Locked>) -> Result<Owned> {
        let owned = current.map(|index| Owned::of(&index.0, &self.index, &self.record_at)).transpose()?;
        Ok(owned.flatten().unwrap_or_default())
    }

    /// Returns the record for the index that is `written`: its mark, and the members that it owns.
    fn record(&self, written: &Temporary, members: &[Stat], old: &Owned) -> Result<Record> {
        let recorded = |(path, stat): (&PathBuf, &Stat)| RecordedMember {
            path: recorded_path(path, &self.index),
            mark: written_mark(stat),
        };
        Ok(Record {
            index: mark_of(&fs::stat_of(written.file()).map_err(|errno| self.refused(errno))?),
            name: name_of(&self.index).escape_ascii().to_string(),
            folder: folder_mark(&self.index).unwrap_or_default(),
            token: self.token.clone(),
            members: self.paths.iter().zip(members).map(recorded).collect(),
            replaces: old.replaced_by(&self.index),
        })
    }

    /// Writes the text of the index, with its checksum, and sets the permissions.
    fn fill(&self, written: &Temporary, index: &Value, is_one_line: bool, allowed: Permissions) -> Result<()> {
        let text = render(index, is_one_line).map_err(|error| not_text(&self.index, &error))?;
        let text =
            file_list::write_checksum(&text).map_err(|error| Error::invalid(error.to_string()).at_path(&self.index))?;
        written.fill(text.as_bytes()).map_err(|error| error.at_path(&self.index))?;
        temporary::set_permissions(written.file(), allowed).map_err(|errno| self.refused(errno))
    }

    /// Renames the new index to its name. Returns false if there was no index, and another process has created one.
    fn rename_index(&self, written: &mut Temporary, current: Option<&Locked>) -> Result<bool> {
        let renamed = match current {
            Some(_) => written.rename(&self.index),
            None => written.rename_new(&self.index),
        };
        match renamed {
            Err(Errno::EXIST) => Ok(false),
            renamed => renamed.map(|()| true).map_err(|errno| temporary::rename_error(errno, &self.index)),
        }
    }

    /// Syncs the index's name, then removes the old members. Returns the files that stay.
    fn finish(&mut self, folder: &fs::OpenedFolder, old: Owned, new: &HashSet<FileId>) -> Result<Vec<PathBuf>> {
        let intent = self.intent.take();
        // Sync before removing the old members, at any durability: they may lie on other disks, which may lose less
        // than this one.
        if let Err(error) = folder.sync_change(&self.index) {
            // The old index may come back after a crash, so keep the intent of the new members.
            intent.into_iter().for_each(Temporary::leave);
            return Err(error);
        }
        Ok(self.remove_old(old, new))
    }

    /// Like [`commit`](Self::commit), with the index as text. A one-line text stays one line.
    ///
    /// # Errors
    /// As [`commit`](Self::commit), and `InvalidInput` if the text is not JSON.
    pub fn commit_text(self, index: &str) -> Result<Vec<PathBuf>> {
        match serde_json::from_str(index) {
            Ok(value) => self.commit_index(value, !index.trim_end().contains('\n'), Permissions::EVERYBODY),
            Err(error) => Err(Error::invalid(format!("the index is not JSON: {error}")).at_path(&self.index)),
        }
    }

    /// Removes the members of the replaced index. Returns the files that it listed and that stay.
    fn remove_old(&self, old: Owned, new: &HashSet<FileId>) -> Vec<PathBuf> {
        let removal = old.remove(new);
        let kept = [old.foreign, removal.changed].concat();
        if !kept.is_empty() {
            tracing::warn!(
                index = %self.index.display(),
                files = ?kept,
                "the index that was replaced listed files that are not its own, or were changed; they are left alone"
            );
        }
        kept
    }

    fn refused(&self, errno: Errno) -> Error {
        Error::os("replace", errno).at_path(&self.index)
    }
}

impl Drop for SetReplacement {
    fn drop(&mut self) {
        if self.intent.is_some() && self.creator.is_current() {
            // Remove the members before the intent, also on disk. If a removal fails, the intent stays for the next save
            // of the set.
            self.files.clear();
            let are_gone = remove_intended(&self.intended(&self.marks), &HashSet::new());
            if let Some(intent) = self.intent.take_if(|_| !are_gone) {
                intent.leave();
            }
        }
    }
}

/// Resolves the index to its absolute path. Refuses a symbolic link: the index would lie in one folder and its members
/// in another, and a save through the link would remove the members of the linked set.
fn index_path(index: &Path) -> Result<PathBuf> {
    if is_link(index) {
        let detail = "it is a symbolic link, and its set lies elsewhere: save into the folder that it leads to, or remove \
                      the link";
        return Err(Error::new(ErrorKind::InvalidInput, "replace", detail).at_path(index));
    }
    temporary::resolve(index)
}

fn is_link(path: &Path) -> bool {
    fs::stat_link(path).is_ok_and(|stat| stat.kind == FileKind::Link)
}

/// Sets the final permissions of a member. Returns its metadata.
fn set_member_permissions(path: &Path, allowed: Permissions) -> Result<Stat> {
    let refused = |errno| Error::os("open for writing", errno).at_path(path);
    let file = fs::open(path, OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK, 0).map_err(refused)?;
    let stat = fs::stat_of(file.as_fd()).map_err(refused)?;
    if stat.kind != FileKind::File {
        let detail = format!("somebody has put {} in its place; save again", stat.kind.name());
        return Err(Error::new(ErrorKind::Io, "replace", detail).at_path(path));
    }
    temporary::set_permissions(file.as_fd(), allowed).map_err(refused)?;
    Ok(stat)
}

fn member_path(member: &Member, token: &str) -> Result<PathBuf> {
    let mut name = member.prefix.clone().into_os_string();
    name.push(token);
    name.push(&member.suffix);
    let path = PathBuf::from(name);
    std::path::absolute(&path).map_err(|error| Error::from_io("open for writing", &error).at_path(path))
}

mod identity;
mod lock;
mod owned;
mod record;
mod retire;

#[cfg(test)]
mod tests;

pub(super) use record::is_token;
pub(super) use retire::remove_stripes;

pub use retire::{Retired, remove_whole_set, retire_set};
