//! One arena cut into equal slots, lent out one at a time.

use std::fmt;
use std::io;
use std::sync::PoisonError;
use std::time::Duration;

use rustix::io::Errno;

use crate::Alignment;
use crate::buffer::Buffer;
use crate::lock::LockState;
use crate::region::Region;
use crate::sync::{Arc, Condvar, Instant, Mutex};

mod slot;
mod slots;

pub use slot::Slot;
use slots::Slots;

/// A fixed number of equal slots of memory; each starts on a page, and all lie in one arena.
///
/// The pool never grows: whoever finds it empty waits, and [`Pool::bound_bytes`] is all the memory it will ever use.
/// Clones share the slots. The arena is freed with the last clone, slot and region of it, in whatever order they go.
///
/// ```
/// use deepnvme_mem::Pool;
/// let pool = Pool::new(1 << 16, 2, false)?;
/// let slot = pool.try_take().unwrap();
/// assert_eq!(pool.free(), 1);
/// drop(slot);
/// assert_eq!(pool.free(), 2);
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone)]
pub struct Pool {
    slots: Arc<Slots>,
}

impl Pool {
    /// `slots` slots of `slot_bytes` each, which the arena rounds up to whole pages; with `lock`, page-locked
    /// where the kernel allows it ([`Pool::lock_state`] tells).
    ///
    /// # Errors
    /// `ENOMEM` when there is no such memory, `InvalidInput` when a slot would have no bytes.
    pub fn new(slot_bytes: usize, slots: usize, lock: bool) -> io::Result<Self> {
        Self::of(slot_bytes, slots, |bytes| if lock { Buffer::locked(bytes) } else { Buffer::zeroed(bytes) })
    }

    /// As [`new`](Self::new), in memory of that NUMA node as far as it has some.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn near(slot_bytes: usize, slots: usize, lock: bool, node: u32) -> io::Result<Self> {
        Self::of(slot_bytes, slots, |bytes| Buffer::near(bytes, lock, node))
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
        let (free, returned) = (Mutex::new(free), Condvar::new());
        let arena = arena.into_region();
        let slots = Arc::new(Slots { arena, lock_state, slot_bytes, stride_bytes, count: slots, free, returned });
        Ok(Self { slots })
    }

    /// A slot, if one is free.
    #[must_use]
    pub fn try_take(&self) -> Option<Slot> {
        let index = self.slots.lock_free().pop()?;
        Some(Slot::new(Arc::clone(&self.slots), index))
    }

    /// A slot; waits up to `timeout` for one to come back.
    #[must_use]
    pub fn take_timeout(&self, timeout: Duration) -> Option<Slot> {
        // A time beyond the clock's range is a wait without an end.
        let deadline = Instant::now().checked_add(timeout);
        let mut free = self.slots.lock_free();
        loop {
            if let Some(index) = free.pop() {
                drop(free);
                return Some(Slot::new(Arc::clone(&self.slots), index));
            }
            let left = deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return None;
            }
            let woken = self.slots.returned.wait_timeout(free, left);
            (free, _) = woken.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Slots that can be taken now.
    #[must_use]
    pub fn free(&self) -> usize {
        self.slots.lock_free().len()
    }

    /// Slots in all.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.slots.count
    }

    /// Bytes of one slot.
    #[must_use]
    pub fn slot_bytes(&self) -> usize {
        self.slots.slot_bytes
    }

    /// Bytes of the arena: the most that the pool will ever use.
    #[must_use]
    pub fn bound_bytes(&self) -> usize {
        self.slots.arena.len()
    }

    /// The whole arena, to register its address with the kernel or a device. Slots lie in it one after the other.
    #[must_use]
    pub fn arena(&self) -> Region {
        self.slots.arena.region()
    }

    /// What the kernel said to locking the arena into RAM.
    #[must_use]
    pub fn lock_state(&self) -> LockState {
        self.slots.lock_state.clone()
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Slots { count, slot_bytes, lock_state, .. } = &*self.slots;
        write!(f, "Pool({} of {count} slots of {slot_bytes} bytes free, {lock_state:?})", self.free())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_arena_goes_with_the_last_clone_slot_or_region() {
        for last in 0..4 {
            let pool = Pool::new(4096, 2, false).unwrap();
            let arena = pool.arena().0.watch_owner();
            let slot = pool.try_take().unwrap();
            let region = pool.try_take().unwrap().region();
            let mut holders: Vec<Box<dyn Send>> =
                vec![Box::new(pool.clone()), Box::new(pool), Box::new(slot), Box::new(region)];
            let kept = holders.swap_remove(last);
            drop(holders);
            assert!(arena.upgrade().is_some(), "holder {last} is alive");
            drop(kept);
            assert!(arena.upgrade().is_none(), "holder {last} was the last");
        }
    }
}
