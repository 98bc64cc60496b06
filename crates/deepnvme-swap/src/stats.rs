//! Counters of a swapper.

use std::time::Duration;

/// Counters of a [`Swapper`](crate::Swapper) since its creation, and its present sizes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SwapStats {
    /// Borrows in memory and creations that did not wait.
    pub hits: u64,
    /// Borrows in memory and creations that waited.
    pub waits: u64,
    /// The time that borrows and creations waited.
    pub stalled: Duration,
    /// Bytes read from disk.
    pub bytes_read: u64,
    /// Bytes written to disk.
    pub bytes_written: u64,
    /// Items that were read.
    pub reads: u64,
    /// Items that were written back.
    pub write_backs: u64,
    /// Reads and writes that failed.
    pub failures: u64,
    /// Items evicted from memory.
    pub evictions: u64,
    /// Items stored.
    pub items: u64,
    /// Bytes of memory in use.
    pub resident_bytes: u64,
    /// The peak of memory in use.
    pub resident_bytes_peak: u64,
    /// The memory for items.
    pub memory_bytes: u64,
    /// Bytes of the swap files in use.
    pub stored_bytes: u64,
    /// Size of the swap files, with preallocated space.
    pub file_bytes: u64,
}
