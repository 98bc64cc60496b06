//! Parses an archive from its end: its records and their positions.
//!
//! A record's data follows its header, whose length only the header states. [`Record::data_offset`] is the data's
//! position if the data ends where the next header starts, as for the storages of torch and deepnvme. It is too high
//! for a record before a gap. Readers compare it with the header.

use std::collections::HashMap;

use super::zip::{self, CENTRAL_BYTES, END_BYTES, END_MAGIC, FLAG_DESCRIPTOR, LOCAL_BYTES, Words};
use crate::error::{Error, Result};

/// How far before the end of a file the end records may begin. A comment has 65,535 bytes at most; 200 bytes are enough
/// for the ZIP64 records.
pub const TAIL_BYTES_MAX: u64 = END_BYTES as u64 + 65_535 + 200;
/// Bytes of a data descriptor. It follows a record whose writer did not know CRC-32 and length in advance.
const DESCRIPTOR_BYTES: u64 = 16;
const DESCRIPTOR64_BYTES: u64 = 24;
/// The longest directory that is read: millions of records.
const DIRECTORY_BYTES_MAX: u64 = 256 << 20;
/// Bytes of memory for each byte of an entry: the entry, its record, and three copies of its name.
const MEMORY_FACTOR: usize = 16;

/// The location of the directory, from the end record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// Number of records.
    pub records: u64,
    /// Offset of the directory.
    pub directory_offset: u64,
    /// Length of the directory in bytes.
    pub directory_bytes: u64,
}

/// Finds the end record in the last bytes of a file, which start at `tail_offset`.
///
/// # Errors
/// `Corrupt` if there is none, or its values exceed the file; `Unsupported` for a multi-volume archive, or a directory
/// that is too long.
pub fn find_end(tail: &[u8], tail_offset: u64) -> Result<End> {
    let magic = END_MAGIC.to_le_bytes();
    let last = tail.len().checked_sub(END_BYTES);
    let is_end = |at: &usize| {
        // A comment extends to the end of the file. Anything else only resembles an end record.
        tail[*at..].starts_with(&magic)
            && usize::from(u16::from_le_bytes([tail[*at + 20], tail[*at + 21]])) == tail.len() - at - END_BYTES
    };
    let Some(at) = last.and_then(|last| (0..=last).rev().find(is_end)) else {
        let what = "this is no ZIP file, or its end is missing: the writer was interrupted, or the copy is not whole";
        return Err(Error::corrupt(tail_offset + tail.len() as u64, what));
    };
    let fields = zip::read_end(tail, at, tail_offset)?;
    let end = End {
        records: fields.records,
        directory_offset: fields.directory_offset,
        directory_bytes: fields.directory_bytes,
    };
    let directory_end = end.directory_offset.checked_add(end.directory_bytes);
    // Each entry has at least its fixed part. More records are impossible, and nothing is allocated for them.
    if directory_end.is_none_or(|directory_end| directory_end > tail_offset + at as u64)
        || end.records > end.directory_bytes / CENTRAL_BYTES
    {
        let (records, bytes, offset) = (end.records, end.directory_bytes, end.directory_offset);
        let what = format!(
            "the ZIP directory claims {records} records in {bytes} bytes at {offset}, which is impossible; \
             the file is damaged: copy or save it again"
        );
        return Err(Error::corrupt(tail_offset + at as u64, what));
    }
    if end.directory_bytes > DIRECTORY_BYTES_MAX {
        let (bytes, most) = (end.directory_bytes, DIRECTORY_BYTES_MAX);
        return Err(Error::unsupported(format!("the ZIP directory has {bytes} bytes; at most {most} are read")));
    }
    Ok(end)
}

/// A record of an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Full name, including the archive's root.
    pub name: String,
    /// Offset of its header.
    pub header_offset: u64,
    /// Expected offset of its data. The header has the actual one.
    pub data_offset: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// CRC-32 of the data.
    pub crc32: u32,
    /// Offset of its directory entry.
    pub entry_offset: u64,
}

/// The records of an archive.
#[derive(Clone, Debug)]
pub struct Directory {
    root: String,
    records: Vec<Record>,
    by_name: HashMap<String, usize>,
}

