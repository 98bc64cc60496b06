//! The files and folders of all disks, and their state after a power cut.
//!
//! File contents are in `memfd`s, so that real descriptors exist and real transfers work. All else is a model.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use deepnvme_testkit::rng::Rng;
use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create};
use rustix::io::{Errno, pread, pwrite};

pub use super::entry::{InodeEntry, Metadata, Node};
use super::folder::{Folder, Inode};
use super::journal::{ChangeId, Journal};

/// Maximum symbolic links in one path.
const LINKS_MAX: usize = 40;
/// Last changes at risk on a disk that loses few.
const LATE_CHANGES: u64 = 12;

/// Losses of a power cut among changes that are not durable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Losses {
    /// Changes that are kept, per thousand. Applies to names only if `names` is [`NameLosses::Any`].
    pub kept_per_mille: u32,
    /// Which changes of names are lost.
    pub names: NameLosses,
}

/// Which changes of names a power cut loses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NameLosses {
    /// Any of them, as for all other changes.
    Any,
    /// On each disk, those after some moment.
    Late,
    /// In some folders all, in others none: folders may be on disks that write at different times.
    Folders,
    /// In some folders those before some moment, and none after it.
    Early,
}

impl Losses {
    /// Draws losses from the seed.
    #[must_use]
    pub fn draw(rng: &mut Rng) -> Self {
        let names = rng.pick(&[
            NameLosses::Any,
            NameLosses::Any,
            NameLosses::Late,
            NameLosses::Late,
            NameLosses::Folders,
            NameLosses::Early,
        ]);
        Self { kept_per_mille: rng.pick(&[0, 0, 300, 500, 700, 1000]), names }
    }
}

/// The resolution of a path: folder, name, and the name's file.
#[derive(Clone, Debug)]
pub struct ResolvedPath {
    /// Folder of the name.
    pub folder: Inode,
    /// Last component of the path.
    pub name: OsString,
    /// File of the name, if any.
    pub inode: Option<Inode>,
}

/// All disks.
#[derive(Debug)]
pub struct Tree {
    pub(super) entries: BTreeMap<Inode, InodeEntry>,
    pub(super) by_memory: HashMap<u64, Inode>,
    pub(super) roots: Vec<Inode>,
    pub(super) next_inode: Inode,
    pub(super) last_change: ChangeId,
    pub(super) now_ns: u64,
}

/// Root of all paths, which contains the disks.
pub const ROOT: Inode = 1;

impl Tree {
    /// Creates empty disks under `/d0`, `/d1` and so on.
    ///
    /// # Errors
    /// If the kernel provides no memory.
    pub fn new(disks: usize) -> Result<Self, Errno> {
        let (entries, by_memory) = (BTreeMap::new(), HashMap::new());
        let mut tree =
            Self { entries, by_memory, roots: Vec::new(), next_inode: ROOT, last_change: 0, now_ns: 1_700_000_000_000 };
        let root = tree.make(Node::Folder(Folder::default()), 0, 0o755, false)?;
        debug_assert_eq!(root, ROOT, "the root comes first");
        // Large enough that no code hits a file number by chance.
        tree.next_inode = 1 << 40;
        for disk in 0..disks {
            let folder = tree.make(Node::Folder(Folder::default()), disk, 0o755, false)?;
            tree.set_names(ROOT, vec![(format!("d{disk}").into(), Some(folder))]);
            tree.roots.push(folder);
        }
        let all = tree.last_change;
        tree.folder_mut(ROOT)?.sync(all);
        Ok(tree)
    }

    /// Creates an entry without a name.
    ///
    /// # Errors
    /// If the kernel provides no memory.
    pub fn make(&mut self, node: Node, disk: usize, mode: u32, is_foreign: bool) -> Result<Inode, Errno> {
        let memory = new_memory()?;
        self.by_memory.insert(memory_of(memory.as_fd())?, self.next_inode);
        let now = self.tick();
        let metadata = Metadata { node, disk, mode, born_ns: now, modified_ns: now, links: 0, is_foreign, at: None };
        self.entries.insert(self.next_inode, InodeEntry::new(metadata, memory));
        self.next_inode += 1;
        Ok(self.next_inode - 1)
    }

