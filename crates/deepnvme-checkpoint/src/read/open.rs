//! The parser of a file's metadata, with two reads if possible.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use deepnvme_file::Target;
use deepnvme_format::archive::{
    self, Directory, ENTRY_CRC32, HEADER_CRC32, LOCAL_BYTES, LocalHeader, PICKLE, Record, STORAGES, TAIL_BYTES_MAX,
};
use deepnvme_format::checksums::{self, CHUNK_BYTES, Frame, INDEX_DIGITS, METADATA_KEY, SIDECAR};
use deepnvme_format::pickle::{self, PICKLE_BYTES_MAX};
use deepnvme_format::safetensors::{self, LENGTH_BYTES};
use deepnvme_format::state::PickledState;
use deepnvme_format::{Error as FormatError, Result as FormatResult};
use deepnvme_io::mem::RegionMut;
use deepnvme_io::op::Errno;
use deepnvme_io::{Access, Engine, OpenOptions, ReadItem, TensorFile};

use super::extent::{ELEMENT_ALIGNMENT, Extent, HEADER_BYTES_MAX, header_of};
use super::file_checksums::{self, Coverage, DescribedFile, FileChecksums};
use super::folder::with_hub_hint;
use super::{FileMetadata, FileStamp, INDEX_BYTES_MAX, Reader, load_buffer, stamps_of};
use crate::error::{DamagedPart, Error, Result};

/// Bytes to read from the start before the format is known.
const HEAD_BYTES: u64 = 128 << 10;
/// Bytes to read from the end.
const TAIL_BYTES: u64 = 512 << 10;
/// Maximum size of a sidecar: 16 digits for each MiB of a file of many terabytes.
const SIDECAR_BYTES_MAX: u64 = 256 << 20;

/// Maximum size of a non-storage record that is verified on open.
const OTHER_BYTES_MAX: u64 = 1 << 20;
/// Maximum total size of these records. A full verify compares the rest.
const OTHERS_BYTES_MAX: u64 = 64 << 20;

const ZIP_MAGIC: &[u8] = b"PK\x03\x04";
/// The record that only archives of TorchScript have.
const SCRIPT_CONSTANTS: &str = "constants.pkl";

impl Reader {
    /// Opens a file and reads its metadata.
    ///
    /// # Errors
    /// `Io` for errors of the file system. `Damaged` if the objects or another small record differ from their CRC-32.
    /// `Format` for a damaged file or another format. The text names the format and the remedy.
    pub fn open(engine: &Engine, target: &Target) -> Result<Self> {
        let options = OpenOptions { access: Access::Read, create: false, direct: engine.config().direct };
        let file = deepnvme_file::open(target, options).map_err(with_hub_hint)?;
        let path = target.path();
        let file_bytes = file.len()?;
        let source = FileEnds::new(engine, file, file_bytes)?;
        let mut reader = source.read_all().map_err(|error| match error {
            Failure::Format(error) => Error::format(&path, error),
            Failure::Other(error) => error,
        })?;
        // A record at an unusual offset: read its header to find its data. Such records are rare, or a single one at
        // the end.
        let misaligned = reader.extents().iter().enumerate().filter(|(_, extent)| !load_buffer::is_mirrored(extent));
        let misaligned: Vec<usize> = misaligned.map(|(index, _)| index).collect();
        if !misaligned.is_empty() {
            reader.resolve(engine, &misaligned)?;
        }
        Ok(reader)
    }
}

/// The parsed metadata of a file.
struct ParsedFile {
    metadata: FileMetadata,
    /// The extents, followed by an archive's other records.
    records: Vec<Extent>,
    extent_count: usize,
    checksums: FileChecksums,
}

enum Failure {
    Format(FormatError),
    Other(Error),
}

impl From<FormatError> for Failure {
    fn from(error: FormatError) -> Self {
        Self::Format(error)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Other(error)
    }
}

/// A file of which both ends have been read.
struct FileEnds<'a> {
    engine: &'a Engine,
    file: Arc<TensorFile>,
    file_bytes: u64,
    stamps: Vec<FileStamp>,
    head: Vec<u8>,
    tail: Vec<u8>,
}

impl<'a> FileEnds<'a> {
    fn new(engine: &'a Engine, file: Arc<TensorFile>, file_bytes: u64) -> Result<Self> {
        let stamps = stamps_of(&file)?;
        let head_bytes = HEAD_BYTES.min(file_bytes);
        let tail_bytes = TAIL_BYTES.max(TAIL_BYTES_MAX).min(file_bytes);
        let mut ends = read_ranges(engine, &file, &[0..head_bytes, file_bytes - tail_bytes..file_bytes])?;
        let (tail, head) = (ends.pop().unwrap_or_default(), ends.pop().unwrap_or_default());
        Ok(Self { engine, file, file_bytes, stamps, head, tail })
    }

