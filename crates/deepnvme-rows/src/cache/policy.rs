//! The rows that stay in memory: S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023).
//!
//! New rows enter a small queue. One that is used again before it leaves that queue moves to the main queue, so a scan
//! passes through the small queue only. A row that was evicted recently, and comes back, enters the main queue at once.

/// No slot.
const NONE: u32 = u32::MAX;
/// The small queue has this fraction of the slots in use.
const SMALL_FRACTION: usize = 10;
/// A row counts at most this many uses.
const USES_MAX: u8 = 3;

/// Chooses the slot to evict. Slots are numbers below a capacity.
#[derive(Debug)]
pub struct S3Fifo {
    small: Queue,
    main: Queue,
    /// The slot behind each slot in its queue.
    next: Vec<u32>,
    uses: Vec<u8>,
    ghosts: Ghosts,
}

impl S3Fifo {
    /// Bytes for each slot.
    pub const SLOT_BYTES: usize = size_of::<u32>() + size_of::<u8>() + Ghosts::SLOT_BYTES;

    /// Creates the policy for this many slots.
    #[must_use]
    pub fn new(slots: usize) -> Self {
        Self {
            small: Queue::default(),
            main: Queue::default(),
            next: vec![NONE; slots],
            uses: vec![0; slots],
            ghosts: Ghosts::new(slots),
        }
    }

    /// Counts a use of a slot.
    pub fn touch(&mut self, slot: u32) {
        let uses = &mut self.uses[slot as usize];
        *uses = (*uses + 1).min(USES_MAX);
    }

    /// Adds a slot, which must be in no queue. `hash` is that of its row. A row that `is_expected` soon survives the
    /// small queue.
    pub fn insert(&mut self, slot: u32, hash: u64, is_expected: bool) {
        self.uses[slot as usize] = u8::from(is_expected);
        let queue = if self.ghosts.take(hash) { &mut self.main } else { &mut self.small };
        queue.push(slot, &mut self.next);
    }

    /// Removes the slot that is least worth keeping, and returns it. `hash_of` returns the hash of its row, and `hold_of`
    /// says which slots stay. Returns `None` if all do.
    pub fn evict(&mut self, hash_of: impl Fn(u32) -> u64, hold_of: impl Fn(u32) -> Hold) -> Option<u32> {
        let all = self.small.len + self.main.len;
        let mut held_of_main = 0;
        // Each slot passes at most once through the small queue, and once for each use through the main queue.
        for _ in 0..self.small.len + all * (USES_MAX as usize + 2) {
            let is_small_full = self.small.len >= (all / SMALL_FRACTION).max(1);
            if self.small.len > 0 && (is_small_full || held_of_main >= self.main.len) {
                let slot = self.small.pop(&self.next)?;
                match hold_of(slot) {
                    Hold::Always => {}
                    Hold::None if self.uses[slot as usize] == 0 => {
                        self.ghosts.add(hash_of(slot));
                        return Some(slot);
                    }
                    Hold::None | Hold::Now => {
                        self.uses[slot as usize] = 0;
                        self.main.push(slot, &mut self.next);
                    }
                }
            } else {
                let slot = self.main.pop(&self.next)?;
                let (uses, hold) = (&mut self.uses[slot as usize], hold_of(slot));
                held_of_main = if hold == Hold::Now { held_of_main + 1 } else { 0 };
                match hold {
                    Hold::Always => {}
                    Hold::None if *uses == 0 => return Some(slot),
                    Hold::None | Hold::Now => {
                        *uses = uses.saturating_sub(1);
                        self.main.push(slot, &mut self.next);
                    }
                }
            }
        }
        None
    }
}

/// Whether a slot may be evicted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Hold {
    /// It may.
    None,
    /// It stays for now.
    Now,
    /// It stays for ever, and leaves its queue.
    Always,
}

/// A first-in, first-out list of slots.
#[derive(Debug)]
struct Queue {
    first: u32,
    last: u32,
    len: usize,
}

impl Default for Queue {
    fn default() -> Self {
        Self { first: NONE, last: NONE, len: 0 }
    }
}

impl Queue {
    fn push(&mut self, slot: u32, next: &mut [u32]) {
        next[slot as usize] = NONE;
        if self.last == NONE {
            self.first = slot;
        } else {
            next[self.last as usize] = slot;
        }
        self.last = slot;
        self.len += 1;
    }

    fn pop(&mut self, next: &[u32]) -> Option<u32> {
        if self.first == NONE {
            return None;
        }
        let slot = self.first;
        self.first = next[slot as usize];
        if self.first == NONE {
            self.last = NONE;
        }
        self.len -= 1;
        Some(slot)
    }
}

/// Rows that were evicted recently, by their hashes. A newer row may overwrite an older one.
#[derive(Debug)]
struct Ghosts {
    /// Upper halves of hashes, at places that the lower halves choose. Zero is none.
    tags: Vec<u32>,
}

impl Ghosts {
    const SLOT_BYTES: usize = size_of::<u32>();

    fn new(slots: usize) -> Self {
        Self { tags: vec![0; slots] }
    }

    fn add(&mut self, hash: u64) {
        let (place, tag) = self.place(hash);
        self.tags[place] = tag;
    }

