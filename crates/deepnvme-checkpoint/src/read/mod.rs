//! Loads: a file's metadata is parsed, and then the wanted byte ranges are read straight into memory.
//!
//! ```text
//! Reader::open -> metadata             (open: head, tail, directory, pickle or header)
//! load_buffer::plan -> byte ranges     (pure)
//! Reader::start -> Loading             (the engine reads; the caller creates its objects meanwhile)
//! Loading::finish                      (compares headers and checksums with the data)
//! ```

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use deepnvme_file::aligned_range::read_range;
use deepnvme_format::file_list::FileFingerprint;
use deepnvme_format::pickle::Graph;
use deepnvme_format::state::PickledState;
use deepnvme_format::{Error as FormatError, safetensors};
use deepnvme_io::fs::Stat;
use deepnvme_io::mem::{Region, RegionMut};
use deepnvme_io::{Engine, ReadItem, TensorFile};

use crate::error::{DamagedPart, Error, PACKED_MODEL, Result};
use extent::{header_bytes_min, header_of, own_header_bytes};
use file_checksums::FileChecksums;

mod extent;
mod file_checksums;
mod folder;
mod full_verify;
mod load_buffer;
mod loading;
mod open;
mod time_budget;
mod verify;

pub use extent::Extent;
pub use file_checksums::Coverage;
pub use folder::{
    CheckpointFile, FileList, FileSet, INDEX_SUFFIX, PACKED_NAME, SHARDS_LIST, find_model, find_set, find_shards,
    open_all, open_all_of, refuse_list_name, retry_if_replaced,
};
pub use load_buffer::{BufferedExtent, LoadBuffer};
pub use loading::{Loading, REQUEST_BYTES};
pub use verify::Verify;

/// The file format, with its metadata.
#[derive(Debug)]
pub enum FileMetadata {
    /// A torch archive: the objects, and their tensors by name. The extents are the storages of `state`, in order.
    Archive {
        /// The objects.
        graph: Graph,
        /// Their tensors.
        state: PickledState,
    },
    /// A safetensors file. The extents are its tensors, in order.
    Safetensors {
        /// Its header.
        header: safetensors::Header,
    },
}

/// Maximum size of a verified index. Sidecar and directory have limits of their own.
const INDEX_BYTES_MAX: u64 = 1 << 30;

/// The state of a file, or of a part of a stripe set, that a write changes.
#[derive(Debug, PartialEq, Eq)]
struct FileStamp {
    bytes: u64,
    modified_ns: i128,
}

/// Returns the stamp of each part of a file.
fn stamps_of(file: &TensorFile) -> Result<Vec<FileStamp>> {
    let stamp = |stat: &Stat| FileStamp { bytes: stat.bytes, modified_ns: stat.modified_ns };
    Ok(file.stats()?.iter().map(stamp).collect())
}

/// An open checkpoint file.
#[derive(Debug)]
pub struct Reader {
    path: PathBuf,
    file: Arc<TensorFile>,
    file_bytes: u64,
    metadata: FileMetadata,
    /// The extents, followed by an archive's other records.
    records: Vec<Extent>,
    /// How many of `records` are extents; the rest are an archive's other records.
    extent_count: usize,
    /// Whether the headers of all extents have been read.
    is_resolved: bool,
    /// The parts of the file before anything was read.
    stamps: Vec<FileStamp>,
    checksums: FileChecksums,
}

impl Reader {
    /// Returns the path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the size of the file.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// Returns the open file.
    #[must_use]
    pub fn file(&self) -> &Arc<TensorFile> {
        &self.file
    }

    /// Returns the file format, with its metadata.
    #[must_use]
    pub fn file_metadata(&self) -> &FileMetadata {
        &self.metadata
    }

    /// Returns the byte ranges of the storages or tensors.
    #[must_use]
    pub fn extents(&self) -> &[Extent] {
        &self.records[..self.extent_count]
    }

    /// Returns the checksums of an extent's chunks, if the file contains them.
    #[must_use]
    pub fn checksums(&self, extent: usize) -> Option<&[u64]> {
        self.checksums.chunks.as_ref()?.get(&self.records[extent].name).map(Vec::as_slice)
    }

    /// Checks that nothing has written to the file since it was opened. Call it after the last read before you give the
    /// data new checksums. Otherwise a change between verifying and rereading would get valid checksums.
    ///
    /// # Errors
    /// `Changed`, or `Io`.
    pub fn check_unchanged(&self) -> Result<()> {
        if stamps_of(&self.file)? == self.stamps { Ok(()) } else { Err(Error::Changed { path: self.path.clone() }) }
    }

