//! Loading: parse a file's metadata, then read the wanted byte ranges straight into memory.
//!
//! ```text
//! Reader::open -> contents             (open: head, tail, directory, pickle or header)
//! load_buffer::plan  -> byte ranges          (pure)
//! Reader::start -> Loading             (the engine reads; the caller creates its objects meanwhile)
//! Loading::finish                      (compares headers and checksums with the data)
//! ```

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use deepnvme_file::aligned_range::read_range;
use deepnvme_format::pickle::Graph;
use deepnvme_format::set::FileFingerprint;
use deepnvme_format::state::PickledState;
use deepnvme_format::{Error as FormatError, safetensors};
use deepnvme_io::mem::{Region, RegionMut};
use deepnvme_io::{Engine, ReadItem, TensorFile};

use crate::error::{Error, Result};
use extent::{header_of, header_room, sealed_room};
use file_checksums::FileChecksums;

mod extent;
mod file_checksums;
mod folder;
mod full_verify;
mod load_buffer;
mod loading;
mod open;
mod verify;

pub use extent::Extent;
pub use file_checksums::Coverage;
pub use folder::{
    CheckpointFile, FileList, FileSet, INDEX_SUFFIX, SHARDS_LIST, find_set, find_shards, open_all, open_all_of,
    refuse_list_name, retry_if_replaced,
};
pub use load_buffer::{BufferedExtent, LoadBuffer};
pub use loading::{Loading, REQUEST_BYTES};
pub use verify::Verify;

/// The file format, with its metadata.
#[derive(Debug)]
pub enum Contents {
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

fn stamps_of(file: &TensorFile) -> Result<Vec<(u64, i128)>> {
    Ok(file.stats()?.iter().map(|stat| (stat.bytes, stat.modified_ns)).collect())
}

/// An open checkpoint file.
#[derive(Debug)]
pub struct Reader {
    path: PathBuf,
    file: Arc<TensorFile>,
    file_bytes: u64,
    contents: Contents,
    /// The extents of the contents, followed by an archive's other records.
    records: Vec<Extent>,
    extents: usize,
    /// Whether the headers of all extents have been read.
    is_resolved: bool,
    /// The file as it was before anything was read: size and modification time of each part.
    stamps: Vec<(u64, i128)>,
    checksums: FileChecksums,
}

impl Reader {
    /// The path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The size of the file.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// The open file.
    #[must_use]
    pub fn file(&self) -> &Arc<TensorFile> {
        &self.file
    }

    /// The file format, with its metadata.
    #[must_use]
    pub fn contents(&self) -> &Contents {
        &self.contents
    }

    /// The byte ranges of the storages or tensors.
    #[must_use]
    pub fn extents(&self) -> &[Extent] {
        &self.records[..self.extents]
    }

    /// The checksums of an extent's chunks, if the file contains them.
    #[must_use]
    pub fn checksums(&self, extent: usize) -> Option<&[u64]> {
        self.checksums.chunks.as_ref()?.get(&self.records[extent].name).map(Vec::as_slice)
    }

    /// Checks that nothing has written to the file since it was opened. Call it after the last read if you give the
    /// data new checksums: data that was compared may have changed before it was read again.
    ///
    /// # Errors
    /// `Changed`, or `Io`.
    pub fn check_unchanged(&self) -> Result<()> {
        if stamps_of(&self.file)? == self.stamps { Ok(()) } else { Err(Error::Changed { path: self.path.clone() }) }
    }

    /// Returns whether the offset of every extent is certain. In an archive, [`resolve`](Self::resolve) makes it so.
    #[must_use]
    pub fn has_exact_offsets(&self) -> bool {
        self.is_resolved || matches!(self.contents, Contents::Safetensors { .. })
    }

    /// Returns whether the checksums cover the headers of an archive's records. An offset is wrong then only if the
    /// file is damaged, and each read compares the headers of what it reads.
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
    pub fn check(&self) -> Result<()> {
        self.checksums.refused.clone().map_or(Ok(()), Err)
    }

