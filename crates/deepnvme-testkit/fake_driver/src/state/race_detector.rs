//! The race detector: ops that the host has not synchronised with, and the order between them.
//!
//! Each op has a clock: per stream, the number of ops that are guaranteed to complete before it starts (the order of
//! its own stream, events it waits for, the implicit order of the legacy default stream). Two ops on the same bytes, at
//! least one of them writing, must be ordered by their clocks. An op stays in the list until the host has *observed*
//! its completion: by synchronising its stream or a later event, by a successful query, or in a host function after it.
//! An op that happens to be complete is not observed, so finding a race does not depend on the speed of the machine.
//!
//! Synchronous operations of the host (cuFile's calls, entries of its batches) belong to no stream: they are ordered
//! after everything observed, and before everything that follows their end.

use super::clock::{Clock, Point};
use crate::access::Access;

/// The maximum number of completed but unobserved ops that are kept.
const UNOBSERVED_MAX: usize = 4096;

/// An op in the list.
#[derive(Clone, Debug)]
pub(crate) struct TrackedOp {
    pub(crate) point: Point,
    pub(crate) label: &'static str,
    pub(crate) uses: Vec<Access>,
    pub(crate) clock: Clock,
    pub(crate) over: bool,
}

/// The unobserved ops.
#[derive(Debug, Default)]
pub(crate) struct RaceDetector {
    entries: Vec<TrackedOp>,
    observed: Clock,
}

impl RaceDetector {
    /// Adds an op. Returns its violations.
    pub(crate) fn begin(&mut self, entry: TrackedOp) -> Vec<String> {
        if entry.uses.is_empty() {
            return Vec::new();
        }
        let found = self.entries.iter().filter_map(|other| race(other, &entry)).collect();
        self.entries.push(entry);
        found
    }

    /// Corrects the bytes of an op, which were unknown before it ran.
    pub(crate) fn correct(&mut self, point: Point, used: Access) -> Vec<String> {
        let Some(index) = self.entries.iter().position(|entry| entry.point == point) else { return Vec::new() };
        let mut entry = self.entries.swap_remove(index);
        if entry.uses == [used] {
            self.entries.push(entry);
            return Vec::new();
        }
        entry.uses = vec![used];
        self.begin(entry)
    }

    /// Marks an op of a stream as complete. It stays in the list until observed.
    pub(crate) fn end(&mut self, point: Point) {
        let observed = self.observed.covers(point);
        if let Some(index) = self.entries.iter().position(|entry| entry.point == point) {
            self.entries[index].over = true;
            if observed {
                self.entries.remove(index);
            }
        }
        if self.entries.len() > UNOBSERVED_MAX
            && let Some(oldest) = self.entries.iter().position(|entry| entry.over)
        {
            self.entries.remove(oldest);
        }
    }

    /// Removes a synchronous operation of the host.
    pub(crate) fn forget(&mut self, point: Point) {
        self.entries.retain(|entry| entry.point != point);
    }

    /// Marks everything before a clock as observed.
    pub(crate) fn observe(&mut self, clock: &Clock) {
        self.observed.join(clock);
        let observed = &self.observed;
        self.entries.retain(|entry| !(entry.over && observed.covers(entry.point)));
    }

    /// Returns unobserved ops on bytes of the range.
    pub(crate) fn users(&self, start: u64, bytes: usize) -> impl Iterator<Item = &TrackedOp> {
        let range = Access::line(start, bytes, true);
        self.entries.iter().filter(move |entry| entry.uses.iter().any(|used| used.overlaps(&range)))
    }

    /// Removes completed ops on a freed range: they do not concern its next owner.
    pub(crate) fn forget_range(&mut self, start: u64, bytes: usize) {
        let range = Access::line(start, bytes, true);
        self.entries.retain(|entry| !(entry.over && entry.uses.iter().any(|used| used.overlaps(&range))));
    }
}

fn race(earlier: &TrackedOp, later: &TrackedOp) -> Option<String> {
    if earlier.point.stream == later.point.stream
        || later.clock.covers(earlier.point)
        || earlier.clock.covers(later.point)
    {
        return None;
    }
    let pairs = earlier.uses.iter().flat_map(|a| later.uses.iter().map(move |b| (a, b)));
    let (_, used) = pairs.into_iter().find(|(a, b)| a.conflicts(b))?;
    Some(format!(
        "race: {} (stream {:#x}, op {}) and {} (stream {:#x}, op {}) use the same bytes near {:#x}, without order",
        earlier.label,
        earlier.point.stream,
        earlier.point.seq,
        later.label,
        later.point.stream,
        later.point.seq,
        used.start,
    ))
}

#[cfg(test)]
mod tests {
    use super::super::clock::StreamId;
    use super::*;

    fn entry(stream: u64, seq: u64, start: u64, writes: bool, after: &[Point]) -> TrackedOp {
        let point = Point { stream: StreamId(stream), seq };
        let mut clock = Clock::default();
        after.iter().for_each(|point| clock.reach(*point));
        clock.reach(point);
        TrackedOp { point, label: "op", uses: vec![Access::line(start, 10, writes)], clock, over: false }
    }

    #[test]
    fn unordered_writers_race_and_readers_do_not() {
        let mut tracker = RaceDetector::default();
        assert!(tracker.begin(entry(1, 1, 100, false, &[])).is_empty());
        assert!(tracker.begin(entry(2, 1, 105, false, &[])).is_empty());
        assert!(tracker.begin(entry(3, 1, 110, true, &[])).len() == 1, "only stream 2 reads there");
        assert!(tracker.begin(entry(4, 1, 200, true, &[])).is_empty());
    }

    #[test]
    fn order_comes_from_events_and_from_the_host_that_waited() {
        let mut tracker = RaceDetector::default();
        let first = Point { stream: StreamId(1), seq: 1 };
        assert!(tracker.begin(entry(1, 1, 0, true, &[])).is_empty());
        assert!(tracker.begin(entry(2, 1, 0, true, &[first])).is_empty());
        tracker.end(first);
        assert_eq!(tracker.begin(entry(3, 1, 0, true, &[])).len(), 2, "being over is not being waited for");
        tracker.end(Point { stream: StreamId(3), seq: 1 });
        let mut seen = Clock::default();
        seen.reach(first);
        tracker.observe(&seen);
        assert_eq!(tracker.users(0, 1).count(), 2, "of the other two, one is over, but nobody has waited for it");
    }
}
