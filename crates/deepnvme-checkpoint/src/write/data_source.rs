//! The data source of a record: memory, or a file that is being converted.

use std::ops::Range;
use std::sync::Arc;

use deepnvme_file::aligned_range::read_range;
use deepnvme_io::mem::sync::ignore_poison;
use deepnvme_io::mem::{Device, Region, Strided};
use deepnvme_io::{Engine, GpuAccess, TensorFile};

use super::sign_flips::SignFlips;
use crate::error::Result;
use crate::sync::Mutex;

/// The data source of a record.
#[derive(Clone, Debug)]
pub enum DataSource {
    /// Memory, in row-major order if it is strided.
    Memory(Region),
    /// Memory on a GPU.
    Gpu(GpuBytes),
    /// A byte range of a file, read when it is due.
    File(FileBytes),
    /// A strided view into a byte range of a file.
    View(FileView),
}

/// Memory on a GPU, and the access that copies from it.
#[derive(Clone, Debug)]
pub struct GpuBytes {
    pub(crate) memory: Region,
    pub(crate) access: GpuAccess,
}

/// A byte range of an open file.
#[derive(Clone, Debug)]
pub struct FileBytes {
    /// The engine that reads it.
    pub engine: Arc<Engine>,
    /// The file.
    pub file: Arc<TensorFile>,
    /// The byte range.
    pub range: Range<u64>,
}

/// A strided view of a byte range. The range is read as a whole: most views cover most of it, and consecutive views
/// often share it.
#[derive(Clone, Debug)]
pub struct FileView {
    pub(crate) storage: FileBytes,
    /// Offset of the first element.
    pub(crate) at: usize,
    pub(crate) layout: Strided,
    pub(crate) flips: Option<SignFlips>,
    pub(crate) last: Arc<StorageCache>,
}

/// The storage that was read last. Only one stays in memory.
#[derive(Debug, Default)]
pub(crate) struct StorageCache(Mutex<Option<(FileBytes, Region)>>);

/// A part of a record in memory. `start` is the offset of its first byte in the record.
pub(super) struct LoadedPart {
    pub(super) memory: Region,
    pub(super) start: u64,
}

impl DataSource {
    /// Creates a source for memory on any device. The engine copies from a GPU.
    #[must_use]
    pub fn memory(engine: &Engine, memory: Region) -> Self {
        match memory.device() {
            Device::Host => Self::Memory(memory),
            Device::Cuda { .. } => Self::Gpu(GpuBytes { memory, access: engine.gpu_access() }),
        }
    }
}

impl From<Region> for DataSource {
    fn from(memory: Region) -> Self {
        Self::Memory(memory)
    }
}

impl DataSource {
    /// Size of the record.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Memory(memory) | Self::Gpu(GpuBytes { memory, .. }) => memory.len() as u64,
            Self::File(source) => source.range.end - source.range.start,
            Self::View(view) => view.layout.total_bytes() as u64,
        }
    }

    /// Returns whether the data must be read from a file.
    pub(super) fn is_on_disk(&self) -> bool {
        matches!(self, Self::File(_) | Self::View(_))
    }

    /// Returns memory that contains at least this part of the record.
    pub(super) fn load(&self, range: &Range<u64>) -> Result<LoadedPart> {
        match self {
            Self::Memory(memory) => Ok(LoadedPart { memory: memory.clone(), start: 0 }),
            Self::Gpu(GpuBytes { memory, access }) => {
                let mut bytes = vec![0; (range.end - range.start) as usize];
                access.copy_to_slice(memory, range.start as usize, &mut bytes)?;
                Ok(LoadedPart { memory: Region::from_vec(bytes), start: range.start })
            }
            Self::File(source) => Ok(LoadedPart { memory: source.read(range)?, start: range.start }),
            Self::View(view) => {
                let memory = view.read()?;
                let Some(flips) = view.flips else { return Ok(LoadedPart { memory, start: 0 }) };
                let mut bytes = vec![0; (range.end - range.start) as usize];
                memory.copy_to_slice(range.start as usize, &mut bytes);
                flips.apply(range.start, &mut bytes);
                Ok(LoadedPart { memory: Region::from_vec(bytes), start: range.start })
            }
        }
    }
}

impl FileBytes {
    fn is(&self, other: &Self) -> bool {
        self.range == other.range && Arc::ptr_eq(&self.file, &other.file)
    }

    fn read(&self, part: &Range<u64>) -> Result<Region> {
        let range = self.range.start + part.start..self.range.start + part.end;
        Ok(read_range(&self.engine, &self.file, &range)?)
    }
}

impl FileView {
    fn read(&self) -> Result<Region> {
        let mut last = ignore_poison(self.last.0.lock());
        let storage = match &*last {
            Some((of, memory)) if of.is(&self.storage) => memory.clone(),
            _ => {
                // Free the old storage before reading the new one.
                *last = None;
                let memory = self.storage.read(&(0..self.storage.range.end - self.storage.range.start))?;
                *last = Some((self.storage.clone(), memory.clone()));
                memory
            }
        };
        storage.view(self.at, &self.layout).ok_or_else(|| {
            let detail = format!("elements at {} reach beyond a storage of {} bytes", self.at, storage.len());
            let FileBytes { file, range, .. } = &self.storage;
            deepnvme_io::Error::invalid(detail).at_path(file.path()).at_offset(range.start).into()
        })
    }
}
