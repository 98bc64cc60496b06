//! What the residency decides is done here: reads and writes are begun, and taken note of when they end.
//!
//! Any thread may do that: whoever has changed something, and a thread of the swapper's own, which the engine wakes when a
//! transfer has ended. Each transfer is begun by one and ended by one. Nothing is read, written or hashed under the lock.

use std::any::Any;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use deepnvme_io::mem::sync::ignore_poison;
use deepnvme_io::mem::{Arena, Region, RegionMut};
use deepnvme_io::{Engine, Error as IoError, Pending, ReadItem, WriteItem, WriteOptions};
use rustix::event::{EventfdFlags, Timespec, eventfd};

use crate::desk::Desk;
use crate::error::{Error, Result};
use crate::places::Id;
use crate::residency::Action;
use crate::room::Room;
use crate::store::{Store, Stored};
use crate::sums;
use crate::sync::outer::{Mutex, MutexGuard};
use crate::sync::wait_for_wake;

/// While transfers are on their way, their end is looked for that often even where nobody tells of it.
const LOOK_AGAIN: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// What all handles of a swapper share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) desk: Desk<Error>,
    pub(crate) engine: Arc<Engine>,
    pub(crate) arena: Arc<Arena>,
    pub(crate) has_sums: bool,
    pub(crate) creator: deepnvme_io::mem::CreatorProcess,
    room: Room,
    flights: Mutex<Vec<Flight>>,
    wake: OwnedFd,
    is_over: AtomicBool,
}

/// A transfer on its way.
#[derive(Debug)]
struct Flight {
    id: Id,
    at: usize,
    stored: Stored,
    pending: Either,
}

#[derive(Debug)]
enum Either {
    Read(Pending<Vec<RegionMut>>),
    Write(Pending<Vec<Region>>),
}

impl Either {
    fn is_done(&self) -> bool {
        match self {
            Self::Read(pending) => pending.is_done(),
            Self::Write(pending) => pending.is_done(),
        }
    }

    fn cancel(&self) {
        match self {
            Self::Read(pending) => pending.cancel(),
            Self::Write(pending) => pending.cancel(),
        };
    }
}

