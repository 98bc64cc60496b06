//! The slot of each cached row: a hash table with eight bytes for an entry, so that a look-up needs one cache line.

use deepnvme_io::mem::prefetch;

use super::hash::hash_row;

/// Bits of an entry for the slot. The rest has the row.
const SLOT_BITS: u32 = 24;
/// Rows of a table are below this.
pub(crate) const ROWS_MAX: u64 = 1 << (64 - SLOT_BITS);
/// Slots of an index are below this.
pub(super) const SLOTS_MAX: usize = (1 << SLOT_BITS) - 1;

/// Maps rows to slots, with linear probing.
#[derive(Debug)]
pub(super) struct RowIndex {
    /// The row, and its slot plus one. Zero is an empty place.
    entries: Vec<u64>,
}

impl RowIndex {
    /// Creates an index for up to this many slots.
    #[must_use]
    pub(super) fn new(slots: usize) -> Self {
        assert!(slots <= SLOTS_MAX, "an index of {slots} slots");
        Self { entries: vec![0; Self::places(slots)] }
    }

    /// The places of an index: at most three quarters of them are used.
    fn places(slots: usize) -> usize {
        slots + slots / 3 + 1
    }

    /// Bytes of an index for this many slots.
    #[must_use]
    pub(super) fn bytes(slots: usize) -> usize {
        Self::places(slots) * size_of::<u64>()
    }

    fn place(&self, hash: u64) -> usize {
        // The upper half of the product is uniform below the length. The hash's upper bits choose the shard.
        (((hash & 0xffff_ffff) * self.entries.len() as u64) >> 32) as usize
    }

    fn after(&self, place: usize) -> usize {
        if place + 1 == self.entries.len() { 0 } else { place + 1 }
    }

    /// Loads the entry of a row with this hash into the CPU's cache.
    pub(super) fn prefetch(&self, hash: u64) {
        prefetch(&raw const self.entries[self.place(hash)]);
    }

    /// Returns the slot of a row.
    #[must_use]
    pub(super) fn get(&self, row: u64, hash: u64) -> Option<u32> {
        let place = self.find(row, hash)?;
        Some((self.entries[place] & SLOTS_MAX as u64) as u32 - 1)
    }

    fn find(&self, row: u64, hash: u64) -> Option<usize> {
        let mut place = self.place(hash);
        while self.entries[place] != 0 {
            if self.entries[place] >> SLOT_BITS == row {
                return Some(place);
            }
            place = self.after(place);
        }
        None
    }

    /// Adds a row, which must not be there.
    pub(super) fn insert(&mut self, row: u64, hash: u64, slot: u32) {
        assert!(row < ROWS_MAX && (slot as usize) < SLOTS_MAX, "row {row} in slot {slot}");
        let mut place = self.place(hash);
        while self.entries[place] != 0 {
            place = self.after(place);
        }
        self.entries[place] = row << SLOT_BITS | u64::from(slot + 1);
    }

    /// Removes a row, if it is there.
    pub(super) fn remove(&mut self, row: u64, hash: u64) {
        let Some(mut gap) = self.find(row, hash) else { return };
        let mut place = self.after(gap);
        // Later entries of the run move up, unless that would put them before the place where their search begins.
        while self.entries[place] != 0 {
            let home = self.place(hash_row(self.entries[place] >> SLOT_BITS));
            let is_between = if gap <= place { gap < home && home <= place } else { gap < home || home <= place };
            if !is_between {
                self.entries[gap] = self.entries[place];
                gap = place;
            }
            place = self.after(place);
        }
        self.entries[gap] = 0;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[test]
    fn equals_a_map() {
        let mut random = fastrand::Rng::with_seed(3);
        for slots in [1_usize, 2, 7, 50, 1000] {
            let mut index = RowIndex::new(slots);
            let mut model = HashMap::new();
            let mut free: Vec<u32> = (0..slots as u32).collect();
            for _ in 0..20_000 {
                let row = random.u64(0..slots as u64 * 2) * 0x1_0001;
                assert_eq!(index.get(row, hash_row(row)), model.get(&row).copied());
                if let Some(slot) = model.remove(&row) {
                    index.remove(row, hash_row(row));
                    free.push(slot);
                } else if let Some(slot) = free.pop() {
                    index.insert(row, hash_row(row), slot);
                    model.insert(row, slot);
                }
            }
            for (row, slot) in model {
                assert_eq!(index.get(row, hash_row(row)), Some(slot));
            }
        }
    }

    #[test]
    fn the_largest_row_and_slot() {
        let mut index = RowIndex::new(10);
        let row = ROWS_MAX - 1;
        index.insert(row, hash_row(row), SLOTS_MAX as u32 - 1);
        assert_eq!(index.get(row, hash_row(row)), Some(SLOTS_MAX as u32 - 1));
    }
}
