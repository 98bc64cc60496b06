//! Looks at what a crash would leave: at moments that nobody knows before the execution is over, or at all of them.

use std::ops::Range;
use std::path::PathBuf;

use deepnvme_testkit::rng::Rng;
use rustix::io::Errno;

use super::machine::SYNC_OF_NAMES;
use super::snapshot::Snapshot;
use super::tree::Losses;
use super::{Setup, State, World};

/// Changes after a renaming or a removal for which it counts as recent: the syncs that must follow it are among them.
const RECENT_CHANGES: u64 = 6;

/// What a moment is like. How much rather a look is taken then than at any other is its number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Moment {
    /// Like most.
    Any = 1,
    /// Something has been renamed or removed just before.
    Recent = 4,
    /// The same, and a folder is about to be synced: of what lies on several disks, most hangs in the air.
    Sync = 12,
}

/// When to look.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Looks {
    /// At so many moments, soon after a renaming rather than at any other.
    Some(usize),
    /// Before each change of names, lengths and bytes, and before each sync takes effect; of all these moments at those with
    /// these numbers.
    Every(Range<u64>),
}

/// The machine in an instant.
#[derive(Clone, Debug)]
pub struct Instant {
    disks: Snapshot,
    setup: Setup,
    replaceable: Vec<PathBuf>,
    seed: u64,
    /// The step.
    pub step: u64,
}

impl Instant {
    /// The machine as it is when all processes die in that instant, or when the power fails. Nothing else fails in it.
    ///
    /// # Errors
    /// When the kernel gives no memory.
    pub fn after_crash(&self, is_cut: bool) -> Result<World, Errno> {
        let mut state = State::new(self.seed, self.setup.clone(), self.disks.restored()?);
        state.replaceable.clone_from(&self.replaceable);
        state.calm();
        let world = World::of(state);
        if is_cut {
            world.restart()?;
        }
        Ok(world)
    }
}

/// Chooses the moments, and tells somebody of them.
pub(super) struct Watch {
    looks: Looks,
    /// Where some are chosen: how good each of the kept ones is, by its place.
    ranks: Vec<u64>,
    /// How many there were.
    moments: u64,
    rng: Rng,
    seed: u64,
    look: Box<Look>,
}

/// Is given the machine and the place of the look: a later one may take the place of an earlier.
type Look = dyn FnMut(Instant, usize) + Send;

impl std::fmt::Debug for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watch").field("looks", &self.looks).field("ranks", &self.ranks).finish_non_exhaustive()
    }
}

impl Watch {
    pub(super) fn new(looks: Looks, mut rng: Rng, look: impl FnMut(Instant, usize) + Send + 'static) -> Self {
        let ranks = vec![0; if let Looks::Some(count) = looks { count } else { 0 }];
        let seed = rng.next_u64();
        Self { looks, ranks, moments: 0, rng, seed, look: Box::new(look) }
    }

    pub(super) fn moments(&self) -> u64 {
        self.moments
    }

    /// Whether to look now, and as which.
    fn place(&mut self, moment: Moment) -> Option<usize> {
        let rank = (0..moment as u32).map(|_| self.rng.next_u64()).max()?;
        let (place, lowest) = self.ranks.iter_mut().enumerate().min_by_key(|(_, rank)| **rank)?;
        (rank > *lowest).then(|| {
            *lowest = rank;
            place
        })
    }
}

impl State {
    /// Some call that decides what a crash leaves is about to be made.
    pub(super) fn look_before(&mut self, what: &str) {
        let is_recent = self.changes_by_renaming.is_some_and(|by| self.changes <= by + RECENT_CHANGES);
        let is_sync = [SYNC_OF_NAMES.0, SYNC_OF_NAMES.1].contains(&what);
        let moment = match (is_recent, is_sync) {
            (true, true) => Moment::Sync,
            (true, false) => Moment::Recent,
            (false, _) => Moment::Any,
        };
        if let Some(watch) = self.watch.as_mut().filter(|watch| !matches!(watch.looks, Looks::Every(_)))
            && let Some(place) = watch.place(moment)
        {
            self.show(place);
        }
    }

    /// The machine is about to change. Between two changes most has been promised by the end: there each of its states is
    /// looked at, once.
    pub(crate) fn before_change(&mut self) {
        let Some(Watch { looks: Looks::Every(numbers), moments, .. }) = &mut self.watch else { return };
        let number = *moments;
        *moments += 1;
        if numbers.contains(&number) {
            self.show(number as usize);
        }
    }

    /// Shows the machine to whoever watches.
    fn show(&mut self, place: usize) {
        let Some(mut watch) = self.watch.take() else { return };
        match self.tree.snapshot() {
            Ok(disks) => {
                // What this machine loses at the end says nothing of what it would lose now.
                let mut rng = Rng::keyed(watch.seed, &[place as u64, self.steps]);
                let setup = Setup { losses: Losses::draw(&mut rng), ..self.setup.clone() };
                let (replaceable, step) = (self.replaceable.clone(), self.steps);
                (watch.look)(Instant { disks, setup, replaceable, seed: rng.next_u64(), step }, place);
            }
            Err(errno) => self.violations.push(format!("no copy of the disks: {errno}")),
        }
        self.watch = Some(watch);
    }
}
