//! The errors of this crate.

use std::fmt::{self, Display, Formatter};
use std::path::PathBuf;

use deepnvme_io::display;

/// A packed model, and the remedy, after "this is".
pub(crate) const PACKED_MODEL: &str =
    "a packed model, whose tensors are encoded: run it with deepnvme.stream, or load the model that was packed";

/// The result of every fallible call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failed save or load.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// An error of the engine, the file system or the disk.
    #[error(transparent)]
    Io(#[from] deepnvme_io::Error),
    /// The file is malformed or of an unsupported format, or the data to save does not fit the format.
    #[error("{}: {source}", display::path(path))]
    Format {
        /// The file.
        path: PathBuf,
        /// The problem.
        source: deepnvme_format::Error,
    },
    /// The data differs from the saved data.
    #[error(
        "{}: the bytes of {part} at offset {offset} are not those that were saved ({bytes} bytes, {detail}); \
             restore the file from a copy, or load it without verification",
        display::path(path)
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The damaged part.
        part: DamagedPart,
        /// Offset of the damaged range.
        offset: u64,
        /// Size of the damaged range.
        bytes: u64,
        /// How the damage was noticed.
        detail: &'static str,
    },
    /// A file differs from the one that an index lists.
    #[error(
        "{}: this is not the file that its index lists: the size or the checksum of its header differs; restore both from \
         the same copy",
        display::path(path)
    )]
    NotListed {
        /// The file.
        path: PathBuf,
    },
    /// The file list of a checkpoint differs from the saved one.
    #[error(
        "{}: this list of files is not the one that was saved: its checksum does not match. Restore it from a copy, or \
         remove it where a newer file has taken its place. If another program has edited it on purpose, remove {:?} and \
         {:?} from it, or load without verification",
        display::path(path),
        deepnvme_format::file_list::CHECKSUM_KEY,
        deepnvme_format::file_list::FILES_KEY
    )]
    ChangedList {
        /// The list.
        path: PathBuf,
    },
    /// A record's header is not as long as the archive's directory implies. The caller must read all headers and try
    /// again.
    #[error("{}: the header of {name:?} has an unusual length", display::path(path))]
    HeaderLength {
        /// The file.
        path: PathBuf,
        /// The record.
        name: String,
    },
    /// A file was written to while it was read.
    #[error("{}: the file changed while it was read; run this again once nothing writes to it", display::path(path))]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// Full verification was requested, but the file contains no checksums.
    #[error("{}: {}, so nothing can be compared; if deepnvme saved it, restore it from a copy; otherwise save it \
             with deepnvme first, or load it without verification", display::path(path),
            if *is_stale { "the checksums in the file were made for another file, and copied into this one" }
            else { "the file has no checksums" })]
    NoChecksums {
        /// The file.
        path: PathBuf,
        /// Whether the file's checksums were made for another file.
        is_stale: bool,
    },
    /// Another process saves into the folder.
    #[error(
        "{}: {holder} saves into this folder; close that Checkpointer, or save into another folder. Reading needs no lock",
        display::path(path)
    )]
    Locked {
        /// The folder.
        path: PathBuf,
        /// Process, machine and time.
        holder: String,
    },
    /// The manifest of a folder is damaged.
    #[error(
        "{}: this is not a manifest of checkpoints: {detail}. To go on without it, move it away and load a checkpoint by \
         its file name",
        display::path(path)
    )]
    Manifest {
        /// The file.
        path: PathBuf,
        /// The problem.
        detail: String,
    },
    /// A bug: a worker thread panicked.
    #[error("a thread of deepnvme has panicked ({0}); report this as a bug")]
    Panicked(String),
    /// The caller requested a stop.
    #[error("interrupted")]
    Interrupted,
}

/// The damaged part of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DamagedPart {
    /// A record or tensor.
    Record {
        /// Its name.
        name: String,
        /// The tensors in a record of an archive, where they are known.
        tensors: Vec<String>,
    },
    /// A part that has no name in the file, such as the header.
    Unnamed(&'static str),
}

impl DamagedPart {
    /// Creates the description of a record or tensor whose tensors are unknown.
    pub(crate) fn record(name: impl Into<String>) -> Self {
        Self::Record { name: name.into(), tensors: Vec::new() }
    }
}

impl Display for DamagedPart {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        let (name, tensors) = match self {
            Self::Record { name, tensors } => (name, tensors),
            Self::Unnamed(description) => return out.write_str(description),
        };
        match tensors.as_slice() {
            [] => write!(out, "{name:?}"),
            [one] => write!(out, "{one:?} (record {name:?})"),
            [first, other] => write!(out, "{first:?} and {other:?} (record {name:?})"),
            [first, others @ ..] => write!(out, "{first:?} and {} more tensors (record {name:?})", others.len()),
        }
    }
}

impl Error {
    pub(crate) fn format(path: impl Into<PathBuf>, source: deepnvme_format::Error) -> Self {
        Self::Format { path: path.into(), source }
    }
}
