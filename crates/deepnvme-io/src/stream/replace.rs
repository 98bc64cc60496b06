//! Replacing a file at once: a private temporary beside it, then its name.
//!
//! The temporary is locked (`flock`) while its writer lives, so that the next writer can tell a stale one, left
//! by a killed process, from one in use, and removes it.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{FlockOperation, flock};

use crate::error::{Error, ErrorKind, Result};

/// What the names of temporaries contain, after the name of the file that they will replace.
pub const TEMPORARY_MARK: &str = ".deepnvme-tmp-";

static COUNTER: AtomicU64 = AtomicU64::new(0);

/// A temporary that becomes the file when committed, and vanishes otherwise.
#[derive(Debug)]
pub struct Replacement {
    target: PathBuf,
    temporary: PathBuf,
    file: File,
    is_committed: bool,
}

impl Replacement {
    /// Makes the temporary, readable by its owner alone, and removes stale ones of the same file. A symbolic link
    /// is followed: what it points to is replaced, not the link.
    ///
    /// # Errors
    /// The refusal of the folder, with its path; `InvalidInput` where the path has no file name or is a folder.
    pub fn new(path: &Path) -> Result<Self> {
        let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
        let Some(name) = target.file_name() else {
            let detail = "the path has no file name";
            return Err(Error::new(ErrorKind::InvalidInput, "open for writing", detail).at_path(path));
        };
        if target.is_dir() {
            return Err(Error::os("open for writing", rustix::io::Errno::ISDIR).at_path(path));
        }
        let folder = folder_of(&target);
        let mut prefix = std::ffi::OsString::from(".");
        prefix.push(short(name));
        prefix.push(TEMPORARY_MARK);
        remove_stale(folder, &prefix);
        loop {
            let mut unique = prefix.clone();
            unique.push(format!("{}-{}", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed)));
            let temporary = folder.join(unique);
            let opened = File::options().read(true).write(true).create_new(true).mode(0o600).open(&temporary);
            match opened {
                Ok(file) => {
                    // A file system without locks only loses the clearing of stale temporaries.
                    let _ = flock(file.as_fd(), FlockOperation::NonBlockingLockExclusive);
                    return Ok(Self { target, temporary, file, is_committed: false });
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(os("open for writing", &error).at_path(path)),
            }
        }
    }

    /// The file that will be replaced.
    #[must_use]
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Where the bytes go until then.
    #[must_use]
    pub fn temporary(&self) -> &Path {
        &self.temporary
    }

    /// Gives the temporary the permissions and the name of the file. What must be on disk before that, the caller
    /// has synced; with `sync_folder` the name is on disk when this returns.
    ///
    /// # Errors
    /// The refusal of the rename or of the sync; the old file is then intact.
    pub fn commit(mut self, sync_folder: bool) -> Result<()> {
        let mode = match fs::metadata(&self.target) {
            Ok(old) => old.permissions().mode() & 0o7777,
            Err(_) => 0o666 & !umask(),
        };
        let fail = |operation, error: &io::Error| os(operation, error).at_path(&self.target);
        let permissions = fs::Permissions::from_mode(mode);
        self.file.set_permissions(permissions).map_err(|error| fail("set permissions", &error))?;
        fs::rename(&self.temporary, &self.target).map_err(|error| fail("rename", &error))?;
        self.is_committed = true;
        if sync_folder {
            let folder = folder_of(&self.target);
            let synced = File::open(folder).and_then(|folder| folder.sync_all());
            synced.map_err(|error| os("sync folder", &error).at_path(folder))?;
        }
        Ok(())
    }
}

impl Drop for Replacement {
    fn drop(&mut self) {
        if !self.is_committed {
            // Whoever could be told has already been told of the failure that led here.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

/// The folder of a path, `.` for a bare name.
fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// So much of a name that the temporary's own name stays within the 255 bytes of file systems.
fn short(name: &std::ffi::OsStr) -> std::ffi::OsString {
    use std::os::unix::ffi::{OsStrExt, OsStringExt};
    let bytes = name.as_bytes();
    std::ffi::OsString::from_vec(bytes[..bytes.len().min(180)].to_vec())
}

/// Removes temporaries of the same file that no living writer holds.
fn remove_stale(folder: &Path, prefix: &std::ffi::OsStr) {
    let Ok(entries) = fs::read_dir(folder) else {
        return;
    };
    for entry in entries.flatten() {
        if !entry.file_name().as_encoded_bytes().starts_with(prefix.as_encoded_bytes()) {
            continue;
        }
        let Ok(file) = File::options().read(true).write(true).open(entry.path()) else {
            continue;
        };
        if flock(file.as_fd(), FlockOperation::NonBlockingLockExclusive).is_ok() {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// The process's umask, without changing it.
fn umask() -> u32 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("Umask:"));
    line.and_then(|text| u32::from_str_radix(text.trim(), 8).ok()).unwrap_or(0o022)
}

fn os(operation: &'static str, error: &io::Error) -> Error {
    match rustix::io::Errno::from_io_error(error) {
        Some(errno) => Error::os(operation, errno),
        None => Error::new(ErrorKind::Io, operation, error.to_string()),
    }
}
