//! Sums over a recording. This module does no I/O.

use deepnvme_io::op::Direction;
use deepnvme_io::trace::{DataPath, EventKind, Recorded};
use serde::Serialize;

use super::intervals::{overlap, total_ns, union};
use super::lanes::{LaneKind, interval, lanes};

/// Sums over a recording. A busy time counts moments with at least one event of its kind in progress.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TraceSummary {
    /// Length of the recording in seconds.
    pub seconds: f64,
    /// Requests that have ended, successfully or not.
    pub requests: u64,
    /// Ops that have ended: reads, writes and syncs, successfully or not.
    pub ops: u64,
    /// Bytes read from files, including bytes that were read only because of gaps or the disk's alignment.
    pub bytes_read: u64,
    /// Bytes written to files.
    pub bytes_written: u64,
    /// Bytes read or written by direct I/O from or to the caller's memory.
    pub bytes_direct: u64,
    /// Bytes read or written by direct I/O through bounce buffers.
    pub bytes_bounced: u64,
    /// Bytes read or written by buffered I/O.
    pub bytes_buffered: u64,
    /// Bytes read or written by cuFile.
    pub bytes_gds: u64,
    /// Seconds with an op in flight.
    pub disk_busy_s: f64,
    /// Copies to and from GPUs that have ended, successfully or not.
    pub copies: u64,
    /// Bytes copied to and from GPUs.
    pub bytes_copied: u64,
    /// Seconds with a copy in flight.
    pub copies_busy_s: f64,
    /// The share of `copies_busy_s` in which an op is in flight as well, from 0 to 1. `None` if no copy
    /// took any time.
    pub disk_overlap: Option<f64>,
    /// The user lanes.
    pub lanes: Vec<LaneSummary>,
    /// Events of the recording.
    pub events: u64,
    /// Events that were dropped because the recording was full. No sum includes them.
    pub dropped: u64,
}

/// Sums over a user lane.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LaneSummary {
    /// Its name.
    pub name: String,
    /// Number of spans.
    pub spans: u64,
    /// Seconds with a span in progress.
    pub busy_s: f64,
    /// The share of `busy_s` in which an op is in flight as well, from 0 to 1.
    pub disk_overlap: f64,
}

impl TraceSummary {
    /// Formats the summary as JSON, with the field names as keys.
    #[must_use]
    pub fn to_json(&self) -> String {
        // Numbers, strings and a list always serialise.
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// Sums up a recording.
#[must_use]
pub fn summarise(recorded: &Recorded) -> TraceSummary {
    let mut summary = TraceSummary {
        seconds: seconds(recorded.end_ns - recorded.start_ns),
        requests: 0,
        ops: 0,
        bytes_read: 0,
        bytes_written: 0,
        bytes_direct: 0,
        bytes_bounced: 0,
        bytes_buffered: 0,
        bytes_gds: 0,
        disk_busy_s: 0.0,
        copies: 0,
        bytes_copied: 0,
        copies_busy_s: 0.0,
        disk_overlap: None,
        lanes: Vec::new(),
        events: recorded.events.len() as u64,
        dropped: recorded.dropped,
    };
    let (mut disk, mut copies) = (Vec::new(), Vec::new());
    for event in &recorded.events {
        match &event.kind {
            EventKind::Request { .. } => summary.requests += 1,
            EventKind::Op { direction, bytes, data_path, .. } => {
                summary.ops += 1;
                *match direction {
                    Direction::Read => &mut summary.bytes_read,
                    Direction::Write => &mut summary.bytes_written,
                } += bytes;
                *match data_path {
                    DataPath::Direct => &mut summary.bytes_direct,
                    DataPath::Bounced => &mut summary.bytes_bounced,
                    DataPath::Buffered => &mut summary.bytes_buffered,
                    DataPath::Gds => &mut summary.bytes_gds,
                } += bytes;
                disk.push(interval(event));
            }
            EventKind::Sync { .. } => {
                summary.ops += 1;
                disk.push(interval(event));
            }
            EventKind::Copy { bytes, .. } => {
                summary.copies += 1;
                summary.bytes_copied += bytes;
                copies.push(interval(event));
            }
            EventKind::Span { .. } => {}
        }
    }
    let (disk, copies) = (union(disk), union(copies));
    summary.disk_busy_s = seconds(total_ns(&disk));
    summary.copies_busy_s = seconds(total_ns(&copies));
    summary.disk_overlap = (total_ns(&copies) > 0).then(|| overlap(&copies, &disk) as f64 / total_ns(&copies) as f64);
    for lane in lanes(recorded).iter().filter(|lane| lane.kind == LaneKind::User) {
        let busy = union(lane.intervals());
        summary.lanes.push(LaneSummary {
            name: lane.name.clone(),
            spans: lane.events.len() as u64,
            busy_s: seconds(total_ns(&busy)),
            disk_overlap: overlap(&busy, &disk) as f64 / total_ns(&busy).max(1) as f64,
        });
    }
    summary
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::recorded;

    #[test]
    fn sums_match_the_events() {
        let summary = summarise(&recorded());
        assert_eq!((summary.requests, summary.ops, summary.copies, summary.events, summary.dropped), (1, 33, 2, 38, 3));
        assert_eq!((summary.bytes_read, summary.bytes_written), (16 << 20, 8 << 20));
        assert_eq!(
            (summary.bytes_bounced, summary.bytes_direct, summary.bytes_buffered, summary.bytes_gds),
            (16 << 20, 8 << 20, 0, 0)
        );
        let close = |a: f64, b: f64| (a - b).abs() < 1e-9;
        assert!(close(summary.seconds, 0.1) && close(summary.disk_busy_s, 0.08) && close(summary.copies_busy_s, 0.06));
        assert!(close(summary.disk_overlap.unwrap_or(0.0), 5.0 / 6.0), "50 of 60 ms");
        assert_eq!(summary.lanes.len(), 1);
        assert!(close(summary.lanes[0].busy_s, 0.04) && close(summary.lanes[0].disk_overlap, 1.0));
    }

    #[test]
    fn an_empty_recording_sums_to_zero() {
        let summary = summarise(&Recorded { start_ns: 5, end_ns: 5, events: Vec::new(), dropped: 0 });
        assert_eq!((summary.events, summary.disk_overlap, summary.lanes.len()), (0, None, 0));
    }
}
