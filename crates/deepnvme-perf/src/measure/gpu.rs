//! The GPU whose memory bytes come from or go to.

use deepnvme_io::probe::{GpuFacts, GpuProbe};

use crate::error::{Error, Result};

/// The GPU of that number.
///
/// # Errors
/// `Usage` where there is none: what was looked for, and what was found instead.
pub fn find(index: u32) -> Result<GpuFacts> {
    let GpuProbe { devices, reason, .. } = GpuProbe::run();
    let count = devices.len();
    devices.into_iter().find(|device| device.index == index).ok_or_else(|| {
        Error::usage(match reason {
            Some(reason) => format!("--gpu: {reason}"),
            None => format!("--gpu={index}: there is no such GPU; there are {count}, and cuda:0 is the first"),
        })
    })
}
