//! Converts a checkpoint to another format.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use deepnvme_checkpoint::Progress;
use deepnvme_checkpoint::write::SaveOptions;
use deepnvme_io::{Config, Engine, display};
use deepnvme_perf::Result;
use serde::Serialize;

use super::files::failed;

/// The result of a conversion.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Conversion {
    /// The source.
    #[serde(serialize_with = "display::serialize")]
    pub source: PathBuf,
    /// The new file.
    #[serde(serialize_with = "display::serialize")]
    pub target: PathBuf,
    /// Size of the new file in bytes.
    pub file_bytes: u64,
    /// Tensors in the new file.
    pub tensors: usize,
    /// Entries of the source that are not tensors: name and type.
    pub left_out: Vec<(String, &'static str)>,
    /// Duration in seconds.
    pub seconds: f64,
}

/// Writes the tensors of a file, an index or a folder in the format of the target's extension.
///
/// # Errors
/// `Interrupted`, or an error of the source or the target. After an error there is no new file.
pub fn convert(source: &Path, target: &Path, progress: &Arc<Progress>) -> Result<Conversion> {
    let began = Instant::now();
    let engine = Arc::new(Engine::new(Config::default())?);
    let converted = deepnvme_checkpoint::convert(&engine, source, target, SaveOptions::default(), progress);
    let deepnvme_checkpoint::Conversion { saved, tensors, left_out } = converted.map_err(failed)?;
    let (source, target, file_bytes) = (source.to_path_buf(), target.to_path_buf(), saved.bytes);
    Ok(Conversion { source, target, file_bytes, tensors, left_out, seconds: began.elapsed().as_secs_f64() })
}
