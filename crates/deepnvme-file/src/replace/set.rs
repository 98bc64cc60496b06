//! Replacing several files and the index that lists them, at once: the parts of a stripe set, or the shards of a model.
//!
//! The members of each save have names of their own, with a random token. Replacing the index is the moment of change.
//!
//! ```text
//! begin    an intent (a temporary of the index) lists the names of the members; create the members under private names
//! write    the caller writes the members
//! commit   an intent lists the identities of the members; rename them to their names; lock the index; write its text to
//!          a new temporary; rename; sync; remove the old members and the intent
//! retire   lock the index; list its members in a temporary; remove the index; sync; remove the members and the list
//! ```
//!
//! Each list of members is locked until the members are removed or the index lists them. A process that locks a list
//! and then reads the index knows which members are in use.
//!
//! No file is found by searching a folder. A member is removed only in one of three cases: this object created it, a
//! proven intent ([`Temporary`]) lists it, or the index recorded it as its own. The record states the identity of its
//! index, so a copy or a foreign index owns nothing. An index with several names (hard links) owns its members under the
//! name and in the folder that its record states. Intent and record also state the identity of each member, so a new
//! file under a reused name stays. The record states its modification time as well, so that a member which somebody has
//! written to stays. Members in the index's own folder are recorded by name only: the folder may be moved,
//! or appear under another path in a container.

use std::collections::{BTreeSet, HashSet};
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::ser::Formatter;
use serde_json::{Map, Value};

use super::temporary::{self, EVERYBODY, Temporary, unlink_if};
use crate::sync::{Instant, thread};
use deepnvme_io::fs::{self, Identity, Kind, OFlags, Stat};
use deepnvme_io::op::Errno;
use deepnvme_io::{Error, ErrorKind, Result};

/// Maximum size of an index.
const INDEX_BYTES_MAX: u64 = 256 << 20;
/// How long a commit waits for another commit of the same set.
const LOCK_WAIT_MAX: Duration = Duration::from_secs(60);
const LOCK_STEP: Duration = Duration::from_millis(2);
/// How often an index may change between open and lock.
const RACES_MAX: usize = 1000;
const INTENT: &str = "deepnvme-intent";
/// Hexadecimal digits of a token.
const TOKEN_DIGITS: usize = 32;

/// The start and end of a member's name. The token of the save goes between.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Member {
    /// The folder, and the start of the name.
    pub before: PathBuf,
    /// The end of the name.
    pub after: OsString,
}

/// The names and identities of future members.
#[derive(Serialize, Deserialize, Default, Debug)]
struct Intent {
    format: String,
    version: u32,
    members: Vec<Intended>,
}

/// A future member's name, and its identity. Without one, only its temporaries can be removed: they prove theirs.
type Intended = (PathBuf, Option<String>);

/// The record in an index of the files that it owns.
#[derive(Serialize, Deserialize, Default, Debug)]
struct Record {
    /// The identity of the index itself.
    index: String,
    /// Its file name.
    #[serde(default)]
    name: String,
    /// The identity of its folder.
    #[serde(default)]
    folder: String,
    /// Contained in the names of all members.
    token: String,
    members: Vec<(PathBuf, String)>,
    /// Members of the replaced index. They are removed unless that failed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    replaces: Vec<(PathBuf, String)>,
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
    /// The identities of the members that have their names.
    marks: Vec<String>,
    /// Lists the members until the index does, then `None`.
    intent: Option<Temporary>,
    process: u32,
}

