//! What streaming has cost so far.

use std::time::Duration;

use crate::sync::Instant;

/// Counters of a [`Streamer`](crate::Streamer) since it was made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StreamStats {
    /// Bytes that were fetched.
    pub bytes_read: u64,
    /// Units that were fetched.
    pub fetches: u64,
    /// Of those, units that nobody had called for yet.
    pub fetches_ahead: u64,
    /// Calls for units that were there.
    pub hits: u64,
    /// Calls that had to wait.
    pub waits: u64,
    /// How long those waited.
    pub stalled: Duration,
    /// How long at least one fetch was on its way.
    pub disk_busy: Duration,
    /// How long processors converted what had arrived, added up over threads.
    pub converting: Duration,
}

/// The time in which something was on its way, out of intervals that overlap.
#[derive(Debug, Default)]
pub(crate) struct Busy {
    until: Option<Instant>,
}

impl Busy {
    /// What an interval adds. Those that began earlier come first, nearly.
    pub(crate) fn add(&mut self, from: Instant, to: Instant) -> Duration {
        let from = self.until.map_or(from, |until| until.max(from));
        self.until = Some(self.until.map_or(to, |until| until.max(to)));
        to.saturating_duration_since(from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_that_two_share_counts_once() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut busy = Busy::default();
        let added = [(0, 10), (5, 15), (6, 12), (20, 30)].map(|(from, to)| busy.add(at(from), at(to)).as_millis());
        assert_eq!(added, [10, 5, 0, 10]);
    }
}
