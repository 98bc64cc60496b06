//! A record's data, and its checksums as they become known.

use std::path::Path;

use deepnvme_format::LARGE_BYTES;
use deepnvme_format::checksums::{PartChecksums, RecordChecksums, checksums_of};
use deepnvme_io::mem::sync::ignore_poison;

use super::origin::{Origin, Window};
use crate::error::{Error, Result};
use crate::sync::{Mutex, OnceLock};

pub(super) struct Source {
    pub(super) origin: Origin,
    parts: Mutex<Vec<(u64, PartChecksums)>>,
    /// The checksums of a record that is small or finished.
    sums: OnceLock<RecordChecksums>,
}

impl Source {
    pub(super) fn new(origin: Origin) -> Self {
        Self { origin, parts: Mutex::default(), sums: OnceLock::new() }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.origin.bytes()
    }

    /// Returns whether its checksum is computed in one go.
    pub(super) fn is_small(&self) -> bool {
        self.bytes() < LARGE_BYTES
    }

    /// Notes the checksums of the part at `offset`.
    pub(super) fn note(&self, offset: u64, part: PartChecksums) {
        if !self.is_small() {
            ignore_poison(self.parts.lock()).push((offset, part));
        } else if part.bytes == self.bytes() {
            let _ = self.sums.set(one_part(part));
        }
    }

    /// Returns the checksums known so far.
    pub(super) fn noted(&self) -> Vec<(u64, PartChecksums)> {
        if !self.is_small() {
            return ignore_poison(self.parts.lock()).clone();
        }
        let part = |sums: &RecordChecksums| PartChecksums {
            bytes: self.bytes(),
            crc32: sums.crc32,
            crc64: sums.chunks.first().copied().unwrap_or(0),
        };
        self.sums.get().map(|sums| (0, part(sums))).into_iter().collect()
    }

    /// Returns the CRC-32 for the record's header, or 0 for a large record that is not finished.
    pub(super) fn crc32(&self) -> Result<u32> {
        if self.is_small() {
            return Ok(self.small_sums()?.crc32);
        }
        Ok(self.sums.get().map_or(0, |sums| sums.crc32))
    }

    /// Returns the checksums of a small record. Reads its data unless it was hashed already.
    fn small_sums(&self) -> Result<&RecordChecksums> {
        if let Some(sums) = self.sums.get() {
            return Ok(sums);
        }
        let mut bytes = vec![0; self.bytes() as usize];
        let Window { memory, start } = self.origin.window(&(0..self.bytes()))?;
        memory.copy_to_slice(start as usize, &mut bytes);
        Ok(self.sums.get_or_init(|| one_part(checksums_of(&bytes))))
    }

    /// Combines the checksums of all parts. `path` names the file in errors.
    pub(super) fn finish(&self, path: &Path) -> Result<&RecordChecksums> {
        if self.is_small() {
            return self.small_sums();
        }
        if let Some(sums) = self.sums.get() {
            return Ok(sums);
        }
        let parts = std::mem::take(&mut *ignore_poison(self.parts.lock()));
        let known: u64 = parts.iter().map(|(_, part)| part.bytes).sum();
        if known != self.bytes() {
            let text = format!("of {} bytes of a record, {known} have been hashed", self.bytes());
            return Err(Error::format(path, deepnvme_format::Error::Invalid(text)));
        }
        let sums = RecordChecksums::from_parts(parts).map_err(|error| Error::format(path, error))?;
        Ok(self.sums.get_or_init(|| sums))
    }
}

/// A small record has one chunk, or none if it is empty.
fn one_part(sums: PartChecksums) -> RecordChecksums {
    RecordChecksums { crc32: sums.crc32, chunks: if sums.bytes > 0 { vec![sums.crc64] } else { Vec::new() } }
}
