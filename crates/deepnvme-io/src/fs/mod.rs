//! Names and metadata of files.
//!
//! Every other module, and the crates above, open, create, rename, link, remove, lock and stat files through these
//! functions. The functions contain no policy, which is the callers'. Tensor bytes go through a
//! [`backend`](crate::backend) instead. A few modules ask the kernel directly: about `/proc` and `/sys`, free space,
//! and the disk of a file. `stat` has the metadata types. `kernel` is the real file system, and a `simulated` one can
//! replace it. `permissions` computes permissions, `system` reads facts about the process and the system, and `crash`
//! simulates a crash in tests.
//!
//! Calls return the kernel's [`Errno`]. Callers add the path and the operation. Opens, reads, writes, locks,
//! truncations and syncs that a signal interrupts are repeated here.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use crate::display;
use crate::error::{Error, ErrorKind, Result};
use crate::op::Errno;

/// Maximum times that a file may disappear and reappear during a read.
const REPLACEMENTS_MAX: usize = 100;

#[cfg(not(simulated))]
mod kernel;
mod permissions;
#[cfg(simulated)]
pub mod simulated;
mod stat;
mod system;

#[cfg(not(simulated))]
use kernel as world;
#[cfg(simulated)]
use simulated as world;

pub use permissions::{Permissions, listed_mode, without_group};
pub use rustix::fs::OFlags;
pub use stat::{AclKind, FileId, FileKind, Space, Stat};
pub use system::{system_text, umask, user};
pub use world::{
    access_list, advise_random, allocate, cached_pages, copy_between, entries, file_system, link, link_path, lock,
    make_folder, open, open_flags, open_in_memory, open_unnamed, random_bits, read_at, real_path, remove_folder,
    rename, rename_new, reopen, resolved_path, set_group, set_mode, set_open_flags, space, stat, stat_link, stat_of,
    sync, truncate, try_lock, unlink, unlock, write_at,
};

/// Returns whether a name exists. A dangling link counts as missing.
///
/// # Errors
/// Any error other than "no such file": a name that cannot be checked may be taken.
pub fn exists(path: &Path) -> Result<bool, Errno> {
    match stat(path) {
        Ok(_) => Ok(true),
        Err(Errno::NOENT | Errno::NOTDIR) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// Returns whether no file has this name. A dangling link has it, and so may a file that an error hides.
#[must_use]
pub fn is_absent(path: &Path) -> bool {
    matches!(stat_link(path), Err(Errno::NOENT | Errno::NOTDIR))
}

/// Returns whether the path leads to a folder.
#[must_use]
pub fn is_folder(path: &Path) -> bool {
    stat(path).is_ok_and(|stat| stat.kind == FileKind::Folder)
}

/// Creates a folder and its missing parents.
///
/// # Errors
/// The kernel's error, with the path of the folder that could not be made. `NOTDIR` if its name is taken by another kind
/// of file. `NotFound` if its name is a symbolic link that leads nowhere.
pub fn make_folders(path: &Path) -> Result<()> {
    const OPERATION: &str = "make folder";
    let made = match make_folder(path, 0o777) {
        Err(Errno::NOENT) => match path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            Some(parent) => {
                make_folders(parent)?;
                make_folder(path, 0o777)
            }
            None => Err(Errno::NOENT),
        },
        made => made,
    };
    match made {
        Err(Errno::EXIST) => match stat(path) {
            Ok(found) if found.kind == FileKind::Folder => Ok(()),
            // The name exists, so it is a link.
            Err(Errno::NOENT) => Err(Error::dangling(OPERATION, path)),
            found => Err(Error::os(OPERATION, found.err().unwrap_or(Errno::NOTDIR)).at_path(path)),
        },
        made => made.map_err(|errno| Error::os(OPERATION, errno).at_path(path)),
    }
}

/// Returns the folder of a path: `.` for a bare name, and `/` for itself.
#[must_use]
pub fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        Some(_) => Path::new("."),
        None => path,
    }
}

