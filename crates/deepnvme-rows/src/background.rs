//! Gathers and prefetches on threads of their own.
//!
//! A gather begins on the thread that asks for it, so that its reads are in flight when the call returns. The thread
//! that waits for it finishes it, or the store's thread if that comes first.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use deepnvme_io::mem::RegionMut;
use deepnvme_io::start_thread;

use crate::error::{Error, Result};
use crate::gather::BegunGather;
use crate::row_writer::Conversion;
use crate::staging::POLL_INTERVAL;
use crate::store::RowStore;
use crate::sync::{Condvar, Instant, Mutex, lock, thread};

/// A [`RowStore`] with threads for work that nobody waits for yet. They start with the first such work.
#[derive(Debug)]
pub struct BackgroundStore {
    store: Arc<RowStore>,
    gathers: Arc<Queue>,
    prefetches: Arc<Queue>,
    /// Rows of prefetches that have not ended.
    ahead: Arc<AtomicU64>,
}

/// A gather in flight. Dropping this does not affect it.
#[derive(Clone, Debug)]
pub struct PendingGather {
    task: Arc<Task>,
}

impl BackgroundStore {
    /// Wraps a store.
    #[must_use]
    pub fn new(store: RowStore) -> Self {
        let store = Arc::new(store);
        let queue = |name| Arc::new(Queue { name, state: Mutex::default(), added: Condvar::default() });
        Self { store, gathers: queue("deepnvme-rows"), prefetches: queue("deepnvme-ahead"), ahead: Arc::default() }
    }

    /// Returns the store.
    #[must_use]
    pub fn store(&self) -> &RowStore {
        &self.store
    }

    /// Gathers as [`RowStore::gather`], and returns once the first reads are in flight.
    ///
    /// # Errors
    /// As [`RowStore::gather`], for what can be known at once. `Io` if no thread can be started.
    pub fn start_gather(
        &self,
        rows: Vec<u64>,
        target: RegionMut,
        conversion: Option<Conversion>,
    ) -> Result<PendingGather> {
        let rows = self.store.places(rows.into())?.into_owned();
        let begun = self.store.begin(&rows, &target, conversion)?;
        let work = Work::Gather { rows, target, begun };
        Ok(PendingGather { task: self.gathers.start(&self.store, work)? })
    }

    /// Prefetches as [`RowStore::prefetch`], and returns at once. Failures show when the rows are gathered. Prefetches in
    /// flight have as many rows as half of the cache at most. Others are left out.
    ///
    /// # Errors
    /// As [`RowStore::prefetch`], for what can be known at once. `Io` if no thread can be started.
    pub fn start_prefetch(&self, rows: Vec<u64>, deadline: Option<Instant>) -> Result<()> {
        let mut rows = self.store.places(rows.into())?.into_owned();
        let room = self.store.prefetched_rows_max().saturating_sub(self.ahead.load(Ordering::Acquire));
        self.store.leave_out(&mut rows, room);
        if rows.is_empty() {
            return Ok(());
        }
        rows.shrink_to_fit();
        self.ahead.fetch_add(rows.len() as u64, Ordering::AcqRel);
        let ahead = RowsAhead { rows: rows.len() as u64, all: Arc::clone(&self.ahead) };
        self.prefetches.start(&self.store, Work::Prefetch { rows, deadline, _ahead: ahead }).map(drop)
    }

    /// Closes the store. Gathers in flight finish their reads.
    pub fn close(&self) {
        self.store.close();
        self.gathers.close();
        self.prefetches.close();
    }
}

impl Drop for BackgroundStore {
    fn drop(&mut self) {
        self.gathers.close();
        self.prefetches.close();
    }
}

impl PendingGather {
    /// Returns whether the gather is done.
    #[must_use]
    pub fn is_done(&self) -> bool {
        matches!(&*lock(&self.task.state), TaskState::Done(_))
    }

    /// Stops the gather. It then ends as `Interrupted`, unless it is done first.
    pub fn cancel(&self) {
        self.task.is_cancelled.store(true, Ordering::Release);
    }

