//! A folder that gets its name when it is complete, and is removed otherwise.
//!
//! Its private name proves its identity, as the name of a [`Temporary`](super::Temporary) does. Each file is listed
//! before it is created. After a killed process, exactly the listed files are removed. A foreign file stays, and the
//! folder with it. A stripe manifest is removed together with the files that it recorded as its own, wherever they lie.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

use super::set;
use super::temporary::{self, Proof, unlink_if};
use crate::stripe_set::MANIFEST_SUFFIX;
use deepnvme_io::fs::{self, FileId, FileKind, OFlags};
use deepnvme_io::mem::CreatorProcess;
use deepnvme_io::op::Errno;
use deepnvme_io::{Error, ErrorKind, Result};

/// The name of the list, inside the folder.
const CONTENTS: &str = ".deepnvme-contents";
/// Maximum size of a list.
const CONTENTS_BYTES_MAX: u64 = 64 << 20;

/// A new folder under a private name. Dropping it before [`commit`](Self::commit) removes the listed files, and the
/// folder if nothing else is in it.
#[derive(Debug)]
pub struct PrivateFolder {
    target: PathBuf,
    path: PathBuf,
    identity: FileId,
    folder: OwnedFd,
    contents: OwnedFd,
    contents_bytes: u64,
    is_kept: bool,
    creator: CreatorProcess,
}

impl PrivateFolder {
    /// Creates a folder next to `target`, whose name it will get. First removes the folders of this name that killed
    /// processes left.
    ///
    /// # Errors
    /// The error of the parent folder, with the path. `InvalidInput` if the path does not end in a name.
    pub fn new(target: &Path) -> Result<Self> {
        const OPERATION: &str = "make a folder";
        let target = std::path::absolute(target).map_err(|error| Error::from_io(OPERATION, &error).at_path(target))?;
        let refused = |errno| Error::os(OPERATION, errno).at_path(&target);
        if target.file_name().is_none() {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                OPERATION,
                "the path does not end in a name; name a new folder",
            )
            .at_path(target));
        }
        remove_leftover_folders(&target);
        let (path, folder, identity) = temporary::private_folder(&target).map_err(refused)?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
        let contents = fs::open(&path.join(CONTENTS), flags, 0o600);
        let contents = contents.map_err(|errno| {
            let _ = fs::remove_folder(&path);
            refused(errno)
        })?;
        let creator = CreatorProcess::current();
        let new = Self { target, path, identity, folder, contents, contents_bytes: 0, is_kept: false, creator };
        // Sync before adding files: after a power cut, files could exist without a list that states they are ours.
        fs::sync_folder(&new.path)?;
        fs::sync_folder(fs::folder_of(&new.target))?;
        Ok(new)
    }

    /// Returns the current, private name.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Lists a file or subfolder that will be created under this relative path. Returns its full path.
    ///
    /// # Errors
    /// `InvalidInput` for a path that leads out of the folder, or the error of the kernel.
    pub fn add(&mut self, name: &Path) -> Result<PathBuf> {
        if !is_inside(name) {
            let detail = "a file of a new folder lies in it; name it relative to the folder";
            return Err(Error::new(ErrorKind::InvalidInput, "add to a folder", detail).at_path(name));
        }
        let mut line = name.as_os_str().as_bytes().to_vec();
        line.push(0);
        let mut done = 0;
        let refused = |errno| Error::os("add to a folder", errno).at_path(&self.path);
        while done < line.len() {
            let at = self.contents_bytes + done as u64;
            match fs::write_at(self.contents.as_fd(), &line[done..], at).map_err(refused)? {
                0 => return Err(refused(Errno::NOSPC)),
                count => done += count,
            }
        }
        fs::sync(self.contents.as_fd()).map_err(refused)?;
        self.contents_bytes += line.len() as u64;
        Ok(self.path.join(name))
    }

    /// Gives the folder its final name. Only an empty folder may exist there. Its permissions pass to the new one. The
    /// caller has synced the files in it.
    ///
    /// # Errors
    /// The error of the file system. The folder is then removed, unless only a step after the rename failed.
    pub fn commit(mut self) -> Result<()> {
        let refused = |errno| Error::os("rename", errno).at_path(&self.target);
        fs::sync_folder(&self.path)?;
        let mode = match fs::stat_link(&self.target) {
            Ok(old) => old.mode & 0o777,
            Err(Errno::NOENT) => 0o777 & !fs::umask(),
            Err(errno) => return Err(refused(errno)),
        };
        fs::set_mode(self.folder.as_fd(), mode).map_err(refused)?;
        let above = fs::OpenedFolder::new(fs::folder_of(&self.target))?;
        // The kernel replaces an empty folder by a folder, and nothing else.
        temporary::rename_unless_moved((&self.path, self.identity), self.folder.as_fd(), &self.target)
            .map_err(|errno| temporary::rename_error(errno, &self.target))?;
        self.is_kept = true;
        // Sync the name first: until then, cleanup needs this list to find the files.
        above.sync_change(&self.target)?;
        let unlisted = fs::unlink(&self.target.join(CONTENTS));
        unlisted.map_err(|errno| Error::os("remove", errno).at_path(&self.target))?;
        fs::sync(self.folder.as_fd()).map_err(|errno| Error::os("sync folder", errno).at_path(&self.target))
    }
}

