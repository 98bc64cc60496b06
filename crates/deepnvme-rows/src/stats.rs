//! Counters of a table.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters since the table was opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RowStats {
    /// Rows that callers asked for, repeated ones included.
    pub rows: u64,
    /// Of these, found in memory.
    pub hits: u64,
    /// Rows that were read from files, each counted once for each read.
    pub rows_read: u64,
    /// Reads.
    pub reads: u64,
    /// Bytes of these reads.
    pub bytes_read: u64,
    /// Rows that came with the read of another row.
    pub rows_joined: u64,
    /// Rows that were waited for because another caller's read, or a prefetch, was bringing them.
    pub rows_shared: u64,
    /// Rows that were read ahead.
    pub rows_prefetched: u64,
    /// Prefetches that were left out: for want of buffers, or past their deadline.
    pub rows_not_prefetched: u64,
}

macro_rules! counters {
    ($($name:ident),*) => {
        /// The counters, as threads change them.
        #[derive(Debug, Default)]
        pub struct Counters {
            $(pub(crate) $name: AtomicU64,)*
        }

        impl Counters {
            /// Returns the values now.
            #[must_use]
            pub fn values(&self) -> RowStats {
                RowStats { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}
counters!(rows, hits, rows_read, reads, bytes_read, rows_joined, rows_shared, rows_prefetched, rows_not_prefetched);

/// Adds to a counter.
pub(crate) fn count(counter: &AtomicU64, added: usize) {
    counter.fetch_add(added as u64, Ordering::Relaxed);
}
