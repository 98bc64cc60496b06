//! Private files that vanish unless they are kept, under names that prove what they are.
//!
//! A temporary is called `.{target}.deepnvme-tmp-{inode}-{born}-{random}`: its name states which file it is. Whoever finds
//! one can tell it from a copy, from a name that somebody planted and from any other file, and removes it only if that is
//! so, nobody has it locked, and it belongs to the user. A writer locks its temporary (`flock`) before it has that name, and
//! the lock goes with the process, however it ends.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use crate::sync::thread;
use deepnvme_io::fs::{self, Identity, Kind, OFlags, Stat};
use deepnvme_io::op::Errno;
use deepnvme_io::start_thread;
use deepnvme_io::{Error, ErrorKind, Result};

/// What the names of temporaries contain, after the name of the file that they will replace.
pub const TEMPORARY_MARK: &str = ".deepnvme-tmp-";
/// What follows the mark before a file's name states which file it is, where no file can be made without a name.
const UNPROVEN: &str = "new-";
/// Bytes of a file's name that the names of its temporaries keep: the whole stays within the 255 of file systems.
const NAME_BYTES_MAX: usize = 180;
/// Names that are tried before it is an error that all of them are taken.
const NAMES_MAX: usize = 64;

/// A private file, removed when dropped unless it was kept.
#[derive(Debug)]
pub struct Temporary {
    path: PathBuf,
    file: OwnedFd,
    identity: Identity,
    is_kept: bool,
    /// After a fork it is the parent's to remove.
    process: u32,
}

/// Whom a new file is for at most: everybody whom the umask lets.
pub(super) const EVERYBODY: u32 = 0o666;

impl Temporary {
    /// Makes a new file, readable by its owner alone, in the folder of `target`, which it may replace later.
    ///
    /// # Errors
    /// The folder's refusal, with the path.
    pub fn new(target: &Path) -> Result<Self> {
        // It is removed by its name, perhaps when the process has changed its folder.
        let absolute =
            std::path::absolute(target).map_err(|error| Error::from_io("open for writing", &error).at_path(target))?;
        let target = absolute.as_path();
        let folder = fs::folder_of(target);
        let prefix = prefix(target);
        let made = match unnamed(folder, &prefix) {
            // Neither every file system nor every kernel has files without names, and links to them need /proc.
            Err(errno) if errno != Errno::NOSPC && errno != Errno::DQUOT => named(folder, &prefix),
            made => made,
        };
        let (path, file, identity) = made.map_err(|errno| Error::os("open for writing", errno).at_path(target))?;
        Ok(Self { path, file, identity, is_kept: false, process: std::process::id() })
    }

    /// Its name for now.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The open file.
    #[must_use]
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Which file it is.
    #[must_use]
    pub fn identity(&self) -> Identity {
        self.identity
    }

    /// Writes all of it and waits until that is on the disk.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn fill(&self, bytes: &[u8]) -> Result<()> {
        let written = fs::write_all(self.file(), bytes).and_then(|()| fs::sync(self.file()));
        written.map_err(|errno| Error::os("write", errno).at_path(&self.path))
    }

    /// Gives it the permissions that `target` has, or that a new file there would get. Bits that lend the owner's rights to
    /// whoever runs a file are not passed on.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn take_mode_of(&self, target: &Path) -> Result<()> {
        self.take_mode_within(EVERYBODY, target)
    }

    /// The same, where a new file there would be for those at most whom `most` names.
    pub(super) fn take_mode_within(&self, most: u32, target: &Path) -> Result<()> {
        let set = mode_of(target, most).and_then(|mode| fs::set_mode(self.file(), mode));
        set.map_err(|errno| Error::os("set permissions", errno).at_path(target))
    }

    /// Gives it up to whoever comes next: it keeps its name, which proves what it is, and is locked no longer.
    pub(super) fn leave(mut self) {
        self.is_kept = true;
    }

    /// Gives it the name `target`, which loses what had it.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn rename(&mut self, target: &Path) -> Result<(), Errno> {
        let renamed = fs::rename(&self.path, target);
        // A network file system may say no to the second try of what has worked.
        self.is_kept = renamed.is_ok() || is_named(target, self.identity);
        if self.is_kept { Ok(()) } else { renamed }
    }

    /// Gives it the name `target` if that is free.
    ///
    /// # Errors
    /// `EXIST` where it is not; the kernel's other refusals.
    pub fn rename_new(&mut self, target: &Path) -> Result<(), Errno> {
        match fs::rename_new(&self.path, target) {
            // A second name, and then the first is removed: that works where renaming has no such condition.
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                fs::link_path(&self.path, target)?;
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
        if !self.is_kept && self.process == std::process::id() {
            // Whoever could be told has already been told of the failure that led here.
            unlink_if(&self.path, self.identity);
        }
        // A child of a fork would keep the lock for as long as it lives.
        if self.process == std::process::id() {
            let _ = fs::unlock(self.file.as_fd());
        }
    }
}

