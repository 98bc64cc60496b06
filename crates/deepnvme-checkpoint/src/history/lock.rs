//! The writer's lock of a folder: `flock` on a small file, so that the kernel releases it when the holder dies.
//!
//! The file names its holder. A foreign file is locked as well, but never written to or removed.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use deepnvme_io::fs::{self, FileKind, OFlags};
use deepnvme_io::op::Errno;
use deepnvme_io::{Error as IoError, ErrorKind};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The name of the lock file.
pub const LOCK: &str = ".deepnvme-lock";
const FORMAT: &str = "deepnvme-lock";
const BYTES_MAX: u64 = 4096;
/// Attempts to lock a file that others keep removing.
const TRIES_MAX: u32 = 1000;

/// The holder of a lock, as written in its file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    format: String,
    /// Process, machine and time, for error messages.
    pub name: String,
    /// Equal for all processes that write together. The file of earlier versions calls it a token.
    #[serde(rename = "token")]
    pub group_id: String,
}

impl Holder {
    /// Creates a holder with that name.
    #[must_use]
    pub fn new(name: String, group_id: String) -> Self {
        Self { format: FORMAT.into(), name, group_id }
    }

    /// Parses the text of a lock file. `None` if it is a foreign file.
    #[must_use]
    pub fn parse(text: &[u8]) -> Option<Self> {
        serde_json::from_slice(text).ok().filter(|holder: &Self| holder.format == FORMAT)
    }

    /// Returns the text of a lock file.
    #[must_use]
    pub fn text(&self) -> String {
        serde_json::to_string(self).unwrap_or_default() + "\n"
    }
}

/// The outcome of taking a lock.
#[derive(Debug)]
pub(super) enum LockOutcome {
    /// This process holds it now.
    Held(Lock),
    /// Another process of the same group holds it.
    Shared,
    /// The file system lacks locks.
    Unsupported,
}

/// A lock, held until dropped.
#[derive(Debug)]
pub(super) struct Lock {
    path: PathBuf,
    file: OwnedFd,
    /// The content of the file, if it is ours.
    text: Option<String>,
    /// A forked child shares the descriptor. Only the creator removes the file.
    creator: deepnvme_io::mem::CreatorProcess,
}

impl Lock {
    /// Takes the lock of a folder without waiting.
    ///
    /// # Errors
    /// `Locked` if a process of another group holds it, or `Io` for errors of the folder.
    pub(super) fn take(folder: &Path, holder: &Holder) -> Result<LockOutcome> {
        let path = folder.join(LOCK);
        let refused = |errno| Error::from(IoError::os("lock", errno).at_path(&path));
        for _ in 0..TRIES_MAX {
            let Some((file, is_new)) = open(folder, &path, holder)? else { continue };
            // `make` may have locked a new file already. This call then changes nothing.
            match fs::try_lock(file.as_fd()) {
                Ok(true) => {}
                Ok(false) => {
                    let other = fs::read_small_of(&file, &path, BYTES_MAX).ok().and_then(|text| Holder::parse(&text));
                    if other.as_ref().is_some_and(|other| other.group_id == holder.group_id) {
                        return Ok(LockOutcome::Shared);
                    }
                    let name = other.map_or_else(
                        || "another process".into(),
                        |other| {
                            let is_own = process_of(&other.name) == process_of(&holder.name);
                            if is_own { "another Checkpointer of this process".into() } else { other.name }
                        },
                    );
                    return Err(Error::Locked { path: folder.to_path_buf(), holder: name });
                }
                Err(Errno::NOLCK | Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL | Errno::BADF) => {
                    if is_new && is_at(&file, &path) {
                        // No other process can have locked it. Without locks, the file is meaningless.
                        let _ = fs::unlink(&path);
                    }
                    return Ok(LockOutcome::Unsupported);
                }
                Err(errno) => return Err(refused(errno)),
            }
            // The previous holder may have removed the file, and another process may have created a new one.
            if !is_at(&file, &path) {
                continue;
            }
            let mut lock = Self { path, file, text: None, creator: deepnvme_io::mem::CreatorProcess::current() };
            lock.sign(holder, is_new);
            return Ok(LockOutcome::Held(lock));
        }
        Err(refused(Errno::AGAIN))
    }

