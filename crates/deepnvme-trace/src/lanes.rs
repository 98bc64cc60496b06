//! Groups the events of a recording into lanes. This module does no I/O.

use deepnvme_io::op::Direction;
use deepnvme_io::trace::{EventKind, Recorded, TraceEvent};

use super::spans::{self, Span};
use deepnvme_io::display;

/// The kind of events in a lane.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum LaneKind {
    Requests,
    Disk,
    Copies,
    Other,
}

/// Events of one kind and one owner, drawn as one line.
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
        events.sort_by_key(|event| span(event));
        let rows = spans::rows(events.iter().map(|event| span(event)));
        Self { name, kind, events, rows }
    }

    pub(crate) fn spans(&self) -> impl Iterator<Item = Span> {
        self.events.iter().map(|event| span(event))
    }

    pub(crate) fn row_count(&self) -> usize {
        self.rows.iter().max().map_or(0, |row| row + 1)
    }
}

pub(crate) fn span(event: &TraceEvent) -> Span {
    (event.start_ns, event.end_ns)
}

/// The lanes of a recording: requests, callers and workers, GPUs, and then user lanes in the order of their first
/// event.
pub(crate) fn lanes(recorded: &Recorded) -> Vec<Lane<'_>> {
    let mut lanes: Vec<(LaneKind, String, Vec<&TraceEvent>)> = Vec::new();
    for event in &recorded.events {
        let (kind, name) = lane_of(&event.kind);
        match lanes.iter_mut().find(|lane| (lane.0, &lane.1) == (kind, &name)) {
            Some((.., events)) => events.push(event),
            None => lanes.push((kind, name, vec![event])),
        }
    }
    lanes.sort_by(|(kind, name, _), (other, other_name, _)| {
        // User lanes keep their order.
        kind.cmp(other)
            .then_with(|| if *kind == LaneKind::Other { std::cmp::Ordering::Equal } else { name.cmp(other_name) })
    });
    lanes.into_iter().map(|(kind, name, events)| Lane::new(name, kind, events)).collect()
}

fn lane_of(event_kind: &EventKind) -> (LaneKind, String) {
    match event_kind {
        EventKind::Request { .. } => (LaneKind::Requests, "requests".into()),
        EventKind::Op { worker, .. } | EventKind::Sync { worker, .. } => (
            LaneKind::Disk,
            match worker {
                Some(worker) => format!("worker {worker}"),
                None => "callers".into(),
            },
        ),
        EventKind::Copy { gpu, .. } => (LaneKind::Copies, format!("copies cuda:{gpu}")),
        EventKind::Span { lane, .. } => (LaneKind::Other, lane.to_string()),
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