    /// Replaces the result of reads if the file was written to in the meantime: they got old bytes, new ones, or some
    /// of both. Damage that checksums show stays damage.
    ///
    /// # Errors
    /// That of the result; `Changed`, or `Io`.
    pub fn after_read<T>(&self, result: Result<T>) -> Result<T> {
        match result {
            Ok(value) => self.check_unchanged().map(|()| value),
            Err(Error::Io(error)) => Err(match self.check_unchanged() {
                Err(changed @ Error::Changed { .. }) => changed,
                _ => Error::Io(error),
            }),
            other => other,
        }
    }

    /// Returns whether the offset of every extent is certain. In an archive, [`resolve`](Self::resolve) makes it so.
    #[must_use]
    pub fn has_exact_offsets(&self) -> bool {
        self.is_resolved || matches!(self.metadata, FileMetadata::Safetensors { .. })
    }

    /// Returns whether the checksums cover the headers of an archive's records. Then an offset can be wrong only in a
    /// damaged file, and every read compares its headers.
    #[must_use]
    pub fn covers_headers(&self) -> bool {
        self.checksums.covers_headers()
    }

    /// Returns whether the file contains checksums of its chunks, valid or damaged.
    #[must_use]
    pub fn has_checksums(&self) -> bool {
        self.checksums.chunks.is_some() || self.checksums.refused.is_some()
    }

    /// Returns the coverage of the checksums.
    #[must_use]
    pub fn coverage(&self) -> Coverage {
        self.checksums.coverage
    }

    /// Reports whether the metadata read so far, including names, types, shapes and checksums, matched the file's
    /// checksums when it was read.
    ///
    /// # Errors
    /// `Damaged`, or `Format` if the checksums themselves are damaged.
    pub fn check_metadata(&self) -> Result<()> {
        self.checksums.refused.clone().map_or(Ok(()), Err)
    }

    /// Refuses a packed model, whose tensors would be read as encoded bytes.
    ///
    /// # Errors
    /// `Format` with `Unsupported`.
    pub fn refuse_packed(&self) -> Result<()> {
        match &self.metadata {
            FileMetadata::Safetensors { header } if header.is_packed() => {
                Err(Error::format(&self.path, FormatError::Unsupported(format!("this is {PACKED_MODEL}"))))
            }
            _ => Ok(()),
        }
    }

    /// Returns the CRC-64/NVME of the file's index: the header of a safetensors file, or an archive from its sidecar
    /// (if it has none, from its directory) to the end. Together with the file's size it identifies the file, as a
    /// save's `index_crc64` does.
    ///
    /// # Errors
    /// `Io`, or `Format` if the index is too long.
    pub fn index_crc64(&self, engine: &Engine) -> Result<u64> {
        if self.checksums.index.end - self.checksums.index.start > INDEX_BYTES_MAX {
            let text = format!("the index of a file has at most {INDEX_BYTES_MAX} bytes");
            return Err(Error::format(&self.path, FormatError::Unsupported(text)));
        }
        let view = read_range(engine, &self.file, &self.checksums.index)?;
        let mut bytes = vec![0; view.len()];
        view.copy_to_slice(0, &mut bytes);
        Ok(deepnvme_format::checksums::covered_sum(&bytes, &[]))
    }

    /// Plans the byte ranges to mirror in memory for these extents. Each keeps the alignment that it has in the file.
    #[must_use]
    pub fn load_buffers(&self, wanted: &[usize]) -> Vec<LoadBuffer> {
        load_buffer::plan(&self.records, wanted, self.file_bytes)
    }

