//! What others hold of a recorder: a recording that runs, what it has in the end, and lanes of their own.

use std::sync::Arc;

use super::event::{Event, What};
use super::recorder::Recorder;
use crate::error::Result;
use crate::queue;

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

/// A recording that runs; dropping it forgets what it has.
#[derive(Debug)]
#[must_use = "a recording that nobody stops is lost"]
pub struct Recording {
    recorder: Arc<Recorder>,
    number: u64,
}

/// A line in the timelines of an engine for those who work beside it: what computes, or waits. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Lane {
    recorder: Arc<Recorder>,
    name: Arc<str>,
}

impl Recording {
    pub(super) fn new(recorder: &Arc<Recorder>, number: u64) -> Self {
        Self { recorder: Arc::clone(recorder), number }
    }

    /// A line of that name, as [`Engine::lane`](crate::Engine::lane) gives it.
    #[must_use]
    pub fn lane(&self, name: &str) -> Lane {
        Lane::new(&self.recorder, name)
    }

    /// Ends it, and says what happened.
    ///
    /// # Errors
    /// `Closed` in a process that was forked since it began: the recording is the parent's.
    pub fn stop(self) -> Result<Recorded> {
        if self.recorder.is_foreign() {
            return Err(queue::forked());
        }
        // Only this and `drop` close it, and both have it to themselves.
        self.recorder.close(self.number).ok_or_else(queue::forked)
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        if !self.recorder.is_foreign() {
            let _ = self.recorder.close(self.number);
        }
    }
}

impl Lane {
    pub(crate) fn new(recorder: &Arc<Recorder>, name: &str) -> Self {
        Self { recorder: Arc::clone(recorder), name: Arc::from(name) }
    }

    /// Whether anybody records: if not, there is no need to look at the clock.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.recorder.is_on()
    }

    /// Adds something that is over to the recordings that run; times are those of [`now_ns`](super::now_ns). Without any, and in a forked
    /// child, nothing happens. An end before the start is taken for the start.
    pub fn span(&self, name: &str, start_ns: u64, end_ns: u64) {
        let lane = &self.name;
        self.recorder.note(start_ns, end_ns.max(start_ns), |names| What::Span {
            lane: Arc::clone(lane),
            name: names.name(name),
        });
    }
}
