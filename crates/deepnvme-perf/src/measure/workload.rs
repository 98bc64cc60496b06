//! The description of a workload.

use std::path::PathBuf;

use deepnvme_file::stripe_set::{STRIPE_BYTES_MAX, STRIPE_BYTES_MIN};
use deepnvme_io::display;
use deepnvme_io::{Config, Durability};
use serde::{Deserialize, Serialize};

use super::gpu;
use crate::error::{Error, Result};
use crate::units::bytes_text;

/// The direction of the transfers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// From disk to memory.
    Read,
    /// From memory to disk.
    Write,
}

/// The order of a file's blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AccessOrder {
    /// Large requests, as for a tensor.
    #[default]
    Sequential,
    /// A request per block, each block once, shuffled.
    Random,
}

/// The kind of host memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Memory {
    /// Pinned and aligned, like `deepnvme.pinned_empty`.
    #[default]
    Pinned,
    /// Ordinary pages, aligned to 64 bytes, like `torch.empty`.
    Plain,
}

/// Where the memory of a transfer is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct MemoryPlace {
    /// The kind of host memory. Default pinned.
    pub memory: Memory,
    /// The GPU that holds the memory instead of the host. Default none.
    pub gpu: Option<u32>,
}

/// The state of the page cache before a round.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Cache {
    /// No page of the file is cached.
    #[default]
    Cold,
    /// The whole file is cached.
    Warm,
}

/// The work of one process in one round.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Workload {
    /// Read or write.
    pub direction: Direction,
    /// The folders of the files: one file in each, transferred at the same time; or one file striped over all.
    #[serde(serialize_with = "display::serialize_all")]
    pub folders: Vec<PathBuf>,
    /// Bytes of a stripe, if one file is striped over all folders.
    pub stripe_bytes: Option<u64>,
    /// Bytes of each file.
    pub io_bytes: u64,
    /// Default sequential.
    pub order: AccessOrder,
    /// Where its memory is.
    #[serde(flatten)]
    pub place: MemoryPlace,
    /// Bytes of a buffer that is reused block by block, as fio does. `None`: as large as the file, as for a tensor.
    pub buffer_bytes: Option<u64>,
    /// Default cold.
    pub cache: Cache,
    /// The durability of a write. Default none.
    pub durability: Durability,
    /// Whether every byte is compared after a round, outside the timing.
    pub validate: bool,
    /// The engine's settings.
    pub config: Config,
}

impl Workload {
    /// Returns the defaults, with one file of this size in each folder.
    #[must_use]
    pub fn new(direction: Direction, folders: Vec<PathBuf>, io_bytes: u64) -> Self {
        Self {
            direction,
            folders,
            stripe_bytes: None,
            io_bytes,
            order: AccessOrder::default(),
            place: MemoryPlace::default(),
            buffer_bytes: None,
            cache: Cache::default(),
            durability: Durability::None,
            validate: false,
            config: Config::default(),
        }
    }

    /// Checks that the workload makes sense and touches no existing file.
    ///
    /// # Errors
    /// `Usage`, with the option at fault and a remedy.
    pub fn check(&self) -> Result<()> {
        self.config.validate().map_err(|error| Error::usage(error.to_string()))?;
        if self.folders.is_empty() {
            return Err(Error::usage("name at least one folder to measure in"));
        }
        if self.io_bytes == 0 {
            return Err(Error::usage("--size 0 transfers nothing; use for example --size 1G"));
        }
        if self.validate && self.buffer_bytes.is_some() {
            return Err(Error::usage("--validate compares the whole file in memory; remove --buffer"));
        }
        if let Some(bytes) = self.buffer_bytes.filter(|bytes| *bytes < self.config.block_bytes) {
            let (buffer, block) = (bytes_text(bytes), bytes_text(self.config.block_bytes));
            return Err(Error::usage(format!("--buffer {buffer} is less than one block of {block}")));
        }
        if self.order == AccessOrder::Random && self.io_bytes < self.config.block_bytes {
            let (size, block) = (bytes_text(self.io_bytes), bytes_text(self.config.block_bytes));
            return Err(Error::usage(format!(
                "--random transfers whole blocks, and --size {size} is less than one block of {block}"
            )));
        }
        let stripe_fits = |bytes: u64| {
            (STRIPE_BYTES_MIN..=STRIPE_BYTES_MAX).contains(&bytes) && bytes.is_multiple_of(deepnvme_io::mem::PAGE_BYTES)
        };
        if let Some(bytes) = self.stripe_bytes.filter(|bytes| !stripe_fits(*bytes)) {
            let text = "--stripe-bytes must be a multiple of 4K, at most 1G";
            return Err(Error::usage(format!("{text}, not {}", bytes_text(bytes))));
        }
        let is_number = |folder: &&PathBuf| folder.to_str().is_some_and(|name| name.parse::<u32>().is_ok());
        if let Some(number) = self.folders.iter().find(|folder| is_number(folder) && !folder.exists())
            && self.place.gpu.is_some()
        {
            let number = number.display();
            return Err(Error::usage(format!(
                "{number} is not a folder; for the GPU of this number, write --gpu={number}"
            )));
        }
        self.folders.iter().try_for_each(|folder| check_folder(folder))?;
        if self.place.gpu.is_some() && self.place.memory == Memory::Plain {
            return Err(Error::usage("--memory plain is host memory; remove it, or remove --gpu"));
        }
        self.place.gpu.map_or(Ok(()), |index| gpu::find(index).map(drop))
    }

