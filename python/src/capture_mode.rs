//! The stream capture mode of the calling thread, for torch's calls inside this library.

use deepnvme_io::exchange_capture_mode;
use pyo3::prelude::*;

/// Set the mode in which captures of CUDA graphs restrict this thread, and return the previous one. ``None`` if the
/// process has not initialised the CUDA driver: nothing can be captured then.
#[pyfunction]
pub(crate) fn _exchange_capture_mode(mode: i32) -> Option<i32> {
    exchange_capture_mode(mode)
}
