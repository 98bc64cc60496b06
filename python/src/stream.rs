//! The two ends of `deepnvme.open`: what its Python classes call for bytes.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use deepnvme_io::Target;
use deepnvme_io::stream::{self, BUFFER_BYTES};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::engine::PyEngine;
use crate::flight::{Flight, Kind};
use crate::path::Place;
use crate::request::run_flight;
use crate::{default, error, memory, settings};

/// Between two looks at signals a writer takes that many bytes.
const WRITE_STEP_BYTES: usize = 32 << 20;

/// Writes a file from its start; it appears under its name when committed.
#[pyclass(frozen, name = "_FileWriter", module = "deepnvme._deepnvme")]
pub(crate) struct FileWriter {
    inner: Mutex<Option<stream::FileWriter>>,
    position: AtomicU64,
    pid: u32,
}

#[pymethods]
impl FileWriter {
    #[new]
    #[pyo3(signature = (path, engine, durability))]
    fn new(
        py: Python<'_>,
        path: &Bound<'_, PyAny>,
        engine: Option<&Bound<'_, PyEngine>>,
        durability: &str,
    ) -> PyResult<Self> {
        let durability = settings::durability(durability)?;
        let target = match Place::new(path)? {
            Place::Path(path) => Target::Path(path),
            Place::Stripes(set) => Target::Stripes(set),
            Place::Descriptor(number) => {
                return Err(PyTypeError::new_err(format!(
                    "a file opened for writing is replaced at once, so that it needs a path, and {number} is a \
                     descriptor; write to it with deepnvme.write"
                )));
            }
        };
        let engine = default::or_default(py, engine)?;
        let inner = py.detach(|| stream::FileWriter::create(engine, &target, durability));
        let inner = Mutex::new(Some(error::check(py, inner)?));
        Ok(Self { inner, position: AtomicU64::new(0), pid: std::process::id() })
    }

    /// Takes all bytes of a contiguous buffer; how many those were.
    fn write(&self, py: Python<'_>, data: &Bound<'_, PyAny>) -> PyResult<usize> {
        self.check_process(py)?;
        memory::with_bytes(data, |bytes| {
            for step in bytes.chunks(WRITE_STEP_BYTES) {
                let written = py.detach(|| self.with(|writer| writer.write(step)))?;
                error::check(py, written)?;
                self.position.fetch_add(step.len() as u64, Ordering::Relaxed);
                py.check_signals()?;
            }
            Ok(bytes.len())
        })
    }

    fn tell(&self) -> u64 {
        self.position.load(Ordering::Relaxed)
    }

    /// Writes the rest, makes it durable as asked, and gives the file its name.
    fn commit(&self, py: Python<'_>) -> PyResult<()> {
        self.check_process(py)?;
        let committed = py.detach(|| self.take().map(stream::FileWriter::commit));
        committed.map_or(Ok(()), |result| error::check(py, result))
    }

    /// Throws all of it away.
    fn abort(&self, py: Python<'_>) {
        if self.pid == std::process::id() {
            py.detach(|| drop(self.take()));
        }
    }
}

impl FileWriter {
    fn check_process(&self, py: Python<'_>) -> PyResult<()> {
        if self.pid == std::process::id() {
            return Ok(());
        }
        let message = "the file was opened before the fork, and belongs to the parent process; open it again";
        Err(error::plain(py, "ClosedError", message.into()))
    }

    /// To be called without the GIL: another thread may hold the lock while it waits for the disk.
    fn with<T>(&self, act: impl FnOnce(&mut stream::FileWriter) -> T) -> PyResult<T> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.as_mut().map(act).ok_or_else(closed)
    }

    fn take(&self) -> Option<stream::FileWriter> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Drop for FileWriter {
    /// Never committed: throws it away, but for a forked child, whose parent may still commit it.
    fn drop(&mut self) {
        let inner = self.inner.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if self.pid != std::process::id() {
            std::mem::forget(inner);
        }
    }
}

/// Reads a file at a position that moves with the reading.
#[pyclass(frozen, name = "_FileReader", module = "deepnvme._deepnvme")]
pub(crate) struct FileReader {
    inner: Mutex<Option<stream::FileReader>>,
    position: AtomicU64,
    file_bytes: u64,
    pid: u32,
}

#[pymethods]
impl FileReader {
    #[new]
    #[pyo3(signature = (path, engine))]
    fn new(py: Python<'_>, path: &Bound<'_, PyAny>, engine: Option<&Bound<'_, PyEngine>>) -> PyResult<Self> {
        let target = match Place::new(path)? {
            Place::Path(path) => Target::Path(path),
            Place::Stripes(set) => Target::Stripes(set),
            // The same file, with a position of its own.
            Place::Descriptor(number) => Target::Path(PathBuf::from(format!("/proc/self/fd/{number}"))),
        };
        let engine = default::or_default(py, engine)?;
        let opened = py.detach(|| stream::FileReader::open(engine, &target));
        let inner = error::check(py, opened)?;
        let file_bytes = inner.len();
        let position = AtomicU64::new(0);
        Ok(Self { inner: Mutex::new(Some(inner)), position, file_bytes, pid: std::process::id() })
    }

