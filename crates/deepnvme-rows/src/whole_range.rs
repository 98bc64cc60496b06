//! Reads a range of a file into memory at once.

use std::sync::Arc;

use deepnvme_file::VersionedFile;
use deepnvme_io::mem::Buffer;
use deepnvme_io::{Engine, Error as IoError, ErrorKind};

use crate::error::{Error, Result};
use crate::room::check_room;

/// Reads a range. Its size may come from a file that is damaged.
///
/// # Errors
/// `Io` if it ends beyond the file, cannot be read, or does not fit into memory.
pub(crate) fn read_range(engine: &Arc<Engine>, file: &VersionedFile, offset: u64, bytes: u64) -> Result<Buffer> {
    let io = |error: IoError| Error::Io(error.at_path(file.file().path()));
    if offset.checked_add(bytes).is_none_or(|end| file.file().len().is_ok_and(|all| end > all)) {
        let detail = format!("{bytes} bytes at {offset} end beyond the file; restore it from a copy");
        return Err(io(IoError::new(ErrorKind::UnexpectedEof, "read", detail)));
    }
    check_room(bytes, "raise the limit of the process (`ulimit -v`)")?;
    let memory = Buffer::zeroed(bytes as usize).map_err(|error| Error::Io(IoError::from_io("allocate", &error)))?;
    let (memory, result) = engine.read(file.file(), offset, memory.into_region())?.wait();
    result?;
    let lost = || IoError::new(ErrorKind::Io, "read", "the engine did not return the memory; report this as a bug");
    Ok(memory.and_then(|memory| memory.into_buffer().ok()).ok_or_else(lost)?)
}
