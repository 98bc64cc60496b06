//! Choose the moments to try a crash: at random, without knowing the execution's length, or all of them. The machine is
//! copied at each moment.

use std::ops::Range;
use std::path::PathBuf;

use deepnvme_testkit::rng::Rng;

use super::setup::Setup;
use super::snapshot::Snapshot;

/// The kind of a crash point. Its number is its weight when crash points are drawn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum CrashPointKind {
    /// Most moments.
    Any = 1,
    /// Soon after a rename or removal.
    Recent = 4,
    /// Like `Recent`, before a folder sync: with several disks, most changes are then pending.
    Sync = 12,
}

/// Moments to try a crash.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CrashPoints {
    /// At this many moments, preferably soon after a rename.
    Sampled(usize),
    /// Before each change of names, lengths and bytes, and before each sync takes effect, at the moments with these
    /// numbers.
    All(Range<u64>),
}

/// The machine at a moment.
#[derive(Clone, Debug)]
pub struct MachineSnapshot {
    pub(super) disks: Snapshot,
    pub(super) setup: Setup,
    pub(super) replaceable: Vec<PathBuf>,
    pub(super) seed: u64,
    /// The step of the moment.
    pub step: u64,
}

/// Pick the crash points, and pass on the snapshots.
pub(super) struct CrashPointPicker {
    pub(super) points: CrashPoints,
    /// Weighted random keys of the kept crash points, by slot.
    keys: Vec<u64>,
    /// Crash points so far.
    pub(super) points_seen: u64,
    rng: Rng,
    pub(super) seed: u64,
    pub(super) on_snapshot: Box<OnSnapshot>,
}

/// Called with a snapshot and its slot. A later snapshot may replace an earlier one.
type OnSnapshot = dyn FnMut(MachineSnapshot, usize) + Send;

impl std::fmt::Debug for CrashPointPicker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CrashPointPicker")
            .field("points", &self.points)
            .field("keys", &self.keys)
            .finish_non_exhaustive()
    }
}

impl CrashPointPicker {
    pub(super) fn new(
        points: CrashPoints,
        mut rng: Rng,
        on_snapshot: impl FnMut(MachineSnapshot, usize) + Send + 'static,
    ) -> Self {
        let keys = vec![0; if let CrashPoints::Sampled(count) = points { count } else { 0 }];
        let seed = rng.next_u64();
        Self { points, keys, points_seen: 0, rng, seed, on_snapshot: Box::new(on_snapshot) }
    }

    /// Decides whether to take a snapshot now. Returns its slot.
    pub(super) fn slot(&mut self, kind: CrashPointKind) -> Option<usize> {
        let key = (0..kind as u32).map(|_| self.rng.next_u64()).max()?;
        let (slot, lowest) = self.keys.iter_mut().enumerate().min_by_key(|(_, key)| **key)?;
        (key > *lowest).then(|| {
            *lowest = key;
            slot
        })
    }
}