    /// Waits up to `timeout`. Returns whether the gather is done. Without a timeout it is done on return, unless
    /// `should_stop` returned true.
    ///
    /// # Errors
    /// `Closed` in a forked child.
    pub fn wait(&self, timeout: Option<Duration>, should_stop: &dyn Fn() -> bool) -> Result<bool> {
        self.task.store.check_process()?;
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        // Finishing it here saves the switch to the other thread. It has no time limit.
        if deadline.is_none() {
            self.task.run(should_stop);
        }
        let mut state = lock(&self.task.state);
        loop {
            if matches!(*state, TaskState::Done(_)) {
                return Ok(true);
            }
            let left = deadline.map_or(POLL_INTERVAL, |deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_zero() || should_stop() {
                return Ok(false);
            }
            let waited = self.task.changed.wait_timeout(state, left.min(POLL_INTERVAL));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            self.task.store.check_process()?;
        }
    }

    /// Returns the result, if the gather is done.
    #[must_use]
    pub fn result(&self) -> Option<Result<()>> {
        match &*lock(&self.task.state) {
            TaskState::Done(result) => Some(result.clone()),
            TaskState::Queued(_) | TaskState::Running => None,
        }
    }
}

/// Work of a store, and its result.
#[derive(Debug)]
struct Task {
    store: Arc<RowStore>,
    queue: Arc<Queue>,
    state: Mutex<TaskState>,
    changed: Condvar,
    is_cancelled: AtomicBool,
}

#[derive(Debug)]
enum TaskState {
    Queued(Work),
    Running,
    Done(Result<()>),
}

#[derive(Debug)]
enum Work {
    Gather { rows: Vec<u64>, target: RegionMut, begun: BegunGather },
    Prefetch { rows: Vec<u64>, deadline: Option<Instant>, _ahead: RowsAhead },
}

impl Task {
    /// Does the work, unless another thread does it. If `should_stop` says so, the work stays for others.
    fn run(self: &Arc<Self>, should_stop: &dyn Fn() -> bool) {
        let mut work = {
            let mut state = lock(&self.state);
            match std::mem::replace(&mut *state, TaskState::Running) {
                TaskState::Queued(work) => work,
                other => {
                    *state = other;
                    return;
                }
            }
        };
        let is_cancelled = || self.is_cancelled.load(Ordering::Acquire);
        let result = work.run(&self.store, &|| is_cancelled() || should_stop());
        if matches!(result, Err(Error::Interrupted)) && !is_cancelled() {
            *lock(&self.state) = TaskState::Queued(work);
            if let Err(error) = self.queue.push(self) {
                self.fail(error);
            }
        } else {
            work.end(&self.store);
            *lock(&self.state) = TaskState::Done(result);
        }
        self.changed.notify_all();
    }

    /// Ends work that no thread can do.
    fn fail(&self, error: Error) {
        let mut state = lock(&self.state);
        if let TaskState::Queued(work) = std::mem::replace(&mut *state, TaskState::Running) {
            drop(state);
            work.end(&self.store);
            state = lock(&self.state);
        }
        *state = TaskState::Done(Err(error));
    }
}

/// Rows of a prefetch, counted until it ends.
#[derive(Debug)]
struct RowsAhead {
    rows: u64,
    all: Arc<AtomicU64>,
}

impl Drop for RowsAhead {
    fn drop(&mut self) {
        self.all.fetch_sub(self.rows, Ordering::AcqRel);
    }
}

impl Work {
    fn run(&mut self, store: &RowStore, should_stop: &dyn Fn() -> bool) -> Result<()> {
        match self {
            Self::Gather { rows, target, begun } => store.finish(begun, rows, target, should_stop),
            Self::Prefetch { rows, deadline, .. } => store.prefetch_places(rows, *deadline, should_stop),
        }
    }

    /// Ends reads that a failed gather has left in flight.
    fn end(self, store: &RowStore) {
        if let Self::Gather { mut begun, .. } = self {
            begun.abandon(store);
        }
    }
}

/// Work, and a thread that does it. The thread starts with the first work.
#[derive(Debug)]
struct Queue {
    /// The name of the thread.
    name: &'static str,
    state: Mutex<QueueState>,
    added: Condvar,
}

#[derive(Debug, Default)]
struct QueueState {
    tasks: VecDeque<Arc<Task>>,
    has_thread: bool,
    is_closed: bool,
}

impl Queue {
    fn start(self: &Arc<Self>, store: &Arc<RowStore>, work: Work) -> Result<Arc<Task>> {
        let task = Arc::new(Task {
            store: Arc::clone(store),
            queue: Arc::clone(self),
            state: Mutex::new(TaskState::Queued(work)),
            changed: Condvar::default(),
            is_cancelled: AtomicBool::new(false),
        });
        if let Err(error) = self.push(&task) {
            // Others may wait for its reads.
            task.fail(error.clone());
            return Err(error);
        }
        Ok(task)
    }

    /// Adds work. After a close the thread may have ended, and another does what is added.
    fn push(self: &Arc<Self>, task: &Arc<Task>) -> Result<()> {
        let mut state = lock(&self.state);
        if !state.has_thread {
            let queue = Arc::clone(self);
            let thread = thread::Builder::new().name(self.name.into());
            start_thread(|| thread.spawn(move || queue.work()))?;
            state.has_thread = true;
        }
        state.tasks.push_back(Arc::clone(task));
        drop(state);
        self.added.notify_one();
        Ok(())
    }

    fn close(&self) {
        lock(&self.state).is_closed = true;
        self.added.notify_all();
    }

    /// Does all work until the store is closed or dropped, and what is left then.
    fn work(&self) {
        loop {
            let task = {
                let mut state = lock(&self.state);
                loop {
                    if let Some(task) = state.tasks.pop_front() {
                        break task;
                    }
                    if state.is_closed {
                        state.has_thread = false;
                        return;
                    }
                    state = self.added.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            };
            task.run(&|| false);
        }
    }
}