    /// The CRC-64/NVME of the file's index: the header of a safetensors file, or an archive from its sidecar (if it has
    /// none, from its directory) to the end. Together with the file's size it identifies the file, as a save's
    /// `index_crc64` does.
    ///
    /// # Errors
    /// `Io`, or `Format` if the index is too long.
    pub fn index_crc64(&self, engine: &Engine) -> Result<u64> {
        if self.checksums.index.end - self.checksums.index.start > INDEX_BYTES_MAX {
            let text = format!("the index of a file has {INDEX_BYTES_MAX} bytes at the most");
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

    /// Reads the headers of these extents to find where their data begins. [`check`](Self::check) then reports a header
    /// that the checksums cover and that differs.
    ///
    /// # Errors
    /// `Io`, and `Format` if a header contradicts the directory.
    pub fn resolve(&mut self, engine: &Engine, wanted: &[usize]) -> Result<()> {
        if !matches!(self.contents, Contents::Archive { .. }) {
            return Ok(());
        }
        // A header that the checksums cover is as long as the directory implies, and all of it is compared.
        let room = |extent: &Extent| match self.checksums.covers_headers() {
            true => sealed_room(extent),
            false => header_room(extent),
        };
        let targets: Vec<RegionMut> =
            wanted.iter().map(|extent| RegionMut::from_vec(vec![0; room(&self.records[*extent])])).collect();
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
        self.is_resolved |= (0..self.extents).eq(wanted.iter().copied().take(self.extents));
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
        let there: HashSet<&str> = match &self.contents {
            Contents::Archive { state, .. } => state.tensors.iter().map(|tensor| tensor.name.as_str()).collect(),
            Contents::Safetensors { header } => header.tensors.iter().map(|tensor| tensor.name.as_str()).collect(),
        };
        let missing = names.iter().find(|name| !there.contains(name.as_str()));
        missing.map_or(Ok(()), |name| {
            let what = format!(
                "the file has no tensor {name:?}, which its index lists; restore one of them from a copy, or \
                 name the file itself to have what is there"
            );
            Err(Error::format(&self.path, FormatError::Corrupt { offset: 0, what }))
        })
    }

    /// Checks that this is the file that a list identifies.
    ///
    /// # Errors
    /// `Damaged` if it is another file, or `Io`.
    pub fn compare_fingerprint(&self, engine: &Engine, fingerprint: FileFingerprint) -> Result<()> {
        let FileFingerprint { bytes, index_crc64 } = fingerprint;
        if self.file_bytes == bytes && self.index_crc64(engine)? == index_crc64 {
            return Ok(());
        }
        Err(file_checksums::damaged(
            &self.path,
            "the file",
            0..self.file_bytes,
            "it is not the one that its index was written with",
        ))
    }

    /// Starts to read byte ranges of the file into memory. Each target is as long as its buffer.
    ///
    /// # Errors
    /// The error of a request that the engine rejects at once.
    ///
    /// # Panics
    /// If a target's length differs from its buffer's.
    pub fn start(self: &Arc<Self>, engine: &Engine, targets: Vec<(LoadBuffer, RegionMut)>) -> Result<Loading> {
        let mut loading = self.begin(engine);
        loading.add(engine, targets)?;
        Ok(loading)
    }

    /// Begins a load whose byte ranges are [added](Loading::add) one group after the other.
    #[must_use]
    pub fn begin(self: &Arc<Self>, engine: &Engine) -> Loading {
        Loading::new(Arc::clone(self), engine)
    }

    pub(crate) fn mismatch(&self, extent: &Extent, at: u64, bytes: u64, checksums: &'static str) -> Error {
        let offset = extent.data_offset + at;
        let tensors = self.tensors_in(extent);
        Error::Damaged { path: self.path.clone(), name: extent.name.clone(), tensors, offset, bytes, checksums }
    }

    /// The names of the tensors in a storage of an archive. The extents of a safetensors file are tensors themselves.
    fn tensors_in(&self, extent: &Extent) -> Vec<String> {
        let Contents::Archive { state, .. } = &self.contents else { return Vec::new() };
        let storage = self.extents().iter().position(|other| std::ptr::eq(other, extent));
        let tensors = state.tensors.iter().filter(|tensor| Some(tensor.storage) == storage && tensor.is_named);
        tensors.map(|tensor| tensor.name.clone()).collect()
    }
}
