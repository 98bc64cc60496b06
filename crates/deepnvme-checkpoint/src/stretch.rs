//! Reading a byte range to the same offset within a page as within a block, so that direct I/O needs no copy.

use std::ops::Range;
use std::sync::Arc;

use deepnvme_io::mem::{Buffer, Region};
use deepnvme_io::{Engine, Error as IoError, TensorFile};

use crate::error::Result;

const BLOCK_BYTES: u64 = deepnvme_io::mem::PAGE_BYTES;

/// Reads a byte range and waits for it.
pub(crate) fn read(engine: &Engine, file: &Arc<TensorFile>, range: &Range<u64>) -> Result<Region> {
    let (lead, bytes) = (range.start % BLOCK_BYTES, range.end - range.start);
    let buffer = Buffer::zeroed((lead + bytes) as usize);
    let buffer =
        buffer.map_err(|error| IoError::from_io("allocate memory to read into", &error).at_path(file.path()))?;
    let (_, target) = buffer.into_region().split_at(lead as usize);
    let view = target.region();
    engine.read(file, range.start, target)?.wait().1?;
    Ok(view)
}
