//! `deepnvme.Trace`: record an engine's work during a `with` block into a file.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard};

use deepnvme_io::Engine;
use deepnvme_io::trace::{Lane, Recorded, Recording};
use deepnvme_mem::sync::ignore_poison;
use deepnvme_trace as trace;
use pyo3::prelude::*;

use crate::error::{self, InvalidArgumentError};
use crate::ignored::Ignored;
use crate::open_engine::OpenEngine;
use crate::settings::{Word, number};

/// Record an engine's work while the block runs, and write it to a file.
///
/// ``deepnvme.trace`` and ``Engine.trace`` make it.
///
/// Example:
///     >>> import time
///     >>> with deepnvme.trace("timeline.html") as trace:
///     ...     started = time.monotonic_ns()
///     ...     deepnvme.write(torch.ones(1024), "weights.bin")
///     ...     trace.span("first", "steps", started, time.monotonic_ns())
///     4096
///     >>> trace.summary()["bytes_written"]
///     4096
#[pyclass(frozen, module = "deepnvme")]
pub(crate) struct Trace {
    engine: OpenEngine,
    path: PathBuf,
    state: Mutex<TimelineState>,
}

enum TimelineState {
    New,
    Running(Recording),
    /// Ended, with the summary as JSON.
    Over(String),
}

impl Trace {
    pub(crate) fn new(engine: OpenEngine, path: PathBuf) -> Self {
        // The file is written when the block ends, and the process may change its folder before.
        let path = std::path::absolute(&path).unwrap_or(path);
        Self { engine, path, state: Mutex::new(TimelineState::New) }
    }

    fn state(&self) -> MutexGuard<'_, TimelineState> {
        ignore_poison(self.state.lock())
    }
}

#[pymethods]
impl Trace {
    fn __enter__(slf: Py<Self>, py: Python<'_>) -> PyResult<Py<Self>> {
        let this = slf.get();
        if !matches!(*this.state(), TimelineState::New) {
            return Err(InvalidArgumentError::new_err("a Trace records one block; make a new one for another"));
        }
        let checked = py.detach(|| trace::check(&this.path));
        error::check(py, checked)?;
        let recording = error::check(py, this.engine.get(py)?.record())?;
        *this.state() = TimelineState::Running(recording);
        Ok(slf)
    }

    fn __exit__(&self, py: Python<'_>, exc_type: Ignored, exc_value: Ignored, traceback: Ignored) -> PyResult<()> {
        let _ = (exc_type, exc_value, traceback);
        let TimelineState::Running(recording) = std::mem::replace(&mut *self.state(), TimelineState::Over("{}".into()))
        else {
            return Ok(());
        };
        // In a forked child, the recording and the file are the parent's.
        let Ok(recorded) = recording.stop() else { return Ok(()) };
        let (summary, written) = py.detach(|| (summary_json(&recorded), trace::write(&recorded, &self.path)));
        *self.state() = TimelineState::Over(summary);
        error::check(py, written)
    }

    /// Add a bar to this timeline, and to the others that the engine records now.
    ///
    /// Args:
    ///     name: label of the bar.
    ///     lane: name of the band of the timeline; bars of the same lane share it.
    ///     start_ns: start time, as ``time.monotonic_ns()`` gives it.
    ///     end_ns: end time, on the same clock.
    ///
    /// Raises:
    ///     ValueError: the bar ends before it starts, or the timeline is not being recorded.
    fn span(
        &self,
        name: Word<'_, '_>,
        lane: Word<'_, '_>,
        start_ns: &Bound<'_, PyAny>,
        end_ns: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (name, lane, range) = (name.text("name")?, lane.text("lane")?, range(start_ns, end_ns)?);
        match &*self.state() {
            TimelineState::Running(recording) => add(&recording.lane(lane), name, range),
            TimelineState::New | TimelineState::Over(_) => {
                Err(InvalidArgumentError::new_err("nothing is recorded outside of the `with` block"))
            }
        }
    }

    /// Summarise the recording after the block.
    ///
    /// The dictionary that this returns contains:
    ///
    /// - ``seconds``, ``requests``, ``ops``, ``bytes_read`` and ``bytes_written``; of these bytes,
    ///   ``bytes_direct``, ``bytes_bounced``, ``bytes_buffered`` and ``bytes_gds``;
    /// - ``disk_busy_s``: time with an op in flight;
    /// - ``copies``, ``bytes_copied``, ``copies_busy_s``, and ``disk_overlap``: the share of ``copies_busy_s`` with an
    ///   op in flight (``None`` without copies);
    /// - ``lanes``: for each added lane ``name``, ``spans`` (their number), ``busy_s``, and ``disk_overlap`` (the share
    ///   of ``busy_s`` with an op in flight);
    /// - ``events``, and ``dropped`` ones.
    ///
    /// Raises:
    ///     ValueError: the block has not ended yet.
    fn summary<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        // Copied out, so that the lock is free when Python switches threads.
        let summary = match &*self.state() {
            TimelineState::Over(summary) => summary.clone(),
            TimelineState::New | TimelineState::Running(_) => {
                return Err(InvalidArgumentError::new_err("there is no summary before the `with` block has ended"));
            }
        };
        py.import("json")?.call_method1("loads", (summary,))
    }

    fn __repr__(&self) -> String {
        let state = match &*self.state() {
            TimelineState::New => "not begun",
            TimelineState::Running(_) => "recording",
            TimelineState::Over(_) => "over",
        };
        format!("<deepnvme.Trace {}, {state}>", self.path.display())
    }
}

/// Adds a bar to the engine's running recordings. Without a recording, this does nothing.
pub(crate) fn span(engine: &Engine, name: &str, lane: &str, range: (u64, u64)) -> PyResult<()> {
    add(&engine.lane(lane), name, range)
}

/// Parses the start and end of a bar.
pub(crate) fn range(start_ns: &Bound<'_, PyAny>, end_ns: &Bound<'_, PyAny>) -> PyResult<(u64, u64)> {
    Ok((number("start_ns", start_ns)?, number("end_ns", end_ns)?))
}

fn add(lane: &Lane, name: &str, (start_ns, end_ns): (u64, u64)) -> PyResult<()> {
    if end_ns < start_ns {
        return Err(InvalidArgumentError::new_err(format!(
            "{name:?} would end at {end_ns} ns, before it began at {start_ns} ns"
        )));
    }
    lane.span(name, start_ns, end_ns);
    Ok(())
}

fn summary_json(recorded: &Recorded) -> String {
    trace::summarise(recorded).to_json()
}
