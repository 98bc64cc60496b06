//! One piece of memory that its owner cuts as it likes, and cuts anew.

use std::fmt;
use std::io;
use std::ops::Range;

use crate::buffer::Buffer;
use crate::lock::LockState;
use crate::region::Region;
use crate::region_mut::RegionMut;

/// Memory whose parts come and go in any size, page-locked where the kernel allows it.
///
/// Unlike a [`Pool`](crate::Pool) it keeps no list of what is in use: whoever has the arena decides that, and gives out
/// the right to fill a part as often as is needed. The rule of [`RegionMut`] about copies at the same time is theirs to
/// keep. The memory is freed with the arena and the last region of it.
///
/// ```
/// use deepnvme_mem::Arena;
/// let arena = Arena::new(1 << 20, false)?;
/// arena.target(4096..4101).copy_from_slice(0, b"bytes");
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
    /// `len` bytes, all zero; with `lock`, page-locked where the kernel allows it.
    ///
    /// # Errors
    /// `ENOMEM` when there is no such memory. A refusal to lock is no error.
    pub fn new(len: usize, lock: bool) -> io::Result<Self> {
        let buffer = if lock { Buffer::locked(len)? } else { Buffer::zeroed(len)? };
        let lock_state = buffer.lock_state().clone();
        Ok(Self { whole: buffer.into_region(), lock_state })
    }

    /// Bytes in it.
    #[must_use]
    pub fn len(&self) -> usize {
        self.whole.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.whole.is_empty()
    }

    /// What the kernel said to locking it into RAM.
    #[must_use]
    pub fn lock_state(&self) -> &LockState {
        &self.lock_state
    }

    /// The right to fill a part.
    ///
    /// # Panics
    /// When the range is not inside.
    #[must_use]
    pub fn target(&self, range: Range<usize>) -> RegionMut {
        RegionMut(self.whole.0.slice(range))
    }

    /// A part, to read.
    ///
    /// # Panics
    /// When the range is not inside.
    #[must_use]
    pub fn region(&self, range: Range<usize>) -> Region {
        Region(self.whole.0.slice(range))
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
    fn the_memory_goes_with_the_last_region() {
        let arena = Arena::new(10_000, false).unwrap();
        assert!(!arena.is_empty() && arena.lock_state() == &LockState::NotAsked);
        let owner = arena.whole.0.watch_owner();
        let (part, other) = (arena.target(5000..10_000), arena.region(0..1));
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
    fn a_part_lies_inside() {
        let _ = Arena::new(4096, false).unwrap().target(1..4098);
    }
}
