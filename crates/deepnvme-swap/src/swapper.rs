//! The public API: [`Swapper`].

use std::sync::Arc;

use deepnvme_io::mem::{Arena, Device, ParentOnly, Region};
use deepnvme_io::{Engine, Error as IoError, register_waiting, register_with_driver, start_thread};

use crate::borrowed::Borrowed;
use crate::disk_space::DiskSpace;
use crate::error::{Error, Result};
use crate::io_scheduler::IoScheduler;
use crate::item_table::ItemTable;
use crate::next_use::NextUseQueue;
use crate::options::{AttachedRange, CancelCheck, SwapperOptions};
use crate::residency::{BorrowMode, Budgets, ItemLocation, Residency};
use crate::slot_allocator::ItemId;
use crate::stats::SwapStats;
use crate::store::{DiskLocation, StoredItem};
use crate::swap_files::SwapFiles;
use crate::sync::outer::thread::{self, JoinHandle};

/// Default limit for prefetch budget and headroom; without it, large memories would prefetch far more than a disk
/// needs.
const BUDGET_BYTES_MAX: usize = 1 << 30;
/// The fraction of memory that each of the two may take by default: three eighths.
const BUDGET_FRACTION: (usize, usize) = (3, 8);
/// Bytes per copy of GPU memory into a slot.
const COPY_BYTES: usize = 1 << 20;

/// Tensors by key, stored on disk and borrowed in bounded memory. Can be shared between threads.
#[derive(Debug)]
pub struct Swapper {
    pub(crate) scheduler: Arc<IoScheduler>,
    thread: Option<ParentOnly<JoinHandle<()>>>,
}

impl Swapper {
    /// Creates an empty swapper, and removes swap files that crashed processes have left in its folders.
    ///
    /// # Errors
    /// `Io` if a file cannot be created or memory is short; `Invalid` for settings out of range.
    pub fn new(engine: Arc<Engine>, options: &SwapperOptions) -> Result<Self> {
        let files = SwapFiles::new(&options.folders, options.stripe_bytes, options.is_named, engine.config().direct)?;
        let alignment = files.alignment() as usize;
        let memory_bytes = options.memory_bytes / alignment * alignment;
        if memory_bytes == 0 {
            let bytes = options.memory_bytes;
            return Err(Error::Invalid(format!(
                "memory is {bytes} bytes; it must be at least {alignment}, the size of one small item"
            )));
        }
        let arena = Arena::new(memory_bytes, true).map_err(|error| IoError::from_io("allocate memory", &error))?;
        let arena = arena.with_owner(register_with_driver);
        let share = (memory_bytes / BUDGET_FRACTION.1 * BUDGET_FRACTION.0).min(BUDGET_BYTES_MAX);
        let budgets = Budgets {
            prefetch_bytes: options.prefetch_bytes.unwrap_or(share).min(memory_bytes),
            headroom_bytes: options.headroom_bytes.unwrap_or(share).min(memory_bytes),
        };
        let items = ItemTable::new(Residency::new(memory_bytes, budgets));
        let scheduler = IoScheduler::new(items, engine, Arc::new(arena), DiskSpace::new(files), options.has_checksums)?;
        let scheduler = Arc::new(scheduler);
        let for_thread = Arc::clone(&scheduler);
        let builder = thread::Builder::new().name("deepnvme-swap".into());
        let thread = start_thread(|| builder.spawn(move || for_thread.run()))?;
        Ok(Self { scheduler, thread: Some(ParentOnly::new(thread)) })
    }

    /// Returns the memory in which borrowed items lie.
    #[must_use]
    pub fn arena(&self) -> &Arc<Arena> {
        &self.scheduler.arena
    }

