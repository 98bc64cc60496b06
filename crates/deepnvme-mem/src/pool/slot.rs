//! One slot of a pool, and the free list that it returns to.

use std::slice;

use crate::lock::LockState;
use crate::raw_memory::RawMemory;
use crate::region::Region;
use crate::region_mut::RegionMut;
use crate::sync::{Arc, Condvar, Mutex, MutexGuard, lock};

/// Exclusive use of one slot of a [`Pool`](crate::Pool), and its memory.
///
/// The slot returns to its pool once this value and every region of it are dropped, on any thread: memory that the
/// kernel still works on is never reused. Each of them keeps the arena alive.
#[derive(Debug)]
pub struct Slot {
    index: usize,
    memory: RegionMut,
}

/// Owns the memory of a taken slot. Dropping it returns the slot.
struct SlotGuard {
    slots: Arc<Slots>,
    index: usize,
}

impl Drop for SlotGuard {
    fn drop(&mut self) {
        self.slots.put_back(self.index);
    }
}

impl Slot {
    pub(super) fn new(slots: Arc<Slots>, index: usize) -> Self {
        let memory = slots.memory(index);
        let guard = std::sync::Arc::new(SlotGuard { slots, index });
        // The guard keeps the pool's arena alive, so it may replace the arena as the owner.
        Self { index, memory: RegionMut::of(memory.with_owner(guard)) }
    }

    /// Returns the slot's memory. The slot returns to its pool when the memory is dropped.
    pub(super) fn into_memory(self) -> RegionMut {
        self.memory
    }

    /// Returns the index of the slot in the arena.
    #[must_use]
    pub fn index(&self) -> usize {
        self.index
    }

    /// Returns the bytes of the slot.
    #[must_use]
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Returns false: a slot has at least one byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.memory.is_empty()
    }

    /// Returns the slot's memory, for the kernel. The slot does not return to its pool while the region is alive.
    #[must_use]
    pub fn region(&self) -> Region {
        self.memory.region()
    }

    /// Copies `len` logical bytes of `source`, from `from` on, into the slot at `at`.
    ///
    /// # Panics
    /// If a range is out of bounds, or the source is not in host memory.
    pub fn gather(&mut self, at: usize, source: &Region, from: usize, len: usize) {
        self.assert_inside(at, len);
        // SAFETY: the range was checked against the slot, whose memory the guard keeps alive.
        unsafe { source.raw.copy_out(from, self.memory.raw.start().add(at), len) }
    }

    /// Copies `len` bytes of the slot, from `at` on, over the logical bytes of `target` from `to` on.
    ///
    /// Concurrent copies into one target must be disjoint; see [`RegionMut`].
    ///
    /// # Panics
    /// If a range is out of bounds, or the target is not in host memory.
    pub fn scatter(&self, at: usize, target: &RegionMut, to: usize, len: usize) {
        self.assert_inside(at, len);
        // SAFETY: the range was checked against the slot, whose memory the guard keeps alive, and a `RegionMut` is
        // writable.
        unsafe { target.raw.copy_in(to, self.memory.raw.start().add(at), len) }
    }

    /// Returns the bytes. The slot is borrowed exclusively, so that no I/O into it can start while the slice lives.
    ///
    /// # Panics
    /// If a region of the slot is alive, since I/O in flight may hold it: drop the operation first.
    #[must_use]
    pub fn as_slice(&mut self) -> &[u8] {
        self.assert_no_region();
        // SAFETY: as for `as_mut_slice`.
        unsafe { slice::from_raw_parts(self.memory.raw.start(), self.len()) }
    }

    /// Returns the bytes, to write to.
    ///
    /// # Panics
    /// If a region of the slot is alive, since I/O in flight may hold it: drop the operation first.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        self.assert_no_region();
        // SAFETY: the slot's memory is initialised, and no region of it is alive. The slot is borrowed while the slice
        // lives, so no region can be created. `Pool::arena` gives addresses without access to the bytes.
        unsafe { slice::from_raw_parts_mut(self.memory.raw.start(), self.len()) }
    }

    fn assert_inside(&self, at: usize, len: usize) {
        let inside = at.checked_add(len).is_some_and(|end| end <= self.len());
        assert!(inside, "{len} bytes at {at} are outside a slot of {} bytes", self.len());
    }

    fn assert_no_region(&self) {
        assert!(self.memory.raw.is_unique(), "slot {} is borrowed while a region of it is alive", self.index);
    }
}

/// The memory of all slots, and the list of free ones.
pub(super) struct Slots {
    pub(super) arena: RegionMut,
    pub(super) lock_state: LockState,
    pub(super) layout: SlotLayout,
    pub(super) free: Mutex<FreeSlots>,
    pub(super) returned: Condvar,
}

/// Equal slots, one after the other.
#[derive(Clone, Copy)]
pub(super) struct SlotLayout {
    pub(super) count: usize,
    pub(super) bytes: usize,
    /// Bytes from the start of a slot to the next.
    pub(super) stride_bytes: usize,
}

/// The free slots, and how many threads wait for one.
pub(super) struct FreeSlots {
    /// The last returned is taken first, since its bytes may still be cached.
    pub(super) indices: Vec<usize>,
    pub(super) waiters: usize,
}

impl Slots {
    /// Returns the memory of one slot. Only the slot's holder may call this.
    pub(super) fn memory(&self, index: usize) -> RawMemory {
        let start = index * self.layout.stride_bytes;
        self.arena.raw.slice(start..start + self.layout.bytes)
    }

    /// Returns a slot and wakes one waiter, if there is one: a wake is a system call.
    fn put_back(&self, index: usize) {
        let mut free = self.lock_free();
        debug_assert!(!free.indices.contains(&index), "slot {index} came back twice");
        free.indices.push(index);
        let is_awaited = free.waiters > 0;
        drop(free);
        if is_awaited {
            self.returned.notify_one();
        }
    }

    /// Locks the free list. It is consistent after every statement, so a panic elsewhere cannot corrupt it.
    pub(super) fn lock_free(&self) -> MutexGuard<'_, FreeSlots> {
        lock(&self.free)
    }
}
