//! The memory that bytes come from or go to.

use deepnvme_io::mem::{Buffer, LockState, RegionMut};

use super::contents::{CHUNK_BYTES, Contents};
use super::workload::Memory;
use crate::error::{Error, Result};
use crate::units::bytes_text;

/// What torch aligns its tensors to.
const PLAIN_ALIGNMENT: usize = 64;
const PAGE: usize = 4096;

/// Memory, and why it is not page-locked where it should be.
pub(super) struct Allocated {
    pub(super) region: RegionMut,
    pub(super) unlocked: Option<String>,
}

/// Memory of that kind whose pages exist.
pub(super) fn allocate(kind: Memory, len: usize) -> Result<Allocated> {
    let refused = |error: &std::io::Error| {
        Error::failed(format!("no {} of memory: {error}; make --size smaller", bytes_text(len as u64)))
    };
    match kind {
        Memory::Pinned => {
            let buffer = Buffer::locked(len).map_err(|error| refused(&error))?;
            let unlocked = match buffer.lock_state() {
                LockState::Plain { reason } => Some(reason.clone()),
                LockState::Locked | LockState::NotAsked => None,
            };
            Ok(Allocated { region: buffer.into_region(), unlocked })
        }
        Memory::Plain => {
            let mut bytes = Vec::new();
            let room = len + PAGE + PLAIN_ALIGNMENT;
            bytes.try_reserve_exact(room).map_err(|_| refused(&std::io::ErrorKind::OutOfMemory.into()))?;
            bytes.resize(room, 1);
            let region = RegionMut::from_vec(bytes);
            let skipped = (region.addr().next_multiple_of(PAGE) + PLAIN_ALIGNMENT) - region.addr();
            let (_, region) = region.split_at(skipped.min(room - len));
            Ok(Allocated { region: region.split_at(len).0, unlocked: None })
        }
    }
}

/// Fills memory with what belongs at `offset` of a file.
pub(super) fn fill(region: &RegionMut, contents: Contents, offset: u64) {
    let mut chunk = vec![0; CHUNK_BYTES.min(region.len())];
    for at in (0..region.len()).step_by(CHUNK_BYTES) {
        let chunk = &mut chunk[..CHUNK_BYTES.min(region.len() - at)];
        contents.fill(offset + at as u64, chunk);
        region.copy_from_slice(at, chunk);
    }
}

/// Puts zeros there, so that a read that did nothing cannot pass.
pub(super) fn clear(region: &RegionMut) {
    let zeros = vec![0; CHUNK_BYTES.min(region.len())];
    for at in (0..region.len()).step_by(CHUNK_BYTES) {
        region.copy_from_slice(at, &zeros[..CHUNK_BYTES.min(region.len() - at)]);
    }
}

/// Where memory differs from what belongs at `offset` of a file.
pub(super) fn first_difference(region: &RegionMut, contents: Contents, offset: u64) -> Option<u64> {
    let source = region.region();
    let mut chunk = vec![0; CHUNK_BYTES.min(region.len())];
    (0..region.len()).step_by(CHUNK_BYTES).find_map(|at| {
        let chunk = &mut chunk[..CHUNK_BYTES.min(region.len() - at)];
        source.copy_to_slice(at, chunk);
        contents.first_difference(offset + at as u64, chunk)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_have_their_alignment_and_hold_what_is_put_in() {
        for (kind, aligned_to, not_to) in [(Memory::Pinned, 4096, usize::MAX), (Memory::Plain, 64, 128)] {
            for len in [1, 4096, 300_001] {
                let region = allocate(kind, len).unwrap().region;
                assert_eq!(region.len(), len);
                assert_eq!(region.addr() % aligned_to, 0, "{kind:?} {len}");
                assert_ne!(region.addr() % not_to, 0, "{kind:?} {len}");
                let contents = Contents::random();
                fill(&region, contents, 8);
                assert_eq!(first_difference(&region, contents, 8), None);
                region.copy_from_slice(len - 1, &[0]);
                region.copy_from_slice(len - 1, &[if region_byte(&region, len - 1) == 0 { 1 } else { 0 }]);
                assert!(first_difference(&region, contents, 16).is_some());
            }
        }
    }

    fn region_byte(region: &RegionMut, at: usize) -> u8 {
        let mut byte = [0];
        region.region().copy_to_slice(at, &mut byte);
        byte[0]
    }
}
