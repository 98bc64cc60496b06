//! Find, borrow, flush and replace items. [`Swapper`]'s public methods are made of these.

use std::sync::Arc;

use deepnvme_io::register_waiting;

use crate::borrowed::Borrowed;
use crate::deadlock::WaitingFor;
use crate::error::{Error, Result};
use crate::extent_allocator::Extent;
use crate::io_scheduler::IoScheduler;
use crate::item_table::{TableState, WaitError};
use crate::options::CancelCheck;
use crate::residency::BorrowMode;
use crate::slot_allocator::ItemId;
use crate::store::{DiskLocation, StoredItem};
use crate::swapper::Swapper;
use crate::sync::current_thread;

impl Swapper {
    /// Checks that this is the process that created the swapper. In a forked child, [`keys`](Self::keys) and
    /// [`stats`](Self::stats) return nothing.
    ///
    /// # Errors
    /// `Closed` in a forked child.
    pub fn check_process(&self) -> Result<()> {
        if self.scheduler.creator.is_current() { Ok(()) } else { Err(Error::FORKED) }
    }

    /// Checks that the swapper can be used.
    ///
    /// # Errors
    /// `Closed` after [`close`](Self::close), and in a forked child.
    pub fn check_open(&self) -> Result<()> {
        self.check_process()?;
        if self.scheduler.items.lock().is_closed { Err(Error::CLOSED) } else { Ok(()) }
    }

    pub(crate) fn scheduler(&self) -> &Arc<IoScheduler> {
        &self.scheduler
    }

    pub(crate) fn find(&self, key: &str) -> Result<ItemId> {
        self.find_open(key)?.ok_or_else(|| Error::NotFound { key: key.into() })
    }

    pub(crate) fn find_open(&self, key: &str) -> Result<Option<ItemId>> {
        self.check_process()?;
        let table = self.scheduler.items.lock();
        if table.is_closed { Err(Error::CLOSED) } else { Ok(table.residency.find(key)) }
    }

    /// Borrows the item that the key has when the wait for it ends.
    pub(crate) fn borrow_key(&self, key: &str, mode: BorrowMode, is_cancelled: CancelCheck<'_>) -> Result<Borrowed> {
        // The caller may copy between this memory and a GPU.
        register_waiting();
        loop {
            let id = self.find(key)?;
            if mode.is_exclusive()
                && let Some(StoredItem { location: DiskLocation::Attached { file, .. }, .. }) =
                    self.scheduler.store().get(id)
            {
                return Err(Error::ReadOnly { key: key.into(), path: file.path().to_path_buf() });
            }
            match self.borrow_item(key, id, mode, is_cancelled) {
                // The item was replaced during the wait.
                Err(Error::NotFound { .. }) => {}
                Ok(borrowed) => return Ok(borrowed),
                Err(error) => return Err(error),
            }
        }
    }

    pub(crate) fn borrow_item(
        &self,
        key: &str,
        id: ItemId,
        mode: BorrowMode,
        is_cancelled: CancelCheck<'_>,
    ) -> Result<Borrowed> {
        let (scheduler, thread) = (&self.scheduler, current_thread());
        let taken = scheduler.items.borrow(id, mode, thread, &|| scheduler.run_or_wake(), is_cancelled);
        let slot = taken.map_err(|error| explain(key, error, "borrow"))?;
        // This use may start the next prefetch.
        scheduler.run_or_wake();
        // A borrowed item stays in the store.
        let (bytes, padding) = scheduler.store().get(id).map_or((0, 0), |stored| (stored.bytes, stored.padding));
        let slot = slot.filter(|_| mode.needs_memory());
        Ok(Borrowed::new(scheduler, id, (slot.map(|slot| slot + padding), bytes), mode, thread))
    }

    pub(crate) fn flush_ids(&self, ids: &[(ItemId, Arc<str>)], is_cancelled: CancelCheck<'_>) -> Result<()> {
        let (scheduler, thread) = (&self.scheduler, current_thread());
        let flushed =
            scheduler.items.flush(ids.iter().map(|(id, _)| *id), thread, &|| scheduler.run_or_wake(), is_cancelled);
        flushed.map_err(|(failed, error)| {
            let key = ids.iter().find(|(id, _)| Some(*id) == failed).map(|(_, key)| &**key);
            explain(key.unwrap_or_default(), error, "flush")
        })
    }

