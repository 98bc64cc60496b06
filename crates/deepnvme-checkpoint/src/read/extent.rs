//! A stretch of a file that belongs to one storage or one tensor, and the header in front of it.

use std::path::Path;

use deepnvme_format::Error as FormatError;
use deepnvme_format::archive::{Header, LOCAL_BYTES};

use crate::error::{Error, Result};

/// The longest header: name and extra field have 16-bit lengths.
pub(super) const HEADER_BYTES_MAX: u64 = LOCAL_BYTES + 2 * 65_535;
/// More than deepnvme pads a header with.
const PADDING_BYTES_MAX: u64 = 4 * deepnvme_io::mem::PAGE_BYTES;

/// A stretch of the file that belongs to one storage, or one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The record's name below the root; the tensor's name in safetensors.
    pub name: String,
    /// Where its header begins; in safetensors the same as `data_offset`.
    pub header_offset: u64,
    /// Where its bytes begin.
    pub data_offset: u64,
    /// How many those are.
    pub bytes: u64,
    /// The CRC-32 that the archive's directory has for it.
    pub crc32: Option<u32>,
    /// Whole name in its header, where there is one.
    pub(super) record_name: String,
    /// What the place of its elements in memory must be a multiple of.
    pub(super) alignment: u64,
}

impl Extent {
    /// Where its bytes end.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.data_offset + self.bytes
    }
}

/// As many bytes as tell a header.
pub(super) fn header_room(extent: &Extent) -> usize {
    LOCAL_BYTES as usize + extent.record_name.len()
}

/// The bytes of an extent's header, as deepnvme writes it. A header that claims more is not read to its end.
pub(super) fn sealed_room(extent: &Extent) -> usize {
    let claimed = extent.data_offset.saturating_sub(extent.header_offset);
    claimed.min(header_room(extent) as u64 + PADDING_BYTES_MAX) as usize
}

/// The header in front of an extent, which must be its own, out of its first bytes.
pub(super) fn header_of(path: &Path, extent: &Extent, bytes: &[u8]) -> Result<Header> {
    let header = Header::parse(bytes, extent.header_offset).map_err(|error| Error::format(path, error))?;
    header.filter(|header| header.name == extent.record_name.as_bytes()).ok_or_else(|| {
        let what = format!("the header there is not the one of {:?}, which the directory names", extent.record_name);
        Error::format(path, FormatError::Corrupt { offset: extent.header_offset, what })
    })
}
