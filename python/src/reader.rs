//! The reader of `deepnvme.open`, behind `deepnvme.Reader`.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use deepnvme_file::Target;
use deepnvme_mem::{Device, RegionMut};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::engine::PyEngine;
use crate::error::InvalidArgumentError;
use crate::handle::Handle;
use crate::path::PathArgument;
use crate::pending_request::{AnyTransfer, PendingRequest};
use crate::request::wait_or_cancel;
use crate::{default, error, memory, tensor_memory, torch};

/// Largest read copied from a window without releasing the GIL.
const PEEK_BYTES_MAX: usize = 32 << 10;

/// Smallest read that bypasses the windows. Smaller reads gain more from prefetched bytes: with one request after the other, the disk idles in between.
const LARGE_BYTES_MIN: usize = 32 << 20;
/// Smallest fresh allocation for which huge pages pay off.
const HUGE_BYTES_MIN: usize = 8 << 20;

/// Read a file sequentially at a moving position.
#[pyclass(frozen, name = "_FileReader", module = "deepnvme._deepnvme")]
pub(crate) struct FileReader {
    handle: Handle<deepnvme_file::FileReader>,
    position: AtomicU64,
    file_bytes: u64,
}

#[pymethods]
impl FileReader {
    #[new]
    #[pyo3(signature = (path, engine))]
    fn new(py: Python<'_>, path: &Bound<'_, PyAny>, engine: Option<&Bound<'_, PyEngine>>) -> PyResult<Self> {
        let target = match PathArgument::new(path)? {
            PathArgument::Path(path) => Target::Path(path),
            PathArgument::Stripes(set) => Target::Stripes(set),
            // The same file, with its own position.
            PathArgument::Descriptor(number) => Target::Path(PathBuf::from(format!("/proc/self/fd/{number}"))),
        };
        let engine = default::or_default(py, engine)?;
        let opened = py.detach(|| deepnvme_file::FileReader::open(engine, &target));
        let reader = error::check(py, opened)?;
        let file_bytes = reader.len();
        Ok(Self { handle: Handle::new(reader), position: AtomicU64::new(0), file_bytes })
    }

    /// Read the next `size` bytes, or all remaining bytes if `size` is negative.
    fn read<'py>(&self, py: Python<'py>, size: i64) -> PyResult<Bound<'py, PyBytes>> {
        let (at, size) = self.take(u64::try_from(size).unwrap_or(u64::MAX));
        self.or_give_back(at, size, self.read_at(py, at, size))
    }

    /// Read the next `size` bytes, or all remaining bytes if `size` is negative, without moving the position.
    fn peek<'py>(&self, py: Python<'py>, size: i64) -> PyResult<Bound<'py, PyBytes>> {
        let (at, left) = self.left();
        self.read_at(py, at, u64::try_from(size).unwrap_or(left).min(left) as usize)
    }

    /// Fill a writable buffer up to the end of the file. Returns the number of bytes.
    fn readinto(&self, py: Python<'_>, buffer: &Bound<'_, PyAny>) -> PyResult<usize> {
        let target = tensor_memory::target(buffer)?;
        let (at, size) = self.take(target.len() as u64);
        self.or_give_back(at, size, self.fill_at(py, at, size, target))?;
        torch::mark_modified(std::slice::from_ref(buffer))?;
        Ok(size)
    }

    /// Move to `offset` from the start (0), the position (1) or the end (2). Returns the new position.
    fn seek(&self, offset: i64, whence: i32) -> PyResult<u64> {
        let base = match whence {
            0 => 0,
            1 => self.position.load(Ordering::Relaxed),
            2 => self.file_bytes,
            _ => return Err(InvalidArgumentError::new_err(format!("whence is {whence}; it must be 0, 1 or 2"))),
        };
        let Some(position) = base.checked_add_signed(offset) else {
            return Err(InvalidArgumentError::new_err(format!(
                "position {base} {offset:+} is before the start of the file"
            )));
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
    /// Reserves the next bytes for one caller, at most `wanted`. Threads that share a reader never get the same bytes.
    fn take(&self, wanted: u64) -> (u64, usize) {
        let mut at = self.position.load(Ordering::Relaxed);
        loop {
            let size = wanted.min(self.file_bytes.saturating_sub(at));
            match self.position.compare_exchange_weak(at, at + size, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return (at, size as usize),
                Err(now) => at = now,
            }
        }
    }

    /// Moves back over the reserved bytes after a failure, unless another caller moved on since.
    fn or_give_back<T>(&self, at: u64, size: usize, result: PyResult<T>) -> PyResult<T> {
        if result.is_err() {
            let _ = self.position.compare_exchange(at + size as u64, at, Ordering::Relaxed, Ordering::Relaxed);
        }
        result
    }

    fn read_at<'py>(&self, py: Python<'py>, at: u64, size: usize) -> PyResult<Bound<'py, PyBytes>> {
        let (bytes, target) = memory::new_bytes(py, size)?;
        self.fill(py, at, target)?;
        Ok(bytes)
    }

    /// Fills the first `size` bytes of `target`.
    fn fill_at(&self, py: Python<'_>, at: u64, size: usize, target: RegionMut) -> PyResult<()> {
        if target.device() != Device::Host && (size < LARGE_BYTES_MIN || size < target.len()) {
            let read = self.handle.with(py, |reader| reader.read_to_gpu(at, &target))?;
            check_whole(py, read, size)?;
        } else if size == target.len() {
            self.fill(py, at, target)?;
        } else if target.is_contiguous() {
            self.fill(py, at, target.split_at(size).0)?;
        } else {
            // The file ends in the middle of strided memory.
            let read = self.handle.with(py, |reader| reader.read_into(at, &target))?;
            check_whole(py, read, size)?;
        }
        Ok(())
    }

    /// Returns the position and the bytes left after it.
    fn left(&self) -> (u64, u64) {
        let at = self.position.load(Ordering::Relaxed);
        (at, self.file_bytes.saturating_sub(at))
    }

    /// Fills all of `target`. Small reads use the windows, large ones are requests of their own.
    fn fill(&self, py: Python<'_>, at: u64, target: RegionMut) -> PyResult<()> {
        let size = target.len();
        if size <= PEEK_BYTES_MAX && self.handle.try_peek(|reader| reader.read_held(at, &target)) == Some(true) {
            return Ok(());
        }
        if size >= HUGE_BYTES_MIN {
            target.advise_huge();
        }
        if size >= LARGE_BYTES_MIN {
            let pending = self.handle.with(py, |reader| reader.start_read(at, target))?;
            return wait_or_cancel(py, PendingRequest::new(AnyTransfer::Read(pending))).map(drop);
        }
        let read = self.handle.with(py, |reader| reader.read_into(at, &target))?;
        check_whole(py, read, size)
    }
}

fn check_whole(py: Python<'_>, read: usize, size: usize) -> PyResult<()> {
    if read == size {
        return Ok(());
    }
    let message = format!("the file became shorter while it was open: {read} of {size} bytes were there");
    Err(error::plain_after(py, "EndOfFileError", message, read as u64))
}