    /// Creates an item, or replaces one, in memory that the caller writes and then [commits](Borrowed::commit). Other
    /// threads that ask for the key wait until then. Without a commit, the key has no item.
    ///
    /// # Errors
    /// `TooLarge`; `Io` if the disk is full, or memory cannot be freed because a write fails; `Deadlock` if the calling
    /// thread holds items that it would have to wait for; `Interrupted`; `Closed`.
    pub fn create(&self, key: &str, bytes: usize, is_cancelled: CancelCheck<'_>) -> Result<Borrowed> {
        self.check_process()?;
        register_waiting();
        let slot_bytes = self.slot_bytes(key, 0, bytes)?;
        loop {
            let found = self.find_open(key)?;
            let same =
                found.filter(|id| self.scheduler.store().get(*id).is_some_and(|stored| can_reuse(stored, bytes)));
            if let Some(id) = same {
                match self.borrow_item(key, id, BorrowMode::Create, is_cancelled) {
                    Err(Error::NotFound { .. }) => continue,
                    other => return other,
                }
            }
            let extents = self.allocate(key, bytes, is_cancelled)?;
            let stored = StoredItem::new((key, ""), bytes, 0, DiskLocation::Swap(extents));
            let id = self.replace_item(key, slot_bytes, stored, false, is_cancelled)?;
            let taken = self.borrow_item(key, id, BorrowMode::Create, is_cancelled);
            if taken.is_err() {
                self.scheduler.items.delete(id);
                self.scheduler.run_or_wake();
            }
            return taken;
        }
    }

