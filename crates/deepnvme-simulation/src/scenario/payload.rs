//! Contents that can be recognised, to the last byte.

use deepnvme_io::mem::{Buffer, RegionMut};
use deepnvme_testkit::rng::Rng;

/// Names a content: no two saves write the same.
pub(super) type Version = u64;

/// The content of a version; some have no whole pages, some several blocks.
#[must_use]
pub(super) fn of(seed: u64, version: Version) -> Vec<u8> {
    let mut rng = Rng::keyed(seed, &[0x7061_796c, version]);
    let len = match rng.below(4) {
        0 => rng.within(16..600),
        1 => rng.within(1..4) * 4096,
        _ => rng.within(600..18_000),
    };
    let mut bytes = vec![0; len as usize];
    rng.fill(&mut bytes);
    bytes[..8].copy_from_slice(&version.to_le_bytes());
    bytes
}

/// Memory whose alignment is a function of its length: where an allocator puts things must not matter.
pub(super) fn memory(bytes: usize) -> RegionMut {
    let skipped = if bytes.is_multiple_of(3) { 64 } else { 0 };
    match Buffer::zeroed(bytes + skipped) {
        Ok(buffer) => buffer.into_region().split_at(skipped).1,
        Err(error) => panic!("no memory: {error}"),
    }
}

/// Memory that holds these bytes.
pub(super) fn holding(bytes: &[u8]) -> RegionMut {
    let memory = memory(bytes.len());
    memory.copy_from_slice(0, bytes);
    memory
}

/// The version of which these are all bytes.
#[must_use]
pub(super) fn recognised(seed: u64, bytes: &[u8]) -> Option<Version> {
    let version = Version::from_le_bytes(bytes.get(..8)?.try_into().ok()?);
    // Versions are small numbers: a random one would have any length.
    (version < 1 << 20 && of(seed, version) == bytes).then_some(version)
}
