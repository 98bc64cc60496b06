//! The public handles of a recorder: running recordings, and lanes.

use std::sync::Arc;

use super::event::{EventKind, Recorded};
use super::recorder::Recorder;
use crate::error::{Error, Result};

/// A running recording. Dropping it discards its events.
#[derive(Debug)]
#[must_use = "a recording that is not stopped is lost"]
pub struct Recording {
    recorder: Arc<Recorder>,
    number: u64,
}

/// A line in an engine's timelines for work outside the engine, such as computation or waits. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Lane {
    recorder: Arc<Recorder>,
    name: Arc<str>,
}

impl Recording {
    /// Starts a recording.
    pub(crate) fn begin(recorder: &Arc<Recorder>) -> Self {
        Self { recorder: Arc::clone(recorder), number: recorder.open() }
    }

    /// Adds a lane of this name, as [`Engine::lane`](crate::Engine::lane) does.
    #[must_use]
    pub fn lane(&self, name: &str) -> Lane {
        Lane::new(&self.recorder, name)
    }

    /// Stops the recording and returns its events.
    ///
    /// # Errors
    /// `Closed` in a process that was forked since its start: the recording belongs to the parent.
    pub fn stop(self) -> Result<Recorded> {
        if self.recorder.is_foreign() {
            return Err(Error::forked());
        }
        // Only this and `drop` close it, with exclusive access.
        self.recorder.close(self.number).ok_or_else(Error::forked)
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

    /// Returns whether a recording runs. If not, reading the clock is unnecessary.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.recorder.is_on()
    }

    /// Adds a completed event to the running recordings. Times are those of [`now_ns`](super::now_ns). Does nothing
    /// without a recording or in a forked child. An end before the start becomes the start.
    pub fn span(&self, name: &str, start_ns: u64, end_ns: u64) {
        let lane = &self.name;
        self.recorder.record(start_ns, end_ns.max(start_ns), |names| EventKind::Span {
            lane: Arc::clone(lane),
            name: names.name(name),
        });
    }
}