impl Shared {
    pub(crate) fn new(
        desk: Desk<Error>,
        engine: Arc<Engine>,
        arena: Arc<Arena>,
        room: Room,
        has_sums: bool,
    ) -> Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let wake = wake.map_err(|errno| IoError::os("make an eventfd", errno))?;
        let (flights, is_over) = (Mutex::default(), AtomicBool::new(false));
        Ok(Self {
            desk,
            engine,
            arena,
            has_sums,
            creator: deepnvme_io::mem::CreatorProcess::current(),
            room,
            flights,
            wake,
            is_over,
        })
    }

    pub(crate) fn store(&self) -> MutexGuard<'_, Store> {
        self.room.lock()
    }

    pub(crate) fn room(&self) -> &Room {
        &self.room
    }

    fn flights(&self) -> MutexGuard<'_, Vec<Flight>> {
        ignore_poison(self.flights.lock())
    }

    /// Something has changed. Where sums are kept, hashing is left to the swapper's own thread.
    pub(crate) fn stir(&self) {
        if self.has_sums { self.poke() } else { self.advance() }
    }

    fn poke(&self) {
        // A full counter says the same.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    /// Has the disk do all that there is to do now.
    pub(crate) fn advance(&self) {
        loop {
            let done = self.take_done();
            let (actions, gone) = {
                let mut core = self.desk.lock();
                let actions = core.take_decided();
                let resident = core.residency.resident_bytes() as u64;
                core.stats.resident_bytes_peak = core.stats.resident_bytes_peak.max(resident);
                (actions, core.take_gone())
            };
            if done.is_empty() && actions.is_empty() && gone.is_empty() {
                return;
            }
            done.into_iter().for_each(|flight| self.end_or_fail(flight));
            actions.into_iter().for_each(|action| self.begin_or_fail(action));
            if !gone.is_empty() {
                self.room.remove(&gone);
                self.desk.lock().freed(gone.len());
            }
            self.desk.notify();
        }
    }

    fn take_done(&self) -> Vec<Flight> {
        let mut flights = self.flights();
        let (done, rest) = std::mem::take(&mut *flights).into_iter().partition(|flight| flight.pending.is_done());
        *flights = rest;
        done
    }

    /// A panic is an error for whoever waits for the item: nobody else would begin it.
    fn begin_or_fail(&self, action: Action) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.begin(action))) {
            match action {
                Action::Read { id, .. } => self.desk.lock().landed(id, Err(panicked(&*panic)), true),
                Action::Write { id, .. } => self.desk.lock().written(id, Err(panicked(&*panic))),
                Action::Placed => {}
            }
        }
    }

    /// As [`begin_or_fail`](Self::begin_or_fail).
    fn end_or_fail(&self, flight: Flight) {
        let (id, is_read) = (flight.id, matches!(flight.pending, Either::Read(_)));
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.end(flight))) {
            if is_read {
                self.desk.lock().landed(id, Err(panicked(&*panic)), true);
            } else {
                self.desk.lock().written(id, Err(panicked(&*panic)));
            }
        }
    }

    fn begin(&self, action: Action) {
        let (id, at, is_read) = match action {
            Action::Read { id, at } => (id, at, true),
            Action::Write { id, at } => (id, at, false),
            Action::Placed => return,
        };
        let (stored, pieces) = {
            let store = self.store();
            // Before an item has gone, no transfer of it is on its way.
            let Some(stored) = store.get(id).cloned() else { return };
            let pieces = store.pieces(&stored, 0..stored.bytes, true);
            (stored, pieces)
        };
        let start = at + stored.head;
        let result = if is_read {
            let item = |(file, offset, from, len): (_, _, usize, usize)| {
                let target = self.arena.region_mut(start + from..start + from + len);
                ReadItem { file, offset, target }
            };
            self.engine.read_batch(pieces.into_iter().map(item).collect()).map(Either::Read)
        } else {
            if self.has_sums {
                let sums = sums::sums_of(&self.arena.region(start..start + stored.bytes));
                self.store().set_sums(id, sums);
            }
            let item = |(file, offset, from, len): (_, _, usize, usize)| {
                let source = self.arena.region(start + from..start + from + len);
                WriteItem { file, offset, source }
            };
            let items = pieces.into_iter().map(item).collect();
            self.engine.write_batch(items, WriteOptions::default()).map(Either::Write)
        };
        match result {
            Ok(pending) => self.fly(Flight { id, at, stored, pending }),
            Err(error) if is_read => self.desk.lock().landed(id, Err(error.into()), true),
            Err(error) => self.desk.lock().written(id, Err(error.into())),
        }
    }

    fn fly(&self, flight: Flight) {
        // Without a descriptor to spare, the swapper's thread finds out by itself.
        if let Ok(wake) = self.wake.try_clone() {
            match &flight.pending {
                Either::Read(pending) => pending.notify(wake),
                Either::Write(pending) => pending.notify(wake),
            }
        }
        self.flights().push(flight);
        // It may have ended before it was in the list.
        self.poke();
    }

    /// Takes note of a transfer that has ended.
    fn end(&self, flight: Flight) {
        let Flight { id, at, stored, pending } = flight;
        match pending {
            Either::Read(pending) => {
                let (home, result) = pending.wait();
                let is_home = home.is_some();
                let start = at + stored.head;
                let checked = result.map_err(Error::from).and_then(|transfer| {
                    match self.damage(&stored, &self.arena.region(start..start + stored.bytes)) {
                        Some(damage) => Err(damage),
                        None => Ok(transfer.bytes),
                    }
                });
                drop(home);
                self.desk.lock().landed(id, checked, is_home);
            }
            Either::Write(pending) => {
                let result = pending.wait().1.map(|transfer| transfer.bytes).map_err(Error::from);
                self.desk.lock().written(id, result);
            }
        }
    }

    /// What is wrong with bytes that have come, if anything is.
    fn damage(&self, stored: &Stored, region: &Region) -> Option<Error> {
        let (at, expected, found) = sums::first_difference(region, stored.sums.as_ref()?)?;
        let place = self.store().pieces(stored, at..at + 1, false).into_iter().next();
        let (path, offset) =
            place.map_or((PathBuf::new(), 0), |(file, offset, ..)| (file.path().to_path_buf(), offset));
        Some(Error::Corrupt { path, offset, key: stored.key.to_string(), expected, found })
    }

    /// The swapper's own thread.
    pub(crate) fn run(&self) {
        loop {
            let limit = (!self.flights().is_empty()).then_some(&LOOK_AGAIN);
            wait_for_wake(&self.wake, limit);
            let mut count = [0; 8];
            let _ = rustix::io::read(&self.wake, &mut count);
            if self.is_over.load(Ordering::Acquire) {
                return;
            }
            // What was decided and not begun is lost with a panic. Whoever waits for it is told, and nothing is begun any more.
            if catch_unwind(AssertUnwindSafe(|| self.advance())).is_err() {
                self.desk.lock().is_broken = true;
                self.desk.notify();
                return;
            }
        }
    }

    /// Begins nothing more, tells all who wait, and has the thread end.
    pub(crate) fn close(&self) {
        self.desk.lock().is_closed = true;
        self.desk.notify();
        self.is_over.store(true, Ordering::Release);
        self.poke();
    }

    /// Waits for what is on its way, as far as the disk has begun it: after the end nobody needs the rest.
    pub(crate) fn drain(&self) {
        loop {
            let flights = std::mem::take(&mut *self.flights());
            if flights.is_empty() {
                return;
            }
            flights.iter().for_each(|flight| flight.pending.cancel());
            flights.into_iter().for_each(|flight| self.end_or_fail(flight));
        }
    }
}

fn panicked(panic: &(dyn Any + Send)) -> Error {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    Error::Panicked(text.unwrap_or("without a message").to_owned())
}

#[cfg(all(test, not(loom), not(simulated)))]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use std::time::{Duration, Instant};

    use deepnvme_io::Config;

    use super::*;
    use crate::swapper::{Options, Swapper};

    #[test]
    fn a_panic_is_an_error_for_whoever_waits() {
        let folder = tempfile::tempdir().unwrap();
        let engine = Arc::new(Engine::new(Config::default()).unwrap());
        let swapper = Swapper::new(engine, &Options::new(folder.path(), 4096)).unwrap();
        for key in ["odd", "sound"] {
            swapper.put(key, &Region::from_vec(vec![7; 4096])).unwrap();
        }
        swapper.flush(None, &mut || false).unwrap();
        let id = swapper.shared().desk.lock().residency.find("odd").unwrap();
        let stored = swapper.shared().store().get(id).unwrap().clone();
        // As a bug would: its bytes reach beyond the memory.
        swapper.shared().store().insert(id, Stored { bytes: 1 << 40, ..stored });
        let began = Instant::now();
        let mut look = || began.elapsed() > Duration::from_secs(60);
        let failed = swapper.lend("odd", false, &mut look).unwrap_err();
        assert!(matches!(failed, Error::Panicked(_)), "{failed}");
        // Others go on.
        drop(swapper.lend("sound", true, &mut look).unwrap());
        swapper.close();
    }
}
