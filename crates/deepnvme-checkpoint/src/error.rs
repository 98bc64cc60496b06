//! The errors of this crate.

use std::path::PathBuf;

use deepnvme_io::display;

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
        "{}: the bytes of {} at offset {offset} are not those that were saved ({bytes} bytes, {checksums}); \
             restore the file from a copy, or load it with verify='off' to have what is there",
        display::path(path),
        damaged_names(name, tensors)
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The record or tensor.
        name: String,
        /// The tensors in a record of an archive, where they are known.
        tensors: Vec<String>,
        /// Offset of the damaged range.
        offset: u64,
        /// Size of the damaged range.
        bytes: u64,
        /// The checksums that differ.
        checksums: &'static str,
    },
    /// The file list of a checkpoint differs from the saved one.
    #[error(
        "{}: this list of files is not the one that was saved: its checksum does not match; restore it from a copy, or \
         remove it where a newer file has taken its place. If another program has edited it on purpose, remove {:?} and \
         {:?} from it. verify='off' does not look at the checksum",
        display::path(path),
        deepnvme_format::set::CHECKSUM_KEY,
        deepnvme_format::set::FILES_KEY
    )]
    ChangedList {
        /// The list.
        path: PathBuf,
    },
    /// A record's header has another length than the archive's directory implies. Read all headers first.
    #[error("{}: the header of {name:?} has an unusual length", display::path(path))]
    Moved {
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
    #[error("{}: {}; files that deepnvme saves have them, for this one use verify='sample'", display::path(path),
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
        "{}: {holder} saves into this folder; close its Checkpointer, or save into another folder. Reading needs no lock",
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
        "{}: this is not a manifest of checkpoints ({detail}); move it away, and name a checkpoint's file",
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

/// Names the tensors of a record, or the record.
fn damaged_names(record: &str, tensors: &[String]) -> String {
    match tensors {
        [] => format!("{record:?}"),
        [one] => format!("{one:?} (record {record:?})"),
        [first, other] => format!("{first:?} and {other:?} (record {record:?})"),
        [first, others @ ..] => format!("{first:?} and {} more tensors (record {record:?})", others.len()),
    }
}

impl Error {
    pub(crate) fn format(path: impl Into<PathBuf>, source: deepnvme_format::Error) -> Self {
        Self::Format { path: path.into(), source }
    }
}
