//! Private files that vanish unless they are kept.
//!
//! Each is locked (`flock`) while its writer lives, so that the next writer can tell a stale one, left by a killed
//! process, from one in use.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{FlockOperation, Mode, OFlags, flock};

use crate::error::{Error, Result};

/// Bytes of a file's name that the names of its temporaries keep: the whole stays within the 255 of file systems.
const NAME_BYTES_MAX: usize = 180;

static COUNTER: AtomicU64 = AtomicU64::new(0);

/// A private file, removed when dropped unless it was kept.
#[derive(Debug)]
pub(super) struct Temporary {
    path: PathBuf,
    file: File,
    is_kept: bool,
}

impl Temporary {
    /// Makes a new file in `folder`, readable by its owner alone, whose name starts with `prefix`.
    pub(super) fn new(folder: &Path, prefix: &OsStr) -> Result<Self> {
        loop {
            let mut name = prefix.to_os_string();
            name.push(format!("{}-{}", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed)));
            let path = folder.join(name);
            match File::options().read(true).write(true).create_new(true).mode(0o600).open(&path) {
                Ok(file) => {
                    // A file system without locks only loses the clearing of stale temporaries.
                    let _ = flock(file.as_fd(), FlockOperation::NonBlockingLockExclusive);
                    return Ok(Self { path, file, is_kept: false });
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(Error::from_io("open for writing", &error).at_path(path)),
            }
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Gives it the permissions that `target` has, or that a new file there would get.
    pub(super) fn take_mode_of(&self, target: &Path) -> Result<()> {
        let mode = match fs::metadata(target) {
            Ok(old) => old.permissions().mode() & 0o7777,
            Err(_) => 0o666 & !umask(),
        };
        let set = self.file.set_permissions(fs::Permissions::from_mode(mode));
        set.map_err(|error| Error::from_io("set permissions", &error).at_path(target))
    }

    /// From now on the file stays, under whatever name it has.
    pub(super) fn keep(&mut self) {
        self.is_kept = true;
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.is_kept {
            // Whoever could be told has already been told of the failure that led here.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// A file by its name, so that its bytes stay when the name is gone.
pub(super) fn held(path: &Path) -> Option<OwnedFd> {
    rustix::fs::open(path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty()).ok()
}

/// Lets go of a file on a thread of its own. The room of one that has no name any more is free a little later.
pub(super) fn release(file: Option<OwnedFd>) {
    if let Some(file) = file {
        // Where no thread is to be had, the closure is dropped here, and with it the file.
        let _ = std::thread::Builder::new().name("deepnvme-release".into()).spawn(move || drop(file));
    }
}

/// What the names of a file's temporaries start with.
pub(super) fn prefix(before: &str, target: &Path, mark: &str) -> OsString {
    let name = target.file_name().unwrap_or_default().as_bytes();
    let mut prefix = OsString::from(before);
    prefix.push(OsString::from_vec(name[..name.len().min(NAME_BYTES_MAX)].to_vec()));
    prefix.push(mark);
    prefix
}

/// Removes the files of that prefix that no living writer holds and that `is_stale` does not spare. It is asked
/// while the file is locked: a writer that has just finished has published its file by then.
pub(super) fn remove_stale(folder: &Path, prefix: &OsStr, is_stale: impl Fn(&Path) -> bool) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        if !entry.file_name().as_bytes().starts_with(prefix.as_bytes()) {
            continue;
        }
        let Ok(file) = File::options().read(true).write(true).open(entry.path()) else { continue };
        if flock(file.as_fd(), FlockOperation::NonBlockingLockExclusive).is_ok() && is_stale(&entry.path()) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// The folder of a path, `.` for a bare name.
pub(super) fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

pub(super) fn sync_folder_of(path: &Path) -> Result<()> {
    let folder = folder_of(path);
    let synced = File::open(folder).and_then(|folder| folder.sync_all());
    synced.map_err(|error| Error::from_io("sync folder", &error).at_path(folder))
}

/// The process's umask, without changing it.
fn umask() -> u32 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("Umask:"));
    line.and_then(|text| u32::from_str_radix(text.trim(), 8).ok()).unwrap_or(0o022)
}
