//! Blocks of a packed table: whole rows, and a checksum.
//!
//! No row crosses a block, so a row is one read. A block holds consecutive rows, and zeros behind them. Its checksum is
//! the CRC-32C of the table's id (eight bytes), of its number (eight bytes) and of its bytes. Numbers are little-endian. The checksum is in the last four
//! bytes of the block, which it does not cover. If these four bytes would cost a row, all checksums are in a list
//! behind the blocks instead.

use crc_fast::{CrcAlgorithm, Digest};
use deepnvme_io::mem::PAGE_BYTES;

use crate::checksum_list::{CHECKSUM_BYTES, ChecksumList};

/// A block may leave a third of its bytes unused, so a file has at most one and a half times the bytes of its rows.
/// Less would make blocks larger, and with them each read.
const UNUSED_FRACTION_MAX: usize = 3;
/// Checksums in blocks take no memory. For that, a block may leave an eighth unused that a list would fill.
const UNUSED_FOR_CHECKSUM_FRACTION_MAX: usize = 8;
/// A block has at most this many times the pages that its first row needs.
const GROWTH_MAX: usize = 4;

/// Where the checksum of a block is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ChecksumPlace {
    /// In its last four bytes.
    Block,
    /// In a list for all blocks, which an open table keeps in memory.
    List,
}

/// The division of a packed table into blocks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BlockLayout {
    /// Bytes of a row, with its scales.
    pub row_bytes: usize,
    /// Rows of a block; the last one may have fewer.
    pub rows_per_block: usize,
    /// Bytes of a block, whole pages.
    pub block_bytes: usize,
    /// Where the checksums are.
    pub checksums: ChecksumPlace,
}

impl BlockLayout {
    /// Chooses blocks for rows of this size: the smallest that are well filled, or those that are filled best.
    #[must_use]
    pub fn plan(row_bytes: usize) -> Self {
        let page = PAGE_BYTES as usize;
        let pages_min = row_bytes.div_ceil(page).max(1);
        let of_pages = |pages: usize| Self::of(row_bytes, pages * page, ChecksumPlace::List);
        let all = (pages_min..=pages_min * GROWTH_MAX).map(of_pages);
        let filled = all.clone().find(|layout| layout.unused() * UNUSED_FRACTION_MAX <= layout.block_bytes);
        // The fraction that is unused, compared without division.
        let best = || all.min_by_key(|layout| layout.unused() * GROWTH_MAX * pages_min * page / layout.block_bytes);
        let listed = filled.or_else(best).unwrap_or_else(|| of_pages(pages_min));
        let inside = Self::of(row_bytes, listed.block_bytes, ChecksumPlace::Block);
        let is_filled = inside.unused() * UNUSED_FOR_CHECKSUM_FRACTION_MAX <= inside.block_bytes;
        if inside.rows_per_block == listed.rows_per_block || (is_filled && inside.rows_per_block > 0) {
            inside
        } else {
            listed
        }
    }

    /// Returns blocks of this size, with as many rows as fit.
    fn of(row_bytes: usize, block_bytes: usize, checksums: ChecksumPlace) -> Self {
        let rows_per_block = (block_bytes - checksums.bytes()) / row_bytes.max(1);
        Self { row_bytes, rows_per_block, block_bytes, checksums }
    }

    /// Bytes of a block that no row takes.
    fn unused(&self) -> usize {
        self.block_bytes - self.rows_per_block * self.row_bytes
    }

    /// Returns whether this is the layout of a table, rather than numbers from a damaged file.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        let rows = self.rows_per_block.checked_mul(self.row_bytes);
        let used = rows.and_then(|rows| rows.checked_add(self.checksums.bytes()));
        let is_whole = self.block_bytes > 0 && self.block_bytes.is_multiple_of(PAGE_BYTES as usize);
        self.row_bytes > 0 && self.rows_per_block > 0 && is_whole && used.is_some_and(|used| used <= self.block_bytes)
    }

    /// Returns the number of blocks of a table.
    #[must_use]
    pub fn blocks(&self, rows: u64) -> u64 {
        rows.div_ceil(self.rows_per_block as u64)
    }

    /// Returns the bytes of the list of checksums of a table, in the file and in memory.
    #[must_use]
    pub fn list_bytes(&self, rows: u64) -> u64 {
        match self.checksums {
            ChecksumPlace::Block => 0,
            ChecksumPlace::List => self.blocks(rows).saturating_add(1).saturating_mul(CHECKSUM_BYTES as u64),
        }
    }

    /// Returns the offset of a row from the start of the first block.
    #[must_use]
    pub(crate) fn offset(&self, row: u64) -> u64 {
        let (block, inside) = (row / self.rows_per_block as u64, row % self.rows_per_block as u64);
        block * self.block_bytes as u64 + inside * self.row_bytes as u64
    }

    /// Writes the checksum of a block into it. Returns the checksum instead if it belongs into the list.
    pub(crate) fn seal(&self, id: u64, number: u64, block: &mut [u8]) -> Option<u32> {
        let (content, checksum) = block.split_at_mut(self.block_bytes - self.checksums.bytes());
        let computed = checksum_of(id, number, content);
        match self.checksums {
            ChecksumPlace::Block => {
                checksum.copy_from_slice(&computed.to_le_bytes());
                None
            }
            ChecksumPlace::List => Some(computed),
        }
    }
}

