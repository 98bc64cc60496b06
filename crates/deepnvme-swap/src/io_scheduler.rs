//! Starts the reads and writes that the residency plans, and records their end.
//!
//! Any thread may do that after a change; the swapper's own thread does it when the engine signals a completed
//! transfer. Each transfer is started once and completed once. No I/O or hashing happens under the lock.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};

use deepnvme_io::mem::{Arena, CreatorProcess, Region, RegionMut};
use deepnvme_io::{Engine, ReadItem, Transfer, WriteItem, WriteOptions};

use crate::checksums;
use crate::completions::Completions;
use crate::disk_space::DiskSpace;
use crate::error::{Error, Result};
use crate::id_map::IdMap;
use crate::item_table::ItemTable;
use crate::residency::Action;
use crate::slot_allocator::ItemId;
use crate::store::{DiskRange, Store, StoredItem};
use crate::sync::outer::{Mutex, MutexGuard};

/// The state that all handles of a swapper share.
#[derive(Debug)]
pub(crate) struct IoScheduler {
    pub(crate) items: ItemTable<Error>,
    pub(crate) engine: Arc<Engine>,
    pub(crate) arena: Arc<Arena>,
    pub(crate) has_checksums: bool,
    pub(crate) creator: CreatorProcess,
    disk: DiskSpace,
    in_flight: Mutex<IdMap<SlotTransfer>>,
    completions: Arc<Completions>,
    is_shut_down: AtomicBool,
}

/// A read or write in flight.
#[derive(Debug)]
struct SlotTransfer {
    id: ItemId,
    slot: usize,
    stored: StoredItem,
    pending: PendingIo,
}

#[derive(Debug)]
enum PendingIo {
    Read(Transfer<Vec<RegionMut>>),
    Write(Transfer<Vec<Region>>),
}

impl PendingIo {
    fn cancel(&self) {
        match self {
            Self::Read(pending) => pending.cancel(),
            Self::Write(pending) => pending.cancel(),
        };
    }
}

impl IoScheduler {
    pub(crate) fn new(
        items: ItemTable<Error>,
        engine: Arc<Engine>,
        arena: Arc<Arena>,
        disk: DiskSpace,
        has_checksums: bool,
    ) -> Result<Self> {
        let (in_flight, is_shut_down) = (Mutex::default(), AtomicBool::new(false));
        Ok(Self {
            items,
            engine,
            arena,
            has_checksums,
            creator: CreatorProcess::current(),
            disk,
            in_flight,
            completions: Arc::new(Completions::new()?),
            is_shut_down,
        })
    }