    /// Reads the headers of these extents to find where their data begins. [`check_metadata`](Self::check_metadata)
    /// then reports a header that the checksums cover and that differs.
    ///
    /// # Errors
    /// `Io`, and `Format` if a header contradicts the directory.
    pub fn resolve(&mut self, engine: &Engine, wanted: &[usize]) -> Result<()> {
        if !matches!(self.metadata, FileMetadata::Archive { .. }) {
            return Ok(());
        }
        // A header that the checksums cover is as long as the directory implies, and all of it is compared.
        let header_bytes = |extent: &Extent| match self.checksums.covers_headers() {
            true => own_header_bytes(extent),
            false => header_bytes_min(extent),
        };
        let targets: Vec<RegionMut> =
            wanted.iter().map(|extent| RegionMut::from_vec(vec![0; header_bytes(&self.records[*extent])])).collect();
        let views: Vec<Region> = targets.iter().map(RegionMut::region).collect();
        let items = wanted.iter().zip(targets).map(|(extent, target)| ReadItem {
            file: Arc::clone(&self.file),
            offset: self.records[*extent].header_offset,
            target,
        });
        engine.read_batch(items.collect())?.wait().1?;
        for (extent, view) in wanted.iter().zip(views) {
            let extent = &mut self.records[*extent];
            let mut bytes = vec![0; view.len()];
            view.copy_to_slice(0, &mut bytes);
            if self.checksums.covers_headers()
                && let Err(damaged) = file_checksums::compare_header(&self.path, extent, &bytes)
            {
                self.checksums.refused.get_or_insert(damaged);
            }
            let header = header_of(&self.path, extent, &bytes)?;
            let (data_offset, limit) = (extent.header_offset + header.header_bytes, extent.end());
            // No record can end after the end that the directory implies.
            if data_offset + extent.bytes > limit {
                let what =
                    format!("the record {:?} of {} bytes reaches into what follows it", extent.name, extent.bytes);
                let source = FormatError::Corrupt { offset: extent.header_offset, what };
                return Err(Error::format(&self.path, source));
            }
            extent.data_offset = data_offset;
        }
        // Callers resolve all extents at once and in order, or some of them.
        self.is_resolved |= (0..self.extent_count).eq(wanted.iter().copied().take(self.extent_count));
        Ok(())
    }

    /// Checks that the file contains all these tensors.
    ///
    /// # Errors
    /// `Format` with the first missing name.
    pub fn require(&self, names: &[String]) -> Result<()> {
        if names.is_empty() {
            return Ok(());
        }
        let there: HashSet<&str> = match &self.metadata {
            FileMetadata::Archive { state, .. } => state.tensors.iter().map(|tensor| tensor.name.as_str()).collect(),
            FileMetadata::Safetensors { header } => header.tensors.iter().map(|tensor| tensor.name.as_str()).collect(),
        };
        let missing = names.iter().find(|name| !there.contains(name.as_str()));
        missing.map_or(Ok(()), |name| {
            let what = format!(
                "the file has no tensor {name:?}, which its index lists; restore one of them from a copy, or \
                 load the file by its own name"
            );
            Err(Error::format(&self.path, FormatError::Corrupt { offset: 0, what }))
        })
    }

    /// Checks that this is the file that a list identifies.
    ///
    /// # Errors
    /// `NotListed` if it is another file, or `Io`.
    pub fn compare_fingerprint(&self, engine: &Engine, fingerprint: FileFingerprint) -> Result<()> {
        let FileFingerprint { bytes, index_crc64 } = fingerprint;
        if self.file_bytes == bytes && self.index_crc64(engine)? == index_crc64 {
            return Ok(());
        }
        Err(Error::NotListed { path: self.path.clone() })
    }

    /// Starts to read byte ranges of the file into memory. Each target is as long as its buffer.
    ///
    /// # Errors
    /// The error of a request that the engine rejects before it starts.
    ///
    /// # Panics
    /// If a target's length differs from its buffer's.
    pub fn start(self: &Arc<Self>, engine: &Engine, targets: Vec<(LoadBuffer, RegionMut)>) -> Result<Loading> {
        let mut loading = self.empty_load(engine);
        loading.add(engine, targets)?;
        Ok(loading)
    }

    /// Begins a load whose byte ranges are [added](Loading::add) one group after the other.
    #[must_use]
    pub fn empty_load(self: &Arc<Self>, engine: &Engine) -> Loading {
        Loading::new(Arc::clone(self), engine)
    }

    pub(crate) fn mismatch(&self, extent: &Extent, at: u64, bytes: u64, detail: &'static str) -> Error {
        let offset = extent.data_offset + at;
        let part = DamagedPart::Record { name: extent.name.clone(), tensors: self.tensors_in(extent) };
        file_checksums::damaged(&self.path, part, offset..offset + bytes, detail)
    }

    /// Returns the names of the tensors in a storage of an archive. The extents of a safetensors file are tensors
    /// themselves.
    fn tensors_in(&self, extent: &Extent) -> Vec<String> {
        let FileMetadata::Archive { state, .. } = &self.metadata else { return Vec::new() };
        let storage = self.extents().iter().position(|other| std::ptr::eq(other, extent));
        let tensors = state.tensors.iter().filter(|tensor| Some(tensor.storage) == storage && tensor.is_named);
        tensors.map(|tensor| tensor.name.clone()).collect()
    }
}