/// What a name states of its file, and what the file itself says.
fn statement(stat: &Stat) -> String {
    format!("{:x}-{:x}", stat.identity.inode, stat.born_ns.unwrap_or(0))
}

/// What the names of a file's temporaries start with.
fn prefix(target: &Path) -> OsString {
    let name = target.file_name().unwrap_or_default().as_bytes();
    let mut end = name.len().min(NAME_BYTES_MAX);
    // Some file systems take whole characters only.
    while end < name.len() && end > 0 && name[end] & 0xC0 == 0x80 {
        end -= 1;
    }
    let mut prefix = OsString::from(".");
    prefix.push(OsString::from_vec(name[..end].to_vec()));
    prefix.push(TEMPORARY_MARK);
    prefix
}

/// A locked file that gets its one name when all is known that the name states.
fn unnamed(folder: &Path, prefix: &OsStr) -> Result<(PathBuf, OwnedFd, Identity), Errno> {
    let file = fs::open_unnamed(folder)?;
    let stated = stated(&file)?;
    for _ in 0..NAMES_MAX {
        let path = folder.join(proven(prefix, &stated)?);
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

/// The same where every file has a name from the start: it is made under one that proves nothing, and renamed.
fn named(folder: &Path, prefix: &OsStr) -> Result<(PathBuf, OwnedFd, Identity), Errno> {
    for _ in 0..NAMES_MAX {
        let mut name = prefix.to_os_string();
        name.push(format!("{UNPROVEN}{:032x}", fs::random_bits()?));
        let first = folder.join(name);
        let file = match fs::open(&first, OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW, 0o600) {
            Err(Errno::EXIST) => continue,
            file => file?,
        };
        let identity = fs::stat_of(file.as_fd())?.identity;
        let path = folder.join(proven(prefix, &stated(&file)?)?);
        let renamed = match fs::rename_new(&first, &path) {
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => fs::link_path(&first, &path).map(|()| {
                let _ = fs::unlink(&first);
            }),
            renamed => renamed,
        };
        match renamed {
            // Between its making and its lock it may have been taken away.
            Ok(()) if is_named(&path, identity) => return Ok((path, file, identity)),
            Ok(()) | Err(Errno::EXIST | Errno::NOENT) => drop(unlink_if(&first, identity)),
            // No second names either: the first one will do, and nobody but its owner removes it.
            Err(Errno::PERM | Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => return Ok((first, file, identity)),
            Err(errno) => {
                unlink_if(&first, identity);
                return Err(errno);
            }
        }
    }
    Err(Errno::EXIST)
}

/// Locks a new file, and says what its name is to state. Without a lock nobody could see that it is in use: then its name
/// states a file that there is not, and only its owner removes it.
fn stated(file: &OwnedFd) -> Result<String, Errno> {
    let is_locked = fs::try_lock(file.as_fd()) == Ok(true);
    Ok(if is_locked { statement(&fs::stat_of(file.as_fd())?) } else { "0-0".into() })
}

fn proven(prefix: &OsStr, stated: &str) -> Result<OsString, Errno> {
    let mut name = prefix.to_os_string();
    name.push(format!("{stated}-{:016x}", fs::random_bits()? as u64));
    Ok(name)
}

/// Whether a name that begins so is of a temporary that this file is.
fn is_proof(name: &OsStr, prefix: &OsStr, stat: &Stat) -> bool {
    let Some(rest) = name.as_bytes().strip_prefix(prefix.as_bytes()) else { return false };
    let stated = statement(stat);
    let random = rest.strip_prefix(stated.as_bytes()).and_then(|rest| rest.strip_prefix(b"-"));
    random.is_some_and(|random| random.len() == 16 && random.iter().all(|it| matches!(it, b'0'..=b'9' | b'a'..=b'f')))
}

/// A temporary that its owner has left behind, with its lock.
#[derive(Debug)]
pub(super) struct Proof {
    pub(super) path: PathBuf,
    pub(super) file: OwnedFd,
    identity: Identity,
}

impl Proof {
    /// Removes it; whether it is gone. It is nobody's by now, and locked here.
    pub(super) fn remove(self) -> bool {
        unlink_if(&self.path, self.identity)
    }
}

/// The temporaries of a target that no living writer has: files, or folders.
pub(super) fn stale_of(target: &Path, kind: Kind) -> Vec<Proof> {
    look_for_stale(target, kind).0
}

/// The same, and whether nothing could be missing.
fn look_for_stale(target: &Path, kind: Kind) -> (Vec<Proof>, bool) {
    let folder = fs::folder_of(target);
    let prefix = prefix(target);
    let (user, mut found) = (fs::user(), Vec::new());
    let names = fs::entries(folder);
    let mut is_complete = matches!(names, Ok(_) | Err(Errno::NOENT | Errno::NOTDIR));
    for name in names.unwrap_or_default() {
        let path = folder.join(&name);
        let is_ours = |stat: &Stat| {
            // Somebody else's file could say anything, and one with a second name is of use to somebody.
            let is_alone = kind == Kind::Folder || stat.links == 1;
            stat.kind == kind && stat.user == user && is_alone && is_proof(&name, &prefix, stat)
        };
        if !name.as_bytes().starts_with(prefix.as_bytes()) || !fs::stat_link(&path).is_ok_and(|stat| is_ours(&stat)) {
            continue;
        }
        let access = if kind == Kind::Folder { OFlags::DIRECTORY } else { OFlags::RDWR };
        let opened = fs::open(&path, access | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY, 0);
        let opened = opened.and_then(|file| fs::stat_of(file.as_fd()).map(|stat| (file, stat)));
        let Ok((file, stat)) = opened else {
            is_complete &= opened.is_err_and(|errno| errno == Errno::NOENT);
            continue;
        };
        // Before it was locked here, its writer may have finished and given it another name.
        if is_ours(&stat) && fs::try_lock(file.as_fd()) == Ok(true) && is_named(&path, stat.identity) {
            found.push(Proof { path, file, identity: stat.identity });
        }
    }
    (found, is_complete)
}

/// A folder for its owner alone, locked, whose name states which one it is.
pub(super) fn private_folder(target: &Path) -> Result<(PathBuf, OwnedFd, Identity), Errno> {
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
            let path = above.join(proven(&prefix, &stated(&folder)?)?);
            // A folder is never renamed over one that has something in it.
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

/// Removes the temporaries of `target` that no living writer has: those that prove by their names what they are, belong to
/// this user, and can be locked. Any other file stays, whatever its name.
pub fn remove_stale(target: &Path) {
    remove_all_stale(target);
}

/// The same; whether none is left.
pub(super) fn remove_all_stale(target: &Path) -> bool {
    let (stale, is_complete) = look_for_stale(target, Kind::File);
    stale.into_iter().fold(is_complete, |are_gone, proof| proof.remove() & are_gone)
}

/// Whether that name is that file's.
fn is_named(path: &Path, identity: Identity) -> bool {
    fs::stat_link(path).is_ok_and(|stat| stat.identity == identity)
}

/// Removes a name if it is that file's; whether it is no longer.
pub(super) fn unlink_if(path: &Path, identity: Identity) -> bool {
    match fs::stat_link(path) {
        Ok(stat) if stat.identity == identity => matches!(fs::unlink(path), Ok(()) | Err(Errno::NOENT)),
        Ok(_) | Err(Errno::NOENT | Errno::NOTDIR) => true,
        Err(_) => false,
    }
}

/// The permissions that a file has, or that a new one there would get, which are within `most`.
pub(super) fn mode_of(target: &Path, most: u32) -> Result<u32, Errno> {
    match fs::stat(target) {
        Ok(old) => Ok(old.mode & 0o777),
        Err(Errno::NOENT) => Ok(EVERYBODY & most & !fs::umask()),
        // What may not be asked could be a file that is for fewer eyes.
        Err(errno) => Err(errno),
    }
}

/// A file by its name, so that its bytes stay when the name is gone.
pub(super) fn held(path: &Path) -> Option<OwnedFd> {
    fs::open(path, OFlags::PATH | OFlags::NOFOLLOW, 0).ok()
}

/// Lets go of a file on a thread of its own. The room of one that has no name any more is free a little later.
pub(super) fn release(file: Option<OwnedFd>) {
    if let Some(file) = file {
        // Where no thread is to be had, the closure is dropped here, and with it the file.
        let _ = start_thread(|| thread::Builder::new().name("deepnvme-release".into()).spawn(move || drop(file)));
    }
}

/// The file that will be replaced when somebody names `path`: absolute, and not a link. The kernel follows links, by its
/// own rules of who may.
///
/// # Errors
/// `NotFound` for a link that leads nowhere, `InvalidInput` for a device, a pipe or a socket; the kernel's refusal. Where
/// there is nothing yet, the path itself is the answer.
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
    if stat.kind == Kind::Link {
        let opened = fs::open(&target, OFlags::PATH, 0).map_err(|errno| match errno {
            Errno::NOENT => Error::dangling(OPERATION, path),
            Errno::LOOP => refused(errno).because("the symbolic links go round in a circle; remove them"),
            errno => refused(errno),
        })?;
        stat = fs::stat_of(opened.as_fd()).map_err(refused)?;
        target = fs::resolved_path(opened.as_fd()).map_err(refused)?;
        if stat.kind == Kind::File && !is_named(&target, stat.identity) {
            return Err(odd("the file that the symbolic link points to has no name of its own; name that file".into()));
        }
    }
    match stat.kind {
        Kind::File => Ok(target),
        Kind::Folder => Err(refused(Errno::ISDIR)),
        other => Err(odd(format!("it is {}, and only regular files are replaced; name another file", other.name()))),
    }
}

#[cfg(test)]
mod tests;
