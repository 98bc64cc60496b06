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
        if self.recorder.is_forked() {
            return Err(Error::forked());
        }
        // Only this and `drop` close it, with exclusive access.
        self.recorder.close(self.number).ok_or_else(Error::forked)
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        if !self.recorder.is_forked() {
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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::event::TraceEvent;
    use super::super::now_ns;
    use super::super::recorder::EVENTS_MAX;
    use super::*;

    fn spans(recorded: &Recorded) -> Vec<(u64, u64, String)> {
        let name = |event: &TraceEvent| match &event.kind {
            EventKind::Span { name, .. } => name.to_string(),
            other => unreachable!("{other:?}"),
        };
        recorded.events.iter().map(|event| (event.start_ns, event.end_ns, name(event))).collect()
    }

    #[test]
    fn each_of_several_recordings_has_the_ops_that_ended_while_it_ran() {
        let recorder = Arc::new(Recorder::new());
        let lane = Lane::new(&recorder, "compute");
        lane.span("before a recording", now_ns(), now_ns());
        assert!(!lane.is_on());
        let outer = Recording::begin(&recorder);
        let (before, during) = (now_ns(), now_ns() + 1);
        lane.span("first", before, during);
        let inner = Recording::begin(&recorder);
        let start = now_ns();
        lane.span("over before the inner one", before, before);
        lane.span("both", 0, start + 5);
        let inner = inner.stop().unwrap();
        lane.span("last", start + 9, start + 7);
        assert!(lane.is_on());
        let outer = outer.stop().unwrap();
        assert!(!lane.is_on());
        assert_eq!(spans(&inner), [(inner.start_ns, start + 5, "both".to_owned())], "cut where the recording began");
        let names: Vec<_> = spans(&outer).into_iter().map(|(.., name)| name).collect();
        assert_eq!(names, ["first", "over before the inner one", "both", "last"]);
        assert_eq!(spans(&outer)[3], (start + 9, start + 9, "last".to_owned()), "nothing ends before it began");
    }

    #[test]
    fn a_full_recording_counts_dropped_events() {
        let recorder = Arc::new(Recorder::new());
        let lane = Lane::new(&recorder, "compute");
        let recording = Recording::begin(&recorder);
        let now = now_ns();
        for number in 0..EVENTS_MAX as u64 + 7 {
            lane.span("step", now + number, now + number + 1);
        }
        let later = Recording::begin(&recorder);
        lane.span("step", now, u64::MAX);
        let recorded = recording.stop().unwrap();
        assert_eq!((recorded.events.len(), recorded.dropped), (EVENTS_MAX, 8));
        assert_eq!(recorded.events[EVENTS_MAX - 1].start_ns, now + EVENTS_MAX as u64 - 1, "the first ones stay");
        assert_eq!(later.stop().unwrap().events.len(), 1, "another one has room");
    }

    #[test]
    fn a_recording_that_is_dropped_costs_nothing_any_more() {
        let recorder = Arc::new(Recorder::new());
        let recording = Recording::begin(&recorder);
        let number = recording.number;
        drop(recording);
        assert!(!recorder.is_on());
        assert!(recorder.close(number).is_none());
    }
}
