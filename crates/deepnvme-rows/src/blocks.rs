//! Blocks of a packed table: whole rows, and a checksum.
//!
//! No row crosses a block, so a row is one read. A block holds consecutive rows, zeros, and in its last four bytes the
//! CRC-32C of its number (eight bytes) and of all bytes before. Numbers are little-endian.

use crc_fast::{CrcAlgorithm, Digest};
use deepnvme_io::mem::PAGE_BYTES;

/// Bytes of a block's checksum.
const CHECKSUM_BYTES: usize = 4;
/// A block may leave a quarter of its bytes unused. More would make the file larger than its rows without need.
const UNUSED_FRACTION_MAX: usize = 4;
/// A block has at most this many times the pages that its first row needs.
const GROWTH_MAX: usize = 4;

/// The division of a packed table into blocks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BlockLayout {
    /// Bytes of a row, with its scales.
    pub row_bytes: usize,
    /// Rows of a block; the last one may have fewer.
    pub rows_per_block: usize,
    /// Bytes of a block, whole pages.
    pub block_bytes: usize,
}

impl BlockLayout {
    /// Chooses blocks for rows of this size: the smallest that are well filled, or those that are filled best.
    #[must_use]
    pub fn plan(row_bytes: usize) -> Self {
        let page = PAGE_BYTES as usize;
        let pages_min = (row_bytes + CHECKSUM_BYTES).div_ceil(page);
        let of_pages = |pages: usize| {
            let block_bytes = pages * page;
            Self { row_bytes, rows_per_block: (block_bytes - CHECKSUM_BYTES) / row_bytes.max(1), block_bytes }
        };
        let unused = |layout: &Self| layout.block_bytes - layout.rows_per_block * row_bytes;
        let all = (pages_min..=pages_min * GROWTH_MAX).map(of_pages);
        let filled = all.clone().find(|layout| unused(layout) * UNUSED_FRACTION_MAX <= layout.block_bytes);
        // The fraction that is unused, compared without division.
        let best = || all.min_by_key(|layout| unused(layout) * GROWTH_MAX * pages_min * page / layout.block_bytes);
        filled.or_else(best).unwrap_or_else(|| of_pages(pages_min))
    }

    /// Returns whether this is the layout of a table, rather than numbers from a damaged file.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        let used = self.rows_per_block.checked_mul(self.row_bytes).and_then(|used| used.checked_add(CHECKSUM_BYTES));
        let is_whole = self.block_bytes > 0 && self.block_bytes.is_multiple_of(PAGE_BYTES as usize);
        self.row_bytes > 0 && self.rows_per_block > 0 && is_whole && used.is_some_and(|used| used <= self.block_bytes)
    }

    /// Returns the number of blocks of a table.
    #[must_use]
    pub fn blocks(&self, rows: u64) -> u64 {
        rows.div_ceil(self.rows_per_block as u64)
    }

    /// Returns the offset of a row from the start of the first block.
    #[must_use]
    pub(crate) fn offset(&self, row: u64) -> u64 {
        let (block, inside) = (row / self.rows_per_block as u64, row % self.rows_per_block as u64);
        block * self.block_bytes as u64 + inside * self.row_bytes as u64
    }

    /// Writes the checksum of a block.
    pub(crate) fn seal(&self, number: u64, block: &mut [u8]) {
        let (content, checksum) = block.split_at_mut(self.block_bytes - CHECKSUM_BYTES);
        checksum.copy_from_slice(&checksum_of(number, content).to_le_bytes());
    }

    /// Returns whether the checksum of a block matches.
    #[must_use]
    pub(crate) fn is_sound(&self, number: u64, block: &[u8]) -> bool {
        let (content, checksum) = block.split_at(self.block_bytes - CHECKSUM_BYTES);
        checksum == checksum_of(number, content).to_le_bytes()
    }
}

fn checksum_of(number: u64, content: &[u8]) -> u32 {
    let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
    digest.update(&number.to_le_bytes());
    digest.update(content);
    digest.finalize() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_whole_pages_and_well_filled() {
        for row_bytes in (1..20_000).chain([100_000, 17_920, 1 << 20]) {
            let layout = BlockLayout::plan(row_bytes);
            assert!(layout.is_valid(), "{layout:?}");
            let used = layout.rows_per_block * row_bytes;
            assert!(used * 2 > layout.block_bytes, "{layout:?}");
        }
        let small = BlockLayout::plan(160);
        assert_eq!((small.rows_per_block, small.block_bytes), (25, 4096));
        let large = BlockLayout::plan(2100);
        assert_eq!((large.rows_per_block, large.block_bytes), (3, 8192));
    }

    #[test]
    fn every_changed_byte_and_every_other_number_is_noticed() {
        let layout = BlockLayout::plan(160);
        let mut block: Vec<u8> = (0..layout.block_bytes).map(|byte| (byte * 7) as u8).collect();
        layout.seal(9, &mut block);
        assert!(layout.is_sound(9, &block) && !layout.is_sound(8, &block));
        for byte in 0..block.len() {
            block[byte] ^= 0x10;
            assert!(!layout.is_sound(9, &block), "byte {byte}");
            block[byte] ^= 0x10;
        }
    }

    #[test]
    fn the_checksum_is_crc_32c() {
        // The check value of the catalogue of CRCs, and the definition of this module.
        assert_eq!(crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, b"123456789"), 0xe306_9283);
        let mut whole = 5_u64.to_le_bytes().to_vec();
        whole.extend(b"rows");
        assert_eq!(checksum_of(5, b"rows"), crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, &whole) as u32);
    }
}
