//! A recording for tests: two workers that read and write, GPU copies, and a user lane.

use std::path::Path;
use std::sync::Arc;

use deepnvme_io::op::Direction;
use deepnvme_io::trace::{DataPath, EventKind, Recorded, TraceEvent};

const MIB: u64 = 1 << 20;
const MS: u64 = 1_000_000;

fn event(start_ms: u64, end_ms: u64, event_kind: EventKind) -> TraceEvent {
    TraceEvent { start_ns: (1000 + start_ms) * MS, end_ns: (1000 + end_ms) * MS, kind: event_kind }
}

/// 100 ms: 80 of reads with concurrent writes, 60 of copies, of which 50 overlap the reads, a sync, 40 of compute.
pub(crate) fn recorded() -> Recorded {
    let file: Arc<Path> = Arc::from(Path::new("/data/<model> & co.safetensors"));
    let mut events = Vec::new();
    for worker in 0..2_u64 {
        for step in 0..8 {
            events.push(event(
                step * 10,
                step * 10 + 10,
                EventKind::Op {
                    worker: Some(worker as u32),
                    direction: Direction::Read,
                    file: Arc::clone(&file),
                    offset: (step * 2 + worker) * MIB,
                    bytes: MIB,
                    data_path: DataPath::Bounced,
                    failed: step == 7,
                },
            ));
            // Overlaps the read before.
            events.push(event(
                step * 10 + 5,
                step * 10 + 9,
                EventKind::Op {
                    worker: Some(worker as u32),
                    direction: Direction::Write,
                    file: Arc::clone(&file),
                    offset: step * MIB,
                    bytes: MIB / 2,
                    data_path: DataPath::Direct,
                    failed: false,
                },
            ));
        }
    }
    for (start, end) in [(30, 60), (60, 90)] {
        let event_kind =
            EventKind::Copy { worker: Some(0), gpu: 1, direction: Direction::Read, bytes: 8 * MIB, failed: false };
        events.push(event(start, end, event_kind));
    }
    events.push(event(82, 82, EventKind::Sync { worker: None, file: Arc::clone(&file), failed: false }));
    for (start, name) in [(0, "layer 0"), (20, "layer <1>")] {
        events.push(event(start, start + 20, EventKind::Span { lane: Arc::from("compute"), name: Arc::from(name) }));
    }
    let request =
        EventKind::Request { direction: Direction::Read, file: Some(file), files: 1, bytes: 16 * MIB, failed: false };
    events.push(event(0, 95, request));
    Recorded { start_ns: 1000 * MS, end_ns: 1100 * MS, events, dropped: 3 }
}
