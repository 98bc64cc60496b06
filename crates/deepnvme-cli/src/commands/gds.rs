//! The option `--gds`.

use deepnvme_io::DirectMode;
use deepnvme_perf::{Error, Result};

/// Converts `--gds`: cuFile is required if it is to be measured.
pub(super) fn gds_mode(is_set: bool, gpu: Option<u32>) -> Result<DirectMode> {
    match (is_set, gpu) {
        (false, _) => Ok(DirectMode::Disabled),
        (true, Some(_)) => Ok(DirectMode::Required),
        (true, None) => Err(Error::usage("--gds needs GPU memory; add --gpu".to_owned())),
    }
}

/// Refuses `--gds` for DeepSpeed's sweep: most of its settings do not apply to cuFile.
pub(super) fn refuse_gds(is_set: bool) -> Result<()> {
    if !is_set {
        return Ok(());
    }
    Err(Error::usage("--gds: this sweep does not apply to cuFile; use deepnvme tune --gpu --gds"))
}
