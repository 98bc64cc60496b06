//! The `_Swapper` and `_Borrowed` classes, which `deepnvme._swap` wraps.

use std::sync::{Arc, Mutex};

use deepnvme_file::stripe_set::STRIPE_BYTES_DEFAULT;
use deepnvme_mem::LockState;
use deepnvme_mem::dlpack::{self, DLDataType, DLManagedTensor};
use deepnvme_mem::sync::ignore_poison;
use deepnvme_swap::{AttachedRange, Borrowed, CopyStats, Error, FileRange, Swapper, SwapperOptions};
use pyo3::exceptions::{PyKeyError, PyMemoryError, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PyTuple};

use crate::engine::PyEngine;
use crate::error::InvalidArgumentError;
use crate::once::intern;
use crate::path::{PathArgument, file_name};
use crate::request::Offset;
use crate::stats::counter_dict;
use crate::{default, error, interruptible, memory, tensor_memory, torch};

/// A range of a file: path, descriptor, offset, length.
type ExtentTuple = (std::ffi::OsString, i32, u64, u64);

/// Store tensors by key on disk, and borrow them in one arena of memory.
#[pyclass(frozen, name = "_Swapper", module = "deepnvme._deepnvme")]
pub(crate) struct PySwapper {
    swapper: Swapper,
}

#[pymethods]
impl PySwapper {
    #[new]
    #[expect(clippy::needless_pass_by_value, reason = "Python hands it over")]
    #[expect(clippy::too_many_arguments, reason = "only the package calls it")]
    #[pyo3(signature = (folders, memory_bytes, prefetch_bytes, headroom_bytes, checksums, named, stripe_bytes, engine))]
    fn new(
        py: Python<'_>,
        folders: Vec<Bound<'_, PyAny>>,
        memory_bytes: usize,
        prefetch_bytes: Option<usize>,
        headroom_bytes: Option<usize>,
        checksums: bool,
        named: bool,
        stripe_bytes: Option<u64>,
        engine: Option<&Bound<'_, PyEngine>>,
    ) -> PyResult<Self> {
        let engine = default::or_default(py, engine)?;
        let options = SwapperOptions {
            folders: folders.iter().map(file_name).collect::<PyResult<_>>()?,
            memory_bytes,
            prefetch_bytes,
            headroom_bytes,
            has_checksums: checksums,
            is_named: named,
            stripe_bytes: stripe_bytes.unwrap_or(STRIPE_BYTES_DEFAULT),
        };
        let made = interruptible::allocate(py, memory_bytes, move || Swapper::new(engine, &options))?;
        Ok(Self { swapper: made.map_err(|error| to_exception(py, &error))? })
    }

    /// Export the whole arena as a DLPack capsule.
    fn capsule<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyCapsule>> {
        let arena = self.swapper.arena();
        let tensor =
            dlpack::export::<DLManagedTensor>(arena.region_mut(0..arena.len()), &[arena.len()], DLDataType::U8)?;
        memory::capsule(py, tensor)
    }

    /// Reason why the memory is not pinned; None if it is.
    #[getter]
    fn pinning_error(&self) -> Option<String> {
        match self.swapper.arena().lock_state() {
            LockState::Refused { reason } => Some(reason.clone()),
            LockState::Locked | LockState::NotRequested => None,
        }
    }

    /// Create an item, whose memory the caller writes.
    fn create(&self, py: Python<'_>, key: &str, nbytes: usize) -> PyResult<PyBorrowed> {
        interruptible(py, |is_cancelled| self.swapper.create(key, nbytes, is_cancelled)).map(PyBorrowed::new)
    }

    /// Wait until an item is in memory.
    fn borrow(&self, py: Python<'_>, key: &str, exclusive: bool) -> PyResult<PyBorrowed> {
        interruptible(py, |is_cancelled| self.swapper.borrow(key, exclusive, is_cancelled)).map(PyBorrowed::new)
    }

    /// Borrow an item in place, in memory or on disk.
    fn access(&self, py: Python<'_>, key: &str, exclusive: bool) -> PyResult<PyBorrowed> {
        interruptible(py, |is_cancelled| self.swapper.access(key, exclusive, is_cancelled)).map(PyBorrowed::new)
    }

    #[expect(clippy::needless_pass_by_value, reason = "Python hands it over")]
    fn prefetch(&self, py: Python<'_>, keys: Vec<String>) -> PyResult<()> {
        let wanted = py.detach(|| self.swapper.prefetch(keys.iter().map(String::as_str)));
        wanted.map_err(|error| to_exception(py, &error))
    }

