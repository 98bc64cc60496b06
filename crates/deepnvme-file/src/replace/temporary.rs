//! Private files that are removed unless kept. Their names prove their identity.
//!
//! A temporary is called `.{target}.deepnvme-tmp-{inode}-{born}-{random}`: its name states the file's inode and
//! creation time. This tells a temporary from a copy, a planted name and any other file. A temporary that another
//! process left is removed only if its name matches, it has no other name, no process holds its lock, and it belongs to
//! this user. A writer locks its temporary (`flock`) before giving it that name. The kernel releases the lock when the
//! process ends, for any reason.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use crate::sync::thread;
use deepnvme_io::fs::{self, AclKind, FileId, FileKind, OFlags, Permissions, Stat};
use deepnvme_io::mem::CreatorProcess;
use deepnvme_io::op::Errno;
use deepnvme_io::start_thread;
use deepnvme_io::{Error, ErrorKind, Result};

/// The marker in the names of temporaries, after the target's name.
pub const TEMPORARY_MARKER: &str = ".deepnvme-tmp-";
/// The marker while the name does not state the file yet. Used where files cannot be created without a name.
pub const UNPROVEN_MARKER: &str = ".deepnvme-tmp-new-";
/// The end of [`UNPROVEN_MARKER`], which follows [`TEMPORARY_MARKER`].
const UNPROVEN: &str = UNPROVEN_MARKER.split_at(TEMPORARY_MARKER.len()).1;
/// Bytes of the target's name that a temporary's name keeps, so that the whole stays within the usual limit of 255.
const NAME_BYTES_MAX: usize = 180;
/// How many names to try. If all are taken, that is an error.
const NAMES_MAX: usize = 64;

/// The error of a rename if another program has moved the private file away, and may have put a copy in its place.
const MOVED: Errno = Errno::STALE;

/// The error of a rename to a name that must be free, on a file system that cannot refuse to replace.
const NO_FREE_NAMES: Errno = Errno::OPNOTSUPP;

/// A private file, removed when dropped unless it was kept.
#[derive(Debug)]
pub struct Temporary {
    path: PathBuf,
    file: OwnedFd,
    identity: FileId,
    is_kept: bool,
    /// After a fork, only the parent removes the file.
    creator: CreatorProcess,
}

impl Temporary {
    /// Creates a new file in the folder of `target`, which only its owner may read and write. It may replace `target`
    /// later.
    ///
    /// # Errors
    /// The error of the folder, with the path.
    pub fn new(target: &Path) -> Result<Self> {
        // Absolute, because the process may change its folder before the file is removed by name.
        let absolute =
            std::path::absolute(target).map_err(|error| Error::from_io("open for writing", &error).at_path(target))?;
        let target = absolute.as_path();
        let folder = fs::folder_of(target);
        let prefix = prefix(target);
        let made = match unnamed(folder, &prefix) {
            // Some file systems and kernels lack files without names, and linking such files needs /proc.
            Err(errno) if errno != Errno::NOSPC && errno != Errno::DQUOT => named(folder, &prefix),
            made => made,
        };
        let (path, file, identity) = made.map_err(|errno| Error::os("open for writing", errno).at_path(target))?;
        Ok(Self { path, file, identity, is_kept: false, creator: CreatorProcess::current() })
    }

    /// Returns the current, private name.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the open file.
    #[must_use]
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Returns the identity of the file.
    #[must_use]
    pub fn identity(&self) -> FileId {
        self.identity
    }

    /// Writes all bytes and syncs them to disk.
    ///
    /// # Errors
    /// The error of the kernel.
    pub fn fill(&self, bytes: &[u8]) -> Result<()> {
        let written = fs::write_all(self.file(), bytes).and_then(|()| fs::sync(self.file()));
        written.map_err(|errno| Error::os("write", errno).at_path(&self.path))
    }

    /// Copies the permissions of `target`, or sets those that a new file there would get. Omits the setuid, setgid and
    /// sticky bits.
    ///
    /// # Errors
    /// The error of the kernel.
    pub fn take_mode_of(&self, target: &Path) -> Result<()> {
        self.take_permissions_within(Permissions::EVERYBODY, target)
    }

