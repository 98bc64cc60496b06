//! Decides whether blocks of a direct read come from the page cache instead. One query of the kernel serves the blocks
//! of several MiB.

use std::ops::Range;

use crate::file::{CachedShare, TensorFile};
use crate::split::{Block, BlockPlan};
use crate::sync::{Mutex, lock};

/// Maximum bytes of one query.
const QUERY_BYTES_MAX: u64 = 8 << 20;
/// Minimum bytes that are worth a query, which is a system call.
const QUERY_BYTES_MIN: u64 = if cfg!(simulated) { 4 << 10 } else { 16 << 10 };

/// The result of the latest query, shared by the workers of a request.
#[derive(Debug)]
pub(super) struct LatestQuery(Mutex<Option<QueryResult>>);

/// The result of a query for a range of a file.
#[derive(Clone, Debug)]
struct QueryResult {
    file: usize,
    range: Range<u64>,
    share: CachedShare,
}

impl QueryResult {
    fn covers(&self, block: &Block) -> bool {
        self.file == block.file && self.range.start <= block.range.start && block.range.end <= self.range.end
    }
}

impl LatestQuery {
    pub(super) fn unknown() -> Self {
        Self(Mutex::new(None))
    }

    /// Returns whether a read of this block is faster through the page cache.
    pub(super) fn is_cached(&self, plan: &BlockPlan, file: &TensorFile, block: &Block) -> bool {
        let known = lock(&self.0).clone().filter(|answer| answer.covers(block));
        let share = match known {
            Some(answer) => answer.share,
            None => {
                let range = plan.rest_of_extent(block, QUERY_BYTES_MAX);
                let bytes = (range.end - range.start).min(file.contiguous_bytes(range.start));
                if bytes < QUERY_BYTES_MIN {
                    return false;
                }
                let range = range.start..range.start + bytes;
                let share = file.cached_share(&range);
                *lock(&self.0) = Some(QueryResult { file: block.file, range, share });
                share
            }
        };
        match share {
            CachedShare::None => false,
            CachedShare::All => true,
            CachedShare::Some | CachedShare::Most => file.is_mostly_cached(&block.range),
        }
    }
}
