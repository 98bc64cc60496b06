//! Finding out what a file holds, in two reads where the file allows it.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use deepnvme_format::archive::{self, Directory, Header, LOCAL_BYTES, PICKLE, Record, STORAGES, TAIL_BYTES_MAX};
use deepnvme_format::pickle::{self, PICKLE_BYTES_MAX};
use deepnvme_format::safetensors::{self, LENGTH_BYTES};
use deepnvme_format::state::State;
use deepnvme_format::sums::{self, METADATA_KEY, SIDE_CAR, cell_count};
use deepnvme_format::{Error as FormatError, Result as FormatResult};
use deepnvme_io::mem::RegionMut;
use deepnvme_io::{Access, Engine, OpenOptions, ReadItem, Target, TensorFile};

use super::{Contents, Extent, Reader, arena};
use crate::error::{Error, Result};

/// What is read of the beginning before anything is known.
const HEAD_BYTES: u64 = 128 << 10;
/// What is read of the end.
const TAIL_BYTES: u64 = 512 << 10;
/// What a side-car has at most: 16 digits for each MiB of a file of many terabytes.
const SIDE_CAR_BYTES_MAX: u64 = 256 << 20;

/// The longest header: name and extra field have 16-bit lengths.
const HEADER_BYTES_MAX: u64 = LOCAL_BYTES + 2 * 65_535;

const ZIP_MAGIC: &[u8] = b"PK\x03\x04";

impl Reader {
    /// Opens a file and reads what it says of itself.
    ///
    /// # Errors
    /// `Io` for what the file system refused; `Format` for a file that is damaged, or of another format: the text says
    /// which one, and what to do.
    pub fn open(engine: &Engine, target: &Target) -> Result<Self> {
        let options = OpenOptions { access: Access::Read, create: false, direct: engine.config().direct };
        let file = TensorFile::open(target, options)?;
        let path = target.path();
        let file_bytes = file.len()?;
        let source = Source::new(engine, file, file_bytes)?;
        let mut reader = source.read_all().map_err(|error| match error {
            Failure::Format(error) => Error::format(&path, error),
            Failure::Other(error) => error,
        })?;
        // Where no writer would put a record's bytes, its header has to be asked. Those are rare, or one at the end.
        let odd = reader.extents.iter().enumerate().filter(|(_, extent)| !arena::is_mirrored(extent));
        let odd: Vec<usize> = odd.map(|(index, _)| index).collect();
        if !odd.is_empty() {
            reader.resolve(engine, &odd)?;
        }
        Ok(reader)
    }
}

/// What a file says of itself: its contents, the extents of those, and their sums.
type Known = (Contents, Vec<Extent>, Option<HashMap<String, Vec<u64>>>);

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

/// A file whose ends have been read.
struct Source<'a> {
    engine: &'a Engine,
    file: Arc<TensorFile>,
    file_bytes: u64,
    head: Vec<u8>,
    tail: Vec<u8>,
}

impl<'a> Source<'a> {
    fn new(engine: &'a Engine, file: Arc<TensorFile>, file_bytes: u64) -> Result<Self> {
        let head_bytes = HEAD_BYTES.min(file_bytes);
        let tail_bytes = TAIL_BYTES.max(TAIL_BYTES_MAX).min(file_bytes);
        let mut ends = read_ranges(engine, &file, &[0..head_bytes, file_bytes - tail_bytes..file_bytes])?;
        let (tail, head) = (ends.pop().unwrap_or_default(), ends.pop().unwrap_or_default());
        Ok(Self { engine, file, file_bytes, head, tail })
    }

    fn read_all(self) -> Result<Reader, Failure> {
        let (contents, extents, sums) = if self.head.starts_with(ZIP_MAGIC) {
            self.archive()?
        } else if self.head.get(LENGTH_BYTES as usize) == Some(&b'{') {
            self.safetensors()?
        } else {
            return Err(foreign(&self.head, self.file_bytes).into());
        };
        let path = self.file.path().to_path_buf();
        Ok(Reader { path, file: self.file, file_bytes: self.file_bytes, contents, extents, sums })
    }

    /// Bytes of the file, out of what is there already if they are.
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

    fn archive(&self) -> Result<Known, Failure> {
        let end = archive::find_end(&self.tail, self.file_bytes - self.tail.len() as u64)?;
        let directory_range = end.directory_offset..end.directory_offset + end.directory_bytes;
        let directory = Directory::parse(&self.bytes(directory_range)?, end, self.file_bytes)?;
        let Some(pickle_record) = directory.find(PICKLE) else { return Err(other_zip(&directory).into()) };
        if directory.find("constants.pkl").is_some() {
            return Err(FormatError::Unsupported(
                "this is a TorchScript archive, which holds code; load it with torch.jit.load".into(),
            )
            .into());
        }
        if let Some(record) = directory.find("byteorder")
            && self.record(record, 16)? != b"little"
        {
            return Err(
                FormatError::Unsupported("the tensors are big-endian; load the file with torch.load".into()).into()
            );
        }
        let graph = pickle::parse(&self.record(pickle_record, PICKLE_BYTES_MAX)?)?;
        let state = State::of(&graph)?;
        let extents = storages(&directory, &state)?;
        let sums = match directory.find(SIDE_CAR) {
            Some(record) => Some(by_name(&self.record(record, SIDE_CAR_BYTES_MAX)?, &extents)?),
            None => None,
        };
        Ok((Contents::Archive { graph, state }, extents, sums))
    }

