//! A unit on its way: what is read into its slot directly, what is converted on arrival, and the memory between.

use std::sync::Arc;
use std::time::Duration;

use deepnvme_io::Pending;
use deepnvme_io::mem::RegionMut;

use crate::decode_pool::Crew;
use crate::decode_task::{Converted, Task};
use crate::error::Result;
use crate::sync::Instant;

/// What is waited for.
#[derive(Clone, Debug)]
pub(crate) struct Waiting {
    pub(crate) direct: Option<Arc<Pending<Vec<RegionMut>>>>,
    pub(crate) task: Option<Arc<Task>>,
}

/// The memory of a unit, and what is done with it.
#[derive(Debug)]
pub(crate) struct Flight {
    pub(crate) waiting: Waiting,
    pub(crate) slot: usize,
    /// Parts of the slot that nothing is read into.
    pub(crate) gaps: Vec<RegionMut>,
    pub(crate) started: Instant,
}

/// What has come.
pub(crate) struct Landed {
    /// The slot again; `None` where memory was lost to an error.
    pub(crate) memory: Option<RegionMut>,
    pub(crate) result: Result<Arrived>,
}

/// What it took.
pub(crate) struct Arrived {
    pub(crate) bytes: u64,
    pub(crate) finished: Instant,
    pub(crate) converting: Duration,
}

impl Waiting {
    pub(crate) fn is_done(&self) -> bool {
        self.direct.as_ref().is_none_or(|pending| pending.is_done())
            && self.task.as_ref().is_none_or(|task| task.is_done())
    }

    /// Waits at most until then, and converts meanwhile if there is a crew; whether all is done.
    pub(crate) fn wait_until(&self, deadline: Instant, crew: Option<&Crew>) -> bool {
        let left = || deadline.saturating_duration_since(Instant::now());
        let task = self.task.as_ref().is_none_or(|task| match crew {
            Some(crew) => crew.help(task, deadline) || task.wait_timeout(left()),
            None => task.wait_timeout(left()),
        });
        task && self.direct.as_ref().is_none_or(|pending| pending.wait_timeout(left()))
    }

    /// Somebody waits.
    pub(crate) fn hurry(&self, crew: Option<&Crew>) {
        if let Some(pending) = &self.direct {
            pending.hurry();
        }
        if let (Some(crew), Some(task)) = (crew, &self.task) {
            crew.hurry(task);
        }
    }
}

impl Flight {
    /// The slot out of its parts, and the result, once all is done.
    pub(crate) fn land(self) -> Option<Landed> {
        let mut parts = self.gaps;
        let mut arrived = Ok(Arrived { bytes: 0, finished: self.started, converting: Duration::ZERO });
        if let Some(pending) = &self.waiting.direct {
            let (memory, result) = pending.finish()?;
            parts.extend(memory.into_iter().flatten());
            arrived = match (arrived, result) {
                (Ok(so_far), Ok(transfer)) => {
                    Ok(Arrived { bytes: transfer.bytes, finished: transfer.finished, ..so_far })
                }
                (_, Err(error)) => Err(error.into()),
                (failed, _) => failed,
            };
        }
        if let Some(task) = &self.waiting.task {
            let Converted { home, result } = task.finish()?;
            parts.extend(home);
            arrived = match (arrived, result) {
                (Ok(so_far), Ok((bytes, finished, converting))) => {
                    Ok(Arrived { bytes: so_far.bytes + bytes, finished: so_far.finished.max(finished), converting })
                }
                (_, Err(error)) => Err(error),
                (failed, _) => failed,
            };
        }
        Some(Landed { memory: whole(parts), result: arrived })
    }
}

/// Memory out of all its parts.
pub(crate) fn whole(mut parts: Vec<RegionMut>) -> Option<RegionMut> {
    parts.retain(|part| !part.is_empty());
    parts.sort_unstable_by_key(RegionMut::addr);
    let mut parts = parts.into_iter();
    let first = parts.next()?;
    parts.try_fold(first, |before, part| before.join(part).ok())
}
