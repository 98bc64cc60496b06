//! Tensors of a checkpoint in another format.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use deepnvme_checkpoint::Progress;
use deepnvme_checkpoint::write::SaveOptions;
use deepnvme_io::{Config, Engine, shown};
use deepnvme_perf::Result;
use serde::Serialize;

use super::files::failed;

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
