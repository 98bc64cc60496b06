//! A file that weights are read from for as long as the model lives.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use deepnvme_io::fs::{self, Identity};
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
    identity: Identity,
    bytes: u64,
    modified_ns: i128,
}

impl Stamp {
    fn of(path: &Path) -> Result<Self> {
        let stat = fs::stat(path).map_err(|errno| IoError::os("look at", errno).at_path(path))?;
        Ok(Self { identity: stat.identity, bytes: stat.bytes, modified_ns: stat.modified_ns })
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

impl Source {
    /// Opens a file, or a stripe set. Its name keeps its meaning when the working directory changes.
    ///
    /// # Errors
    /// `Io` when there is no such file, or it may not be read.
    pub fn open(target: impl Into<Target>) -> Result<Self> {
        let target = target.into();
        let paths: Vec<PathBuf> = match &target {
            Target::Path(path) => vec![path.clone()],
            Target::Stripes(set) => set.parts().to_vec(),
        };
        let absolute =
            |path: PathBuf| std::path::absolute(&path).map_err(|error| IoError::from_io("find", &error).at_path(&path));
        let paths = paths.into_iter().map(absolute).collect::<Result<Vec<_>, _>>()?;
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