    /// The next `size` bytes, or all that are left where it is negative.
    fn read<'py>(&self, py: Python<'py>, size: i64) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = self.peek(py, size)?;
        self.position.fetch_add(bytes.as_bytes().len() as u64, Ordering::Relaxed);
        Ok(bytes)
    }

    /// The same bytes, without moving on.
    fn peek<'py>(&self, py: Python<'py>, size: i64) -> PyResult<Bound<'py, PyBytes>> {
        self.check_process(py)?;
        let (at, left) = self.left();
        let size = u64::try_from(size).unwrap_or(left).min(left) as usize;
        if size >= BUFFER_BYTES {
            let (bytes, target) = memory::new_bytes(py, size)?;
            self.fill(py, at, target)?;
            return Ok(bytes);
        }
        PyBytes::new_with(py, size, |out| {
            let read = py.detach(|| self.with(|reader| reader.read_at(at, out)))?;
            Self::check_whole(py, error::check(py, read)?, size)
        })
    }

    /// Fills a writable buffer as far as the file goes; how many bytes that were.
    fn readinto(&self, py: Python<'_>, buffer: &Bound<'_, PyAny>) -> PyResult<usize> {
        self.check_process(py)?;
        let (at, left) = self.left();
        let target = memory::target(buffer)?;
        let size = (target.len() as u64).min(left) as usize;
        let whole = if size == target.len() || !target.is_contiguous() { target } else { target.split_at(size).0 };
        if size >= BUFFER_BYTES || !whole.is_contiguous() {
            self.fill(py, at, whole)?;
        } else {
            let mut bytes = vec![0; size];
            let read = py.detach(|| self.with(|reader| reader.read_at(at, &mut bytes)))?;
            Self::check_whole(py, error::check(py, read)?, size)?;
            whole.copy_from_slice(0, &bytes);
        }
        self.position.fetch_add(size as u64, Ordering::Relaxed);
        Ok(size)
    }

    /// Moves to `offset` from the start (0), from here (1) or from the end (2); where that is.
    fn seek(&self, offset: i64, whence: i32) -> PyResult<u64> {
        let base = match whence {
            0 => 0,
            1 => self.position.load(Ordering::Relaxed),
            2 => self.file_bytes,
            _ => return Err(PyValueError::new_err(format!("whence is {whence}; it must be 0, 1 or 2"))),
        };
        let Some(position) = base.checked_add_signed(offset) else {
            return Err(PyValueError::new_err(format!("position {base} {offset:+} is before the start of the file")));
        };
        self.position.store(position, Ordering::Relaxed);
        Ok(position)
    }

    fn tell(&self) -> u64 {
        self.position.load(Ordering::Relaxed)
    }

    fn close(&self, py: Python<'_>) {
        if self.pid == std::process::id() {
            py.detach(|| drop(self.inner.lock().unwrap_or_else(PoisonError::into_inner).take()));
        }
    }
}

impl FileReader {
    fn check_process(&self, py: Python<'_>) -> PyResult<()> {
        if self.pid == std::process::id() {
            return Ok(());
        }
        let message = "the file was opened before the fork, and belongs to the parent process; open it again";
        Err(error::plain(py, "ClosedError", message.into()))
    }

    /// The position, and how many bytes are left from there.
    fn left(&self) -> (u64, u64) {
        let at = self.position.load(Ordering::Relaxed);
        (at, self.file_bytes.saturating_sub(at))
    }

    /// Large reads go past the buffers, straight to the caller's memory.
    fn fill(&self, py: Python<'_>, at: u64, target: deepnvme_mem::RegionMut) -> PyResult<()> {
        let started = py.detach(|| self.with(|reader| reader.start_read(at, target)))?;
        let flight = Flight::new(Kind::Read(error::check(py, started)?));
        run_flight(py, flight).map(drop)
    }

    fn check_whole(py: Python<'_>, read: usize, size: usize) -> PyResult<()> {
        if read == size {
            return Ok(());
        }
        let message = format!("the file became shorter while it was open: {read} of {size} bytes were there");
        Err(error::plain_after(py, "EndOfFileError", message, read as u64))
    }

    fn with<T>(&self, act: impl FnOnce(&mut stream::FileReader) -> T) -> PyResult<T> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.as_mut().map(act).ok_or_else(closed)
    }
}

fn closed() -> PyErr {
    PyValueError::new_err("I/O operation on closed file")
}
