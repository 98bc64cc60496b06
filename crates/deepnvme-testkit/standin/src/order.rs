//! Who comes before whom: vector clocks of streams, and the ops that nobody has waited for yet.
//!
//! Each op carries a clock: per stream, how many of its ops are sure to be over before this one begins (its own
//! stream's order, events that it waits for, the implicit order of the legacy default stream). Two ops that use
//! the same bytes, at least one writing, must be ordered by their clocks. An op stays in the list until the host
//! has *observed* its end: synchronised its stream or an event behind it, asked and been told that it is over, or
//! been called behind it by a host function. That it happens to be over already saves nobody, so whether a race is
//! found does not hang on how fast a machine is.
//!
//! What the host does itself and waits for (cuFile's calls, entries of its batches) belongs to no stream: such an op
//! is ordered behind what has been observed, and in front of what comes after its end.

use std::collections::BTreeMap;

use crate::abi::Handle;
use crate::span::Use;

/// Ops that are over, but that nobody has waited for, are remembered up to this number.
const UNOBSERVED_MAX: usize = 4096;

/// A place in a stream: its op number `seq`, counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Point {
    pub(crate) stream: Handle,
    pub(crate) seq: u64,
}

/// Per stream, the number of ops that are known to come before.
#[derive(Clone, Debug, Default)]
pub(crate) struct Clock(BTreeMap<Handle, u64>);

impl Clock {
    /// Comes after `point`, too.
    pub(crate) fn reach(&mut self, point: Point) {
        let seq = self.0.entry(point.stream).or_default();
        *seq = (*seq).max(point.seq);
    }

    /// Comes after all that `other` comes after.
    pub(crate) fn join(&mut self, other: &Self) {
        for (stream, seq) in &other.0 {
            self.reach(Point { stream: *stream, seq: *seq });
        }
    }

    fn covers(&self, point: Point) -> bool {
        self.0.get(&point.stream).is_some_and(|seq| *seq >= point.seq)
    }
}

/// An op in the list.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) point: Point,
    pub(crate) label: &'static str,
    pub(crate) uses: Vec<Use>,
    pub(crate) clock: Clock,
    pub(crate) over: bool,
}

/// The ops that nobody has waited for.
#[derive(Debug, Default)]
pub(crate) struct Tracker {
    entries: Vec<Entry>,
    observed: Clock,
}

impl Tracker {
    /// Takes in a new op; returns what is wrong about it.
    pub(crate) fn begin(&mut self, entry: Entry) -> Vec<String> {
        if entry.uses.is_empty() {
            return Vec::new();
        }
        let found = self.entries.iter().filter_map(|other| race(other, &entry)).collect();
        self.entries.push(entry);
        found
    }

    /// An op learnt while it ran which bytes it uses.
    pub(crate) fn correct(&mut self, point: Point, used: Use) -> Vec<String> {
        let Some(index) = self.entries.iter().position(|entry| entry.point == point) else { return Vec::new() };
        let mut entry = self.entries.swap_remove(index);
        if entry.uses == [used] {
            self.entries.push(entry);
            return Vec::new();
        }
        entry.uses = vec![used];
        self.begin(entry)
    }

    /// An op of a stream is over; it stays in the list until that is observed.
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

    /// What the host did itself is over, and the host knows.
    pub(crate) fn forget(&mut self, point: Point) {
        self.entries.retain(|entry| entry.point != point);
    }

    /// The host has learnt that all of this is over.
    pub(crate) fn observe(&mut self, clock: &Clock) {
        self.observed.join(clock);
        let observed = &self.observed;
        self.entries.retain(|entry| !(entry.over && observed.covers(entry.point)));
    }

    /// Ops that use bytes of the range and that nobody has waited for.
    pub(crate) fn users(&self, start: u64, bytes: usize) -> impl Iterator<Item = &Entry> {
        let range = Use::line(start, bytes, true);
        self.entries.iter().filter(move |entry| entry.uses.iter().any(|used| used.overlaps(&range)))
    }

    /// The range is gone: what is over there concerns no later owner of the same addresses.
    pub(crate) fn forget_range(&mut self, start: u64, bytes: usize) {
        let range = Use::line(start, bytes, true);
        self.entries.retain(|entry| !(entry.over && entry.uses.iter().any(|used| used.overlaps(&range))));
    }
}

fn race(earlier: &Entry, later: &Entry) -> Option<String> {
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
    use super::*;

    fn entry(stream: Handle, seq: u64, start: u64, writes: bool, after: &[Point]) -> Entry {
        let point = Point { stream, seq };
        let mut clock = Clock::default();
        after.iter().for_each(|point| clock.reach(*point));
        clock.reach(point);
        Entry { point, label: "op", uses: vec![Use::line(start, 10, writes)], clock, over: false }
    }

    #[test]
    fn unordered_writers_race_and_readers_do_not() {
        let mut tracker = Tracker::default();
        assert!(tracker.begin(entry(1, 1, 100, false, &[])).is_empty());
        assert!(tracker.begin(entry(2, 1, 105, false, &[])).is_empty());
        assert!(tracker.begin(entry(3, 1, 110, true, &[])).len() == 1, "only stream 2 reads there");
        assert!(tracker.begin(entry(4, 1, 200, true, &[])).is_empty());
    }

    #[test]
    fn order_comes_from_events_and_from_the_host_that_waited() {
        let mut tracker = Tracker::default();
        let first = Point { stream: 1, seq: 1 };
        assert!(tracker.begin(entry(1, 1, 0, true, &[])).is_empty());
        assert!(tracker.begin(entry(2, 1, 0, true, &[first])).is_empty());
        tracker.end(first);
        assert_eq!(tracker.begin(entry(3, 1, 0, true, &[])).len(), 2, "being over is not being waited for");
        tracker.end(Point { stream: 3, seq: 1 });
        let mut seen = Clock::default();
        seen.reach(first);
        tracker.observe(&seen);
        assert_eq!(tracker.users(0, 1).count(), 2, "of the other two, one is over, but nobody has waited for it");
    }
}
