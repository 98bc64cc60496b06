//! `--gds`: whether bytes of GPUs go by way of cuFile.

use deepnvme_io::DirectMode;
use deepnvme_perf::{Error, Result};

/// Whether bytes go by way of cuFile: they must, where that is to be measured.
pub(super) fn gds_mode(is_asked: bool, gpu: Option<u32>) -> Result<DirectMode> {
    match (is_asked, gpu) {
        (false, _) => Ok(DirectMode::Disabled),
        (true, Some(_)) => Ok(DirectMode::Required),
        (true, None) => Err(Error::usage("--gds: it is about memory of a GPU; say --gpu, too".to_owned())),
    }
}

/// Refuses what DeepSpeed's tool would sweep with cuFile: its settings are mostly those of rings and slots.
pub(super) fn refuse_gds(is_asked: bool) -> Result<()> {
    if !is_asked {
        return Ok(());
    }
    let text = "this sweep is about rings and slots; deepnvme tune --gpu --gds tunes what matters to cuFile";
    Err(Error::usage(format!("--gds: {text}")))
}
