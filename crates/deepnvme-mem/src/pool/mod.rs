//! An arena divided into equal slots.

use std::fmt;
use std::io;
use std::time::Duration;

use rustix::io::Errno;

use crate::Alignment;
use crate::buffer::Buffer;
use crate::lock::LockState;
use crate::registrable_range::RegistrableRange;
use crate::sync::{Arc, Condvar, Instant, Mutex, ignore_poison};

mod slot;

pub use slot::Slot;
use slot::{FreeSlots, SlotLayout, Slots};

/// A fixed number of equal slots of memory. Each starts on a page, and all lie in one arena.
///
/// The pool never grows: callers wait while no slot is free, and [`Pool::bound_bytes`] is all the memory it ever uses.
/// Clones share the slots. The arena is freed with the last clone, slot and region of it, in any order.
///
/// ```
/// use deepnvme_mem::Pool;
/// let pool = Pool::new(1 << 16, 2, false)?;
/// let slot = pool.try_take().unwrap();
/// assert_eq!(pool.free_slots(), 1);
/// drop(slot);
/// assert_eq!(pool.free_slots(), 2);
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone)]
pub struct Pool {
    slots: Arc<Slots>,
}

impl Pool {
    /// Allocates `slots` slots of `slot_bytes`, each of which takes whole pages. With `lock`, they are pinned if the
    /// kernel allows it; [`Pool::lock_state`] returns the outcome.
    ///
    /// # Errors
    /// `ENOMEM` if the memory is not available, `InvalidInput` if `slot_bytes` is zero.
    pub fn new(slot_bytes: usize, slots: usize, lock: bool) -> io::Result<Self> {
        Self::of(slot_bytes, slots, |bytes| if lock { Buffer::locked(bytes) } else { Buffer::zeroed(bytes) })
    }

