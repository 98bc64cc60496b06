//! Maps by item. Ids are numbers that the swapper counts up, so one multiplication spreads them.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use crate::slot_allocator::ItemId;

/// A map by item. Its order depends on nothing but its history.
pub(crate) type IdMap<T> = HashMap<ItemId, T, BuildHasherDefault<IdHasher>>;

/// An odd number without a pattern: the fraction of the golden ratio.
const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

#[derive(Debug, Default)]
pub(crate) struct IdHasher(u64);

impl Hasher for IdHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, value: u64) {
        let mixed = (self.0 ^ value).wrapping_mul(FACTOR);
        // Buckets are chosen by the low bits, and the high ones are mixed best.
        self.0 = mixed ^ (mixed >> 32);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
