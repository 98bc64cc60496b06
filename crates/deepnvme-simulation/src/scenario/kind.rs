//! The scenarios, and how a seed draws one.

use deepnvme_testkit::rng::Rng;

/// A scenario.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ScenarioKind {
    /// Files that several threads and processes replace.
    Files,
    /// Stripe sets that several threads and processes replace.
    Stripes,
    /// Checkpoint folders with retention.
    History,
    /// Swap files.
    Swap,
    /// Checkpoints, by the real code that saves and loads them.
    Saves,
    /// Checkpoints of several files, which an index lists.
    Shards,
    /// Checkpoints that several ranks write together.
    Ranks,
    /// Packing of models.
    Packing,
    /// Requests to engines, cancelled at any point.
    Transfers,
    /// Conversions of checkpoints. No seed draws this: that would change the scenarios of all others.
    Conversions,
    /// Gathers of rows. No seed draws this: that would change the scenarios of all others.
    Rows,
    /// Files by a saver that syncs nothing and claims it did; no seed draws this.
    Overclaiming,
    /// A test's own work; no seed draws this.
    Script,
}

impl ScenarioKind {
    /// All scenarios that seeds draw.
    pub const ALL: [Self; 9] = [
        Self::Files,
        Self::Stripes,
        Self::History,
        Self::Swap,
        Self::Saves,
        Self::Shards,
        Self::Ranks,
        Self::Packing,
        Self::Transfers,
    ];

    /// Scenarios that are run by name only.
    pub const NAMED: [Self; 2] = [Self::Conversions, Self::Rows];

    /// Returns the name for the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Files => "files",
            Self::Stripes => "stripes",
            Self::History => "history",
            Self::Swap => "swap",
            Self::Saves => "saves",
            Self::Shards => "shards",
            Self::Ranks => "ranks",
            Self::Packing => "packing",
            Self::Transfers => "transfers",
            Self::Conversions => "conversions",
            Self::Rows => "rows",
            Self::Overclaiming => "overclaiming",
            Self::Script => "script",
        }
    }
}

/// Scenarios that are drawn more often. They involve the most dependent files, and few executions reveal a bug.
const DRAWN_MORE_OFTEN: [ScenarioKind; 4] =
    [ScenarioKind::Stripes, ScenarioKind::Stripes, ScenarioKind::Stripes, ScenarioKind::Packing];
/// The key of the random numbers that choose the scenario.
const KIND_KEY: u64 = 0x006b_696e;

/// Draws a seed's scenario.
#[must_use]
pub fn draw(seed: u64) -> ScenarioKind {
    let index = Rng::keyed(seed, &[KIND_KEY]).below((ScenarioKind::ALL.len() + DRAWN_MORE_OFTEN.len()) as u64) as usize;
    ScenarioKind::ALL.get(index).copied().unwrap_or_else(|| DRAWN_MORE_OFTEN[index - ScenarioKind::ALL.len()])
}
