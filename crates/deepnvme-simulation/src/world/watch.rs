//! Choose the moments to try a crash: at random, without knowing the execution's length, or all of them. The machine is
//! copied at each moment.

use std::ops::Range;
use std::path::PathBuf;

use deepnvme_testkit::rng::Rng;

use super::setup::Setup;
use super::snapshot::Snapshot;

/// The kind of a moment. Its number is its weight when moments are chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Moment {
    /// Most moments.
    Any = 1,
    /// Soon after a rename or removal.
    Recent = 4,
    /// Like `Recent`, before a folder sync: with several disks, most changes are then pending.
    Sync = 12,
}

/// Moments to look at.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Looks {
    /// At this many moments, preferably soon after a rename.
    Some(usize),
    /// Before each change of names, lengths and bytes, and before each sync takes effect, at the moments with these
    /// numbers.
    Every(Range<u64>),
}

/// The machine at a moment.
#[derive(Clone, Debug)]
pub struct Instant {
    pub(super) disks: Snapshot,
    pub(super) setup: Setup,
    pub(super) replaceable: Vec<PathBuf>,
    pub(super) seed: u64,
    /// The step of the moment.
    pub step: u64,
}

/// Choose the moments, and report them.
pub(super) struct Watch {
    pub(super) looks: Looks,
    /// Weighted random keys of the kept moments, by place.
    ranks: Vec<u64>,
    /// Moments so far.
    pub(super) moments: u64,
    rng: Rng,
    pub(super) seed: u64,
    pub(super) look: Box<Look>,
}

/// Called with the machine and the look's place. A later look may replace an earlier one.
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

    /// Decide whether to look now. Returns the look's place.
    pub(super) fn place(&mut self, moment: Moment) -> Option<usize> {
        let rank = (0..moment as u32).map(|_| self.rng.next_u64()).max()?;
        let (place, lowest) = self.ranks.iter_mut().enumerate().min_by_key(|(_, rank)| **rank)?;
        (rank > *lowest).then(|| {
            *lowest = rank;
            place
        })
    }
}
