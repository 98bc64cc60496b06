//! A file that is read while others may change it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use deepnvme_io::fs::{self, FileId, Stat};
use deepnvme_io::{Access, DirectMode, Error, OpenOptions, Result, TensorFile};

use crate::open::{Target, open};

/// An open file, and the version that it had, to notice changes.
#[derive(Debug)]
pub struct VersionedFile {
    file: Arc<TensorFile>,
    versions: Vec<(PathBuf, FileVersion)>,
}

/// A file is not the one that was opened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FileChange {
    /// The file.
    pub path: PathBuf,
    /// The difference, as a clause.
    pub what: String,
}

/// Changes when a file is replaced, truncated or written to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct FileVersion {
    identity: FileId,
    bytes: u64,
    modified_ns: i128,
}

impl From<Stat> for FileVersion {
    fn from(stat: Stat) -> Self {
        Self { identity: stat.identity, bytes: stat.bytes, modified_ns: stat.modified_ns }
    }
}

impl FileVersion {
    fn of(path: &Path) -> Result<Self> {
        fs::stat(path).map(Self::from).map_err(|errno| Error::os("stat", errno).at_path(path))
    }

    fn difference(&self, now: &Self) -> Option<String> {
        if self.identity != now.identity {
            Some("another file has its name".into())
        } else if self.bytes != now.bytes {
            Some(format!("it had {} bytes and has {}", self.bytes, now.bytes))
        } else if self.modified_ns != now.modified_ns {
            Some("it was written to".into())
        } else {
            None
        }
    }
}

impl VersionedFile {
    /// Opens a file or a stripe set to read. Its path does not depend on later changes of the working directory.
    ///
    /// # Errors
    /// If the file is missing or unreadable.
    pub fn open(target: impl Into<Target>) -> Result<Self> {
        let target = target.into().absolute().stored()?;
        let paths: Vec<PathBuf> = match &target {
            Target::Path(path) => vec![path.clone()],
            // A replacement renames the manifest, and the parts of a set without one may be written to.
            Target::Stripes(set) => {
                let manifest = Some(set.manifest_path()).filter(|manifest| fs::exists(manifest).unwrap_or(true));
                manifest.into_iter().chain(set.parts().iter().cloned()).collect()
            }
        };
        // Taken before the file is opened, so that later changes are noticed.
        let versions = paths.into_iter().map(|path| FileVersion::of(&path).map(|version| (path, version)));
        let versions = versions.collect::<Result<Vec<_>>>()?;
        let options = OpenOptions { access: Access::Read, create: false, direct: DirectMode::Preferred };
        let file = open(&target, options)?;
        Ok(Self { file, versions })
    }

    /// Watches a file that is open already. Its versions are those of its descriptors, so a file that has got its name
    /// since is a change.
    ///
    /// # Errors
    /// If the working directory is unknown, or a descriptor cannot be inspected.
    pub fn of_open(file: Arc<TensorFile>) -> Result<Self> {
        let stats = file.stats()?;
        let absolute = |path: &Path| {
            std::path::absolute(path)
                .map_err(|error| Error::from_io("find the working directory", &error).at_path(path))
        };
        let paths = file.part_paths().map(absolute).collect::<Result<Vec<_>>>()?;
        let versions = paths.into_iter().zip(stats.into_iter().map(FileVersion::from)).collect();
        Ok(Self { file, versions })
    }

    /// Returns the open file.
    #[must_use]
    pub fn file(&self) -> &Arc<TensorFile> {
        &self.file
    }

    /// Returns the change since the file was opened, if there is one.
    ///
    /// # Errors
    /// If the file is missing now, or its folder unreadable.
    pub fn change(&self) -> Result<Option<FileChange>> {
        for (path, version) in &self.versions {
            if let Some(what) = version.difference(&FileVersion::of(path)?) {
                return Ok(Some(FileChange { path: path.clone(), what }));
            }
        }
        Ok(None)
    }
}
