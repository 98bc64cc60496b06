//! The layout and data of a file to write. Each piece is assembled independently in a slot and hashed while it is in
//! the CPU cache.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use deepnvme_format::checksums::{CHUNK_BYTES, Hasher, RecordChecksums, checksums_of, chunk_count};
use deepnvme_io::mem::{Device, Slot};
use deepnvme_io::{GpuAccess, StreamEvents};

use super::data_source::{DataSource, LoadedPart, Place};
use super::hashed_record::HashedRecord;
use super::spans::{Content, FileSpan, Pieces, Spans};
use super::{PIECE_BYTES, STEP_BYTES, checksum_exchange};
use crate::error::{Error, Result};
use crate::sync::{Mutex, OnceLock, lock};

/// Renders the headers of a file format once the checksums are known.
pub(super) trait HeaderRenderer: Send + Sync {
    /// Returns the name of a record.
    fn name(&self, record: usize) -> &str;
    /// Renders the header of a record.
    fn header(&self, record: usize, crc32: u32) -> Vec<u8>;
    /// Renders the index, which contains all checksums that the file stores.
    fn index(&self, checksums: &[RecordChecksums]) -> Vec<u8>;
}

/// The layout of a file, with the sources of its data.
pub(super) struct FileLayout {
    spans: Spans,
    records: Vec<HashedRecord>,
    /// The sources of the records' data, until they are released.
    sources: Mutex<Arc<[DataSource]>>,
    headers: Box<dyn HeaderRenderer>,
    /// The rendered index, once all checksums are known.
    index: OnceLock<Vec<u8>>,
    /// The file, for errors.
    path: PathBuf,
}

impl FileLayout {
    /// Creates a layout of records in the order of their spans.
    pub(super) fn new(path: &Path, spans: Spans, sources: Vec<DataSource>, headers: Box<dyn HeaderRenderer>) -> Self {
        let records = sources.iter().map(|source| HashedRecord::new(source.bytes())).collect();
        let sources = Mutex::new(sources.into());
        Self { spans, records, sources, headers, index: OnceLock::new(), path: path.to_path_buf() }
    }

    fn sources(&self) -> Arc<[DataSource]> {
        let sources = lock(&self.sources);
        Arc::clone(&sources)
    }

    /// Lets go of the records' memory. No piece can be assembled afterwards.
    pub(super) fn release_sources(&self) {
        let released = std::mem::replace(&mut *lock(&self.sources), Arc::from([]));
        drop(released);
    }

    /// Returns the size of the file.
    pub(super) fn bytes(&self) -> u64 {
        self.spans.file_bytes()
    }

    /// Returns whether some data must be read from a file.
    pub(super) fn is_on_disk(&self) -> bool {
        self.sources().iter().any(DataSource::is_on_disk)
    }

    /// Returns the access to GPUs and the index of the first one, if any data is on a GPU.
    pub(super) fn gpu(&self) -> Option<(GpuAccess, u32)> {
        self.sources().iter().find_map(|source| match &source.place {
            Place::Gpu(gpu) => match gpu.memory.device() {
                Device::Cuda { index } => Some((gpu.access.clone(), index)),
                Device::Host => None,
            },
            _ => None,
        })
    }

    /// Records the points in GPU streams after which their memory may be read.
    pub(super) fn record_events(&self) -> Result<StreamEvents> {
        let sources = self.sources();
        let memory = sources.iter().filter_map(|source| match &source.place {
            Place::Gpu(gpu) => Some(&gpu.memory),
            _ => None,
        });
        self.gpu().map_or_else(|| Ok(StreamEvents::default()), |(access, _)| Ok(access.record_events(memory)?))
    }

    /// Returns the offset and the bytes of the index, once the checksums are finished.
    pub(super) fn index(&self) -> (u64, &[u8]) {
        (self.spans.offset_of_index().unwrap_or(0), self.index.get().map_or(&[][..], Vec::as_slice))
    }

