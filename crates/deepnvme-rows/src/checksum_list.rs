//! The checksums of all blocks of a packed table, if they are not in the blocks.

use std::sync::Arc;

use crc_fast::{CrcAlgorithm, checksum};
use deepnvme_file::VersionedFile;
use deepnvme_io::mem::Buffer;
use deepnvme_io::{Engine, Error as IoError, ErrorKind};

use crate::error::{Error, Result};
use crate::whole_range::read_range;

/// Bytes of a block's checksum.
pub(crate) const CHECKSUM_BYTES: usize = 4;

/// A list, in memory as it is in the file: four little-endian bytes for each block, and behind them the CRC-32C of all of
/// these bytes.
#[derive(Clone, Debug)]
pub struct ChecksumList {
    bytes: Arc<Buffer>,
}

impl ChecksumList {
    /// Reads a list from a file.
    ///
    /// # Errors
    /// `Io` if it cannot be read, is damaged, or does not fit into memory.
    pub fn read(engine: &Arc<Engine>, file: &VersionedFile, (offset, bytes): (u64, u64)) -> Result<Self> {
        let list = Self { bytes: Arc::new(read_range(engine, file, offset, bytes)?) };
        if list.is_sound() {
            return Ok(list);
        }
        let detail =
            "the list of checksums is damaged (CRC-32C); restore the file from a copy, or pack the table again";
        let error = IoError::new(ErrorKind::Corrupt, "read", detail).at_offset(offset);
        Err(Error::Io(error.at_path(file.file().path())))
    }

    /// Returns the number of blocks.
    pub(crate) fn blocks(&self) -> u64 {
        (self.bytes.len() / CHECKSUM_BYTES).saturating_sub(1) as u64
    }

    /// Returns the bytes of memory.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// Returns the checksum of a block.
    pub(crate) fn get(&self, number: u64) -> Option<u32> {
        let number = usize::try_from(number).ok().filter(|_| number < self.blocks())?;
        self.bytes.as_slice().as_chunks().0.get(number).map(|bytes| u32::from_le_bytes(*bytes))
    }

    fn is_sound(&self) -> bool {
        let bytes = self.bytes.as_slice();
        bytes.len().is_multiple_of(CHECKSUM_BYTES)
            && bytes.split_last_chunk().is_some_and(|(list, sum)| checksum_of(list).to_le_bytes() == *sum)
    }

    #[cfg(test)]
    pub(crate) fn of(checksums: &[u32]) -> std::io::Result<Self> {
        let bytes = list_bytes(checksums);
        let mut buffer = Buffer::zeroed(bytes.len())?;
        buffer.as_mut_slice().copy_from_slice(&bytes);
        Ok(Self { bytes: Arc::new(buffer) })
    }
}

impl PartialEq for ChecksumList {
    fn eq(&self, other: &Self) -> bool {
        self.bytes.as_slice() == other.bytes.as_slice()
    }
}

impl Eq for ChecksumList {}

/// Returns a list, as it is in the file.
pub(crate) fn list_bytes(checksums: &[u32]) -> Vec<u8> {
    let mut bytes: Vec<u8> = checksums.iter().flat_map(|checksum| checksum.to_le_bytes()).collect();
    bytes.extend(checksum_of(&bytes).to_le_bytes());
    bytes
}

/// Returns the CRC-32C of bytes.
pub(crate) fn checksum_of(bytes: &[u8]) -> u32 {
    checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32
}
