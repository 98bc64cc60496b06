//! Checksums of what is on disk, cell by cell, so that damage has a place.

use crc_fast::{CrcAlgorithm, checksum};
use deepnvme_io::mem::Region;

/// Bytes of a cell.
pub(crate) const CELL_BYTES: usize = 4 << 20;
/// Bytes that are copied and hashed while the processor's cache has them.
const STEP_BYTES: usize = 64 << 10;

/// CRC-64/NVME of each cell of a region.
pub(crate) fn sums_of(region: &Region) -> Vec<u64> {
    let mut step = vec![0; STEP_BYTES.min(region.len())];
    let cells = (0..region.len()).step_by(CELL_BYTES);
    cells.map(|from| cell(region, from..(from + CELL_BYTES).min(region.len()), &mut step)).collect()
}

/// The first cell whose sum is another one, where it begins, and its sum.
pub(crate) fn first_difference(region: &Region, sums: &[u64]) -> Option<(usize, u64, u64)> {
    let found = sums_of(region);
    let index = found.iter().zip(sums).position(|(found, expected)| found != expected)?;
    Some((index * CELL_BYTES, sums[index], found[index]))
}

fn cell(region: &Region, range: std::ops::Range<usize>, step: &mut [u8]) -> u64 {
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
    fn a_changed_byte_is_found_in_its_cell() {
        let mut bytes: Vec<u8> = (0..CELL_BYTES * 2 + 777).map(|index| (index * 7 % 251) as u8).collect();
        let sums = sums_of(&Region::from_vec(bytes.clone()));
        assert_eq!(sums.len(), 3);
        assert_eq!(first_difference(&Region::from_vec(bytes.clone()), &sums), None);
        *bytes.last_mut().unwrap() ^= 1;
        let (at, expected, found) = first_difference(&Region::from_vec(bytes), &sums).unwrap();
        assert!(at == 2 * CELL_BYTES && expected == sums[2] && found != expected);
        assert!(sums_of(&Region::from_vec(Vec::new())).is_empty());
    }
}
