//! The swap files: private, gone at the end, also after a crash.
//!
//! Without names where the file system has such files (`O_TMPFILE`); else made and unlinked at once; with names only where
//! that is asked for. A file with a name is a [`Temporary`]: locked (`flock`) while its process lives, with a name that states
//! which file it is. Whoever finds such a one that nobody has locked removes it, and no other file.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use deepnvme_io::fs::{self, OFlags};
use deepnvme_io::mem::sync::ignore_poison;
use deepnvme_io::stream::{Temporary, remove_stale};
use deepnvme_io::{Access, DirectMode, DirectState, Error as IoError, TensorFile};

use crate::error::{Error, Result};
use crate::extents::Extent;

/// What the names of swap files begin with.
pub const NAME_PREFIX: &str = ".deepnvme-swap-";
/// What swap files are temporaries of.
const STEM: &str = "deepnvme-swap-file";
/// Stretches of the file begin at multiples of this at least.
const GRAIN_BYTES_MIN: u64 = deepnvme_io::mem::PAGE_BYTES;
/// A file grows by an eighth, and by no more than this at once.
const GROWTH_BYTES_MAX: u64 = 1 << 30;

/// The files of one swapper, as one logical file.
#[derive(Debug)]
pub(crate) struct Files {
    file: Arc<TensorFile>,
    grain: u64,
    /// Names that go at the end, with the files that keep them locked.
    named: Mutex<Vec<Temporary>>,
    is_named: bool,
    creator: deepnvme_io::mem::CreatorProcess,
}

impl Files {
    /// A new file in each folder, striped where there are several. What crashed processes have left there is removed.
    pub(crate) fn new(folders: &[PathBuf], stripe_bytes: u64, is_named: bool, direct: DirectMode) -> Result<Self> {
        if folders.is_empty() {
            return Err(Error::Invalid("a swapper needs a folder for its file".into()));
        }
        let mut parts = Vec::with_capacity(folders.len());
        // Files with names are removed at the end.
        let absolute = |folder: &PathBuf| std::path::absolute(folder).unwrap_or_else(|_| folder.clone());
        for folder in &folders.iter().map(absolute).collect::<Vec<_>>() {
            remove_stale(&folder.join(STEM));
            parts.push(create(folder, is_named)?);
        }
        let fds: Vec<(BorrowedFd<'_>, &Path)> =
            parts.iter().map(|(path, file, _)| (file.as_fd(), path.as_path())).collect();
        let file = TensorFile::from_fds(&fds, stripe_bytes, Access::ReadWrite, direct)?;
        let grain = match file.direct() {
            DirectState::Direct { offset_alignment_bytes, .. } => offset_alignment_bytes.max(GRAIN_BYTES_MIN),
            DirectState::Buffered { .. } => GRAIN_BYTES_MIN,
        };
        let named: Vec<Temporary> = parts.into_iter().filter_map(|(_, _, name)| name).collect();
        let is_named = !named.is_empty();
        Ok(Self {
            file,
            grain,
            named: Mutex::new(named),
            is_named,
            creator: deepnvme_io::mem::CreatorProcess::current(),
        })
    }

    pub(crate) fn file(&self) -> &Arc<TensorFile> {
        &self.file
    }

    pub(crate) fn grain(&self) -> u64 {
        self.grain
    }

    /// Sets room aside up to `end`, and some more where there is enough: a full disk is an error here, and none later. How far
    /// it reaches now.
    pub(crate) fn reach(&self, end: u64) -> Result<u64, IoError> {
        let more = (end + (end / 8).min(GROWTH_BYTES_MAX)).next_multiple_of(self.grain);
        if self.file.set_len(more).is_ok() {
            return Ok(more);
        }
        self.file.set_len(end)?;
        Ok(end)
    }

    /// Gives back what is behind the end, where the file system can do that.
    pub(crate) fn cut(&self, end: u64) {
        let _ = self.file.cut(end);
    }

    /// Where a stretch is: parts of files, in its order.
    pub(crate) fn locate(&self, extent: &Extent) -> Result<Vec<Located>, IoError> {
        let (mut parts, mut at) = (Vec::new(), extent.start);
        while at < extent.end {
            let (fd, path, offset, together) = self.file.locate(at)?;
            let path = if !self.is_named {
                PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd()))
            } else {
                path.to_path_buf()
            };
            let bytes = together.min(extent.end - at);
            parts.push(Located { fd, path, offset, bytes });
            at += bytes;
        }
        Ok(parts)
    }
}

/// A stretch of one file.
#[derive(Clone, Debug)]
pub struct Located {
    /// The file, open through the page cache.
    pub fd: Arc<OwnedFd>,
    /// Its name; of a file that has none, one that works as long as this process has it open.
    pub path: PathBuf,
    /// Where in it.
    pub offset: u64,
    /// How many bytes.
    pub bytes: u64,
}

