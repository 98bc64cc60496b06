//! A part of host memory, such as a bounce buffer, that belongs to GPU memory, and the launch of its copy.
#![allow(unsafe_code)]

use deepnvme_mem::Region;

use crate::error::Result;
use crate::gpu::device::GpuStream;
use crate::op::Direction;

/// A part of host memory that belongs to GPU memory.
#[derive(Debug)]
pub(crate) struct GpuSlice {
    /// The offset in the host memory.
    pub(crate) at: usize,
    /// The memory on the GPU.
    pub(crate) memory: Region,
    /// The offset in that memory.
    pub(crate) from: usize,
    pub(crate) len: usize,
}

/// Starts to copy a slice: from host memory to the GPU for a read, the other way for a write.
///
/// # Safety
/// Until an event that is recorded later is complete, or the stream is synchronised, both ends stay alive, and nothing
/// else changes the source or uses the target.
pub(super) unsafe fn launch(
    stream: &dyn GpuStream,
    direction: Direction,
    host: &Region,
    slice: &GpuSlice,
) -> Result<()> {
    let GpuSlice { at, memory, from, len } = slice;
    assert!(at.checked_add(*len).is_some_and(|end| end <= host.len()), "a slice lies in its bounce buffer");
    let mut start = std::ptr::with_exposed_provenance_mut::<u8>(host.addr() + at);
    let mut outcome = Ok(());
    memory.visit_rows(*from, *len, |rows| {
        if outcome.is_ok() {
            // SAFETY: the assertion bounds the host memory, and `visit_rows` gives rows of the GPU's region. Both ends
            // stay alive until a later event is complete, and nothing else changes the source or uses the target, as
            // the caller of `launch` ensures.
            outcome = unsafe {
                match direction {
                    Direction::Read => stream.copy_to_gpu(rows, start),
                    Direction::Write => stream.copy_to_host(start, rows),
                }
            };
        }
        start = start.wrapping_add(rows.total_bytes());
    });
    outcome
}
