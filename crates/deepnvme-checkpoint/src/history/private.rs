//! Private names: the cleanup after killed writers, and folders without a final name.
//!
//! A private name states its file's inode and creation time, so that no other file is taken for it. A running writer
//! holds the file's lock.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use deepnvme_file::replace::{self, TEMPORARY_MARKER};
use deepnvme_io::fs::{self, FileKind, OFlags, Stat};
use deepnvme_io::mem::CreatorProcess;
use deepnvme_io::op::Errno;
use deepnvme_io::{Error as IoError, Result as IoResult};

use super::names::{self, SHARDS_LIST, SHARDS_RECORD};

/// How many random names to try.
const TRIES_MAX: u32 = 100;

/// Builds the private name of a file.
fn name_of(target: &str, stat: &Stat) -> Result<String, Errno> {
    let random = fs::random_bits()? as u64;
    Ok(format!(".{target}{TEMPORARY_MARKER}{:x}-{:x}-{random:016x}", stat.identity.inode, stat.born_ns.unwrap_or(0)))
}

/// The claim of a private name about the file that has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stated {
    /// It was made for this file.
    This,
    /// It was made for another file.
    Another,
    /// It claims nothing: locks or hard links were unavailable.
    Nothing,
}

impl Stated {
    /// Compares a name with the file that has it.
    pub(super) fn by(name: &str, stat: &Stat) -> Self {
        let rest = name.split_once(TEMPORARY_MARKER).map_or("", |(_, rest)| rest);
        match states(name, stat) {
            true => Self::This,
            false if rest.starts_with("0-0-") || rest.starts_with("new-") => Self::Nothing,
            false => Self::Another,
        }
    }
}

/// Returns whether the name states this very file.
fn states(name: &str, stat: &Stat) -> bool {
    let Some((_, rest)) = name.split_once(TEMPORARY_MARKER) else { return false };
    let mark = format!("{:x}-{:x}-", stat.identity.inode, stat.born_ns.unwrap_or(0));
    rest.strip_prefix(&mark)
        .is_some_and(|random| random.len() == 16 && random.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// Removes private files and folders of checkpoints that no running writer holds, except `listed` ones.
pub(super) fn remove_leftovers(folder: &Path, entries: &[OsString], listed: impl Fn(&str) -> bool) {
    let mut targets = BTreeSet::new();
    for name in entries.iter().filter_map(|name| name.to_str()) {
        let Some(target) =
            name.strip_prefix('.').and_then(|rest| rest.split_once(TEMPORARY_MARKER)).map(|(target, _)| target)
        else {
            continue;
        };
        if !names::is_checkpoint(target) {
            continue;
        }
        if target.contains('.') {
            targets.insert(target);
        } else if !listed(name) {
            // An entry that vanishes or cannot be opened belongs to another process.
            let _ = remove_unheld(&folder.join(name), name);
        }
    }
    // A file that waits for its final name looks like a leftover as well.
    let waiting: Vec<&str> =
        entries.iter().filter_map(|name| name.to_str()).filter(|name| name.starts_with('.') && listed(name)).collect();
    let is_waiting = |target: &str| waiting.iter().any(|name| names::is_private_of(name, target));
    for target in targets.into_iter().filter(|target| !is_waiting(target)) {
        replace::remove_leftovers(&folder.join(target));
    }
}

fn remove_unheld(path: &Path, name: &str) -> Result<(), Errno> {
    let is_leftover = |stat: &Stat| {
        // Another user's folder may claim anything.
        stat.kind == FileKind::Folder && stat.user == fs::user() && states(name, stat)
    };
    if !is_leftover(&fs::stat_link(path)?) {
        return Ok(());
    }
    let folder = fs::open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW, 0)?;
    let held = fs::stat_of(folder.as_fd())?;
    if is_leftover(&held) && fs::try_lock(folder.as_fd())? && fs::stat_link(path)?.identity == held.identity {
        remove_folder(path)?;
    }
    Ok(())
}

/// Removes our folder with its set of shards: the files that its index recorded, and those that the list of an
/// unfinished save names. Any other file stays, and the folder with it.
fn remove_folder(path: &Path) -> Result<(), Errno> {
    replace::remove_whole_set(&path.join(SHARDS_LIST), &[SHARDS_RECORD]);
    fs::remove_folder(path)
}

/// A folder under a private name. It is removed with its shards unless kept.
#[derive(Debug)]
pub struct PrivateFolder {
    path: PathBuf,
    is_kept: bool,
    /// Open and locked while this object lives.
    held: OwnedFd,
    /// After a fork, only the process that created the folder removes it.
    creator: CreatorProcess,
}

impl PrivateFolder {
    /// Creates a folder that will be called `name`.
    ///
    /// # Errors
    /// The error of the parent folder.
    pub fn new(parent: &Path, name: &str) -> IoResult<Self> {
        // Absolute, because the process may change its folder before the removal by name.
        let parent = &std::path::absolute(parent).unwrap_or_else(|_| parent.to_path_buf());
        let refused = |errno| IoError::os("make folder", errno).at_path(parent.join(name));
        for _ in 0..TRIES_MAX {
            let random = fs::random_bits().map_err(refused)?;
            let first = parent.join(format!(".{name}{TEMPORARY_MARKER}{random:032x}"));
            match fs::make_folder(&first, 0o777) {
                Ok(()) => {}
                Err(Errno::EXIST) => continue,
                Err(errno) => return Err(refused(errno)),
            }
            let made = (|| {
                let held = fs::open(&first, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW, 0)?;
                // Without locks, only the cleanup of leftover folders is lost.
                let _ = fs::try_lock(held.as_fd());
                let path = parent.join(name_of(name, &fs::stat_of(held.as_fd())?)?);
                match fs::rename_new(&first, &path) {
                    // A folder can only replace an empty folder.
                    Err(Errno::INVAL | Errno::NOSYS) => fs::rename(&first, &path)?,
                    renamed => renamed?,
                }
                Ok(Self { path, is_kept: false, held, creator: CreatorProcess::current() })
            })();
            return made.map_err(|errno| {
                let _ = fs::remove_folder(&first);
                refused(errno)
            });
        }
        Err(refused(Errno::EXIST))
    }

    /// Returns the current path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Keeps the folder from now on, under any name.
    pub fn keep(mut self) {
        self.is_kept = true;
    }
}

impl Drop for PrivateFolder {
    fn drop(&mut self) {
        if self.is_kept || !self.creator.is_current() {
            return;
        }
        let Ok(held) = fs::stat_of(self.held.as_fd()) else { return };
        let path = replace::current_path(&self.path, held.identity, self.held.as_fd());
        if fs::stat_link(&path).is_ok_and(|stat| stat.identity == held.identity) {
            // The failure that led here was reported already.
            let _ = remove_folder(&path);
        }
    }
}
