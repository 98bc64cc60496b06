//! Save a whole file: the thread that writes it, and the callers that wait for it.

use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex};

use deepnvme_checkpoint::write::{Save, Saved};
use deepnvme_checkpoint::{Error, NamedRange, Progress, Result};
use deepnvme_file::{Replacement, Target};
use deepnvme_io::Engine;
use deepnvme_mem::CreatorProcess;
use deepnvme_mem::sync::ignore_poison;
use pyo3::prelude::*;

use super::load::progress_callback;
use super::new_file::{NewFile, already_taken};
use super::to_exception;
use crate::interruptible::check_process;
use crate::threads::SIGNAL_CHECK_INTERVAL;
use crate::{error, threads};

/// Destination of a save, and its final name.
pub(super) enum Destination {
    /// A private file, renamed at the end.
    Replace(Target),
    /// A private file that keeps its private name.
    Private(Target),
    /// An existing file, and the name that it gets later.
    Into(PathBuf, PathBuf),
}

/// Starts writing a whole file.
pub(super) fn start(py: Python<'_>, save: Save, engine: Arc<Engine>, destination: Destination) -> PyResult<Saving> {
    let progress = Arc::new(Progress::default());
    let state =
        Arc::new(SaveState { progress, outcome: Mutex::new(None), ended: Condvar::new(), file: Mutex::default() });
    let seen = Arc::clone(&state);
    threads::start(py, "deepnvme-save", move || {
        // Waiting callers are always told, even if the work panics.
        let _guard = CompletionGuard(&seen);
        let progress = Arc::clone(&seen.progress);
        let saved = match destination {
            Destination::Private(target) => save.write(engine, &target, progress).map(|(saved, file)| {
                *ignore_poison(seen.file.lock()) = Some(file);
                saved
            }),
            Destination::Replace(target) => save.run(engine, &target, progress),
            Destination::Into(path, target) => save.write_into(engine, &path, &target, progress),
        };
        *ignore_poison(seen.outcome.lock()) = Some(saved);
    })?;
    Ok(Saving { state, creator: CreatorProcess::current() })
}

/// File size, and the index's offset, size and checksum.
pub(super) type SavedTuple = (u64, u64, u64, u64);

pub(super) fn saved_tuple(saved: Saved) -> SavedTuple {
    (saved.bytes, saved.index_offset, saved.index_bytes, saved.index_crc64)
}

/// State shared by the save thread and its waiting callers.
struct SaveState {
    progress: Arc<Progress>,
    outcome: Mutex<Option<Result<Saved>>>,
    ended: Condvar,
    /// The file written under a private name.
    file: Mutex<Option<Replacement>>,
}

struct CompletionGuard<'a>(&'a SaveState);

impl Drop for CompletionGuard<'_> {
    fn drop(&mut self) {
        let mut outcome = ignore_poison(self.0.outcome.lock());
        if outcome.is_none() {
            let detail = "the thread that saved has panicked; report this as a bug";
            let panicked = deepnvme_io::Error::new(deepnvme_io::ErrorKind::Io, "save", detail);
            *outcome = Some(Err(Error::Io(panicked)));
        }
        self.0.progress.mark_filled();
        self.0.ended.notify_all();
    }
}

/// A save, running or ended.
#[pyclass(frozen, name = "_Saving", module = "deepnvme._deepnvme")]
pub(crate) struct Saving {
    state: Arc<SaveState>,
    /// In a forked child, the save never ends.
    creator: CreatorProcess,
}

#[pymethods]
impl Saving {
    /// Whether the save has ended, successfully or not.
    #[getter]
    fn done(&self) -> bool {
        ignore_poison(self.state.outcome.lock()).is_some()
    }

    /// Bytes: written, total.
    #[getter]
    fn progress(&self) -> (u64, u64) {
        self.state.progress.bytes()
    }