    pub(crate) fn store(&self) -> MutexGuard<'_, Store> {
        self.disk.lock()
    }

    pub(crate) fn disk(&self) -> &DiskSpace {
        &self.disk
    }

    fn in_flight(&self) -> MutexGuard<'_, IdMap<SlotTransfer>> {
        self.in_flight.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts I/O after a change. With checksums, the swapper's own thread does so, since it hashes.
    pub(crate) fn run_or_wake(&self) {
        if self.has_checksums { self.completions.wake() } else { self.run_planned_io() }
    }

    /// Completes finished transfers and starts planned ones, until there is nothing to do.
    pub(crate) fn run_planned_io(&self) {
        loop {
            // Completed transfers first, so that the plan has the memory that they leave.
            let done = self.take_completed();
            let mut has_changed = !done.is_empty();
            done.into_iter().for_each(|transfer| self.complete_or_fail(transfer));
            let (actions, removed) = {
                let mut table = self.items.lock();
                let actions = table.take_planned();
                let resident = table.residency.resident_bytes() as u64;
                table.stats.resident_bytes_peak = table.stats.resident_bytes_peak.max(resident);
                (actions, table.take_removed())
            };
            if !has_changed && actions.is_empty() && removed.is_empty() {
                return;
            }
            for action in actions {
                has_changed |= !self.start_or_fail(action);
            }
            if !removed.is_empty() {
                has_changed = true;
                self.disk.remove(&removed);
                self.items.lock().space_freed(removed.len());
            }
            // A transfer that has started ends no wait.
            if has_changed {
                self.items.notify();
            }
        }
    }

    fn take_completed(&self) -> Vec<SlotTransfer> {
        let completed = self.completions.take();
        if completed.is_empty() {
            return Vec::new();
        }
        let mut in_flight = self.in_flight();
        completed.into_iter().filter_map(|id| in_flight.remove(&id)).collect()
    }

    /// Starts a transfer. Returns whether it is in flight now. A panic becomes the error of the item's waiters, since
    /// no other thread would complete the transfer.
    fn start_or_fail(&self, action: Action) -> bool {
        catch_unwind(AssertUnwindSafe(|| self.start(action))).unwrap_or_else(|panic| {
            match action {
                Action::Read { id, .. } => self.items.lock().read_completed(id, Err(panic_error(&*panic)), true),
                Action::Write { id, .. } => self.items.lock().write_completed(id, Err(panic_error(&*panic))),
                Action::SlotReserved => {}
            }
            false
        })
    }

    /// Completes a transfer; a panic is handled as in [`start_or_fail`](Self::start_or_fail).
    fn complete_or_fail(&self, transfer: SlotTransfer) {
        let (id, is_read) = (transfer.id, matches!(transfer.pending, PendingIo::Read(_)));
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.complete(transfer))) {
            if is_read {
                self.items.lock().read_completed(id, Err(panic_error(&*panic)), true);
            } else {
                self.items.lock().write_completed(id, Err(panic_error(&*panic)));
            }
        }
    }

    fn start(&self, action: Action) -> bool {
        let (id, slot, is_read) = match action {
            Action::Read { id, slot } => (id, slot, true),
            Action::Write { id, slot } => (id, slot, false),
            Action::SlotReserved => return false,
        };
        let (stored, ranges) = {
            let store = self.store();
            // An item is removed only when no transfer of it is in flight.
            let Some(stored) = store.get(id).cloned() else { return false };
            let ranges = store.disk_ranges(&stored, 0..stored.bytes, true);
            (stored, ranges)
        };
        let start = slot + stored.padding;
        let pending = ranges.and_then(|ranges| {
            if is_read {
                return self.submit_read(start, ranges);
            }
            if self.has_checksums {
                let checksums = checksums::checksums_of(&self.arena.region(start..start + stored.bytes));
                self.store().set_checksums(id, checksums);
            }
            self.submit_write(start, ranges)
        });
        match pending {
            Ok(pending) => {
                self.track(SlotTransfer { id, slot, stored, pending });
                return true;
            }
            Err(error) if is_read => self.items.lock().read_completed(id, Err(error), true),
            Err(error) => self.items.lock().write_completed(id, Err(error)),
        }
        false
    }

    /// Starts to read ranges into the memory from `start` on.
    fn submit_read(&self, start: usize, ranges: Vec<DiskRange>) -> Result<PendingIo> {
        let item = |DiskRange { file, offset, start: from, bytes }: DiskRange| {
            let target = self.arena.region_mut(start + from..start + from + bytes);
            ReadItem { file, offset, target }
        };
        Ok(self.engine.read_batch(ranges.into_iter().map(item).collect()).map(PendingIo::Read)?)
    }

    /// Starts to write the memory from `start` on to ranges.
    fn submit_write(&self, start: usize, ranges: Vec<DiskRange>) -> Result<PendingIo> {
        let item = |DiskRange { file, offset, start: from, bytes }: DiskRange| {
            let source = self.arena.region(start + from..start + from + bytes);
            WriteItem { file, offset, source }
        };
        let items = ranges.into_iter().map(item).collect();
        Ok(self.engine.write_batch(items, WriteOptions::default()).map(PendingIo::Write)?)
    }

    fn track(&self, transfer: SlotTransfer) {
        let (id, completions) = (transfer.id, Arc::clone(&self.completions));
        let watcher = move || completions.push(id);
        // It is in the map before it can complete for anybody else.
        let mut in_flight = self.in_flight();
        match &transfer.pending {
            PendingIo::Read(pending) => pending.on_done(watcher),
            PendingIo::Write(pending) => pending.on_done(watcher),
        }
        in_flight.insert(id, transfer);
        drop(in_flight);
        // Closing may have waited for all transfers before this one was in the map. It would keep its file open.
        if self.is_shut_down.load(Ordering::Acquire) {
            self.drain();
        }
    }

    /// Records a transfer that has completed.
    fn complete(&self, transfer: SlotTransfer) {
        let SlotTransfer { id, slot, stored, pending } = transfer;
        match pending {
            PendingIo::Read(pending) => {
                let (memory, result) = pending.wait();
                let is_memory_back = memory.is_some();
                let start = slot + stored.padding;
                let checked = result.map_err(Error::from).and_then(|transfer| {
                    match self.find_damage(&stored, &self.arena.region(start..start + stored.bytes)) {
                        Some(find_damage) => Err(find_damage),
                        None => Ok(transfer.bytes),
                    }
                });
                drop(memory);
                self.items.lock().read_completed(id, checked, is_memory_back);
            }
            PendingIo::Write(pending) => {
                let result = pending.wait().1.map(|transfer| transfer.bytes).map_err(Error::from);
                self.items.lock().write_completed(id, result);
            }
        }
    }

    /// Compares a region with its checksums.
    fn find_damage(&self, stored: &StoredItem, region: &Region) -> Option<Error> {
        let (slot, expected, found) = checksums::first_mismatch(region, stored.checksums.as_ref()?)?;
        let place =
            self.store().disk_ranges(stored, slot..slot + 1, false).ok().and_then(|ranges| ranges.into_iter().next());
        let (path, offset) = place.map_or((PathBuf::new(), 0), |range| (range.file.path().to_path_buf(), range.offset));
        Some(Error::Corrupt { path, offset, key: stored.key.to_string(), expected, found })
    }

    /// The loop of the swapper's own thread.
    pub(crate) fn run(&self) {
        loop {
            self.completions.wait();
            if self.is_shut_down.load(Ordering::Acquire) {
                return;
            }
            // A panic loses the planned actions. Waiters get an error, and this thread ends.
            if catch_unwind(AssertUnwindSafe(|| self.run_planned_io())).is_err() {
                self.items.lock().is_broken = true;
                self.items.notify();
                return;
            }
        }
    }

    /// Keeps new I/O from starting, wakes all waiters and ends the thread.
    pub(crate) fn close(&self) {
        self.items.lock().is_closed = true;
        self.items.notify();
        self.is_shut_down.store(true, Ordering::Release);
        self.completions.wake();
    }

    /// Waits for transfers that the disk has started, and cancels the others.
    pub(crate) fn drain(&self) {
        loop {
            let in_flight = std::mem::take(&mut *self.in_flight());
            if in_flight.is_empty() {
                return;
            }
            in_flight.values().for_each(|transfer| transfer.pending.cancel());
            in_flight.into_values().for_each(|transfer| self.complete_or_fail(transfer));
        }
    }
}

fn panic_error(panic: &(dyn Any + Send)) -> Error {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    Error::Panicked(text.unwrap_or("without a message").to_owned())
}