/// Opens a folder, to sync it.
///
/// # Errors
/// The kernel's error.
pub fn open_folder(folder: &Path) -> Result<OwnedFd, Errno> {
    open(folder, OFlags::RDONLY | OFlags::DIRECTORY, 0)
}

/// Waits until the names in a folder are on the disk.
///
/// # Errors
/// The kernel's error, with the path.
pub fn sync_folder(folder: &Path) -> Result<()> {
    OpenedFolder::new(folder)?.sync()
}

/// A folder opened before its names change, so that the sync cannot fail for lack of a descriptor.
#[derive(Debug)]
pub struct OpenedFolder {
    path: PathBuf,
    file: OwnedFd,
}

impl OpenedFolder {
    /// Opens the folder.
    ///
    /// # Errors
    /// The kernel's error, with the path.
    pub fn new(folder: &Path) -> Result<Self> {
        let file = open_folder(folder).map_err(|errno| Error::os("sync folder", errno).at_path(folder))?;
        Ok(Self { path: folder.to_path_buf(), file })
    }

    /// Waits until its names are on the disk.
    ///
    /// # Errors
    /// The kernel's error, with the path.
    pub fn sync(&self) -> Result<()> {
        use std::os::fd::AsFd as _;
        sync(self.file.as_fd()).map_err(|errno| Error::os("sync folder", errno).at_path(&self.path))
    }

    /// Waits until its names are on the disk, after a name has changed.
    ///
    /// # Errors
    /// The kernel's error, which states that the change was made.
    pub fn sync_change(&self, of: &Path) -> Result<()> {
        self.sync().map_err(|error| {
            let change = format!("{} is the new one, but a power cut may bring back the old one", display::path(of));
            let detail = if error.detail().is_empty() { change } else { format!("{change}; {}", error.detail()) };
            error.because(detail)
        })
    }
}

/// Reads a small regular file, such as a manifest. Anything else fails immediately: it neither waits for a pipe nor
/// reads a device.
///
/// # Errors
/// `InvalidInput` if it is not a regular file, or has more than `bytes_max` bytes. `ISDIR` for a folder. Other errors
/// of the kernel. All contain the path.
pub fn read_small(path: &Path, bytes_max: u64) -> Result<Vec<u8>> {
    read_small_of(&open_to_read(path)?, path, bytes_max)
}

/// Opens a regular file for reading. Anything else fails immediately, as in [`read_small`].
///
/// # Errors
/// `InvalidInput` if it is not a regular file. `ISDIR` for a folder. Other errors of the kernel. All contain the path.
pub fn open_regular(path: &Path) -> Result<OwnedFd> {
    let file = open_to_read(path)?;
    check_regular(&file, path)?;
    Ok(file)
}

/// Opens without waiting for the writer of a pipe.
fn open_to_read(path: &Path) -> Result<OwnedFd> {
    open(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY, 0).map_err(|errno| match errno {
        Errno::NXIO => odd(path, "it is a socket, or a device without a driver; a regular file is expected"),
        errno => Error::os("read", errno).at_path(path),
    })
}

fn check_regular(file: &OwnedFd, path: &Path) -> Result<Stat> {
    use std::os::fd::AsFd as _;
    let refused = |errno| Error::os("read", errno).at_path(path);
    let stat = stat_of(file.as_fd()).map_err(refused)?;
    match stat.kind {
        FileKind::File => Ok(stat),
        FileKind::Folder => Err(refused(Errno::ISDIR)),
        other => Err(odd(path, format!("it is {}, where a regular file is expected", other.name()))),
    }
}

fn odd(path: &Path, detail: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidInput, "read", detail).at_path(path)
}

