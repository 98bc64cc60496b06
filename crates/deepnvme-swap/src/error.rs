//! The errors of swapping.

use std::path::PathBuf;

use deepnvme_io::display;

/// The result of every call that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A tensor could not be read, written or stored.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// The engine, the file system or the disk failed. Bytes in memory are still there.
    #[error(transparent)]
    Io(#[from] deepnvme_io::Error),
    /// The bytes on disk are not those that were written.
    #[error(
        "{}: {key:?} is damaged at offset {offset} (checksum {found:#018x} instead of {expected:#018x}); put it again, and \
         check the disk",
        display::path(path)
    )]
    Corrupt {
        /// The swap file.
        path: PathBuf,
        /// The offset of the damaged chunk.
        offset: u64,
        /// The item's key.
        key: String,
        /// The checksum of the bytes written.
        expected: u64,
        /// The checksum of the bytes read.
        found: u64,
    },
    /// There is no such key.
    #[error("there is no {key:?}; put it first, or attach it from a file")]
    NotFound {
        /// The requested key.
        key: String,
    },
    /// The item exceeds the memory for all items.
    #[error(
        "{key:?} has {bytes} bytes, more than the {bound_bytes} bytes of memory; use memory={enough_bytes} or more, or split it"
    )]
    TooLarge {
        /// The item's key.
        key: String,
        /// Its length.
        bytes: u64,
        /// The memory for all items.
        bound_bytes: u64,
        /// The memory that would be enough.
        enough_bytes: u64,
    },
    /// The wait would never end.
    #[error("{0}")]
    Deadlock(String),
    /// An attached item cannot be changed.
    #[error(
        "{key:?} was attached from {} and is read-only; borrow it shared, or put a copy under another key",
        display::path(path)
    )]
    ReadOnly {
        /// The item's key.
        key: String,
        /// The attached file.
        path: PathBuf,
    },
    /// A range outside an item, or a setting out of range.
    #[error("{0}")]
    Invalid(String),
    /// The caller cancelled the wait.
    #[error("interrupted while waiting for {key:?}")]
    Interrupted {
        /// The key that was waited for.
        key: String,
    },
    /// A bug: starting or completing a transfer panicked.
    #[error("the swapper has panicked ({0}); please report this bug")]
    Panicked(String),
    /// The swapper was closed, belongs to the parent process, or lost its thread to a panic.
    #[error("{0}")]
    Closed(&'static str),
}

impl Error {
    pub(crate) const FORKED: Self =
        Self::Closed("the swapper belongs to the parent process; create another one after the fork");
    pub(crate) const BROKEN: Self =
        Self::Closed("the swapper's thread has panicked, and its items are lost; please report this bug");
    pub(crate) const CLOSED: Self = Self::Closed("the swapper is closed, and its items are gone");
}
