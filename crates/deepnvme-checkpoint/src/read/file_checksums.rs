//! The coverage of a file's checksums, and the comparison of the metadata with them.
//!
//! The index checksum covers names, types, shapes and all chunk checksums. The sidecar identifies its file by size,
//! index offset and index size, and contains a checksum of itself. Checksums copied into another file are valid but
//! identify a different file: they are stale. Any other difference is damage.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use deepnvme_format::archive::local_header;
use deepnvme_format::checksums::{self, Frame, Sidecar, SidecarRecord, chunk_count, covered_sum, quoted_digits};
use deepnvme_format::safetensors::PADDING_BYTES_MIN;
use deepnvme_format::{ALIGNMENT_LARGE, Error as FormatError, Result as FormatResult};

use super::extent::Extent;
use crate::error::{DamagedPart, Error, Result};

/// The coverage of a file's checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coverage {
    /// Every byte of the file.
    File,
    /// The data of tensors and records, but not names, types and shapes. An earlier version of deepnvme, or another
    /// program, wrote the file.
    Data,
    /// Nothing: there are no checksums.
    Nothing,
    /// Nothing: the checksums were copied from another file.
    Stale,
}

/// The state of a file's checksums.
#[derive(Debug)]
pub(super) struct FileChecksums {
    /// The chunk checksums of each record, by name.
    pub(super) chunks: Option<HashMap<String, Vec<u64>>>,
    pub(super) coverage: Coverage,
    /// Set if nothing in the file can be verified, with the reason.
    pub(super) refused: Option<Error>,
    /// The byte range of the index.
    pub(super) index: Range<u64>,
}

/// A file, for comparison with the description in its sidecar.
pub(super) struct DescribedFile<'a> {
    pub(super) path: &'a Path,
    pub(super) records: &'a [Extent],
    pub(super) frame: Frame,
    /// The coverage if the sidecar describes another file.
    pub(super) if_frame_differs: Coverage,
}

impl FileChecksums {
    /// Creates the state of a file without deepnvme's checksums.
    pub(super) fn none(coverage: Coverage, index: Range<u64>) -> Self {
        Self { chunks: None, coverage, refused: None, index }
    }

    /// Creates the state of a file whose checksums are damaged or of a later version.
    pub(super) fn refused(error: Error, index: Range<u64>) -> Self {
        Self { chunks: None, coverage: Coverage::File, refused: Some(error), index }
    }

    /// Creates the state of a file with a sidecar. `check` compares the index with its checksum.
    pub(super) fn new(
        file: &DescribedFile<'_>,
        sidecar: FormatResult<Sidecar>,
        check: impl FnOnce(u64) -> Result<()>,
    ) -> Self {
        let DescribedFile { path, records, frame, if_frame_differs } = *file;
        let index = frame.index_offset..frame.index_offset + frame.index_bytes;
        let refuse = |error| Self::refused(Error::format(path, error), index.clone());
        let Sidecar { records: checksums, index: index_checksum } = match sidecar {
            Ok(sidecar) => sidecar,
            Err(error) => return refuse(error),
        };
        let coverage = if index_checksum.is_some() { Coverage::File } else { Coverage::Data };
        if index_checksum.is_some_and(|checksum| checksum.frame != frame) {
            return Self::none(if_frame_differs, index);
        }
        let refused = index_checksum.and_then(|checksum| check(checksum.index_crc64).err());
        match (refused, by_name(checksums, records)) {
            (Some(error), _) => Self::refused(error, index),
            (None, Ok(chunks)) => Self { chunks: Some(chunks), coverage, refused: None, index },
            (None, Err(error)) => refuse(error),
        }
    }

    /// Returns whether an archive's headers must be those that deepnvme writes.
    pub(super) fn covers_headers(&self) -> bool {
        self.coverage == Coverage::File && self.refused.is_none()
    }
}

/// Maps names to the chunk checksums of a sidecar. Each record must have one per chunk.
fn by_name(checksums: Vec<SidecarRecord>, records: &[Extent]) -> FormatResult<HashMap<String, Vec<u64>>> {
    let checksums: HashMap<String, Vec<u64>> =
        checksums.into_iter().map(|record| (record.name, record.chunks)).collect();
    for record in records {
        let count = checksums.get(&record.name).map(Vec::len);
        if count != Some(chunk_count(record.bytes)) {
            let what = format!("the checksums have {count:?} chunks for {:?} of {} bytes", record.name, record.bytes);
            return Err(FormatError::Corrupt { offset: record.data_offset, what });
        }
    }
    Ok(checksums)
}

/// Reads the checksums of a safetensors file. `header` is everything before the first tensor.
pub(super) fn of_header(path: &Path, text: &str, header: &[u8], file_bytes: u64, tensors: &[Extent]) -> FileChecksums {
    let index_bytes = header.len() as u64;
    let spaces = header.iter().rev().take_while(|byte| matches!(byte, b' ' | b'\t' | b'\n' | b'\r')).count() as u64;
    let sidecar = checksums::decode(text.as_bytes());
    let has_index_checksum = sidecar.as_ref().is_ok_and(|sidecar| sidecar.index.is_some());
    // Damage cannot make our header look foreign: a damaged length would contradict the file's size, and damaged
    // padding would not be JSON. Both were refused before this call.
    let is_foreign = !index_bytes.is_multiple_of(ALIGNMENT_LARGE) || (has_index_checksum && spaces < PADDING_BYTES_MIN);
    if is_foreign {
        return FileChecksums::none(Coverage::Stale, 0..index_bytes);
    }
    let check = |saved| {
        let computed = quoted_digits(header).map(|digits| covered_sum(header, &[digits]));
        if computed == Some(saved) {
            return Ok(());
        }
        Err(damaged(path, DamagedPart::Unnamed("the header"), 0..index_bytes, "CRC-64"))
    };
    let frame = Frame { file_bytes, index_offset: 0, index_bytes };
    let file = DescribedFile { path, records: tensors, frame, if_frame_differs: Coverage::Stale };
    FileChecksums::new(&file, sidecar, check)
}

/// Compares the header of a record with the one that deepnvme writes.
pub(super) fn compare_header(path: &Path, record: &Extent, header: &[u8]) -> Result<()> {
    let written = local_header(&record.record_name, record.bytes, record.crc32.unwrap_or(0), header.len() as u64);
    if written.as_deref() == Some(header) {
        return Ok(());
    }
    let place = record.header_offset..record.header_offset + header.len() as u64;
    Err(damaged(path, DamagedPart::record(&record.name), place, "the header of the record"))
}

/// Creates the error for a damaged range. `detail` tells how the damage was noticed.
pub(super) fn damaged(path: &Path, part: DamagedPart, range: Range<u64>, detail: &'static str) -> Error {
    Error::Damaged { path: path.to_path_buf(), part, offset: range.start, bytes: range.end - range.start, detail }
}
