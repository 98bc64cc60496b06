//! The model that is packed.

use std::collections::HashSet;
use std::ops::Range;
use std::path::{Path, PathBuf};

use deepnvme_checkpoint::read::{FileMetadata, Reader, open_all};
use deepnvme_checkpoint::{Error, Progress, Result};
use deepnvme_file::aligned_range::{AlignedRange, AlignedRead};
use deepnvme_format::Dtype;
use deepnvme_format::safetensors::PACKED_KEY;
use deepnvme_io::fs::{FileId, Permissions};
use deepnvme_io::mem::{Buffer, PAGE_BYTES};
use deepnvme_io::{Engine, Error as IoError};

/// A contiguous tensor in one of the files.
#[derive(Clone, Debug)]
pub(super) struct SourceTensor {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
    file: usize,
    offset: u64,
    pub(super) bytes: u64,
}

/// A model's files.
pub(super) struct Model {
    readers: Vec<Reader>,
    pub(super) tensors: Vec<SourceTensor>,
    /// The metadata of the files' headers, except checksums.
    pub(super) metadata: Vec<(String, String)>,
}

/// A read in flight.
pub(super) struct ChunkRead {
    read: AlignedRead,
    range: AlignedRange,
}

impl Model {
    pub(super) fn open(engine: &Engine, source: &Path) -> Result<Self> {
        let mut model = Self { readers: Vec::new(), tensors: Vec::new(), metadata: Vec::new() };
        let mut seen = HashSet::new();
        let opened = open_all(source, |file| {
            let mut reader = file.open(engine)?;
            reader.check_metadata()?;
            let all: Vec<usize> = (0..reader.extents().len()).collect();
            reader.resolve(engine, &all)?;
            Ok((file.path.clone(), file.names.clone(), reader))
        })?;
        for (path, names, reader) in opened {
            let names: Option<HashSet<String>> = names.map(|names| names.into_iter().collect());
            for tensor in tensors_of(&reader, model.readers.len())? {
                if names.as_ref().is_some_and(|names| !names.contains(&tensor.name)) {
                    continue;
                }
                if !seen.insert(tensor.name.clone()) {
                    return Err(refused(&path, format!("two tensors are called {:?}", tensor.name)));
                }
                model.tensors.push(tensor);
            }
            if let FileMetadata::Safetensors { header } = reader.file_metadata() {
                for (key, text) in &header.metadata {
                    if key == PACKED_KEY {
                        return Err(refused(&path, "it is packed already; pack the original model instead".into()));
                    }
                    let is_known = model.metadata.iter().any(|(known, _)| known == key);
                    if key != deepnvme_format::checksums::METADATA_KEY && !is_known {
                        model.metadata.push((key.clone(), text.clone()));
                    }
                }
            }
            model.readers.push(reader);
        }
        if model.tensors.is_empty() {
            return Err(refused(source, "it has no tensors".into()));
        }
        Ok(model)
    }

    /// Verifies files that have checksums, so that damage does not get valid new ones.
    pub(super) fn verify(&mut self, engine: &Engine, progress: &Progress) -> Result<()> {
        for reader in &mut self.readers {
            if reader.has_checksums() {
                reader.verify_all(engine, progress)?;
            }
        }
        Ok(())
    }

    /// Checks that nothing has written to the files since they were opened: they were verified first and copied later.
    pub(super) fn check_unchanged(&self) -> Result<()> {
        self.readers.iter().try_for_each(Reader::check_unchanged)
    }

    /// Starts to read part of a tensor.
    pub(super) fn start(&self, engine: &Engine, tensor: usize, part: &Range<u64>) -> Result<ChunkRead> {
        let tensor = &self.tensors[tensor];
        let range = AlignedRange::new(tensor.offset + part.start, (part.end - part.start) as usize);
        let buffer = Buffer::zeroed(range.page_span_bytes().max(PAGE_BYTES as usize));
        let buffer = buffer.map_err(|error| IoError::from_io("allocate memory to read into", &error))?;
        let read = AlignedRead::start(engine, self.readers[tensor.file].file(), range, buffer);
        Ok(ChunkRead { read: read.map_err(|(error, _)| error)?, range })
    }

    /// Reads part of a tensor.
    pub(super) fn read(&self, engine: &Engine, tensor: usize, part: &Range<u64>) -> Result<Vec<u8>> {
        let (buffer, range) = self.start(engine, tensor, part)?.wait()?;
        Ok(buffer.as_slice()[range].to_vec())
    }

    /// The identities of all files.
    pub(super) fn identities(&self) -> Result<HashSet<FileId>> {
        let mut found = HashSet::new();
        for reader in &self.readers {
            found.extend(reader.file().stats()?.iter().map(|stat| stat.identity));
        }
        Ok(found)
    }

    /// The permission bits that all files grant.
    pub(super) fn permissions(&self) -> Result<Permissions> {
        let all = Permissions { mode: 0o777, group: None };
        self.readers.iter().try_fold(all, |common, reader| Ok(common.and(reader.file().permissions()?)))
    }

    /// The number of file ranges that contain these tensors; nearby ranges count as one.
    pub(super) fn file_ranges(&self, tensors: &[usize]) -> usize {
        const CLOSE_BYTES: u64 = 64 << 10;
        let mut places: Vec<(usize, u64, u64)> = tensors.iter().map(|index| &self.tensors[*index]).map(place).collect();
        places.sort_unstable();
        let is_apart = |pair: &&[(usize, u64, u64)]| {
            let ((file, _, end), (next, begin, _)) = (pair[0], pair[1]);
            file != next || begin.saturating_sub(end) > CLOSE_BYTES
        };
        usize::from(!places.is_empty()) + places.windows(2).filter(is_apart).count()
    }

    pub(super) fn path(&self, tensor: usize) -> PathBuf {
        self.readers[self.tensors[tensor].file].path().to_path_buf()
    }
}

fn place(tensor: &SourceTensor) -> (usize, u64, u64) {
    (tensor.file, tensor.offset, tensor.offset + tensor.bytes)
}

impl ChunkRead {
    /// Waits for the read. Returns the buffer, and the range of it that was requested.
    pub(super) fn wait(self) -> Result<(Buffer, Range<usize>)> {
        let (buffer, transfer) = self.read.wait();
        transfer?;
        let lost = || IoError::new(deepnvme_io::ErrorKind::Io, "read", "an error lost the memory of a read");
        Ok((buffer.ok_or_else(lost)?, self.range.in_buffer()))
    }
}

fn tensors_of(reader: &Reader, file: usize) -> Result<Vec<SourceTensor>> {
    match reader.file_metadata() {
        FileMetadata::Safetensors { header } => {
            let tensor = |tensor: &deepnvme_format::safetensors::Tensor| SourceTensor {
                name: tensor.name.clone(),
                dtype: tensor.dtype,
                shape: tensor.shape.clone(),
                file,
                offset: tensor.offset,
                bytes: tensor.bytes,
            };
            Ok(header.tensors.iter().map(tensor).collect())
        }
        FileMetadata::Archive { .. } => Err(refused(
            reader.path(),
            "torch archives cannot be packed; convert this one to safetensors first: deepnvme convert".into(),
        )),
    }
}

pub(super) fn refused(path: &Path, what: String) -> Error {
    Error::Format { path: path.to_path_buf(), source: deepnvme_format::Error::Unsupported(what) }
}
