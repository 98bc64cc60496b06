//! System calls of the code under test.

use std::ffi::OsString;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use deepnvme_io::fs::simulated::{At, Calls};
use deepnvme_io::fs::{FileId, FileKind, OFlags, Space, Stat};
use deepnvme_io::mem::PAGE_BYTES;
use deepnvme_simulation_runtime::thread;
use rustix::fs::{FlockOperation, Mode, fcntl_getfl, fcntl_setfl, flock, ftruncate};
use rustix::io::{Errno, pread, pwrite};

use super::folder::Inode;
use super::machine::World;
use super::state::{Promise, SYNC_OF_NAMES, WorldState};
use super::tree::{Metadata, Node};

/// Magic number of ext4.
const EXT4: u32 = 0xef53;
/// Mode bits cleared for new files.
const UMASK: u32 = 0o022;
/// Chance that the page cache has all pages of a range.
const CACHED_PER_MILLE: u32 = 300;
/// Attempts to take a held lock before the world gives up.
const LOCK_ATTEMPTS_MAX: u32 = 100_000;

// `step` takes a turn of the scheduler. `fallible` does too, and may fail the call with the errno that it gets.
impl Calls for World {
    fn open(&self, path: &Path, flags: OFlags, mode: u32) -> Result<OwnedFd, Errno> {
        let mut state = self.fallible("open", &(path, flags), Errno::IO)?;
        let is_exclusive = flags.contains(OFlags::CREATE | OFlags::EXCL);
        let place = state.tree.find(path, !flags.contains(OFlags::NOFOLLOW) && !is_exclusive)?;
        let inode = match place.inode {
            Some(_) if is_exclusive => return Err(Errno::EXIST),
            Some(inode) => inode,
            None if flags.contains(OFlags::CREATE) => {
                state.before_change();
                let is_foreign = !state.caller_is_under_test();
                let disk = state.tree.disk_of(place.folder);
                let inode = state.tree.make(Node::File(Default::default()), disk, mode & !UMASK, is_foreign)?;
                state.tree.set_names(place.folder, vec![(place.name, Some(inode))]);
                inode
            }
            None => return Err(Errno::NOENT),
        };
        let writes = flags.intersects(OFlags::WRONLY | OFlags::RDWR);
        match &state.tree.entry(inode)?.node {
            Node::Folder(_) if writes => return Err(Errno::ISDIR),
            Node::Folder(_) => {}
            _ if flags.contains(OFlags::DIRECTORY) => return Err(Errno::NOTDIR),
            Node::Link(_) if !flags.contains(OFlags::PATH) => return Err(Errno::LOOP),
            _ => {}
        }
        if flags.contains(OFlags::TRUNC) && writes {
            state.resize(inode, 0)?;
        }
        state.descriptor(inode, flags)
    }

    fn open_unnamed(&self, folder: &Path) -> Result<OwnedFd, Errno> {
        let mut state = self.fallible("open_unnamed", &folder, Errno::NOSPC)?;
        let inode = state.tree.find(folder, true)?.inode.ok_or(Errno::NOENT)?;
        state.tree.folder(inode)?;
        if !state.setup.has_unnamed {
            return Err(Errno::OPNOTSUPP);
        }
        let disk = state.tree.disk_of(inode);
        let is_foreign = !state.caller_is_under_test();
        let file = state.tree.make(Node::File(Default::default()), disk, 0o600, is_foreign)?;
        state.descriptor(file, OFlags::RDWR)
    }

    fn reopen(&self, file: BorrowedFd<'_>, flags: OFlags) -> Result<OwnedFd, Errno> {
        let state = self.fallible("reopen", &flags, Errno::IO)?;
        let inode = state.tree.inode_of(file)?;
        state.descriptor(inode, flags)
    }

    fn link(&self, file: BorrowedFd<'_>, path: &Path) -> Result<(), Errno> {
        let mut state = self.fallible("link", &path, Errno::NOSPC)?;
        let inode = state.tree.inode_of(file)?;
        link(&mut state, inode, path)
    }

    fn link_path(&self, from: &Path, to: &Path) -> Result<(), Errno> {
        let mut state = self.fallible("link_path", &(from, to), Errno::NOSPC)?;
        let inode = state.tree.find(from, false)?.inode.ok_or(Errno::NOENT)?;
        link(&mut state, inode, to)
    }

    fn resolved_path(&self, file: BorrowedFd<'_>) -> Result<PathBuf, Errno> {
        let state = self.step("resolved_path", &"")?;
        let inode = state.tree.inode_of(file)?;
        Ok(state.tree.path_of(inode).unwrap_or_else(|| PathBuf::from("/nameless (deleted)")))
    }

