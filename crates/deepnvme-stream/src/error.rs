//! The errors of streaming.

use std::path::PathBuf;

use deepnvme_file::{FileChange, VersionedFile};
use deepnvme_io::display;

/// The result of every call that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Weights could not be loaded.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// The engine, the file system or the disk failed.
    #[error(transparent)]
    Io(#[from] deepnvme_io::Error),
    /// The file is not the one that was opened.
    #[error("{}: the file has changed since the model was opened ({what}); open the model again", display::path(path))]
    Changed {
        /// The file.
        path: PathBuf,
        /// The difference.
        what: String,
    },
    /// The bytes on disk are damaged.
    #[error(
        "{}: the weights at offset {offset} are damaged ({source}); restore the file from a copy",
        display::path(path)
    )]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// The offset of the damaged range.
        offset: u64,
        /// The decoder's error.
        source: deepnvme_codec::Error,
    },
    /// All slots of the class are held.
    #[error(
        "layer group {group} is needed while all {slots} slots of its size are in use; use more memory, or release groups first"
    )]
    Busy {
        /// The requested group.
        group: usize,
        /// The slots of its class.
        slots: usize,
    },
    /// The acquired rows exceed the memory.
    #[error(
        "{bytes} bytes of rows are needed at once, and memory is limited to {bytes_max}; use more memory, or a smaller batch"
    )]
    TooMany {
        /// Bytes that the rows need.
        bytes: u64,
        /// The limit.
        bytes_max: u64,
    },
    /// A bug of this library: decoding panicked.
    #[error("decoding weights of {} at offset {offset} panicked ({what}); please report this bug", display::path(path))]
    Panicked {
        /// The file.
        path: PathBuf,
        /// The offset of the weights that were decoded.
        offset: u64,
        /// The panic message.
        what: String,
    },
    /// The plan is inconsistent, or an earlier error lost some of its memory.
    #[error("the streaming plan is inconsistent: {0}")]
    Plan(String),
    /// The model was closed.
    #[error("the model is closed and no longer streams its weights")]
    Closed,
}

/// Checks that a file is the one that was opened.
pub(crate) fn check_unchanged(file: &VersionedFile) -> Result<()> {
    match file.change()? {
        None => Ok(()),
        Some(FileChange { path, what }) => Err(Error::Changed { path, what }),
    }
}