    /// Allocates a pool as [`new`](Self::new), preferably on NUMA node `node`.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn on_node(slot_bytes: usize, slots: usize, lock: bool, node: u32) -> io::Result<Self> {
        Self::of(slot_bytes, slots, |bytes| Buffer::on_node(bytes, lock, node))
    }

    fn of(slot_bytes: usize, slots: usize, make: impl FnOnce(usize) -> io::Result<Buffer>) -> io::Result<Self> {
        if slot_bytes == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a slot of a pool needs at least one byte"));
        }
        let page_bytes = Alignment::PAGE.bytes() as usize;
        let stride_bytes = slot_bytes.checked_next_multiple_of(page_bytes).ok_or(Errno::NOMEM)?;
        let bound_bytes = stride_bytes.checked_mul(slots).ok_or(Errno::NOMEM)?;
        let arena = make(bound_bytes)?;
        let lock_state = arena.lock_state().clone();
        let mut free = Vec::new();
        free.try_reserve_exact(slots).map_err(|_| Errno::NOMEM)?;
        free.extend((0..slots).rev());
        let (free, returned) = (Mutex::new(FreeSlots { indices: free, waiters: 0 }), Condvar::new());
        let (arena, layout) = (arena.into_region(), SlotLayout { count: slots, bytes: slot_bytes, stride_bytes });
        Ok(Self { slots: Arc::new(Slots { arena, lock_state, layout, free, returned }) })
    }

    /// Divides one of its slots into smaller ones of `part_bytes`, a multiple of [`PAGE_BYTES`](crate::PAGE_BYTES). A
    /// rest that is smaller than a part is unused. The slot returns here once the new pool, and every slot and region
    /// of it, are dropped.
    ///
    /// ```
    /// use deepnvme_mem::Pool;
    /// let pool = Pool::new(1 << 16, 1, false)?;
    /// let parts = pool.divide(pool.try_take().unwrap(), 4096);
    /// assert_eq!((parts.slots(), pool.free_slots()), (16, 0));
    /// drop(parts);
    /// assert_eq!(pool.free_slots(), 1);
    /// # Ok::<(), std::io::Error>(())
    /// ```
    ///
    /// # Panics
    /// If the slot is of another pool, or `part_bytes` is zero, no multiple of [`PAGE_BYTES`](crate::PAGE_BYTES), or
    /// larger than the slot.
    #[must_use]
    pub fn divide(&self, slot: Slot, part_bytes: usize) -> Self {
        assert!(self.arena().addresses().contains(&slot.region().addr()), "a slot of another pool is not divided");
        let count = slot.len().checked_div(part_bytes).unwrap_or(0);
        let is_aligned = part_bytes.is_multiple_of(Alignment::PAGE.bytes() as usize);
        assert!(is_aligned && count > 0, "a slot of {} bytes is not divided into parts of {part_bytes}", slot.len());
        let free = FreeSlots { indices: (0..count).rev().collect(), waiters: 0 };
        let slots = Slots {
            arena: slot.into_memory(),
            lock_state: self.lock_state(),
            layout: SlotLayout { count, bytes: part_bytes, stride_bytes: part_bytes },
            free: Mutex::new(free),
            returned: Condvar::new(),
        };
        Self { slots: Arc::new(slots) }
    }

    /// Takes a slot if one is free.
    #[must_use]
    pub fn try_take(&self) -> Option<Slot> {
        let index = self.slots.lock_free().indices.pop()?;
        Some(Slot::new(Arc::clone(&self.slots), index))
    }

    /// Takes a slot. Waits up to `timeout` for one to be returned, and returns `None` after that.
    #[must_use]
    pub fn take_timeout(&self, timeout: Duration) -> Option<Slot> {
        // A deadline beyond the clock's range means to wait forever.
        let deadline = Instant::now().checked_add(timeout);
        let mut free = self.slots.lock_free();
        loop {
            if let Some(index) = free.indices.pop() {
                drop(free);
                return Some(Slot::new(Arc::clone(&self.slots), index));
            }
            let left = deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return None;
            }
            free.waiters += 1;
            (free, _) = ignore_poison(self.slots.returned.wait_timeout(free, left));
            free.waiters -= 1;
        }
    }

    /// Returns the number of free slots.
    #[must_use]
    pub fn free_slots(&self) -> usize {
        self.slots.lock_free().indices.len()
    }

    /// Returns the number of slots.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.slots.layout.count
    }

    /// Returns the bytes of one slot.
    #[must_use]
    pub fn slot_bytes(&self) -> usize {
        self.slots.layout.bytes
    }

    /// Returns the bytes of the arena, the most memory that the pool ever uses.
    #[must_use]
    pub fn bound_bytes(&self) -> usize {
        self.slots.arena.len()
    }

    /// Returns the addresses of the arena, to register it with the kernel or a device.
    #[must_use]
    pub fn arena(&self) -> RegistrableRange {
        RegistrableRange::from(&self.slots.arena)
    }

    /// Returns whether the arena is locked into RAM.
    #[must_use]
    pub fn lock_state(&self) -> LockState {
        self.slots.lock_state.clone()
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Slots { layout: SlotLayout { count, bytes, .. }, lock_state, .. } = &*self.slots;
        write!(f, "Pool({} of {count} slots of {bytes} bytes free, {lock_state:?})", self.free_slots())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_divided_slot_returns_with_the_last_of_its_parts() {
        let pool = Pool::new(1 << 16, 2, false).unwrap();
        let kept = pool.try_take().unwrap();
        let slot = pool.try_take().unwrap();
        let start = slot.region().addr();
        let parts = pool.divide(slot, 1 << 14);
        assert_eq!((parts.slots(), parts.slot_bytes(), parts.bound_bytes()), (4, 1 << 14, 1 << 16));
        let taken: Vec<Slot> = (0..4).map(|_| parts.try_take().unwrap()).collect();
        assert!(parts.try_take().is_none());
        for (index, part) in taken.iter().enumerate() {
            assert_eq!((part.region().addr(), part.len()), (start + index * (1 << 14), 1 << 14));
        }
        drop(parts);
        let region = taken[2].region();
        drop(taken);
        assert_eq!(pool.free_slots(), 0, "a region of a part is alive");
        drop(region);
        assert_eq!(pool.free_slots(), 1);
        drop(kept);
        assert_eq!(pool.free_slots(), 2);
    }

    #[test]
    #[should_panic(expected = "is not divided into parts of 5000")]
    fn a_part_that_is_no_multiple_of_a_page_panics() {
        let pool = Pool::new(1 << 16, 1, false).unwrap();
        let _ = pool.divide(pool.try_take().unwrap(), 5000);
    }

    #[test]
    #[should_panic(expected = "a slot of another pool is not divided")]
    fn a_slot_of_another_pool_panics() {
        let (pool, other) = (Pool::new(1 << 16, 1, false).unwrap(), Pool::new(1 << 16, 1, false).unwrap());
        let _ = pool.divide(other.try_take().unwrap(), 4096);
    }

    #[test]
    fn the_last_clone_slot_or_region_frees_the_arena() {
        for last in 0..4 {
            let pool = Pool::new(4096, 2, false).unwrap();
            let arena = pool.arena().raw.downgrade_owner();
            let slot = pool.try_take().unwrap();
            let region = pool.try_take().unwrap().region();
            let mut holders: Vec<Box<dyn Send>> =
                vec![Box::new(pool.clone()), Box::new(pool), Box::new(slot), Box::new(region)];
            let last_holder = holders.swap_remove(last);
            drop(holders);
            assert!(arena.upgrade().is_some(), "holder {last} is alive");
            drop(last_holder);
            assert!(arena.upgrade().is_none(), "holder {last} was the last");
        }
    }
}