    /// Returns the time. Each call advances it.
    pub fn tick(&mut self) -> u64 {
        self.now_ns += 1000;
        self.now_ns
    }

    /// Returns a number for the next change.
    pub fn next_change(&mut self) -> ChangeId {
        self.last_change += 1;
        self.last_change
    }

    /// Returns the number of the last change.
    #[must_use]
    pub fn last_change(&self) -> ChangeId {
        self.last_change
    }

    /// Returns the entry of this number.
    ///
    /// # Errors
    /// `BADF` if it is not of this world.
    pub fn entry(&self, inode: Inode) -> Result<&InodeEntry, Errno> {
        self.entries.get(&inode).ok_or(Errno::BADF)
    }

    /// Returns the entry of this number for changes.
    ///
    /// # Errors
    /// As [`entry`](Self::entry).
    pub fn entry_mut(&mut self, inode: Inode) -> Result<&mut InodeEntry, Errno> {
        self.entries.get_mut(&inode).ok_or(Errno::BADF)
    }

    /// Returns the file of a descriptor.
    ///
    /// # Errors
    /// `BADF` if it is not of this world.
    pub fn inode_of(&self, file: BorrowedFd<'_>) -> Result<Inode, Errno> {
        self.by_memory.get(&memory_of(file)?).copied().ok_or(Errno::BADF)
    }

