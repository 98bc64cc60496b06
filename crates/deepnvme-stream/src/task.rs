//! The conversions of one unit, as those see them who wait for all of them.

use std::time::Duration;

use deepnvme_io::mem::RegionMut;
use deepnvme_io::mem::sync::ignore_poison;

use crate::error::{Error, Result};
use crate::sync::{Condvar, Instant, Mutex, MutexGuard};

/// The conversions of one unit on their way.
#[derive(Debug)]
pub(crate) struct Task {
    state: Mutex<TaskState>,
    over: Condvar,
}

#[derive(Debug)]
struct TaskState {
    left: usize,
    /// Memory that has come home.
    home: Vec<RegionMut>,
    error: Option<Error>,
    bytes: u64,
    finished: Instant,
    converting: Duration,
}

/// What a job has done.
#[derive(Debug)]
pub(crate) struct Done {
    /// Bytes that were read for it, and when the last of them had come; `None` where they were here.
    pub(crate) read: Option<(u64, Instant)>,
    pub(crate) converting: Duration,
}

/// What a task has done.
#[derive(Debug)]
pub(crate) struct Converted {
    pub(crate) home: Vec<RegionMut>,
    /// Bytes that were read, when the last of them had come, and how long processors worked on them.
    pub(crate) result: Result<(u64, Instant, Duration)>,
}

impl Task {
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
        // Every critical section leaves the state whole.
        ignore_poison(self.state.lock())
    }

    pub(crate) fn is_done(&self) -> bool {
        self.lock().left == 0
    }

    /// Waits at most that long; whether all is done.
    pub(crate) fn wait_timeout(&self, timeout: Duration) -> bool {
        let state = self.lock();
        let waited = self.over.wait_timeout_while(state, timeout, |state| state.left > 0);
        ignore_poison(waited).0.left == 0
    }

    /// The memory and the result, once all is done.
    pub(crate) fn finish(&self) -> Option<Converted> {
        let mut state = self.lock();
        if state.left > 0 {
            return None;
        }
        let home = std::mem::take(&mut state.home);
        let result = match state.error.clone() {
            Some(error) => Err(error),
            None => Ok((state.bytes, state.finished, state.converting)),
        };
        Some(Converted { home, result })
    }

    pub(crate) fn end(&self, target: RegionMut, result: Result<Done>) {
        let mut state = self.lock();
        state.home.push(target);
        state.left -= 1;
        match result {
            Ok(Done { read, converting }) => {
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