    /// Returns the names of the records, in file order.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        (0..self.records.len()).map(|record| self.headers.name(record))
    }

    /// Returns the CRC-64 of the index with blank checksums: of all names, sizes and offsets. Writers for which it is
    /// equal may each write a part of the file.
    pub(super) fn crc64(&self) -> u64 {
        let blank = |record: &HashedRecord| RecordChecksums { crc32: 0, chunks: vec![0; chunk_count(record.bytes())] };
        let blank: Vec<RecordChecksums> = self.records.iter().map(blank).collect();
        checksums_of(&self.headers.index(&blank)).crc64
    }

    /// Splits a range of the file into pieces to write immediately and pieces that need the checksums of large records.
    pub(super) fn pieces(&self, range: &Range<u64>) -> Pieces {
        let is_late = |content| match content {
            Content::Header(record) => !self.records[record].is_small(),
            Content::Index => true,
            Content::Record(_) | Content::Gap => false,
        };
        self.spans.pieces(PIECE_BYTES, is_late).within(range)
    }

    /// Assembles a piece at the start of a slot.
    pub(super) fn fill(&self, piece: &Range<u64>, slot: &mut Slot) -> Result<()> {
        let (spans, sources) = (self.spans.within(piece), self.sources());
        fetch(spans, &sources, piece, slot)?;
        // Records first: a small record is hashed in the slot, and its header needs the checksum.
        for span in spans {
            let (within, at) = overlap(span, piece);
            match span.content {
                Content::Record(record) => copy(&self.records[record], &sources[record], within, at, slot)?,
                Content::Gap => slot.as_mut_slice()[at..][..(within.end - within.start) as usize].fill(0),
                Content::Header(_) | Content::Index => {}
            }
        }
        for span in spans {
            let (within, at) = overlap(span, piece);
            let within = within.start as usize..within.end as usize;
            let target = &mut slot.as_mut_slice()[at..][..within.len()];
            match span.content {
                Content::Header(record) => {
                    let crc32 = self.records[record].crc32(&sources[record])?;
                    target.copy_from_slice(&self.headers.header(record, crc32)[within]);
                }
                Content::Index => target.copy_from_slice(&self.index.get().map_or(&[][..], Vec::as_slice)[within]),
                Content::Record(_) | Content::Gap => {}
            }
        }
        Ok(())
    }

    /// Hashes the parts of large records in late pieces before these are assembled: the headers and the index in them
    /// contain the checksums.
    pub(super) fn hash_late(&self, pieces: &[Range<u64>]) -> Result<()> {
        let (mut scratch, sources) = (Vec::new(), self.sources());
        for piece in pieces {
            for span in self.spans.within(piece) {
                let Content::Record(record) = span.content else { continue };
                let (record, source) = (&self.records[record], &sources[record]);
                if record.is_small() {
                    continue;
                }
                let (within, _) = overlap(span, piece);
                let LoadedPart { memory, start } = source.load(&within)?;
                for chunk in cut(&within, CHUNK_BYTES) {
                    scratch.resize((chunk.end - chunk.start) as usize, 0);
                    memory.copy_to_slice((chunk.start - start) as usize, &mut scratch);
                    source.flip(chunk.start, &mut scratch);
                    record.note(chunk.start, checksums_of(&scratch));
                }
            }
        }
        Ok(())
    }

    /// Encodes the checksums known so far, for the writers of the other shards.
    pub(super) fn encode_checksums(&self) -> Vec<u8> {
        let noted = |(record, hashed): (usize, &HashedRecord)| {
            hashed.noted().into_iter().map(move |(offset, part)| checksum_exchange::ExchangedChecksums {
                record,
                offset,
                part,
            })
        };
        checksum_exchange::encode(self.records.iter().enumerate().flat_map(noted))
    }

    /// Adds the checksums of another writer.
    pub(super) fn add_checksums(&self, encoded: &[u8]) -> Result<()> {
        let refused = |error| Error::format(&self.path, error);
        for checksum_exchange::ExchangedChecksums { record, offset, part } in
            checksum_exchange::decode(encoded).map_err(refused)?
        {
            let known = self
                .records
                .get(record)
                .filter(|known| offset.checked_add(part.bytes).is_some_and(|end| end <= known.bytes()));
            let unknown = || {
                let what = format!("another writer knows of {} bytes at {offset} of a record {record}", part.bytes);
                deepnvme_format::Error::Invalid(what)
            };
            known.ok_or_else(unknown).map_err(refused)?.note(offset, part);
        }
        Ok(())
    }

    /// Returns the checksums of a record, once all are finished.
    pub(super) fn checksums(&self, record: usize) -> Result<&RecordChecksums> {
        self.records[record].finished().ok_or_else(|| {
            let text = format!("record {record} has not been hashed yet");
            Error::format(&self.path, deepnvme_format::Error::Invalid(text))
        })
    }

    /// Combines all checksums and renders the index.
    pub(super) fn finish_checksums(&self) -> Result<()> {
        let sources = self.sources();
        let each = self.records.iter().zip(sources.iter());
        let checksums: Vec<RecordChecksums> =
            each.map(|(record, source)| record.finish(source, &self.path).cloned()).collect::<Result<_>>()?;
        let _ = self.index.set(self.headers.index(&checksums));
        Ok(())
    }
}

