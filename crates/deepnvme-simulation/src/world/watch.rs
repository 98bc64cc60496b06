//! Looks at what a crash would leave, at moments that nobody knows before the execution is over.

use deepnvme_testkit::rng::Rng;

use super::World;

/// Changes after a renaming or a removal for which it counts as recent: the syncs that must follow it are among them.
pub(super) const RECENT_CHANGES: u64 = 6;

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

/// Keeps the best of all moments, and tells somebody of each that is the best so far.
pub(super) struct Watch {
    /// How good each of the kept ones is, by its place.
    ranks: Vec<u64>,
    rng: Rng,
    look: Box<Look>,
}

/// Is given the machine as it would be, the step, and the place of the look: a later one may take the place of an earlier.
type Look = dyn FnMut(World, u64, usize) + Send;

impl std::fmt::Debug for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watch").field("ranks", &self.ranks).finish_non_exhaustive()
    }
}

impl Watch {
    pub(super) fn new(looks: usize, rng: Rng, look: impl FnMut(World, u64, usize) + Send + 'static) -> Self {
        Self { ranks: vec![0; looks], rng, look: Box::new(look) }
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

    pub(super) fn rng(&mut self) -> &mut Rng {
        &mut self.rng
    }

    pub(super) fn look(&mut self, world: World, step: u64, place: usize) {
        (self.look)(world, step, place);
    }
}