/// Compares the blocks of one table with their checksums.
#[derive(Clone, Debug)]
pub(crate) struct BlockChecker {
    pub(crate) layout: BlockLayout,
    /// The id of the table.
    pub(crate) id: u64,
    /// The checksums, if they are not in the blocks.
    pub(crate) list: Option<ChecksumList>,
}

impl BlockChecker {
    /// Returns whether the checksum of a block matches.
    #[must_use]
    pub(crate) fn is_sound(&self, number: u64, block: &[u8]) -> bool {
        let (content, inside) = block.split_at(self.layout.block_bytes - self.layout.checksums.bytes());
        let listed = || self.list.as_ref()?.get(number);
        let stated = inside.first_chunk().map_or_else(listed, |sum| Some(u32::from_le_bytes(*sum)));
        stated == Some(checksum_of(self.id, number, content))
    }
}

impl ChecksumPlace {
    /// The bytes of a block that its checksum takes.
    fn bytes(self) -> usize {
        match self {
            Self::Block => CHECKSUM_BYTES,
            Self::List => 0,
        }
    }
}

fn checksum_of(id: u64, number: u64, content: &[u8]) -> u32 {
    let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
    digest.update(&id.to_le_bytes());
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
            assert!(used * 3 >= layout.block_bytes * 2, "{layout:?}");
            // A read brings at most one page more than the row's own.
            assert!(layout.block_bytes <= (row_bytes.div_ceil(4096) + 1) * 4096, "{layout:?}");
        }
    }

    #[test]
    fn rows_of_whole_pages_have_blocks_of_these_pages() {
        for row_bytes in [1024_usize, 1365, 2048, 4096, 8192] {
            let layout = BlockLayout::plan(row_bytes);
            let block_bytes = row_bytes.next_multiple_of(4096);
            let rows_per_block = block_bytes / row_bytes;
            assert_eq!(layout, BlockLayout { row_bytes, rows_per_block, block_bytes, checksums: ChecksumPlace::List });
        }
        let pages_of = |row_bytes: usize| {
            let layout = BlockLayout::plan(row_bytes);
            assert_eq!(layout.checksums, ChecksumPlace::Block);
            (layout.rows_per_block, layout.block_bytes / 4096)
        };
        assert_eq!([160, 1000, 1366, 3000, 4092].map(pages_of), [(25, 1), (4, 1), (2, 1), (1, 1), (1, 1)]);
        assert_eq!([2100, 4160, 17_920].map(pages_of), [(3, 2), (2, 3), (1, 5)]);
    }

    #[test]
    fn every_changed_byte_and_every_other_number_is_noticed() {
        let layout = BlockLayout::plan(160);
        let mut block: Vec<u8> = (0..layout.block_bytes).map(|byte| (byte * 7) as u8).collect();
        assert_eq!(layout.seal(77, 9, &mut block), None);
        let inside = |id| BlockChecker { layout, id, list: None };
        assert!(inside(77).is_sound(9, &block) && !inside(77).is_sound(8, &block));
        assert!(!inside(78).is_sound(9, &block), "a block of another table");
        let layout = BlockLayout::plan(4096);
        let sum = layout.seal(77, 1, &mut block).unwrap();
        let listed = |id, list| BlockChecker { layout, id, list };
        let list = ChecksumList::of(&[!sum, sum, !sum]).ok();
        assert!(listed(77, list.clone()).is_sound(1, &block));
        assert!(!listed(78, list.clone()).is_sound(1, &block) && !listed(77, None).is_sound(1, &block));
        assert!([0, 2, 3].iter().all(|number| !listed(77, list.clone()).is_sound(*number, &block)));
        for byte in 0..block.len() {
            block[byte] ^= 0x10;
            assert!(!inside(77).is_sound(9, &block) && !listed(77, list.clone()).is_sound(1, &block), "byte {byte}");
            block[byte] ^= 0x10;
        }
    }

    #[test]
    fn the_checksum_is_crc_32c() {
        // The check value of the catalogue of CRCs, and the definition of this module.
        assert_eq!(crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, b"123456789"), 0xe306_9283);
        let whole = [&3_u64.to_le_bytes()[..], &5_u64.to_le_bytes(), b"rows"].concat();
        assert_eq!(checksum_of(3, 5, b"rows"), crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, &whole) as u32);
    }
}