    fn real_path(&self, path: &Path) -> Result<PathBuf, Errno> {
        let state = self.step("real_path", &path)?;
        let inode = state.tree.find(path, true)?.inode.ok_or(Errno::NOENT)?;
        state.tree.path_of(inode).ok_or(Errno::NOENT)
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<(), Errno> {
        self.rename_with("rename", from, to, true)
    }

    fn rename_new(&self, from: &Path, to: &Path) -> Result<(), Errno> {
        self.rename_with("rename_new", from, to, false)
    }

    fn unlink(&self, path: &Path) -> Result<(), Errno> {
        let mut state = self.fallible("unlink", &path, Errno::IO)?;
        let place = state.tree.find(path, false)?;
        let inode = place.inode.ok_or(Errno::NOENT)?;
        if state.tree.folder(inode).is_ok() {
            return Err(Errno::ISDIR);
        }
        state.check_ownership(Some(inode), "removes", None);
        state.before_change();
        state.tree.set_names(place.folder, vec![(place.name, None)]);
        state.names_changed();
        Ok(())
    }

    fn make_folder(&self, path: &Path, mode: u32) -> Result<(), Errno> {
        let mut state = self.fallible("make_folder", &path, Errno::NOSPC)?;
        let place = state.tree.find(path, false)?;
        if place.inode.is_some() {
            return Err(Errno::EXIST);
        }
        state.before_change();
        let disk = state.tree.disk_of(place.folder);
        let is_foreign = !state.caller_is_under_test();
        let inode = state.tree.make(Node::Folder(Default::default()), disk, mode & !UMASK, is_foreign)?;
        state.tree.set_names(place.folder, vec![(place.name, Some(inode))]);
        Ok(())
    }

    fn remove_folder(&self, path: &Path) -> Result<(), Errno> {
        let mut state = self.fallible("remove_folder", &path, Errno::IO)?;
        let place = state.tree.find(path, false)?;
        let inode = place.inode.ok_or(Errno::NOENT)?;
        if !state.tree.folder(inode)?.names().is_empty() {
            return Err(Errno::NOTEMPTY);
        }
        state.check_ownership(Some(inode), "removes", None);
        state.before_change();
        state.tree.set_names(place.folder, vec![(place.name, None)]);
        Ok(())
    }

    fn entries(&self, folder: &Path) -> Result<Vec<OsString>, Errno> {
        let mut state = self.fallible("entries", &folder, Errno::IO)?;
        let inode = state.tree.find(folder, true)?.inode.ok_or(Errno::NOENT)?;
        let mut names: Vec<OsString> = state.tree.folder(inode)?.names().keys().cloned().collect();
        state.rng().shuffle(&mut names);
        Ok(names)
    }

    fn stat(&self, path: &Path) -> Result<Stat, Errno> {
        let state = self.step("stat", &path)?;
        let inode = state.tree.find(path, true)?.inode.ok_or(Errno::NOENT)?;
        state.describe(inode)
    }

    fn stat_link(&self, path: &Path) -> Result<Stat, Errno> {
        let state = self.step("stat_link", &path)?;
        let inode = state.tree.find(path, false)?.inode.ok_or(Errno::NOENT)?;
        state.describe(inode)
    }

    fn stat_of(&self, file: BorrowedFd<'_>) -> Result<Stat, Errno> {
        let state = self.step("stat_of", &"")?;
        let inode = state.tree.inode_of(file)?;
        state.describe(inode)
    }

    fn lock(&self, file: BorrowedFd<'_>) -> Result<(), Errno> {
        for _ in 0..LOCK_ATTEMPTS_MAX {
            if self.try_lock(file)? {
                return Ok(());
            }
            thread::yield_now();
        }
        self.state().violations.push("a lock never came free".into());
        Err(Errno::DEADLK)
    }

    fn try_lock(&self, file: BorrowedFd<'_>) -> Result<bool, Errno> {
        let mut state = self.step("try_lock", &"")?;
        if !state.setup.has_locks {
            return Err(Errno::OPNOTSUPP);
        }
        // Real kernel locks on the memory behind the file. They are released with the last copy of the descriptor.
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(true),
            Err(Errno::AGAIN) => {
                state.note("try_lock", &"is taken");
                Ok(false)
            }
            Err(errno) => Err(errno),
        }
    }

    fn unlock(&self, file: BorrowedFd<'_>) -> Result<(), Errno> {
        let state = self.step("unlock", &"")?;
        if state.setup.has_locks { flock(file, FlockOperation::Unlock) } else { Err(Errno::OPNOTSUPP) }
    }

