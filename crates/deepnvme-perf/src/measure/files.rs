//! The files of a benchmark: private, locked while it runs, removed at its end.
//!
//! Their names identify them ([`Temporary`]): the next benchmark removes those of a killed one, and no other file.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use deepnvme_file::replace::remove_leftovers;
use deepnvme_file::{StripeSet, Target, Temporary};
use deepnvme_io::display;
use deepnvme_io::{DirectMode, OpenOptions};

use crate::error::{Error, Result};
use crate::units::bytes_text;

/// Part of the name of every scratch file.
const NAME: &str = "deepnvme-bench";

/// Scratch files, removed when this value is dropped.
#[derive(Debug)]
pub(crate) struct ScratchFiles {
    targets: Vec<Target>,
    parts: Vec<Temporary>,
}

impl ScratchFiles {
    /// Makes an empty file in each folder; with `stripe_bytes` they are the parts of one stripe set. Removes files of
    /// killed benchmarks first.
    pub(crate) fn make(folders: &[PathBuf], stripe_bytes: Option<u64>) -> Result<Self> {
        let mut parts = Vec::with_capacity(folders.len());
        for folder in folders {
            let name = folder.join(NAME);
            remove_leftovers(&name);
            parts.push(Temporary::new(&name).map_err(|error| match error.errno() {
                Some(errno) => Error::at(folder, "cannot make a file", &std::io::Error::from_raw_os_error(errno)),
                None => error.into(),
            })?);
        }
        let paths = parts.iter().map(|part| part.path().to_path_buf());
        let targets = match stripe_bytes {
            None => paths.map(Target::Path).collect(),
            Some(bytes) => vec![Target::Stripes(StripeSet::new(paths.collect(), bytes)?)],
        };
        Ok(Self { targets, parts })
    }

    /// Allocates this many bytes in each file. fio replaces a shorter file with a new one, whose name would no longer
    /// identify it as ours.
    pub(crate) fn allocate(&self, bytes: u64) -> Result<()> {
        for target in &self.targets {
            deepnvme_file::open(target, OpenOptions::to_fill(DirectMode::Disabled))?.allocate_len(bytes)?;
        }
        Ok(())
    }

    /// Returns the targets for the engine.
    pub(crate) fn targets(&self) -> &[Target] {
        &self.targets
    }

    /// Returns the paths of the files.
    pub(crate) fn paths(&self) -> impl Iterator<Item = &Path> {
        self.parts.iter().map(Temporary::path)
    }
}

/// Checks that the disks have enough free space, before anything is written.
pub(crate) fn check_free_space(folders: &[PathBuf], bytes_each: u64) -> Result<()> {
    let mut needed = BTreeMap::<u64, (u64, &PathBuf)>::new();
    for folder in folders {
        let device = folder.metadata().map_err(|error| Error::at(folder, "cannot read its metadata", &error))?.dev();
        needed.entry(device).or_insert((0, folder)).0 += bytes_each;
    }
    for (bytes, folder) in needed.values() {
        let Ok(space) = rustix::fs::statvfs(folder.as_path()) else { continue };
        // File systems without storage, such as /proc, report no blocks.
        if space.f_blocks == 0 {
            continue;
        }
        let free = space.f_bavail * space.f_frsize;
        if *bytes > free {
            let (needed, free) = (bytes_text(*bytes), bytes_text(free));
            let text = format!("{}: {needed} are needed, and {free} are free", display::path(folder));
            return Err(Error::failed(format!("{text}; make --size smaller, or free some space")));
        }
    }
    Ok(())
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
    fn locked_and_foreign_files_stay() {
        let folder = tempfile::tempdir().unwrap();
        let foreign = [".deepnvme-bench-1-1", ".deepnvme-bench-1-1.stripes.json", ".deepnvme-report-1", "precious"];
        for name in foreign {
            std::fs::write(folder.path().join(name), name).unwrap();
        }
        let first = ScratchFiles::make(&[folder.path().into()], None).unwrap();
        let copy = folder.path().join(format!("{}0", first.paths().next().unwrap().display()));
        std::fs::write(&copy, "a name like ours").unwrap();
        let second = ScratchFiles::make(&[folder.path().into()], None).unwrap();
        assert!(first.paths().all(Path::exists) && second.paths().all(Path::exists));
        drop((first, second));
        assert_eq!(std::fs::read(&copy).unwrap(), b"a name like ours");
        for name in foreign {
            assert_eq!(std::fs::read_to_string(folder.path().join(name)).unwrap(), name);
        }
        assert_eq!(names(folder.path()).len(), foreign.len() + 1);
    }

    #[test]
    fn an_error_names_the_folder() {
        let text = ScratchFiles::make(&["/proc/sys".into()], None).unwrap_err().to_string();
        assert!(text.starts_with("/proc/sys: cannot make a file"), "{text}");
    }
}