impl Directory {
    /// Parses the directory that `end` locates.
    ///
    /// # Errors
    /// `Corrupt` for entries that are inconsistent with each other or the file's size; `Unsupported` for compressed or
    /// encrypted ones; `Memory` if there is too little for the entries.
    pub fn parse(bytes: &[u8], end: End, file_bytes: u64) -> Result<Self> {
        Error::check_memory("the directory of the archive", bytes.len(), MEMORY_FACTOR)?;
        let mut words = Words::new(bytes, end.directory_offset, "the ZIP directory");
        let mut entries = Vec::with_capacity(end.records as usize);
        for _ in 0..end.records {
            entries.push((words.offset(), zip::read_central(&mut words)?));
        }
        if words.offset() != end.directory_offset + end.directory_bytes || file_bytes < words.offset() {
            return Err(Error::corrupt(words.offset(), "the ZIP directory does not end where the file says"));
        }
        let mut order: Vec<usize> = (0..entries.len()).collect();
        order.sort_by_key(|index| entries[*index].1.header_offset);
        let mut records: Vec<Option<Record>> = vec![None; entries.len()];
        let mut limit = end.directory_offset;
        for &index in order.iter().rev() {
            let (entry_offset, entry) = &entries[index];
            let data_offset = data_offset(entry, limit)?;
            limit = entry.header_offset;
            records[index] = Some(Record {
                name: entry.name.clone(),
                header_offset: entry.header_offset,
                data_offset,
                bytes: entry.bytes,
                crc32: entry.crc32,
                entry_offset: *entry_offset,
            });
        }
        let records: Vec<Record> = records.into_iter().flatten().collect();
        let mut by_name = HashMap::with_capacity(records.len());
        for (index, record) in records.iter().enumerate() {
            if by_name.insert(record.name.clone(), index).is_some() {
                let what = format!("two records have the name {:?}", record.name);
                return Err(Error::corrupt(record.header_offset, what));
            }
        }
        let root = records.first().and_then(|first| first.name.split_once('/')).map_or("", |(root, _)| root).to_owned();
        Ok(Self { root, records, by_name })
    }

    /// Returns the folder of the first record. In a torch archive all records are in it.
    #[must_use]
    pub fn root(&self) -> &str {
        &self.root
    }

    /// Returns all records in directory order.
    #[must_use]
    pub fn records(&self) -> &[Record] {
        &self.records
    }

    /// Finds a record by its name below the root.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<&Record> {
        self.by_name.get(&format!("{}/{name}", self.root)).map(|index| &self.records[*index])
    }
}