    /// Like [`take_mode_of`](Self::take_mode_of), but limits a new file to the permissions `most`.
    pub(super) fn take_permissions_within(&self, most: Permissions, target: &Path) -> Result<()> {
        let set = permissions_of(target, most).and_then(|allowed| set_permissions(self.file(), allowed));
        set.map_err(|errno| Error::os("set permissions", errno).at_path(target))
    }

    /// Releases the file to the next owner: the name, which proves the file's identity, stays, and the lock is
    /// released.
    pub(super) fn leave(mut self) {
        self.is_kept = true;
    }

    /// Renames the file to `target`, replacing any existing file.
    ///
    /// # Errors
    /// The error of the kernel. `MOVED` if the file lies elsewhere by now.
    pub fn rename(&mut self, target: &Path) -> Result<(), Errno> {
        let renamed = rename_unless_moved((&self.path, self.identity), self.file(), target);
        // A network file system may repeat a request that succeeded, and then report an error.
        self.is_kept = renamed.is_ok() || is_named(target, self.identity);
        if self.is_kept { Ok(()) } else { renamed }
    }

    /// Renames the file to `target` if that name is free.
    ///
    /// # Errors
    /// `EXIST` if the name is taken, `MOVED` as for [`rename`](Self::rename), `NO_FREE_NAMES`, and other errors of the
    /// kernel.
    pub fn rename_new(&mut self, target: &Path) -> Result<(), Errno> {
        if was_moved(&self.path, self.identity, self.file()) {
            return Err(MOVED);
        }
        match fs::rename_new(&self.path, target) {
            // Fall back to linking and unlinking where renaming cannot refuse to replace.
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                fs::link_path(&self.path, target).map_err(|errno| match errno {
                    Errno::PERM | Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP => NO_FREE_NAMES,
                    errno => errno,
                })?;
                let _ = fs::unlink(&self.path);
            }
            Err(errno) if !is_named(target, self.identity) => return Err(errno),
            Ok(()) | Err(_) => {}
        }
        self.is_kept = true;
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.is_kept && self.creator.is_current() {
            // The failure that led here was reported already.
            unlink_if(&current_path(&self.path, self.identity, self.file.as_fd()), self.identity);
        }
        // Unlock explicitly: the child of a fork would hold the lock for as long as it lives.
        if self.creator.is_current() {
            let _ = fs::unlock(self.file.as_fd());
        }
    }
}

/// Returns the mark of a file, as names, intents and records state it: its inode and creation time. Omits the device
/// number, which changes when disks are remounted.
pub(super) fn mark_of(stat: &Stat) -> String {
    format!("{:x}-{:x}", stat.identity.inode, stat.born_ns.unwrap_or(0))
}

/// Returns the common prefix of the names of a target's temporaries.
fn prefix(target: &Path) -> OsString {
    let name = target.file_name().unwrap_or_default().as_bytes();
    let mut end = name.len().min(NAME_BYTES_MAX);
    // Some file systems reject partial UTF-8 characters.
    while end < name.len() && end > 0 && name[end] & 0xC0 == 0x80 {
        end -= 1;
    }
    let mut prefix = OsString::from(".");
    prefix.push(OsString::from_vec(name[..end].to_vec()));
    prefix.push(TEMPORARY_MARKER);
    prefix
}

/// Creates a locked file without a name, then links it under a name that states it.
fn unnamed(folder: &Path, prefix: &OsStr) -> Result<(PathBuf, OwnedFd, FileId), Errno> {
    let file = fs::open_unnamed(folder)?;
    let mark = lock_and_mark(&file)?;
    for _ in 0..NAMES_MAX {
        let path = folder.join(proven(prefix, &mark)?);
        match fs::link(file.as_fd(), &path) {
            Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno),
            Ok(()) => {
                let stat = fs::stat_of(file.as_fd())?;
                return Ok((path, file, stat.identity));
            }
        }
    }
    Err(Errno::EXIST)
}