    /// Copies bytes from the CPU or a GPU into an item. They are written to disk later. GPU memory is copied once the
    /// region's stream has reached this point.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn put(&self, key: &str, source: &Region) -> Result<()> {
        let borrowed = self.create(key, source.len(), &mut || false)?;
        let gpus = self.scheduler.engine.gpu_access();
        gpus.record_events([source])?.wait()?;
        let target = borrowed.target();
        if source.device() == Device::Host {
            target.copy_from_region(0, source);
            borrowed.commit();
            return Ok(());
        }
        let mut step = vec![0; COPY_BYTES.min(source.len())];
        for at in (0..source.len()).step_by(COPY_BYTES) {
            let bytes = COPY_BYTES.min(source.len() - at);
            gpus.copy_to_slice(source, at, &mut step[..bytes])?;
            target.copy_from_slice(at, &step[..bytes]);
        }
        borrowed.commit();
        Ok(())
    }

    /// Waits until an item is in memory, and keeps it there until the returned [`Borrowed`] is dropped. Borrow it
    /// `exclusive` to change it; otherwise it is shared with other readers.
    ///
    /// # Errors
    /// `NotFound`; `ReadOnly` for exclusive access to an attached item; `Io` and `Corrupt` if the item cannot be read,
    /// or memory for it cannot be freed because a write fails; `Deadlock` if the calling thread holds items that it
    /// would have to wait for; `Interrupted`; `Closed`.
    pub fn borrow(&self, key: &str, exclusive: bool, is_cancelled: CancelCheck<'_>) -> Result<Borrowed> {
        self.borrow_key(key, if exclusive { BorrowMode::Exclusive } else { BorrowMode::Shared }, is_cancelled)
    }

    /// Like [`borrow`](Self::borrow), but an item that is on disk stays there, unless the swapper has checksums. Use
    /// [`read_at`](Borrowed::read_at) and [`write_at`](Borrowed::write_at).
    ///
    /// # Errors
    /// As [`borrow`](Self::borrow).
    pub fn access(&self, key: &str, exclusive: bool, is_cancelled: CancelCheck<'_>) -> Result<Borrowed> {
        let (in_memory, on_disk) = if exclusive {
            (BorrowMode::Exclusive, BorrowMode::DiskExclusive)
        } else {
            (BorrowMode::Shared, BorrowMode::DiskShared)
        };
        loop {
            let id = self.find(key)?;
            let is_on_disk = self.scheduler.items.lock().residency.location(id) == ItemLocation::Disk;
            // Checksums cover whole chunks, so a partial write has to go through memory.
            if self.scheduler.has_checksums || !is_on_disk {
                return self.borrow_key(key, in_memory, is_cancelled);
            }
            let borrowed = self.borrow_key(key, on_disk, is_cancelled)?;
            if self.scheduler.items.lock().residency.location(borrowed.id()) == ItemLocation::Disk {
                return Ok(borrowed);
            }
        }
    }

    /// Starts to read items that will be borrowed soon, in this order.
    ///
    /// # Errors
    /// `NotFound` for the first missing key; the keys before it are prefetched. `Closed`.
    pub fn prefetch<'a>(&self, keys: impl IntoIterator<Item = &'a str>) -> Result<()> {
        self.check_open()?;
        let mut keys = keys.into_iter();
        let wanted = {
            let mut table = self.scheduler.items.lock();
            keys.try_for_each(|key| {
                let id = table.residency.find(key).ok_or_else(|| Error::NotFound { key: key.into() })?;
                table.residency.prefetch(id);
                Ok(())
            })
        };
        self.scheduler.run_or_wake();
        wanted
    }

    /// Sets the order in which items will be borrowed from now on, once or, if it `repeats`, again and again. Keys may
    /// be created later. An empty order ends the schedule.
    ///
    /// # Errors
    /// `Closed`.
    pub fn schedule<'a>(&self, keys: impl IntoIterator<Item = &'a str>, repeats: bool) -> Result<()> {
        self.check_open()?;
        let order = NextUseQueue::new(keys.into_iter().map(Arc::from).collect(), repeats);
        self.scheduler.items.lock().residency.schedule(order);
        self.scheduler.run_or_wake();
        Ok(())
    }

    /// Deletes an item, at once or when its last borrow ends.
    ///
    /// # Errors
    /// `NotFound`; `Closed`.
    pub fn delete(&self, key: &str) -> Result<()> {
        let id = self.find(key)?;
        self.scheduler.items.delete(id);
        self.scheduler.run_or_wake();
        Ok(())
    }

    /// Waits until these items, or all of them, are on disk. It waits for exclusive borrows that have begun. A borrow
    /// that would change an item again waits until the item is written, so other threads cannot hold up a flush.
    ///
    /// # Errors
    /// `NotFound`; `Io` if a write fails: the item stays in memory, and the next flush tries again; `Deadlock` if the
    /// calling thread has borrowed one of them exclusively; `Interrupted`; `Closed`.
    pub fn flush(&self, keys: Option<&[&str]>, is_cancelled: CancelCheck<'_>) -> Result<()> {
        self.check_open()?;
        let ids: Vec<(ItemId, Arc<str>)> = match keys {
            Some(keys) => keys.iter().map(|key| Ok((self.find(key)?, Arc::from(*key)))).collect::<Result<_>>()?,
            None => self.scheduler.items.lock().residency.keys().map(|(key, id)| (id, Arc::clone(key))).collect(),
        };
        self.flush_ids(&ids, is_cancelled)
    }

    /// Adds a read-only item whose bytes lie in another file. `label` is the text that [`Borrowed::label`] returns.
    /// Returns the item's id.
    ///
    /// # Errors
    /// `Io` if the file cannot be opened; `Invalid` if it lacks that range; `TooLarge`; `Deadlock` if the calling
    /// thread has borrowed the item that this one replaces; `Interrupted`; `Closed`.
    pub fn attach(
        &self,
        key: &str,
        label: &str,
        range: &AttachedRange<'_>,
        is_cancelled: CancelCheck<'_>,
    ) -> Result<ItemId> {
        let AttachedRange { target, offset, bytes, element_bytes } = *range;
        self.check_open()?;
        let file = self.scheduler.disk().open_attached(target, self.scheduler.engine.config().direct)?;
        let file_bytes = file.len()?;
        if offset.checked_add(bytes as u64).is_none_or(|end| end > file_bytes) {
            let path = deepnvme_io::display::path(file.path());
            return Err(Error::Invalid(format!(
                "{path} has {file_bytes} bytes, and {key:?} would be {bytes} bytes at offset {offset}"
            )));
        }
        // If the offset within a page of memory equals the offset within a page of the file, direct I/O needs no copy.
        let padding = (offset % deepnvme_io::mem::PAGE_BYTES) as usize;
        let padding = if padding.is_multiple_of(element_bytes.max(1)) { padding } else { 0 };
        let slot_bytes = self.slot_bytes(key, padding, bytes)?;
        let stored = StoredItem::new((key, label), bytes, padding, DiskLocation::Attached { file, offset });
        let id = self.replace_item(key, slot_bytes, stored, true, is_cancelled)?;
        self.scheduler.run_or_wake();
        Ok(id)
    }

    /// Returns whether the key has an item. A closed swapper has none.
    #[must_use]
    pub fn contains(&self, key: &str) -> bool {
        self.find(key).is_ok()
    }

    /// Returns the keys, in any order. A closed swapper has none.
    #[must_use]
    pub fn keys(&self) -> Vec<String> {
        if self.check_open().is_err() {
            return Vec::new();
        }
        self.scheduler.items.lock().residency.keys().map(|(key, _)| key.to_string()).collect()
    }

    /// Returns the counters since the swapper was created, and its present sizes. They stay readable after a close.
    #[must_use]
    pub fn stats(&self) -> SwapStats {
        if self.check_process().is_err() {
            return SwapStats::default();
        }
        let table = self.scheduler.items.lock();
        let mut stats = table.stats;
        stats.items = table.residency.len() as u64;
        stats.evictions = table.residency.evictions;
        stats.resident_bytes = table.residency.resident_bytes() as u64;
        stats.resident_bytes_peak = stats.resident_bytes_peak.max(stats.resident_bytes);
        drop(table);
        stats.memory_bytes = self.scheduler.arena.len() as u64;
        let store = self.scheduler.store();
        (stats.stored_bytes, stats.file_bytes) = (store.used(), store.allocated);
        stats
    }

    /// Closes the swapper: cancels all waits, completes transfers in flight and deletes the swap files. Borrowed memory
    /// stays valid.
    pub fn close(&self) {
        if self.check_process().is_ok() {
            self.scheduler.close();
            self.scheduler.drain();
            self.scheduler.disk().delete_files();
        }
    }
}

