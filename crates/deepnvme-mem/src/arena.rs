//! One piece of memory that its owner divides freely.

use std::fmt;
use std::io;
use std::ops::Range;

use crate::buffer::Buffer;
use crate::lock::LockState;
use crate::region::Region;
use crate::region_mut::RegionMut;

/// Memory that is divided into ranges of any size.
///
/// Unlike a [`Pool`](crate::Pool), an arena does not track which ranges are in use. Its owner decides, and may create
/// any number of regions of a range. The owner must keep the rule of [`RegionMut`] about concurrent copies. The
/// memory is freed with the arena and the last region of it.
///
/// ```
/// use deepnvme_mem::Arena;
/// let arena = Arena::new(1 << 20, false)?;
/// arena.region_mut(4096..4101).copy_from_slice(0, b"bytes");
/// let mut bytes = [0; 5];
/// arena.region(4096..4101).copy_to_slice(0, &mut bytes);
/// assert_eq!(&bytes, b"bytes");
/// # Ok::<(), std::io::Error>(())
/// ```
pub struct Arena {
    whole: RegionMut,
    lock_state: LockState,
}

impl Arena {
    /// Allocates `len` zeroed bytes. With `lock`, they are pinned if the kernel allows it.
    ///
    /// # Errors
    /// `ENOMEM` if the memory is not available. A refused lock is not an error.
    pub fn new(len: usize, lock: bool) -> io::Result<Self> {
        let buffer = if lock { Buffer::locked(len)? } else { Buffer::zeroed(len)? };
        let lock_state = buffer.lock_state().clone();
        Ok(Self { whole: buffer.into_region(), lock_state })
    }

    /// Replaces the memory by the region that `wrap` makes from it: the same bytes with another owner.
    ///
    /// # Panics
    /// If `wrap` returns other bytes.
    #[must_use]
    pub fn with_owner(self, wrap: impl FnOnce(RegionMut) -> RegionMut) -> Self {
        let before = (self.whole.addr(), self.whole.len());
        let whole = wrap(self.whole);
        assert_eq!((whole.addr(), whole.len()), before, "the same bytes");
        Self { whole, lock_state: self.lock_state }
    }

    /// Returns the number of bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.whole.len()
    }

    /// Returns whether the arena is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.whole.is_empty()
    }

    /// Returns whether the memory is locked into RAM, and otherwise why not.
    #[must_use]
    pub fn lock_state(&self) -> &LockState {
        &self.lock_state
    }

    /// Returns a range of the memory, to write to.
    ///
    /// # Panics
    /// If the range is out of bounds.
    #[must_use]
    pub fn region_mut(&self, range: Range<usize>) -> RegionMut {
        RegionMut::of(self.whole.raw.slice(range))
    }

    /// Returns a range of the memory, to read from.
    ///
    /// # Panics
    /// If the range is out of bounds.
    #[must_use]
    pub fn region(&self, range: Range<usize>) -> Region {
        Region { raw: self.whole.raw.slice(range) }
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Arena({} bytes, {:?})", self.len(), self.lock_state)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_last_region_frees_the_memory() {
        let arena = Arena::new(10_000, false).unwrap();
        assert!(!arena.is_empty() && arena.lock_state() == &LockState::NotRequested);
        let owner = arena.whole.raw.downgrade_owner();
        let (part, other) = (arena.region_mut(5000..10_000), arena.region(0..1));
        part.copy_from_slice(4999, &[7]);
        drop(arena);
        let mut last = [0];
        part.region().copy_to_slice(4999, &mut last);
        assert_eq!(last, [7]);
        drop(part);
        assert!(owner.upgrade().is_some());
        drop(other);
        assert!(owner.upgrade().is_none());
    }

    #[test]
    #[should_panic(expected = "outside a region")]
    fn a_range_out_of_bounds_panics() {
        let _ = Arena::new(4096, false).unwrap().region_mut(1..4098);
    }
}