/// Returns the expected offset of an entry's data: as if it, or a data descriptor after it, ends at `limit`.
fn data_offset(entry: &zip::CentralEntry, limit: u64) -> Result<u64> {
    let least = entry.header_offset.checked_add(LOCAL_BYTES + entry.name.len() as u64);
    let spare_bytes =
        least.and_then(|least| limit.checked_sub(least)).and_then(|spare_bytes| spare_bytes.checked_sub(entry.bytes));
    let (Some(least), Some(spare_bytes)) = (least, spare_bytes) else {
        let what = format!("the record {:?} of {} bytes reaches into what follows it", entry.name, entry.bytes);
        return Err(Error::corrupt(entry.header_offset, what));
    };
    let descriptor = match entry.flags & FLAG_DESCRIPTOR != 0 {
        true if zip::is_wide(entry.bytes) => DESCRIPTOR64_BYTES,
        true => DESCRIPTOR_BYTES,
        false => 0,
    };
    // The last record of deepnvme's archives is small and followed by a gap, so this is too high for it.
    Ok(least + spare_bytes.saturating_sub(descriptor))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{ArchivePlan, LocalHeader, RecordSpec};
    use super::*;
    use crate::{ALIGNMENT_LARGE, LARGE_BYTES, alignment_of};

    fn small() -> (ArchivePlan, Vec<u8>) {
        let spec = |name, bytes| RecordSpec { name, bytes };
        let plan = ArchivePlan::new("model", &[spec("data.pkl", 100), spec("data/0", 5), spec("data/1", 0)]).unwrap();
        let index = plan.index(&[1, 2, 3]);
        (plan, index)
    }

    fn read(plan: &ArchivePlan, index: &[u8]) -> Result<Directory> {
        let end = find_end(index, plan.index_offset())?;
        // A directory before the available bytes would be read from the file.
        let from = end.directory_offset.checked_sub(plan.index_offset()).ok_or(Error::invalid("elsewhere"))? as usize;
        Directory::parse(&index[from..from + end.directory_bytes as usize], end, plan.file_bytes())
    }

    #[test]
    fn records_are_found_by_name() {
        let (plan, index) = small();
        let directory = read(&plan, &index).unwrap();
        assert_eq!((directory.root(), directory.records().len()), ("model", 3));
        assert_eq!(
            directory.find("data/0").map(|record| (record.data_offset, record.bytes, record.crc32)),
            Some((plan.records()[1].data_offset, 5, 2))
        );
        assert!(directory.find("data/2").is_none());
    }

    #[test]
    fn every_byte_that_is_changed_gives_an_error_or_a_sound_directory() {
        let (plan, index) = small();
        for at in 0..index.len() {
            for value in [0, 1, 0x7f, 0xff] {
                let mut damaged = index.clone();
                damaged[at] = value;
                if let Ok(directory) = read(&plan, &damaged) {
                    for record in directory.records() {
                        assert!(record.data_offset + record.bytes <= plan.index_offset(), "byte {at}");
                    }
                }
            }
        }
        for cut in 0..index.len() {
            assert!(read(&plan, &index[..cut]).is_err(), "cut at {cut}");
        }
    }

    #[test]
    fn lies_are_refused_by_name() {
        let (plan, index) = small();
        let compressed = {
            let mut bytes = index.clone();
            bytes[10] = 8;
            bytes
        };
        assert!(read(&plan, &compressed).unwrap_err().to_string().contains("compressed"));
        let encrypted = {
            let mut bytes = index.clone();
            bytes[8] |= 1;
            bytes
        };
        assert!(read(&plan, &encrypted).unwrap_err().to_string().contains("encrypted"));
        let mut long = index.clone();
        long[20..28].copy_from_slice(&[0, 0, 0, 1, 0, 0, 0, 1]);
        assert!(read(&plan, &long).unwrap_err().to_string().contains("reaches into"));
        let mut same = index.clone();
        let twice = index.windows(6).position(|window| window == b"data/1").unwrap();
        same[twice + 5] = b'0';
        assert!(read(&plan, &same).unwrap_err().to_string().contains("two records"));
        assert!(
            find_end(b"not a zip file at all, but long enough", 0).unwrap_err().to_string().contains("interrupted")
        );
    }

    fn sizes() -> impl Strategy<Value = u64> {
        prop_oneof![
            0..300u64,
            LARGE_BYTES - 2..LARGE_BYTES + 2,
            (u64::from(u32::MAX) - 2)..(u64::from(u32::MAX) + 9_000_000)
        ]
    }

    proptest! {
        #[test]
        fn a_planned_archive_is_read(root in "[a-z\u{e4}]{1,70}", specs in proptest::collection::vec(sizes(), 0..12)) {
            let names: Vec<String> = (0..specs.len()).map(|i| format!("data/{i}")).collect();
            let specs: Vec<_> =
                specs.iter().zip(&names).map(|(bytes, name)| RecordSpec { name, bytes: *bytes }).collect();
            let plan = ArchivePlan::new(&root, &specs).unwrap();
            let checksums: Vec<u32> = (0..specs.len() as u32).map(|index| index * 77).collect();
            let index = plan.index(&checksums);
            prop_assert_eq!(plan.index_offset() + index.len() as u64, plan.file_bytes());
            prop_assert_eq!(plan.file_bytes() % ALIGNMENT_LARGE, 0);
            let end = find_end(&index, plan.index_offset()).unwrap();
            prop_assert_eq!(end.directory_offset, plan.index_offset());
            let entries = &index[..end.directory_bytes as usize];
            let directory = Directory::parse(entries, end, plan.file_bytes()).unwrap();
            prop_assert_eq!(directory.records().len(), specs.len());
            let mut last = 0;
            for (i, (planned, record)) in plan.records().iter().zip(directory.records()).enumerate() {
                prop_assert_eq!(&planned.name, &record.name);
                prop_assert_eq!(plan.name(i), &names[i]);
                prop_assert_eq!(planned.bytes, record.bytes);
                prop_assert_eq!(record.crc32, checksums[i]);
                prop_assert_eq!(planned.header_offset, record.header_offset);
                prop_assert_eq!(planned.data_offset % alignment_of(planned.bytes), 0);
                prop_assert!(planned.header_offset >= last);
                last = planned.end();
                let header = plan.header(i, checksums[i]);
                prop_assert_eq!(header.len() as u64, planned.data_offset - planned.header_offset);
                let parsed = LocalHeader::parse(&header, planned.header_offset).unwrap().unwrap();
                prop_assert_eq!(parsed.header_bytes, header.len() as u64);
                prop_assert_eq!(parsed.name, planned.name.as_bytes());
            }
        }
    }
}