/// Reads as [`read_small`], or returns `None` if the name does not exist.
///
/// # Errors
/// As [`read_small`]. A dangling symbolic link is `NotFound`: the name exists, so its file may have existed. `Busy` if
/// the file comes and goes again and again.
pub fn read_small_if_there(path: &Path, bytes_max: u64) -> Result<Option<Vec<u8>>> {
    for _ in 0..REPLACEMENTS_MAX {
        match read_small(path, bytes_max) {
            Ok(bytes) => return Ok(Some(bytes)),
            Err(error) if !is_no_such_file(&error) => return Err(error),
            Err(_) => {}
        }
        match stat_link(path) {
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(None),
            Ok(stat) if stat.kind == FileKind::Link => return Err(Error::dangling("read", path)),
            // It has been created since.
            Ok(_) => {}
            Err(errno) => return Err(Error::os("read", errno).at_path(path)),
        }
    }
    let detail = "the file came and went again and again while it was being read; read it again";
    Err(Error::new(ErrorKind::Busy, "read", detail).at_path(path))
}

fn is_no_such_file(error: &Error) -> bool {
    let errno = error.errno().map(Errno::from_raw_os_error);
    errno.is_some_and(|errno| [Errno::NOENT, Errno::NOTDIR].contains(&errno))
}

/// Reads an open file from its start, as [`read_small`] does. `path` is for errors.
///
/// # Errors
/// As [`read_small`].
pub fn read_small_of(file: &OwnedFd, path: &Path, bytes_max: u64) -> Result<Vec<u8>> {
    use std::os::fd::AsFd as _;
    let refused = |errno| Error::os("read", errno).at_path(path);
    let stat = check_regular(file, path)?;
    let too_long = |bytes: u64| odd(path, format!("it has {bytes} bytes; a file of this kind has at most {bytes_max}"));
    if stat.bytes > bytes_max {
        return Err(too_long(stat.bytes));
    }
    // Files in /proc report no bytes, and a file may grow meanwhile, so the bound applies to the bytes read.
    let mut bytes = Vec::new();
    let mut done = 0;
    grown(&mut bytes, stat.bytes as usize + 1).map_err(refused)?;
    loop {
        match read_at(file.as_fd(), &mut bytes[done..], done as u64).map_err(refused)? {
            0 => break,
            count => done += count,
        }
        if done as u64 > bytes_max {
            return Err(too_long(done as u64));
        }
        if done == bytes.len() {
            let most = usize::try_from(bytes_max).unwrap_or(usize::MAX).saturating_add(1);
            grown(&mut bytes, (done * 2).min(most)).map_err(refused)?;
        }
    }
    bytes.truncate(done);
    Ok(bytes)
}

/// Extends a vector to a length, if there is memory.
fn grown(bytes: &mut Vec<u8>, len: usize) -> Result<(), Errno> {
    bytes.try_reserve_exact(len.saturating_sub(bytes.len())).map_err(|_| Errno::NOMEM)?;
    bytes.resize(len, 0);
    Ok(())
}

/// Reads until `bytes` is full or the file ends, since the kernel may read less at a time. Returns the bytes read.
///
/// # Errors
/// The kernel's error.
pub fn read_full_at(file: BorrowedFd<'_>, bytes: &mut [u8], offset: u64) -> Result<usize, Errno> {
    let mut done = 0;
    while done < bytes.len() {
        match read_at(file, &mut bytes[done..], offset + done as u64)? {
            0 => break,
            count => done += count,
        }
    }
    Ok(done)
}

/// Writes all of `bytes` to the start of an open file.
///
/// # Errors
/// The kernel's error. `NOSPC` if it accepts no more bytes.
pub fn write_all(file: BorrowedFd<'_>, bytes: &[u8]) -> Result<(), Errno> {
    let mut done = 0;
    while done < bytes.len() {
        match write_at(file, &bytes[done..], done as u64)? {
            0 => return Err(Errno::NOSPC),
            count => done += count,
        }
    }
    Ok(())
}

/// Resolves a path without `.`, `..` and links, or returns the path itself if that fails.
#[must_use]
pub fn real_path_or(path: &Path) -> PathBuf {
    real_path(path).unwrap_or_else(|_| path.to_path_buf())
}

#[cfg(feature = "crash-steps")]
pub mod crash;
#[cfg(test)]
mod tests;
