//! The GPU that holds the memory.

use deepnvme_io::gpu::{GpuFacts, GpuProbe};

use crate::error::{Error, Result};

/// Finds the GPU of this number.
///
/// # Errors
/// `Failed` if there is no GPU. `Usage` if there are others, with their number.
pub fn find(index: u32) -> Result<GpuFacts> {
    let GpuProbe { devices, reason, .. } = GpuProbe::run();
    let count = devices.len();
    devices.into_iter().find(|device| device.index == index).ok_or_else(|| match reason {
        Some(reason) => Error::failed(format!("--gpu: {reason}")),
        None => {
            Error::usage(format!("--gpu={index}: there is no such GPU; there are {count}, and cuda:0 is the first"))
        }
    })
}