impl SetReplacement {
    /// Cleans up after killed saves of the same set and creates the new members, empty. `record_at` is the path of
    /// keys, in the JSON object of the index, where the record of its own files goes.
    ///
    /// # Errors
    /// The error of a folder, with the path. For the index: as [`Replacement::new`](super::Replacement::new), and
    /// `InvalidInput` for a symbolic link.
    pub fn begin(index: &Path, members: &[Member], record_at: &[&str]) -> Result<Self> {
        let index = index_path(index)?;
        let record_at: Vec<String> = record_at.iter().map(|key| (*key).to_owned()).collect();
        clean_up(&index, &record_at);
        let random = fs::random_bits().map_err(|errno| Error::os("getrandom", errno))?;
        let token = format!("{random:0TOKEN_DIGITS$x}");
        let paths = members.iter().map(|member| member_path(member, &token)).collect::<Result<Vec<_>>>()?;
        // Before gigabytes are written under a private name, which is shorter.
        if let Some(path) = paths.iter().find(|path| fs::stat_link(path) == Err(Errno::NAMETOOLONG)) {
            return Err(Error::os("open for writing", Errno::NAMETOOLONG).at_path(path));
        }
        let process = std::process::id();
        let (files, marks, intent) = (Vec::with_capacity(paths.len()), Vec::with_capacity(paths.len()), None);
        let mut new = Self { index, record_at, token, paths, files, marks, intent, process };
        // Listed first: the intent leads to the private names, which prove their identity.
        new.list(new.paths.iter().map(|path| (path.clone(), None)).collect())?;
        for path in &new.paths {
            new.files.push(Temporary::new(path)?);
        }
        Ok(new)
    }

    /// Gives the members their names, with the permissions `mode`. They are listed with their identities before.
    fn place(&mut self, mode: u32) -> Result<Vec<Stat>> {
        let stats = self.files.iter().map(|file| settle_member(file.path(), mode)).collect::<Result<Vec<_>>>()?;
        let marks: Vec<String> = stats.iter().map(mark).collect();
        self.list(self.paths.iter().cloned().zip(marks.iter().cloned().map(Some)).collect())?;
        for ((file, path), mark) in self.files.iter_mut().zip(&self.paths).zip(marks) {
            // Recorded first: the file may get its name although the call fails.
            self.marks.push(mark);
            file.rename_new(path).map_err(|errno| Error::os("rename", errno).at_path(path))?;
        }
        let folders: BTreeSet<&Path> = self.paths.iter().map(|path| fs::folder_of(path)).collect();
        folders.into_iter().try_for_each(fs::sync_folder)?;
        Ok(stats)
    }

    /// Writes the intent. It is on disk when this returns.
    fn list(&mut self, members: Vec<Intended>) -> Result<()> {
        let members = members.into_iter().map(|(path, mark)| (recorded(&path, &self.index), mark)).collect();
        let intent = Intent { format: INTENT.into(), version: 1, members };
        let text = serde_json::to_vec(&intent).map_err(|error| not_text(&self.index, &error))?;
        let written = Temporary::new(&self.index)?;
        written.fill(&text).map_err(|error| error.at_path(&self.index))?;
        fs::sync_folder(fs::folder_of(&self.index))?;
        self.intent = Some(written);
        Ok(())
    }

    /// The index to replace.
    #[must_use]
    pub fn index(&self) -> &Path {
        &self.index
    }

    /// The new members in order: empty files to write to, under private names until the commit.
    pub fn members(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(Temporary::path)
    }

    /// The names that the members get, in the same order.
    pub fn names(&self) -> impl Iterator<Item = &Path> {
        self.paths.iter().map(PathBuf::as_path)
    }

    /// Commits: the index becomes this JSON object, plus the record of its own files. The caller has synced the
    /// members' bytes as far as required. The members' names and the index are on disk when this returns. Then the
    /// members that the old index recorded as its own are removed. Returns the other files that the old index listed:
    /// they stay.
    ///
    /// # Errors
    /// The error of the file system, or `Busy` if another commit of the set holds the index for over a minute. The old
    /// set is intact, unless only the last sync failed.
    pub fn commit(self, index: Value) -> Result<Vec<PathBuf>> {
        self.commit_with(index, false, EVERYBODY, Ok)
    }

