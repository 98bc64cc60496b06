//! The fetch of one layer group: plain reads into its slot, conversions, and the gaps between.

use std::sync::Arc;
use std::time::Duration;

use deepnvme_io::Transfer;
use deepnvme_io::mem::RegionMut;

use crate::decode_pool::DecodePool;
use crate::decode_task::{DecodeTask, FetchCost, TaskResult};
use crate::error::Result;
use crate::sync::Instant;

/// The reads and conversions to wait for.
#[derive(Clone, Debug)]
pub(crate) struct FetchHandle {
    pub(crate) unconverted: Option<Arc<Transfer<Vec<RegionMut>>>>,
    pub(crate) task: Option<Arc<DecodeTask>>,
}

/// A fetch in flight, and the memory of its slot.
#[derive(Debug)]
pub(crate) struct Fetch {
    pub(crate) handle: FetchHandle,
    pub(crate) slot: usize,
    /// Parts of the slot that nothing is read into.
    pub(crate) gaps: Vec<RegionMut>,
    pub(crate) started: Instant,
}

/// The result of a fetch.
pub(crate) struct FetchResult {
    /// The slot's memory; `None` if an error lost some of it.
    pub(crate) memory: Option<RegionMut>,
    pub(crate) result: Result<FetchCost>,
}

impl FetchHandle {
    pub(crate) fn is_done(&self) -> bool {
        self.unconverted.as_ref().is_none_or(|pending| pending.is_done())
            && self.task.as_ref().is_none_or(|task| task.is_done())
    }

    /// Waits until `deadline` at most, and helps the pool meanwhile. Returns whether the fetch is done.
    pub(crate) fn wait_until(&self, deadline: Instant, pool: Option<&DecodePool>) -> bool {
        let left = || deadline.saturating_duration_since(Instant::now());
        let task = self.task.as_ref().is_none_or(|task| match pool {
            Some(pool) => pool.help(task, deadline) || task.wait_timeout(left()),
            None => task.wait_timeout(left()),
        });
        task && self.unconverted.as_ref().is_none_or(|pending| pending.wait_timeout(left()))
    }

    /// Prioritises the fetch, since a thread waits for it.
    pub(crate) fn prioritise(&self, pool: Option<&DecodePool>) {
        if let Some(pending) = &self.unconverted {
            pending.prioritise();
        }
        if let (Some(pool), Some(task)) = (pool, &self.task) {
            pool.prioritise(task);
        }
    }
}

impl Fetch {
    /// The slot's memory and the result, once the fetch is done.
    pub(crate) fn finish(self) -> Option<FetchResult> {
        let mut parts = self.gaps;
        let mut cost = Ok(FetchCost { bytes_read: 0, reads_finished: self.started, converting: Duration::ZERO });
        if let Some(pending) = &self.handle.unconverted {
            let (memory, result) = pending.finish()?;
            parts.extend(memory.into_iter().flatten());
            cost = match (cost, result) {
                (Ok(so_far), Ok(transfer)) => {
                    Ok(FetchCost { bytes_read: transfer.bytes, reads_finished: transfer.finished, ..so_far })
                }
                (_, Err(error)) => Err(error.into()),
                (failed, _) => failed,
            };
        }
        if let Some(task) = &self.handle.task {
            let TaskResult { targets, result } = task.finish()?;
            parts.extend(targets);
            cost = match (cost, result) {
                (Ok(plain), Ok(task)) => Ok(FetchCost {
                    bytes_read: plain.bytes_read + task.bytes_read,
                    reads_finished: plain.reads_finished.max(task.reads_finished),
                    converting: task.converting,
                }),
                (_, Err(error)) => Err(error),
                (failed, _) => failed,
            };
        }
        Some(FetchResult { memory: join_parts(parts), result: cost })
    }
}

/// Joins the parts of a slot.
pub(crate) fn join_parts(mut parts: Vec<RegionMut>) -> Option<RegionMut> {
    parts.retain(|part| !part.is_empty());
    parts.sort_unstable_by_key(|part| part.addr());
    let mut parts = parts.into_iter();
    let first = parts.next()?;
    parts.try_fold(first, |before, part| before.join(part).ok())
}
