//! The names that opening a file created, to remove them if its first write fails.
//!
//! `EXCL` proves that this process created a file. Others may have written to it since, even before a cancelled write
//! has ended. So files are removed only while none of them has a byte. Linux cannot remove "this file": it removes
//! whatever has a name. The name is therefore moved to a private one first, and the file is removed only if the moved
//! one is the created one.

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
    /// With more bytes, somebody has written to it.
    bytes_max: u64,
}

impl Created {
    /// Creates a file if the name is free. Returns `None` if it is taken, also by a dangling link, or cannot be created:
    /// opening it then reports why.
    pub(super) fn new(path: &Path, flags: OFlags) -> Option<Self> {
        use std::os::fd::AsFd as _;
        let file = fs::open(path, flags | OFlags::CREATE | OFlags::EXCL, 0o666).ok()?;
        Some(Self { path: absolute(path), identity: fs::stat_of(file.as_fd()).ok()?.identity, bytes_max: 0 })
    }

    /// Removes the file if it still has its name, and nobody has written to it.
    pub(super) fn remove(&self) {
        if !self.is_at(&self.path) {
            return;
        }
        let Some(private) = private_name(&self.path) else { return };
        if fs::rename(&self.path, &private).is_err() {
            return;
        }
        if self.is_at(&private) {
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

    fn is_at(&self, path: &Path) -> bool {
        fs::stat_link(path).is_ok_and(|stat| stat.identity == self.identity && stat.bytes <= self.bytes_max)
    }
}

/// What opening one logical file created. Empty as soon as the whole file was written.
#[derive(Debug, Default)]
pub(super) struct CreatedFiles(Mutex<Vec<Created>>);

impl CreatedFiles {
    pub(super) fn new(created: impl Iterator<Item = Created>) -> Self {
        Self(Mutex::new(created.collect()))
    }

    /// Adds the manifest that was created with these. Nobody writes to it: another set replaces it.
    pub(super) fn add_manifest(&self, path: &Path, identity: FileId) {
        lock(&self.0).push(Created { path: absolute(path), identity, bytes_max: u64::MAX });
    }

    /// Keeps the files for good.
    pub(super) fn keep(&self) {
        lock(&self.0).clear();
    }

    /// Removes the files if nobody has written to any, the last one first: a manifest before the parts that it lists.
    pub(super) fn remove(&self) {
        let created = std::mem::take(&mut *lock(&self.0));
        if created.iter().all(|file| file.is_at(&file.path)) {
            created.iter().rev().for_each(Created::remove);
        }
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
    fn only_the_created_file_is_removed_and_only_while_it_is_empty() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let created = Created::new(&path, OFlags::WRONLY).unwrap();
        assert!(Created::new(&path, OFlags::WRONLY).is_none(), "the name is taken");
        std::fs::write(&path, "later").unwrap();
        created.remove();
        assert_eq!(std::fs::read(&path).unwrap(), b"later", "somebody has written to it");
        std::fs::write(folder.path().join("other"), "").unwrap();
        std::fs::rename(folder.path().join("other"), &path).unwrap();
        created.remove();
        assert!(path.exists(), "another file has the name");
        std::fs::remove_file(&path).unwrap();
        created.remove();
        let created = Created::new(&path, OFlags::WRONLY).unwrap();
        created.remove();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_set_stays_as_a_whole_if_somebody_has_written_to_a_part() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let make = || {
            let files =
                CreatedFiles::new(["a", "b"].iter().map(|name| Created::new(&path(name), OFlags::WRONLY).unwrap()));
            std::fs::write(path("list"), "manifest").unwrap();
            files.add_manifest(&path("list"), fs::stat_link(&path("list")).unwrap().identity);
            files
        };
        let files = make();
        std::fs::write(path("b"), "data").unwrap();
        files.remove();
        assert!(["a", "b", "list"].iter().all(|name| path(name).exists()));
        ["a", "b", "list"].iter().for_each(|name| std::fs::remove_file(path(name)).unwrap());
        make().remove();
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
