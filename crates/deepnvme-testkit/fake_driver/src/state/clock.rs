//! The order of ops: points in streams, and vector clocks.

use std::collections::BTreeMap;
use std::fmt;

use crate::abi::Handle;

/// A stream in the driver's table. The value of a created stream is its handle. The handles of default streams mean
/// different streams on different devices and threads, so each of these also gets a value of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct StreamId(pub(crate) Handle);

impl fmt::LowerHex for StreamId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

/// A point in a stream: its op number `seq`, counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Point {
    pub(crate) stream: StreamId,
    pub(crate) seq: u64,
}

/// Per stream, the number of ops that come before.
#[derive(Clone, Debug, Default)]
pub(crate) struct Clock(BTreeMap<StreamId, u64>);

impl Clock {
    /// Orders the clock after `point`.
    pub(crate) fn reach(&mut self, point: Point) {
        let seq = self.0.entry(point.stream).or_default();
        *seq = (*seq).max(point.seq);
    }

    /// Orders the clock after everything before `other`.
    pub(crate) fn join(&mut self, other: &Self) {
        for (stream, seq) in &other.0 {
            self.reach(Point { stream: *stream, seq: *seq });
        }
    }

    /// Returns whether the point comes before.
    pub(crate) fn covers(&self, point: Point) -> bool {
        self.0.get(&point.stream).is_some_and(|seq| *seq >= point.seq)
    }
}
