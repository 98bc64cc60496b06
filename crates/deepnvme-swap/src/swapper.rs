//! The swapper as its users see it.

use std::path::PathBuf;
use std::sync::Arc;

use deepnvme_io::mem::{Arena, Region};
use deepnvme_io::{Engine, Error as IoError, Target};

use crate::desk::{Desk, Refusal};
use crate::error::{Error, Result};
use crate::extents::Extent;
use crate::files::Files;
use crate::lend::{Lend, this_thread};
use crate::order::Order;
use crate::places::Id;
use crate::residency::{Bounds, Mode, Residency, Whereabouts};
use crate::room::Room;
use crate::stats::SwapStats;
use crate::store::{Home, Stored};
use crate::sync::outer::thread::{self, JoinHandle};
use crate::traffic::Shared;
use crate::waits::On;
use deepnvme_io::start_thread;

/// Most that is read ahead, or kept ready for that, where nobody says otherwise and items are small.
const PIPELINE_BYTES_MAX: usize = 1 << 30;
/// What of memory each of the two may take: three eighths.
const PIPELINE_SHARE: (usize, usize) = (3, 8);
/// Bytes that are copied at once into a slot.
const COPY_BYTES: usize = 1 << 20;

/// How a swapper is made.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Options {
    /// Where the swap files are made: one folder, or one for each disk.
    pub folders: Vec<PathBuf>,
    /// Bytes of memory for items, page-locked where the kernel allows it. All there ever are.
    pub memory_bytes: usize,
    /// Bytes of what comes next in the order that may be in memory before it is used. Default: three eighths, 1 GiB at most.
    pub ahead_bytes: Option<usize>,
    /// Bytes of memory that are kept ready for what comes, by writing early. Default: as `ahead_bytes`.
    pub reserve_bytes: Option<usize>,
    /// Keep a checksum of all that is written, and compare it when it is read.
    pub has_checksums: bool,
    /// Give the swap files names.
    pub is_named: bool,
    /// Of several files: bytes that go to one before the next has its turn.
    pub stripe_bytes: u64,
}

impl Options {
    /// What is right for most: that folder, that much memory.
    #[must_use]
    pub fn new(folder: impl Into<PathBuf>, memory_bytes: usize) -> Self {
        Self {
            folders: vec![folder.into()],
            memory_bytes,
            ahead_bytes: None,
            reserve_bytes: None,
            has_checksums: false,
            is_named: false,
            stripe_bytes: deepnvme_io::stripe::STRIPE_BYTES_DEFAULT,
        }
    }
}

/// Says now and then whether somebody who waits is to stop.
pub type Look<'a> = &'a mut dyn FnMut() -> bool;

