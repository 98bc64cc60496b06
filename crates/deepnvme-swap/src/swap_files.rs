//! The swap files: private, and deleted at the end or after a crash.
//!
//! They have no names if the file system supports `O_TMPFILE`; otherwise they are created and unlinked immediately.
//! With `is_named`, a file is a [`Temporary`]: locked (`flock`) while its process lives, with a name that states its
//! inode. Only such files that no process has locked are removed.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use deepnvme_file::{Temporary, replace::remove_leftovers};
use deepnvme_io::fs::{self, OFlags};
use deepnvme_io::mem::sync::ignore_poison;
use deepnvme_io::{Access, DirectMode, DirectState, Error as IoError, TensorFile};

use crate::error::{Error, Result};
use crate::extent_allocator::Extent;

/// The prefix of all swap file names.
pub const NAME_PREFIX: &str = ".deepnvme-swap-";
/// The name that the temporaries are derived from.
const STEM: &str = "deepnvme-swap-file";
/// The minimum alignment of extents.
const ALIGNMENT_BYTES_MIN: u64 = deepnvme_io::mem::PAGE_BYTES;
/// A file grows by an eighth, up to this limit.
const GROWTH_BYTES_MAX: u64 = 1 << 30;

/// The files of one swapper, as one logical file.
#[derive(Debug)]
pub(crate) struct SwapFiles {
    file: Arc<TensorFile>,
    alignment: u64,
    /// Named files, deleted at the end and locked until then.
    named: Mutex<Vec<Temporary>>,
    is_named: bool,
    creator: deepnvme_io::mem::CreatorProcess,
}

impl SwapFiles {
    /// Creates a file in each folder, striped if there are several. Removes leftovers of crashed processes.
    pub(crate) fn new(folders: &[PathBuf], stripe_bytes: u64, is_named: bool, direct: DirectMode) -> Result<Self> {
        if folders.is_empty() {
            return Err(Error::Invalid("a swapper needs at least one folder".into()));
        }
        let mut parts = Vec::with_capacity(folders.len());
        // Named files are deleted at the end, when the working directory may be another one.
        let absolute = |folder: &PathBuf| std::path::absolute(folder).unwrap_or_else(|_| folder.clone());
        for folder in &folders.iter().map(absolute).collect::<Vec<_>>() {
            remove_leftovers(&folder.join(STEM));
            parts.push(create(folder, is_named)?);
        }
        let fds: Vec<(BorrowedFd<'_>, &Path)> =
            parts.iter().map(|(path, file, _)| (file.as_fd(), path.as_path())).collect();
        let file = deepnvme_file::from_descriptors(&fds, stripe_bytes, Access::ReadWrite, direct)?;
        let alignment = match file.direct() {
            DirectState::Direct { offset_alignment_bytes, .. } => offset_alignment_bytes.max(ALIGNMENT_BYTES_MIN),
            DirectState::Buffered { .. } => ALIGNMENT_BYTES_MIN,
        };
        let named: Vec<Temporary> = parts.into_iter().filter_map(|(_, _, name)| name).collect();
        let is_named = !named.is_empty();
        Ok(Self {
            file,
            alignment,
            named: Mutex::new(named),
            is_named,
            creator: deepnvme_io::mem::CreatorProcess::current(),
        })
    }

    pub(crate) fn file(&self) -> &Arc<TensorFile> {
        &self.file
    }

    pub(crate) fn alignment(&self) -> u64 {
        self.alignment
    }

    /// Preallocates up to `end`, and somewhat more if the disk has room, so that a full disk is an error here and not
    /// later. Does nothing if the file system cannot preallocate. Returns the new size.
    pub(crate) fn preallocate(&self, end: u64) -> Result<u64, IoError> {
        let more = (end + (end / 8).min(GROWTH_BYTES_MAX)).next_multiple_of(self.alignment);
        if self.file.allocate_len(more).is_ok() {
            return Ok(more);
        }
        self.file.allocate_len(end)?;
        Ok(end)
    }

    /// Truncates the file, if the file system supports that.
    pub(crate) fn truncate(&self, end: u64) {
        let _ = self.file.truncate(end);
    }

    /// Finds an extent in the files, in order.
    pub(crate) fn file_extents(&self, extent: &Extent) -> Result<Vec<FileExtent>, IoError> {
        let (mut parts, mut at) = (Vec::new(), extent.start);
        while at < extent.end {
            let (fd, path, offset, together) = self.file.locate(at)?;
            let path = if !self.is_named {
                PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd()))
            } else {
                path.to_path_buf()
            };
            let bytes = together.min(extent.end - at);
            parts.push(FileExtent { fd, path, offset, bytes });
            at += bytes;
        }
        Ok(parts)
    }
}

