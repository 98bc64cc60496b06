//! The contents of checkpoint files.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use deepnvme_checkpoint::history;
use deepnvme_checkpoint::read::{self, CheckpointFile, FileMetadata};
use deepnvme_checkpoint::{Error, Progress, until_stopped};
use deepnvme_format::safetensors::PACKED_KEY;
use deepnvme_format::{Dtype, checksums};
use deepnvme_io::{Config, Engine, display, fs};
use deepnvme_perf::Result;
use deepnvme_stream::pack::{self, PackedTensor};
use serde::Serialize;

use super::files::{failed, find_any, find_files};
use super::names::{checkpoints_by_name, names_in, without_checkpoint};

/// The contents of one file.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Inspection {
    /// The file.
    #[serde(serialize_with = "display::serialize")]
    pub path: PathBuf,
    /// `torch` or `safetensors`.
    pub format: &'static str,
    /// Size of the file in bytes.
    pub file_bytes: u64,
    /// Bytes of the tensors' storages; shared storages count once.
    pub tensor_bytes: u64,
    /// Whether it has its own checksums and can be verified.
    pub has_checksums: bool,
    /// Whether it has checksums copied from another file.
    pub has_stale_checksums: bool,
    /// Metadata of a safetensors header, without ours.
    pub metadata: Vec<(String, String)>,
    /// The tensors, in file order.
    pub tensors: Vec<Tensor>,
    /// The pickled values of a distributed checkpoint, which are stored as the bytes of a tensor, in file order.
    pub values: Vec<PickledValue>,
}

/// One pickled value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PickledValue {
    /// Its dotted name.
    pub name: String,
    /// Size of the pickle in bytes.
    pub bytes: u64,
    /// Offset of the pickle in the file.
    pub offset: u64,
}

/// One tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Tensor {
    /// Its dotted name.
    pub name: String,
    /// torch's name of its dtype.
    pub dtype: &'static str,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Bytes of its elements in the file.
    pub bytes: u64,
    /// Offset of its elements in the file.
    pub offset: u64,
    /// Whether it shares its storage with other tensors.
    pub is_shared: bool,
    /// Whether its bytes are encoded elements of a packed model.
    pub is_packed: bool,
}

/// The key of the header of an optimizer's state, which has tensors that fill gaps.
const OPTIMIZER_KEY: &str = "deepnvme.optimizer";
/// The start of the names of these tensors; a number follows.
const PADDING_PREFIX: &str = "pad.";
/// Retries when a `Checkpointer` removes checkpoints while they are inspected.
const REMOVALS_MAX: usize = 100;

/// Lists the contents of a file, of all files of an index, of the model in a folder, or of all checkpoints that the
/// manifest of a `Checkpointer` lists. In a folder without them, lists all files whose names are those of checkpoints.
///
/// # Errors
/// `Interrupted`, or the error of the first file that cannot be read.
pub fn inspect(path: &Path, progress: &Progress) -> Result<Vec<Inspection>> {
    let engine = Engine::new(Config { workers: 1, ..Config::default() })?;
    let path = path.to_path_buf();
    until_stopped(progress, move || inspect_any(&engine, &path)).map_err(failed)
}

fn inspect_any(engine: &Engine, path: &Path) -> deepnvme_checkpoint::Result<Vec<Inspection>> {
    let inspect = |path: &Path| read::open_all_of(path, find_files, |file| inspect_file(engine, file));
    // A folder with a model may have a file of the manifest's name from another program.
    if !fs::is_folder(path) || find_any(path)?.is_some() {
        return inspect(path);
    }
    let mut listed = history::listed(path)?;
    for _ in 0..REMOVALS_MAX {
        let Some(now) = listed.as_ref().filter(|listed| !listed.checkpoints.is_empty()) else { break };
        let inspected: deepnvme_checkpoint::Result<Vec<_>> =
            now.checkpoints.iter().map(|(_, path)| inspect(path)).collect();
        let again = history::listed(path)?;
        if inspected.is_ok() || again == listed {
            return Ok(inspected?.into_iter().flatten().collect());
        }
        listed = again;
    }
    let names = names_in(path)?;
    let others = checkpoints_by_name(path, &names);
    if listed.is_some() || others.is_empty() {
        return inspect(path).map_err(|error| if listed.is_some() { error } else { without_checkpoint(error, &names) });
    }
    let inspected: deepnvme_checkpoint::Result<Vec<_>> = others.iter().map(|other| inspect(&other.path)).collect();
    Ok(inspected?.into_iter().flatten().collect())
}