    fn read_all(self) -> Result<Reader, Failure> {
        let ParsedFile { metadata, records, extent_count, checksums } = if self.head.starts_with(ZIP_MAGIC) {
            self.archive()?
        } else if self.head.get(LENGTH_BYTES as usize) == Some(&b'{') {
            self.safetensors()?
        } else {
            return Err(describe_foreign(&self.head, self.file_bytes).into());
        };
        let Self { file, file_bytes, stamps, .. } = self;
        let path = file.path().to_path_buf();
        Ok(Reader { path, file, file_bytes, metadata, records, extent_count, is_resolved: false, stamps, checksums })
    }

    /// Returns bytes of the file, from the ends read already if possible.
    fn bytes(&self, range: Range<u64>) -> Result<Vec<u8>> {
        let tail_offset = self.file_bytes - self.tail.len() as u64;
        if range.end <= self.head.len() as u64 {
            return Ok(self.head[range.start as usize..range.end as usize].to_vec());
        }
        if range.start >= tail_offset {
            return Ok(self.tail[(range.start - tail_offset) as usize..(range.end - tail_offset) as usize].to_vec());
        }
        Ok(read_ranges(self.engine, &self.file, &[range])?.pop().unwrap_or_default())
    }

    /// Returns several byte ranges. Reads the missing ones in one batch.
    fn all_bytes(&self, ranges: &[Range<u64>]) -> Result<Vec<Vec<u8>>> {
        let tail_offset = self.file_bytes - self.tail.len() as u64;
        let is_there = |range: &Range<u64>| range.end <= self.head.len() as u64 || range.start >= tail_offset;
        let missing: Vec<Range<u64>> = ranges.iter().filter(|range| !is_there(range)).cloned().collect();
        let read = if missing.is_empty() { Vec::new() } else { read_ranges(self.engine, &self.file, &missing)? };
        let mut read = read.into_iter();
        let bytes = |range: &Range<u64>| match is_there(range) {
            true => self.bytes(range.clone()),
            false => Ok(read.next().unwrap_or_default()),
        };
        ranges.iter().map(bytes).collect()
    }

    fn archive(&self) -> Result<ParsedFile, Failure> {
        let end = archive::find_end(&self.tail, self.file_bytes - self.tail.len() as u64)?;
        let directory_range = end.directory_offset..end.directory_offset + end.directory_bytes;
        let bytes = self.bytes(directory_range)?;
        let directory = match Directory::parse(&bytes, end, self.file_bytes) {
            // torch compresses the code of a script.
            Err(FormatError::Unsupported(_)) if contains(&bytes, SCRIPT_CONSTANTS) => return Err(of_script().into()),
            parsed => parsed?,
        };
        let Some(pickle_record) = directory.find(PICKLE) else { return Err(describe_zip(&directory).into()) };
        if directory.find(SCRIPT_CONSTANTS).is_some() {
            return Err(of_script().into());
        }
        if let Some(record) = directory.find("byteorder")
            && self.record(record, 16)? != b"little"
        {
            return Err(
                FormatError::Unsupported("the tensors are big-endian; load the file with torch.load".into()).into()
            );
        }
        let graph = pickle::parse(&self.record(pickle_record, PICKLE_BYTES_MAX)?)?;
        let state = PickledState::of(&graph)?;
        let mut records = storages(&directory, &state)?;
        let extent_count = records.len();
        records.extend(others(&directory, &records));
        let checksums = match directory.find(SIDECAR) {
            Some(record) => self.archive_checksums(record, &records, extent_count)?,
            None => self.without_sidecar(&records, end.directory_offset..self.file_bytes)?,
        };
        Ok(ParsedFile { metadata: FileMetadata::Archive { graph, state }, records, extent_count, checksums })
    }

    /// Checks the header of the last record: a sidecar whose name in the directory is damaged is still named there.
    fn without_sidecar(&self, records: &[Extent], index: Range<u64>) -> Result<FileChecksums, Failure> {
        let Some(last) = records.iter().max_by_key(|record| record.header_offset) else {
            return Ok(FileChecksums::none(Coverage::Data, index));
        };
        let header_bytes = LOCAL_BYTES + last.record_name.len() as u64;
        let bytes = self.bytes(last.header_offset..(last.header_offset + header_bytes).min(self.file_bytes))?;
        Ok(match header_of(self.file.path(), last, &bytes) {
            Ok(_) => FileChecksums::none(Coverage::Data, index),
            Err(error) => FileChecksums::refused(error, index),
        })
    }

