//! The writer of `deepnvme.open`, behind `deepnvme.Writer`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::RecvTimeoutError;

use pyo3::prelude::*;

use crate::engine::PyEngine;
use crate::handle::Handle;
use crate::path::PathArgument;
use crate::pending_request::CANCEL_TIMEOUT;
use crate::settings::{self, Word};
use crate::threads::SIGNAL_CHECK_INTERVAL;
use crate::{default, error, memory, tensor_memory, threads};

/// Bytes written between signal checks.
const STEP_BYTES: usize = 32 << 20;

/// Write a file from its start. It appears under its name when committed.
#[pyclass(frozen, name = "_FileWriter", module = "deepnvme._deepnvme")]
pub(crate) struct FileWriter {
    handle: Handle<deepnvme_file::FileWriter>,
    position: AtomicU64,
}

#[pymethods]
impl FileWriter {
    #[new]
    #[pyo3(signature = (path, engine, durability))]
    fn new(
        py: Python<'_>,
        path: &Bound<'_, PyAny>,
        engine: Option<&Bound<'_, PyEngine>>,
        durability: Word<'_, '_>,
    ) -> PyResult<Self> {
        let durability = settings::durability(durability)?;
        let target = PathArgument::new(path)?.named(|number| {
            format!(
                "a file opened for writing is replaced at once, so that it needs a path, and {number} is a \
                 descriptor; write to it with deepnvme.write"
            )
        })?;
        let engine = default::or_default(py, engine)?;
        let writer = py.detach(|| deepnvme_file::FileWriter::create(engine, &target, durability));
        Ok(Self { handle: Handle::new(error::check(py, writer)?), position: AtomicU64::new(0) })
    }

    /// Write a contiguous buffer or a tensor. Returns the number of bytes.
    fn write(&self, py: Python<'_>, data: &Bound<'_, PyAny>) -> PyResult<usize> {
        if !memory::is_buffer(data) {
            let source = tensor_memory::source(data)?;
            self.handle.with(py, |writer| writer.write_region(&source))?;
            self.position.fetch_add(source.len() as u64, Ordering::Relaxed);
            return Ok(source.len());
        }
        memory::with_bytes(data, |bytes| {
            if bytes.is_empty() {
                self.handle.with(py, |_| Ok(()))?;
            }
            for step in bytes.chunks(STEP_BYTES) {
                self.handle.with(py, |writer| writer.write(step))?;
                self.position.fetch_add(step.len() as u64, Ordering::Relaxed);
                py.check_signals()?;
            }
            Ok(bytes.len())
        })
    }

    fn tell(&self) -> u64 {
        self.position.load(Ordering::Relaxed)
    }

    /// Write the rest, make it durable as requested, and rename the file. Another thread waits for the sync, so that
    /// Ctrl-C works here. If interrupted, no file remains, unless it was already renamed.
    fn commit(&self, py: Python<'_>) -> PyResult<()> {
        let Some(writer) = self.handle.end(py, |writer| writer)? else { return Ok(()) };
        let is_cancelled = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&is_cancelled);
        let commit = threads::start(py, "deepnvme-commit", move || writer.commit_unless(&seen))?;
        loop {
            match commit.wait(py, SIGNAL_CHECK_INTERVAL) {
                Ok(result) => return error::check(py, result),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(error::plain(py, "Error", "the thread that closed the file stopped".into()));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            if let Err(interrupt) = py.check_signals() {
                is_cancelled.store(true, Ordering::SeqCst);
                // Mostly it ends within this time, and nothing is left when the caller looks.
                let _ = commit.wait(py, CANCEL_TIMEOUT);
                return Err(interrupt);
            }
        }
    }

    /// Discard the file, in the process that opened it.
    fn discard(&self, py: Python<'_>) {
        let _ = self.handle.end(py, drop);
    }
}
