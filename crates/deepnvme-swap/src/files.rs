//! The swap files: private, gone at the end, also after a crash.
//!
//! Without names where the file system has such files (`O_TMPFILE`); else made and unlinked at once; with names only where
//! that is asked for. A file with a name is locked (`flock`) while its process lives: whoever finds one in the folder that
//! nobody has locked removes it. The lock goes with the process, however it ends.

use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use deepnvme_io::{Access, DirectMode, DirectState, Error as IoError, TensorFile};
use rustix::fs::{FlockOperation, Mode, OFlags, flock};

use crate::error::{Error, Result};
use crate::extents::Extent;

/// What the names of swap files begin with.
pub const NAME_PREFIX: &str = ".deepnvme-swap-";
/// Stretches of the file begin at multiples of this at least.
const GRAIN_BYTES_MIN: u64 = 4096;
/// A file grows by an eighth, and by no more than this at once.
const GROWTH_BYTES_MAX: u64 = 1 << 30;

/// The files of one swapper, as one logical file.
#[derive(Debug)]
pub(crate) struct Files {
    file: Arc<TensorFile>,
    grain: u64,
    /// Bytes that the file system has set aside.
    allocated: u64,
    /// Names to remove at the end, with the files that keep them locked.
    named: Vec<(PathBuf, File)>,
    pid: u32,
}

