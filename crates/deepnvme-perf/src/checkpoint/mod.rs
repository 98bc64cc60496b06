//! What checkpoint files hold, whether they are what was saved, and the same in another format.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use deepnvme_checkpoint::read::{self, Contents, Located};
use deepnvme_checkpoint::write::SaveOptions;
use deepnvme_checkpoint::{Progress, until_stopped};
use deepnvme_format::Dtype;
use deepnvme_io::{Config, Engine, shown};
use serde::Serialize;

use crate::error::{Error, Result};

pub mod text;
mod verify;

pub use verify::{Coverage, Verdict, Verification, verify};

/// What one file holds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Inspection {
    /// The file.
    #[serde(serialize_with = "shown::serialize")]
    pub path: PathBuf,
    /// `torch` or `safetensors`.
    pub format: &'static str,
    /// Bytes of the file.
    pub file_bytes: u64,
    /// Bytes of the tensors' storages; those that tensors share count once.
    pub tensor_bytes: u64,
    /// Whether it has checksums of its own, and can be verified by them.
    pub has_checksums: bool,
    /// Whether it has checksums that were made for another file, and copied into this one.
    pub has_stale_checksums: bool,
    /// Texts in a safetensors header, but for our own.
    pub metadata: Vec<(String, String)>,
    /// The tensors, in the order of the file's objects.
    pub tensors: Vec<Tensor>,
}

/// One tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Tensor {
    /// The way to it.
    pub name: String,
    /// torch's name for the type of its elements.
    pub dtype: &'static str,
    /// Its sizes.
    pub shape: Vec<u64>,
    /// Bytes of its elements.
    pub bytes: u64,
    /// Where in the file its elements begin.
    pub offset: u64,
    /// Whether other tensors lie in the same storage.
    pub is_shared: bool,
}

/// What the file, or the files of the folder or index, hold.
///
/// # Errors
/// `Interrupted`, and what is wrong with the first one that cannot be read.
pub fn inspect(path: &Path, progress: &Progress) -> Result<Vec<Inspection>> {
    let engine = Engine::new(Config { workers: 1, ..Config::default() })?;
    let path = path.to_path_buf();
    let inspect = move || read::open_all_of(&path, verify::set_of, |file| inspect_file(&engine, file));
    until_stopped(progress, inspect).map_err(failed)
}

fn inspect_file(engine: &Engine, file: &Located) -> deepnvme_checkpoint::Result<Inspection> {
    let reader = file.open(engine)?;
    let (format, metadata, tensors) = match reader.contents() {
        Contents::Archive { state, .. } => {
            let mut users = vec![0; state.storages.len()];
            state.tensors.iter().for_each(|tensor| users[tensor.storage] += 1);
            let tensor = |tensor: &deepnvme_format::state::Tensor| Tensor {
                name: tensor.name.clone(),
                dtype: tensor.dtype.torch_name(),
                shape: tensor.shape.clone(),
                bytes: tensor.bytes(),
                offset: reader.extents()[tensor.storage].data_offset + tensor.offset * tensor.dtype.bytes(),
                is_shared: users[tensor.storage] > 1,
            };
            ("torch", Vec::new(), state.tensors.iter().map(tensor).collect())
        }
        Contents::Safetensors { header } => {
            let tensor = |tensor: &deepnvme_format::safetensors::Tensor| Tensor {
                name: tensor.name.clone(),
                dtype: Dtype::torch_name(tensor.dtype),
                shape: tensor.shape.clone(),
                bytes: tensor.bytes,
                offset: tensor.offset,
                is_shared: false,
            };
            let own = |(key, _): &&(String, String)| key != deepnvme_format::checksums::METADATA_KEY;
            let metadata = header.metadata.iter().filter(own).cloned().collect();
            ("safetensors", metadata, header.tensors.iter().map(tensor).collect())
        }
    };
    Ok(Inspection {
        path: file.path.clone(),
        format,
        file_bytes: reader.file_bytes(),
        tensor_bytes: reader.extents().iter().map(|extent| extent.bytes).sum(),
        has_checksums: reader.has_sums(),
        has_stale_checksums: reader.coverage() == read::Coverage::Stale,
        metadata,
        tensors,
    })
}

/// What a conversion made.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Conversion {
    /// What was read.
    #[serde(serialize_with = "shown::serialize")]
    pub source: PathBuf,
    /// What was written.
    #[serde(serialize_with = "shown::serialize")]
    pub target: PathBuf,
    /// Bytes of it.
    pub file_bytes: u64,
    /// How many tensors it has.
    pub tensors: usize,
    /// What is in the source and is no tensor: the names, and what each is.
    pub left_out: Vec<(String, &'static str)>,
    /// How long it took.
    pub seconds: f64,
}

/// Writes the tensors of a file, an index or a folder in the format that the target's name means.
///
/// # Errors
/// `Interrupted`, and whatever is wrong with the source or the target; then there is no new file.
pub fn convert(source: &Path, target: &Path, progress: &Arc<Progress>) -> Result<Conversion> {
    let began = Instant::now();
    let engine = Arc::new(Engine::new(Config::default())?);
    let converted = deepnvme_checkpoint::convert(&engine, source, target, SaveOptions::default(), progress);
    let deepnvme_checkpoint::Conversion { saved, tensors, left_out } = converted.map_err(failed)?;
    let (source, target, file_bytes) = (source.to_path_buf(), target.to_path_buf(), saved.bytes);
    Ok(Conversion { source, target, file_bytes, tensors, left_out, seconds: began.elapsed().as_secs_f64() })
}

pub(crate) fn failed(error: deepnvme_checkpoint::Error) -> Error {
    match error {
        deepnvme_checkpoint::Error::Io(error) => Error::Engine(error),
        deepnvme_checkpoint::Error::Interrupted => Error::Interrupted,
        other => Error::failed(other.to_string()),
    }
}
