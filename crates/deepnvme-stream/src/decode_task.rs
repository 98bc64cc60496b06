//! All jobs of one layer group, as a task to wait for. A job reads bytes and converts them.

use std::time::Duration;

use deepnvme_io::mem::RegionMut;
use deepnvme_io::mem::sync::ignore_poison;

use crate::error::{Error, Result};
use crate::sync::{Condvar, Instant, Mutex, MutexGuard};

/// The jobs of one layer group.
#[derive(Debug)]
pub(crate) struct DecodeTask {
    state: Mutex<TaskState>,
    over: Condvar,
}

#[derive(Debug)]
struct TaskState {
    jobs_left: usize,
    /// The targets of finished jobs.
    targets: Vec<RegionMut>,
    error: Option<Error>,
    cost: FetchCost,
}

/// The cost of a job.
#[derive(Debug)]
pub(crate) struct JobCost {
    /// Bytes read, and when the read finished; `None` if they were cached.
    pub(crate) read: Option<(u64, Instant)>,
    /// Wall time.
    pub(crate) converting: Duration,
}

/// The cost of a fetch, or of the jobs of its task.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FetchCost {
    pub(crate) bytes_read: u64,
    /// The end of the last read, or the start if all bytes were cached.
    pub(crate) reads_finished: Instant,
    /// Wall time of the conversions, added over all threads.
    pub(crate) converting: Duration,
}

/// The result of a task.
#[derive(Debug)]
pub(crate) struct TaskResult {
    /// The memory of all jobs.
    pub(crate) targets: Vec<RegionMut>,
    pub(crate) result: Result<FetchCost>,
}

impl DecodeTask {
    pub(crate) fn new(jobs: usize) -> Self {
        let state = TaskState {
            jobs_left: jobs,
            targets: Vec::with_capacity(jobs),
            error: None,
            cost: FetchCost { bytes_read: 0, reads_finished: Instant::now(), converting: Duration::ZERO },
        };
        Self { state: Mutex::new(state), over: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, TaskState> {
        // Every critical section leaves the state consistent.
        ignore_poison(self.state.lock())
    }

    pub(crate) fn is_done(&self) -> bool {
        self.lock().jobs_left == 0
    }

    /// Waits at most this long. Returns whether the task is done.
    pub(crate) fn wait_timeout(&self, timeout: Duration) -> bool {
        let state = self.lock();
        let waited = self.over.wait_timeout_while(state, timeout, |state| state.jobs_left > 0);
        ignore_poison(waited).0.jobs_left == 0
    }

    /// The targets and the result, once the task is done.
    pub(crate) fn finish(&self) -> Option<TaskResult> {
        let mut state = self.lock();
        if state.jobs_left > 0 {
            return None;
        }
        let targets = std::mem::take(&mut state.targets);
        let result = match state.error.clone() {
            Some(error) => Err(error),
            None => Ok(state.cost),
        };
        Some(TaskResult { targets, result })
    }

    /// Ends one job.
    pub(crate) fn end(&self, target: RegionMut, result: Result<JobCost>) {
        let mut state = self.lock();
        state.targets.push(target);
        state.jobs_left -= 1;
        match result {
            Ok(JobCost { read, converting }) => {
                if let Some((bytes, finished)) = read {
                    state.cost.bytes_read += bytes;
                    state.cost.reads_finished = state.cost.reads_finished.max(finished);
                }
                state.cost.converting += converting;
            }
            Err(error) => drop(state.error.get_or_insert(error)),
        }
        if state.jobs_left == 0 {
            self.over.notify_all();
        }
    }
}
