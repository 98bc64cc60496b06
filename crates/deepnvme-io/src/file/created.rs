//! The names that opening a file created, to remove them if its first write fails.
//!
//! `EXCL` proves that this process created a file. Linux cannot remove "this file": it removes whatever has a name. The
//! name is therefore moved to a private one first, and the file is removed only if the moved one is the created one.

use std::path::{Path, PathBuf};

use crate::fs::{self, FileId, OFlags};
use crate::op::Errno;
use crate::sync::{Mutex, lock};

/// A file that this process created under a name.
#[derive(Debug)]
pub(super) struct Created {
    /// Absolute, because the process may change its folder.
    path: PathBuf,
    identity: FileId,
}

impl Created {
    /// Creates a file if the name is free. Returns `None` if it is taken, also by a dangling link, or cannot be created:
    /// opening it then reports why.
    pub(super) fn new(path: &Path, flags: OFlags) -> Option<Self> {
        use std::os::fd::AsFd as _;
        let file = fs::open(path, flags | OFlags::CREATE | OFlags::EXCL, 0o666).ok()?;
        Some(Self { path: absolute(path), identity: fs::stat_of(file.as_fd()).ok()?.identity })
    }

    /// Removes the file if it still has its name, and at most `bytes_max` bytes.
    pub(super) fn remove(&self, bytes_max: u64) {
        if !self.is_at(&self.path, bytes_max) {
            return;
        }
        let Some(private) = private_name(&self.path) else { return };
        if fs::rename(&self.path, &private).is_err() {
            return;
        }
        if self.is_at(&private, bytes_max) {
            let _ = fs::unlink(&private);
        } else {
            // Another process put its file there in between. It gets its name back, unless that is taken again.
            match fs::rename_new(&private, &self.path) {
                Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) if fs::link_path(&private, &self.path).is_ok() => {
                    let _ = fs::unlink(&private);
                }
                _ => {}
            }
        }
    }

    fn is_at(&self, path: &Path, bytes_max: u64) -> bool {
        fs::stat_link(path).is_ok_and(|stat| stat.identity == self.identity && stat.bytes <= bytes_max)
    }
}

/// What opening one logical file created. Empty as soon as the whole file was written.
#[derive(Debug, Default)]
pub(super) struct CreatedFiles(Mutex<Vec<Created>>);

impl CreatedFiles {
    pub(super) fn new(created: impl Iterator<Item = Created>) -> Self {
        Self(Mutex::new(created.collect()))
    }

    /// Adds a file that was created with these, such as the manifest of a set.
    pub(super) fn add(&self, path: &Path, identity: FileId) {
        lock(&self.0).push(Created { path: absolute(path), identity });
    }

    /// Keeps the files for good.
    pub(super) fn keep(&self) {
        lock(&self.0).clear();
    }

    /// Removes the files, the last one first: a manifest before the parts that it lists.
    pub(super) fn remove(&self, bytes_max: u64) {
        let created = std::mem::take(&mut *lock(&self.0));
        created.iter().rev().for_each(|file| file.remove(bytes_max));
    }
}

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf())
}

fn private_name(path: &Path) -> Option<PathBuf> {
    let bits = fs::random_bits().ok()?;
    Some(fs::folder_of(path).join(format!(".deepnvme-removed-{bits:032x}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_created_file_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let created = Created::new(&path, OFlags::WRONLY).unwrap();
        assert!(Created::new(&path, OFlags::WRONLY).is_none(), "the name is taken");
        std::fs::write(&path, "later").unwrap();
        created.remove(0);
        assert_eq!(std::fs::read(&path).unwrap(), b"later", "somebody has written to it");
        std::fs::write(folder.path().join("other"), "other").unwrap();
        std::fs::rename(folder.path().join("other"), &path).unwrap();
        created.remove(u64::MAX);
        assert_eq!(std::fs::read(&path).unwrap(), b"other", "another file has the name");
        std::fs::remove_file(&path).unwrap();
        created.remove(u64::MAX);
        let created = Created::new(&path, OFlags::WRONLY).unwrap();
        created.remove(u64::MAX);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_dangling_link_is_never_ours() {
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink("nowhere", &link).unwrap();
        assert!(Created::new(&link, OFlags::WRONLY).is_none());
        assert!(!folder.path().join("nowhere").exists());
    }
}
