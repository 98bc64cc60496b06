//! Parameters of a world, and their random choice.

use deepnvme_simulation_runtime::thread::ProcessId;
use deepnvme_testkit::rng::Rng;

use super::tree::Losses;

/// The kind of calls that count towards a power cut. A death counts all calls of its process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FaultTrigger {
    /// All calls.
    Steps,
    /// Calls that change something. They are rarer, and most bugs show around them.
    Changes,
    /// All calls, but a power cut or a death may move to soon after a rename or removal, where even more bugs show.
    AfterRenames {
        /// Renames that qualify, per thousand.
        chance: u32,
    },
}

impl FaultTrigger {
    fn draw(rng: &mut Rng) -> Self {
        let chance = rng.pick(&[30, 100, 200]);
        rng.pick(&[Self::Steps, Self::Changes, Self::AfterRenames { chance }])
    }
}

/// Parameters of a world.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Number of disks.
    pub disks: usize,
    /// Whether files can be created without a name.
    pub has_unnamed: bool,
    /// Whether files can be locked.
    pub has_locks: bool,
    /// Whether files have creation times.
    pub has_birth_times: bool,
    /// Whether files support direct I/O.
    pub has_direct: bool,
    /// Calls that fail, per thousand.
    pub failing_per_mille: u32,
    /// Losses of a power cut.
    pub losses: Losses,
    /// Step of the power cut.
    pub power_cut_at: Option<u64>,
    /// Process that dies, and the step of its own at which it does.
    pub killed: Option<(ProcessId, u64)>,
    /// Kind of calls that count towards the power cut.
    pub fault_trigger: FaultTrigger,
}

impl Setup {
    /// Draws a setup from the seed.
    #[must_use]
    pub fn draw(rng: &mut Rng) -> Self {
        Self {
            disks: 3,
            has_unnamed: rng.chance(600),
            has_locks: rng.chance(850),
            has_birth_times: rng.chance(850),
            has_direct: rng.chance(500),
            failing_per_mille: if rng.chance(300) { rng.within(1..40) as u32 } else { 0 },
            losses: Losses::draw(rng),
            power_cut_at: None,
            killed: None,
            fault_trigger: FaultTrigger::draw(rng),
        }
    }
}