impl Drop for Swapper {
    fn drop(&mut self) {
        if self.check_process().is_err() {
            // The locks belong to the parent process, as the thread does.
            std::mem::forget(Arc::clone(&self.scheduler));
            return;
        }
        self.scheduler.close();
        if let Some(thread) = self.thread.take().and_then(ParentOnly::into_inner) {
            // A panic was reported already.
            let _ = thread.join();
        }
        self.scheduler.drain();
        self.scheduler.disk().delete_files();
    }
}

/// Returns whether an item can take new bytes in place.
fn can_reuse(stored: &StoredItem, bytes: usize) -> bool {
    stored.bytes == bytes && matches!(stored.location, DiskLocation::Swap(_))
}

#[cfg(all(test, not(loom), not(simulated)))]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use std::time::{Duration, Instant};

    use deepnvme_io::Config;

    use super::*;

    #[test]
    fn a_panic_becomes_the_error_of_waiters() {
        let folder = tempfile::tempdir().unwrap();
        let engine = Arc::new(Engine::new(Config::default()).unwrap());
        let swapper = Swapper::new(engine, &SwapperOptions::new(folder.path(), 4096)).unwrap();
        for key in ["odd", "sound"] {
            swapper.put(key, &Region::from_vec(vec![7; 4096])).unwrap();
        }
        swapper.flush(None, &mut || false).unwrap();
        let id = swapper.scheduler().items.lock().residency.find("odd").unwrap();
        let stored = swapper.scheduler().store().get(id).unwrap().clone();
        // Simulate a bug: the item's bytes exceed the memory.
        swapper.scheduler().store().insert(id, StoredItem { bytes: 1 << 40, ..stored });
        let began = Instant::now();
        let mut is_cancelled = || began.elapsed() > Duration::from_secs(60);
        let failed = swapper.borrow("odd", false, &mut is_cancelled).unwrap_err();
        assert!(matches!(failed, Error::Panicked(_)), "{failed}");
        // Other items still work.
        drop(swapper.borrow("sound", true, &mut is_cancelled).unwrap());
        swapper.close();
    }
}
