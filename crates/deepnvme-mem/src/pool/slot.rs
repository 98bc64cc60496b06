//! One slot of a pool, and its way back.

use std::slice;

use crate::region::Region;
use crate::region_mut::RegionMut;
use crate::sync::Arc;

use super::slots::Slots;

/// The right to one slot of a [`Pool`](crate::Pool), with its memory.
///
/// The slot is back in its pool once this value *and* every region of it are dropped, on whatever thread: memory that
/// the kernel still works on is never lent to somebody else. The arena stays alive for as long as any of them.
#[derive(Debug)]
pub struct Slot {
    index: usize,
    memory: RegionMut,
}

/// What stands for a slot that is out: the owner of the slot's memory. Its end is the slot's return.
struct Lease {
    slots: Arc<Slots>,
    index: usize,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.slots.give_back(self.index);
    }
}

impl Slot {
    pub(super) fn new(slots: Arc<Slots>, index: usize) -> Self {
        let memory = slots.memory(index);
        let lease = std::sync::Arc::new(Lease { slots, index });
        // The lease holds the pool's arena, so that it may take the arena's place as the owner.
        Self { index, memory: RegionMut(memory.owned_by(lease)) }
    }

    /// Which slot of the pool this is, counted from the start of the arena.
    #[must_use]
    pub fn index(&self) -> usize {
        self.index
    }

    /// Bytes in the slot.
    #[must_use]
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Never: a pool has no slots without bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.memory.is_empty()
    }

    /// The slot's memory, for the kernel. The slot does not return to its pool while the region is alive.
    #[must_use]
    pub fn region(&self) -> Region {
        self.memory.region()
    }

    /// Copies `len` logical bytes of `source`, from `from` on, into the slot at `at`.
    ///
    /// # Panics
    /// When either range is outside its memory, or the source is not in the processor's memory.
    pub fn gather(&mut self, at: usize, source: &Region, from: usize, len: usize) {
        self.assert_inside(at, len);
        // SAFETY: the range was checked against the slot, whose memory the lease keeps alive.
        unsafe { source.0.copy_out(from, self.memory.0.start().add(at), len) }
    }

    /// Copies `len` bytes of the slot, from `at` on, over the logical bytes of `target` from `to` on.
    ///
    /// Copies into one target at the same time must be disjoint; see [`RegionMut`].
    ///
    /// # Panics
    /// When either range is outside its memory, or the target is not in the processor's memory.
    pub fn scatter(&self, at: usize, target: &RegionMut, to: usize, len: usize) {
        self.assert_inside(at, len);
        // SAFETY: the range was checked against the slot, and a `RegionMut` is the right to write.
        unsafe { target.0.copy_in(to, self.memory.0.start().add(at), len) }
    }

    /// The bytes. While the slice is alive, no I/O may be started that reads into the slot.
    ///
    /// # Panics
    /// While a region of the slot is alive, since I/O in flight may hold it: drop the operation first.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        self.assert_quiet();
        // SAFETY: the slot's initialised memory; nobody else holds a way to it.
        unsafe { slice::from_raw_parts(self.memory.0.start(), self.len()) }
    }

    /// The bytes, to change.
    ///
    /// # Panics
    /// While a region of the slot is alive, since I/O in flight may hold it: drop the operation first.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        self.assert_quiet();
        // SAFETY: as for `as_slice`; the slot is borrowed for as long as the slice lives, so that no region can be made.
        unsafe { slice::from_raw_parts_mut(self.memory.0.start(), self.len()) }
    }

    fn assert_inside(&self, at: usize, len: usize) {
        let inside = at.checked_add(len).is_some_and(|end| end <= self.len());
        assert!(inside, "{len} bytes at {at} are outside a slot of {} bytes", self.len());
    }

    fn assert_quiet(&self) {
        assert!(self.memory.0.is_only_holder(), "slot {} is lent out while a region of it is alive", self.index);
    }
}
