//! Writes a recording in the Trace Event Format, for Perfetto and `chrome://tracing`.
//!
//! Each lane is a process and each of its rows a thread, because overlapping events on one thread are drawn wrongly.
//! Counters show the bytes in flight. Times are microseconds of the recording's clock.

use std::fmt::{Display, Write as _};

use deepnvme_io::display;
use deepnvme_io::op::Direction;
use deepnvme_io::trace::{EventKind, Recorded, TraceEvent};
use serde_json::{Map, Value, json};

use super::intervals::{downsample, levels};
use super::lanes::{Lane, LaneKind, failed, interval, lanes, title};

/// Points of a counter: more than a screen has columns.
const COUNTER_POINTS_MAX: usize = 20_000;

/// Formats a recording as JSON.
#[must_use]
pub fn chrome(recorded: &Recorded) -> String {
    let about = json!({
        "clock": "CLOCK_MONOTONIC (time.monotonic_ns() / 1000)",
        "start_us": recorded.start_ns as f64 / 1000.0,
        "end_us": recorded.end_ns as f64 / 1000.0,
        "dropped_events": recorded.dropped,
    });
    let mut events = Events(format!("{{\"displayTimeUnit\":\"ms\",\"otherData\":{about},\"traceEvents\":["));
    for (place, lane) in lanes(recorded).iter().enumerate() {
        push_lane(&mut events, place as u64 + 1, lane);
    }
    push_counter(&mut events, recorded, "disk: bytes in flight", |event_kind| match event_kind {
        EventKind::Op { bytes, .. } => Some(*bytes),
        _ => None,
    });
    push_counter(&mut events, recorded, "copies: bytes in flight", |event_kind| match event_kind {
        EventKind::Copy { bytes, .. } => Some(*bytes),
        _ => None,
    });
    events.finish()
}

/// The JSON text so far. Events are appended as text, since a file may have many.
struct Events(String);

impl Events {
    fn push(&mut self, event: impl Display) {
        let separator = if self.0.ends_with('[') { "\n" } else { ",\n" };
        // Writing to a string cannot fail.
        let _ = write!(self.0, "{separator}{event}");
    }

    fn finish(mut self) -> String {
        self.0.push_str("\n]}\n");
        self.0
    }
}

fn push_lane(events: &mut Events, pid: u64, lane: &Lane<'_>) {
    let mut name = |name: &str, tid: u64, args: Value| {
        events.push(json!({"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}));
    };
    name("process_name", 0, json!({"name": lane.name}));
    name("process_sort_index", 0, json!({"sort_index": pid}));
    for row in 0..lane.row_count() as u64 {
        name("thread_name", row + 1, json!({"name": format!("{} {row}", lane.name)}));
        name("thread_sort_index", row + 1, json!({"sort_index": row}));
    }
    let category = match lane.kind {
        LaneKind::Requests => "request",
        LaneKind::Disk => "disk",
        LaneKind::Copies => "copy",
        LaneKind::User => "span",
    };
    for (event, row) in lane.events.iter().zip(&lane.rows) {
        let TraceEvent { start_ns, end_ns, kind: event_kind } = event;
        let (title, args) = (Value::from(title(event_kind)), Value::from(arguments(event_kind)));
        events.push(format_args!(
            "{{\"ph\":\"X\",\"name\":{title},\"cat\":\"{category}\",\"pid\":{pid},\"tid\":{},\"ts\":{},\"dur\":{},\"args\":{args}}}",
            row + 1,
            us(*start_ns),
            us(end_ns - start_ns),
        ));
    }
}

fn push_counter(events: &mut Events, recorded: &Recorded, name: &str, bytes: impl Fn(&EventKind) -> Option<u64>) {
    let intervals = recorded.events.iter().filter_map(|event| Some((interval(event), bytes(&event.kind)?)));
    for (moment, level) in downsample(levels(intervals), COUNTER_POINTS_MAX) {
        let name = Value::from(name);
        events.push(format_args!(
            "{{\"ph\":\"C\",\"name\":{name},\"pid\":0,\"ts\":{},\"args\":{{\"bytes\":{level}}}}}",
            us(moment)
        ));
    }
}

fn arguments(event_kind: &EventKind) -> Map<String, Value> {
    let word = |direction: &Direction| Value::from(direction.name());
    let mut known = match event_kind {
        EventKind::Request { direction, file, files, bytes, .. } => {
            let file = file.as_ref().map(|file| display::path(file).to_string());
            json!({"kind": word(direction), "file": file, "files": files, "bytes": bytes})
        }
        EventKind::Op { worker, direction, file, offset, bytes, data_path, .. } => json!({
            "kind": word(direction),
            "file": display::path(file).to_string(),
            "offset": offset,
            "bytes": bytes,
            "worker": worker,
            "way": data_path.name(),
        }),
        EventKind::Sync { worker, file, .. } => {
            json!({"kind": "sync", "file": display::path(file).to_string(), "worker": worker})
        }
        EventKind::Copy { worker, gpu, direction, bytes, .. } => {
            let to = if *direction == Direction::Read { "to GPU" } else { "from GPU" };
            json!({"kind": to, "gpu": gpu, "bytes": bytes, "worker": worker})
        }
        EventKind::Span { .. } => json!({}),
    };
    let mut known = std::mem::take(known.as_object_mut().unwrap_or(&mut Map::new()));
    if failed(event_kind) {
        known.insert("failed".into(), Value::from(true));
    }
    known
}

/// Formats nanoseconds as exact microseconds.
fn us(ns: u64) -> String {
    format!("{}.{:03}", ns / 1000, ns % 1000)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::sample::recorded;

    #[test]
    fn every_event_occurs_once_and_threads_do_not_overlap() {
        let recorded = recorded();
        let file: Value = serde_json::from_str(&chrome(&recorded)).unwrap();
        let events = file["traceEvents"].as_array().unwrap();
        let bars: Vec<_> = events.iter().filter(|event| event["ph"] == "X").collect();
        assert_eq!(bars.len(), recorded.events.len());
        let mut threads: HashMap<(u64, u64), Vec<(f64, f64)>> = HashMap::new();
        for bar in bars {
            let (start, length) = (bar["ts"].as_f64().unwrap(), bar["dur"].as_f64().unwrap());
            let thread = (bar["pid"].as_u64().unwrap(), bar["tid"].as_u64().unwrap());
            threads.entry(thread).or_default().push((start, start + length));
        }
        for (thread, mut spans) in threads {
            spans.sort_by(|a, b| a.0.total_cmp(&b.0));
            assert!(spans.windows(2).all(|pair| pair[0].1 <= pair[1].0 + 1e-3), "{thread:?}");
            let named = events
                .iter()
                .any(|event| event["name"] == "thread_name" && event["pid"] == thread.0 && event["tid"] == thread.1);
            assert!(named, "{thread:?}");
        }
        assert_eq!(file["otherData"]["dropped_events"], 3);
    }

    #[test]
    fn counters_end_at_zero() {
        let file: Value = serde_json::from_str(&chrome(&recorded())).unwrap();
        let points = file["traceEvents"].as_array().unwrap().iter().filter(|event| event["ph"] == "C");
        let last: HashMap<_, _> =
            points.map(|point| (point["name"].to_string(), point["args"]["bytes"].clone())).collect();
        assert_eq!(last.len(), 2);
        assert!(last.values().all(|bytes| bytes == 0), "{last:?}");
    }

    #[test]
    fn microseconds_are_exact() {
        assert_eq!([0, 999, 1000, 86_400_000_000_001].map(us), ["0.000", "0.999", "1.000", "86400000000.001"]);
    }
}
