//! The GPU whose memory bytes come from or go to.

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

/// Refuses what is not there yet.
pub(crate) fn refuse_gds(is_asked: bool, flag: &str) -> Result<()> {
    if !is_asked {
        return Ok(());
    }
    let text = "it needs cuFile, which this version does not use yet; --gpu moves bytes by way of bounce slots";
    Err(Error::usage(format!("{flag}: {text}")))
}
