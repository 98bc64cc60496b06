//! Counters of streaming.

use std::time::Duration;

use crate::sync::Instant;

/// Counters of a [`Streamer`](crate::Streamer) or [`SparseRowCache`](crate::SparseRowCache) since its creation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StreamStats {
    /// Bytes read from disk.
    pub bytes_read: u64,
    /// Groups (or rows) fetched.
    pub fetches: u64,
    /// Groups prefetched.
    pub fetches_ahead: u64,
    /// Acquired groups (or rows) that were in memory.
    pub hits: u64,
    /// Acquired groups (or rows) that were waited for.
    pub waits: u64,
    /// The time spent waiting.
    pub stalled: Duration,
    /// The time with at least one fetch in flight.
    pub disk_busy: Duration,
    /// The wall time of decoding, summed over threads.
    pub converting: Duration,
}

/// Sums intervals that may overlap, counting shared time once.
#[derive(Debug, Default)]
pub(crate) struct Busy {
    until: Option<Instant>,
}

impl Busy {
    /// The time that an interval adds. Intervals come roughly in the order of their starts.
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
    fn overlapping_time_counts_once() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut busy = Busy::default();
        let added = [(0, 10), (5, 15), (6, 12), (20, 30)].map(|(from, to)| busy.add(at(from), at(to)).as_millis());
        assert_eq!(added, [10, 5, 0, 10]);
    }
}
