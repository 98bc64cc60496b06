//! Loading: what a file holds, and the stretches of it that somebody wants, straight into memory.
//!
//! ```text
//! Reader::open -> what there is        (open: head, tail, directory, pickle or header)
//! arena::plan  -> which stretches      (pure)
//! Reader::start -> Loading             (the engine reads; the caller makes its objects meanwhile)
//! Loading::finish                      (headers and sums are compared with what has come)
//! ```

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use deepnvme_format::pickle::Graph;
use deepnvme_format::set::Identity;
use deepnvme_format::state::State;
use deepnvme_format::{Error as FormatError, safetensors};
use deepnvme_io::mem::{Region, RegionMut};
use deepnvme_io::{Engine, ReadItem, TensorFile};

use crate::error::{Error, Result};
use extent::{header_of, header_room, sealed_room};
use seal::Seal;

mod arena;
mod audit;
mod extent;
mod folder;
mod loading;
mod open;
mod seal;
mod verify;

pub use arena::{Arena, Member};
pub use extent::Extent;
pub use folder::{INDEX_SUFFIX, List, Located, SHARDS_LIST, Set, find_set, find_shards, follow, open_all, open_all_of};
pub use loading::Loading;
pub use seal::Coverage;
pub use verify::Verify;

/// What kind of file it is, and what that kind knows.
#[derive(Debug)]
pub enum Contents {
    /// A torch archive: the objects, and their tensors by name. The extents are the storages of `state`, in its order.
    Archive {
        /// The objects.
        graph: Graph,
        /// Their tensors.
        state: State,
    },
    /// A safetensors file. The extents are its tensors, in their order.
    Safetensors {
        /// Its header.
        header: safetensors::Header,
    },
}

/// The longest index that is compared: side-car and directory have bounds of their own.
const INDEX_BYTES_MAX: u64 = 1 << 30;

/// A checkpoint file that is open.
#[derive(Debug)]
pub struct Reader {
    path: PathBuf,
    file: Arc<TensorFile>,
    file_bytes: u64,
    contents: Contents,
    /// The extents of the contents, and behind them what else an archive has.
    records: Vec<Extent>,
    extents: usize,
    seal: Seal,
}

impl Reader {
    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes of the file.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// The open file.
    #[must_use]
    pub fn file(&self) -> &Arc<TensorFile> {
        &self.file
    }

    /// What it holds.
    #[must_use]
    pub fn contents(&self) -> &Contents {
        &self.contents
    }

    /// The stretches that storages or tensors have.
    #[must_use]
    pub fn extents(&self) -> &[Extent] {
        &self.records[..self.extents]
    }

    /// The sums of an extent's cells, if the file has them.
    #[must_use]
    pub fn sums(&self, extent: usize) -> Option<&[u64]> {
        self.seal.sums.as_ref()?.get(&self.records[extent].name).map(Vec::as_slice)
    }

    /// Whether the file has sums for its cells.
    #[must_use]
    pub fn has_sums(&self) -> bool {
        self.seal.sums.is_some() || self.seal.refused.is_some()
    }

    /// What the checksums cover.
    #[must_use]
    pub fn coverage(&self) -> Coverage {
        self.seal.coverage
    }

    /// Compares what has been read of the file so far, its names, types, shapes and sums among it, with its checksums.
    ///
    /// # Errors
    /// `Damaged`, `Format` for sums that are damaged themselves.
    pub fn check(&self) -> Result<()> {
        self.seal.refused.clone().map_or(Ok(()), Err)
    }

    /// The CRC-64/NVME of the file's index: the header of a safetensors file, the side-car of an archive and all that
    /// follows it. With the file's size it tells the file from any other, as a save's `index_crc64` does.
    ///
    /// # Errors
    /// `Io`.
    pub fn index_crc64(&self, engine: &Engine) -> Result<u64> {
        if self.seal.index.end - self.seal.index.start > INDEX_BYTES_MAX {
            let text = format!("the index of a file has {INDEX_BYTES_MAX} bytes at the most");
            return Err(Error::format(&self.path, FormatError::Unsupported(text)));
        }
        let view = crate::stretch::read(engine, &self.file, &self.seal.index)?;
        let mut bytes = vec![0; view.len()];
        view.copy_to_slice(0, &mut bytes);
        Ok(deepnvme_format::checksums::covered_sum(&bytes, &[]))
    }

    /// Which stretches of the file are mirrored in memory so that these extents are there, each at a place as aligned as
    /// its own.
    #[must_use]
    pub fn arenas(&self, wanted: &[usize]) -> Vec<Arena> {
        arena::plan(&self.records, wanted, self.file_bytes)
    }

    /// Reads the headers of these extents, so that where their bytes begin is certain.
    ///
    /// # Errors
    /// `Io`, and `Format` where a header contradicts the directory.
    pub fn resolve(&mut self, engine: &Engine, wanted: &[usize]) -> Result<()> {
        if !matches!(self.contents, Contents::Archive { .. }) {
            return Ok(());
        }
        // A header that a seal covers is as long as the directory lets one expect, and all of it is compared.
        let room = |extent: &Extent| match self.seal.covers_headers() {
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
            if self.seal.covers_headers()
                && let Err(damaged) = seal::compare_header(&self.path, extent, &bytes)
            {
                self.seal.refused.get_or_insert(damaged);
            }
            let header = header_of(&self.path, extent, &bytes)?;
            let (data_offset, limit) = (extent.header_offset + header.header_bytes, extent.end());
            // The directory's guess leaves as much room behind it as there can be.
            if data_offset + extent.bytes > limit {
                let what =
                    format!("the record {:?} of {} bytes reaches into what follows it", extent.name, extent.bytes);
                let source = FormatError::Corrupt { offset: extent.header_offset, what };
                return Err(Error::format(&self.path, source));
            }
            extent.data_offset = data_offset;
        }
        Ok(())
    }

    /// Checks that the file has all these tensors.
    ///
    /// # Errors
    /// `Format` with the first name that is missing.
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

    /// Compares the file with what a list says of it.
    ///
    /// # Errors
    /// `Damaged` when it is another one, `Io`.
    pub fn compare_identity(&self, engine: &Engine, identity: Identity) -> Result<()> {
        let Identity { bytes, index_crc64 } = identity;
        if self.file_bytes == bytes && self.index_crc64(engine)? == index_crc64 {
            return Ok(());
        }
        Err(seal::damaged(
            &self.path,
            "the file",
            0..self.file_bytes,
            "it is not the one that its index was written with",
        ))
    }

    /// Starts to fill memory with stretches of the file; each target has the length of its arena.
    ///
    /// # Errors
    /// What the engine refused at once.
    ///
    /// # Panics
    /// When a target has another length than its arena.
    pub fn start(self: &Arc<Self>, engine: &Engine, targets: Vec<(Arena, RegionMut)>) -> Result<Loading> {
        Loading::start(Arc::clone(self), engine, targets)
    }

    pub(crate) fn mismatch(&self, extent: &Extent, cell: u64, bytes: u64, sums: &'static str) -> Error {
        let offset = extent.data_offset + cell;
        Error::Damaged { path: self.path.clone(), name: extent.name.clone(), offset, bytes, sums }
    }
}
