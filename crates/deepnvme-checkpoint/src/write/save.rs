//! A save planned to the last byte. One process writes all of it, or several write a shard each.

use std::path::Path;

use deepnvme_format::checksums::RecordChecksums;
use deepnvme_io::{Durability, StreamEvents};

use super::archive::{ArchiveHeaders, Record};
use super::file_layout::FileLayout;
use super::safetensors::{SafetensorsHeaders, Tensor};
use super::write_pipeline::Staging;
use crate::error::{Error, Result};

/// Options of a save.
#[derive(Clone, Debug)]
pub struct SaveOptions {
    /// Guarantees after a power cut, once the save returns.
    pub durability: Durability,
    /// Whether to store checksums of each tensor.
    pub has_checksums: bool,
    /// Memory that the data is copied to first. `None`: a small pool of the save's own.
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
        let headers = ArchiveHeaders::new(path, &records, options.has_checksums);
        let headers = headers.map_err(|error| Error::format(path, error))?;
        let bytes = records.into_iter().map(|record| record.bytes).collect();
        let layout = FileLayout::new(path, headers.spans(), bytes, Box::new(headers));
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
        let headers = SafetensorsHeaders::new(tensors, metadata, options.has_checksums);
        let (headers, bytes) = headers.map_err(|error| Error::format(path, error))?;
        let layout = FileLayout::new(path, headers.spans(), bytes, Box::new(headers));
        Ok(Self { starts_after: layout.record_events()?, layout, options })
    }

    /// Size of the file.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.layout.bytes()
    }

    /// The names of the records or tensors, in file order.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.layout.names()
    }

    /// Returns the checksums of a record, once the checksums of all records are combined.
    pub(crate) fn checksums(&self, record: usize) -> Result<&RecordChecksums> {
        self.layout.checksums(record)
    }

    /// Equal for saves that describe the same file, regardless of the tensors' values. Writers compare fingerprints
    /// before they write their shards.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        self.layout.fingerprint()
    }
}
