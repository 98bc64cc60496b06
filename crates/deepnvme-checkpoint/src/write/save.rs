//! A save that is planned: written as a whole by one process, or in shares by several.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use deepnvme_format::sums::RecordSums;
use deepnvme_io::stream::Replacement;
use deepnvme_io::{Durability, Engine, ErrorKind, OpenOptions, StreamPoints, Target, TensorFile};

use super::archive::ArchiveLayout;
use super::image::Image;
use super::origin::Origin;
use super::safetensors::SafetensorsLayout;
use super::share::Share;
use super::writer::Staging;
use crate::error::{Error, Result};
use crate::progress::Progress;

/// A record of an archive.
#[derive(Clone, Debug)]
pub struct Record {
    /// Its name below the archive's root.
    pub name: String,
    /// Its bytes.
    pub bytes: Origin,
}

/// A tensor of a safetensors file.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Name, type and sizes.
    pub spec: deepnvme_format::safetensors::TensorSpec,
    /// Its elements in row-major order.
    pub bytes: Origin,
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
    pub(crate) fn sums(&self, record: usize) -> Result<&RecordSums> {
        self.image.sums(record)
    }

    /// The same for saves that are to be the same file, whatever their tensors hold: writers compare it before each
    /// writes a share.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        self.image.fingerprint()
    }

    /// Writes the whole file under a private name, and gives it its own.
    ///
    /// # Errors
    /// `Io` for what the disk refused: then nothing is left of the new file, and the old one is untouched.
    /// `Interrupted` when `progress` was stopped.
    pub fn run(self, engine: Arc<Engine>, target: &Target, progress: Arc<Progress>) -> Result<Saved> {
        let durability = self.options.durability;
        let (saved, replacement) = self.write(engine, target, progress)?;
        replacement.commit(durability == Durability::Full)?;
        Ok(saved)
    }

    /// Writes the whole file under a private name, and leaves it to the caller to give it another one.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn write(self, engine: Arc<Engine>, target: &Target, progress: Arc<Progress>) -> Result<(Saved, Replacement)> {
        let bytes = self.bytes();
        let (replacement, file) = create(&engine, target, bytes)?;
        let shown = Arc::clone(&progress);
        let share = Arc::new(self).share(engine, file, 0..bytes, 0, progress);
        let saved =
            share.and_then(|share| share.finish(&[])).map_err(|error| named(error, replacement.target(), bytes))?;
        shown.check()?;
        Ok((saved, replacement))
    }

    /// Writes the whole file into one that is there already, and that nobody reads yet: a member of a set that will be
    /// replaced at once. Its bytes are synced as far as the options say; its name is the caller's to sync.
    ///
    /// # Errors
    /// As [`run`](Self::run). What is in the file then is of no use.
    pub fn write_into(self, engine: Arc<Engine>, path: &Path, progress: Arc<Progress>) -> Result<Saved> {
        let bytes = self.bytes();
        let shown = Arc::clone(&progress);
        let options = OpenOptions::to_fill(engine.config().direct);
        let filled = || {
            let file = TensorFile::open(&Target::Path(path.to_path_buf()), options)?;
            file.set_len(bytes)?;
            Arc::new(self).share(engine, file, 0..bytes, 0, progress)?.finish(&[])
        };
        let saved = filled().map_err(|error| named(error, path, bytes))?;
        shown.check()?;
        Ok(saved)
    }

    /// Writes what can be written at once of that range of the file, one of [`shares`](super::shares), into a file whose
    /// first byte is the byte `base`. The rest follows with [`Share::finish`].
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn share(
        self: Arc<Self>,
        engine: Arc<Engine>,
        file: Arc<TensorFile>,
        range: Range<u64>,
        base: u64,
        progress: Arc<Progress>,
    ) -> Result<Share> {
        Share::start(self, engine, file, range, base, progress)
    }
}

/// A private file of so many bytes, which will be the target. A full disk is found out before anything is written, and
/// writes land inside the file.
///
/// # Errors
/// The refusal of the folder or the disk.
pub fn create(engine: &Engine, target: &Target, bytes: u64) -> Result<(Replacement, Arc<TensorFile>)> {
    let replacement = Replacement::new(target)?;
    let file = replacement.open(engine.config().direct)?;
    file.set_len(bytes).map_err(|error| error.at_path(replacement.target()))?;
    Ok((replacement, file))
}

/// An error of the temporary, as one of the file that was to be; a full disk with what was needed.
pub fn named(error: Error, target: &Path, file_bytes: u64) -> Error {
    let Error::Io(error) = error else { return error };
    let error = error.at_path(target);
    if error.kind() != ErrorKind::NoSpace {
        return error.into();
    }
    let text = format!(
        "the checkpoint needs {file_bytes} bytes, and there is not so much room; free some space or choose another \
         folder. What was there under that name before is untouched"
    );
    error.because(text).into()
}
