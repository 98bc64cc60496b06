//! The items under one lock: threads borrow them here, wait here, and return them here.
//!
//! One condition variable wakes all waiters after any change, if there are any. A waiter may look late, so it waits
//! only for states that last or that it will be woken for again. `loom_tests` checks the interleavings.

use std::collections::HashMap;
use std::time::Duration;

use crate::deadlock::{DeadlockDetector, ThreadNumber, WaitingFor};
use crate::residency::{Action, BorrowMode, BorrowResult, PendingFlush, Residency};
use crate::slot_allocator::ItemId;
use crate::stats::SwapStats;
use crate::sync::outer::Instant;
use crate::sync::{Condvar, Mutex, MutexGuard, lock, wait};

/// How often a waiting thread polls for cancellation.
const CANCEL_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// The state of all items, and the threads that wait for them.
#[derive(Debug)]
pub(crate) struct ItemTable<E> {
    state: Mutex<TableState<E>>,
    changed: Condvar,
}

/// The state under the lock.
#[derive(Debug)]
pub(crate) struct TableState<E> {
    pub(crate) residency: Residency,
    pub(crate) stats: SwapStats,
    pub(crate) is_closed: bool,
    /// The swapper's thread has panicked.
    pub(crate) is_broken: bool,
    detector: DeadlockDetector,
    /// Threads that wait for a change.
    waiting: usize,
    /// Removed items whose disk space is being freed.
    items_being_freed: usize,
    /// Actions that were planned and not started yet.
    planned: Vec<Action>,
    /// Counts failures. A waiter reports only those that happened after its wait began.
    failures: u64,
    read_errors: HashMap<ItemId, (u64, E)>,
    write_error: Option<(u64, E)>,
}

/// Why a wait ended without the item.
#[derive(Debug)]
pub(crate) enum WaitError<E> {
    Deleted,
    Closed,
    Broken,
    Interrupted,
    Failed(E),
    /// The wait would never end.
    Deadlock {
        waiting_for: WaitingFor,
        /// Borrows of the calling thread.
        own_borrows: usize,
        /// Borrows of all threads.
        all_borrows: usize,
    },
}

