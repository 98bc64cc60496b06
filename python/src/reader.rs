//! The reading end of `deepnvme.open`: what `deepnvme.Reader` calls.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use deepnvme_io::Target;
use deepnvme_io::stream::{self, BUFFER_BYTES};
use deepnvme_mem::RegionMut;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::engine::PyEngine;
use crate::flight::{Flight, Kind};
use crate::handle::Handle;
use crate::path::Place;
use crate::request::run_flight;
use crate::{default, error, memory};

/// Reads a file at a position that moves with the reading.
#[pyclass(frozen, name = "_FileReader", module = "deepnvme._deepnvme")]
pub(crate) struct FileReader {
    handle: Handle<stream::FileReader>,
    position: AtomicU64,
    file_bytes: u64,
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
        let reader = error::check(py, opened)?;
        let file_bytes = reader.len();
        Ok(Self { handle: Handle::new(reader), position: AtomicU64::new(0), file_bytes })
    }

    /// The next `size` bytes, or all that are left where it is negative.
    fn read<'py>(&self, py: Python<'py>, size: i64) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = self.peek(py, size)?;
        self.position.fetch_add(bytes.as_bytes().len() as u64, Ordering::Relaxed);
        Ok(bytes)
    }

    /// The same bytes, without moving on.
    fn peek<'py>(&self, py: Python<'py>, size: i64) -> PyResult<Bound<'py, PyBytes>> {
        let (at, left) = self.left();
        let size = u64::try_from(size).unwrap_or(left).min(left) as usize;
        if size >= BUFFER_BYTES {
            let (bytes, target) = memory::new_bytes(py, size)?;
            self.fill(py, at, target)?;
            return Ok(bytes);
        }
        PyBytes::new_with(py, size, |out| {
            let read = self.handle.with(py, |reader| reader.read_at(at, out))?;
            check_whole(py, read, size)
        })
    }

    /// Fills a writable buffer as far as the file goes; how many bytes that were.
    fn readinto(&self, py: Python<'_>, buffer: &Bound<'_, PyAny>) -> PyResult<usize> {
        let (at, left) = self.left();
        let target = memory::target(buffer)?;
        let size = (target.len() as u64).min(left) as usize;
        // Strided memory is filled through a block of its own where it is not filled to its end.
        if size == target.len() && (size >= BUFFER_BYTES || !target.is_contiguous()) {
            self.fill(py, at, target)?;
        } else if size >= BUFFER_BYTES && target.is_contiguous() {
            self.fill(py, at, target.split_at(size).0)?;
        } else {
            let mut bytes = vec![0; size];
            let read = self.handle.with(py, |reader| reader.read_at(at, &mut bytes))?;
            check_whole(py, read, size)?;
            target.copy_from_slice(0, &bytes);
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
        let _ = self.handle.end(py, drop);
    }
}

impl FileReader {
    /// The position, and how many bytes are left from there.
    fn left(&self) -> (u64, u64) {
        let at = self.position.load(Ordering::Relaxed);
        (at, self.file_bytes.saturating_sub(at))
    }

    /// Large reads go past the buffers, straight to the caller's memory.
    fn fill(&self, py: Python<'_>, at: u64, target: RegionMut) -> PyResult<()> {
        let pending = self.handle.with(py, |reader| reader.start_read(at, target))?;
        run_flight(py, Flight::new(Kind::Read(pending))).map(drop)
    }
}

fn check_whole(py: Python<'_>, read: usize, size: usize) -> PyResult<()> {
    if read == size {
        return Ok(());
    }
    let message = format!("the file became shorter while it was open: {read} of {size} bytes were there");
    Err(error::plain_after(py, "EndOfFileError", message, read as u64))
}
