//! All conversions of one layer group, as a task to wait for.

use std::time::Duration;

use deepnvme_io::mem::RegionMut;
use deepnvme_io::mem::sync::ignore_poison;

use crate::error::{Error, Result};
use crate::sync::{Condvar, Instant, Mutex, MutexGuard};

/// The conversions of one layer group.
#[derive(Debug)]
pub(crate) struct DecodeTask {
    state: Mutex<TaskState>,
    over: Condvar,
}

#[derive(Debug)]
struct TaskState {
    left: usize,
    /// The targets of finished jobs.
    home: Vec<RegionMut>,
    error: Option<Error>,
    bytes: u64,
    finished: Instant,
    converting: Duration,
}

/// The cost of a job.
#[derive(Debug)]
pub(crate) struct JobCost {
    /// Bytes read, and when the read finished; `None` if they were cached.
    pub(crate) read: Option<(u64, Instant)>,
    pub(crate) converting: Duration,
}

/// The result of a task.
#[derive(Debug)]
pub(crate) struct TaskResult {
    pub(crate) home: Vec<RegionMut>,
    /// Bytes read, when the last read finished, and the CPU time of decoding.
    pub(crate) result: Result<(u64, Instant, Duration)>,
}

impl DecodeTask {
    pub(crate) fn new(conversions: usize) -> Self {
        let state = TaskState {
            left: conversions,
            home: Vec::with_capacity(conversions),
            error: None,
            bytes: 0,
            finished: Instant::now(),
            converting: Duration::ZERO,
        };
        Self { state: Mutex::new(state), over: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, TaskState> {
        // Every critical section leaves the state consistent.
        ignore_poison(self.state.lock())
    }

    pub(crate) fn is_done(&self) -> bool {
        self.lock().left == 0
    }

    /// Waits at most this long. Returns whether the task is done.
    pub(crate) fn wait_timeout(&self, timeout: Duration) -> bool {
        let state = self.lock();
        let waited = self.over.wait_timeout_while(state, timeout, |state| state.left > 0);
        ignore_poison(waited).0.left == 0
    }

    /// The targets and the result, once the task is done.
    pub(crate) fn finish(&self) -> Option<TaskResult> {
        let mut state = self.lock();
        if state.left > 0 {
            return None;
        }
        let home = std::mem::take(&mut state.home);
        let result = match state.error.clone() {
            Some(error) => Err(error),
            None => Ok((state.bytes, state.finished, state.converting)),
        };
        Some(TaskResult { home, result })
    }

    pub(crate) fn end(&self, target: RegionMut, result: Result<JobCost>) {
        let mut state = self.lock();
        state.home.push(target);
        state.left -= 1;
        match result {
            Ok(JobCost { read, converting }) => {
                if let Some((bytes, finished)) = read {
                    state.bytes += bytes;
                    state.finished = state.finished.max(finished);
                }
                state.converting += converting;
            }
            Err(error) => drop(state.error.get_or_insert(error)),
        }
        if state.left == 0 {
            self.over.notify_all();
        }
    }
}