    /// Verifies the parts of an archive that the sidecar covers and that no load reads: the index, the short
    /// non-storages, and the headers of empty storages.
    fn archive_checksums(
        &self,
        record: &Record,
        records: &[Extent],
        extent_count: usize,
    ) -> Result<FileChecksums, Failure> {
        let path = self.file.path();
        let index = record.header_offset..self.file_bytes;
        let text = match self.record(record, SIDECAR_BYTES_MAX) {
            Ok(text) => text,
            Err(Failure::Other(error @ Error::Damaged { .. })) => return Ok(FileChecksums::refused(error, index)),
            Err(failure) => return Err(failure),
        };
        let index_bytes = index.end - index.start;
        let frame = Frame { file_bytes: self.file_bytes, index_offset: index.start, index_bytes };
        let sidecar = checksums::decode(&text);
        let is_last = records.iter().all(|other| other.header_offset <= index.start);
        if let Ok(checksums::Sidecar { index: Some(index_checksum), .. }) = &sidecar
            && index_checksum.frame != frame
            && index_checksum.frame.index_offset == frame.index_offset
            && is_last
        {
            // Rewriting by another program moves the record or appends others, so this is damage.
            return Ok(FileChecksums::refused(
                file_checksums::damaged(path, DamagedPart::Unnamed("the index"), index.clone(), "the size of the file"),
                index,
            ));
        }
        let check = |saved| self.compare_index(record, index.clone(), saved);
        let file = DescribedFile { path, records, frame, if_frame_differs: Coverage::Data };
        let checksums = FileChecksums::new(&file, sidecar, check);
        if !checksums.covers_headers() {
            return Ok(checksums);
        }
        match self.compare_others(records, extent_count, &checksums) {
            Ok(()) => Ok(checksums),
            Err(error @ Error::Damaged { .. }) => Ok(FileChecksums::refused(error, index)),
            Err(error) => Err(error.into()),
        }
    }

    /// Compares the sidecar, the directory and the bytes between with their checksum.
    fn compare_index(&self, record: &Record, index: Range<u64>, saved: u64) -> Result<()> {
        let path = self.file.path();
        let part = DamagedPart::Unnamed("the directory of the archive");
        let damaged = || file_checksums::damaged(path, part.clone(), index.clone(), "CRC-64");
        if index.end - index.start > INDEX_BYTES_MAX {
            return Err(damaged());
        }
        let bytes = self.bytes(index.clone())?;
        let header = LocalHeader::parse(&bytes, index.start).ok().flatten().ok_or_else(damaged)?;
        let header_bytes = header.header_bytes as usize;
        // The sum excludes the sidecar's CRC-32, which was compared with the text.
        let is_header = archive::local_header(&record.name, record.bytes, record.crc32, header.header_bytes)
            .is_some_and(|written| bytes.starts_with(&written));
        let entry_at = record.entry_offset.checked_sub(index.start).ok_or_else(damaged)? as usize;
        let digits = header_bytes + INDEX_DIGITS.start..header_bytes + INDEX_DIGITS.end;
        let entry_crc32 = entry_at + ENTRY_CRC32.start..entry_at + ENTRY_CRC32.end;
        if is_header && checksums::covered_sum(&bytes, &[HEADER_CRC32, digits, entry_crc32]) == saved {
            return Ok(());
        }
        Err(damaged())
    }

