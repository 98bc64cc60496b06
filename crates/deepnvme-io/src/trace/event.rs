//! The events of a recording: plain values.

use std::path::Path;
use std::sync::Arc;

use crate::op::Direction;
use crate::split::{IoMode, Route};

/// One event of an engine. Times are nanoseconds of [`now_ns`](super::now_ns).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TraceEvent {
    /// Start, at the earliest the start of the recording.
    pub start_ns: u64,
    /// End, as seen by the host.
    pub end_ns: u64,
    /// The kind of event, with its values.
    pub kind: EventKind,
}

/// The kinds of events.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum EventKind {
    /// A request, from submission to reported completion, with its syncs.
    Request {
        /// Read or write.
        direction: Direction,
        /// The first file. `None` if the request has none.
        file: Option<Arc<Path>>,
        /// Number of files.
        files: u32,
        /// Bytes requested.
        bytes: u64,
        /// Whether it failed.
        failed: bool,
    },
    /// One read or write op, from submission to the backend to its completion. Continuations and retries are separate
    /// ops.
    Op {
        /// The worker. `None` for a caller's own thread.
        worker: Option<u32>,
        /// Read or write.
        direction: Direction,
        /// The file, or the part of a stripe set.
        file: Arc<Path>,
        /// Offset in that file, in bytes.
        offset: u64,
        /// Bytes moved, including bytes that were read only because of gaps or the disk's alignment.
        bytes: u64,
        /// The path of the bytes.
        data_path: DataPath,
        /// Whether it failed.
        failed: bool,
    },
    /// A sync of a file or folder.
    Sync {
        /// The worker.
        worker: Option<u32>,
        /// The file or folder.
        file: Arc<Path>,
        /// Whether it failed.
        failed: bool,
    },
    /// A copy between the engine's memory and GPUs, from when it became the first in its stream until its end was seen.
    Copy {
        /// The worker. `None` for a synchronous copy, for instance when saving tensors.
        worker: Option<u32>,
        /// The GPU's CUDA index. The first of several.
        gpu: u32,
        /// To the GPU for a read, from it for a write.
        direction: Direction,
        /// Bytes.
        bytes: u64,
        /// Whether it failed.
        failed: bool,
    },
    /// An event added by a program, in its own lane.
    Span {
        /// The lane.
        lane: Arc<str>,
        /// The name of the event.
        name: Arc<str>,
    },
}

/// The events between the start and the end of a recording.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Recorded {
    /// Start, by [`now_ns`](super::now_ns).
    pub start_ns: u64,
    /// End.
    pub end_ns: u64,
    /// The events that were reported by then, in the order of the reports. At most [`EVENTS_MAX`](super::EVENTS_MAX).
    pub events: Vec<TraceEvent>,
    /// The number of dropped events.
    pub dropped: u64,
}

/// The path of bytes between a file and memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum DataPath {
    /// Past the page cache, directly from or to the caller's memory.
    Direct,
    /// Past the page cache, through a bounce buffer.
    Bounced,
    /// Through the page cache.
    Buffered,
    /// Between disk and GPU, by cuFile.
    Gds,
}

impl DataPath {
    /// Returns the name for stats and timelines.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Bounced => "bounced",
            Self::Buffered => "buffered",
            Self::Gds => "gds",
        }
    }

    /// Returns the path of a block.
    pub(crate) const fn of(mode: IoMode, route: Route) -> Self {
        match (mode, route) {
            (_, Route::Gds) => Self::Gds,
            (IoMode::Buffered | IoMode::Cached, _) => Self::Buffered,
            (IoMode::Direct, Route::Caller) => Self::Direct,
            (IoMode::Direct, Route::Bounce) => Self::Bounced,
        }
    }
}