    /// Returns the bytes that a round transfers.
    #[must_use]
    pub fn round_bytes(&self) -> u64 {
        self.file_bytes() * self.file_count() as u64
    }

    /// Returns the number of files that are transferred at the same time.
    #[must_use]
    pub fn file_count(&self) -> usize {
        if self.stripe_bytes.is_some() { 1 } else { self.folders.len() }
    }

    /// Returns the bytes of a file that are transferred: random transfers are whole blocks.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        match self.order {
            AccessOrder::Sequential => self.io_bytes,
            AccessOrder::Random => self.io_bytes / self.config.block_bytes * self.config.block_bytes,
        }
    }
}

fn check_folder(folder: &std::path::Path) -> Result<()> {
    use std::os::unix::fs::FileTypeExt;
    let name = display::path(folder);
    let metadata = std::fs::metadata(folder).map_err(|error| Error::at(folder, "cannot read its metadata", &error))?;
    let kind = metadata.file_type();
    if kind.is_block_device() || kind.is_char_device() {
        let text = "is a device, and its data would be lost; name a folder on its file system";
        return Err(Error::usage(format!("{name} {text}")));
    }
    if !kind.is_dir() {
        return Err(Error::usage(format!(
            "{name} is not a folder; existing files are never touched, so name a folder"
        )));
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns a small workload with defaults.
    pub(crate) fn small(direction: Direction, folders: &[&std::path::Path]) -> Workload {
        let folders = folders.iter().map(|folder| folder.to_path_buf()).collect();
        Workload {
            validate: true,
            config: Config { block_bytes: 64 << 10, ..Config::default() },
            ..Workload::new(direction, folders, 3 << 20)
        }
    }

    #[test]
    fn invalid_workloads_are_refused_with_a_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("precious");
        std::fs::write(&file, "x").unwrap();
        let good = small(Direction::Write, &[folder.path()]);
        assert!(good.check().is_ok());
        let cases: [(Workload, &str); 11] = [
            (Workload { buffer_bytes: Some(1 << 20), ..good.clone() }, "remove --buffer"),
            (Workload { buffer_bytes: Some(4096), validate: false, ..good.clone() }, "less than one block"),
            (Workload { folders: vec![], ..good.clone() }, "at least one folder"),
            (Workload { io_bytes: 0, ..good.clone() }, "--size"),
            (Workload { io_bytes: 4096, order: AccessOrder::Random, ..good.clone() }, "whole blocks"),
            (Workload { place: MemoryPlace { memory: Memory::Plain, gpu: Some(0) }, ..good.clone() }, "host memory"),
            (Workload { stripe_bytes: Some(5), ..good.clone() }, "multiple of 4K"),
            (Workload { folders: vec![file.clone()], ..good.clone() }, "never touched"),
            (Workload { folders: vec!["/dev/null".into()], ..good.clone() }, "is a device"),
            (Workload { folders: vec![folder.path().join("no")], ..good.clone() }, "a folder that exists"),
            (Workload { config: Config { workers: 0, ..Config::default() }, ..good }, "workers"),
        ];
        for (workload, expected) in cases {
            let text = workload.check().unwrap_err().to_string();
            assert!(text.contains(expected), "{text}");
        }
        assert_eq!(std::fs::read_to_string(file).unwrap(), "x");
    }

    #[test]
    fn random_blocks_are_whole_and_stripes_are_one_file() {
        let folders = [std::path::Path::new("/a"), std::path::Path::new("/b")];
        let plain = Workload { io_bytes: 100_000, ..small(Direction::Read, &folders) };
        assert_eq!((plain.file_count(), plain.round_bytes()), (2, 200_000));
        let random = Workload { order: AccessOrder::Random, ..plain.clone() };
        assert_eq!(random.round_bytes(), 2 * 65536);
        let striped = Workload { stripe_bytes: Some(4096), ..plain };
        assert_eq!((striped.file_count(), striped.round_bytes()), (1, 100_000));
    }
}
