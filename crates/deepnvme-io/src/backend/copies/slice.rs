//! A part of a slot that belongs to memory on a GPU, and how its copy is launched.
#![allow(unsafe_code)]

use deepnvme_mem::Region;

use crate::backend::device::{GpuStream, Rows};
use crate::error::Result;
use crate::op::Direction;

/// A part of a slot that belongs to memory on a GPU.
#[derive(Debug)]
pub(crate) struct Slice {
    /// Where in the slot it begins.
    pub(crate) at: usize,
    /// The memory on the GPU.
    pub(crate) memory: Region,
    /// Where in that.
    pub(crate) from: usize,
    pub(crate) len: usize,
}

/// Starts to copy a slice: from the host's memory to the GPU for a read, the other way for a write.
///
/// # Safety
/// Until an event behind this is over, both ends are alive, and nothing else changes what is copied or uses what it is
/// copied to.
pub(super) unsafe fn launch(stream: &dyn GpuStream, direction: Direction, host: &Region, slice: &Slice) -> Result<()> {
    let Slice { at, memory, from, len } = slice;
    assert!(at.checked_add(*len).is_some_and(|end| end <= host.len()), "a slice lies in its slot");
    let mut start = std::ptr::with_exposed_provenance_mut::<u8>(host.addr() + at);
    let mut outcome = Ok(());
    memory.visit_rows(*from, *len, |address, bytes, count, pitch| {
        let rows = Rows { address, bytes, count, pitch };
        if outcome.is_ok() {
            // SAFETY: the host's memory has these bytes, as was checked, and the GPU's its rows; the rest is the caller's
            // word.
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
