//! Tensors by key in bounded memory, as `deepnvme._swap` sees them.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use deepnvme_io::Target;
use deepnvme_io::stripe::STRIPE_BYTES_DEFAULT;
use deepnvme_mem::LockState;
use deepnvme_mem::dlpack::{self, DLDataType, DLManagedTensor};
use deepnvme_mem::sync::ignore_poison;
use deepnvme_swap::{Copied, Error, Lend, Options, Swapper};
use pyo3::exceptions::{PyKeyError, PyMemoryError, PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};

use crate::engine::PyEngine;
use crate::path::{Place, file_name};
use crate::request::Offset;
use crate::{default, error, memory};

/// A stretch of a file: path, descriptor, offset, bytes.
type LocatedTuple = (std::ffi::OsString, i32, u64, u64);

/// Items that pass through the slots of an arena.
#[pyclass(frozen, name = "_Swapper", module = "deepnvme._deepnvme")]
pub(crate) struct PySwapper {
    swapper: Swapper,
}

#[pymethods]
impl PySwapper {
    #[new]
    #[expect(clippy::needless_pass_by_value, reason = "Python hands it over")]
    #[expect(clippy::too_many_arguments, reason = "only the package calls it")]
    #[pyo3(signature = (folders, memory_bytes, ahead_bytes, reserve_bytes, checksums, named, stripe_bytes, engine))]
    fn new(
        py: Python<'_>,
        folders: Vec<Bound<'_, PyAny>>,
        memory_bytes: usize,
        ahead_bytes: Option<usize>,
        reserve_bytes: Option<usize>,
        checksums: bool,
        named: bool,
        stripe_bytes: Option<u64>,
        engine: Option<&Bound<'_, PyEngine>>,
    ) -> PyResult<Self> {
        let engine = default::or_default(py, engine)?;
        let options = Options {
            folders: folders.iter().map(file_name).collect::<PyResult<_>>()?,
            memory_bytes,
            ahead_bytes,
            reserve_bytes,
            has_checksums: checksums,
            is_named: named,
            stripe_bytes: stripe_bytes.unwrap_or(STRIPE_BYTES_DEFAULT),
        };
        // Locking memory touches every page of it.
        let swapper = py.detach(|| Swapper::new(engine, &options)).map_err(|failure| raise(py, &failure))?;
        Ok(Self { swapper })
    }

    /// All the memory, as a DLPack capsule.
    fn capsule<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyCapsule>> {
        let arena = self.swapper.arena();
        let tensor =
            dlpack::export::<DLManagedTensor>(arena.region_mut(0..arena.len()), &[arena.len()], DLDataType::U8)?;
        memory::capsule(py, tensor)
    }

    /// Why the memory is not page-locked, if it is not.
    #[getter]
    fn lock_refusal(&self) -> Option<String> {
        match self.swapper.arena().lock_state() {
            LockState::Refused { reason } => Some(reason.clone()),
            LockState::Locked | LockState::NotRequested => None,
        }
    }

    /// Makes room for an item, which the caller fills.
    fn fill(&self, py: Python<'_>, key: &str, nbytes: usize) -> PyResult<PyLend> {
        waiting(py, |look| self.swapper.fill(key, nbytes, look)).map(PyLend::new)
    }

    /// Waits until an item is in memory.
    fn lend(&self, py: Python<'_>, key: &str, exclusive: bool) -> PyResult<PyLend> {
        waiting(py, |look| self.swapper.lend(key, exclusive, look)).map(PyLend::new)
    }

    /// An item where it is, in memory or on disk.
    fn access(&self, py: Python<'_>, key: &str, exclusive: bool) -> PyResult<PyLend> {
        waiting(py, |look| self.swapper.access(key, exclusive, look)).map(PyLend::new)
    }

    #[expect(clippy::needless_pass_by_value, reason = "Python hands it over")]
    fn prefetch(&self, py: Python<'_>, keys: Vec<String>) -> PyResult<()> {
        let wanted = py.detach(|| self.swapper.prefetch(keys.iter().map(String::as_str)));
        wanted.map_err(|failure| raise(py, &failure))
    }

    #[expect(clippy::needless_pass_by_value, reason = "Python hands it over")]
    fn schedule(&self, py: Python<'_>, keys: Vec<String>, repeat: bool) -> PyResult<()> {
        let set = py.detach(|| self.swapper.schedule(keys.iter().map(String::as_str), repeat));
        set.map_err(|failure| raise(py, &failure))
    }

    fn forget(&self, py: Python<'_>, key: &str) -> PyResult<()> {
        py.detach(|| self.swapper.forget(key)).map_err(|failure| raise(py, &failure))
    }