    /// The bytes of a small record, compared with its CRC-32.
    fn record(&self, record: &Record, bytes_max: u64) -> Result<Vec<u8>, Failure> {
        if record.bytes > bytes_max {
            let text = format!("the record {:?} has {} bytes; at most {bytes_max} are read", record.name, record.bytes);
            return Err(FormatError::Unsupported(text).into());
        }
        // One read takes the header along: its padding is short, but for what the first guess says.
        let header_room = (record.data_offset - record.header_offset).min(HEADER_BYTES_MAX);
        let range = record.header_offset..(record.header_offset + header_room + record.bytes).min(self.file_bytes);
        let bytes = self.bytes(range)?;
        let lost = || FormatError::Corrupt {
            offset: record.header_offset,
            what: format!("the header there is not the one of {:?}, which the directory names", record.name),
        };
        let header = Header::parse(&bytes, record.header_offset)?.ok_or_else(lost)?;
        let from = header.header_bytes as usize;
        let data = bytes.get(from..from + record.bytes as usize).filter(|_| header.name == record.name.as_bytes());
        let data = data.ok_or_else(lost)?;
        if sums::sums_of(data).crc32 != record.crc32 {
            let (name, offset) = (record.name.clone(), record.header_offset + header.header_bytes);
            let path = self.file.path().to_path_buf();
            return Err(Error::Damaged { path, name, offset, bytes: record.bytes, sums: "CRC-32" }.into());
        }
        Ok(data.to_vec())
    }

    fn safetensors(&self) -> Result<Known, Failure> {
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
            alignment: tensor.dtype.bytes().clamp(1, arena::ELEMENT_ALIGNMENT),
        };
        let extents: Vec<Extent> = header.tensors.iter().map(extent).collect();
        let sums = header.metadata.iter().find(|(key, _)| key == METADATA_KEY);
        let sums = sums.map(|(_, text)| by_name(text.as_bytes(), &extents)).transpose()?;
        Ok((Contents::Safetensors { header }, extents, sums))
    }
}

/// The storages' records, in the order of the state.
fn storages(directory: &Directory, state: &State) -> FormatResult<Vec<Extent>> {
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
        Ok(Extent {
            name,
            header_offset: record.header_offset,
            data_offset: record.data_offset,
            bytes: record.bytes,
            crc32: Some(record.crc32),
            record_name: record.name.clone(),
            alignment: arena::ELEMENT_ALIGNMENT,
        })
    };
    state.storages.iter().map(extent).collect()
}

/// The sums of a side-car by name, with as many cells as each extent has.
fn by_name(text: &[u8], extents: &[Extent]) -> FormatResult<HashMap<String, Vec<u64>>> {
    let sums: HashMap<String, Vec<u64>> =
        sums::decode(text)?.into_iter().map(|record| (record.name, record.cells)).collect();
    for extent in extents {
        let cells = sums.get(&extent.name).map(Vec::len);
        if cells != Some(cell_count(extent.bytes)) {
            let what = format!("the checksums have {cells:?} cells for {:?} of {} bytes", extent.name, extent.bytes);
            return Err(FormatError::Corrupt { offset: extent.data_offset, what });
        }
    }
    Ok(sums)
}

/// What a ZIP file without objects is.
fn other_zip(directory: &Directory) -> FormatError {
    let names: HashSet<&str> = directory.records().iter().filter_map(|record| record.name.rsplit('/').next()).collect();
    let text = if names.iter().any(|name| name.ends_with(".npy")) {
        "this is an .npz file; load it with numpy.load"
    } else {
        "this ZIP file has no record data.pkl, so that it is no torch archive"
    };
    FormatError::Unsupported(text.into())
}

/// What a file is that is neither an archive nor safetensors.
fn foreign(head: &[u8], file_bytes: u64) -> FormatError {
    let text = if file_bytes == 0 {
        "the file is empty: whoever wrote it was interrupted"
    } else if head.starts_with(b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19") {
        "this is a torch file of the old format (before torch 1.6, or _use_new_zipfile_serialization=False); load it with \
         torch.load and save it with deepnvme.save"
    } else if head.starts_with(b"\x80") {
        "this is a bare pickle, not a torch archive; load it with what wrote it"
    } else if head.starts_with(b"GGUF") {
        "this is a GGUF file, which deepnvme does not read"
    } else if head.starts_with(b"\x89HDF") {
        "this is an HDF5 file; load it with h5py"
    } else {
        "this is neither a torch archive nor a safetensors file"
    };
    FormatError::Unsupported(text.into())
}

fn read_ranges(engine: &Engine, file: &Arc<TensorFile>, ranges: &[Range<u64>]) -> Result<Vec<Vec<u8>>> {
    let item = |range: &Range<u64>| ReadItem {
        file: Arc::clone(file),
        offset: range.start,
        target: RegionMut::from_vec(vec![0; (range.end - range.start) as usize]),
    };
    let (regions, read) = engine.read_batch(ranges.iter().map(item).collect())?.wait();
    read?;
    let bytes = |region: RegionMut| {
        let mut bytes = vec![0; region.len()];
        region.region().copy_to_slice(0, &mut bytes);
        bytes
    };
    Ok(regions.unwrap_or_default().into_iter().map(bytes).collect())
}
