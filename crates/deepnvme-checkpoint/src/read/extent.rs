//! The byte range of one storage or tensor in a file, and the header before it.

use std::path::Path;

use deepnvme_format::Error as FormatError;
use deepnvme_format::archive::{LOCAL_BYTES, LocalHeader, Record};

use crate::error::{Error, Result};

/// Maximum size of a header: the name and the extra field have 16-bit lengths.
pub(super) const HEADER_BYTES_MAX: u64 = LOCAL_BYTES + 2 * 65_535;
/// Alignment that suits every element type.
pub(super) const ELEMENT_ALIGNMENT: u64 = 16;
/// Upper bound of the padding in headers that deepnvme writes.
const PADDING_BYTES_MAX: u64 = 4 * deepnvme_io::mem::PAGE_BYTES;

/// The byte range of one storage or tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The record's name below the root, or the tensor's name in safetensors.
    pub name: String,
    /// Offset of its header. Equal to `data_offset` in safetensors.
    pub header_offset: u64,
    /// Offset of its data.
    pub data_offset: u64,
    /// Size of its data.
    pub bytes: u64,
    /// The CRC-32 in the archive's directory.
    pub crc32: Option<u32>,
    /// The full name in its header, if there is one.
    pub(super) record_name: String,
    /// Required alignment of its elements in memory.
    pub(super) alignment: u64,
}

impl Extent {
    /// Creates the extent of an archive's record. `name` is its name below the root.
    pub(super) fn of_record(name: String, record: &Record) -> Self {
        Self {
            name,
            header_offset: record.header_offset,
            data_offset: record.data_offset,
            bytes: record.bytes,
            crc32: Some(record.crc32),
            record_name: record.name.clone(),
            alignment: ELEMENT_ALIGNMENT,
        }
    }

    /// Returns the end offset of its data.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.data_offset + self.bytes
    }
}

/// Returns how many bytes of a header are needed to recognise it.
pub(super) fn header_bytes_min(extent: &Extent) -> usize {
    LOCAL_BYTES as usize + extent.record_name.len()
}

/// Returns how much of a header to read: its size as deepnvme writes it, at most `PADDING_BYTES_MAX` more than its name
/// needs. A damaged size cannot make the read longer.
pub(super) fn own_header_bytes(extent: &Extent) -> usize {
    let claimed = extent.data_offset.saturating_sub(extent.header_offset);
    claimed.min(header_bytes_min(extent) as u64 + PADDING_BYTES_MAX) as usize
}

/// Parses the header before an extent from its first bytes. The name must match.
pub(super) fn header_of(path: &Path, extent: &Extent, bytes: &[u8]) -> Result<LocalHeader> {
    let header = LocalHeader::parse(bytes, extent.header_offset).map_err(|error| Error::format(path, error))?;
    header.filter(|header| header.name == extent.record_name.as_bytes()).ok_or_else(|| {
        let what = format!("the header there is not the one of {:?}, which the directory names", extent.record_name);
        Error::format(path, FormatError::Corrupt { offset: extent.header_offset, what })
    })
}