    /// Forgets the row. Returns whether it was there.
    fn take(&mut self, hash: u64) -> bool {
        let (place, tag) = self.place(hash);
        let is_there = self.tags[place] == tag;
        if is_there {
            self.tags[place] = 0;
        }
        is_there
    }

    fn place(&self, hash: u64) -> (usize, u32) {
        // The product's upper half is uniform below the length, which need not be a power of two.
        let place = ((hash & 0xffff_ffff) * self.tags.len() as u64) >> 32;
        (place as usize, (hash >> 32) as u32 | 1)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::cache::hash::hash_row;

    /// A cache of row numbers.
    struct Rows {
        policy: S3Fifo,
        slots: HashMap<u64, u32>,
        rows: Vec<u64>,
        free: Vec<u32>,
    }

    impl Rows {
        fn new(slots: usize) -> Self {
            let free = (0..slots as u32).rev().collect();
            Self { policy: S3Fifo::new(slots), slots: HashMap::new(), rows: vec![0; slots], free }
        }

        /// Returns whether the row was there.
        fn use_row(&mut self, row: u64) -> bool {
            if let Some(slot) = self.slots.get(&row) {
                self.policy.touch(*slot);
                return true;
            }
            let slot = self.free.pop().unwrap_or_else(|| {
                let slot = self.policy.evict(|slot| hash_row(self.rows[slot as usize]), |_| Hold::None).unwrap();
                self.slots.remove(&self.rows[slot as usize]).expect("an evicted slot has a row");
                slot
            });
            self.policy.insert(slot, hash_row(row), false);
            self.rows[slot as usize] = row;
            self.slots.insert(row, slot);
            false
        }
    }

    /// Zipf-distributed numbers below `rows`, exponent 1.
    fn zipf(random: &mut fastrand::Rng, rows: usize) -> u64 {
        // The inverse of the distribution function of 1/x.
        ((rows as f64).powf(random.f64()) - 1.0) as u64
    }

    fn lru_misses(uses: &[u64], slots: usize) -> usize {
        let (mut clock, mut last, mut by_age) = (0_u64, HashMap::new(), std::collections::BTreeMap::new());
        let mut misses = 0;
        for row in uses {
            clock += 1;
            match last.insert(*row, clock) {
                Some(before) => drop(by_age.remove(&before)),
                None => {
                    misses += 1;
                    if by_age.len() == slots {
                        let (_, oldest) = by_age.pop_first().unwrap();
                        last.remove(&oldest);
                    }
                }
            }
            by_age.insert(clock, *row);
        }
        misses
    }

    #[test]
    fn reads_less_than_lru_for_skewed_rows() {
        let mut random = fastrand::Rng::with_seed(7);
        let (rows, slots) = (100_000, 5_000);
        let uses: Vec<u64> = (0..400_000).map(|_| zipf(&mut random, rows)).collect();
        let mut cache = Rows::new(slots);
        let misses = uses.iter().filter(|row| !cache.use_row(**row)).count();
        let lru = lru_misses(&uses, slots);
        assert!(misses * 100 < lru * 97, "{misses} misses, and {lru} of LRU");
    }

    #[test]
    fn a_scan_leaves_rows_in_use() {
        let mut cache = Rows::new(1000);
        for _ in 0..4 {
            (0..500).for_each(|row| _ = cache.use_row(row));
        }
        (1_000_000..1_010_000).for_each(|row| _ = cache.use_row(row));
        let kept = (0..500).filter(|row| cache.slots.contains_key(row)).count();
        assert_eq!(kept, 500);
    }

    #[test]
    fn held_slots_stay() {
        let mut policy = S3Fifo::new(8);
        (0..8).for_each(|slot| policy.insert(slot, slot.into(), false));
        for _ in 0..7 {
            let slot = policy
                .evict(u64::from, |slot| if slot == 3 { Hold::Now } else { Hold::None })
                .expect("a slot that nobody holds");
            assert_ne!(slot, 3);
        }
        assert_eq!(policy.evict(u64::from, |slot| if slot == 3 { Hold::Now } else { Hold::None }), None);
        assert_eq!(policy.evict(u64::from, |_| Hold::None), Some(3));
    }

    #[test]
    fn slots_that_stay_for_ever_cost_one_look() {
        let mut policy = S3Fifo::new(100);
        (0..100).for_each(|slot| policy.insert(slot, slot.into(), false));
        let looks = std::cell::Cell::new(0);
        let hold_of = |slot| {
            looks.set(looks.get() + 1);
            if slot < 90 { Hold::Always } else { Hold::None }
        };
        let evicted: Vec<_> = (0..11).map(|_| policy.evict(u64::from, hold_of)).collect();
        assert_eq!(evicted.iter().flatten().count(), 10);
        assert_eq!(looks.get(), 100);
    }

    #[test]
    fn expected_rows_survive_the_small_queue() {
        let mut policy = S3Fifo::new(10);
        policy.insert(0, 100, true);
        (1..10).for_each(|slot| policy.insert(slot, slot.into(), false));
        let evicted: Vec<_> = (0..9).map(|_| policy.evict(u64::from, |_| Hold::None)).collect();
        assert!(!evicted.contains(&Some(0)), "{evicted:?}");
    }
}
