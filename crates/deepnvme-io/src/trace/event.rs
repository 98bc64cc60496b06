//! What can happen: plain values.

use std::path::Path;
use std::sync::Arc;

use crate::split::{Channel, Direction, Via};

/// One thing that an engine did, from when to when: nanoseconds of [`now_ns`](super::now_ns).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Event {
    /// When it began; not before the recording did.
    pub start_ns: u64,
    /// When it was over, as the host has seen it.
    pub end_ns: u64,
    /// What it was.
    pub what: What,
}

/// The kinds of events.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum What {
    /// A request, from being accepted to being told as done, with its syncs.
    Request {
        /// Read or write.
        direction: Direction,
        /// The first of its files; `None` where all were closed already.
        file: Option<Arc<Path>>,
        /// How many files it is about.
        files: u32,
        /// Bytes that were asked for.
        bytes: u64,
        /// Whether it ended in an error.
        failed: bool,
    },
    /// One transfer, from being given to the backend to coming back. What is continued or tried again is another one.
    Transfer {
        /// Whose it was; `None` for a caller's own thread.
        worker: Option<u32>,
        /// Read or write.
        direction: Direction,
        /// The file, or the part of a stripe set.
        file: Arc<Path>,
        /// Where in that file, in bytes.
        offset: u64,
        /// Bytes that it moved, with those that were read only because the disk has no smaller pieces.
        bytes: u64,
        /// By which way.
        way: Way,
        /// Whether it was refused.
        failed: bool,
    },
    /// A sync of a file or folder.
    Sync {
        /// Whose it was.
        worker: Option<u32>,
        /// Of what.
        file: Arc<Path>,
        /// Whether it was refused.
        failed: bool,
    },
    /// A copy between memory of the engine and GPUs, from when it was the first in its stream to when its end was seen.
    Copy {
        /// Whose it was; `None` where somebody waited for it, as who saves tensors does.
        worker: Option<u32>,
        /// The GPU, by the number that CUDA gives it; the first of several.
        gpu: u32,
        /// To the GPU for a read, from it for a write.
        direction: Direction,
        /// Bytes.
        bytes: u64,
        /// Whether it failed.
        failed: bool,
    },
    /// Something that others did, in a lane of theirs.
    Span {
        /// The lane.
        lane: Arc<str>,
        /// What it is called.
        name: Arc<str>,
    },
}

/// All that happened between the beginning and the end of a recording.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Recorded {
    /// When it began, by [`now_ns`](super::now_ns).
    pub start_ns: u64,
    /// When it was ended.
    pub end_ns: u64,
    /// What was over by then, in the order of its end; what was still on its way is missing. At most [`EVENTS_MAX`](super::EVENTS_MAX).
    pub events: Vec<Event>,
    /// How many more there were.
    pub dropped: u64,
}

/// How bytes go between a file and memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Way {
    /// Past the page cache, from or to the caller's memory.
    Direct,
    /// Past the page cache, by way of a bounce slot.
    Bounced,
    /// Through the page cache.
    Buffered,
    /// Between disk and GPU, by cuFile.
    Gds,
}

impl Way {
    /// The word for it in stats and timelines.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Bounced => "bounced",
            Self::Buffered => "buffered",
            Self::Gds => "gds",
        }
    }

    /// Of a block.
    pub(crate) const fn of(channel: Channel, via: Via) -> Self {
        match (channel, via) {
            (_, Via::Gds) => Self::Gds,
            (Channel::Buffered, _) => Self::Buffered,
            (Channel::Direct, Via::Caller) => Self::Direct,
            (Channel::Direct, Via::Slot) => Self::Bounced,
        }
    }
}