    pub(super) fn commit_with(
        mut self,
        mut index: Value,
        is_one_line: bool,
        most: u32,
        finish: impl Fn(String) -> Result<String>,
    ) -> Result<Vec<PathBuf>> {
        let folder = fs::OpenedFolder::new(fs::folder_of(&self.index))?;
        let mode = temporary::mode_of(&self.index, most).map_err(|errno| self.refused(errno))?;
        let stats = self.place(mode)?;
        let members: Vec<_> = self
            .paths
            .iter()
            .zip(&stats)
            .map(|(path, stat)| (recorded(path, &self.index), written_mark(stat)))
            .collect();
        let identities: HashSet<Identity> = stats.iter().map(|stat| stat.identity).collect();
        // Keep every list locked until the change: an unlocked one is taken for that of a killed save.
        let mut tried = Vec::new();
        for _ in 0..RACES_MAX {
            let Some(current) = lock_current(&self.index)? else { continue };
            let old = current.as_ref().map(|file| Owned::of(&file.0, &self.index, &self.record_at));
            let old = old.transpose()?.flatten().unwrap_or_default();
            let mut written = Temporary::new(&self.index)?;
            let record = Record {
                index: mark(&fs::stat_of(written.file()).map_err(|errno| self.refused(errno))?),
                name: name_of(&self.index).escape_ascii().to_string(),
                folder: folder_mark(&self.index).unwrap_or_default(),
                token: self.token.clone(),
                members: members.clone(),
                replaces: old.replaced_by(&self.index),
            };
            put(&mut index, &self.record_at, &record).map_err(|error| error.at_path(&self.index))?;
            let text = render(&index, is_one_line).map_err(|error| not_text(&self.index, &error))?;
            let text = finish(text).map_err(|error| error.at_path(&self.index))?;
            written.fill(text.as_bytes()).map_err(|error| error.at_path(&self.index))?;
            fs::set_mode(written.file(), mode).map_err(|errno| self.refused(errno))?;
            let renamed = match &current {
                Some(_) => written.rename(&self.index),
                None => written.rename_new(&self.index),
            };
            match renamed {
                Err(Errno::EXIST) => {
                    tried.push(written);
                    continue;
                }
                renamed => renamed.map_err(|errno| self.refused(errno))?,
            }
            let intent = self.intent.take();
            // Sync before removing the old members, at any durability: they may lie on other disks, which may lose less
            // than this one.
            if let Err(error) = folder.sync_change(&self.index) {
                // The old index may come back after a crash, so keep the list of the new members.
                intent.into_iter().for_each(Temporary::leave);
                return Err(error);
            }
            return Ok(self.remove_old(old, &identities));
        }
        Err(Error::new(ErrorKind::Busy, "replace", "the index was replaced again and again meanwhile; save again")
            .at_path(&self.index))
    }

    /// Like [`commit`](Self::commit), with the index as text. A one-line text stays one line. `finish` makes the final
    /// edit of the text, including the record, for example to insert a checksum.
    ///
    /// # Errors
    /// As [`commit`](Self::commit), `InvalidInput` if the text is not JSON, and the errors of `finish`.
    pub fn commit_text(self, index: &str, finish: impl Fn(String) -> Result<String>) -> Result<Vec<PathBuf>> {
        match serde_json::from_str(index) {
            Ok(value) => self.commit_with(value, !index.trim_end().contains('\n'), EVERYBODY, finish),
            Err(error) => Err(Error::invalid(format!("the index is no JSON: {error}")).at_path(&self.index)),
        }
    }