    /// Returns whether the lock file still has its name. Otherwise another process can lock a new file.
    #[must_use]
    pub(super) fn is_there(&self) -> bool {
        is_at(&self.file, &self.path)
    }

    /// Writes the holder into the file if it is ours.
    fn sign(&mut self, holder: &Holder, is_new: bool) {
        let old = fs::read_small_of(&self.file, &self.path, BYTES_MAX).unwrap_or_default();
        if !is_new && Holder::parse(&old).is_none() {
            return;
        }
        let text = holder.text();
        let written =
            fs::truncate(self.file.as_fd(), 0).and_then(|()| fs::write_all(self.file.as_fd(), text.as_bytes()));
        if written.is_err() {
            // A part of the text would look like a foreign file, which stays.
            let _ = fs::truncate(self.file.as_fd(), 0);
        }
        // A full disk does not prevent locking. The file then names no holder.
        self.text = Some(if written.is_ok() { text } else { String::new() });
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        if !self.creator.is_current() || self.text.is_none() || !self.is_there() {
            return;
        }
        let now = fs::read_small_of(&self.file, &self.path, BYTES_MAX).ok();
        if now.as_deref() == self.text.as_deref().map(str::as_bytes) {
            // Remove it while it is locked: a process that has it open then notices the lost name.
            let _ = fs::unlink(&self.path);
        }
    }
}

/// Returns the process and the machine of a holder's name, without its time.
fn process_of(name: &str) -> &str {
    name.split(" (since ").next().unwrap_or(name)
}

/// Opens or creates the file. Returns whether it is new. `None`: another process created it meanwhile.
fn open(folder: &Path, path: &Path, holder: &Holder) -> Result<Option<(OwnedFd, bool)>> {
    let refused = |errno| Error::from(IoError::os("lock", errno).at_path(path));
    let odd = |what: &str| {
        let detail = format!("it is {what}, where a regular file is expected; move it away");
        Error::from(IoError::new(ErrorKind::InvalidInput, "lock", detail).at_path(path))
    };
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
    let opened = match fs::open(path, OFlags::RDWR | flags, 0) {
        // A lock needs no write permission.
        Err(Errno::ACCESS | Errno::ROFS) => fs::open(path, OFlags::RDONLY | flags, 0),
        opened => opened,
    };
    let file = match opened {
        Ok(file) => file,
        Err(Errno::NOENT) => return make(folder, path, holder).map(|made| made.map(|file| (file, true))),
        Err(Errno::LOOP) => return Err(odd("a symbolic link")),
        Err(Errno::ISDIR) => return Err(odd("a folder")),
        Err(Errno::NXIO) => return Err(odd("a pipe or a socket")),
        Err(errno) => return Err(refused(errno)),
    };
    match fs::stat_of(file.as_fd()).map_err(refused)?.kind {
        FileKind::File => Ok(Some((file, false))),
        other => Err(odd(other.name())),
    }
}

/// Creates the file with its content, so that no process sees it empty. On file systems that cannot link an unnamed
/// file, it is empty at first. `None`: another process was first.
fn make(folder: &Path, path: &Path, holder: &Holder) -> Result<Option<OwnedFd>> {
    let refused = |errno| Error::from(IoError::os("lock", errno).at_path(path));
    let mode = 0o666 & !fs::umask();
    if let Ok(file) = fs::open_unnamed(folder) {
        // Locked before it has a name, so no other process can be first.
        let linked = fs::try_lock(file.as_fd())
            .and_then(|_| fs::write_all(file.as_fd(), holder.text().as_bytes()))
            .and_then(|()| fs::set_mode(file.as_fd(), mode))
            .and_then(|()| fs::link(file.as_fd(), path));
        match linked {
            Ok(()) => return Ok(Some(file)),
            Err(Errno::EXIST) => return Ok(None),
            // Some file systems cannot link such files. The fallback reports any other error.
            Err(_) => {}
        }
    }
    match fs::open(path, OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW, 0o666) {
        Ok(file) => Ok(Some(file)),
        Err(Errno::EXIST) => Ok(None),
        Err(errno) => Err(refused(errno)),
    }
}

fn is_at(file: &OwnedFd, path: &Path) -> bool {
    match (fs::stat_of(file.as_fd()), fs::stat_link(path)) {
        (Ok(held), Ok(named)) => held.identity == named.identity,
        _ => false,
    }
}