impl Files {
    /// Does away with the files; what they had is gone.
    pub(crate) fn remove(&self) {
        // After a fork they are the parent's.
        if self.creator.is_current() {
            let named = std::mem::take(&mut *ignore_poison(self.named.lock()));
            drop(named);
            // Whoever still has a lend keeps the file open, but not its room.
            self.cut(0);
        }
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        self.remove();
    }
}

/// A new file in the folder: its path, a descriptor, and its name, if it has one.
fn create(folder: &Path, is_named: bool) -> Result<(PathBuf, OwnedFd, Option<Temporary>)> {
    let refused = |error: IoError| error.at_path(folder);
    if !is_named && let Ok(fd) = fs::open_unnamed(folder) {
        return Ok((folder.join(format!("{NAME_PREFIX}unnamed")), fd, None));
    }
    let file = Temporary::new(&folder.join(STEM)).map_err(refused)?;
    let again = fs::reopen(file.file(), OFlags::RDWR);
    let again = again.map_err(|errno| refused(IoError::os("make a swap file in", errno)))?;
    // Without being asked for, the name goes at once.
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

    fn files(folder: &Path, is_named: bool) -> Files {
        Files::new(&[folder.to_path_buf()], 1 << 20, is_named, DirectMode::Preferred).unwrap()
    }

    #[test]
    fn a_file_without_a_name_leaves_no_trace() {
        let folder = tempfile::tempdir().unwrap();
        let files = files(folder.path(), false);
        assert!(files.reach(100_000).unwrap() >= 100_000 && names(folder.path()).is_empty());
    }

    #[test]
    fn names_are_private_and_go_with_their_owner() {
        let folder = tempfile::tempdir().unwrap();
        let (one, other) = (files(folder.path(), true), files(folder.path(), true));
        let found = names(folder.path());
        assert_eq!(found.len(), 2, "the second leaves the first alone");
        assert!(found.iter().all(|path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777 == 0o600));
        drop(one);
        assert_eq!(names(folder.path()).len(), 1);
        drop(other);
        assert!(names(folder.path()).is_empty());
    }

    /// A file as a process that was killed leaves it.
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
    fn what_proves_to_be_ours_and_nobody_has_locked_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let (stale, locked) = (left_behind(folder.path()), left_behind(folder.path()));
        let holder = File::open(&locked).unwrap();
        flock(&holder, FlockOperation::LockExclusive).unwrap();
        let _files = files(folder.path(), false);
        assert!(!stale.exists() && locked.exists());
    }

    #[test]
    fn a_file_of_somebody_else_stays_whatever_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let stale = left_behind(folder.path());
        let copy = stale.with_file_name(stale.file_name().unwrap().to_str().unwrap().replace("cdef", "cdee"));
        let foreign = ["1-0", "1-0123456789abcdef", "unnamed", "file.deepnvme-tmp-1-0-0123456789abcdef"];
        let foreign = foreign.map(|name| folder.path().join(format!("{NAME_PREFIX}{name}")));
        for path in foreign.iter().chain([&copy]) {
            std::fs::write(path, "precious").unwrap();
        }
        std::fs::create_dir(folder.path().join(format!("{NAME_PREFIX}folder"))).unwrap();
        for is_named in [false, true] {
            drop(files(folder.path(), is_named));
        }
        assert!(!stale.exists());
        assert!(foreign.iter().chain([&copy]).all(|path| std::fs::read(path).unwrap() == b"precious"));
        assert_eq!(names(folder.path()).len(), foreign.len() + 2);
    }

    #[test]
    fn several_folders_are_one_file() {
        let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let paths = folders.each_ref().map(|folder| folder.path().to_path_buf());
        let files = Files::new(&paths, 4096, true, DirectMode::Preferred).unwrap();
        let parts = files.locate(&(4096..3 * 4096 + 10)).unwrap();
        let is_second = |part: &Located| part.path.starts_with(&paths[1]);
        let places: Vec<_> = parts.iter().map(|part| (is_second(part), part.offset, part.bytes)).collect();
        assert_eq!(places, [(true, 0, 4096), (false, 4096, 4096), (true, 4096, 10)]);
    }

    #[test]
    fn no_folder_is_an_error_that_names_it() {
        let Err(error) = Files::new(&["/no/such/folder".into()], 4096, false, DirectMode::Preferred) else { panic!() };
        assert!(error.to_string().contains("/no/such/folder"), "{error}");
        assert!(Files::new(&[], 4096, false, DirectMode::Preferred).is_err());
    }
}