impl Drop for PrivateFolder {
    fn drop(&mut self) {
        if !self.creator.is_current() {
            return;
        }
        let path = temporary::current_path(&self.path, self.identity, self.folder.as_fd());
        if !self.is_kept && fs::stat_link(&path).is_ok_and(|stat| stat.identity == self.identity) {
            empty(&path, &self.contents);
        }
        let _ = fs::unlock(self.folder.as_fd());
    }
}

/// Removes the new folders of this name that killed processes left. Removes the listed files, then the folder if it is
/// empty.
pub fn remove_leftover_folders(target: &Path) {
    for Proof { path, file, .. } in temporary::leftovers_of(target, FileKind::Folder) {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        match fs::open(&path.join(CONTENTS), flags, 0) {
            Ok(contents) => empty(&path, &contents),
            // Killed before the list existed, or after the list and all files were removed.
            Err(_) => drop(fs::remove_folder(&path)),
        }
        drop(file);
    }
}

/// Removes the listed files. If nothing else is left, removes the list and the folder.
fn empty(folder: &Path, contents: &OwnedFd) {
    let Ok(stat) = fs::stat_of(contents.as_fd()) else { return };
    if stat.kind != FileKind::File || stat.user != fs::user() {
        return;
    }
    let list = folder.join(CONTENTS);
    let Ok(text) = fs::read_small_of(contents, &list, CONTENTS_BYTES_MAX) else { return };
    // The last line may be incomplete.
    let whole = text.iter().rposition(|byte| *byte == 0).map_or(&[][..], |end| &text[..end]);
    for name in whole.split(|byte| *byte == 0).rev() {
        let name = PathBuf::from(std::ffi::OsString::from_vec(name.to_vec()));
        if !is_inside(&name) || has_link(folder, &name) {
            continue;
        }
        // Keep a manifest while it is needed to find files elsewhere that are its own.
        let is_manifest = name.as_os_str().as_bytes().ends_with(MANIFEST_SUFFIX.as_bytes());
        let path = folder.join(name);
        if is_manifest && !set::remove_stripes(&path) {
            continue;
        }
        temporary::remove_leftovers(&path);
        match fs::stat_link(&path) {
            Ok(stat) if stat.kind == FileKind::Folder => drop(fs::remove_folder(&path)),
            Ok(stat) => drop(unlink_if(&path, stat.identity)),
            Err(_) => {}
        }
    }
    // Keep the list until every removal is on disk.
    let is_empty = fs::entries(folder).is_ok_and(|names| names.iter().all(|name| name == CONTENTS));
    if is_empty && fs::sync_folder(folder).is_ok() {
        unlink_if(&list, stat.identity);
        let _ = fs::remove_folder(folder);
    }
}

/// Returns whether a folder on the way to a file has become a link, which may lead to a foreign folder.
fn has_link(folder: &Path, name: &Path) -> bool {
    let between = name.ancestors().skip(1).filter(|above| !above.as_os_str().is_empty());
    between.into_iter().any(|above| fs::stat_link(&folder.join(above)).is_ok_and(|stat| stat.kind == FileKind::Link))
}

fn is_inside(name: &Path) -> bool {
    let mut components = name.components().peekable();
    components.peek().is_some()
        && components.all(|it| matches!(it, Component::Normal(_)))
        && name != Path::new(CONTENTS)
        && !name.as_os_str().as_bytes().contains(&0)
}

#[cfg(test)]
mod tests;