    /// Compares the non-storage records, and the headers of empty storages, which no load reads.
    fn compare_others(&self, records: &[Extent], extent_count: usize, checksums: &FileChecksums) -> Result<()> {
        let path = self.file.path();
        if records.iter().all(|record| record.header_offset > 0) {
            return Err(file_checksums::damaged(
                path,
                DamagedPart::Unnamed("the beginning of the archive"),
                0..LOCAL_BYTES,
                "no record begins there",
            ));
        }
        // The pickle was compared with its CRC-32. Long records are left to a full verify.
        let is_read = |record: &Extent| record.bytes <= OTHER_BYTES_MAX && record.name != PICKLE;
        // Bounds the memory that a malicious file can request.
        let mut left = OTHERS_BYTES_MAX;
        let wanted: Vec<&Extent> = records[..extent_count]
            .iter()
            .filter(|record| record.bytes == 0)
            .chain(&records[extent_count..])
            .take_while(|record| {
                let bytes = record.end() - record.header_offset;
                left = left.saturating_sub(if is_read(record) { bytes } else { bytes - record.bytes });
                left > 0
            })
            .collect();
        let range =
            |record: &&Extent| record.header_offset..if is_read(record) { record.end() } else { record.data_offset };
        let ranges: Vec<Range<u64>> = wanted.iter().map(range).collect();
        for (record, bytes) in wanted.iter().zip(self.all_bytes(&ranges)?) {
            let (header, data) = bytes.split_at((record.data_offset - record.header_offset) as usize);
            file_checksums::compare_header(path, record, header)?;
            let chunks =
                checksums.chunks.as_ref().and_then(|saved| saved.get(&record.name)).map_or(&[][..], Vec::as_slice);
            let differs = |(chunk, saved): (&[u8], &u64)| checksums::covered_sum(chunk, &[]) != *saved;
            if data.chunks(CHUNK_BYTES as usize).zip(chunks).any(differs) {
                return Err(file_checksums::damaged(
                    path,
                    DamagedPart::record(&record.name),
                    record.data_offset..record.end(),
                    "CRC-64",
                ));
            }
        }
        Ok(())
    }

    /// Reads a record of at most `bytes_max` and compares it with its CRC-32.
    fn record(&self, record: &Record, bytes_max: u64) -> Result<Vec<u8>, Failure> {
        if record.bytes > bytes_max {
            let text = format!("the record {:?} has {} bytes; at most {bytes_max} are read", record.name, record.bytes);
            return Err(FormatError::Unsupported(text).into());
        }
        // One read includes the header: its padding is short, unless the first estimate is off.
        let header_bytes_max = (record.data_offset - record.header_offset).min(HEADER_BYTES_MAX);
        let range = record.header_offset..(record.header_offset + header_bytes_max + record.bytes).min(self.file_bytes);
        let mut bytes = self.bytes(range)?;
        let lost = || FormatError::Corrupt {
            offset: record.header_offset,
            what: format!("the header there is not the one of {:?}, which the directory names", record.name),
        };
        let header = LocalHeader::parse(&bytes, record.header_offset)?.ok_or_else(lost)?;
        let from = header.header_bytes as usize;
        let data = bytes.get(from..from + record.bytes as usize).filter(|_| header.name == record.name.as_bytes());
        let data = data.ok_or_else(lost)?;
        if checksums::checksums_of(data).crc32 != record.crc32 {
            let (part, offset) = (DamagedPart::record(&record.name), record.header_offset + header.header_bytes);
            return Err(file_checksums::damaged(self.file.path(), part, offset..offset + record.bytes, "CRC-32").into());
        }
        bytes.drain(..from);
        bytes.truncate(record.bytes as usize);
        Ok(bytes)
    }

    fn safetensors(&self) -> Result<ParsedFile, Failure> {
        let mut length = [0; LENGTH_BYTES as usize];
        length.copy_from_slice(&self.head[..LENGTH_BYTES as usize]);
        let json_bytes = safetensors::Header::json_bytes(length, self.file_bytes)?;
        let json = self.bytes(LENGTH_BYTES..LENGTH_BYTES + json_bytes)?;
        let header = safetensors::Header::parse(&json, self.file_bytes)?;
        let extent = |tensor: &safetensors::Tensor| Extent {
            name: tensor.name.clone(),
            header_offset: tensor.offset,
            data_offset: tensor.offset,
            bytes: tensor.bytes,
            crc32: None,
            record_name: String::new(),
            alignment: tensor.dtype.bytes().clamp(1, ELEMENT_ALIGNMENT),
        };
        let extents: Vec<Extent> = header.tensors.iter().map(extent).collect();
        let data_offset = LENGTH_BYTES + json_bytes;
        let checksums = match header.metadata.iter().find(|(key, _)| key == METADATA_KEY) {
            Some((_, text)) => {
                let region = self.bytes(0..data_offset)?;
                file_checksums::of_header(self.file.path(), text, &region, self.file_bytes, &extents)
            }
            None => FileChecksums::none(Coverage::Nothing, 0..data_offset),
        };
        Ok(ParsedFile {
            metadata: FileMetadata::Safetensors { header },
            extent_count: extents.len(),
            records: extents,
            checksums,
        })
    }
}

/// Returns the records of the storages, in the order of the state.
fn storages(directory: &Directory, state: &PickledState) -> FormatResult<Vec<Extent>> {
    let extent = |storage: &deepnvme_format::state::Storage| {
        let name = format!("{STORAGES}{}", storage.key);
        let corrupt = |offset, what| Err(FormatError::Corrupt { offset, what });
        let Some(record) = directory.find(&name) else {
            return corrupt(0, format!("the archive has no record {name:?}, which its objects refer to"));
        };
        if record.bytes != storage.bytes {
            let what = format!("the record {name:?} has {} bytes, and its objects say {}", record.bytes, storage.bytes);
            return corrupt(record.header_offset, what);
        }
        Ok(Extent::of_record(name, record))
    };
    state.storages.iter().map(extent).collect()
}

