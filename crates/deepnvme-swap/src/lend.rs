//! An item while somebody has it.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use deepnvme_io::mem::{Region, RegionMut};

use crate::places::Id;
use crate::residency::Mode;
use crate::traffic::Shared;
use crate::waits::Who;

/// The calling thread's number.
pub(crate) fn this_thread() -> Who {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    thread_local! {
        static NUMBER: Cell<Option<Who>> = const { Cell::new(None) };
    }
    NUMBER.with(|number| {
        let mine = number.get().unwrap_or_else(|| NEXT.fetch_add(1, Ordering::Relaxed));
        number.set(Some(mine));
        mine
    })
}

/// An item that stays where it is until this is dropped.
///
/// One that may be changed is changed in place: it is written back some time later, unless [`Lend::mark_clean`] says that
/// nothing was changed. One that was lent to be filled replaces what was under its key with [`Lend::commit`] only: dropped
/// without that, by an early return or a panic, it leaves nothing under the key.
#[derive(Debug)]
pub struct Lend {
    shared: Arc<Shared>,
    id: Id,
    /// `None` where it is held on disk only.
    at: Option<usize>,
    bytes: usize,
    mode: Mode,
    who: Who,
    is_dirty: std::sync::atomic::AtomicBool,
    /// Whether what was filled is complete.
    is_committed: bool,
}

impl Lend {
    pub(crate) fn new(shared: &Arc<Shared>, id: Id, place: (Option<usize>, usize), mode: Mode, who: Who) -> Self {
        let (at, bytes) = place;
        let is_dirty = matches!(mode, Mode::Exclusive | Mode::Fill).into();
        Self { shared: Arc::clone(shared), id, at, bytes, mode, who, is_dirty, is_committed: false }
    }

    /// The item's number: another one for each item that is put under a key in another size, and never used again.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Where in the arena its first byte is; `None` where it is not in memory.
    #[must_use]
    pub fn offset(&self) -> Option<usize> {
        self.at
    }

    /// Its bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Whether it may be changed.
    #[must_use]
    pub fn is_exclusive(&self) -> bool {
        self.mode.is_sole()
    }

    /// Its memory, to read. What is left of that after the lend shows bytes of others.
    ///
    /// # Panics
    /// When it is not in memory.
    #[must_use]
    pub fn region(&self) -> Region {
        self.shared.arena.region(self.range())
    }

    /// Its memory, to change.
    ///
    /// # Panics
    /// When it is not in memory, or was lent to be read.
    #[must_use]
    pub fn target(&self) -> RegionMut {
        assert!(self.is_exclusive(), "what is lent shared is not to be changed");
        self.shared.arena.region_mut(self.range())
    }

    /// It was not changed: nothing has to be written back for it.
    pub fn mark_clean(&self) {
        // Of what is put for the first time, there is nothing else.
        self.is_dirty.store(self.mode == Mode::Fill, Ordering::Relaxed);
    }

    /// It was changed: what the default is, unless it was lent to be read.
    pub fn mark_dirty(&self) {
        self.is_dirty.store(self.is_exclusive(), Ordering::Relaxed);
    }

    /// What was to be filled is complete: it is the item from now on, and others may have it.
    pub fn commit(mut self) {
        self.is_committed = true;
    }

    /// As [`commit`](Self::commit), with words of the caller's that stay with the item.
    pub fn commit_as(self, label: &str) {
        // Before anybody else can have the item.
        self.shared.store().set_label(self.id, label);
        self.commit();
    }

    /// What was said of the item when it was committed, adopted or imported.
    #[must_use]
    pub fn label(&self) -> Arc<str> {
        self.shared.store().get(self.id).map_or_else(|| Arc::from(""), |stored| Arc::clone(&stored.label))
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    #[expect(clippy::expect_used, reason = "what the caller owes")]
    fn range(&self) -> std::ops::Range<usize> {
        let at = self.at.expect("the item is not in memory");
        at..at + self.bytes
    }
}

impl Drop for Lend {
    fn drop(&mut self) {
        // In a forked child the lock may be one that nobody will ever release.
        if self.shared.creator.is_current() {
            if self.mode == Mode::Fill && !self.is_committed {
                self.shared.desk.lock().residency.forget(self.id);
            }
            let is_dirty = self.is_dirty.load(Ordering::Relaxed);
            self.shared.desk.give_back(self.id, self.mode, self.who, is_dirty);
            self.shared.stir();
        }
    }
}
