//! `deepnvme pack`: rewrites a model's files layer by layer, and encodes weights on request or if that saves time.
//!
//! ```text
//! model      the tensors of the old files
//! order      the order of the tensors: layers, and experts within them     (no I/O)
//! encoding   how each tensor is encoded                                    (no I/O)
//! sample     encodes and decodes some of the tensors
//! estimate   what packing would gain, from the sample and the speed of the disk
//! container  the metadata of encoded tensors                               (no I/O)
//! write      writes the new file
//! folder     copies other files; the new folder appears complete
//! ```
//!
//! The new file is a safetensors file. If all tensors are unchanged or cast, it is `model.safetensors`, which any
//! reader understands. Otherwise it is `packed.safetensors`, in which encoded tensors are stored as bytes
//! (`docs/reference/packed-format.md`).

use std::path::{Path, PathBuf};
use std::sync::Arc;

use deepnvme_checkpoint::{Error, Progress, Result};
use deepnvme_io::fs::{self, FileKind};
use deepnvme_io::{Engine, Error as IoError, display};
use serde::Serialize;

mod container;
mod encoding;
mod estimate;
mod folder;
mod model;
mod order;
mod sample;
mod write;

pub use container::{PackedTensor, tensors};
pub use deepnvme_checkpoint::read::PACKED_NAME;
pub use encoding::EncodingMode;
pub use estimate::{EncodingTotals, Estimate};
pub use folder::{LeftOut, retyped};

use folder::NewFolder;
use model::Model;

/// The name of a file without encoded tensors.
pub const PLAIN_NAME: &str = "model.safetensors";

/// Options of packing.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PackOptions {
    /// The encoding of the weights.
    pub mode: EncodingMode,
    /// Folders to stripe the weights over, one for each disk. If empty, the weights lie in the new folder.
    pub disks: Vec<PathBuf>,
}

/// The outcome of a run of `pack`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct PackOutcome {
    /// The weights file, or its stripe manifest.
    #[serde(serialize_with = "display::serialize")]
    pub file: PathBuf,
    /// Bytes of the weights file.
    pub bytes: u64,
    /// Number of tensors.
    pub tensors: usize,
    /// Number of encoded tensors.
    pub encoded: usize,
    /// Number of other files that were copied.
    pub copied: usize,
    /// Files of the old folder that were left out.
    pub left_out: Vec<LeftOut>,
}

/// A model to be packed.
pub struct Packer {
    engine: Arc<Engine>,
    model: Model,
    plan: estimate::EncodingPlan,
    /// The model's folder, if it was given as one.
    folder: Option<PathBuf>,
    target: PathBuf,
    options: PackOptions,
}

impl Packer {
    /// Opens a model and estimates the gain: encodes and decodes a sample of its tensors, and writes and reads up to
    /// 256 MiB next to the new folder or on the disks. No file remains.
    ///
    /// # Errors
    /// `Io`; `Format` if the source cannot be packed; `Damaged`, `NotListed` or `ChangedList` if its metadata does not
    /// match its checksums.
    pub fn new(engine: &Arc<Engine>, source: &Path, target: &Path, options: PackOptions) -> Result<Self> {
        NewFolder::check(target)?;
        let kind = fs::stat(source).map(|stat| stat.kind);
        let kind = kind.map_err(|errno| IoError::os("open", errno).at_path(source))?;
        let model = Model::open(engine, source)?;
        let speeds = estimate::speeds(engine, &model, target, &options.disks)?;
        let plan = estimate::plan(engine, &model, options.mode, &speeds)?;
        let folder = (kind == FileKind::Folder).then(|| source.to_path_buf());
        Ok(Self { engine: Arc::clone(engine), model, plan, folder, target: target.to_path_buf(), options })
    }

    /// The estimated gain of packing.
    #[must_use]
    pub fn estimate(&self) -> &Estimate {
        &self.plan.estimate
    }

    /// Writes the new folder, which appears complete.
    ///
    /// # Errors
    /// `Io`; `Format` if a tensor cannot be encoded; `Damaged` if a source file does not match its checksums; `Changed`
    /// if one was written to meanwhile; `Interrupted`. After an error nothing of the new folder remains.
    pub fn run(mut self, progress: &Progress) -> Result<PackOutcome> {
        self.model.verify(&self.engine, progress)?;
        let encodings = &self.plan.encodings;
        let encoded = encodings.iter().filter(|encoding| encoding.is_encoded()).count();
        let name = if encoded > 0 { PACKED_NAME } else { PLAIN_NAME };
        let folder = NewFolder::new(&self.target, &self.options.disks, name)?;
        let private = folder.path().to_path_buf();
        self.fill(folder, encoded, progress).map_err(|error| error_of_target(error, &private, &self.target))
    }

    /// Fills the new folder, and gives it its name.
    fn fill(&self, mut folder: NewFolder, encoded: usize, progress: &Progress) -> Result<PackOutcome> {
        let encodings = &self.plan.encodings;
        let copied = match &self.folder {
            Some(old) => folder.copy_others(old, &self.model, self.options.mode)?,
            None => (0, Vec::new()),
        };
        let (copied, left_out) = copied;
        let (new, target) = folder.weights(self.model.permissions()?)?;
        let job = write::Job { engine: &self.engine, model: &self.model, encodings, target: &target, progress };
        let bytes = write::write(&job, new)?;
        self.model.check_unchanged()?;
        let file = folder.commit()?;
        Ok(PackOutcome { file, bytes, tensors: encodings.len(), encoded, copied, left_out })
    }
}

/// Gives an error of a file in the private folder the path that the file would have had at the end.
fn error_of_target(error: Error, private: &Path, target: &Path) -> Error {
    let Error::Io(error) = error else { return error };
    match error.path().and_then(|path| path.strip_prefix(private).ok()) {
        Some(name) => {
            let path = target.join(name);
            error.at_path(path).into()
        }
        None => error.into(),
    }
}
