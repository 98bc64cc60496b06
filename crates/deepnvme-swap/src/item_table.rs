//! Where slots change hands: whoever wants an item comes here, waits here, and returns it here.
//!
//! One lock has the state of all items and all who wait; one condition variable wakes them when anything has changed. The
//! interleavings are checked by `loom_tests`.

use std::collections::HashMap;
use std::time::Duration;

use crate::deadlock::{On, Waits, Who};
use crate::residency::{Action, Mode, Residency, Take};
use crate::slot_allocator::Id;
use crate::stats::SwapStats;
use crate::sync::outer::Instant;
use crate::sync::{Condvar, Mutex, MutexGuard, lock, wait};

/// How often somebody who waits may look for a reason to stop.
const SLICE: Duration = Duration::from_millis(50);

/// The state of all items, and all who wait for them.
#[derive(Debug)]
pub(crate) struct Desk<E> {
    core: Mutex<Core<E>>,
    changed: Condvar,
}

/// What is under the lock.
#[derive(Debug)]
pub(crate) struct Core<E> {
    pub(crate) residency: Residency,
    pub(crate) stats: SwapStats,
    pub(crate) is_closed: bool,
    /// The swapper's thread has panicked.
    pub(crate) is_broken: bool,
    waits: Waits,
    /// Items that are no more, and whose room on disk is being freed.
    freeing: usize,
    /// What has been decided and not been begun.
    decided: Vec<Action>,
    /// Grows with every failure, so that each who waits knows those that came after it had begun.
    failures: u64,
    read_errors: HashMap<Id, (u64, E)>,
    write_error: Option<(u64, E)>,
}

/// Why somebody did not get an item.
#[derive(Debug)]
pub(crate) enum Refusal<E> {
    Gone,
    Closed,
    Broken,
    Interrupted,
    Failed(E),
    /// What it would wait for, how many lends the thread has, and how many there are in all.
    Deadlock(On, usize, usize),
}

