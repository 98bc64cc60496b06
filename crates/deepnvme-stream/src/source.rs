//! A file that weights are read from for as long as the model lives.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use deepnvme_io::{Access, DirectMode, Error as IoError, OpenOptions, Target, TensorFile};

use crate::error::{Error, Result};

/// An open file, and how to tell that its name means another one by now, or that somebody has written to it.
#[derive(Debug)]
pub struct Source {
    file: Arc<TensorFile>,
    stamps: Vec<(PathBuf, Stamp)>,
}

/// What changes when a file is replaced, cut or written to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Stamp {
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
}

impl Stamp {
    fn of(path: &Path) -> Result<Self> {
        let facts = fs::metadata(path).map_err(|error| IoError::from_io("look at", &error).at_path(path))?;
        let modified = (facts.mtime(), facts.mtime_nsec());
        Ok(Self { device: facts.dev(), inode: facts.ino(), bytes: facts.size(), modified })
    }

    fn difference(&self, now: &Self) -> Option<String> {
        if (self.device, self.inode) != (now.device, now.inode) {
            Some("another file has its name".into())
        } else if self.bytes != now.bytes {
            Some(format!("it had {} bytes and has {}", self.bytes, now.bytes))
        } else if self.modified != now.modified {
            Some("it was written to".into())
        } else {
            None
        }
    }
}

impl Source {
    /// Opens a file, or a stripe set.
    ///
    /// # Errors
    /// `Io` when there is no such file, or it may not be read.
    pub fn open(target: impl Into<Target>) -> Result<Self> {
        let target = target.into();
        let paths: Vec<PathBuf> = match &target {
            Target::Path(path) => vec![path.clone()],
            Target::Stripes(set) => set.parts().to_vec(),
        };
        // Before the file is opened: what changes in between shows later.
        let stamps = paths.into_iter().map(|path| Stamp::of(&path).map(|stamp| (path, stamp)));
        let stamps = stamps.collect::<Result<Vec<_>>>()?;
        let options = OpenOptions { access: Access::Read, create: false, direct: DirectMode::Preferred };
        let file = TensorFile::open(&target, options)?;
        Ok(Self { file, stamps })
    }

    /// The open file.
    #[must_use]
    pub fn file(&self) -> &Arc<TensorFile> {
        &self.file
    }

    /// Makes sure that it is still the file that was opened.
    pub(crate) fn check(&self) -> Result<()> {
        for (path, stamp) in &self.stamps {
            if let Some(what) = stamp.difference(&Stamp::of(path)?) {
                return Err(Error::Changed { path: path.clone(), what });
            }
        }
        Ok(())
    }
}
