//! `deepnvme pack`: a model's files laid out layer by layer, in fewer bytes where that is asked for or gains.
//!
//! ```text
//! source     the tensors of the old files
//! order      which lies behind which: layers, and in them experts       (pure)
//! recipe     what is done to each, and what that makes of a part of it  (pure)
//! sample     some of the tensors, encoded and decoded again
//! survey     that, and the speed of the disk: what it would gain
//! container  what the new file says of tensors in another form          (pure)
//! write      all of it into the new file
//! folder     what else a model's folder has; the new folder appears at once, whole
//! ```
//!
//! The new file is a safetensors file. Where every tensor is as it was, or cast, it is `model.safetensors`, which everybody
//! reads; else it is `packed.safetensors`, whose tensors in another form are bytes for others. `docs/packed-format.md` has it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use deepnvme_checkpoint::{Progress, Result};
use deepnvme_io::fs::{self, Kind};
use deepnvme_io::{Engine, Error as IoError};
use serde::Serialize;

mod container;
mod encoding;
mod estimate;
mod folder;
mod model;
mod order;
mod sample;
mod write;

pub use container::{METADATA_KEY, PackedTensor, tensors};
pub use encoding::Mode;
pub use estimate::{Forecast, Share};
pub use folder::LeftOut;

use folder::NewFolder;
use model::Model;

/// The name of a file that has tensors in another form.
pub const PACKED_NAME: &str = "packed.safetensors";
/// The name of one that has none.
pub const PLAIN_NAME: &str = "model.safetensors";

/// What is asked for.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PackOptions {
    /// What becomes of the weights.
    pub mode: Mode,
    /// Folders that the weights are striped over, one for each disk. None: they lie in the new folder itself.
    pub disks: Vec<PathBuf>,
}

/// What was made.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Packed {
    /// The file, or the manifest of its stripes.
    pub file: PathBuf,
    /// Bytes of it.
    pub bytes: u64,
    /// How many tensors it has.
    pub tensors: usize,
    /// How many of those are in another form.
    pub encoded: usize,
    /// Other files of the folder that were copied.
    pub copied: usize,
    /// What the folder has, and the new one has not.
    pub left_out: Vec<LeftOut>,
}

/// A model that is looked at, and may be packed.
pub struct Packer {
    engine: Arc<Engine>,
    model: Model,
    plan: estimate::Plan,
    /// The model's folder, if it was named by that.
    folder: Option<PathBuf>,
    target: PathBuf,
    options: PackOptions,
}

impl Packer {
    /// Looks at a model: a sample of its tensors is encoded and decoded, and up to 256 MiB are written and read beside the new
    /// folder (or on the disks) to learn how fast that is. Nothing of it stays.
    ///
    /// # Errors
    /// `Io`, and `Format` where the source is not what is packed.
    pub fn new(engine: &Arc<Engine>, source: &Path, target: &Path, options: PackOptions) -> Result<Self> {
        NewFolder::check(target)?;
        let kind = fs::stat(source).map(|stat| stat.kind);
        let kind = kind.map_err(|errno| IoError::os("open", errno).at_path(source))?;
        let model = Model::open(engine, source)?;
        let speeds = estimate::speeds(engine, &model, target, &options.disks)?;
        let plan = estimate::plan(engine, &model, options.mode, &speeds)?;
        let folder = (kind == Kind::Folder).then(|| source.to_path_buf());
        Ok(Self { engine: Arc::clone(engine), model, plan, folder, target: target.to_path_buf(), options })
    }

    /// What packing would gain.
    #[must_use]
    pub fn forecast(&self) -> &Forecast {
        &self.plan.forecast
    }

    /// Writes the new folder; it is there when it is whole.
    ///
    /// # Errors
    /// `Io`; `Format` where a tensor cannot be stored as asked for; `Damaged` where the source has checksums, and is not what
    /// they say; `Interrupted`. Then nothing is left of the new folder.
    pub fn run(mut self, progress: &Progress) -> Result<Packed> {
        self.model.audit(&self.engine, progress)?;
        let recipes = &self.plan.recipes;
        let encoded = recipes.iter().filter(|recipe| recipe.is_encoded()).count();
        let name = if encoded > 0 { PACKED_NAME } else { PLAIN_NAME };
        let mut folder = NewFolder::new(&self.target, &self.options.disks, name)?;
        let copied = match &self.folder {
            Some(old) => folder.copy_others(old, &self.model, self.options.mode)?,
            None => (0, Vec::new()),
        };
        let (copied, left_out) = copied;
        let (new, target) = folder.weights(self.model.permissions()?)?;
        let bytes = write::write(&self.engine, &self.model, recipes, new, &target, progress)?;
        let file = folder.commit()?;
        Ok(Packed { file, bytes, tensors: recipes.len(), encoded, copied, left_out })
    }
}