fn inspect_file(engine: &Engine, file: &CheckpointFile) -> deepnvme_checkpoint::Result<Inspection> {
    let reader = file.open(engine)?;
    let mut values = Vec::new();
    let mut padding_bytes = 0;
    let (format, metadata, tensors) = match reader.file_metadata() {
        FileMetadata::Archive { state, .. } => {
            let mut users = vec![0; state.storages.len()];
            state.tensors.iter().for_each(|tensor| users[tensor.storage] += 1);
            let tensor = |tensor: &deepnvme_format::state::Tensor| Tensor {
                name: tensor.name.clone(),
                dtype: tensor.dtype.torch_name(),
                shape: tensor.view.shape.clone(),
                bytes: tensor.bytes(),
                offset: reader.extents()[tensor.storage].data_offset + tensor.view.offset * tensor.dtype.bytes(),
                is_shared: users[tensor.storage] > 1,
                is_packed: false,
            };
            ("torch", Vec::new(), state.tensors.iter().map(tensor).collect())
        }
        FileMetadata::Safetensors { header } => {
            let packed = pack::tensors(header, 0)
                .map_err(|source| Error::Format { path: reader.path().to_path_buf(), source })?;
            let packed: HashMap<&str, &PackedTensor> =
                packed.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
            let tensor = |tensor: &deepnvme_format::safetensors::Tensor| {
                let decoded = packed.get(tensor.name.as_str());
                Tensor {
                    name: tensor.name.clone(),
                    dtype: Dtype::torch_name(decoded.map_or(tensor.dtype, |packed| packed.dtype)),
                    shape: decoded.map_or(&tensor.shape, |packed| &packed.shape).clone(),
                    bytes: tensor.bytes,
                    offset: tensor.offset,
                    is_shared: false,
                    is_packed: decoded.is_some(),
                }
            };
            let own = |(key, _): &&(String, String)| ![checksums::METADATA_KEY, PACKED_KEY].contains(&key.as_str());
            let metadata = header.metadata.iter().filter(own).cloned().collect();
            let has_padding = header.metadata.iter().any(|(key, _)| key == OPTIMIZER_KEY);
            let pickled: HashSet<&str> = file.values.iter().map(String::as_str).collect();
            let mut tensors = Vec::with_capacity(header.tensors.len());
            for one in &header.tensors {
                if has_padding && is_padding(&one.name) {
                    padding_bytes += one.bytes;
                } else if pickled.contains(one.name.as_str()) {
                    values.push(PickledValue { name: one.name.clone(), bytes: one.bytes, offset: one.offset });
                } else {
                    tensors.push(tensor(one));
                }
            }
            ("safetensors", metadata, tensors)
        }
    };
    let stored: u64 = reader.extents().iter().map(|extent| extent.bytes).sum();
    let other_bytes = values.iter().map(|value| value.bytes).sum::<u64>() + padding_bytes;
    Ok(Inspection {
        path: file.path.clone(),
        format,
        file_bytes: reader.file_bytes(),
        tensor_bytes: stored - other_bytes,
        has_checksums: reader.has_checksums(),
        has_stale_checksums: reader.coverage() == read::Coverage::Stale,
        metadata,
        tensors,
        values,
    })
}

/// Returns whether a tensor of an optimizer's state only fills a gap.
fn is_padding(name: &str) -> bool {
    name.strip_prefix(PADDING_PREFIX).is_some_and(|number| number.bytes().all(|byte| byte.is_ascii_digit()))
}
