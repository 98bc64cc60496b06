//! What can go wrong with a checkpoint.

use std::path::PathBuf;

use deepnvme_io::shown;

/// The result of every call that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failed save or load.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// The engine, the file system or the disk.
    #[error(transparent)]
    Io(#[from] deepnvme_io::Error),
    /// The file is not what it says it is, or not what this crate reads; or what is to be saved has no such format.
    #[error("{}: {source}", shown::path(path))]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: deepnvme_format::Error,
    },
    /// The bytes are not those that were saved.
    #[error(
        "{}: the bytes of {name:?} at offset {offset} are not those that were saved ({bytes} bytes, {sums}); \
             restore the file from a copy, or load it with verify='off' to have what is there",
        shown::path(path)
    )]
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
    /// The list of a checkpoint in several files is not the one that was saved.
    #[error(
        "{}: this list of files is not the one that was saved: its checksum does not match; restore it from a copy, or \
         remove it where a newer file has taken its place. If another program has edited it on purpose, remove {:?} and \
         {:?} from it. verify='off' does not look at the checksum",
        shown::path(path),
        deepnvme_format::set::CHECKSUM_KEY,
        deepnvme_format::set::FILES_KEY
    )]
    ChangedList {
        /// The list.
        path: PathBuf,
    },
    /// A record's header stands elsewhere than the directory of the archive lets one expect: read all headers first.
    #[error("{}: the header of {name:?} has an unusual length", shown::path(path))]
    Moved {
        /// The file.
        path: PathBuf,
        /// The record.
        name: String,
    },
    /// Full verification was asked for, and the file has nothing to verify with.
    #[error("{}: {}; files that deepnvme saves have them, for this one use verify='sample'", shown::path(path),
            if *is_stale { "the checksums in the file were made for another file, and copied into this one" }
            else { "the file has no checksums" })]
    NoSums {
        /// The file.
        path: PathBuf,
        /// Whether it has checksums that were made for another file.
        is_stale: bool,
    },
    /// Somebody else saves into the folder.
    #[error(
        "{}: {holder} saves into this folder; close its Checkpointer, or save into another folder. Reading needs no lock",
        shown::path(path)
    )]
    Locked {
        /// The folder.
        path: PathBuf,
        /// Process, machine and time.
        holder: String,
    },
    /// The list of a folder's checkpoints is damaged.
    #[error(
        "{}: this is no manifest of checkpoints ({detail}); move it away, and name a checkpoint's file",
        shown::path(path)
    )]
    Manifest {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        detail: String,
    },
    /// A bug: a thread that worked on it has panicked.
    #[error("a thread of deepnvme has panicked ({0}); report this as a bug")]
    Panicked(String),
    /// Somebody asked to stop.
    #[error("interrupted")]
    Interrupted,
}

impl Error {
    pub(crate) fn format(path: impl Into<PathBuf>, source: deepnvme_format::Error) -> Self {
        Self::Format { path: path.into(), source }
    }
}