    fn set_mode(&self, file: BorrowedFd<'_>, mode: u32) -> Result<(), Errno> {
        let mut state = self.fallible("set_mode", &mode, Errno::IO)?;
        let inode = state.tree.inode_of(file)?;
        state.check_ownership(Some(inode), "sets the mode of", None);
        state.tree.entry_mut(inode)?.mode = mode & 0o7777;
        Ok(())
    }

    fn truncate(&self, file: BorrowedFd<'_>, bytes: u64) -> Result<(), Errno> {
        let mut state = self.fallible("truncate", &bytes, Errno::IO)?;
        let inode = state.tree.inode_of(file)?;
        state.resize(inode, bytes)
    }

    fn allocate(&self, file: BorrowedFd<'_>, offset: u64, bytes: u64) -> Result<(), Errno> {
        let mut state = self.fallible("allocate", &(offset, bytes), Errno::NOSPC)?;
        let inode = state.tree.inode_of(file)?;
        let end = offset.checked_add(bytes).ok_or(Errno::FBIG)?;
        if end > state.describe(inode)?.bytes { state.resize(inode, end) } else { Ok(()) }
    }

    fn sync(&self, file: BorrowedFd<'_>) -> Result<(), Errno> {
        let is_of_names = {
            let state = self.state();
            state.tree.inode_of(file).is_ok_and(|inode| state.tree.folder(inode).is_ok())
        };
        let (begins, ends) = if is_of_names { SYNC_OF_NAMES } else { ("sync begins", "sync") };
        let promise = self.step(begins, &"")?.promise(file)?;
        let mut state = self.fallible(ends, &promise.0, Errno::IO)?;
        state.sync(&promise)
    }

    fn space(&self, _file: BorrowedFd<'_>) -> Result<Space, Errno> {
        drop(self.step("space", &"")?);
        Ok(Space { free_bytes: 1 << 40, block_bytes: 4096 })
    }

    fn file_system(&self, _file: BorrowedFd<'_>) -> Result<u32, Errno> {
        drop(self.step("file_system", &"")?);
        Ok(EXT4)
    }

    fn open_flags(&self, file: BorrowedFd<'_>) -> Result<OFlags, Errno> {
        drop(self.step("open_flags", &"")?);
        fcntl_getfl(file)
    }

    fn set_open_flags(&self, file: BorrowedFd<'_>, flags: OFlags) -> Result<(), Errno> {
        drop(self.step("set_open_flags", &"")?);
        fcntl_setfl(file, flags)
    }

    fn read_at(&self, file: BorrowedFd<'_>, bytes: &mut [u8], offset: u64) -> Result<usize, Errno> {
        let mut state = self.fallible("read_at", &offset, Errno::IO)?;
        let inode = state.tree.inode_of(file)?;
        if state.is_unreadable(inode) {
            state.note("read_at", &"finds bad sectors");
            return Err(Errno::IO);
        }
        let wanted = bytes.len();
        let at_most = if wanted > 1 && state.rng().chance(100) { 1 + wanted / 2 } else { wanted };
        pread(file, &mut bytes[..at_most], offset)
    }

    fn advise_random(&self, _file: BorrowedFd<'_>) -> Result<(), Errno> {
        drop(self.step("advise_random", &"")?);
        Ok(())
    }

    fn cached_pages(&self, file: BorrowedFd<'_>, range: &Range<u64>) -> Result<u64, Errno> {
        let mut state = self.step("cached_pages", range)?;
        state.tree.inode_of(file)?;
        let pages = range.end.div_ceil(PAGE_BYTES) - range.start / PAGE_BYTES;
        Ok(if state.rng().chance(CACHED_PER_MILLE) { pages } else { 0 })
    }

    fn write_at(&self, file: BorrowedFd<'_>, bytes: &[u8], offset: u64) -> Result<usize, Errno> {
        let mut state = self.fallible("write_at", &(offset, bytes.len()), Errno::NOSPC)?;
        let inode = state.tree.inode_of(file)?;
        let at_most = if bytes.len() > 1 && state.rng().chance(100) { 1 + bytes.len() / 2 } else { bytes.len() };
        state.before_change();
        let written = pwrite(file, &bytes[..at_most], offset)?;
        state.wrote(inode, offset, bytes[..written].to_vec(), true)?;
        Ok(written)
    }

    fn copy_between(&self, _source: At<'_>, _target: At<'_>, _bytes: usize) -> Result<usize, Errno> {
        drop(self.step("copy_between", &"")?);
        Err(Errno::OPNOTSUPP)
    }

    fn open_in_memory(&self, name: &str) -> Result<OwnedFd, Errno> {
        drop(self.step("open_in_memory", &name)?);
        Err(Errno::NOSYS)
    }

