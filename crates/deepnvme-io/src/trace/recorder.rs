//! Stores the events: one recorder per engine, one trace buffer per recording.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use deepnvme_mem::CreatorProcess;

use super::event::{EventKind, Recorded, TraceEvent};
use super::now_ns;
use crate::sync::{Instant, Mutex, lock};

/// Maximum events of one recording: about 20 MB, enough for 128 GiB through bounce buffers. Later events are only
/// counted, so that a timeline has no gaps before its end.
pub const EVENTS_MAX: usize = 1 << 18;

/// Collects the events of an engine.
#[derive(Debug)]
pub(crate) struct Recorder {
    /// The number of running recordings. Without any, nothing else is read.
    running: AtomicUsize,
    buffers: Mutex<TraceBuffers>,
    creator: CreatorProcess,
    /// The recorder's creation as an `Instant` and in the nanoseconds of the trace. Both are one clock in the kernel.
    clock_origin: (Instant, u64),
}

#[derive(Debug, Default)]
struct TraceBuffers {
    open: Vec<TraceBuffer>,
    next: u64,
    /// Events share their names.
    files: HashSet<Arc<Path>>,
    names: HashSet<Arc<str>>,
}

#[derive(Debug)]
struct TraceBuffer {
    number: u64,
    recorded: Recorded,
}

impl Recorder {
    pub(crate) fn new() -> Self {
        Self {
            running: AtomicUsize::new(0),
            buffers: Mutex::new(TraceBuffers::default()),
            creator: CreatorProcess::current(),
            clock_origin: (Instant::now(), now_ns()),
        }
    }

    /// Returns whether a recording runs.
    pub(crate) fn is_on(&self) -> bool {
        self.running.load(Ordering::Relaxed) > 0
    }

    /// Returns the time, if a recording runs.
    pub(crate) fn now(&self) -> Option<u64> {
        self.is_on().then(now_ns)
    }

    /// Converts an `Instant` since the recorder's creation to nanoseconds of the trace.
    pub(crate) fn time_of(&self, moment: Instant) -> u64 {
        let (then, then_ns) = self.clock_origin;
        then_ns + u64::try_from(moment.saturating_duration_since(then).as_nanos()).unwrap_or(u64::MAX)
    }

    /// Starts a recording and returns its number.
    pub(super) fn open(&self) -> u64 {
        let mut buffers = lock(&self.buffers);
        let number = buffers.next;
        buffers.next += 1;
        let start_ns = now_ns();
        let recorded = Recorded { start_ns, end_ns: start_ns, events: Vec::new(), dropped: 0 };
        buffers.open.push(TraceBuffer { number, recorded });
        self.running.fetch_add(1, Ordering::Relaxed);
        number
    }

    /// Adds a completed event to every recording that had started by its end. `kind` uses the recorder's shared names.
    pub(crate) fn record(&self, start_ns: u64, end_ns: u64, kind: impl FnOnce(&mut Names<'_>) -> EventKind) {
        // In a forked child, the lock may stay held forever, and the recordings belong to the parent.
        if !self.is_on() || self.is_forked() {
            return;
        }
        let mut buffers = lock(&self.buffers);
        let TraceBuffers { open, files, names, .. } = &mut *buffers;
        let kind = kind(&mut Names { files, names });
        for TraceBuffer { recorded, .. } in open {
            if end_ns < recorded.start_ns {
                continue;
            }
            if recorded.events.len() >= EVENTS_MAX {
                recorded.dropped += 1;
                continue;
            }
            let start_ns = start_ns.clamp(recorded.start_ns, end_ns);
            recorded.events.push(TraceEvent { start_ns, end_ns, kind: kind.clone() });
        }
    }

    /// Returns whether this process was forked from the one that created the recorder.
    pub(super) fn is_forked(&self) -> bool {
        !self.creator.is_current()
    }

    pub(super) fn close(&self, number: u64) -> Option<Recorded> {
        let mut buffers = lock(&self.buffers);
        let place = buffers.open.iter().position(|buffer| buffer.number == number)?;
        let mut recorded = buffers.open.swap_remove(place).recorded;
        self.running.fetch_sub(1, Ordering::Relaxed);
        if buffers.open.is_empty() {
            buffers.files.clear();
            buffers.names.clear();
        }
        recorded.end_ns = now_ns();
        Some(recorded)
    }
}

/// The names that events share.
pub(crate) struct Names<'a> {
    files: &'a mut HashSet<Arc<Path>>,
    names: &'a mut HashSet<Arc<str>>,
}

impl Names<'_> {
    pub(crate) fn file(&mut self, path: &Path) -> Arc<Path> {
        shared(self.files, path)
    }

    pub(crate) fn name(&mut self, name: &str) -> Arc<str> {
        shared(self.names, name)
    }
}

fn shared<T: ?Sized + std::hash::Hash + Eq>(known: &mut HashSet<Arc<T>>, one: &T) -> Arc<T>
where
    for<'a> Arc<T>: From<&'a T>,
{
    if let Some(known) = known.get(one) {
        return Arc::clone(known);
    }
    let new = Arc::<T>::from(one);
    known.insert(Arc::clone(&new));
    new
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_last_recording_to_close_clears_the_shared_names() {
        let recorder = Recorder::new();
        let (first, second) = (recorder.open(), recorder.open());
        let (lane, now) = (Arc::<str>::from("compute"), now_ns());
        recorder.record(now, now, |names| EventKind::Span { lane, name: names.name("step") });
        assert!(recorder.close(first).is_some() && recorder.close(first).is_none());
        assert_eq!(lock(&recorder.buffers).names.len(), 1);
        assert_eq!(recorder.close(second).unwrap().events.len(), 1);
        assert!(lock(&recorder.buffers).names.is_empty());
    }

    #[test]
    fn moments_and_times_are_of_one_clock() {
        let recorder = Recorder::new();
        let (before, moment, after) = (now_ns(), Instant::now(), now_ns());
        // `new` reads the clocks one after the other, and the thread may even be preempted in between.
        let between = recorder.clock_origin.1.saturating_sub(before).max(50_000_000);
        assert!((before.saturating_sub(between)..=after + between).contains(&recorder.time_of(moment)));
    }
}