/// A range of one file.
#[derive(Clone, Debug)]
pub struct FileExtent {
    /// The file, opened for buffered I/O.
    pub fd: Arc<OwnedFd>,
    /// Its path. For a file without a name, a `/proc` path that works while this process has it open.
    pub path: PathBuf,
    /// Offset in the file.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

impl SwapFiles {
    /// Deletes the files.
    pub(crate) fn remove(&self) {
        // After a fork, the files belong to the parent process.
        if self.creator.is_current() {
            let named = std::mem::take(&mut *ignore_poison(self.named.lock()));
            drop(named);
            // A `Borrowed` may keep the file open, but not its disk space.
            self.truncate(0);
        }
    }
}

impl Drop for SwapFiles {
    fn drop(&mut self) {
        self.remove();
    }
}

/// Creates a file in the folder. Returns its path (of a file without a name: the folder), a descriptor, and its name if it
/// keeps one.
fn create(folder: &Path, is_named: bool) -> Result<(PathBuf, OwnedFd, Option<Temporary>)> {
    let refused = |error: IoError| error.at_path(folder);
    if !is_named && let Ok(fd) = fs::open_unnamed(folder) {
        return Ok((folder.to_path_buf(), fd, None));
    }
    let file = Temporary::new(&folder.join(STEM)).map_err(refused)?;
    let again = fs::reopen(file.file(), OFlags::RDWR);
    let again = again.map_err(|errno| refused(IoError::os("make a swap file in", errno)))?;
    // A name that was not requested is removed at once.
    Ok((file.path().to_path_buf(), again, is_named.then_some(file)))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::PermissionsExt;

    use rustix::fs::{FlockOperation, flock};

    use super::*;

    fn names(folder: &Path) -> Vec<PathBuf> {
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
    }

    fn files(folder: &Path, is_named: bool) -> SwapFiles {
        SwapFiles::new(&[folder.to_path_buf()], 1 << 20, is_named, DirectMode::Preferred).unwrap()
    }

    #[test]
    fn a_file_without_a_name_leaves_no_trace() {
        let folder = tempfile::tempdir().unwrap();
        let files = files(folder.path(), false);
        assert!(files.preallocate(100_000).unwrap() >= 100_000 && names(folder.path()).is_empty());
        assert_eq!(files.file.path(), folder.path(), "an error names what the user can find");
    }

    #[test]
    fn named_files_are_private_and_deleted_with_their_owner() {
        let folder = tempfile::tempdir().unwrap();
        let (one, other) = (files(folder.path(), true), files(folder.path(), true));
        let found = names(folder.path());
        assert_eq!(found.len(), 2, "the second does not delete the first");
        assert!(found.iter().all(|path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777 == 0o600));
        drop(one);
        assert_eq!(names(folder.path()).len(), 1);
        drop(other);
        assert!(names(folder.path()).is_empty());
    }

    /// Leaves a file as a killed process does.
    fn left_behind(folder: &Path) -> PathBuf {
        let first = folder.join("new");
        let file = File::create(&first).unwrap();
        let stat = fs::stat_of(file.as_fd()).unwrap();
        let (inode, born) = (stat.identity.inode, stat.born_ns.unwrap_or(0));
        let named = folder.join(format!(".{STEM}.deepnvme-tmp-{inode:x}-{born:x}-0123456789abcdef"));
        std::fs::rename(first, &named).unwrap();
        named
    }

    #[test]
    fn unlocked_files_of_dead_processes_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let (leftover, locked) = (left_behind(folder.path()), left_behind(folder.path()));
        let holder = File::open(&locked).unwrap();
        flock(&holder, FlockOperation::LockExclusive).unwrap();
        let _files = files(folder.path(), false);
        assert!(!leftover.exists() && locked.exists());
    }

    #[test]
    fn foreign_files_stay_whatever_their_names() {
        let folder = tempfile::tempdir().unwrap();
        let leftover = left_behind(folder.path());
        let copy = leftover.with_file_name(leftover.file_name().unwrap().to_str().unwrap().replace("cdef", "cdee"));
        let foreign = ["1-0", "1-0123456789abcdef", "unnamed", "file.deepnvme-tmp-1-0-0123456789abcdef"];
        let foreign = foreign.map(|name| folder.path().join(format!("{NAME_PREFIX}{name}")));
        for path in foreign.iter().chain([&copy]) {
            std::fs::write(path, "precious").unwrap();
        }
        std::fs::create_dir(folder.path().join(format!("{NAME_PREFIX}folder"))).unwrap();
        for is_named in [false, true] {
            drop(files(folder.path(), is_named));
        }
        assert!(!leftover.exists());
        assert!(foreign.iter().chain([&copy]).all(|path| std::fs::read(path).unwrap() == b"precious"));
        assert_eq!(names(folder.path()).len(), foreign.len() + 2);
    }

    #[test]
    fn several_folders_are_one_file() {
        let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let paths = folders.each_ref().map(|folder| folder.path().to_path_buf());
        let files = SwapFiles::new(&paths, 4096, true, DirectMode::Preferred).unwrap();
        let parts = files.file_extents(&(4096..3 * 4096 + 10)).unwrap();
        let is_second = |part: &FileExtent| part.path.starts_with(&paths[1]);
        let places: Vec<_> = parts.iter().map(|part| (is_second(part), part.offset, part.bytes)).collect();
        assert_eq!(places, [(true, 0, 4096), (false, 4096, 4096), (true, 4096, 10)]);
    }

    #[test]
    fn no_folder_is_an_error_that_names_it() {
        let Err(error) = SwapFiles::new(&["/no/such/folder".into()], 4096, false, DirectMode::Preferred) else {
            panic!()
        };
        assert!(error.to_string().contains("/no/such/folder"), "{error}");
        assert!(SwapFiles::new(&[], 4096, false, DirectMode::Preferred).is_err());
    }
}
