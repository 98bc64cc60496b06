//! The layout of a torch archive.

use std::path::Path;

use deepnvme_format::archive::{ArchivePlan, ENTRY_CRC32, HEADER_CRC32, RecordSpec, root_of};
use deepnvme_format::checksums::{self, Frame, INDEX_DIGITS, RecordChecksums, SIDECAR};
use deepnvme_format::{Error, Result};

use super::data_source::DataSource;
use super::file_layout::HeaderRenderer;
use super::spans::{Content, Spans};

/// A record of an archive.
#[derive(Clone, Debug)]
pub struct Record {
    /// Its name below the archive's root.
    pub name: String,
    /// Its data.
    pub data: DataSource,
}

/// An archive to write: its plan, from which headers and index are rendered. The last record is the sidecar, if there
/// is one.
pub(super) struct ArchiveFile {
    plan: ArchivePlan,
    /// Number of records without the sidecar.
    records: usize,
    has_checksums: bool,
}

impl ArchiveFile {
    pub(super) fn new(path: &Path, records: &[Record], has_checksums: bool) -> Result<Self> {
        let file_name = path.file_name().unwrap_or_default().to_string_lossy();
        let mut specs: Vec<RecordSpec<'_>> = Vec::with_capacity(records.len() + 1);
        specs.extend(records.iter().map(|record| RecordSpec { name: &record.name, bytes: record.data.bytes() }));
        if has_checksums {
            let bare_bytes =
                checksums::encode(specs.iter().map(|spec| (spec.name, &[][..])), Frame::default()).len() as u64;
            let checksums_bytes: u64 = specs.iter().map(|spec| checksums::text_bytes(spec.bytes)).sum();
            specs.push(RecordSpec { name: SIDECAR, bytes: bare_bytes + checksums_bytes });
        }
        if specs.len() > u32::MAX as usize {
            return Err(Error::Invalid("an archive has at most 2^32 records".into()));
        }
        Ok(Self { plan: ArchivePlan::new(&root_of(&file_name), &specs)?, records: records.len(), has_checksums })
    }

    pub(super) fn spans(&self) -> Spans {
        let mut spans = Spans::default();
        for (index, record) in self.plan.records()[..self.records].iter().enumerate() {
            spans.push(record.header_offset, record.data_offset - record.header_offset, Content::Header(index));
            spans.push(record.data_offset, record.bytes, Content::Record(index));
        }
        let index_offset = self.late_offset();
        spans.push(index_offset, self.plan.file_bytes() - index_offset, Content::Index);
        spans
    }

    /// Returns the start of the part that depends on all checksums.
    fn late_offset(&self) -> u64 {
        let sidecar = self.plan.records().get(self.records);
        sidecar.map_or(self.plan.index_offset(), |record| record.header_offset)
    }
}

impl HeaderRenderer for ArchiveFile {
    fn name(&self, record: usize) -> &str {
        self.plan.name(record)
    }

    fn header(&self, record: usize, crc32: u32) -> Vec<u8> {
        self.plan.header(record, crc32)
    }

    fn index(&self, checksums: &[RecordChecksums]) -> Vec<u8> {
        let crc32: Vec<u32> = checksums.iter().map(|checksums| checksums.crc32).collect();
        if !self.has_checksums {
            return self.plan.index(&crc32);
        }
        let (index_offset, file_bytes) = (self.late_offset(), self.plan.file_bytes());
        let frame = Frame { file_bytes, index_offset, index_bytes: file_bytes - index_offset };
        let chunks = checksums
            .iter()
            .enumerate()
            .map(|(record, checksums)| (self.plan.name(record), checksums.chunks.as_slice()));
        let mut text = checksums::encode(chunks, frame).into_bytes();
        // The sidecar's checksum covers this index, which contains the sidecar's CRC-32: both are excluded.
        let record = &self.plan.records()[self.records];
        let text_at = (record.data_offset - index_offset) as usize;
        let digits = INDEX_DIGITS.start + text_at..INDEX_DIGITS.end + text_at;
        let entry_at = (record.entry_offset - index_offset) as usize;
        let entry_crc32 = ENTRY_CRC32.start + entry_at..ENTRY_CRC32.end + entry_at;
        let mut blank = self.index_of(&text, &crc32, 0);
        checksums::write_index_checksum(&mut blank, digits.clone(), &[HEADER_CRC32, digits.clone(), entry_crc32]);
        text[INDEX_DIGITS].copy_from_slice(&blank[digits]);
        self.index_of(&text, &crc32, checksums::checksums_of(&text).crc32)
    }
}

impl ArchiveFile {
    /// Renders the sidecar with its header, the gap, and the directory.
    fn index_of(&self, text: &[u8], crc32: &[u32], text_crc32: u32) -> Vec<u8> {
        let mut bytes = self.plan.header(self.records, text_crc32);
        bytes.extend(text);
        bytes.resize((self.plan.index_offset() - self.late_offset()) as usize, 0);
        let all: Vec<u32> = crc32.iter().copied().chain([text_crc32]).collect();
        bytes.extend(self.plan.index(&all));
        bytes
    }
}