    /// Wait until the tensors may change.
    fn wait_filled(&self, py: Python<'_>) -> PyResult<()> {
        check_process(py, self.creator)?;
        while !py.detach(|| self.state.progress.wait_filled(SIGNAL_CHECK_INTERVAL)) {
            py.check_signals()?;
            check_process(py, self.creator)?;
        }
        Ok(())
    }

    /// Wait until the file is written and, unless the caller gives it its name, has its final name. Returns its size,
    /// and the index's offset, size and checksum.
    #[pyo3(signature = (progress, stop_on_signal))]
    fn wait(&self, py: Python<'_>, progress: Option<&Bound<'_, PyAny>>, stop_on_signal: bool) -> PyResult<SavedTuple> {
        let mut report_progress = progress_callback(progress, &self.state.progress);
        let mut raised = None;
        let outcome = loop {
            if let Err(forked) = check_process(py, self.creator) {
                return Err(raised.unwrap_or(forked));
            }
            if let Some(outcome) = py.detach(|| self.wait_slice()) {
                break outcome;
            }
            let looked = py.check_signals().and_then(|()| if raised.is_none() { report_progress() } else { Ok(()) });
            if let Err(signal) = looked {
                if !stop_on_signal {
                    return Err(signal);
                }
                self.state.progress.stop();
                raised = Some(signal);
            }
        };
        if let Some(signal) = raised {
            return Err(signal);
        }
        let saved = outcome.map_err(|error| to_exception(py, &error))?;
        report_progress()?;
        Ok(saved_tuple(saved))
    }

    /// Take the file that was written under a private name. If it is never taken, it is deleted with this object.
    fn take_file(&self) -> PyResult<NewFile> {
        let file = ignore_poison(self.state.file.lock()).take();
        file.map(NewFile::of).ok_or_else(already_taken)
    }

    /// Delete the file that was written under a private name, unless it was taken. The save must be over.
    fn discard(&self, py: Python<'_>) {
        let file = ignore_poison(self.state.file.lock()).take();
        py.detach(|| drop(file));
    }

    /// Stop the save soon; ``wait`` then raises.
    fn stop(&self) {
        self.state.progress.stop();
    }
}

impl Saving {
    fn wait_slice(&self) -> Option<Result<Saved>> {
        let outcome = ignore_poison(self.state.outcome.lock());
        let waited = self.state.ended.wait_timeout_while(outcome, SIGNAL_CHECK_INTERVAL, |outcome| outcome.is_none());
        ignore_poison(waited).0.clone()
    }
}

/// Compute the CRC-64/NVME of a byte range of a file.
#[pyfunction]
pub(crate) fn _crc64(py: Python<'_>, path: &Bound<'_, PyAny>, offset: u64, nbytes: u64) -> PyResult<u64> {
    crc64(py, &[NamedRange { path: crate::path::file_name(path)?, offset, bytes: nbytes }])
}

/// Compute the CRC-64/NVME of concatenated byte ranges: path, offset and bytes of each.
#[pyfunction]
pub(crate) fn _crc64_of_all(py: Python<'_>, ranges: Vec<(PathBuf, u64, u64)>) -> PyResult<u64> {
    let range = |(path, offset, bytes)| NamedRange { path, offset, bytes };
    crc64(py, &ranges.into_iter().map(range).collect::<Vec<_>>())
}

fn crc64(py: Python<'_>, ranges: &[NamedRange]) -> PyResult<u64> {
    let sum = py.detach(|| deepnvme_checkpoint::crc64_of(ranges));
    error::check(py, sum)?.ok_or_else(|| {
        let place = |NamedRange { path, offset, bytes }: &NamedRange| {
            let end = offset.saturating_add(*bytes);
            format!("{}: {bytes} bytes are expected before byte {end}", deepnvme_io::display::path(path))
        };
        let places: Vec<String> = ranges.iter().map(place).collect();
        let text = format!("the file is too short: {}; restore it from a copy, or write it again", places.join("; "));
        error::plain(py, "CorruptFileError", text)
    })
}