    #[expect(clippy::needless_pass_by_value, reason = "Python hands it over")]
    fn schedule(&self, py: Python<'_>, keys: Vec<String>, repeat: bool) -> PyResult<()> {
        let set = py.detach(|| self.swapper.schedule(keys.iter().map(String::as_str), repeat));
        set.map_err(|error| to_exception(py, &error))
    }

    fn delete(&self, py: Python<'_>, key: &str) -> PyResult<()> {
        py.detach(|| self.swapper.delete(key)).map_err(|error| to_exception(py, &error))
    }

    #[expect(clippy::needless_pass_by_value, reason = "Python hands it over")]
    #[pyo3(signature = (keys=None))]
    fn flush(&self, py: Python<'_>, keys: Option<Vec<String>>) -> PyResult<()> {
        let keys: Option<Vec<&str>> = keys.as_ref().map(|keys| keys.iter().map(String::as_str).collect());
        interruptible(py, |is_cancelled| self.swapper.flush(keys.as_deref(), is_cancelled))
    }

    fn attach(
        &self,
        py: Python<'_>,
        key: &str,
        path: &Bound<'_, PyAny>,
        file_range: (Offset, usize),
        element_bytes: usize,
        label: &str,
    ) -> PyResult<()> {
        let target = PathArgument::new(path)?
            .named(|number| format!("attach takes a path, not descriptor {number}; or use import_"))?;
        let (offset, bytes) = (file_range.0.0, file_range.1);
        let range = AttachedRange { target: &target, offset, bytes, element_bytes };
        interruptible(py, |is_cancelled| self.swapper.attach(key, label, &range, is_cancelled)).map(drop)
    }

    fn extents(&self, py: Python<'_>, key: &str) -> PyResult<Vec<ExtentTuple>> {
        use std::os::fd::AsRawFd;
        let extents = interruptible(py, |is_cancelled| self.swapper.extents(key, is_cancelled))?;
        let tuple = |part: &deepnvme_swap::FileExtent| {
            (part.path.clone().into_os_string(), part.fd.as_raw_fd(), part.offset, part.bytes)
        };
        Ok(extents.iter().map(tuple).collect())
    }

    fn export<'py>(&self, py: Python<'py>, key: &str, fd: i32, offset: Offset) -> PyResult<Bound<'py, PyDict>> {
        let target = memory::borrow_descriptor(descriptor(fd)?);
        copy_stats(py, interruptible(py, |is_cancelled| self.swapper.export(key, target, offset.0, is_cancelled))?)
    }

    #[pyo3(name = "import_")]
    fn import<'py>(
        &self,
        py: Python<'py>,
        key: &str,
        fd: i32,
        offset: Offset,
        nbytes: usize,
        label: &str,
    ) -> PyResult<Bound<'py, PyDict>> {
        let range = FileRange { file: memory::borrow_descriptor(descriptor(fd)?), offset: offset.0, bytes: nbytes };
        let imported = interruptible(py, |is_cancelled| self.swapper.import(key, label, &range, is_cancelled))?;
        copy_stats(py, imported.1)
    }

    fn contains(&self, py: Python<'_>, key: &str) -> PyResult<bool> {
        self.check_open(py)?;
        Ok(py.detach(|| self.swapper.contains(key)))
    }

    fn keys(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        self.check_open(py)?;
        Ok(py.detach(|| self.swapper.keys()))
    }

    fn check_open(&self, py: Python<'_>) -> PyResult<()> {
        self.swapper.check_open().map_err(|error| to_exception(py, &error))
    }

    /// Whether the swapper is closed, or belongs to the parent process.
    #[getter]
    fn is_closed(&self) -> bool {
        self.swapper.check_open().is_err()
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.swapper.check_process().map_err(|error| to_exception(py, &error))?;
        let stats = py.detach(|| self.swapper.stats());
        let counters = counter_dict!(
            py,
            stats,
            hits,
            waits,
            bytes_read,
            bytes_written,
            reads,
            write_backs,
            failures,
            evictions,
            items,
            resident_bytes,
            resident_bytes_peak,
            memory_bytes,
            stored_bytes,
            file_bytes,
        )?;
        counters.set_item("stalled_s", stats.stalled.as_secs_f64())?;
        Ok(counters)
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.swapper.close());
    }
}

impl Drop for PySwapper {
    /// Waits for transfers in flight, without the GIL.
    fn drop(&mut self) {
        Python::try_attach(|py| py.detach(|| self.swapper.close()));
    }
}

