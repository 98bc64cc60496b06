//! What a recording adds up to: pure.

use deepnvme_io::split::Direction;
use deepnvme_io::trace::{Recorded, Way, What};
use serde::Serialize;

use super::lanes::{Kind, lanes, span};
use super::spans::{common, total, union};

/// Sums over a recording. Busy is the time in which at least one was under way.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figures {
    /// From the beginning to the end of the recording.
    pub seconds: f64,
    /// Requests that ended.
    pub requests: u64,
    /// Transfers and syncs that ended.
    pub transfers: u64,
    /// Bytes that transfers moved from files.
    pub bytes_read: u64,
    /// Bytes that transfers moved to files.
    pub bytes_written: u64,
    /// Of both, past the page cache from or to the caller's memory.
    pub bytes_direct: u64,
    /// Of both, past the page cache by way of bounce slots.
    pub bytes_bounced: u64,
    /// Of both, through the page cache.
    pub bytes_buffered: u64,
    /// Of both, by cuFile.
    pub bytes_gds: u64,
    /// Seconds in which a transfer was under way.
    pub disk_busy_s: f64,
    /// Copies to and from GPUs that ended.
    pub copies: u64,
    /// Their bytes.
    pub bytes_copied: u64,
    /// Seconds in which a copy was under way.
    pub copies_busy_s: f64,
    /// Of those, the share in which a transfer was, too: 1 where copies cost no time. `None` without copies.
    pub copies_hidden: Option<f64>,
    /// The lanes that others added.
    pub lanes: Vec<LaneFigures>,
    /// Events of the recording.
    pub events: u64,
    /// Those that came when it was full, and are in no sum.
    pub dropped: u64,
}

/// Sums over a lane that somebody added.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LaneFigures {
    /// Its name.
    pub name: String,
    /// Its spans.
    pub spans: u64,
    /// Seconds in which one was under way.
    pub busy_s: f64,
    /// Of those, the share in which a transfer was, too.
    pub beside_disk: f64,
}

impl Figures {
    /// As JSON, by the names of the fields.
    #[must_use]
    pub fn to_json(&self) -> String {
        // Numbers, and a list of them: nothing that JSON could refuse.
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// Adds a recording up.
#[must_use]
pub fn figures(recorded: &Recorded) -> Figures {
    let mut sums = Figures {
        seconds: seconds(recorded.end_ns - recorded.start_ns),
        requests: 0,
        transfers: 0,
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
        copies_hidden: None,
        lanes: Vec::new(),
        events: recorded.events.len() as u64,
        dropped: recorded.dropped,
    };
    let (mut disk, mut copies) = (Vec::new(), Vec::new());
    for event in &recorded.events {
        match &event.what {
            What::Request { .. } => sums.requests += 1,
            What::Transfer { direction, bytes, way, .. } => {
                sums.transfers += 1;
                *match direction {
                    Direction::Read => &mut sums.bytes_read,
                    Direction::Write => &mut sums.bytes_written,
                } += bytes;
                *match way {
                    Way::Direct => &mut sums.bytes_direct,
                    Way::Bounced => &mut sums.bytes_bounced,
                    Way::Buffered => &mut sums.bytes_buffered,
                    Way::Gds => &mut sums.bytes_gds,
                } += bytes;
                disk.push(span(event));
            }
            What::Sync { .. } => {
                sums.transfers += 1;
                disk.push(span(event));
            }
            What::Copy { bytes, .. } => {
                sums.copies += 1;
                sums.bytes_copied += bytes;
                copies.push(span(event));
            }
            What::Span { .. } => {}
        }
    }
    let (disk, copies) = (union(disk), union(copies));
    sums.disk_busy_s = seconds(total(&disk));
    sums.copies_busy_s = seconds(total(&copies));
    sums.copies_hidden = (total(&copies) > 0).then(|| common(&copies, &disk) as f64 / total(&copies) as f64);
    for lane in lanes(recorded).iter().filter(|lane| lane.kind == Kind::Other) {
        let busy = union(lane.spans());
        sums.lanes.push(LaneFigures {
            name: lane.name.clone(),
            spans: lane.events.len() as u64,
            busy_s: seconds(total(&busy)),
            beside_disk: common(&busy, &disk) as f64 / total(&busy).max(1) as f64,
        });
    }
    sums
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::recorded;

    #[test]
    fn sums_are_those_of_the_events() {
        let sums = figures(&recorded());
        assert_eq!((sums.requests, sums.transfers, sums.copies, sums.events, sums.dropped), (1, 33, 2, 38, 3));
        assert_eq!((sums.bytes_read, sums.bytes_written), (16 << 20, 8 << 20));
        assert_eq!(
            (sums.bytes_bounced, sums.bytes_direct, sums.bytes_buffered, sums.bytes_gds),
            (16 << 20, 8 << 20, 0, 0)
        );
        let close = |a: f64, b: f64| (a - b).abs() < 1e-9;
        assert!(close(sums.seconds, 0.1) && close(sums.disk_busy_s, 0.08) && close(sums.copies_busy_s, 0.06));
        assert!(close(sums.copies_hidden.unwrap_or(0.0), 5.0 / 6.0), "50 of 60 ms");
        assert_eq!(sums.lanes.len(), 1);
        assert!(close(sums.lanes[0].busy_s, 0.04) && close(sums.lanes[0].beside_disk, 1.0));
    }

    #[test]
    fn nothing_adds_up_to_nothing() {
        let sums = figures(&Recorded { start_ns: 5, end_ns: 5, events: Vec::new(), dropped: 0 });
        assert_eq!((sums.events, sums.copies_hidden, sums.lanes.len()), (0, None, 0));
    }
}