/// Tensors by key: on disk, and for a while in bounded memory. Shared freely between threads.
#[derive(Debug)]
pub struct Swapper {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Swapper {
    /// An empty one. Swap files that crashed processes have left in the folders are removed.
    ///
    /// # Errors
    /// `Io` where a file cannot be made there, or there is not so much memory; `Invalid` for settings out of range.
    pub fn new(engine: Arc<Engine>, options: &Options) -> Result<Self> {
        let files = Files::new(&options.folders, options.stripe_bytes, options.is_named, engine.config().direct)?;
        let grain = files.grain() as usize;
        let memory_bytes = options.memory_bytes / grain * grain;
        if memory_bytes == 0 {
            let bytes = options.memory_bytes;
            return Err(Error::Invalid(format!(
                "memory is {bytes} bytes; it must be at least {grain}, for one small item"
            )));
        }
        let arena = Arena::new(memory_bytes, true).map_err(|error| IoError::from_io("allocate memory", &error))?;
        let share = (memory_bytes / PIPELINE_SHARE.1 * PIPELINE_SHARE.0).min(PIPELINE_BYTES_MAX);
        let bounds = Bounds {
            ahead_bytes: options.ahead_bytes.unwrap_or(share).min(memory_bytes),
            reserve_bytes: options.reserve_bytes.unwrap_or(share).min(memory_bytes),
        };
        let desk = Desk::new(Residency::new(memory_bytes, bounds));
        let shared = Shared::new(desk, engine, Arc::new(arena), Room::new(files), options.has_checksums)?;
        let shared = Arc::new(shared);
        let runs = Arc::clone(&shared);
        let builder = thread::Builder::new().name("deepnvme-swap".into());
        let thread = start_thread(|| builder.spawn(move || runs.run()))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// The memory that items are lent in.
    #[must_use]
    pub fn arena(&self) -> &Arc<Arena> {
        &self.shared.arena
    }

    /// Makes room for an item, or for other bytes of one; the caller fills it and [commits](Lend::commit) it. Whoever asks
    /// for the key meanwhile waits. Without a commit there is nothing under the key.
    ///
    /// # Errors
    /// `TooLarge`; `Io` where the disk is full; `Deadlock` where the calling thread holds what it would have to wait for.
    pub fn fill(&self, key: &str, bytes: usize, look: Look<'_>) -> Result<Lend> {
        self.check_process()?;
        let place_bytes = self.place_bytes(key, 0, bytes)?;
        loop {
            let found = self.find_open(key)?;
            let same = found.filter(|id| self.shared.store().get(*id).is_some_and(|stored| is_same(stored, bytes)));
            if let Some(id) = same {
                match self.take(key, id, bytes, Mode::Fill, look) {
                    Err(Error::NotFound { .. }) => continue,
                    other => return other,
                }
            }
            let extents = self.allocate(key, bytes, look)?;
            let stored = self.stored((key, ""), bytes, 0, Home::Swap(extents));
            let id = self.replace(key, place_bytes, stored, false, look)?;
            let taken = self.take(key, id, bytes, Mode::Fill, look);
            if taken.is_err() {
                self.shared.desk.lock().residency.forget(id);
                self.shared.stir();
            }
            return taken;
        }
    }

    /// Puts a copy of the bytes, of the host or of a GPU, under that key. They are written some time later. Of a GPU they are
    /// copied when the region's stream has come so far.
    ///
    /// # Errors
    /// As [`fill`](Self::fill).
    pub fn put(&self, key: &str, source: &Region) -> Result<()> {
        let lend = self.fill(key, source.len(), &mut || false)?;
        let gpus = self.shared.engine.gpu_access();
        gpus.points([source])?.wait()?;
        let target = lend.target();
        let mut step = vec![0; COPY_BYTES.min(source.len())];
        for at in (0..source.len()).step_by(COPY_BYTES) {
            let bytes = COPY_BYTES.min(source.len() - at);
            gpus.copy_to_slice(source, at, &mut step[..bytes])?;
            target.copy_from_slice(at, &step[..bytes]);
        }
        lend.commit();
        Ok(())
    }

    /// Waits until an item is in memory, where it stays until the lend is dropped; `exclusive` to change it, else together
    /// with others who read it.
    ///
    /// # Errors
    /// `NotFound`; `ReadOnly` for what was adopted; `Io` and `Corrupt` where it cannot be read, or what has to make room
    /// cannot be written; `Deadlock` where the calling thread holds what it would have to wait for; `Interrupted`.
    pub fn lend(&self, key: &str, exclusive: bool, look: Look<'_>) -> Result<Lend> {
        self.hold(key, if exclusive { Mode::Exclusive } else { Mode::Shared }, look)
    }

    /// As [`lend`](Self::lend), but what is not in memory is held on disk, to be read or written there with
    /// [`read_part`](Lend::read_part) and [`write_part`](Lend::write_part).
    ///
    /// # Errors
    /// As [`lend`](Self::lend).
    pub fn access(&self, key: &str, exclusive: bool, look: Look<'_>) -> Result<Lend> {
        let (in_memory, on_disk) = if exclusive { (Mode::Exclusive, Mode::Claim) } else { (Mode::Shared, Mode::Pin) };
        loop {
            let id = self.find(key)?;
            let is_on_disk = self.shared.desk.lock().residency.whereabouts(id) == Whereabouts::Disk;
            // Sums are of whole cells.
            if self.shared.has_sums || !is_on_disk {
                return self.hold(key, in_memory, look);
            }
            let lend = self.hold(key, on_disk, look)?;
            if self.shared.desk.lock().residency.whereabouts(lend.id()) == Whereabouts::Disk {
                return Ok(lend);
            }
        }
    }

    /// These will be lent soon, in this order.
    ///
    /// # Errors
    /// `NotFound` for the first that is not there; those before it are fetched.
    pub fn prefetch<'a>(&self, keys: impl IntoIterator<Item = &'a str>) -> Result<()> {
        self.check_process()?;
        let mut keys = keys.into_iter();
        let wanted = {
            let mut core = self.shared.desk.lock();
            keys.try_for_each(|key| {
                let id = core.residency.find(key).ok_or_else(|| Error::NotFound { key: key.into() })?;
                core.residency.want(id);
                Ok(())
            })
        };
        self.shared.stir();
        wanted
    }