    #[expect(clippy::needless_pass_by_value, reason = "Python hands it over")]
    #[pyo3(signature = (keys=None))]
    fn flush(&self, py: Python<'_>, keys: Option<Vec<String>>) -> PyResult<()> {
        let keys: Option<Vec<&str>> = keys.as_ref().map(|keys| keys.iter().map(String::as_str).collect());
        waiting(py, |look| self.swapper.flush(keys.as_deref(), look))
    }

    fn adopt(
        &self,
        py: Python<'_>,
        key: &str,
        path: &Bound<'_, PyAny>,
        extent: (Offset, usize),
        item_bytes: usize,
        label: &str,
    ) -> PyResult<()> {
        let target = match Place::new(path)? {
            Place::Path(path) => Target::Path(path),
            Place::Stripes(set) => Target::Stripes(set),
            Place::Descriptor(number) => {
                return Err(PyTypeError::new_err(format!(
                    "a path is adopted from, not descriptor {number}; or use import_"
                )));
            }
        };
        let adopted = py.detach(|| self.swapper.adopt((key, label), &target, extent.0.0, extent.1, item_bytes));
        adopted.map(drop).map_err(|failure| raise(py, &failure))
    }

    fn locate(&self, py: Python<'_>, key: &str) -> PyResult<Vec<LocatedTuple>> {
        use std::os::fd::AsRawFd;
        let located = waiting(py, |look| self.swapper.locate(key, look))?;
        let tuple = |part: &deepnvme_swap::Located| {
            (part.path.clone().into_os_string(), part.fd.as_raw_fd(), part.offset, part.bytes)
        };
        Ok(located.iter().map(tuple).collect())
    }

    fn export<'py>(&self, py: Python<'py>, key: &str, fd: i32, offset: Offset) -> PyResult<Bound<'py, PyDict>> {
        let target = memory::borrow_descriptor(descriptor(fd)?);
        copied(py, waiting(py, |look| self.swapper.export(key, target, offset.0, look))?)
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
        let source = memory::borrow_descriptor(descriptor(fd)?);
        copied(py, waiting(py, |look| self.swapper.import((key, label), source, offset.0, nbytes, look))?.1)
    }

    fn contains(&self, py: Python<'_>, key: &str) -> bool {
        py.detach(|| self.swapper.contains(key))
    }

    fn keys(&self, py: Python<'_>) -> Vec<String> {
        py.detach(|| self.swapper.keys())
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = py.detach(|| self.swapper.stats());
        let figures = PyDict::new(py);
        let counts = [
            ("hits", stats.hits),
            ("waits", stats.waits),
            ("bytes_read", stats.bytes_read),
            ("bytes_written", stats.bytes_written),
            ("reads", stats.reads),
            ("write_backs", stats.write_backs),
            ("failures", stats.failures),
            ("evictions", stats.evictions),
            ("items", stats.items),
            ("resident_bytes", stats.resident_bytes),
            ("resident_bytes_peak", stats.resident_bytes_peak),
            ("memory_bytes", stats.memory_bytes),
            ("stored_bytes", stats.stored_bytes),
            ("file_bytes", stats.file_bytes),
        ];
        counts.into_iter().try_for_each(|(name, count)| figures.set_item(name, count))?;
        figures.set_item("stalled_s", stats.stalled.as_secs_f64())?;
        Ok(figures)
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.swapper.close());
    }
}

impl Drop for PySwapper {
    /// What is on its way is waited for without the GIL, which whoever dropped the last reference has.
    fn drop(&mut self) {
        Python::try_attach(|py| py.detach(|| self.swapper.close()));
    }
}

/// An item that is held.
#[pyclass(frozen, name = "_Lend", module = "deepnvme._deepnvme")]
pub(crate) struct PyLend {
    /// Shared with whoever reads or writes a part of it just now: the lock is never held meanwhile.
    lend: Mutex<Option<Arc<Lend>>>,
    offset: Option<usize>,
    nbytes: usize,
}

#[pymethods]
impl PyLend {
    /// What was said of the item when it was put.
    #[getter]
    fn label(&self) -> PyResult<String> {
        self.lend().map(|lend| lend.label().to_string())
    }

    /// Where in the arena it is; None where it is on disk only.
    #[getter]
    fn offset(&self) -> Option<usize> {
        self.offset
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.nbytes
    }

    fn mark_clean(&self) -> PyResult<()> {
        self.lend().map(|lend| lend.mark_clean())
    }

    fn mark_dirty(&self) -> PyResult<()> {
        self.lend().map(|lend| lend.mark_dirty())
    }