/// Like [`unnamed`], where every file needs a name: creates it under an unproven name, then renames it.
fn named(folder: &Path, prefix: &OsStr) -> Result<(PathBuf, OwnedFd, FileId), Errno> {
    for _ in 0..NAMES_MAX {
        let mut name = prefix.to_os_string();
        name.push(format!("{UNPROVEN}{:032x}", fs::random_bits()?));
        let first = folder.join(name);
        let file = match fs::open(&first, OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW, 0o600) {
            Err(Errno::EXIST) => continue,
            file => file?,
        };
        let identity = fs::stat_of(file.as_fd())?.identity;
        let path = folder.join(proven(prefix, &lock_and_mark(&file)?)?);
        let renamed = match fs::rename_new(&first, &path) {
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => fs::link_path(&first, &path).map(|()| {
                let _ = fs::unlink(&first);
            }),
            renamed => renamed,
        };
        match renamed {
            // Another process may have removed it between its creation and its lock.
            Ok(()) if is_named(&path, identity) => return Ok((path, file, identity)),
            Ok(()) | Err(Errno::EXIST | Errno::NOENT) => drop(unlink_if(&first, identity)),
            // Links are unsupported as well: keep the first name. Only its owner removes it.
            Err(Errno::PERM | Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => return Ok((first, file, identity)),
            Err(errno) => {
                unlink_if(&first, identity);
                return Err(errno);
            }
        }
    }
    Err(Errno::EXIST)
}

/// Locks a new file and returns the mark for its name. If locking fails, others cannot see that the file is in use. The
/// mark is then that of a file that does not exist, so that only its owner removes it.
fn lock_and_mark(file: &OwnedFd) -> Result<String, Errno> {
    let is_locked = fs::try_lock(file.as_fd()) == Ok(true);
    Ok(if is_locked { mark_of(&fs::stat_of(file.as_fd())?) } else { "0-0".into() })
}

fn proven(prefix: &OsStr, mark: &str) -> Result<OsString, Errno> {
    let mut name = prefix.to_os_string();
    name.push(format!("{mark}-{:016x}", fs::random_bits()? as u64));
    Ok(name)
}

/// Returns whether this name has this prefix and states this very file.
fn is_proof(name: &OsStr, prefix: &OsStr, stat: &Stat) -> bool {
    let Some(rest) = name.as_bytes().strip_prefix(prefix.as_bytes()) else { return false };
    let mark = mark_of(stat);
    let random = rest.strip_prefix(mark.as_bytes()).and_then(|rest| rest.strip_prefix(b"-"));
    random.is_some_and(|random| random.len() == 16 && random.iter().all(|it| matches!(it, b'0'..=b'9' | b'a'..=b'f')))
}

/// A leftover: the temporary of a process that ended, locked by this one.
#[derive(Debug)]
pub(super) struct Proof {
    pub(super) path: PathBuf,
    pub(super) file: OwnedFd,
    identity: FileId,
}

impl Proof {
    /// Removes the file. Returns whether it is gone. No other process uses it, since it is locked here.
    pub(super) fn remove(self) -> bool {
        unlink_if(&self.path, self.identity)
    }
}

/// Finds the temporaries of a target, files or folders, that no running writer holds.
pub(super) fn leftovers_of(target: &Path, kind: FileKind) -> Vec<Proof> {
    find_leftovers(target, kind).0
}

/// Like [`leftovers_of`], and returns whether the search was complete.
fn find_leftovers(target: &Path, kind: FileKind) -> (Vec<Proof>, bool) {
    let folder = fs::folder_of(target);
    let prefix = prefix(target);
    let (user, mut found) = (fs::user(), Vec::new());
    let names = fs::entries(folder);
    let mut is_complete = matches!(names, Ok(_) | Err(Errno::NOENT | Errno::NOTDIR));
    for name in names.unwrap_or_default() {
        let path = folder.join(&name);
        let is_ours = |stat: &Stat| {
            // Another user's file may claim anything. A second link means that the file is in use.
            let is_alone = kind == FileKind::Folder || stat.links == 1;
            stat.kind == kind && stat.user == user && is_alone && is_proof(&name, &prefix, stat)
        };
        if !name.as_bytes().starts_with(prefix.as_bytes()) || !fs::stat_link(&path).is_ok_and(|stat| is_ours(&stat)) {
            continue;
        }
        let access = if kind == FileKind::Folder { OFlags::DIRECTORY } else { OFlags::RDWR };
        let opened = fs::open(&path, access | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY, 0);
        let opened = opened.and_then(|file| fs::stat_of(file.as_fd()).map(|stat| (file, stat)));
        let Ok((file, stat)) = opened else {
            is_complete &= opened.is_err_and(|errno| errno == Errno::NOENT);
            continue;
        };
        // Its writer may have finished and renamed it before it was locked here.
        if is_ours(&stat) && fs::try_lock(file.as_fd()) == Ok(true) && is_named(&path, stat.identity) {
            found.push(Proof { path, file, identity: stat.identity });
        }
    }
    (found, is_complete)
}

/// Creates a locked folder, for its owner only, whose name states the folder.
pub(super) fn private_folder(target: &Path) -> Result<(PathBuf, OwnedFd, FileId), Errno> {
    let above = fs::folder_of(target);
    let prefix = prefix(target);
    for _ in 0..NAMES_MAX {
        let mut name = prefix.clone();
        name.push(format!("{UNPROVEN}{:032x}", fs::random_bits()?));
        let first = above.join(name);
        match fs::make_folder(&first, 0o700) {
            Err(Errno::EXIST) => continue,
            made => made?,
        }
        let named = fs::open(&first, OFlags::DIRECTORY | OFlags::NOFOLLOW, 0).and_then(|folder| {
            let identity = fs::stat_of(folder.as_fd())?.identity;
            let path = above.join(proven(&prefix, &lock_and_mark(&folder)?)?);
            // Renaming never replaces a folder that is not empty.
            match fs::rename_new(&first, &path) {
                Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => fs::rename(&first, &path)?,
                renamed => renamed?,
            }
            Ok((path, folder, identity))
        });
        match named {
            Ok((path, folder, identity)) if is_named(&path, identity) => return Ok((path, folder, identity)),
            Ok(_) | Err(Errno::EXIST | Errno::NOENT) => drop(fs::remove_folder(&first)),
            Err(errno) => {
                let _ = fs::remove_folder(&first);
                return Err(errno);
            }
        }
    }
    Err(Errno::EXIST)
}

/// Removes the temporaries of `target` that no running writer holds. Each must prove its identity by its name, have no
/// other name, belong to this user and be lockable. Any other file stays, whatever its name.
pub fn remove_leftovers(target: &Path) {
    remove_all_leftovers(target);
}

/// Like [`remove_leftovers`]. Returns whether none is left.
pub(super) fn remove_all_leftovers(target: &Path) -> bool {
    let (leftovers, is_complete) = find_leftovers(target, FileKind::File);
    leftovers.into_iter().fold(is_complete, |are_gone, proof| proof.remove() & are_gone)
}

/// Returns where an open private file or folder lies: at `path`, unless a folder above it was renamed.
#[must_use]
pub fn current_path(path: &Path, identity: FileId, file: BorrowedFd<'_>) -> PathBuf {
    if is_named(path, identity) {
        return path.to_path_buf();
    }
    // A file that was created without a name resolves to a made-up one, in its true folder.
    let moved = fs::resolved_path(file).ok().and_then(|moved| Some(moved.parent()?.join(path.file_name()?)));
    moved.unwrap_or_else(|| path.to_path_buf())
}

/// Returns whether a folder above a private file or folder was renamed, so that it has its private name elsewhere. A
/// copy may lie under `path`.
fn was_moved(path: &Path, identity: FileId, file: BorrowedFd<'_>) -> bool {
    let now = current_path(path, identity, file);
    now != path && is_named(&now, identity)
}

/// Renames a private file or folder. Fails with [`MOVED`] if another program has moved it.
pub(super) fn rename_unless_moved(
    (path, identity): (&Path, FileId),
    file: BorrowedFd<'_>,
    target: &Path,
) -> Result<(), Errno> {
    if was_moved(path, identity, file) {
        return Err(MOVED);
    }
    fs::rename(path, target)?;
    // Again: if it was moved since, a copy has got the name.
    if was_moved(path, identity, file) { Err(MOVED) } else { Ok(()) }
}

/// Returns the error of a rename to `target`.
pub(super) fn rename_error(errno: Errno, target: &Path) -> Error {
    let error = Error::os("rename", errno).at_path(target);
    if errno == MOVED {
        return error.because("another program has moved the new file, or put another in its place; save again");
    }
    if errno == NO_FREE_NAMES {
        return error.because(
            "this file system can neither rename without replacing nor make hard links; use another disk, or save one \
             file (without max_shard_bytes or a StripeSet)",
        );
    }
    error
}

/// Returns whether this name refers to this file.
fn is_named(path: &Path, identity: FileId) -> bool {
    fs::stat_link(path).is_ok_and(|stat| stat.identity == identity)
}

/// Removes a name if it refers to this file. Returns whether it no longer does.
pub(super) fn unlink_if(path: &Path, identity: FileId) -> bool {
    match fs::stat_link(path) {
        Ok(stat) if stat.identity == identity => matches!(fs::unlink(path), Ok(()) | Err(Errno::NOENT)),
        Ok(_) | Err(Errno::NOENT | Errno::NOTDIR) => true,
        Err(_) => false,
    }
}

/// Returns the permissions of the file at `target`. If there is none, those of a new file there, within `most`.
pub(super) fn permissions_of(target: &Path, most: Permissions) -> Result<Permissions, Errno> {
    match fs::stat(target) {
        Ok(old) => Ok(Permissions::of(&old, fs::access_list(target, AclKind::Access).as_deref())),
        Err(Errno::NOENT) => {
            // A folder's list for new files takes the place of the umask.
            let listed = fs::access_list(fs::folder_of(target), AclKind::Default);
            let new = listed.as_deref().and_then(fs::listed_mode).unwrap_or_else(|| 0o777 & !fs::umask());
            Ok(Permissions { mode: new, group: None }.and(most))
        }
        // On any other error the file may exist with narrower permissions.
        Err(errno) => Err(errno),
    }
}

/// Sets the permissions of a private file. If it cannot have the group that they are for, its own group may do what all
/// others may.
pub(super) fn set_permissions(file: BorrowedFd<'_>, allowed: Permissions) -> Result<(), Errno> {
    let Permissions { mut mode, group } = allowed;
    if let Some(group) = group
        && fs::stat_of(file)?.group != group
        && fs::set_group(file, group).is_err()
    {
        mode = fs::without_group(mode);
    }
    fs::set_mode(file, mode)
}

/// Opens a file so that its data outlives its name.
pub(super) fn held(path: &Path) -> Option<OwnedFd> {
    fs::open(path, OFlags::PATH | OFlags::NOFOLLOW, 0).ok()
}

/// Closes a file on a thread of its own. If the file has no name left, its space is freed a little later.
pub(super) fn release(file: Option<OwnedFd>) {
    if let Some(file) = file {
        // If no thread can be started, dropping the closure closes the file here.
        let _ = start_thread(|| thread::Builder::new().name("deepnvme-release".into()).spawn(move || drop(file)));
    }
}

/// Resolves `path` to the file to replace: an absolute path that is not a link. The kernel follows the links, under its
/// own permission rules. If `path` does not exist, returns it unresolved.
///
/// # Errors
/// `NotFound` for a dangling link. `InvalidInput` for a device, a pipe, a socket, a path without a file name, or a link
/// to a file without a name. `ISDIR` for a folder. Other errors of the kernel.
pub fn resolve(path: &Path) -> Result<PathBuf> {
    const OPERATION: &str = "open for writing";
    let refused = |errno| Error::os(OPERATION, errno).at_path(path);
    let odd = |detail: String| Error::new(ErrorKind::InvalidInput, OPERATION, detail).at_path(path);
    if path.file_name().is_none() {
        return Err(if fs::is_folder(path) { refused(Errno::ISDIR) } else { odd("the path has no file name".into()) });
    }
    let absolute = std::path::absolute(path).map_err(|error| Error::from_io(OPERATION, &error).at_path(path))?;
    let mut stat = match fs::stat_link(&absolute) {
        Err(Errno::NOENT) => return Ok(absolute),
        stat => stat.map_err(refused)?,
    };
    let mut target = absolute;
    if stat.kind == FileKind::Link {
        let opened = fs::open(&target, OFlags::PATH, 0).map_err(|errno| match errno {
            Errno::NOENT => Error::dangling(OPERATION, path),
            Errno::LOOP => refused(errno).because("the symbolic links go round in a circle; remove them"),
            errno => refused(errno),
        })?;
        stat = fs::stat_of(opened.as_fd()).map_err(refused)?;
        target = fs::resolved_path(opened.as_fd()).map_err(refused)?;
        if stat.kind == FileKind::File && !is_named(&target, stat.identity) {
            return Err(odd("the file that the symbolic link points to has no name of its own; name that file".into()));
        }
    }
    match stat.kind {
        FileKind::File => Ok(target),
        FileKind::Folder => Err(refused(Errno::ISDIR)),
        other => Err(odd(format!("it is {}, and only regular files are replaced; name another file", other.name()))),
    }
}

#[cfg(test)]
mod tests;