    /// Removes the members of the replaced index. Returns the files that it listed and that stay.
    fn remove_old(&self, old: Owned, new: &HashSet<Identity>) -> Vec<PathBuf> {
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
        if self.intent.is_some() && self.process == std::process::id() {
            // Remove the members before the list, also on disk. If a removal fails, the list stays for the next save of
            // the set.
            self.files.clear();
            let marks = self.marks.iter().map(Some).chain(std::iter::repeat(None));
            let listed = self.paths.iter().zip(marks).map(|(path, mark)| (path.as_path(), mark.map(String::as_str)));
            let is_gone = remove_listed(listed, &HashSet::new());
            if let Some(intent) = self.intent.take_if(|_| !is_gone) {
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
    fs::stat_link(path).is_ok_and(|stat| stat.kind == Kind::Link)
}

/// Sets the final permissions of a member. Returns its identity.
fn settle_member(path: &Path, mode: u32) -> Result<Stat> {
    let refused = |errno| Error::os("open for writing", errno).at_path(path);
    let file = fs::open(path, OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK, 0).map_err(refused)?;
    let stat = fs::stat_of(file.as_fd()).map_err(refused)?;
    if stat.kind != Kind::File {
        let detail = format!("somebody has put {} in its place; save again", stat.kind.name());
        return Err(Error::new(ErrorKind::Io, "replace", detail).at_path(path));
    }
    fs::set_mode(file.as_fd(), mode).map_err(refused)?;
    Ok(stat)
}

/// Opens and locks the current index. `Some(None)`: there is none. `None`: it changed meanwhile.
fn lock_current(index: &Path) -> Result<Option<Option<Locked>>> {
    let refused = |errno| Error::os("replace", errno).at_path(index);
    let file = match fs::open(index, OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK, 0) {
        Err(Errno::NOENT) => return Ok(Some(None)),
        file => file.map_err(refused)?,
    };
    let file = Locked(file);
    let began = Instant::now();
    // Without locks the later of two commits wins, and the other's members stay.
    while fs::try_lock(file.0.as_fd()) == Ok(false) {
        if began.elapsed() > LOCK_WAIT_MAX {
            let detail = "another process is replacing this set, and does not finish; end it, or wait for it";
            return Err(Error::new(ErrorKind::Busy, "replace", detail).at_path(index));
        }
        thread::sleep(LOCK_STEP);
    }
    let identity = fs::stat_of(file.0.as_fd()).map_err(refused)?.identity;
    Ok(fs::stat_link(index).is_ok_and(|stat| stat.identity == identity).then_some(Some(file)))
}

/// A locked index. Unlocks explicitly: after a fork the child shares the lock, so closing would not release it.
struct Locked(OwnedFd);

impl Drop for Locked {
    fn drop(&mut self) {
        let _ = fs::unlock(self.0.as_fd());
    }
}

/// The files that the current index owns.
#[derive(Default)]
struct Owned {
    members: Vec<(PathBuf, String)>,
    replaced: Vec<(PathBuf, String)>,
    /// Files that it lists but does not own.
    foreign: Vec<PathBuf>,
}

impl Owned {
    /// Returns `None` if the index is damaged or not an index: it may list anything.
    fn of(index: &OwnedFd, path: &Path, record_at: &[String]) -> Result<Option<Self>> {
        let stat = fs::stat_of(index.as_fd()).map_err(|errno| Error::os("read", errno).at_path(path))?;
        let Some(value) = read(index, path)? else { return Ok(None) };
        let listed = listed(&value, path);
        let record = take(&value, record_at).and_then(|record| Record::deserialize(record).ok());
        // A foreign index, a copy, another name of an index, or one from a network owns nothing here.
        let is_own =
            |record: &Record| record.index == mark(&stat) && stat.user == fs::user() && record.is_at(path, &stat);
        let Some(record) = record.filter(is_own) else {
            return Ok(Some(Self { foreign: listed, ..Self::default() }));
        };
        let has_token =
            |(path, _): &(PathBuf, String)| is_token(&record.token) && contains(name_of(path), &record.token);
        let members: Vec<_> = placed(record.members, path).into_iter().filter(has_token).collect();
        let own: HashSet<&Path> = members.iter().map(|(path, _)| path.as_path()).collect();
        let foreign = listed.into_iter().filter(|path| !own.contains(path.as_path())).collect();
        let replaced = placed(record.replaces, path);
        Ok(Some(Self { members, replaced, foreign }))
    }

    /// The `replaces` of the next index: this index's members, and earlier ones whose removal is still due.
    fn replaced_by(&self, index: &Path) -> Vec<(PathBuf, String)> {
        let all = self.members.iter().cloned().chain(lingering(&self.replaced));
        all.map(|(path, stated)| (recorded(&path, index), stated)).collect()
    }

    /// Its members, and members of earlier indexes whose removal failed.
    fn all(&self) -> impl Iterator<Item = &(PathBuf, String)> {
        self.members.iter().chain(&self.replaced)
    }

    fn paths(&self) -> impl Iterator<Item = &Path> {
        self.all().map(|(path, _)| path.as_path())
    }

    /// Removes all files except those in `kept`, and those that somebody has written to.
    fn remove(&self, kept: &HashSet<Identity>) -> Removal {
        let mut removal = Removal { are_gone: true, changed: Vec::new() };
        for (path, stated) in self.all() {
            match fs::stat_link(path) {
                Ok(stat) if !is_marked(&stat, stated) || kept.contains(&stat.identity) => {}
                Ok(stat) if !is_as_written(&stat, stated) => removal.changed.push(path.clone()),
                Ok(stat) => {
                    let file = temporary::held(path);
                    removal.are_gone &= unlink_if(path, stat.identity);
                    temporary::release(file);
                }
                Err(Errno::NOENT | Errno::NOTDIR) => {}
                Err(_) => removal.are_gone = false,
            }
        }
        removal
    }
}

/// The outcome of removing the members of an index.
struct Removal {
    /// Whether all that may be removed are gone.
    are_gone: bool,
    /// Members that somebody has written to. They stay.
    changed: Vec<PathBuf>,
}

impl Record {
    /// Whether the index with this record is the one that was written under this name. With a single name it is, also
    /// after it was renamed.
    fn is_at(&self, path: &Path, stat: &Stat) -> bool {
        stat.links == 1
            || (self.name == name_of(path).escape_ascii().to_string()
                && folder_mark(path).as_ref() == Some(&self.folder))
    }
}

/// Cleans up after killed saves of this set: removes members that an intent lists, and members that the index records
/// as replaced.
fn clean_up(index: &Path, record_at: &[String]) {
    // Lock the lists before reading the index: a member listed by them can no longer come into use.
    let lists = temporary::stale_of(index, Kind::File);
    let current = fs::open(index, OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK, 0);
    let owned = match &current {
        Ok(current) => Owned::of(current, index, record_at).ok().flatten(),
        Err(Errno::NOENT) => Some(Owned::default()),
        Err(_) => None,
    };
    // Without the index, the members in use are unknown.
    let Some(Owned { members, replaced, foreign }) = owned else { return };
    let mut live = HashSet::new();
    for path in members.iter().map(|(path, _)| path).chain(&foreign) {
        match fs::stat_link(path) {
            Ok(stat) => drop(live.insert(stat.identity)),
            Err(Errno::NOENT | Errno::NOTDIR) => {}
            Err(_) => return,
        }
    }
    let is_there = |path: &Path| !matches!(fs::stat_link(path), Err(Errno::NOENT | Errno::NOTDIR));
    let left: Vec<_> = replaced.into_iter().filter(|(path, _)| is_there(path)).collect();
    // The process that renamed the index may have died before the sync. A power cut would bring back the older index,
    // which may need members that this one does not.
    if (lists.is_empty() && left.is_empty()) || fs::sync_folder(fs::folder_of(index)).is_err() {
        return;
    }
    for stale in lists {
        // An intent is on disk before its members are created, so an unreadable text has none. After a power cut, the
        // intent of a committed set may reappear.
        let Ok(said) = read(&stale.file, &stale.path) else { continue };
        let listed = said.map(|value| intended(&value, record_at, index)).unwrap_or_default();
        // Remove the list only once its members are gone from the disk.
        if remove_listed(listed.iter().map(|(path, stated)| (path.as_path(), stated.as_deref())), &live) {
            stale.remove();
        }
    }
    let _ = Owned { members: left, ..Owned::default() }.remove(&live);
}

/// Removes listed members and their temporaries. Returns whether all removals are on disk.
fn remove_listed<'a>(
    listed: impl Iterator<Item = (&'a Path, Option<&'a str>)> + Clone,
    live: &HashSet<Identity>,
) -> bool {
    let mut are_gone = true;
    for (path, stated) in listed.clone() {
        // The member may not have its name yet, or may itself have been about to be replaced.
        are_gone &= temporary::remove_all_stale(path);
        are_gone &= stated.is_none_or(|stated| remove_member(path, stated, live));
    }
    are_gone && sync_folders_of(listed.map(|(path, _)| path))
}

/// Removes an unlisted member if its identity matches the list. Returns false if it may be left.
fn remove_member(path: &Path, stated: &str, live: &HashSet<Identity>) -> bool {
    let is_ours = |stat: &Stat| {
        stat.user == fs::user()
            && is_marked(stat, stated)
            && is_as_written(stat, stated)
            && !live.contains(&stat.identity)
    };
    match fs::stat_link(path) {
        Ok(stat) if is_ours(&stat) => unlink_if(path, stat.identity),
        Ok(_) | Err(Errno::NOENT | Errno::NOTDIR) => true,
        Err(_) => false,
    }
}

/// Filters the files whose removal may not be on disk yet. They stay recorded until it is, or somebody writes to them.
fn lingering(replaced: &[(PathBuf, String)]) -> Vec<(PathBuf, String)> {
    let is_due = |(path, stated): &&(PathBuf, String)| match fs::stat_link(path) {
        Ok(stat) => is_marked(&stat, stated) && is_as_written(&stat, stated),
        Err(Errno::NOENT | Errno::NOTDIR) => !sync_folders_of([path.as_path()]),
        Err(_) => true,
    };
    replaced.iter().filter(is_due).cloned().collect()
}

/// Syncs the folders of these names. Returns whether it succeeded.
fn sync_folders_of<'a>(paths: impl IntoIterator<Item = &'a Path>) -> bool {
    let folders: BTreeSet<&Path> = paths.into_iter().map(fs::folder_of).collect();
    // A removed folder contains nothing.
    folders
        .into_iter()
        .all(|folder| fs::sync_folder(folder).map_or_else(|error| error.kind() == ErrorKind::NotFound, |()| true))
}

/// The members that a stale temporary lists. It is an intent, or an index that did not get its name.
fn intended(value: &Value, record_at: &[String], index: &Path) -> Vec<Intended> {
    if let Some(record) = take(value, record_at).and_then(|record| Record::deserialize(record).ok()) {
        return placed(record.members, index).into_iter().map(|(path, stated)| (path, Some(stated))).collect();
    }
    match Intent::deserialize(value) {
        Ok(intent) if intent.format == INTENT && intent.version == 1 => {
            let members = intent.members.into_iter().filter(|(path, _)| has_any_token(path));
            members.map(|(path, stated)| (fs::folder_of(index).join(path), stated)).collect()
        }
        _ => Vec::new(),
    }
}

/// The form of a path in the records of an index.
fn recorded(path: &Path, index: &Path) -> PathBuf {
    match path.file_name() {
        Some(name) if fs::folder_of(path) == fs::folder_of(index) => name.into(),
        _ => path.to_path_buf(),
    }
}

/// Resolves the paths in the records of an index.
fn placed(members: Vec<(PathBuf, String)>, index: &Path) -> Vec<(PathBuf, String)> {
    members.into_iter().map(|(path, stated)| (fs::folder_of(index).join(path), stated)).collect()
}

/// All files that an index lists, owned or not: the parts of a stripe manifest, or the values of a weight map.
fn listed(index: &Value, path: &Path) -> Vec<PathBuf> {
    let names = match (index.get("parts"), index.get("weight_map")) {
        (Some(Value::Array(parts)), _) => parts.iter().filter_map(Value::as_str).collect::<HashSet<_>>(),
        (_, Some(Value::Object(map))) => map.values().filter_map(Value::as_str).collect(),
        _ => HashSet::new(),
    };
    let mut paths: Vec<PathBuf> = names.into_iter().map(|name| fs::folder_of(path).join(name)).collect();
    paths.sort();
    paths
}

fn member_path(member: &Member, token: &str) -> Result<PathBuf> {
    let mut name = member.before.clone().into_os_string();
    name.push(token);
    name.push(&member.after);
    let path = PathBuf::from(name);
    std::path::absolute(&path).map_err(|error| Error::from_io("open for writing", &error).at_path(path))
}

/// Renders an index: indented, or on one line with spaces as Python does.
fn render(index: &Value, is_one_line: bool) -> serde_json::Result<String> {
    if !is_one_line {
        return Ok(serde_json::to_string_pretty(index)? + "\n");
    }
    let mut bytes = Vec::new();
    index.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, OneLine))?;
    bytes.push(b'\n');
    String::from_utf8(bytes).map_err(serde::ser::Error::custom)
}