impl Files {
    /// A new file in each folder, striped where there are several. What crashed processes have left there is removed.
    pub(crate) fn new(folders: &[PathBuf], stripe_bytes: u64, is_named: bool, direct: DirectMode) -> Result<Self> {
        if folders.is_empty() {
            return Err(Error::Invalid("a swapper needs a folder for its file".into()));
        }
        let mut parts = Vec::with_capacity(folders.len());
        for folder in folders {
            remove_stale(folder);
            parts.push(create(folder, is_named)?);
        }
        let fds: Vec<(BorrowedFd<'_>, &Path)> =
            parts.iter().map(|(path, file)| (file.as_fd(), path.as_path())).collect();
        let file = TensorFile::from_fds(&fds, stripe_bytes, Access::ReadWrite, direct)?;
        let grain = match file.direct() {
            DirectState::Direct { offset_alignment_bytes, .. } => offset_alignment_bytes.max(GRAIN_BYTES_MIN),
            DirectState::Buffered { .. } => GRAIN_BYTES_MIN,
        };
        let named = if is_named { parts } else { Vec::new() };
        Ok(Self { file, grain, allocated: 0, named, pid: std::process::id() })
    }

    pub(crate) fn file(&self) -> &Arc<TensorFile> {
        &self.file
    }

    pub(crate) fn grain(&self) -> u64 {
        self.grain
    }

    pub(crate) fn allocated(&self) -> u64 {
        self.allocated
    }

    /// Sets room aside up to `end`, and some more where there is enough: a full disk is an error here, and none later.
    pub(crate) fn reach(&mut self, end: u64) -> Result<(), IoError> {
        if end <= self.allocated {
            return Ok(());
        }
        let more = (end + (end / 8).min(GROWTH_BYTES_MAX)).next_multiple_of(self.grain);
        if self.file.set_len(more).is_ok() {
            self.allocated = more;
            return Ok(());
        }
        self.file.set_len(end)?;
        self.allocated = end;
        Ok(())
    }

    /// Gives back what is far beyond the end.
    pub(crate) fn shrink(&mut self, end: u64) {
        if self.allocated > 2 * end + GROWTH_BYTES_MAX / 16 && self.file.cut(end).is_ok() {
            self.allocated = end;
        }
    }

    /// Where a stretch is: parts of files, in its order.
    pub(crate) fn locate(&self, extent: &Extent) -> Result<Vec<Located>, IoError> {
        let (mut parts, mut at) = (Vec::new(), extent.start);
        while at < extent.end {
            let (fd, path, offset, together) = self.file.locate(at)?;
            let path = if self.named.is_empty() {
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
    pub(crate) fn remove(&mut self) {
        // After a fork they are the parent's.
        if self.pid == std::process::id() {
            for (path, _) in self.named.drain(..) {
                // There is nobody left to tell.
                let _ = fs::remove_file(path);
            }
            // Whoever still has a lend keeps the file open, but not its room.
            let _ = self.file.cut(0);
            self.allocated = 0;
        }
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        self.remove();
    }
}

fn create(folder: &Path, is_named: bool) -> Result<(PathBuf, File)> {
    let refused = |error: std::io::Error| IoError::from_io("make a swap file in", &error).at_path(folder);
    if !is_named {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        if let Ok(fd) = rustix::fs::open(folder, flags, Mode::RUSR | Mode::WUSR) {
            return Ok((folder.join(format!("{NAME_PREFIX}unnamed")), File::from(fd)));
        }
    }
    loop {
        let name = format!("{NAME_PREFIX}{}-{:016x}", std::process::id(), fastrand::u64(..));
        let path = folder.join(name);
        let file = match File::options().read(true).write(true).create_new(true).mode(0o600).open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => continue,
            Err(error) => return Err(refused(error).into()),
        };
        // Before it was locked, somebody may have taken it for a stale one.
        let is_locked = flock(&file, FlockOperation::NonBlockingLockExclusive);
        if is_locked == Err(rustix::io::Errno::AGAIN) || file.metadata().map_err(refused)?.nlink() == 0 {
            let _ = fs::remove_file(&path);
            continue;
        }
        if !is_named {
            fs::remove_file(&path).map_err(refused)?;
        }
        return Ok((path, file));
    }
}

/// Removes swap files that no living process has.
fn remove_stale(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let is_ours = entry.file_name().as_bytes().starts_with(NAME_PREFIX.as_bytes());
        if !is_ours || !entry.file_type().is_ok_and(|kind| kind.is_file()) {
            continue;
        }
        // Whose it is nobody may open is left to its owner.
        let Ok(file) = File::options().read(true).write(true).open(entry.path()) else { continue };
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
            tracing::info!(path = %entry.path().display(), "a swap file of a process that is no more was removed");
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn names(folder: &Path) -> Vec<PathBuf> {
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
    }

    fn files(folder: &Path, is_named: bool) -> Files {
        Files::new(&[folder.to_path_buf()], 1 << 20, is_named, DirectMode::Preferred).unwrap()
    }

    #[test]
    fn a_file_without_a_name_leaves_no_trace() {
        let folder = tempfile::tempdir().unwrap();
        let mut files = files(folder.path(), false);
        files.reach(100_000).unwrap();
        assert!(files.allocated() >= 100_000 && names(folder.path()).is_empty());
    }

    #[test]
    fn names_are_private_and_go_with_their_owner() {
        let folder = tempfile::tempdir().unwrap();
        let (one, other) = (files(folder.path(), true), files(folder.path(), true));
        let found = names(folder.path());
        assert_eq!(found.len(), 2, "the second leaves the first alone");
        assert!(found.iter().all(|path| fs::metadata(path).unwrap().permissions().mode() & 0o777 == 0o600));
        drop(one);
        assert_eq!(names(folder.path()).len(), 1);
        drop(other);
        assert!(names(folder.path()).is_empty());
    }

    #[test]
    fn what_nobody_has_locked_is_removed_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let stale = folder.path().join(format!("{NAME_PREFIX}1-0"));
        let locked = folder.path().join(format!("{NAME_PREFIX}2-0"));
        let other = folder.path().join("precious");
        for path in [&stale, &locked, &other] {
            fs::write(path, "x").unwrap();
        }
        fs::create_dir(folder.path().join(format!("{NAME_PREFIX}folder"))).unwrap();
        let holder = File::open(&locked).unwrap();
        flock(&holder, FlockOperation::LockExclusive).unwrap();
        let _files = files(folder.path(), false);
        assert!(!stale.exists() && locked.exists() && other.exists());
        assert_eq!(names(folder.path()).len(), 3);
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
