//! Rows in bounded memory, and which of the others are being fetched.
//!
//! Rows are spread over shards by their hash, so that threads rarely wait for each other. The policy (`policy`) is
//! arithmetic on slot numbers.

mod hash;
mod index;
mod policy;
mod shard;

use std::sync::Arc;

pub use self::hash::hash_row;
pub(crate) use self::index::ROWS_MAX;
use self::index::SLOTS_MAX;
pub use self::policy::{Hold, S3Fifo};
pub(crate) use self::shard::Kept;
use self::shard::Shard;
use crate::sync::{Mutex, lock};

/// Slots of a shard below which more shards would only divide the memory unevenly.
const SHARD_SLOTS_MIN: usize = 1024;
/// Shards of a cache, unless it has too many slots for them.
const SHARDS: usize = 16;
/// Rows that are looked up together.
const LOOKUP_ROWS: usize = 1024;

/// Caches rows of one size. `F` is a fetch in flight.
#[derive(Debug)]
pub(crate) struct RowCache<F> {
    shards: Box<[Mutex<Shard<F>>]>,
    plan: CachePlan,
}

/// The division of a cache's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct CachePlan {
    pub(crate) shards: usize,
    /// Slots of each shard.
    pub(crate) slots: usize,
    pub(crate) row_bytes: usize,
}

impl CachePlan {
    /// Plans a cache of at most `bytes` and at most `rows` rows.
    pub(crate) fn new(bytes: u64, rows: u64, row_bytes: usize) -> Self {
        let wanted = rows.min(bytes / row_bytes as u64);
        let shards = (wanted / SHARD_SLOTS_MIN as u64).clamp(1, SHARDS as u64).max(wanted.div_ceil(SLOTS_MAX as u64));
        let shards = shards as usize;
        let fits = |slots: usize| shards as u64 * Shard::<()>::bytes(slots, row_bytes) <= bytes;
        // The size of a shard grows with its slots.
        let (mut least, mut most) = (0, wanted.div_ceil(shards as u64) as usize + 1);
        while most - least > 1 {
            let middle = usize::midpoint(least, most);
            if fits(middle) { least = middle } else { most = middle }
        }
        // A row has no choice of shard, so a cache of all rows needs spare slots.
        Self { shards, slots: if fits(most) { most } else { least }, row_bytes }
    }

    /// Bytes of the cache, with its index.
    pub(crate) fn bytes(&self) -> u64 {
        if self.slots == 0 { 0 } else { self.shards as u64 * Shard::<()>::bytes(self.slots, self.row_bytes) }
    }
}

/// The state of a row that somebody wants to fetch.
#[derive(Debug)]
pub(crate) enum Claim<F> {
    /// It is in the cache.
    Cached,
    /// Another fetch reads it.
    InFlight(Arc<F>),
    /// The caller's fetch is to read it.
    Claimed,
}

impl<F> RowCache<F> {
    pub(crate) fn new(plan: CachePlan) -> std::io::Result<Self> {
        let shard = |_| Ok(Mutex::new(Shard::new(plan.slots, plan.row_bytes)?));
        Ok(Self { shards: (0..plan.shards).map(shard).collect::<std::io::Result<_>>()?, plan })
    }

    pub(crate) fn plan(&self) -> CachePlan {
        self.plan
    }

    fn shard_of(&self, hash: u64) -> usize {
        (((hash >> 32) * self.shards.len() as u64) >> 32) as usize
    }

