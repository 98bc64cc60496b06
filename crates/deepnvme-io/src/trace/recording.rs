//! What others hold of a recorder: a recording that runs, and lanes of their own.

use std::sync::Arc;

use super::event::{Recorded, What};
use super::recorder::Recorder;
use crate::error::{Error, Result};

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
    /// Begins one.
    pub(crate) fn begin(recorder: &Arc<Recorder>) -> Self {
        Self { recorder: Arc::clone(recorder), number: recorder.open() }
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
            return Err(Error::forked());
        }
        // Only this and `drop` close it, and both have it to themselves.
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
