//! A checksum for each chunk of an item on disk, so that damage can be located.

use crc_fast::{CrcAlgorithm, checksum};
use deepnvme_io::mem::Region;

/// Bytes per checksum.
pub(crate) const CHUNK_BYTES: usize = 4 << 20;
/// Bytes that are copied, then hashed while they are in the CPU cache.
const STEP_BYTES: usize = 64 << 10;

/// The CRC-64/NVME of each chunk of a region.
pub(crate) fn checksums_of(region: &Region) -> Vec<u64> {
    let mut step = vec![0; STEP_BYTES.min(region.len())];
    let chunks = (0..region.len()).step_by(CHUNK_BYTES);
    chunks.map(|from| chunk_checksum(region, from..(from + CHUNK_BYTES).min(region.len()), &mut step)).collect()
}

/// The first chunk whose checksum differs: its start, the expected checksum, and the one found.
pub(crate) fn first_mismatch(region: &Region, checksums: &[u64]) -> Option<(usize, u64, u64)> {
    let found = checksums_of(region);
    let index = found.iter().zip(checksums).position(|(found, expected)| found != expected)?;
    Some((index * CHUNK_BYTES, checksums[index], found[index]))
}

fn chunk_checksum(region: &Region, range: std::ops::Range<usize>, step: &mut [u8]) -> u64 {
    let mut digest = crc_fast::Digest::new(CrcAlgorithm::Crc64Nvme);
    let mut at = range.start;
    if range.len() <= step.len() {
        let part = &mut step[..range.len()];
        region.copy_to_slice(at, part);
        return checksum(CrcAlgorithm::Crc64Nvme, part);
    }
    while at < range.end {
        let bytes = step.len().min(range.end - at);
        region.copy_to_slice(at, &mut step[..bytes]);
        digest.update(&step[..bytes]);
        at += bytes;
    }
    digest.finalize()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_byte_is_found_in_its_chunk() {
        let mut bytes: Vec<u8> = (0..CHUNK_BYTES * 2 + 777).map(|index| (index * 7 % 251) as u8).collect();
        let checksums = checksums_of(&Region::from_vec(bytes.clone()));
        assert_eq!(checksums.len(), 3);
        assert_eq!(first_mismatch(&Region::from_vec(bytes.clone()), &checksums), None);
        *bytes.last_mut().unwrap() ^= 1;
        let (at, expected, found) = first_mismatch(&Region::from_vec(bytes), &checksums).unwrap();
        assert!(at == 2 * CHUNK_BYTES && expected == checksums[2] && found != expected);
        assert!(checksums_of(&Region::from_vec(Vec::new())).is_empty());
    }
}
