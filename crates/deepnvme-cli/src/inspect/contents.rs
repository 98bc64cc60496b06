//! The contents of checkpoint files.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use deepnvme_checkpoint::read::{self, CheckpointFile, FileMetadata};
use deepnvme_checkpoint::{Error, Progress, until_stopped};
use deepnvme_format::safetensors::PACKED_KEY;
use deepnvme_format::{Dtype, checksums};
use deepnvme_io::{Config, Engine, display};
use deepnvme_perf::Result;
use deepnvme_stream::pack::{self, PackedTensor};
use serde::Serialize;

use super::files::{failed, find_files};

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

/// Lists the contents of a file, or of all files of a folder or an index.
///
/// # Errors
/// `Interrupted`, or the error of the first file that cannot be read.
pub fn inspect(path: &Path, progress: &Progress) -> Result<Vec<Inspection>> {
    let engine = Engine::new(Config { workers: 1, ..Config::default() })?;
    let path = path.to_path_buf();
    let inspect = move || read::open_all_of(&path, find_files, |file| inspect_file(&engine, file));
    until_stopped(progress, inspect).map_err(failed)
}

fn inspect_file(engine: &Engine, file: &CheckpointFile) -> deepnvme_checkpoint::Result<Inspection> {
    let reader = file.open(engine)?;
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
            ("safetensors", metadata, header.tensors.iter().map(tensor).collect())
        }
    };
    Ok(Inspection {
        path: file.path.clone(),
        format,
        file_bytes: reader.file_bytes(),
        tensor_bytes: reader.extents().iter().map(|extent| extent.bytes).sum(),
        has_checksums: reader.has_checksums(),
        has_stale_checksums: reader.coverage() == read::Coverage::Stale,
        metadata,
        tensors,
    })
}
