//! What swapping has cost so far.

use std::time::Duration;

/// Counters of a [`Swapper`](crate::Swapper) since it was made, and how full it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SwapStats {
    /// Lends and puts that had their memory at once.
    pub hits: u64,
    /// Those that had to wait.
    pub waits: u64,
    /// How long those waited.
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
    /// Items that made room for others.
    pub evictions: u64,
    /// Keys.
    pub items: u64,
    /// Bytes of memory in use now.
    pub resident_bytes: u64,
    /// The most that were in use at any time.
    pub resident_bytes_peak: u64,
    /// The bound.
    pub memory_bytes: u64,
    /// Bytes of the swap files that belong to items.
    pub stored_bytes: u64,
    /// Bytes of the swap files.
    pub file_bytes: u64,
}
