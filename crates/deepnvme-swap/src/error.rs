//! What can go wrong while tensors are swapped.

use std::path::PathBuf;

use deepnvme_io::shown;

/// The result of every call that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A tensor that could not be had, put or moved.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// The engine, the file system or the disk. What was in memory is still there.
    #[error(transparent)]
    Io(#[from] deepnvme_io::Error),
    /// The bytes that came are not those that were written.
    #[error(
        "{}: {key:?} is damaged at offset {offset} (its checksum is {found:#018x}, and was {expected:#018x}); put it again, \
         and look at the disk",
        shown::path(path)
    )]
    Corrupt {
        /// The swap file.
        path: PathBuf,
        /// Where the stretch begins.
        offset: u64,
        /// Whose it is.
        key: String,
        /// What was written.
        expected: u64,
        /// What came.
        found: u64,
    },
    /// There is no such key.
    #[error("there is no {key:?}; put it first, or adopt it from a file")]
    NotFound {
        /// What was asked for.
        key: String,
    },
    /// An item needs more memory than there is for all of them.
    #[error(
        "{key:?} has {bytes} bytes and all memory together {bound_bytes}; give memory={enough_bytes} or more, or cut it up"
    )]
    TooLarge {
        /// The item.
        key: String,
        /// Its bytes.
        bytes: u64,
        /// The bound.
        bound_bytes: u64,
        /// A bound that is enough.
        enough_bytes: u64,
    },
    /// Waiting would never end.
    #[error("{0}")]
    Deadlock(String),
    /// What was adopted is not the swapper's to change.
    #[error(
        "{key:?} was adopted from {} and is read-only; lend it shared, or put a copy under another key",
        shown::path(path)
    )]
    ReadOnly {
        /// The item.
        key: String,
        /// Whose bytes it has.
        path: PathBuf,
    },
    /// A range that is not inside an item, or a setting out of its range.
    #[error("{0}")]
    Invalid(String),
    /// The caller had it stop.
    #[error("interrupted while it waited for {key:?}")]
    Interrupted {
        /// What it waited for.
        key: String,
    },
    /// A bug: the code that moves items has panicked.
    #[error("the swapper has panicked ({0}); report this as a bug")]
    Panicked(String),
    /// It was closed, or belongs to the process before a fork.
    #[error("{0}")]
    Closed(&'static str),
}

impl Error {
    pub(crate) const FORKED: Self =
        Self::Closed("the swapper belongs to the process before the fork; make one of its own in this process");
    pub(crate) const BROKEN: Self =
        Self::Closed("the swapper's thread has panicked, and what was in it is lost; report this as a bug");
    pub(crate) const SHUT: Self = Self::Closed("the swapper was closed, and what was in it is gone");
}