    /// Puts an item under a key. If the key has an item, waits until all borrows of that item have ended, and replaces
    /// it.
    pub(crate) fn replace_item(
        &self,
        key: &str,
        slot_bytes: usize,
        stored: StoredItem,
        on_disk: bool,
        is_cancelled: CancelCheck<'_>,
    ) -> Result<ItemId> {
        let fail = |stored: StoredItem, error| {
            if let DiskLocation::Swap(extents) = stored.location {
                self.scheduler.disk().free(extents);
            }
            Err(error)
        };
        loop {
            let old = {
                let mut table = self.scheduler.items.lock();
                if table.is_closed {
                    drop(table);
                    return fail(stored, Error::CLOSED);
                }
                match table.residency.find(key) {
                    None => return Ok(self.insert_item(&mut table, stored, slot_bytes, on_disk)),
                    Some(old) => old,
                }
            };
            match self.borrow_item(key, old, BorrowMode::DiskExclusive, is_cancelled) {
                Ok(borrowed) => {
                    let mut table = self.scheduler.items.lock();
                    table.residency.delete(old);
                    let id = self.insert_item(&mut table, stored, slot_bytes, on_disk);
                    drop(table);
                    drop(borrowed);
                    return Ok(id);
                }
                Err(Error::NotFound { .. }) => {}
                Err(error) => return fail(stored, error),
            }
        }
    }

    /// Adds an item. The table stays locked, so that no thread finds an item without its place on disk.
    fn insert_item(
        &self,
        table: &mut TableState<Error>,
        stored: StoredItem,
        slot_bytes: usize,
        on_disk: bool,
    ) -> ItemId {
        let id = table.residency.add(&stored.key, slot_bytes, on_disk);
        self.scheduler.store().insert(id, stored);
        id
    }

    /// Allocates disk space. If there is none, waits for the space of deleted items.
    pub(crate) fn allocate(&self, key: &str, bytes: usize, is_cancelled: CancelCheck<'_>) -> Result<Vec<Extent>> {
        if let Ok(extents) = self.scheduler.disk().allocate(bytes) {
            return Ok(extents);
        }
        // Another thread may have recorded the end of an item before freeing its space.
        self.scheduler.run_planned_io();
        let run_or_wake = || self.scheduler.run_or_wake();
        // A failed write of another item does not keep space from becoming free.
        let freed = self.scheduler.items.wait_while(current_thread(), None, &run_or_wake, is_cancelled, |table| {
            table.is_freeing_space().then_some(WaitingFor::DiskSpace)
        });
        freed.map_err(|error| explain(key, error, "put"))?;
        self.scheduler.disk().allocate(bytes)
    }

    /// Bytes of an item's slot in memory.
    pub(crate) fn slot_bytes(&self, key: &str, padding: usize, bytes: usize) -> Result<usize> {
        let (alignment, bound) = (self.scheduler.store().alignment as usize, self.scheduler.arena.len());
        let place = bytes.checked_add(padding).and_then(|bytes| bytes.max(1).checked_next_multiple_of(alignment));
        place.filter(|place| *place <= bound).ok_or_else(|| Error::TooLarge {
            key: key.into(),
            bytes: bytes as u64,
            bound_bytes: bound as u64,
            enough_bytes: place.unwrap_or(usize::MAX) as u64,
        })
    }
}

fn explain(key: &str, error: WaitError<Error>, verb: &str) -> Error {
    match error {
        WaitError::Deleted => Error::NotFound { key: key.into() },
        WaitError::Closed => Error::CLOSED,
        WaitError::Broken => Error::BROKEN,
        WaitError::Interrupted => Error::Interrupted { key: key.into() },
        WaitError::Failed(error) => error,
        WaitError::Deadlock { waiting_for: WaitingFor::Memory(_), own_borrows, all_borrows } => {
            Error::Deadlock(format!(
                "no memory for {key:?}: {all_borrows} items are borrowed, {own_borrows} of them by this thread, and every \
             thread that could return one waits as well; return some first, or use more memory"
            ))
        }
        WaitError::Deadlock { own_borrows, .. } => Error::Deadlock(format!(
            "cannot {verb} {key:?}: it is borrowed already, by this thread or by one that waits for items of this thread \
             ({own_borrows} borrowed); return it first"
        )),
    }
}
