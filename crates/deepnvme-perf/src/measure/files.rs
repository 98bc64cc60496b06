//! The files of a benchmark: made by it, known by their names, locked while it runs, removed at its end.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use deepnvme_io::{StripeSet, Target};
use rustix::fs::{FlockOperation, flock};

use crate::error::{Error, Result};
use crate::units::bytes_text;

/// What every name begins with, so that the files of a process that was killed are known.
const PREFIX: &str = ".deepnvme-bench-";

/// Files that live as long as this value.
#[derive(Debug)]
pub(crate) struct ScratchFiles {
    targets: Vec<Target>,
    parts: Vec<(PathBuf, File)>,
    manifests: Vec<PathBuf>,
}

impl ScratchFiles {
    /// Makes an empty file in each folder; with `stripe_bytes` they are the parts of one. What a killed process left in
    /// the folders is removed first.
    pub(crate) fn make(folders: &[PathBuf], stripe_bytes: Option<u64>) -> Result<Self> {
        let mut files = Self { targets: Vec::new(), parts: Vec::new(), manifests: Vec::new() };
        for folder in folders {
            remove_stale(folder);
            files.parts.push(new_file(folder)?);
        }
        let paths = files.parts.iter().map(|(path, _)| path.clone());
        files.targets = match stripe_bytes {
            None => paths.map(Target::Path).collect(),
            Some(bytes) => {
                let set = StripeSet::new(paths.collect(), bytes)?;
                files.manifests.push(set.manifest_path());
                vec![Target::Stripes(set)]
            }
        };
        Ok(files)
    }

    /// What the engine opens.
    pub(crate) fn targets(&self) -> &[Target] {
        &self.targets
    }

    /// The files themselves.
    pub(crate) fn paths(&self) -> impl Iterator<Item = &Path> {
        self.parts.iter().map(|(path, _)| path.as_path())
    }
}

impl Drop for ScratchFiles {
    fn drop(&mut self) {
        for path in self.parts.iter().map(|(path, _)| path).chain(&self.manifests) {
            // A folder that has gone took its files along.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Refuses what the disks have no room for, before anything is written.
pub(crate) fn check_room(folders: &[PathBuf], bytes_each: u64) -> Result<()> {
    let mut wanted = BTreeMap::<u64, (u64, &PathBuf)>::new();
    for folder in folders {
        let device = folder.metadata().map_err(|error| Error::at(folder, "look at it", &error))?.dev();
        wanted.entry(device).or_insert((0, folder)).0 += bytes_each;
    }
    for (bytes, folder) in wanted.values() {
        let Ok(space) = rustix::fs::statvfs(folder.as_path()) else { continue };
        // File systems without room of their own, such as /proc, say so by having no blocks.
        if space.f_blocks == 0 {
            continue;
        }
        let free = space.f_bavail * space.f_frsize;
        if *bytes > free {
            let (needed, free) = (bytes_text(*bytes), bytes_text(free));
            let text = format!("{}: {needed} are needed, and {free} are free", folder.display());
            return Err(Error::failed(format!("{text}; make --size smaller, or free some space")));
        }
    }
    Ok(())
}

/// A new, empty, private file that others see is in use.
fn new_file(folder: &Path) -> Result<(PathBuf, File)> {
    static MADE: AtomicU32 = AtomicU32::new(0);
    let failed = |path: &Path, error: &std::io::Error| Error::at(path, "make a file", error);
    loop {
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!("{PREFIX}{}-{number}", std::process::id()));
        match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path) {
            Ok(file) => {
                // File systems without locks keep their stale files.
                let _ = flock(&file, FlockOperation::NonBlockingLockExclusive);
                // Between the two calls it looked as if it had been left behind.
                if file.metadata().is_ok_and(|metadata| metadata.nlink() > 0) {
                    return Ok((path, file));
                }
            }
            // Another process of that number, in another container, over the same folder.
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(failed(folder, &error)),
        }
    }
}

/// Removes files of benchmarks that nobody holds, and what belongs to them.
fn remove_stale(folder: &Path) {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    for entry in entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_file())) {
        let name = entry.file_name();
        let Some(owner) = name.to_str().and_then(owner) else { continue };
        let is_stale = match OpenOptions::new().write(true).open(folder.join(owner)) {
            Ok(file) => flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok(),
            Err(error) => error.kind() == std::io::ErrorKind::NotFound,
        };
        if is_stale {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// The file whose lock says whether this one is in use: itself, or of a manifest the part that it is named after. `None`
/// for the files of others.
fn owner(name: &str) -> Option<&str> {
    let own = name.strip_prefix(PREFIX)?;
    let end = own.find('.').unwrap_or(own.len());
    let is_ours = own[..end].split('-').all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()));
    is_ours.then(|| &name[..PREFIX.len() + end])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn files_are_private_and_gone_at_the_end() {
        use std::os::unix::fs::PermissionsExt;
        let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let paths = folders.each_ref().map(|folder| folder.path().to_path_buf());
        let files = ScratchFiles::make(&paths, None).unwrap();
        assert_eq!((files.targets().len(), names(&paths[0]).len(), names(&paths[1]).len()), (2, 1, 1));
        let mode = files.paths().next().unwrap().metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let striped = ScratchFiles::make(&paths, Some(4096)).unwrap();
        assert_eq!(striped.targets().len(), 1);
        drop((files, striped));
        assert_eq!((names(&paths[0]), names(&paths[1])), (vec![], vec![]));
    }

    #[test]
    fn what_was_left_behind_is_removed_and_what_is_in_use_or_foreign_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::write(path(".deepnvme-bench-1-1"), "left").unwrap();
        std::fs::write(path(".deepnvme-bench-1-1.stripes.json"), "left").unwrap();
        std::fs::write(path(".deepnvme-bench-1-2.stripes.json"), "its part has gone").unwrap();
        std::fs::write(path("precious"), "keep").unwrap();
        std::fs::create_dir(path(".deepnvme-bench-folder")).unwrap();
        let first = ScratchFiles::make(&[folder.path().into()], None).unwrap();
        let manifest = PathBuf::from(format!("{}.stripes.json", first.paths().next().unwrap().display()));
        std::fs::write(&manifest, "in use").unwrap();
        let second = ScratchFiles::make(&[folder.path().into()], None).unwrap();
        assert!(manifest.exists());
        std::fs::remove_file(manifest).unwrap();
        assert_eq!(names(folder.path()).len(), 4, "{:?}", names(folder.path()));
        assert!(first.paths().all(Path::exists) && second.paths().all(Path::exists));
        drop((first, second));
        assert_eq!(names(folder.path()), [".deepnvme-bench-folder", "precious"]);
    }

    #[test]
    fn a_folder_that_refuses_is_named() {
        let text = ScratchFiles::make(&["/proc/sys".into()], None).unwrap_err().to_string();
        assert!(text.starts_with("/proc/sys: cannot make a file"), "{text}");
    }
}