    /// The order in which items will be lent from now on, again and again if it `repeats`. Keys that are not there yet count
    /// from when they are put. An empty order is none.
    ///
    /// # Errors
    /// `Closed`.
    pub fn schedule<'a>(&self, keys: impl IntoIterator<Item = &'a str>, repeats: bool) -> Result<()> {
        self.check_process()?;
        let order = Order::new(keys.into_iter().map(Arc::from).collect(), repeats);
        self.shared.desk.lock().residency.schedule(order);
        self.shared.stir();
        Ok(())
    }

    /// Does away with an item at once, or when those who hold it have returned it.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn forget(&self, key: &str) -> Result<()> {
        let id = self.find(key)?;
        self.shared.desk.lock().residency.forget(id);
        self.shared.stir();
        self.shared.desk.notify();
        Ok(())
    }

    /// Waits until the disk has all that was put and changed, or the items of these keys.
    ///
    /// # Errors
    /// `Io` where something cannot be written: it is still in memory, and the next flush tries again; `Deadlock` where the
    /// calling thread has one of them lent exclusively.
    pub fn flush(&self, keys: Option<&[&str]>, look: Look<'_>) -> Result<()> {
        self.check_process()?;
        let ids: Vec<(Id, String)> = match keys {
            Some(keys) => keys.iter().map(|key| Ok((self.find(key)?, (*key).to_owned()))).collect::<Result<_>>()?,
            None => self.shared.desk.lock().residency.keys().map(|(key, id)| (id, key.to_string())).collect(),
        };
        self.flush_ids(&ids, look)
    }

    pub(crate) fn flush_ids(&self, ids: &[(Id, String)], look: Look<'_>) -> Result<()> {
        let (mut left, began): (Vec<Id>, u64) = {
            let mut core = self.shared.desk.lock();
            (ids.iter().map(|(id, _)| *id).filter(|id| core.residency.flush(*id)).collect(), core.failures())
        };
        if left.is_empty() {
            return Ok(());
        }
        self.shared.stir();
        let stir = || self.shared.stir();
        let flushed = self.shared.desk.wait_while((this_thread(), began), &stir, look, |core| {
            // What was dirtied again meanwhile is somebody else's to flush.
            left.retain(|id| core.residency.is_behind(*id));
            let held = left.iter().find(|id| core.residency.is_sole(**id));
            held.or(left.first()).map(|id| if core.residency.is_sole(*id) { On::Item(*id) } else { On::Io(*id) })
        });
        let key = left.first().and_then(|id| ids.iter().find(|(other, _)| other == id)).map(|(_, key)| key.as_str());
        flushed.map_err(|refusal| explained(key.unwrap_or_default(), refusal, "flush"))
    }

    /// Adds an item whose bytes are those of somebody else's file, from `offset` on. They are read from there, and never
    /// written. `item_bytes` is the size of its elements, `label` what [`Lend::label`] says of it. Its number.
    ///
    /// # Errors
    /// `Io` where there is no such range; `TooLarge`.
    pub fn adopt(
        &self,
        (key, label): (&str, &str),
        target: &Target,
        offset: u64,
        bytes: usize,
        item_bytes: usize,
    ) -> Result<Id> {
        self.check_process()?;
        let file = self.shared.room().adopt(target, self.shared.engine.config().direct)?;
        let file_bytes = file.len()?;
        if offset.checked_add(bytes as u64).is_none_or(|end| end > file_bytes) {
            let path = deepnvme_io::shown::path(file.path());
            return Err(Error::Invalid(format!(
                "{path} has {file_bytes} bytes, and {key:?} would be {bytes} bytes at offset {offset}"
            )));
        }
        // Bytes that lie at the same place within a page of memory as within one of the file get there without a copy.
        let head = (offset % deepnvme_io::mem::PAGE_BYTES) as usize;
        let head = if head.is_multiple_of(item_bytes.max(1)) { head } else { 0 };
        let place_bytes = self.place_bytes(key, head, bytes)?;
        let stored = self.stored((key, label), bytes, head, Home::Adopted { file, offset });
        let id = self.replace(key, place_bytes, stored, true, &mut || false)?;
        self.shared.stir();
        Ok(id)
    }

    /// Whether there is an item.
    #[must_use]
    pub fn contains(&self, key: &str) -> bool {
        self.find(key).is_ok()
    }

    /// The keys, in no order.
    #[must_use]
    pub fn keys(&self) -> Vec<String> {
        if self.check_process().is_err() {
            return Vec::new();
        }
        self.shared.desk.lock().residency.keys().map(|(key, _)| key.to_string()).collect()
    }

    /// What it has cost so far.
    #[must_use]
    pub fn stats(&self) -> SwapStats {
        if self.check_process().is_err() {
            return SwapStats::default();
        }
        let core = self.shared.desk.lock();
        let mut stats = core.stats;
        stats.items = core.residency.len() as u64;
        stats.evictions = core.residency.evictions;
        stats.resident_bytes = core.residency.resident_bytes() as u64;
        stats.resident_bytes_peak = stats.resident_bytes_peak.max(stats.resident_bytes);
        drop(core);
        stats.memory_bytes = self.shared.arena.len() as u64;
        let store = self.shared.store();
        (stats.stored_bytes, stats.file_bytes) = (store.used(), store.allocated);
        stats
    }

    /// Ends it: whoever waits is told, what is on its way is waited for, and what was in it is gone. Memory that is lent may
    /// be used still.
    pub fn close(&self) {
        if self.check_process().is_ok() {
            self.shared.close();
            self.shared.drain();
            self.shared.room().end();
        }
    }

    /// An item under that key instead of the one that is there, once nobody holds that any more.
    pub(crate) fn replace(
        &self,
        key: &str,
        place_bytes: usize,
        stored: Stored,
        on_disk: bool,
        look: Look<'_>,
    ) -> Result<Id> {
        let give_up = |stored: Stored, error| {
            if let Home::Swap(extents) = stored.home {
                self.shared.room().free(extents);
            }
            Err(error)
        };
        loop {
            let old = {
                let mut core = self.shared.desk.lock();
                if core.is_closed {
                    drop(core);
                    return give_up(stored, Error::SHUT);
                }
                match core.residency.find(key) {
                    None => {
                        let id = core.residency.add(&stored.key, place_bytes, on_disk);
                        // The item is known on disk before anybody can ask for it.
                        self.shared.store().insert(id, stored);
                        return Ok(id);
                    }
                    Some(old) => old,
                }
            };
            match self.take(key, old, 0, Mode::Claim, look) {
                Ok(lend) => {
                    let mut core = self.shared.desk.lock();
                    core.residency.forget(old);
                    let id = core.residency.add(&stored.key, place_bytes, on_disk);
                    self.shared.store().insert(id, stored);
                    drop(core);
                    drop(lend);
                    return Ok(id);
                }
                Err(Error::NotFound { .. }) => {}
                Err(error) => return give_up(stored, error),
            }
        }
    }

    /// Room on disk; where there is none, that of items which are on their way out is waited for.
    pub(crate) fn allocate(&self, key: &str, bytes: usize, look: Look<'_>) -> Result<Vec<Extent>> {
        if let Ok(extents) = self.shared.room().allocate(bytes) {
            return Ok(extents);
        }
        // Another thread may have taken note of an item's end, and not have come to freeing its room.
        self.shared.advance();
        let (began, stir) = (u64::MAX, || self.shared.stir());
        let buried = self
            .shared
            .desk
            .wait_while((this_thread(), began), &stir, look, |core| core.is_freeing().then_some(On::Io(Id::MAX)));
        buried.map_err(|refusal| explained(key, refusal, "put"))?;
        Ok(self.shared.room().allocate(bytes)?)
    }

    pub(crate) fn stored(&self, (key, label): (&str, &str), bytes: usize, head: usize, home: Home) -> Stored {
        Stored { key: key.into(), label: label.into(), bytes, head, home, sums: None }
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Bytes of an item's place in memory.
    pub(crate) fn place_bytes(&self, key: &str, head: usize, bytes: usize) -> Result<usize> {
        let (grain, bound) = (self.shared.store().files.grain() as usize, self.shared.arena.len());
        let place = bytes.checked_add(head).and_then(|bytes| bytes.max(1).checked_next_multiple_of(grain));
        place.filter(|place| *place <= bound).ok_or_else(|| Error::TooLarge {
            key: key.into(),
            bytes: bytes as u64,
            bound_bytes: bound as u64,
            enough_bytes: place.unwrap_or(usize::MAX) as u64,
        })
    }

    pub(crate) fn find(&self, key: &str) -> Result<Id> {
        self.find_open(key)?.ok_or_else(|| Error::NotFound { key: key.into() })
    }

    fn find_open(&self, key: &str) -> Result<Option<Id>> {
        self.check_process()?;
        let core = self.shared.desk.lock();
        if core.is_closed { Err(Error::SHUT) } else { Ok(core.residency.find(key)) }
    }

    /// Has an item, whichever is under the key then.
    pub(crate) fn hold(&self, key: &str, mode: Mode, look: Look<'_>) -> Result<Lend> {
        loop {
            let id = self.find(key)?;
            let Some(stored) = self.shared.store().get(id).cloned() else { continue };
            if mode.is_sole()
                && let Home::Adopted { file, .. } = &stored.home
            {
                return Err(Error::ReadOnly { key: key.into(), path: file.path().to_path_buf() });
            }
            match self.take(key, id, stored.bytes, mode, look) {
                // It was replaced while this one waited.
                Err(Error::NotFound { .. }) => {}
                Ok(lend) => return Ok(lend),
                Err(error) => return Err(error),
            }
        }
    }

    fn take(&self, key: &str, id: Id, bytes: usize, mode: Mode, look: Look<'_>) -> Result<Lend> {
        let (shared, who) = (&self.shared, this_thread());
        let head = shared.store().get(id).map_or(0, |stored| stored.head);
        let taken = shared.desk.take(id, mode, who, &|| shared.stir(), look);
        let at = taken.map_err(|refusal| explained(key, refusal, "lend"))?;
        // What was used decides what is fetched next.
        shared.stir();
        let at = at.filter(|_| mode.needs_memory());
        Ok(Lend::new(shared, id, (at.map(|at| at + head), bytes), mode, who))
    }

    pub(crate) fn check_process(&self) -> Result<()> {
        if self.shared.creator.is_current() { Ok(()) } else { Err(Error::FORKED) }
    }
}