/// Copies the GPU data of a piece into its slot, in one batch.
fn fetch(spans: &[FileSpan], sources: &[DataSource], piece: &Range<u64>, slot: &mut Slot) -> Result<()> {
    let mut parts = Vec::new();
    let mut access = None;
    for span in spans {
        let Content::Record(record) = span.content else { continue };
        let Place::Gpu(gpu) = &sources[record].place else { continue };
        let (within, at) = overlap(span, piece);
        parts.push((at, &gpu.memory, within.start as usize, (within.end - within.start) as usize));
        access = Some(&gpu.access);
    }
    access.map_or(Ok(()), |access| Ok(access.gather(slot, &parts)?))
}

/// Copies a part of a record into the slot, flips its signs and hashes it there. GPU data is in the slot already. A
/// small record is hashed only if it is whole.
fn copy(record: &HashedRecord, source: &DataSource, range: Range<u64>, at: usize, slot: &mut Slot) -> Result<()> {
    let loaded = match &source.place {
        Place::Gpu(_) => None,
        _ => Some(source.load(&range)?),
    };
    let is_whole = range == (0..record.bytes());
    for chunk in cut(&range, CHUNK_BYTES) {
        let mut hasher = Hasher::default();
        for step in cut(&chunk, STEP_BYTES) {
            let (to, len) = (at + (step.start - range.start) as usize, (step.end - step.start) as usize);
            if let Some(LoadedPart { memory, start }) = &loaded {
                slot.gather(to, memory, (step.start - start) as usize, len);
            }
            source.flip(step.start, &mut slot.as_mut_slice()[to..to + len]);
            if !record.is_small() || is_whole {
                hasher.update(&slot.as_slice()[to..to + len]);
            }
        }
        record.note(chunk.start, hasher.finish());
    }
    Ok(())
}

/// Returns the range of a span that a piece contains, relative to the span, and its offset in the piece.
fn overlap(span: &FileSpan, piece: &Range<u64>) -> (Range<u64>, usize) {
    let (start, end) = (span.offset.max(piece.start), span.end().min(piece.end));
    (start - span.offset..end - span.offset, (start - piece.start) as usize)
}

/// Splits a range at multiples of `every`.
fn cut(range: &Range<u64>, every: u64) -> impl Iterator<Item = Range<u64>> + use<> {
    let (mut at, end) = (range.start, range.end);
    std::iter::from_fn(move || {
        if at == end {
            return None;
        }
        let next = ((at / every + 1) * every).min(end);
        Some(std::mem::replace(&mut at, next)..next)
    })
}