    /// Passes each cached row to `found`, by its position in `rows`, and the positions of the others to `missing`.
    pub(crate) fn copy(&self, rows: &[u64], found: &mut impl FnMut(u32, &[u8]), missing: &mut impl FnMut(u32)) {
        let mut sorted = [(0, 0, 0); LOOKUP_ROWS];
        let mut ends = vec![0_usize; self.shards.len() + 1];
        for (chunk_index, chunk) in rows.chunks(LOOKUP_ROWS).enumerate() {
            // Sorted by shard, so that each lock is taken once.
            ends.fill(0);
            let hashes = |row: &u64| hash_row(*row);
            chunk.iter().map(hashes).for_each(|hash| ends[self.shard_of(hash) + 1] += 1);
            for shard in 1..ends.len() {
                ends[shard] += ends[shard - 1];
            }
            let starts = ends.clone();
            for (at, row) in chunk.iter().enumerate() {
                let hash = hash_row(*row);
                let place = &mut ends[self.shard_of(hash)];
                sorted[*place] = (*row, hash, (chunk_index * LOOKUP_ROWS + at) as u32);
                *place += 1;
            }
            for (shard, mutex) in self.shards.iter().enumerate() {
                let wanted = &sorted[starts[shard]..ends[shard]];
                if !wanted.is_empty() {
                    lock(mutex).copy(wanted, found, missing);
                }
            }
        }
    }

    /// Claims a row for a fetch, unless it is cached, which `found` gets, or in flight.
    pub(crate) fn claim(&self, row: u64, fetch: &Arc<F>, found: impl FnOnce(&[u8])) -> Claim<F> {
        let hash = hash_row(row);
        let mut shard = lock(&self.shards[self.shard_of(hash)]);
        if let Some(bytes) = shard.get(row, hash) {
            found(bytes);
            return Claim::Cached;
        }
        match shard.in_flight.entry(row) {
            std::collections::hash_map::Entry::Occupied(other) => Claim::InFlight(Arc::clone(other.get())),
            std::collections::hash_map::Entry::Vacant(entry) => {
                entry.insert(Arc::clone(fetch));
                Claim::Claimed
            }
        }
    }

    /// Ends the fetch of a row, and keeps its bytes if it has any.
    pub(crate) fn end_fetch(&self, row: u64, fetch: &Arc<F>, bytes: Option<&[u8]>, kept: Kept) {
        self.with_shard(row, |shard, hash| {
            if shard.in_flight.get(&row).is_some_and(|other| Arc::ptr_eq(other, fetch)) {
                shard.in_flight.remove(&row);
            }
            if let Some(bytes) = bytes {
                shard.insert(row, hash, bytes, kept);
            }
        });
    }

    /// Protects a row in the cache from eviction. Returns whether it is there.
    pub(crate) fn keep(&self, row: u64) -> bool {
        self.with_shard(row, |shard, hash| shard.keep(row, hash))
    }

    /// Returns whether a row is protected from eviction.
    pub(crate) fn is_kept(&self, row: u64) -> bool {
        self.with_shard(row, |shard, hash| shard.is_kept(row, hash))
    }

    /// Returns how many rows are protected from eviction.
    pub(crate) fn kept(&self) -> u64 {
        self.shards.iter().map(|shard| lock(shard).kept() as u64).sum()
    }

    /// Returns whether a row is in the cache.
    pub(crate) fn contains(&self, row: u64) -> bool {
        self.with_shard(row, |shard, hash| shard.contains(row, hash))
    }

    fn with_shard<T>(&self, row: u64, act: impl FnOnce(&mut Shard<F>, u64) -> T) -> T {
        let hash = hash_row(row);
        act(&mut lock(&self.shards[self.shard_of(hash)]), hash)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_keep_their_bound() {
        let mut random = fastrand::Rng::with_seed(11);
        for _ in 0..2000 {
            let row_bytes = random.usize(1..20_000);
            let (bytes_bits, rows_bits) = (random.u32(10..40), random.u32(1..40));
            let (bytes, rows) = (random.u64(0..1 << bytes_bits), random.u64(1..1 << rows_bits));
            let plan = CachePlan::new(bytes, rows, row_bytes);
            assert!(plan.bytes() <= bytes, "{plan:?} of {bytes}");
            assert!(plan.slots <= SLOTS_MAX, "{plan:?}");
            // Nothing is wasted: one more slot for each shard exceeds the bound, or the rows.
            let larger = CachePlan { slots: plan.slots + 1, ..plan };
            let has_all = (plan.slots * plan.shards) as u64 >= rows;
            assert!(has_all || larger.bytes() > bytes, "{plan:?} of {bytes} for {rows} rows");
        }
    }
}
