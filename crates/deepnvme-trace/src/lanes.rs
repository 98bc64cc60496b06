//! Groups the events of a recording into lanes. This module does no I/O.

use deepnvme_io::op::Direction;
use deepnvme_io::trace::{EventKind, Recorded, TraceEvent};

use super::intervals::{self, Interval};
use deepnvme_io::display;

/// The kind of events in a lane.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum LaneKind {
    Requests,
    Disk,
    Copies,
    User,
}

/// Events of one kind and one owner, drawn as one band. Overlapping events go to further rows.
#[derive(Debug)]
pub(crate) struct Lane<'a> {
    pub(crate) name: String,
    pub(crate) kind: LaneKind,
    /// In the order of their starts.
    pub(crate) events: Vec<&'a TraceEvent>,
    /// The row of each event, so that events of one row do not overlap.
    pub(crate) rows: Vec<usize>,
}

impl<'a> Lane<'a> {
    fn new(name: String, kind: LaneKind, mut events: Vec<&'a TraceEvent>) -> Self {
        events.sort_by_key(|event| interval(event));
        let rows = intervals::rows(events.iter().map(|event| interval(event)));
        Self { name, kind, events, rows }
    }

    pub(crate) fn intervals(&self) -> impl Iterator<Item = Interval> {
        self.events.iter().map(|event| interval(event))
    }

    pub(crate) fn row_count(&self) -> usize {
        self.rows.iter().max().map_or(0, |row| row + 1)
    }
}

pub(crate) fn interval(event: &TraceEvent) -> Interval {
    (event.start_ns, event.end_ns)
}

/// The lanes of a recording: requests, callers and workers, GPUs, and then user lanes in the order of their starts.
pub(crate) fn lanes(recorded: &Recorded) -> Vec<Lane<'_>> {
    let mut lanes: Vec<(LaneKind, Option<u32>, String, Vec<&TraceEvent>)> = Vec::new();
    for event in &recorded.events {
        let (kind, number, name) = lane_of(&event.kind);
        match lanes.iter_mut().find(|lane| (lane.0, &lane.2) == (kind, &name)) {
            Some((.., events)) => events.push(event),
            None => lanes.push((kind, number, name, vec![event])),
        }
    }
    lanes.sort_by_cached_key(|(kind, number, _, events)| {
        // Events are recorded when they end. The first one to start may be the last.
        (*kind, *number, events.iter().map(|event| event.start_ns).min())
    });
    lanes.into_iter().map(|(kind, _, name, events)| Lane::new(name, kind, events)).collect()
}

/// Returns the kind of an event's lane, the number of its worker or GPU, and its name.
fn lane_of(event_kind: &EventKind) -> (LaneKind, Option<u32>, String) {
    match event_kind {
        EventKind::Request { .. } => (LaneKind::Requests, None, "requests".into()),
        EventKind::Op { worker, .. } | EventKind::Sync { worker, .. } => {
            let name = worker.map_or("callers".into(), |worker| format!("worker {worker}"));
            (LaneKind::Disk, *worker, name)
        }
        EventKind::Copy { gpu, .. } => (LaneKind::Copies, Some(*gpu), format!("copies cuda:{gpu}")),
        EventKind::Span { lane, .. } => (LaneKind::User, None, lane.to_string()),
    }
}

/// The title of an event.
pub(crate) fn title(event_kind: &EventKind) -> String {
    match event_kind {
        EventKind::Request { direction, bytes, .. } | EventKind::Op { direction, bytes, .. } => {
            format!("{} {}", direction.name(), display::bytes(*bytes))
        }
        EventKind::Sync { .. } => "sync".into(),
        EventKind::Copy { direction: Direction::Read, bytes, .. } => format!("to GPU {}", display::bytes(*bytes)),
        EventKind::Copy { bytes, .. } => format!("from GPU {}", display::bytes(*bytes)),
        EventKind::Span { name, .. } => name.to_string(),
    }
}

/// Whether an event ended in an error.
pub(crate) fn failed(event_kind: &EventKind) -> bool {
    match event_kind {
        EventKind::Request { failed, .. }
        | EventKind::Op { failed, .. }
        | EventKind::Sync { failed, .. }
        | EventKind::Copy { failed, .. } => *failed,
        EventKind::Span { .. } => false,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use super::*;

    #[test]
    fn lanes_are_sorted_by_number_and_user_lanes_by_start() {
        let event = |start_ns, end_ns, kind| TraceEvent { start_ns, end_ns, kind };
        let sync = |worker| EventKind::Sync { worker, file: Arc::from(Path::new("file")), failed: false };
        let copy = |gpu| EventKind::Copy { worker: None, gpu, direction: Direction::Read, bytes: 1, failed: false };
        let span = |lane: &str| EventKind::Span { lane: lane.into(), name: "a span".into() };
        let events = vec![
            event(0, 1, copy(10)),
            event(0, 1, copy(9)),
            event(2, 3, span("inner")),
            event(1, 4, span("outer")),
            event(0, 5, sync(Some(10))),
            event(1, 5, sync(Some(2))),
            event(2, 5, sync(None)),
        ];
        let recorded = Recorded { start_ns: 0, end_ns: 5, events, dropped: 0 };
        let names: Vec<String> = lanes(&recorded).into_iter().map(|lane| lane.name).collect();
        let expected = ["callers", "worker 2", "worker 10", "copies cuda:9", "copies cuda:10", "outer", "inner"];
        assert_eq!(names, expected);
    }
}
