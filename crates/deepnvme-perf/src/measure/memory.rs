//! The memory that a workload reads into or writes from.

use deepnvme_io::GpuAccess;
use deepnvme_io::mem::{Buffer, LockState, RegionMut};

use super::contents::{CHUNK_BYTES, Contents};
use super::plan::RequestPlan;
use super::workload::{Memory, Workload};
use crate::error::{Error, Result};
use crate::units::bytes_text;

/// The alignment of torch's tensors.
const PLAIN_ALIGNMENT: usize = 64;
const PAGE: usize = deepnvme_io::mem::PAGE_BYTES as usize;

/// Allocated memory.
pub(super) struct Allocated {
    pub(super) region: RegionMut,
    /// Why it is not pinned although it should be.
    pub(super) not_pinned_reason: Option<String>,
}

/// Allocates memory of the workload's kind. Host memory has all its pages faulted in.
pub(super) fn allocate(workload: &Workload, access: &GpuAccess, len: usize) -> Result<Allocated> {
    match workload.place.gpu {
        Some(index) => Ok(Allocated { region: access.allocate(index, len)?, not_pinned_reason: None }),
        None => of_host(workload.place.memory, len),
    }
}

fn of_host(kind: Memory, len: usize) -> Result<Allocated> {
    let refused = |error: &std::io::Error| {
        Error::failed(format!("cannot allocate {} of memory: {error}; make --size smaller", bytes_text(len as u64)))
    };
    match kind {
        Memory::Pinned => {
            let buffer = Buffer::locked(len).map_err(|error| refused(&error))?;
            let not_pinned_reason = match buffer.lock_state() {
                LockState::Refused { reason } => Some(reason.clone()),
                LockState::Locked | LockState::NotRequested => None,
            };
            Ok(Allocated { region: buffer.into_region(), not_pinned_reason })
        }
        Memory::Plain => {
            let mut bytes = Vec::new();
            let allocated = len + PAGE + PLAIN_ALIGNMENT;
            bytes.try_reserve_exact(allocated).map_err(|_| refused(&std::io::ErrorKind::OutOfMemory.into()))?;
            bytes.resize(allocated, 1);
            let region = RegionMut::from_vec(bytes);
            // As torch's memory usually is: aligned to 64 bytes but not to a page, so that direct I/O must bounce.
            let skipped = (region.addr().next_multiple_of(PAGE) + PLAIN_ALIGNMENT) - region.addr();
            let (_, region) = region.split_at(skipped);
            Ok(Allocated { region: region.split_at(len).0, not_pinned_reason: None })
        }
    }
}

/// Fills memory with the contents at `offset` of a file.
pub(super) fn fill(access: &GpuAccess, region: &RegionMut, contents: Contents, offset: u64) -> Result<()> {
    let mut chunk = vec![0; CHUNK_BYTES.min(region.len())];
    for at in (0..region.len()).step_by(CHUNK_BYTES) {
        let chunk = &mut chunk[..CHUNK_BYTES.min(region.len() - at)];
        contents.fill(offset + at as u64, chunk);
        access.copy_from_slice(region, at, chunk)?;
    }
    Ok(())
}

/// Zeroes memory, so that a read that did nothing does not pass validation.
pub(super) fn clear(access: &GpuAccess, region: &RegionMut) -> Result<()> {
    let zeros = vec![0; CHUNK_BYTES.min(region.len())];
    let mut offsets = (0..region.len()).step_by(CHUNK_BYTES);
    Ok(offsets.try_for_each(|at| access.copy_from_slice(region, at, &zeros[..CHUNK_BYTES.min(region.len() - at)]))?)
}

/// Returns the first offset at which memory differs from the contents at `offset` of a file.
pub(super) fn first_difference(
    access: &GpuAccess,
    region: &RegionMut,
    contents: Contents,
    offset: u64,
) -> Result<Option<u64>> {
    let source = region.region();
    let mut chunk = vec![0; CHUNK_BYTES.min(region.len())];
    for at in (0..region.len()).step_by(CHUNK_BYTES) {
        let chunk = &mut chunk[..CHUNK_BYTES.min(region.len() - at)];
        access.copy_to_slice(&source, at, chunk)?;
        let difference = contents.first_difference(offset + at as u64, chunk);
        if difference.is_some() {
            return Ok(difference);
        }
    }
    Ok(None)
}

/// Splits one region into the plan's slots.
pub(super) fn split_slots(region: RegionMut, plan: &RequestPlan) -> Vec<Option<RegionMut>> {
    let mut rest = region;
    let mut slots = Vec::with_capacity(plan.slots.len());
    for bytes in &plan.slots {
        let (slot, after) = rest.split_at(*bytes as usize);
        slots.push(Some(slot));
        rest = after;
    }
    slots
}

/// Returns the bytes that programs can allocate without swapping.
pub(super) fn available_bytes() -> u64 {
    let field = crate::system_files::SystemFiles::of_this_machine().field("/proc/meminfo", "MemAvailable");
    let kib = field.and_then(|text| text.split_whitespace().next()?.parse::<u64>().ok());
    kib.map_or(u64::MAX / 2, |kib| kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_are_aligned_and_hold_their_contents() {
        let access = deepnvme_io::Engine::new(deepnvme_io::Config::default()).unwrap().gpu_access();
        for (kind, aligned_to, not_to) in [(Memory::Pinned, 4096, usize::MAX), (Memory::Plain, 64, 128)] {
            for len in [1, 4096, 300_001] {
                let region = of_host(kind, len).unwrap().region;
                assert_eq!(region.len(), len);
                assert_eq!(region.addr() % aligned_to, 0, "{kind:?} {len}");
                assert_ne!(region.addr() % not_to, 0, "{kind:?} {len}");
                let contents = Contents::random();
                fill(&access, &region, contents, 8).unwrap();
                assert_eq!(first_difference(&access, &region, contents, 8).unwrap(), None);
                region.copy_from_slice(len - 1, &[0]);
                region.copy_from_slice(len - 1, &[if region_byte(&region, len - 1) == 0 { 1 } else { 0 }]);
                assert!(first_difference(&access, &region, contents, 16).unwrap().is_some());
            }
        }
    }

    fn region_byte(region: &RegionMut, at: usize) -> u8 {
        let mut byte = [0];
        region.region().copy_to_slice(at, &mut byte);
        byte[0]
    }
}