    fn random_bits(&self) -> Result<u128, Errno> {
        let mut state = self.step("random_bits", &"")?;
        Ok(u128::from(state.rng().next_u64()) << 64 | u128::from(state.rng().next_u64()))
    }
}

impl World {
    fn rename_with(&self, what: &str, from: &Path, to: &Path, may_replace: bool) -> Result<(), Errno> {
        let mut state = self.fallible(what, &(from, to), Errno::IO)?;
        let source = state.tree.find(from, false)?;
        let target = state.tree.find(to, false)?;
        let inode = source.inode.ok_or(Errno::NOENT)?;
        if state.tree.disk_of(source.folder) != state.tree.disk_of(target.folder) {
            return Err(Errno::XDEV);
        }
        if target.inode == Some(inode) {
            return Ok(());
        }
        if target.inode.is_some() && !may_replace {
            return Err(Errno::EXIST);
        }
        if let Some(old) = target.inode {
            match (state.tree.folder(old).map(|folder| folder.names().is_empty()), state.tree.folder(inode).is_ok()) {
                (Ok(_), false) => return Err(Errno::ISDIR),
                (Ok(false), true) => return Err(Errno::NOTEMPTY),
                (Err(_), true) => return Err(Errno::NOTDIR),
                (Ok(true), true) | (Err(_), false) => {}
            }
        }
        state.check_ownership(Some(inode), "renames", None);
        let allowed = to.to_path_buf();
        state.check_ownership(target.inode, "replaces", Some(&allowed));
        state.before_change();
        if source.folder == target.folder {
            state.tree.set_names(source.folder, vec![(source.name, None), (target.name, Some(inode))]);
        } else {
            state.tree.set_names(target.folder, vec![(target.name, Some(inode))]);
            state.tree.set_names(source.folder, vec![(source.name, None)]);
        }
        state.names_changed();
        Ok(())
    }
}

impl WorldState {
    /// Opens a descriptor of the file with its own open file description.
    fn descriptor(&self, inode: Inode, flags: OFlags) -> Result<OwnedFd, Errno> {
        let kept = OFlags::WRONLY | OFlags::RDWR | OFlags::PATH | OFlags::APPEND;
        let memory = self.tree.memory(inode)?;
        let path = format!("/proc/self/fd/{}", memory.as_fd().as_raw_fd());
        rustix::fs::open(path, (flags & kept) | OFlags::CLOEXEC, Mode::empty())
    }

    /// Makes durable the changes that a sync promised when it began.
    pub(crate) fn sync(&mut self, (inode, promised, last): &Promise) -> Result<(), Errno> {
        let changes_names = self.tree.folder(*inode).is_ok_and(|folder| folder.unsynced() > 0);
        if changes_names || !promised.is_empty() {
            self.before_change();
        }
        self.tree.sync(*inode, promised, *last)
    }

    fn resize(&mut self, inode: Inode, bytes: u64) -> Result<(), Errno> {
        self.check_ownership(Some(inode), "resizes", None);
        self.before_change();
        ftruncate(self.tree.memory(inode)?, bytes)?;
        let id = self.tree.next_change();
        self.tree.journal(inode)?.resized(id, bytes as usize);
        self.tree.touch(inode)
    }

    fn describe(&self, inode: Inode) -> Result<Stat, Errno> {
        let Metadata { node, mode, born_ns, modified_ns, links, disk, .. } = &**self.tree.entry(inode)?;
        let kind = match node {
            Node::File(_) => FileKind::File,
            Node::Folder(_) => FileKind::Folder,
            Node::Link(_) => FileKind::Link,
            Node::Pipe => FileKind::Pipe,
        };
        let direct = if self.setup.has_direct { (512, 512) } else { (0, 0) };
        Ok(Stat {
            kind,
            identity: FileId { device: 100 + *disk as u64, inode },
            bytes: rustix::fs::fstat(self.tree.memory(inode)?)?.st_size as u64,
            links: *links,
            mode: *mode,
            user: rustix::process::geteuid().as_raw(),
            group: rustix::process::getegid().as_raw(),
            modified_ns: i128::from(*modified_ns),
            born_ns: self.setup.has_birth_times.then_some(*born_ns),
            direct_alignment: Some(direct),
        })
    }
}

/// Gives an inode another name.
fn link(state: &mut WorldState, inode: Inode, path: &Path) -> Result<(), Errno> {
    let place = state.tree.find(path, false)?;
    if place.inode.is_some() {
        return Err(Errno::EXIST);
    }
    if state.tree.disk_of(place.folder) != state.tree.disk_of(inode) {
        return Err(Errno::XDEV);
    }
    state.before_change();
    state.tree.set_names(place.folder, vec![(place.name, Some(inode))]);
    Ok(())
}
