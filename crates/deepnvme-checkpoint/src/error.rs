//! What can go wrong with a checkpoint.

use std::path::PathBuf;

/// The result of every call that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failed save or load.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// The engine, the file system or the disk.
    #[error(transparent)]
    Io(#[from] deepnvme_io::Error),
    /// The file is not what it says it is, or not what this crate reads; or what is to be saved has no such format.
    #[error("{}: {source}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: deepnvme_format::Error,
    },
    /// The bytes are not those that were saved.
    #[error("{}: the bytes of {name:?} at offset {offset} are not those that were saved ({bytes} bytes, {sums}); \
             restore the file from a copy, or load it with verify='off' to have what is there", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The record or tensor.
        name: String,
        /// Where the damaged stretch begins.
        offset: u64,
        /// How long it is.
        bytes: u64,
        /// Which sums differ.
        sums: &'static str,
    },
    /// A record's header stands elsewhere than the directory of the archive lets one expect: read all headers first.
    #[error("{}: the header of {name:?} has an unusual length", path.display())]
    Moved {
        /// The file.
        path: PathBuf,
        /// The record.
        name: String,
    },
    /// Full verification was asked for, and the file has nothing to verify with.
    #[error("{}: the file has no checksums; files that deepnvme saves have them, for this one use verify='sample'", path.display())]
    NoSums {
        /// The file.
        path: PathBuf,
    },
    /// Somebody asked to stop.
    #[error("interrupted")]
    Interrupted,
}

impl Error {
    pub(crate) fn format(path: impl Into<PathBuf>, source: deepnvme_format::Error) -> Self {
        Self::Format { path: path.into(), source }
    }
}