impl<E: Clone> ItemTable<E> {
    pub(crate) fn new(residency: Residency) -> Self {
        let state = TableState {
            residency,
            stats: SwapStats::default(),
            is_closed: false,
            is_broken: false,
            detector: DeadlockDetector::default(),
            waiting: 0,
            items_being_freed: 0,
            planned: Vec::new(),
            failures: 0,
            read_errors: HashMap::new(),
            write_error: None,
        };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, TableState<E>> {
        lock(&self.state)
    }

    /// Wakes all waiters.
    pub(crate) fn notify(&self) {
        self.notify_after(self.lock());
    }

    /// Wakes all waiters after a change under this lock. Threads that come to wait later see the change.
    fn notify_after(&self, table: MutexGuard<'_, TableState<E>>) {
        let has_waiters = table.waiting > 0;
        drop(table);
        if has_waiters {
            self.changed.notify_all();
        }
    }

    /// Waits until the item is borrowed; the caller has to release it. `run_io` starts planned I/O, and `is_cancelled`
    /// is polled.
    pub(crate) fn borrow(
        &self,
        id: ItemId,
        mode: BorrowMode,
        thread: ThreadNumber,
        run_io: &dyn Fn(),
        is_cancelled: &mut dyn FnMut() -> bool,
    ) -> Result<Option<usize>, WaitError<E>> {
        let mut table = self.lock();
        let failures_before = table.failures;
        let mut waited: Option<Instant> = None;
        let (mut is_queued, mut has_notified) = (false, false);
        let borrowed = loop {
            let waiting_for = match table.try_borrow(id, mode, thread, failures_before) {
                Ok(Attempt::Borrowed(slot)) => break Ok(slot),
                Ok(Attempt::Waits(waiting_for)) => waiting_for,
                Err(error) => break Err(error),
            };
            waited.get_or_insert_with(Instant::now);
            table.detector.record_wait(thread, waiting_for);
            if waiting_for == WaitingFor::Memory(id) && !is_queued {
                is_queued = true;
                table.residency.enqueue_waiter(id, mode);
                drop(table);
                run_io();
                table = self.lock();
                continue;
            }
            // A transfer may have just completed, so there may be work to start before a deadlock is certain.
            if table.plan() {
                self.notify_after(table);
                run_io();
                table = self.lock();
                continue;
            }
            if waiting_for == WaitingFor::Memory(id)
                && table.residency.in_flight() == 0
                && let Some(error) = table.write_error_since(failures_before)
            {
                break Err(error);
            }
            if table.is_deadlocked(thread) {
                let (own_borrows, all_borrows) = table.detector.count_borrows(thread);
                if own_borrows > 0 || all_borrows == 0 {
                    break Err(WaitError::Deadlock { waiting_for, own_borrows, all_borrows });
                }
                // A thread without borrows blocks nobody. Those that block each other are woken to report the deadlock,
                // which frees memory for this one.
                if !has_notified {
                    has_notified = true;
                    self.changed.notify_all();
                }
            }
            let stop;
            (table, stop) = self.wait_for_change(table, is_cancelled);
            if stop {
                break Err(WaitError::Interrupted);
            }
        };
        table.detector.stop_waiting(thread);
        table.count_borrow(mode, borrowed.is_ok(), waited.map(|since| since.elapsed()));
        if is_queued {
            table.residency.cancel_waiter(id, mode);
            // A slot that was reserved for this waiter is free for others.
            self.notify_after(table);
        }
        borrowed
    }

    /// Returns an item.
    pub(crate) fn end_borrow(&self, id: ItemId, mode: BorrowMode, thread: ThreadNumber, is_dirty: bool) {
        let mut table = self.lock();
        table.detector.release(id, thread);
        table.residency.release(id, mode, is_dirty);
        self.notify_after(table);
    }

    /// Waits until these items are on disk, each as it was at the call or newer. An error names the item that it is
    /// about.
    pub(crate) fn flush(
        &self,
        ids: impl Iterator<Item = ItemId>,
        thread: ThreadNumber,
        run_io: &dyn Fn(),
        is_cancelled: &mut dyn FnMut() -> bool,
    ) -> Result<(), (Option<ItemId>, WaitError<E>)> {
        let (mut left, failures_before) = {
            let mut table = self.lock();
            let left: Vec<PendingFlush> = ids.filter_map(|id| table.residency.flush(id)).collect();
            (left, table.failures)
        };
        if left.is_empty() {
            return Ok(());
        }
        run_io();
        let flushed = self.wait_while(thread, Some(failures_before), run_io, is_cancelled, |table| {
            // One after the other, since a flush that is over stays so.
            while left.last().is_some_and(|flush| table.residency.is_flush_over(*flush)) {
                left.pop();
            }
            let id = left.last()?.id;
            Some(if table.residency.has_writer(id) { WaitingFor::Item(id) } else { WaitingFor::Io(id) })
        });
        flushed.map_err(|error| (left.last().map(|flush| flush.id), error))
    }

    /// Deletes an item, at once or when its last borrow ends.
    pub(crate) fn delete(&self, id: ItemId) {
        let mut table = self.lock();
        table.residency.delete(id);
        self.notify_after(table);
    }

    /// Waits while `waiting_for` names a reason. With `failures_before`, the failure of a later write ends the wait.
    /// Items that the calling thread has borrowed itself would never be returned, so such a wait is a deadlock.
    pub(crate) fn wait_while(
        &self,
        thread: ThreadNumber,
        failures_before: Option<u64>,
        run_io: &dyn Fn(),
        is_cancelled: &mut dyn FnMut() -> bool,
        mut waiting_for: impl FnMut(&mut TableState<E>) -> Option<WaitingFor>,
    ) -> Result<(), WaitError<E>> {
        let mut table = self.lock();
        let done = loop {
            if let Err(error) = table.check_usable() {
                break Err(error);
            }
            let Some(waiting_for) = waiting_for(&mut table) else { break Ok(()) };
            if let Some(error) = failures_before.and_then(|before| table.write_error_since(before)) {
                break Err(error);
            }
            table.detector.record_wait(thread, waiting_for);
            if table.plan() {
                drop(table);
                run_io();
                table = self.lock();
                continue;
            }
            if table.is_deadlocked(thread) {
                let (own_borrows, all_borrows) = table.detector.count_borrows(thread);
                break Err(WaitError::Deadlock { waiting_for, own_borrows, all_borrows });
            }
            let stop;
            (table, stop) = self.wait_for_change(table, is_cancelled);
            if stop {
                break Err(WaitError::Interrupted);
            }
        };
        table.detector.stop_waiting(thread);
        done
    }

    /// Waits for a change, but not for long. Returns whether the wait was cancelled, which is asked without the lock.
    fn wait_for_change<'a>(
        &'a self,
        mut table: MutexGuard<'a, TableState<E>>,
        is_cancelled: &mut dyn FnMut() -> bool,
    ) -> (MutexGuard<'a, TableState<E>>, bool) {
        table.waiting += 1;
        let mut table = wait(&self.changed, table, CANCEL_CHECK_INTERVAL);
        table.waiting -= 1;
        drop(table);
        let stop = is_cancelled();
        (self.lock(), stop)
    }
}

/// The result of one attempt to borrow an item.
enum Attempt {
    /// The item is borrowed, with its slot if it is in memory.
    Borrowed(Option<usize>),
    Waits(WaitingFor),
}

