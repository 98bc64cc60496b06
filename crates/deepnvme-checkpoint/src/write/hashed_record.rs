//! A record's checksums as they become known.

use std::path::Path;

use deepnvme_format::LARGE_BYTES;
use deepnvme_format::checksums::{PartChecksums, RecordChecksums, checksums_of};

use super::data_source::{DataSource, LoadedPart};
use crate::error::{Error, Result};
use crate::sync::{Mutex, OnceLock, lock};

/// A record's size and checksums, filled in by any thread.
pub(super) struct HashedRecord {
    bytes: u64,
    partial_checksums: Mutex<Vec<(u64, PartChecksums)>>,
    /// The checksums of a record that is small or finished.
    checksums: OnceLock<RecordChecksums>,
}

impl HashedRecord {
    pub(super) fn new(bytes: u64) -> Self {
        Self { bytes, partial_checksums: Mutex::default(), checksums: OnceLock::new() }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns whether its checksum is computed in one go.
    pub(super) fn is_small(&self) -> bool {
        self.bytes < LARGE_BYTES
    }

    /// Notes the checksums of the part at `offset`. Ignores a part of a small record that is not the whole.
    pub(super) fn note(&self, offset: u64, part: PartChecksums) {
        if !self.is_small() {
            lock(&self.partial_checksums).push((offset, part));
        } else if part.bytes == self.bytes {
            let _ = self.checksums.set(one_part(part));
        }
    }

    /// Returns the checksums known so far. Call it before `finish`, which takes the parts.
    pub(super) fn noted(&self) -> Vec<(u64, PartChecksums)> {
        if !self.is_small() {
            return lock(&self.partial_checksums).clone();
        }
        let part = |checksums: &RecordChecksums| PartChecksums {
            bytes: self.bytes,
            crc32: checksums.crc32,
            crc64: checksums.chunks.first().copied().unwrap_or(0),
        };
        self.checksums.get().map(|checksums| (0, part(checksums))).into_iter().collect()
    }

    /// Returns the CRC-32 for the record's header. The header of a large record is assembled only once the record is
    /// finished, so the 0 of an unfinished one is never written.
    pub(super) fn crc32(&self, data: &DataSource) -> Result<u32> {
        if self.is_small() {
            return Ok(self.small_checksums(data)?.crc32);
        }
        Ok(self.checksums.get().map_or(0, |checksums| checksums.crc32))
    }

    /// Returns the checksums of a small record. Reads its data unless it was hashed already.
    fn small_checksums(&self, data: &DataSource) -> Result<&RecordChecksums> {
        if let Some(checksums) = self.checksums.get() {
            return Ok(checksums);
        }
        let mut bytes = vec![0; self.bytes as usize];
        let whole = 0..self.bytes;
        let LoadedPart { memory, start } = data.load(&whole)?;
        memory.copy_to_slice((whole.start - start) as usize, &mut bytes);
        data.flip(whole.start, &mut bytes);
        Ok(self.checksums.get_or_init(|| one_part(checksums_of(&bytes))))
    }

    /// Returns the checksums, once they are finished.
    pub(super) fn finished(&self) -> Option<&RecordChecksums> {
        self.checksums.get()
    }

    /// Combines the checksums of all parts. `path` names the file in errors.
    pub(super) fn finish(&self, data: &DataSource, path: &Path) -> Result<&RecordChecksums> {
        if self.is_small() {
            return self.small_checksums(data);
        }
        if let Some(checksums) = self.checksums.get() {
            return Ok(checksums);
        }
        let parts = std::mem::take(&mut *lock(&self.partial_checksums));
        let known: u64 = parts.iter().map(|(_, part)| part.bytes).sum();
        if known != self.bytes {
            let text = format!("of {} bytes of a record, {known} have been hashed", self.bytes);
            return Err(Error::format(path, deepnvme_format::Error::Invalid(text)));
        }
        let checksums = RecordChecksums::from_parts(parts).map_err(|error| Error::format(path, error))?;
        Ok(self.checksums.get_or_init(|| checksums))
    }
}

/// Returns the checksums of a small record, which has one chunk, or none if it is empty.
fn one_part(checksums: PartChecksums) -> RecordChecksums {
    RecordChecksums {
        crc32: checksums.crc32,
        chunks: if checksums.bytes > 0 { vec![checksums.crc64] } else { Vec::new() },
    }
}
