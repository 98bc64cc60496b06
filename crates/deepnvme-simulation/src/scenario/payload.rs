//! Contents that identify their version, byte by byte.

use deepnvme_io::mem::{Buffer, RegionMut};
use deepnvme_testkit::rng::Rng;

/// Number of the contents of one save. No two saves write the same.
pub(super) type Version = u64;

/// The key of the random bytes of the contents.
const PAYLOAD_KEY: u64 = 0x7061_796c;

/// Returns the contents of a version. Some are smaller than a page, some span several blocks.
#[must_use]
pub(super) fn content(seed: u64, version: Version) -> Vec<u8> {
    let mut rng = Rng::keyed(seed, &[PAYLOAD_KEY, version]);
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

/// Allocates memory whose alignment depends only on its length, so that the allocator does not matter.
pub(super) fn allocate(bytes: usize) -> RegionMut {
    let skipped = if bytes.is_multiple_of(3) { 64 } else { 0 };
    match Buffer::zeroed(bytes + skipped) {
        Ok(buffer) => buffer.into_region().split_at(skipped).1,
        Err(error) => panic!("no memory: {error}"),
    }
}

/// Allocates memory with these bytes.
pub(super) fn region_with(bytes: &[u8]) -> RegionMut {
    let memory = allocate(bytes.len());
    memory.copy_from_slice(0, bytes);
    memory
}

/// Returns the version with exactly these bytes.
#[must_use]
pub(super) fn recognise(seed: u64, bytes: &[u8]) -> Option<Version> {
    let version = Version::from_le_bytes(bytes.get(..8)?.try_into().ok()?);
    // Versions are small: a random number would imply any length.
    (version < 1 << 20 && content(seed, version) == bytes).then_some(version)
}
