//! Saving: a whole file, in one pass, at once under its name.

use deepnvme_io::mem::Region;
use deepnvme_io::{Durability, Engine, Target};

use crate::error::{Error, Result};
use crate::progress::Progress;

mod archive;
mod fill;
mod run;
mod safetensors;
mod spans;

pub(crate) use run::threads;
pub use run::{POOL_BYTES_MAX, Staging};

/// A record of an archive.
#[derive(Clone, Debug)]
pub struct Record {
    /// Its name below the archive's root.
    pub name: String,
    /// Its bytes.
    pub memory: Region,
}

/// A tensor of a safetensors file.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Name, type and sizes.
    pub spec: deepnvme_format::safetensors::TensorSpec,
    /// Its elements in row-major order; their memory may have strides.
    pub memory: Region,
}

/// How a file is saved.
#[derive(Clone, Debug)]
pub struct SaveOptions {
    /// What survives a power cut when the save returns.
    pub durability: Durability,
    /// Whether each tensor's checksums are kept beside it.
    pub has_sums: bool,
    /// Memory that takes the bytes first. `None`: a little that the save has for itself.
    pub staging: Option<Staging>,
}

/// A file that was saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Saved {
    /// Bytes of the file.
    pub bytes: u64,
    /// Where in it the sums of all its records are, and which bytes they lie in.
    pub index_offset: u64,
    /// How many bytes those are.
    pub index_bytes: u64,
    /// Their CRC-64/NVME: of two files with the same one, all bytes are the same.
    pub index_crc64: u64,
}

impl Default for SaveOptions {
    fn default() -> Self {
        Self { durability: Durability::Full, has_sums: true, staging: None }
    }
}

/// Writes a torch archive of these records, in their order, and returns what that file is.
///
/// # Errors
/// `Format` for records that no archive can hold, `Io` for what the disk refused: then nothing is left of the new file,
/// and the old one is untouched. `Interrupted` when `progress` was stopped.
pub fn save_archive(
    engine: &Engine,
    target: &Target,
    records: Vec<Record>,
    options: SaveOptions,
    progress: &Progress,
) -> Result<Saved> {
    let path = target.path();
    let plan = archive::ArchiveLayout::new(&path, &records, options.has_sums);
    let layout = plan.map_err(|error| Error::format(&path, error))?;
    let sources = records.into_iter().map(|record| fill::Source::new(record.memory)).collect();
    run::Job {
        spans: layout.spans(),
        sources,
        layout: &layout,
        durability: options.durability,
        staging: options.staging,
    }
    .run(engine, target, progress)
}

/// Writes a safetensors file of these tensors, and returns what that file is. Tensors of wide elements come first.
///
/// # Errors
/// As [`save_archive`].
pub fn save_safetensors(
    engine: &Engine,
    target: &Target,
    tensors: Vec<Tensor>,
    metadata: Vec<(String, String)>,
    options: SaveOptions,
    progress: &Progress,
) -> Result<Saved> {
    let layout = safetensors::SafetensorsLayout::new(&tensors, metadata, options.has_sums);
    let layout = layout.map_err(|error| Error::format(target.path(), error))?;
    let sources = layout.sources(tensors);
    run::Job {
        spans: layout.spans(),
        sources,
        layout: &layout,
        durability: options.durability,
        staging: options.staging,
    }
    .run(engine, target, progress)
}