    fn read_part(&self, py: Python<'_>, start: usize, tensor: &Bound<'_, PyAny>) -> PyResult<()> {
        let (lend, target) = (self.lend()?, memory::target(tensor)?);
        // Also what is dropped last is dropped without the GIL.
        py.detach(move || lend.read_part(start, target)).map_err(|failure| raise(py, &failure))
    }

    fn write_part(&self, py: Python<'_>, start: usize, tensor: &Bound<'_, PyAny>) -> PyResult<()> {
        let (lend, source) = (self.lend()?, memory::source(tensor)?);
        py.detach(move || lend.write_part(start, &source)).map_err(|failure| raise(py, &failure))
    }

    /// Returns the item; more than once is once. What was to be filled, and was not committed, is no item.
    fn release(&self, py: Python<'_>) {
        let lend = self.take();
        py.detach(|| drop(lend));
    }

    /// What was filled is complete; returns the item.
    fn commit(&self, py: Python<'_>, label: &str) -> PyResult<()> {
        let lend = self.take().and_then(Arc::into_inner).ok_or_else(returned)?;
        py.detach(move || lend.commit_as(label));
        Ok(())
    }
}

impl Drop for PyLend {
    fn drop(&mut self) {
        // As a rule it was returned. The GIL is let go of where there is an interpreter still.
        if let Some(lend) = self.take() {
            let mut lend = Some(lend);
            Python::try_attach(|py| {
                let lend = lend.take();
                py.detach(|| drop(lend));
            });
        }
    }
}

impl PyLend {
    fn new(lend: Lend) -> Self {
        let (offset, nbytes) = (lend.offset(), lend.len());
        Self { lend: Mutex::new(Some(Arc::new(lend))), offset, nbytes }
    }

    fn take(&self) -> Option<Arc<Lend>> {
        ignore_poison(self.lend.lock()).take()
    }

    fn lend(&self) -> PyResult<Arc<Lend>> {
        ignore_poison(self.lend.lock()).clone().ok_or_else(returned)
    }
}

fn returned() -> PyErr {
    PyValueError::new_err("the tensor has been returned; lend it again")
}

/// Runs what may wait, without the GIL but for a look at signals now and then.
fn waiting<T: Send>(
    py: Python<'_>,
    act: impl FnOnce(&mut dyn FnMut() -> bool) -> Result<T, Error> + Send,
) -> PyResult<T> {
    let mut interrupt = None;
    let result = py.detach(|| {
        let mut last = std::time::Instant::now();
        let mut look = || {
            if last.elapsed() < Duration::from_millis(20) {
                return false;
            }
            last = std::time::Instant::now();
            interrupt = Python::attach(|py| py.check_signals().err());
            interrupt.is_some()
        };
        act(&mut look)
    });
    match interrupt {
        Some(interrupt) => Err(interrupt),
        None => result.map_err(|failure| raise(py, &failure)),
    }
}

fn descriptor(number: i32) -> PyResult<i32> {
    if number >= 0 { Ok(number) } else { Err(PyValueError::new_err(format!("{number} is no file descriptor"))) }
}

fn copied(py: Python<'_>, copied: Copied) -> PyResult<Bound<'_, PyDict>> {
    let figures = PyDict::new(py);
    figures.set_item("shared_bytes", copied.shared_bytes)?;
    figures.set_item("kernel_bytes", copied.kernel_bytes)?;
    figures.set_item("memory_bytes", copied.memory_bytes)?;
    Ok(figures)
}

/// What failed, as the exception that Python code expects.
fn raise(py: Python<'_>, failure: &Error) -> PyErr {
    match failure {
        Error::Io(failure) => error::raise(py, failure),
        Error::Corrupt { path, offset, .. } => {
            let raised = error::plain(py, "CorruptFileError", failure.to_string());
            let value = raised.value(py);
            let named = value.setattr("filename", path.as_os_str()).and_then(|()| value.setattr("offset", offset));
            named.err().unwrap_or(raised)
        }
        Error::NotFound { .. } => PyKeyError::new_err(failure.to_string()),
        Error::TooLarge { .. } => PyMemoryError::new_err(failure.to_string()),
        Error::Deadlock(_) | Error::Panicked(_) => PyRuntimeError::new_err(failure.to_string()),
        Error::ReadOnly { .. } | Error::Invalid(_) => PyValueError::new_err(failure.to_string()),
        Error::Interrupted { .. } => error::plain(py, "CancelledError", failure.to_string()),
        Error::Closed(_) => error::plain(py, "ClosedError", failure.to_string()),
    }
}