impl<E: Clone> TableState<E> {
    fn check_usable(&self) -> Result<(), WaitError<E>> {
        match (self.is_closed, self.is_broken) {
            (true, _) => Err(WaitError::Closed),
            (false, true) => Err(WaitError::Broken),
            (false, false) => Ok(()),
        }
    }

    /// Borrows the item unless it has to wait. Fails if a read of the item failed after `failures_before` failures.
    fn try_borrow(
        &mut self,
        id: ItemId,
        mode: BorrowMode,
        thread: ThreadNumber,
        failures_before: u64,
    ) -> Result<Attempt, WaitError<E>> {
        self.check_usable()?;
        let waiting_for = match self.residency.try_borrow(id, mode) {
            BorrowResult::Borrowed(slot) => {
                self.detector.record_borrow(id, thread);
                return Ok(Attempt::Borrowed(slot));
            }
            BorrowResult::Deleted => return Err(WaitError::Deleted),
            BorrowResult::HeldByOthers => WaitingFor::Item(id),
            BorrowResult::IoPending => WaitingFor::Io(id),
            BorrowResult::NeedsSlot => WaitingFor::Memory(id),
        };
        match self.read_errors.get(&id) {
            Some((when, error)) if *when > failures_before => Err(WaitError::Failed(error.clone())),
            _ => Ok(Attempt::Waits(waiting_for)),
        }
    }

    /// The error of the last failed write, if it came after `failures_before` failures.
    fn write_error_since(&self, failures_before: u64) -> Option<WaitError<E>> {
        let (_, error) = self.write_error.as_ref().filter(|(when, _)| *when > failures_before)?;
        Some(WaitError::Failed(error.clone()))
    }
}

impl<E> TableState<E> {
    /// Counts the end of a borrow's wait. `stalled` is its time, if it had to wait.
    fn count_borrow(&mut self, mode: BorrowMode, is_borrowed: bool, stalled: Option<Duration>) {
        if is_borrowed && !matches!(mode, BorrowMode::DiskShared | BorrowMode::DiskExclusive) {
            self.stats.hits += u64::from(stalled.is_none());
            self.stats.waits += u64::from(stalled.is_some());
        }
        self.stats.stalled += stalled.unwrap_or_default();
    }

    /// Plans actions. Returns whether there are new ones.
    fn plan(&mut self) -> bool {
        let before = self.planned.len();
        if !self.is_closed {
            self.planned.extend(std::iter::from_fn(|| self.residency.next()));
        }
        self.planned.len() > before
    }

    /// Takes all planned actions; the caller starts them.
    pub(crate) fn take_planned(&mut self) -> Vec<Action> {
        self.plan();
        if self.is_closed { Vec::new() } else { std::mem::take(&mut self.planned) }
    }

    fn is_deadlocked(&self, thread: ThreadNumber) -> bool {
        self.detector.is_deadlocked(thread, self.residency.in_flight() > 0, |id| self.residency.is_wait_over(id))
    }

    /// Records the end of a read.
    pub(crate) fn read_completed(&mut self, id: ItemId, result: Result<u64, E>, is_memory_back: bool) {
        self.residency.read_completed(id, result.is_ok(), is_memory_back);
        match result {
            Ok(bytes) => {
                self.read_errors.remove(&id);
                self.stats.reads += 1;
                self.stats.bytes_read += bytes;
            }
            Err(error) => {
                self.failures += 1;
                self.stats.failures += 1;
                self.read_errors.insert(id, (self.failures, error));
            }
        }
    }

    /// Records the end of a write.
    pub(crate) fn write_completed(&mut self, id: ItemId, result: Result<u64, E>) {
        self.residency.write_completed(id, result.is_ok());
        match result {
            Ok(bytes) => {
                self.stats.write_backs += 1;
                self.stats.bytes_written += bytes;
            }
            Err(error) => {
                self.failures += 1;
                self.stats.failures += 1;
                self.write_error = Some((self.failures, error));
            }
        }
    }

    /// Whether disk space will become free without any caller's action.
    pub(crate) fn is_freeing_space(&self) -> bool {
        self.items_being_freed > 0 || self.residency.has_removed() || self.residency.is_removing()
    }

    /// Records that the space of these many removed items is free.
    pub(crate) fn space_freed(&mut self, items: usize) {
        self.items_being_freed -= items;
    }

    /// Takes removed items. The caller frees their disk space, then calls [`space_freed`](Self::space_freed).
    pub(crate) fn take_removed(&mut self) -> Vec<ItemId> {
        let removed = self.residency.take_removed();
        self.items_being_freed += removed.len();
        removed.iter().for_each(|id| drop(self.read_errors.remove(id)));
        removed
    }
}
