//! What can go wrong while weights stream.

use std::path::PathBuf;

use deepnvme_io::shown;

/// The result of every call that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Weights that did not come.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// The engine, the file system or the disk.
    #[error(transparent)]
    Io(#[from] deepnvme_io::Error),
    /// The file is not the one that was opened.
    #[error("{}: the file has changed since the model was opened ({what}); open the model again", shown::path(path))]
    Changed {
        /// The file.
        path: PathBuf,
        /// What is different.
        what: String,
    },
    /// The bytes that came are not what they have to be.
    #[error(
        "{}: the weights at offset {offset} are damaged ({source}); restore the file from a copy",
        shown::path(path)
    )]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// Where the stretch begins.
        offset: u64,
        /// What is wrong with it.
        source: deepnvme_codec::Error,
    },
    /// More is asked for at once than memory was given for.
    #[error(
        "unit {unit} is called while all {slots} slots of its size are in use; give more memory, or release units first"
    )]
    Busy {
        /// The unit that was called.
        unit: usize,
        /// How many slots there are for units of its size.
        slots: usize,
    },
    /// More is picked at once than memory was given for.
    #[error(
        "{bytes} bytes are picked at once, and {bytes_max} is all there is memory for; give more memory, or a smaller batch"
    )]
    TooMany {
        /// What the items picked need.
        bytes: u64,
        /// The bound.
        bytes_max: u64,
    },
    /// A defect of this library, met while weights were converted.
    #[error("converting weights of {} at offset {offset} panicked ({what}); please report this", shown::path(path))]
    Panicked {
        /// The file.
        path: PathBuf,
        /// Where the stretch begins.
        offset: u64,
        /// What the panic said.
        what: String,
    },
    /// The caller's plan contradicts itself.
    #[error("the plan of what is streamed is wrong: {0}")]
    Plan(String),
    /// It was closed.
    #[error("the weights are streamed no more: the model was closed")]
    Closed,
}