/// Returns the records that are not storages of the state. The sidecar is not among them: the index checksum covers it.
fn others(directory: &Directory, storages: &[Extent]) -> Vec<Extent> {
    let known: HashSet<&str> = storages.iter().map(|storage| storage.record_name.as_str()).collect();
    let sidecar = directory.find(SIDECAR).map(|record| record.name.as_str());
    let others = directory.records().iter().filter(|record| {
        let name = record.name.as_str();
        !known.contains(name) && sidecar != Some(name)
    });
    let root = format!("{}/", directory.root());
    let name = |record: &Record| record.name.strip_prefix(&root).unwrap_or(&record.name).to_owned();
    others.map(|record| Extent::of_record(name(record), record)).collect()
}

/// The refusal of a file that `torch.jit.save` wrote.
fn of_script() -> FormatError {
    FormatError::Unsupported("this is a TorchScript archive, which holds code; load it with torch.jit.load".into())
}

fn contains(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|window| window == text.as_bytes())
}

/// Describes a ZIP file that contains no objects.
fn describe_zip(directory: &Directory) -> FormatError {
    let names: HashSet<&str> = directory.records().iter().filter_map(|record| record.name.rsplit('/').next()).collect();
    let text = if names.iter().any(|name| name.ends_with(".npy")) {
        "this is an .npz file; load it with numpy.load"
    } else {
        "this ZIP file has no record data.pkl, so that it is not a torch archive"
    };
    FormatError::Unsupported(text.into())
}

/// The bytes of the smallest checkpoint: a safetensors file with the header `{}`.
const CHECKPOINT_BYTES_MIN: u64 = 10;

/// Describes a file that is neither an archive nor safetensors.
fn describe_foreign(head: &[u8], file_bytes: u64) -> FormatError {
    let text = if file_bytes == 0 {
        let what = "the file is empty, perhaps since its writer was interrupted".into();
        return FormatError::Corrupt { offset: 0, what };
    } else if head.starts_with(b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19") {
        "this is a torch file of the old format (before torch 1.6, or _use_new_zipfile_serialization=False); load it with \
         torch.load and save it with deepnvme.save"
    } else if head.starts_with(b"\x80") {
        "this is a bare pickle, not a torch archive; load it with what wrote it"
    } else if head.starts_with(b"GGUF") {
        "this is a GGUF file, which deepnvme does not read"
    } else if head.starts_with(b"\x93NUMPY") {
        "this is an .npy file; load it with numpy.load"
    } else if head.starts_with(b"\x89HDF") {
        "this is an HDF5 file; load it with h5py"
    } else if file_bytes < CHECKPOINT_BYTES_MIN {
        let what = format!("the file has only {file_bytes} bytes, perhaps since it was truncated");
        return FormatError::Corrupt { offset: 0, what };
    } else {
        "this is neither a torch archive nor a safetensors file; name a file of deepnvme.save, torch.save or safetensors"
    };
    FormatError::Unsupported(text.into())
}

fn read_ranges(engine: &Engine, file: &Arc<TensorFile>, ranges: &[Range<u64>]) -> Result<Vec<Vec<u8>>> {
    let item = |range: &Range<u64>| {
        let target = RegionMut::from_vec(zeroed(file, (range.end - range.start) as usize)?);
        Ok(ReadItem { file: Arc::clone(file), offset: range.start, target })
    };
    let (regions, read) = engine.read_batch(ranges.iter().map(item).collect::<Result<_>>()?)?.wait();
    read?;
    let bytes = |region: RegionMut| {
        let mut bytes = zeroed(file, region.len())?;
        region.region().copy_to_slice(0, &mut bytes);
        Ok(bytes)
    };
    regions.unwrap_or_default().into_iter().map(bytes).collect()
}

/// Allocates memory for metadata. Returns an error if memory is short.
fn zeroed(file: &TensorFile, bytes: usize) -> Result<Vec<u8>> {
    let mut memory = Vec::new();
    let refused = |_| Error::Io(deepnvme_io::Error::os("read", Errno::NOMEM).at_path(file.path()));
    memory.try_reserve_exact(bytes).map_err(refused)?;
    memory.resize(bytes, 0);
    Ok(memory)
}
