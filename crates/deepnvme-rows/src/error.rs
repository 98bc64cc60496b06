//! The errors of tables.

use std::ops::Range;
use std::path::PathBuf;

use deepnvme_io::display;

/// The result of every call that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Rows could not be read.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// The engine, the file system or the disk failed.
    #[error(transparent)]
    Io(#[from] deepnvme_io::Error),
    /// The arguments contradict each other or the table.
    #[error("{0}")]
    Invalid(String),
    /// The description of a packed table is not one that was written.
    #[error("the description of the packed table is damaged ({0}); pack the table again")]
    Damaged(String),
    /// A later version made the file.
    #[error("{0}")]
    Unsupported(String),
    /// A number is no row of the table.
    #[error("id {id} at position {position} is out of range: {}", ids_text(*rows))]
    NoSuchRow {
        /// The number.
        id: i128,
        /// Its position in the ids.
        position: usize,
        /// The number of rows.
        rows: u64,
    },
    /// The memory is too small for one row.
    #[error(
        "{memory} bytes of memory are too few: with rows of {row_bytes} bytes, the table takes {bytes_min}; give at least that"
    )]
    Memory {
        /// The memory that was given.
        memory: u64,
        /// Bytes of a row.
        row_bytes: usize,
        /// The least that works.
        bytes_min: u64,
    },
    /// A file is not the one that was opened.
    #[error("{}: the file has changed since the table was opened ({what}); open the table again", display::path(path))]
    Changed {
        /// The file.
        path: PathBuf,
        /// The difference.
        what: String,
    },
    /// A block of a packed table is not what was written.
    #[error(
        "{}: the block at offset {offset} is damaged (CRC-32C), with {}; restore the file from a copy, or pack the table \
         again",
        display::path(path),
        rows_text(rows)
    )]
    Checksum {
        /// The file.
        path: PathBuf,
        /// The offset of the block.
        offset: u64,
        /// Its rows. Empty if it has copies of hot rows only.
        rows: Range<u64>,
    },
    /// The caller stopped waiting.
    #[error("the gather was interrupted")]
    Interrupted,
    /// The table was closed.
    #[error("the table is closed; open it again")]
    Closed,
}

fn ids_text(rows: u64) -> String {
    match rows.checked_sub(1) {
        Some(last) => format!("ids of this table are 0 to {last}"),
        None => "this table has no rows".into(),
    }
}

fn rows_text(rows: &Range<u64>) -> String {
    match rows.end.checked_sub(1).filter(|last| *last >= rows.start) {
        Some(last) => format!("rows {} to {last}", rows.start),
        None => "copies of hot rows".into(),
    }
}
