//! The GPU whose memory bytes come from or go to.

use deepnvme_io::DirectMode;
use deepnvme_io::probe::{GpuFacts, GpuProbe};

use crate::error::{Error, Result};

/// The GPU of that number.
///
/// # Errors
/// `Usage` where there is none: what was looked for, and what was found instead.
pub(crate) fn find(index: u32) -> Result<GpuFacts> {
    let GpuProbe { devices, reason, .. } = GpuProbe::run();
    let count = devices.len();
    devices.into_iter().find(|device| device.index == index).ok_or_else(|| {
        Error::usage(match reason {
            Some(reason) => format!("--gpu: {reason}"),
            None => format!("--gpu={index}: there is no such GPU; there are {count}, and cuda:0 is the first"),
        })
    })
}

/// As tables call its memory.
pub(crate) fn memory_text(index: u32) -> String {
    format!("memory of cuda:{index}")
}

/// Whether bytes go by way of cuFile: they must, where that is to be measured.
pub(crate) fn gds_mode(is_asked: bool, gpu: Option<u32>) -> Result<DirectMode> {
    match (is_asked, gpu) {
        (false, _) => Ok(DirectMode::Disabled),
        (true, Some(_)) => Ok(DirectMode::Required),
        (true, None) => Err(Error::usage("--gds: it is about memory of a GPU; say --gpu, too".to_owned())),
    }
}

/// Refuses what DeepSpeed's tool would sweep with cuFile: its settings are mostly those of rings and slots.
pub(crate) fn refuse_gds(is_asked: bool) -> Result<()> {
    if !is_asked {
        return Ok(());
    }
    let text = "this sweep is about rings and slots; deepnvme tune --gpu --gds tunes what matters to cuFile";
    Err(Error::usage(format!("--gds: {text}")))
}
