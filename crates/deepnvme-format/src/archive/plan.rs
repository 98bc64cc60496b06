//! The layout of an archive, computed before its first byte is written.
//!
//! ```text
//! header data.pkl | header version | ... | header data/0 | header data/1 | ... | directory | end
//! ```
//! The data of every large record is aligned for direct I/O, by padding in the header's extra field. The end of the
//! file is aligned as well: the gap is before the directory, where readers skip it.

use std::collections::HashSet;
use std::ops::Range;

use super::zip::{self, Entry};
use crate::error::{Error, Result};
use crate::{ALIGNMENT_LARGE, FILE_BYTES_MAX, alignment_of};

/// A record to lay out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordSpec<'a> {
    /// Name below the archive's root.
    pub name: &'a str,
    /// Length in bytes.
    pub bytes: u64,
}

/// The position of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordPlan {
    /// Full name, including the archive's root.
    pub name: String,
    /// Offset of its header.
    pub header_offset: u64,
    /// Offset of its data.
    pub data_offset: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Offset of its directory entry.
    pub entry_offset: u64,
}

impl RecordPlan {
    /// Returns the end of its data.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.data_offset + self.bytes
    }
}

/// The layout of an archive.
#[derive(Clone, Debug)]
pub struct ArchivePlan {
    records: Vec<RecordPlan>,
    /// Bytes of the root and its slash.
    root_bytes: usize,
    index_offset: u64,
    index_bytes: u64,
}

impl ArchivePlan {
    /// Lays records out in the given order, below `root`.
    ///
    /// # Errors
    /// `Invalid` for names that are too long or duplicate, and for files that exceed the maximum size.
    pub fn new(root: &str, specs: &[RecordSpec<'_>]) -> Result<Self> {
        let mut records = Vec::with_capacity(specs.len());
        let mut seen = HashSet::with_capacity(specs.len());
        let (mut at, mut directory_bytes, mut directory_entry) = (0, 0, Vec::new());
        for spec in specs {
            let name = [root, "/", spec.name].concat();
            if !seen.insert(spec.name) {
                return Err(Error::invalid(format!("two records have the name {name:?}")));
            }
            let least =
                zip::LOCAL_BYTES + name.len() as u64 + if zip::is_wide(spec.bytes) { zip::LOCAL64_BYTES } else { 0 };
            if name.len() > usize::from(u16::MAX) / 2 {
                return Err(Error::invalid(format!("the name of a record has {} bytes; shorten the path", name.len())));
            }
            if spec.bytes > FILE_BYTES_MAX || at > FILE_BYTES_MAX {
                return Err(Error::invalid(format!("with the record {name:?} the file exceeds the maximum size")));
            }
            let header_offset = at;
            let data_offset = aligned(header_offset + least, alignment_of(spec.bytes));
            let entry_offset = directory_bytes;
            let record = RecordPlan { name, header_offset, data_offset, bytes: spec.bytes, entry_offset };
            directory_entry.clear();
            zip::put_central(&mut directory_entry, &entry(&record, 0));
            directory_bytes += directory_entry.len() as u64;
            at = record.end();
            records.push(record);
        }
        let index_bytes = directory_bytes + zip::END_ALL_BYTES;
        let index_offset = (at + index_bytes).next_multiple_of(ALIGNMENT_LARGE) - index_bytes;
        records.iter_mut().for_each(|record| record.entry_offset += index_offset);
        Ok(Self { records, root_bytes: root.len() + 1, index_offset, index_bytes })
    }

    /// Returns the records by offset.
    #[must_use]
    pub fn records(&self) -> &[RecordPlan] {
        &self.records
    }

    /// Returns the name of a record below the archive's root.
    #[must_use]
    pub fn name(&self, index: usize) -> &str {
        &self.records[index].name[self.root_bytes..]
    }

    /// Returns the offset of the directory, where [`index`](Self::index) starts.
    #[must_use]
    pub fn index_offset(&self) -> u64 {
        self.index_offset
    }

    /// Returns the length of the file.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        self.index_offset + self.index_bytes
    }

    /// Returns the header of a record, which fills the file from `header_offset` to `data_offset`.
    #[must_use]
    pub fn header(&self, index: usize, crc32: u32) -> Vec<u8> {
        let record = &self.records[index];
        zip::local(&entry(record, crc32), record.data_offset - record.header_offset)
    }

    /// Returns the directory and end records, with the CRC-32 of each record.
    ///
    /// # Panics
    /// If the number of CRC-32s differs from that of the records.
    #[must_use]
    pub fn index(&self, crc32: &[u32]) -> Vec<u8> {
        assert_eq!(crc32.len(), self.records.len(), "a sum for each record");
        let mut bytes = Vec::with_capacity(self.index_bytes as usize);
        for (record, crc32) in self.records.iter().zip(crc32) {
            zip::put_central(&mut bytes, &entry(record, *crc32));
        }
        let directory_bytes = bytes.len() as u64;
        bytes.extend(zip::end(self.records.len() as u64, self.index_offset, directory_bytes));
        bytes
    }
}

fn entry(record: &RecordPlan, crc32: u32) -> Entry<'_> {
    Entry { name: &record.name, bytes: record.bytes, crc32, header_offset: record.header_offset }
}

/// Returns the header of `header_bytes` that [`ArchivePlan`] writes before a record; `None` if it writes none of that
/// length.
#[must_use]
pub fn local_header(name: &str, bytes: u64, crc32: u32, header_bytes: u64) -> Option<Vec<u8>> {
    let fixed = zip::LOCAL_BYTES + name.len() as u64 + if zip::is_wide(bytes) { zip::LOCAL64_BYTES } else { 0 };
    let padding = header_bytes.checked_sub(fixed)?;
    let is_planned = padding == 0 || (zip::EXTRA_HEAD_BYTES..ALIGNMENT_LARGE * 2).contains(&padding);
    (is_planned && name.len() <= usize::from(u16::MAX) / 2)
        .then(|| zip::local(&Entry { name, bytes, crc32, header_offset: 0 }, header_bytes))
}

/// Position of the CRC-32 in a record's header.
pub const HEADER_CRC32: Range<usize> = 14..18;
/// Position of the CRC-32 in a directory entry.
pub const ENTRY_CRC32: Range<usize> = 16..20;

/// Returns the next aligned offset whose padding is either empty or large enough for an extra field.
fn aligned(offset: u64, alignment: u64) -> u64 {
    let next = offset.next_multiple_of(alignment);
    let padding = next - offset;
    if padding > 0 && padding < zip::EXTRA_HEAD_BYTES { next + alignment } else { next }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_must_differ_and_end() {
        let (spec, long) = (|name, bytes| RecordSpec { name, bytes }, "a".repeat(70_000));
        ArchivePlan::new("x", &[spec("a", 1), spec("a", 1)]).unwrap_err();
        ArchivePlan::new("x", &[spec(&long, 1)]).unwrap_err();
        ArchivePlan::new("x", &[spec("a", u64::MAX / 3)]).unwrap_err();
        ArchivePlan::new("x", &[spec("a", 1 << 62), spec("b", 1 << 62)]).unwrap_err();
    }
}
