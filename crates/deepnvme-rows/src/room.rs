//! Checks for room in the address space. A small allocation that fails aborts the process.

use deepnvme_io::Error as IoError;
use deepnvme_io::mem::check_memory;

use crate::error::{Error, Result};

/// Less than this is not checked.
const CHECKED_BYTES_MIN: u64 = 1 << 20;

/// Checks that there is room for this many bytes more. `remedy` is a clause for the error.
///
/// # Errors
/// `Io` with `ENOMEM`.
pub fn check_room(bytes: u64, remedy: &str) -> Result<()> {
    if bytes < CHECKED_BYTES_MIN {
        return Ok(());
    }
    let checked = check_memory(usize::try_from(bytes).unwrap_or(usize::MAX));
    checked.map_err(|error| Error::Io(IoError::from_io("allocate", &error).because(remedy)))
}
