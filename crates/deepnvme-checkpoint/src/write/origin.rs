//! Where the bytes of a record come from: memory, or a file that is being converted.

use std::ops::Range;
use std::sync::Arc;

use deepnvme_io::mem::sync::ignore_poison;
use deepnvme_io::mem::{Device, Region, Strided};
use deepnvme_io::{Engine, GpuAccess, TensorFile};

use super::flips::Flips;
use crate::error::Result;
use crate::stretch;
use crate::sync::Mutex;

/// Bytes that are to be saved.
#[derive(Clone, Debug)]
pub enum Origin {
    /// Those of memory, in row-major order where it has strides.
    Memory(Region),
    /// Those of memory on a GPU.
    Gpu(GpuBytes),
    /// Those of a stretch of a file, read when their turn comes.
    File(FileBytes),
    /// Elements of such a stretch, which do not lie side by side in it.
    View(FileView),
}

/// Memory on a GPU, and what copies out of it.
#[derive(Clone, Debug)]
pub struct GpuBytes {
    pub(crate) memory: Region,
    pub(crate) access: GpuAccess,
}

/// A stretch of an open file.
#[derive(Clone, Debug)]
pub struct FileBytes {
    /// What reads it.
    pub engine: Arc<Engine>,
    /// The file.
    pub file: Arc<TensorFile>,
    /// Where it begins, and ends.
    pub range: Range<u64>,
}

/// Elements of a stretch. It is read as a whole: few views are of more than a part of memory, and those that are read one
/// after the other are often of the same one.
#[derive(Clone, Debug)]
pub struct FileView {
    pub(crate) storage: FileBytes,
    /// Where the first element begins.
    pub(crate) at: usize,
    pub(crate) layout: Strided,
    pub(crate) flips: Option<Flips>,
    pub(crate) last: Arc<LastStorage>,
}

/// The storage that a view was last taken of: one at a time stays in memory.
#[derive(Debug, Default)]
pub(crate) struct LastStorage(Mutex<Option<(FileBytes, Region)>>);

/// A part of a record in memory: which of its bytes is the first there.
pub(super) struct Window {
    pub(super) memory: Region,
    pub(super) start: u64,
}

impl Origin {
    /// The bytes of memory, wherever it is; the engine copies those of a GPU.
    #[must_use]
    pub fn memory(engine: &Engine, memory: Region) -> Self {
        match memory.device() {
            Device::Host => Self::Memory(memory),
            Device::Cuda { .. } => Self::Gpu(GpuBytes { memory, access: engine.gpu_access() }),
        }
    }
}

impl From<Region> for Origin {
    fn from(memory: Region) -> Self {
        Self::Memory(memory)
    }
}

impl Origin {
    /// Bytes of the record.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Memory(memory) | Self::Gpu(GpuBytes { memory, .. }) => memory.len() as u64,
            Self::File(stretch) => stretch.range.end - stretch.range.start,
            Self::View(view) => view.layout.total_bytes() as u64,
        }
    }

    /// Whether they have to be waited for.
    pub(super) fn is_on_disk(&self) -> bool {
        matches!(self, Self::File(_) | Self::View(_))
    }

    /// Memory that has at least that part of the record.
    pub(super) fn window(&self, range: &Range<u64>) -> Result<Window> {
        match self {
            Self::Memory(memory) => Ok(Window { memory: memory.clone(), start: 0 }),
            Self::Gpu(GpuBytes { memory, access }) => {
                let mut bytes = vec![0; (range.end - range.start) as usize];
                access.copy_to_slice(memory, range.start as usize, &mut bytes)?;
                Ok(Window { memory: Region::from_vec(bytes), start: range.start })
            }
            Self::File(stretch) => Ok(Window { memory: stretch.read(range)?, start: range.start }),
            Self::View(view) => {
                let memory = view.read()?;
                let Some(flips) = view.flips else { return Ok(Window { memory, start: 0 }) };
                let mut bytes = vec![0; (range.end - range.start) as usize];
                memory.copy_to_slice(range.start as usize, &mut bytes);
                flips.apply(range.start, &mut bytes);
                Ok(Window { memory: Region::from_vec(bytes), start: range.start })
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
        stretch::read(&self.engine, &self.file, &range)
    }
}

impl FileView {
    fn read(&self) -> Result<Region> {
        let mut last = ignore_poison(self.last.0.lock());
        let storage = match &*last {
            Some((of, memory)) if of.is(&self.storage) => memory.clone(),
            _ => {
                // The old one goes before the new one comes.
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