    /// Returns the memory behind a file.
    ///
    /// # Errors
    /// As [`entry`](Self::entry).
    pub fn memory(&self, inode: Inode) -> Result<BorrowedFd<'_>, Errno> {
        Ok(self.entry(inode)?.memory.as_fd())
    }

    /// Returns a folder.
    ///
    /// # Errors
    /// `NOTDIR` for anything else.
    pub fn folder(&self, inode: Inode) -> Result<&Folder, Errno> {
        if let Node::Folder(folder) = &self.entry(inode)?.node { Ok(folder) } else { Err(Errno::NOTDIR) }
    }

    fn folder_mut(&mut self, inode: Inode) -> Result<&mut Folder, Errno> {
        if let Node::Folder(folder) = &mut self.entry_mut(inode)?.node { Ok(folder) } else { Err(Errno::NOTDIR) }
    }

    /// Resolves a path. A link at its end is followed if `follows`; the name itself may be free.
    ///
    /// # Errors
    /// `NOENT` or `NOTDIR` if the folder does not exist, `LOOP` for too many links.
    pub fn find(&self, path: &Path, follows: bool) -> Result<ResolvedPath, Errno> {
        let mut links = 0;
        self.find_from(path, follows, &mut links)
    }

    fn find_from(&self, path: &Path, follows: bool, links: &mut usize) -> Result<ResolvedPath, Errno> {
        let mut above = vec![ROOT];
        let components: Vec<Component<'_>> = path.components().collect();
        let mut place = ResolvedPath { folder: ROOT, name: OsString::new(), inode: Some(ROOT) };
        for (index, component) in components.iter().enumerate() {
            let is_last = index + 1 == components.len();
            let name = match component {
                Component::RootDir | Component::CurDir | Component::Prefix(_) => continue,
                Component::ParentDir => {
                    if above.len() > 1 {
                        above.pop();
                    }
                    let here = *above.last().unwrap_or(&ROOT);
                    place = self.resolved(here);
                    continue;
                }
                Component::Normal(name) => *name,
            };
            let here = *above.last().unwrap_or(&ROOT);
            let inode = self.folder(here)?.get(name);
            place = ResolvedPath { folder: here, name: name.to_os_string(), inode };
            let Some(found) = inode else {
                if is_last {
                    return Ok(place);
                }
                return Err(Errno::NOENT);
            };
            match &self.entry(found)?.node {
                Node::Link(target) if !is_last || follows => {
                    *links += 1;
                    if *links > LINKS_MAX {
                        return Err(Errno::LOOP);
                    }
                    let base = self.path_of(here).unwrap_or_default();
                    place = self.find_from(&base.join(target), true, links)?;
                    match place.inode {
                        Some(inode) if matches!(self.entry(inode)?.node, Node::Folder(_)) => {
                            above = self.ancestors(inode);
                        }
                        Some(_) if is_last => {}
                        None if is_last => {}
                        Some(_) => return Err(Errno::NOTDIR),
                        None => return Err(Errno::NOENT),
                    }
                }
                Node::Folder(_) => above.push(found),
                _ if is_last => {}
                _ => return Err(Errno::NOTDIR),
            }
        }
        Ok(place)
    }

    fn resolved(&self, inode: Inode) -> ResolvedPath {
        let at = self.entries.get(&inode).and_then(|entry| entry.at.clone());
        let (folder, name) = at.unwrap_or((ROOT, OsString::new()));
        ResolvedPath { folder, name, inode: Some(inode) }
    }

    /// Returns the folders from the root down to this one.
    fn ancestors(&self, inode: Inode) -> Vec<Inode> {
        let mut path_down = vec![inode];
        let mut here = inode;
        while here != ROOT
            && let Some((above, _)) = self.entries.get(&here).and_then(|entry| entry.at.clone())
        {
            path_down.push(above);
            here = above;
        }
        path_down.reverse();
        path_down
    }

    /// Returns the path of a named entry.
    #[must_use]
    pub fn path_of(&self, inode: Inode) -> Option<PathBuf> {
        if inode == ROOT {
            return Some(PathBuf::from("/"));
        }
        let (folder, name) = self.entries.get(&inode)?.at.as_ref()?;
        Some(self.path_of(*folder)?.join(name))
    }

    /// Changes a folder's names atomically.
    pub fn set_names(&mut self, folder: Inode, updates: Vec<(OsString, Option<Inode>)>) {
        for (name, after) in &updates {
            let before = self.folder(folder).ok().and_then(|folder| folder.get(name));
            if let Some(before) = before.and_then(|inode| self.entries.get_mut(&inode)) {
                before.links = before.links.saturating_sub(1);
                if before.at.as_ref().is_some_and(|(at, called)| *at == folder && called == name) {
                    before.at = None;
                }
            }
            if let Some(after) = after.and_then(|inode| self.entries.get_mut(&inode)) {
                after.links += 1;
                after.at = Some((folder, name.clone()));
            }
        }
        let id = self.next_change();
        if let Ok(folder) = self.folder_mut(folder) {
            folder.change(id, updates);
        }
    }

    /// Returns the journal of a file.
    ///
    /// # Errors
    /// `INVAL` for anything else.
    pub fn journal(&mut self, inode: Inode) -> Result<&mut Journal, Errno> {
        if let Node::File(journal) = &mut self.entry_mut(inode)?.node { Ok(journal) } else { Err(Errno::INVAL) }
    }

    /// Records that a file's bytes have changed.
    ///
    /// # Errors
    /// As [`entry`](Self::entry).
    pub fn touch(&mut self, inode: Inode) -> Result<(), Errno> {
        let now = self.tick();
        let entry = self.entry_mut(inode)?;
        (entry.modified_ns, entry.copied) = (now, None);
        Ok(())
    }

    /// Makes durable the changes that a sync promised when it began.
    ///
    /// # Errors
    /// As [`entry`](Self::entry).
    pub fn sync(&mut self, inode: Inode, promised: &[ChangeId], last: ChangeId) -> Result<(), Errno> {
        match &mut self.entry_mut(inode)?.node {
            Node::File(journal) => journal.sync(promised),
            Node::Folder(folder) => folder.sync(last),
            Node::Link(_) | Node::Pipe => {}
        }
        Ok(())
    }

    /// Returns all bytes of a file.
    ///
    /// # Errors
    /// As [`entry`](Self::entry).
    pub fn content(&self, inode: Inode) -> Result<Vec<u8>, Errno> {
        let memory = self.memory(inode)?;
        let mut bytes = vec![0; fstat(memory)?.st_size as usize];
        let mut done = 0;
        while done < bytes.len() {
            match pread(memory, &mut bytes[done..], done as u64)? {
                0 => break,
                count => done += count,
            }
        }
        bytes.truncate(done);
        Ok(bytes)
    }

    /// Cuts the power.
    ///
    /// # Errors
    /// If the kernel provides no memory.
    pub fn crash(&mut self, rng: &mut Rng, losses: Losses) -> Result<(), Errno> {
        let end = self.last_change + 1;
        // Disks with few losses lose only recent changes.
        let mut moment = || {
            let first = if rng.chance(500) { 0 } else { end.saturating_sub(LATE_CHANGES) };
            rng.within(first..end + 1)
        };
        let moments: Vec<ChangeId> = self.roots.iter().map(|_| moment()).collect();
        for entry in self.entries.values_mut() {
            let moment = moments.get(entry.disk).copied().unwrap_or(0);
            entry.copied = None;
            match &mut entry.metadata.node {
                Node::Folder(folder) => {
                    let is_kept = rng.chance(500);
                    let mut lost = if is_kept { 0 } else { rng.below(folder.unsynced() as u64 + 1) };
                    folder.crash(|id| match losses.names {
                        NameLosses::Any => rng.chance(losses.kept_per_mille),
                        NameLosses::Late => id <= moment,
                        NameLosses::Folders => is_kept,
                        NameLosses::Early => {
                            let is_late = lost == 0;
                            lost = lost.saturating_sub(1);
                            is_late
                        }
                    });
                }
                Node::File(journal) => {
                    let image = journal.crash_image(rng, losses.kept_per_mille);
                    ftruncate(&entry.memory, 0)?;
                    write_whole(entry.memory.as_fd(), &image)?;
                    *journal = Journal::of(image);
                }
                Node::Link(_) | Node::Pipe => {}
            }
            entry.links = 0;
            entry.at = None;
        }
        self.drop_unreachable();
        Ok(())
    }

    /// Recounts the names of all entries, and removes unnamed ones.
    fn drop_unreachable(&mut self) {
        let mut open = vec![ROOT];
        while let Some(folder) = open.pop() {
            let names = self.folder(folder).map(|folder| folder.names().clone()).unwrap_or_default();
            for (name, inode) in names {
                if let Some(entry) = self.entries.get_mut(&inode) {
                    entry.links += 1;
                    entry.at = Some((folder, name));
                    if matches!(entry.node, Node::Folder(_)) && entry.links == 1 {
                        open.push(inode);
                    }
                }
            }
        }
        self.entries.retain(|inode, entry| *inode == ROOT || entry.links > 0);
        let alive: std::collections::BTreeSet<Inode> = self.entries.keys().copied().collect();
        self.by_memory.retain(|_, inode| alive.contains(inode));
        for entry in self.entries.values_mut() {
            if let Node::Folder(folder) = &mut entry.node {
                folder.retain(|inode| alive.contains(&inode));
            }
        }
    }

    /// Lists all paths and their entries, folders before their contents.
    #[must_use]
    pub fn walk(&self) -> Vec<(PathBuf, Inode)> {
        let mut found = Vec::new();
        let mut open = vec![(PathBuf::from("/"), ROOT)];
        while let Some((path, folder)) = open.pop() {
            let Ok(folder) = self.folder(folder) else { continue };
            for (name, inode) in folder.names() {
                let path = path.join(name);
                if self.folder(*inode).is_ok() {
                    open.push((path.clone(), *inode));
                }
                found.push((path, *inode));
            }
        }
        found
    }

    /// Returns the entry's disk.
    #[must_use]
    pub fn disk_of(&self, inode: Inode) -> usize {
        self.entries.get(&inode).map_or(0, |entry| entry.disk)
    }
}

pub(super) fn write_whole(memory: BorrowedFd<'_>, bytes: &[u8]) -> Result<(), Errno> {
    let mut done = 0;
    while done < bytes.len() {
        done += pwrite(memory, &bytes[done..], done as u64)?;
    }
    Ok(())
}

/// Creates memory for one file.
pub(super) fn new_memory() -> Result<OwnedFd, Errno> {
    memfd_create("simulated", MemfdFlags::CLOEXEC)
}

/// Returns the identity of the memory behind a descriptor.
pub(super) fn memory_of(file: BorrowedFd<'_>) -> Result<u64, Errno> {
    Ok(fstat(file)?.st_ino)
}

/// Converts a name to text for display.
#[must_use]
pub fn display_name(name: &OsStr) -> String {
    name.to_string_lossy().into_owned()
}
