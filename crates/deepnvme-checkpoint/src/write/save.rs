//! A save that is planned to the last byte. It is written as a whole by one process, or in shares by several.

use std::path::Path;

use deepnvme_format::checksums::RecordChecksums;
use deepnvme_io::{Durability, StreamPoints};

use super::archive::{ArchiveLayout, Record};
use super::image::Image;
use super::safetensors::{SafetensorsLayout, Tensor};
use super::writer::Staging;
use crate::error::{Error, Result};

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

impl Default for SaveOptions {
    fn default() -> Self {
        Self { durability: Durability::Full, has_sums: true, staging: None }
    }
}

/// A file that was saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Saved {
    /// Bytes of the file.
    pub bytes: u64,
    /// Where in it the index of all its records is.
    pub index_offset: u64,
    /// How many bytes that has.
    pub index_bytes: u64,
    /// Its CRC-64/NVME. The index has the names, the sizes and the sums of all records, so that it pins down every byte
    /// of the file; without sums it pins down the CRC-32 of an archive's records, and of a safetensors file only names,
    /// types and sizes.
    pub index_crc64: u64,
}

/// A file that is planned to the last byte.
pub struct Save {
    pub(super) image: Image,
    /// Nothing of the memory is looked at before these.
    pub(super) starts_after: StreamPoints,
    pub(super) options: SaveOptions,
}

impl Save {
    /// A torch archive of these records, in their order.
    ///
    /// # Errors
    /// `Format` for records that no archive can hold.
    pub fn archive(path: &Path, records: Vec<Record>, options: SaveOptions) -> Result<Self> {
        let layout = ArchiveLayout::new(path, &records, options.has_sums);
        let layout = layout.map_err(|error| Error::format(path, error))?;
        let bytes = records.into_iter().map(|record| record.bytes).collect();
        let image = Image::new(path, layout.spans(), bytes, Box::new(layout));
        Ok(Self { starts_after: image.points()?, image, options })
    }

    /// A safetensors file of these tensors. Those of wide elements come first in it.
    ///
    /// # Errors
    /// `Format` for tensors that no such file can hold.
    pub fn safetensors(
        path: &Path,
        tensors: Vec<Tensor>,
        metadata: Vec<(String, String)>,
        options: SaveOptions,
    ) -> Result<Self> {
        let layout = SafetensorsLayout::new(tensors, metadata, options.has_sums);
        let (layout, bytes) = layout.map_err(|error| Error::format(path, error))?;
        let image = Image::new(path, layout.spans(), bytes, Box::new(layout));
        Ok(Self { starts_after: image.points()?, image, options })
    }

    /// Bytes of the file.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.image.bytes()
    }

    /// The names of its records or tensors, in their order in the file.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.image.names()
    }

    /// The sums of one of them, when all have been written.
    pub(crate) fn sums(&self, record: usize) -> Result<&RecordChecksums> {
        self.image.sums(record)
    }

    /// The same for saves that are to be the same file, whatever their tensors hold: writers compare it before each
    /// writes a share.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        self.image.fingerprint()
    }
}
