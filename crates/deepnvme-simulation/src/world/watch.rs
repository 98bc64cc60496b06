//! When to look at what a crash would leave: at moments that nobody knows before the execution is over, or at all of them.
//! The machine is copied in that instant.

use std::ops::Range;
use std::path::PathBuf;

use deepnvme_testkit::rng::Rng;

use super::setup::Setup;
use super::snapshot::Snapshot;

/// What a moment is like. How much rather a look is taken then than at any other is its number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Moment {
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
    pub(super) disks: Snapshot,
    pub(super) setup: Setup,
    pub(super) replaceable: Vec<PathBuf>,
    pub(super) seed: u64,
    /// The step.
    pub step: u64,
}

/// Chooses the moments, and tells somebody of them.
pub(super) struct Watch {
    pub(super) looks: Looks,
    /// Where some are chosen: how good each of the kept ones is, by its place.
    ranks: Vec<u64>,
    /// How many there were.
    pub(super) moments: u64,
    rng: Rng,
    pub(super) seed: u64,
    pub(super) look: Box<Look>,
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

    /// Whether to look now, and as which.
    pub(super) fn place(&mut self, moment: Moment) -> Option<usize> {
        let rank = (0..moment as u32).map(|_| self.rng.next_u64()).max()?;
        let (place, lowest) = self.ranks.iter_mut().enumerate().min_by_key(|(_, rank)| **rank)?;
        (rank > *lowest).then(|| {
            *lowest = rank;
            place
        })
    }
}