/// A borrowed item.
#[pyclass(frozen, name = "_Borrowed", module = "deepnvme._deepnvme")]
pub(crate) struct PyBorrowed {
    /// Reads and writes of a range hold their own reference, so the lock is never held during I/O.
    borrowed: Mutex<Option<Arc<Borrowed>>>,
    offset: Option<usize>,
    nbytes: usize,
}

#[pymethods]
impl PyBorrowed {
    /// The text given when the item was stored.
    #[getter]
    fn label(&self) -> PyResult<String> {
        self.borrowed().map(|borrowed| borrowed.label().to_string())
    }

    /// Offset in the arena; None if it is borrowed on disk.
    #[getter]
    fn offset(&self) -> Option<usize> {
        self.offset
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.nbytes
    }

    fn mark_clean(&self) -> PyResult<()> {
        self.borrowed().map(|borrowed| borrowed.mark_clean())
    }

    fn mark_dirty(&self) -> PyResult<()> {
        self.borrowed().map(|borrowed| borrowed.mark_dirty())
    }

    fn read_at(&self, py: Python<'_>, start: usize, tensor: &Bound<'_, PyAny>) -> PyResult<()> {
        let (borrowed, target) = (self.borrowed()?, tensor_memory::target(tensor)?);
        torch::mark_modified(std::slice::from_ref(tensor))?;
        // The last reference may be dropped here, which must happen without the GIL.
        interruptible(py, move |is_cancelled| borrowed.read_at(start, target, is_cancelled))
    }

    fn write_at(&self, py: Python<'_>, start: usize, tensor: &Bound<'_, PyAny>) -> PyResult<()> {
        let (borrowed, source) = (self.borrowed()?, tensor_memory::source(tensor)?);
        interruptible(py, move |is_cancelled| borrowed.write_at(start, &source, is_cancelled))
    }

    /// Return the item; further calls do nothing. A created item that was not committed is discarded.
    fn release(&self, py: Python<'_>) {
        let borrowed = self.take();
        py.detach(|| drop(borrowed));
    }

    /// Complete a created item, and return it.
    fn commit(&self, py: Python<'_>, label: &str) -> PyResult<()> {
        let borrowed = self.take().and_then(Arc::into_inner).ok_or_else(already_returned)?;
        py.detach(move || borrowed.commit_as(label));
        Ok(())
    }
}

/// A ``with`` block's hold of an item. Its end is native, so that no signal handler runs before the item is returned.
#[pyclass(frozen, subclass, name = "_BorrowScope", module = "deepnvme._deepnvme")]
pub(crate) struct BorrowScope {
    held: Mutex<Option<Py<PyBorrowed>>>,
    /// Label of a tensor that is created; `None` if it exists already.
    filled: Mutex<Option<String>>,
    /// A tensor that several blocks may read.
    lent: Mutex<Option<SharedTensor>>,
}

/// The key of a tensor that must not change, the tensor, and the number of its changes so far.
type SharedTensor = (String, Py<PyAny>, i64);

#[pymethods]
impl BorrowScope {
    #[new]
    #[pyo3(signature = (*_arguments, **_options))]
    fn new(_arguments: &Bound<'_, PyTuple>, _options: Option<&Bound<'_, PyDict>>) -> Self {
        Self { held: Mutex::new(None), filled: Mutex::new(None), lent: Mutex::new(None) }
    }

    #[getter(_held)]
    fn held(&self, py: Python<'_>) -> Option<Py<PyBorrowed>> {
        ignore_poison(self.held.lock()).as_ref().map(|held| held.clone_ref(py))
    }

    #[setter(_held)]
    fn set_held(&self, held: Option<Py<PyBorrowed>>) {
        // Dropped without the lock: returning an item releases the GIL.
        let before = std::mem::replace(&mut *ignore_poison(self.held.lock()), held);
        drop(before);
    }

    #[getter(_filled)]
    fn filled(&self) -> Option<String> {
        ignore_poison(self.filled.lock()).clone()
    }

    #[setter(_filled)]
    fn set_filled(&self, filled: Option<String>) {
        *ignore_poison(self.filled.lock()) = filled;
    }

    #[setter(_lent)]
    fn set_lent(&self, lent: Option<SharedTensor>) {
        let before = std::mem::replace(&mut *ignore_poison(self.lent.lock()), lent);
        drop(before);
    }