impl Drop for Swapper {
    fn drop(&mut self) {
        if self.check_process().is_err() {
            // The thread is the parent's, and so are the locks.
            std::mem::forget(self.thread.take());
            std::mem::forget(Arc::clone(&self.shared));
            return;
        }
        self.shared.close();
        if let Some(thread) = self.thread.take() {
            // One that panicked has said so.
            let _ = thread.join();
        }
        self.shared.drain();
        self.shared.room().end();
    }
}

/// Whether an item can take other bytes where it is.
fn is_same(stored: &Stored, bytes: usize) -> bool {
    stored.bytes == bytes && matches!(stored.home, Home::Swap(_))
}

pub(crate) fn explained(key: &str, refusal: Refusal<Error>, verb: &str) -> Error {
    match refusal {
        Refusal::Gone => Error::NotFound { key: key.into() },
        Refusal::Closed => Error::SHUT,
        Refusal::Broken => Error::BROKEN,
        Refusal::Interrupted => Error::Interrupted { key: key.into() },
        Refusal::Failed(error) => error,
        Refusal::Deadlock(On::Memory(_), own, all) => Error::Deadlock(format!(
            "there is no room for {key:?}: {all} items are lent, {own} of them to this thread, and all who could return one \
             wait as well; return some first, or give more memory"
        )),
        Refusal::Deadlock(_, own, _) => Error::Deadlock(format!(
            "cannot {verb} {key:?}: it is lent already, to this thread or to one that waits for what this thread has ({own} \
             lends); return it first"
        )),
    }
}
