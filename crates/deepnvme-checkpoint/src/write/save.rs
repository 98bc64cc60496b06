//! A save planned to the last byte. One process writes all of it, or several write a shard each.

use std::path::Path;

use deepnvme_format::checksums::RecordChecksums;
use deepnvme_io::{Durability, StreamEvents};

use super::archive::{ArchiveFile, Record};
use super::file_layout::FileLayout;
use super::safetensors::{SafetensorsFile, Tensor};
use super::write_pipeline::Staging;
use crate::error::{Error, Result};

/// Options of a save.
#[derive(Clone, Debug)]
pub struct SaveOptions {
    /// Guarantees after a power cut, once the save returns. Default: all, `Durability::Full`.
    pub durability: Durability,
    /// Whether to store checksums of each tensor. Default: true.
    pub has_checksums: bool,
    /// Memory that the data is copied to first. `None`, the default: a small pool of the save's own.
    pub staging: Option<Staging>,
}

impl Default for SaveOptions {
    fn default() -> Self {
        Self { durability: Durability::Full, has_checksums: true, staging: None }
    }
}

/// A saved file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Saved {
    /// Size of the file.
    pub bytes: u64,
    /// Offset of the index of all records.
    pub index_offset: u64,
    /// Size of the index.
    pub index_bytes: u64,
    /// CRC-64/NVME of the index. The index contains the names, sizes and checksums of all records, so it identifies
    /// every byte of the file. Without checksums, it covers the CRC-32 of an archive's records, but only names, types
    /// and sizes of a safetensors file.
    pub index_crc64: u64,
}

/// A file that is planned to the last byte.
pub struct Save {
    pub(super) layout: FileLayout,
    /// Stream points to wait for before reading any memory.
    pub(super) starts_after: StreamEvents,
    pub(super) options: SaveOptions,
}

impl Save {
    /// Plans a torch archive of these records, in order.
    ///
    /// # Errors
    /// `Format` if an archive cannot hold the records, or `Io` for an error of a GPU's driver.
    pub fn archive(path: &Path, records: Vec<Record>, options: SaveOptions) -> Result<Self> {
        let file = ArchiveFile::new(path, &records, options.has_checksums);
        let file = file.map_err(|error| Error::format(path, error))?;
        let sources = records.into_iter().map(|record| record.data).collect();
        let layout = FileLayout::new(path, file.spans(), sources, Box::new(file));
        Ok(Self { starts_after: layout.record_events()?, layout, options })
    }

    /// Plans a safetensors file of these tensors. Those with wide elements come first.
    ///
    /// # Errors
    /// `Format` if the format cannot hold the tensors, or `Io` for an error of a GPU's driver.
    pub fn safetensors(
        path: &Path,
        tensors: Vec<Tensor>,
        metadata: Vec<(String, String)>,
        options: SaveOptions,
    ) -> Result<Self> {
        let planned = SafetensorsFile::new(tensors, metadata, options.has_checksums);
        let (file, sources) = planned.map_err(|error| Error::format(path, error))?;
        let layout = FileLayout::new(path, file.spans(), sources, Box::new(file));
        Ok(Self { starts_after: layout.record_events()?, layout, options })
    }

    /// Returns the size of the file.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.layout.bytes()
    }

    /// Returns the names of the records or tensors, in file order.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.layout.names()
    }

    /// Returns the checksums of a record, once the checksums of all records are combined.
    pub(crate) fn checksums(&self, record: usize) -> Result<&RecordChecksums> {
        self.layout.checksums(record)
    }

    /// Returns a value that is equal for saves of the same file, whatever the tensors' values. Writers compare it
    /// before they write their shards.
    #[must_use]
    pub fn layout_crc64(&self) -> u64 {
        self.layout.crc64()
    }
}
