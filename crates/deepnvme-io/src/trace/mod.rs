//! Timelines: records the engine's work over time.
//!
//! [`Engine::record`](crate::Engine::record) starts a [`Recording`]. Stopping it returns all [`TraceEvent`]s in
//! between: requests, ops of each worker, and copies to or from GPUs. Programs can add [`Lane`]s for their own work.
//! Output formats, such as files for Perfetto, are up to the caller.
//!
//! Without a recording, each event costs one atomic load. A recording has at most [`EVENTS_MAX`] events, and counts the
//! rest. Several may run at once, and each has all events.

mod event;
mod recorder;
mod recording;
mod tracer;

pub use event::{DataPath, EventKind, Recorded, TraceEvent};
pub use recorder::EVENTS_MAX;
pub(crate) use recorder::Recorder;
pub use recording::{Lane, Recording};
pub(crate) use tracer::{CompletedOp, GpuCopy, Tracer};

/// Returns the time of events: nanoseconds of `CLOCK_MONOTONIC`, which is Python's `time.monotonic_ns()`.
#[must_use]
pub fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}