struct OneLine;

impl Formatter for OneLine {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, is_first: bool) -> io::Result<()> {
        writer.write_all(if is_first { b"" } else { b", " })
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, is_first: bool) -> io::Result<()> {
        writer.write_all(if is_first { b"" } else { b", " })
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

/// Parses an index or intent. Returns `None` if it is neither. A read failure is an error, since the content is
/// unknown.
fn read(file: &OwnedFd, path: &Path) -> Result<Option<Value>> {
    match fs::read_small_of(file, path, INDEX_BYTES_MAX) {
        Ok(text) => Ok(serde_json::from_slice(&text).ok()),
        Err(error) if error.kind() == ErrorKind::InvalidInput => Ok(None),
        Err(error) => Err(error),
    }
}

/// The identity of a file, as records state it. Omits the device number, which changes when disks are remounted.
fn mark(stat: &Stat) -> String {
    format!("{:x}-{:x}", stat.identity.inode, stat.born_ns.unwrap_or(0))
}

/// The identity of a member that was written to the end, with its modification time.
fn written_mark(stat: &Stat) -> String {
    format!("{}-{:x}", mark(stat), stat.modified_ns)
}

/// Whether a record means this file.
fn is_marked(stat: &Stat, stated: &str) -> bool {
    let rest = stated.strip_prefix(&mark(stat));
    stat.kind == Kind::File && rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
}

/// Whether nobody has written to the file since its record. The time may be older than the record's: disks keep it with
/// less precision than memory, and a power cut may bring back an earlier one.
fn is_as_written(stat: &Stat, stated: &str) -> bool {
    let modified_ns = stated.split('-').nth(2).map(|modified_ns| i128::from_str_radix(modified_ns, 16));
    modified_ns.is_none_or(|modified_ns| modified_ns.is_ok_and(|modified_ns| stat.modified_ns <= modified_ns))
}

/// The identity of a file's folder.
fn folder_mark(path: &Path) -> Option<String> {
    fs::stat(fs::folder_of(path)).ok().map(|stat| mark(&stat))
}

fn name_of(path: &Path) -> &[u8] {
    path.file_name().unwrap_or_default().as_encoded_bytes()
}

fn contains(name: &[u8], token: &str) -> bool {
    name.windows(token.len()).any(|part| part == token.as_bytes())
}

fn is_token(text: &str) -> bool {
    text.len() == TOKEN_DIGITS && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Returns whether this may be a member's name.
fn has_any_token(path: &Path) -> bool {
    let name = name_of(path);
    name.windows(TOKEN_DIGITS).any(|part| std::str::from_utf8(part).is_ok_and(is_token))
}

fn take<'a>(value: &'a Value, keys: &[String]) -> Option<&'a Value> {
    keys.iter().try_fold(value, |value, key| value.get(key))
}

fn put(value: &mut Value, keys: &[String], record: &Record) -> Result<()> {
    let odd = || Error::invalid("the index is no JSON object with room for the record of its files");
    let (last, above) = keys.split_last().ok_or_else(odd)?;
    let mut object = value.as_object_mut().ok_or_else(odd)?;
    for key in above {
        let inner = object.entry(key.clone()).or_insert_with(|| Value::Object(Map::new()));
        object = inner.as_object_mut().ok_or_else(odd)?;
    }
    let record = serde_json::to_value(record).map_err(|error| not_text(Path::new(""), &error))?;
    object.insert(last.clone(), record);
    Ok(())
}

fn not_text(path: &Path, error: &serde_json::Error) -> Error {
    Error::invalid(format!("the name of a file is not UTF-8: {error}")).at_path(path)
}

mod retire;
#[cfg(test)]
mod tests;

pub(super) use retire::remove_stripes;
pub use retire::{Retired, remove_whole_set, retire_set};