    /// Complete a created item, unless the block raised, and return it. Raise if the block changed a shared one, which
    /// is written back.
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let Some(held) = ignore_poison(self.held.lock()).take() else { return Ok(()) };
        torch::wait_for_copies(py);
        let filled = ignore_poison(self.filled.lock()).clone();
        let committed = match filled {
            Some(label) if kind.is_none() => held.get().commit(py, &label),
            _ => Ok(()),
        };
        let changed = self.keep_change(py, &held);
        held.get().release(py);
        committed?;
        changed.map_or(Ok(()), |error| if kind.is_none() { Err(error) } else { Ok(()) })
    }

    fn _release(&self, py: Python<'_>) {
        let lent = ignore_poison(self.lent.lock()).take();
        drop(lent);
        let held = ignore_poison(self.held.lock()).take();
        if let Some(held) = held {
            torch::wait_for_copies(py);
            held.get().release(py);
        }
    }
}

impl BorrowScope {
    /// If the block changed a shared tensor, keeps the change and returns the error.
    fn keep_change(&self, py: Python<'_>, held: &Py<PyBorrowed>) -> Option<PyErr> {
        let (key, tensor, version) = ignore_poison(self.lent.lock()).take()?;
        let now = tensor.bind(py).getattr(intern!(py, "_version")).and_then(|now| now.extract::<i64>());
        match now {
            Ok(now) if now == version => return None,
            Ok(_) => {}
            Err(error) => return Some(error),
        }
        let is_kept = match held.get().borrowed() {
            Ok(borrowed) => borrowed.keep_change(),
            Err(error) => return Some(error),
        };
        let fate = if is_kept {
            "the change is kept, and other readers may have seen a part of it"
        } else {
            "the change is lost when the tensor leaves memory, since its file is never written"
        };
        let text = format!("{key:?} was changed while it was borrowed with shared=True; {fate}");
        let remedy = if is_kept { "borrow it without shared" } else { "put a copy under another key" };
        Some(InvalidArgumentError::new_err(format!("{text}: {remedy} to change it")))
    }
}

impl Drop for PyBorrowed {
    fn drop(&mut self) {
        // Usually it was returned already. Without an interpreter, there is no GIL to release.
        if let Some(borrowed) = self.take() {
            let mut borrowed = Some(borrowed);
            Python::try_attach(|py| {
                let borrowed = borrowed.take();
                py.detach(|| drop(borrowed));
            });
        }
    }
}

impl PyBorrowed {
    fn new(borrowed: Borrowed) -> Self {
        let (offset, nbytes) = (borrowed.offset(), borrowed.len());
        Self { borrowed: Mutex::new(Some(Arc::new(borrowed))), offset, nbytes }
    }

    fn take(&self) -> Option<Arc<Borrowed>> {
        ignore_poison(self.borrowed.lock()).take()
    }

    fn borrowed(&self) -> PyResult<Arc<Borrowed>> {
        ignore_poison(self.borrowed.lock()).clone().ok_or_else(already_returned)
    }
}

fn already_returned() -> PyErr {
    InvalidArgumentError::new_err("the tensor has been returned; borrow it again")
}

/// Runs a call that may block, without the GIL.
fn interruptible<T: Send>(
    py: Python<'_>,
    act: impl FnOnce(&mut dyn FnMut() -> bool) -> Result<T, Error> + Send,
) -> PyResult<T> {
    let result = interruptible::with_signals(py, |should_stop| act(&mut || should_stop()))?;
    result.map_err(|error| to_exception(py, &error))
}

fn descriptor(number: i32) -> PyResult<i32> {
    if number >= 0 {
        Ok(number)
    } else {
        Err(InvalidArgumentError::new_err(format!("{number} is not a file descriptor")))
    }
}

fn copy_stats(py: Python<'_>, stats: CopyStats) -> PyResult<Bound<'_, PyDict>> {
    counter_dict!(py, stats, shared_bytes, kernel_bytes, memory_bytes)
}

/// Converts an error to its Python exception.
fn to_exception(py: Python<'_>, error: &Error) -> PyErr {
    match error {
        Error::Io(error) => error::to_exception(py, error),
        Error::Corrupt { path, offset, .. } => {
            let raised = error::plain(py, "CorruptFileError", error.to_string());
            let value = raised.value(py);
            let named = value.setattr("filename", path.as_os_str()).and_then(|()| value.setattr("offset", offset));
            named.err().unwrap_or(raised)
        }
        Error::NotFound { .. } => PyKeyError::new_err(error.to_string()),
        Error::TooLarge { .. } => PyMemoryError::new_err(error.to_string()),
        Error::Deadlock(_) | Error::Panicked(_) => PyRuntimeError::new_err(error.to_string()),
        Error::ReadOnly { .. } | Error::Invalid(_) => InvalidArgumentError::new_err(error.to_string()),
        Error::Interrupted { .. } => error::plain(py, "CancelledError", error.to_string()),
        Error::Closed(_) => error::plain(py, "ClosedError", error.to_string()),
    }
}