impl<E: Clone> Desk<E> {
    pub(crate) fn new(residency: Residency) -> Self {
        let core = Core {
            residency,
            stats: SwapStats::default(),
            is_closed: false,
            is_broken: false,
            waits: Waits::default(),
            freeing: 0,
            decided: Vec::new(),
            failures: 0,
            read_errors: HashMap::new(),
            write_error: None,
        };
        Self { core: Mutex::new(core), changed: Condvar::new() }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Core<E>> {
        lock(&self.core)
    }

    /// Wakes all who wait: something has changed.
    pub(crate) fn notify(&self) {
        self.changed.notify_all();
    }

    /// Waits until the item is the caller's, who has to return it. `advance` has the disk do what there is to do, `look`
    /// says now and then whether to stop.
    pub(crate) fn take(
        &self,
        id: Id,
        mode: Mode,
        who: Who,
        advance: &dyn Fn(),
        look: &mut dyn FnMut() -> bool,
    ) -> Result<Option<usize>, Refusal<E>> {
        let mut core = self.lock();
        let began = core.failures;
        let mut waited: Option<Instant> = None;
        let (mut has_demand, mut has_told) = (false, false);
        let taken = loop {
            if core.is_closed {
                break Err(Refusal::Closed);
            }
            if core.is_broken {
                break Err(Refusal::Broken);
            }
            let on = match core.residency.take(id, mode) {
                Take::Held(at) => {
                    core.waits.hold(id, who);
                    break Ok(at);
                }
                Take::Gone => break Err(Refusal::Gone),
                Take::Others => On::Item(id),
                Take::Io => On::Io(id),
                Take::Memory => On::Memory(id),
            };
            if let Some((when, error)) = core.read_errors.get(&id)
                && *when > began
            {
                break Err(Refusal::Failed(error.clone()));
            }
            waited.get_or_insert_with(Instant::now);
            core.waits.wait(who, on);
            if on == On::Memory(id) && !has_demand {
                has_demand = true;
                core.residency.demand(id, mode);
                drop(core);
                advance();
                core = self.lock();
                continue;
            }
            // A transfer may have ended a moment ago, so that there is something to do before anything is hopeless.
            if core.decide() {
                drop(core);
                self.changed.notify_all();
                advance();
                core = self.lock();
                continue;
            }
            let is_busy = core.residency.in_flight() > 0;
            if on == On::Memory(id)
                && !is_busy
                && let Some((when, error)) = &core.write_error
                && *when > began
            {
                break Err(Refusal::Failed(error.clone()));
            }
            if core.is_hopeless(who) {
                let (own, all) = core.waits.count(who);
                if own > 0 || all == 0 {
                    break Err(Refusal::Deadlock(on, own, all));
                }
                // Who holds nothing is in nobody's way: those who hold each other up are told, and then there is room.
                if !has_told {
                    has_told = true;
                    self.changed.notify_all();
                }
            }
            core = wait(&self.changed, core, SLICE);
            drop(core);
            let stop = look();
            core = self.lock();
            if stop {
                break Err(Refusal::Interrupted);
            }
        };
        core.waits.go_on(who);
        if has_demand {
            core.residency.undemand(id, mode);
            // A place that was kept for this one is somebody else's now.
            self.changed.notify_all();
        }
        let stalled = waited.map(|since| since.elapsed());
        if taken.is_ok() && !matches!(mode, Mode::Pin | Mode::Claim) {
            core.stats.hits += u64::from(stalled.is_none());
            core.stats.waits += u64::from(stalled.is_some());
        }
        core.stats.stalled += stalled.unwrap_or_default();
        taken
    }

    /// Takes an item back from whom it was lent to.
    pub(crate) fn give_back(&self, id: Id, mode: Mode, who: Who, is_dirty: bool) {
        let mut core = self.lock();
        core.waits.release(id, who);
        core.residency.release(id, mode, is_dirty);
        drop(core);
        self.changed.notify_all();
    }

    /// Waits until nothing of that is true any more, or a write has failed after so many failures. Items that the calling
    /// thread holds itself would never be returned.
    pub(crate) fn wait_while(
        &self,
        (who, began): (Who, u64),
        advance: &dyn Fn(),
        look: &mut dyn FnMut() -> bool,
        mut is_so: impl FnMut(&mut Core<E>) -> Option<On>,
    ) -> Result<(), Refusal<E>> {
        let mut core = self.lock();
        let done = loop {
            if core.is_closed {
                break Err(Refusal::Closed);
            }
            if core.is_broken {
                break Err(Refusal::Broken);
            }
            let Some(on) = is_so(&mut core) else { break Ok(()) };
            if let Some((when, error)) = &core.write_error
                && *when > began
            {
                break Err(Refusal::Failed(error.clone()));
            }
            core.waits.wait(who, on);
            if core.decide() {
                drop(core);
                advance();
                core = self.lock();
                continue;
            }
            if core.is_hopeless(who) {
                let (own, all) = core.waits.count(who);
                break Err(Refusal::Deadlock(on, own, all));
            }
            core = wait(&self.changed, core, SLICE);
            drop(core);
            let stop = look();
            core = self.lock();
            if stop {
                break Err(Refusal::Interrupted);
            }
        };
        core.waits.go_on(who);
        done
    }
}

impl<E> Core<E> {
    /// Whether there is something to do that nobody has begun.
    fn decide(&mut self) -> bool {
        let before = self.decided.len();
        if !self.is_closed {
            self.decided.extend(std::iter::from_fn(|| self.residency.next()));
        }
        self.decided.len() > before
    }

    /// All that there is to do, for whoever does it.
    pub(crate) fn take_decided(&mut self) -> Vec<Action> {
        self.decide();
        if self.is_closed { Vec::new() } else { std::mem::take(&mut self.decided) }
    }

    /// How often something has failed.
    pub(crate) fn failures(&self) -> u64 {
        self.failures
    }

    fn is_hopeless(&self, who: Who) -> bool {
        self.waits.is_hopeless(who, self.residency.in_flight() > 0, |id| self.residency.is_settled(id))
    }

    /// A read has ended.
    pub(crate) fn landed(&mut self, id: Id, result: Result<u64, E>, is_home: bool) {
        self.residency.landed(id, result.is_ok(), is_home);
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

    /// A write has ended.
    pub(crate) fn written(&mut self, id: Id, result: Result<u64, E>) {
        self.residency.written(id, result.is_ok());
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

    /// Whether there will be more room on disk without anybody's doing.
    pub(crate) fn is_freeing(&self) -> bool {
        self.freeing > 0 || self.residency.has_gone() || self.residency.is_burying()
    }

    /// The room of so many items that were taken is free.
    pub(crate) fn freed(&mut self, items: usize) {
        self.freeing -= items;
    }

    /// Items that are no more, of which nothing is known any more. Whoever takes them frees their room, and says so.
    pub(crate) fn take_gone(&mut self) -> Vec<Id> {
        let gone = self.residency.take_gone();
        self.freeing += gone.len();
        gone.iter().for_each(|id| drop(self.read_errors.remove(id)));
        gone
    }
}
