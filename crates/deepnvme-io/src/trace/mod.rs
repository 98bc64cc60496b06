//! What an engine did, and when: for a timeline.
//!
//! [`Engine::record`](crate::Engine::record) begins a [`Recording`]; whoever ends it has all that happened in between as
//! [`Event`]s: requests, each transfer that a worker gave to its backend, each copy to or from a GPU. Others that work
//! beside the engine add [`Lane`]s of their own. What is made of it (a file for Perfetto, a page) is not decided here.
//!
//! While nobody records, all of this costs a load of one number per event. Recordings are bounded by [`EVENTS_MAX`]; what
//! came after that is counted. Several may run at once, and each has everything.

mod event;
mod recorder;
mod recording;
mod tape;

pub use event::{Event, Recorded, Way, What};
pub use recorder::EVENTS_MAX;
pub(crate) use recorder::Recorder;
pub use recording::{Lane, Recording};
pub(crate) use tape::{Copied, Moved, Tape};

/// The time of every event: nanoseconds of `CLOCK_MONOTONIC`, which Python calls `time.monotonic_ns()`.
#[must_use]
pub fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}
