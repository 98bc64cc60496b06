//! A part of the cache, under one lock.

use std::collections::HashMap;
use std::sync::Arc;

use deepnvme_io::mem::{Buffer, PAGE_BYTES, prefetch};

use super::hash::hash_row;
use super::index::RowIndex;
use super::policy::{Hold, S3Fifo};

/// Rows whose bytes are loaded into the CPU's cache together, before the first is copied.
const PREFETCHED_ROWS: usize = 32;
/// Bytes of each row that are loaded so. The CPU finds the pattern of the rest itself.
const PREFETCHED_BYTES: usize = 256;
const CACHE_LINE_BYTES: usize = 64;

/// Some rows, and the fetches (`F`) of others.
#[derive(Debug)]
pub(super) struct Shard<F> {
    row_bytes: usize,
    slots: u32,
    /// The slots from this one on have never held a row.
    used: u32,
    index: RowIndex,
    /// The row of each slot.
    rows: Vec<u64>,
    policy: S3Fifo,
    /// The slots that are never evicted, and their number.
    is_kept: Vec<bool>,
    kept: usize,
    memory: Buffer,
    /// Rows that are being fetched.
    pub(super) in_flight: HashMap<u64, Arc<F>>,
}

impl<F> Shard<F> {
    /// Bytes of a shard.
    pub(super) fn bytes(slots: usize, row_bytes: usize) -> u64 {
        let memory = (slots as u64 * row_bytes as u64).next_multiple_of(PAGE_BYTES);
        let slot_bytes = size_of::<u64>() + S3Fifo::SLOT_BYTES + size_of::<bool>();
        memory + (RowIndex::bytes(slots) + slots * slot_bytes) as u64
    }

    /// `slots` must be below the index's maximum.
    pub(super) fn new(slots: usize, row_bytes: usize) -> std::io::Result<Self> {
        Ok(Self {
            row_bytes,
            slots: slots as u32,
            used: 0,
            index: RowIndex::new(slots),
            rows: vec![0; slots],
            policy: S3Fifo::new(slots),
            is_kept: vec![false; slots],
            kept: 0,
            memory: Buffer::zeroed(slots * row_bytes)?,
            in_flight: HashMap::new(),
        })
    }

    /// Passes each cached row to `found`, by its position, and the positions of the others to `missing`.
    pub(super) fn copy(
        &mut self,
        wanted: &[(u64, u64, u32)],
        found: &mut impl FnMut(u32, &[u8]),
        missing: &mut impl FnMut(u32),
    ) {
        let mut slots = [None; PREFETCHED_ROWS];
        for group in wanted.chunks(PREFETCHED_ROWS) {
            group.iter().for_each(|(_, hash, _)| self.index.prefetch(*hash));
            for ((row, hash, _), slot) in group.iter().zip(&mut slots) {
                *slot = self.index.get(*row, *hash);
                if let Some(slot) = *slot {
                    let start = self.bytes_of(slot).as_ptr();
                    for line in (0..self.row_bytes.min(PREFETCHED_BYTES)).step_by(CACHE_LINE_BYTES) {
                        prefetch(start.wrapping_add(line));
                    }
                }
            }
            for ((_, _, position), slot) in group.iter().zip(slots) {
                match slot {
                    Some(slot) => {
                        self.policy.touch(slot);
                        found(*position, self.bytes_of(slot));
                    }
                    None => missing(*position),
                }
            }
        }
    }

    /// Returns a cached row.
    pub(super) fn get(&mut self, row: u64, hash: u64) -> Option<&[u8]> {
        let slot = self.index.get(row, hash)?;
        self.policy.touch(slot);
        Some(self.bytes_of(slot))
    }

    pub(super) fn contains(&self, row: u64, hash: u64) -> bool {
        self.index.get(row, hash).is_some()
    }

    /// Protects a row from eviction, if it is there. Returns whether it is.
    pub(super) fn keep(&mut self, row: u64, hash: u64) -> bool {
        let slot = self.index.get(row, hash);
        if let Some(slot) = slot {
            self.kept += usize::from(!std::mem::replace(&mut self.is_kept[slot as usize], true));
        }
        slot.is_some()
    }

    pub(super) fn is_kept(&self, row: u64, hash: u64) -> bool {
        self.index.get(row, hash).is_some_and(|slot| self.is_kept[slot as usize])
    }

    /// Returns how many rows are protected from eviction.
    pub(super) fn kept(&self) -> usize {
        self.kept
    }

    /// Adds a row, if there is room.
    pub(super) fn insert(&mut self, row: u64, hash: u64, bytes: &[u8], kept: Kept) {
        if self.index.get(row, hash).is_some() {
            return;
        }
        let Some(slot) = self.take_slot() else { return };
        self.index.insert(row, hash, slot);
        self.rows[slot as usize] = row;
        self.policy.insert(slot, hash, kept == Kept::UntilUsed);
        let start = slot as usize * self.row_bytes;
        self.memory.as_mut_slice()[start..start + self.row_bytes].copy_from_slice(bytes);
    }

    fn take_slot(&mut self) -> Option<u32> {
        if self.used < self.slots {
            self.used += 1;
            return Some(self.used - 1);
        }
        let hold_of = |slot| if self.is_kept[slot as usize] { Hold::Always } else { Hold::None };
        let slot = self.policy.evict(|slot| hash_row(self.rows[slot as usize]), hold_of)?;
        let row = self.rows[slot as usize];
        self.index.remove(row, hash_row(row));
        Some(slot)
    }

    fn bytes_of(&self, slot: u32) -> &[u8] {
        let start = slot as usize * self.row_bytes;
        &self.memory.as_slice()[start..start + self.row_bytes]
    }
}

/// How long a row stays in the cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kept {
    /// While it is used more often than others.
    WhileUsed,
    /// At least as long as a row that was used twice: it was read ahead.
    UntilUsed,
}
