//! The data source of a record: memory, or a file that is being converted. Signs may be flipped on the way.

use std::ops::Range;
use std::sync::Arc;

use deepnvme_file::aligned_range::read_range;
use deepnvme_format::{Dtype, Signs};
use deepnvme_io::mem::{Device, Region, Strided};
use deepnvme_io::{Engine, GpuAccess, TensorFile};

use super::sign_flips::SignFlips;
use crate::error::Result;
use crate::sync::{Mutex, lock};

/// The data source of a record.
#[derive(Clone, Debug)]
pub struct DataSource {
    pub(super) place: Place,
    /// Sign bits to flip while copying, for torch's lazy negatives and conjugates.
    flips: Option<SignFlips>,
}

/// Where the bytes of a record are.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    /// Host memory. Strided memory is read in row-major order.
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
pub(crate) struct GpuBytes {
    pub(super) memory: Region,
    pub(super) access: GpuAccess,
}

/// A byte range of an open file.
#[derive(Clone, Debug)]
pub(crate) struct FileBytes {
    /// The engine that reads it.
    pub(crate) engine: Arc<Engine>,
    /// The file.
    pub(crate) file: Arc<TensorFile>,
    /// The byte range.
    pub(crate) range: Range<u64>,
}

/// A strided view of a byte range. The range is read as a whole: most views cover most of it, and consecutive views
/// often share it.
#[derive(Clone, Debug)]
pub(crate) struct FileView {
    pub(crate) storage: FileBytes,
    /// Offset of the first element, in bytes.
    pub(crate) offset_bytes: usize,
    pub(crate) layout: Strided,
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
            Device::Host => memory.into(),
            Device::Cuda { .. } => Place::Gpu(GpuBytes { memory, access: engine.gpu_access() }).into(),
        }
    }

    /// Flips signs on the way from the source to the file. The source stays as it is, and no copy of it is made.
    ///
    /// # Errors
    /// The reason, if a sign of this type is not a single bit.
    pub fn with_signs(self, dtype: Dtype, signs: Signs) -> Result<Self, String> {
        Ok(Self { flips: SignFlips::of(dtype, signs)?, ..self })
    }

    /// Returns the size of the record.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        match &self.place {
            Place::Memory(memory) | Place::Gpu(GpuBytes { memory, .. }) => memory.len() as u64,
            Place::File(source) => source.range.end - source.range.start,
            Place::View(view) => view.layout.total_bytes() as u64,
        }
    }

    /// Returns whether the data must be read from a file.
    pub(super) fn is_on_disk(&self) -> bool {
        matches!(self.place, Place::File(_) | Place::View(_))
    }

    /// Returns memory that contains at least this part of the record. Its signs are those of the source: after copying,
    /// call [`Self::flip`].
    pub(super) fn load(&self, range: &Range<u64>) -> Result<LoadedPart> {
        match &self.place {
            Place::Memory(memory) => Ok(LoadedPart { memory: memory.clone(), start: 0 }),
            Place::Gpu(GpuBytes { memory, access }) => {
                let mut bytes = vec![0; (range.end - range.start) as usize];
                access.copy_to_slice(memory, range.start as usize, &mut bytes)?;
                Ok(LoadedPart { memory: Region::from_vec(bytes), start: range.start })
            }
            Place::File(source) => Ok(LoadedPart { memory: source.read(range)?, start: range.start }),
            Place::View(view) => Ok(LoadedPart { memory: view.read()?, start: 0 }),
        }
    }

    /// Flips the signs in a copied part of the record. `bytes` begins at offset `start` of the record.
    pub(super) fn flip(&self, start: u64, bytes: &mut [u8]) {
        if let Some(flips) = self.flips {
            flips.apply(start, bytes);
        }
    }
}

impl From<Region> for DataSource {
    fn from(memory: Region) -> Self {
        Place::Memory(memory).into()
    }
}

impl From<Place> for DataSource {
    fn from(place: Place) -> Self {
        Self { place, flips: None }
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
        let mut last = lock(&self.last.0);
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
        storage.view(self.offset_bytes, &self.layout).ok_or_else(|| {
            let detail = format!("elements at {} reach beyond a storage of {} bytes", self.offset_bytes, storage.len());
            let FileBytes { file, range, .. } = &self.storage;
            deepnvme_io::Error::invalid(detail).at_path(file.path()).at_offset(range.start).into()
        })
    }
}
