//! What a world is like.

use deepnvme_simulation_runtime::thread::ProcessId;
use deepnvme_testkit::rng::Rng;

use super::tree::Losses;

/// At which calls of the code under test the power fails, or a process dies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Aim {
    /// At any.
    Steps,
    /// At those that change something, of which there are fewer. Most of what can go wrong goes wrong around them.
    Changes,
    /// Soon after one of the renamings and removals, where even more can.
    Renamings {
        /// After how many of a thousand.
        chance: u32,
    },
}

impl Aim {
    fn draw(rng: &mut Rng) -> Self {
        let chance = rng.pick(&[30, 100, 200]);
        rng.pick(&[Self::Steps, Self::Changes, Self::Renamings { chance }])
    }
}

/// What a world is like.
#[derive(Clone, Debug)]
pub struct Setup {
    /// How many disks it has.
    pub disks: usize,
    /// Whether files can be made without a name.
    pub has_unnamed: bool,
    /// Whether files can be locked.
    pub has_locks: bool,
    /// Whether files know when they were made.
    pub has_birth_times: bool,
    /// Whether files can be opened past the page cache.
    pub has_direct: bool,
    /// Calls that fail, of a thousand.
    pub failing: u32,
    /// What a power cut takes.
    pub losses: Losses,
    /// The step at which the power fails.
    pub power_cut_at: Option<u64>,
    /// The process that dies, and at which of its own steps.
    pub killed: Option<(ProcessId, u64)>,
    /// Which calls these steps are.
    pub aim: Aim,
}

impl Setup {
    /// One that a seed draws.
    #[must_use]
    pub fn draw(rng: &mut Rng) -> Self {
        Self {
            disks: 3,
            has_unnamed: rng.chance(600),
            has_locks: rng.chance(850),
            has_birth_times: rng.chance(850),
            has_direct: rng.chance(500),
            failing: if rng.chance(300) { rng.within(1..40) as u32 } else { 0 },
            losses: Losses::draw(rng),
            power_cut_at: None,
            killed: None,
            aim: Aim::draw(rng),
        }
    }
}
