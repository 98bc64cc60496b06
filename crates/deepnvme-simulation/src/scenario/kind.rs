//! What an execution is about, and how a seed draws it.

use deepnvme_testkit::rng::Rng;

/// What an execution is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Files that several threads and processes replace.
    Files,
    /// Stripe sets that they replace.
    Stripes,
    /// Folders of checkpoints, of which the last few are kept.
    History,
    /// Swap files.
    Swap,
    /// Checkpoints, by the code that saves and loads them.
    Saves,
    /// The same over several files, which an index lists.
    Shards,
    /// Checkpoints that several ranks write together.
    Ranks,
    /// Models that are packed.
    Packs,
    /// Requests to engines, cancelled at any point.
    Transfers,
    /// Files by a saver that syncs nothing and says that it did; no seed draws this.
    Boastful,
    /// What a test does; no seed draws this.
    Script,
}

impl Kind {
    /// All that seeds draw.
    pub const ALL: [Self; 9] = [
        Self::Files,
        Self::Stripes,
        Self::History,
        Self::Swap,
        Self::Saves,
        Self::Shards,
        Self::Ranks,
        Self::Packs,
        Self::Transfers,
    ];

    /// The name by which it is asked for.
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
            Self::Packs => "packs",
            Self::Transfers => "transfers",
            Self::Boastful => "boastful",
            Self::Script => "script",
        }
    }
}

/// Scenarios that seeds draw more often than the others: they have the most files that go together, and what can go wrong
/// with those goes wrong in few executions.
const MORE: [Kind; 4] = [Kind::Stripes, Kind::Stripes, Kind::Stripes, Kind::Packs];

/// What a seed is about.
#[must_use]
pub fn draw(seed: u64) -> Kind {
    let index = Rng::keyed(seed, &[0x006b_696e]).below((Kind::ALL.len() + MORE.len()) as u64) as usize;
    Kind::ALL.get(index).copied().unwrap_or_else(|| MORE[index - Kind::ALL.len()])
}
