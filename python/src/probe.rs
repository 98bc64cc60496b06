//! `deepnvme.Probe`: backends that work on this machine, and an engine's choice.

use deepnvme_io::Engine;
use deepnvme_io::backend::BackendKind;
use deepnvme_io::probe::Availability;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::stats::record_class;

record_class! {
    /// Availability of one backend on this machine, with the reason and remedy if it does not work.
    ///
    /// Example:
    ///     >>> deepnvme.probe().threads.name
    ///     'threads'
    BackendProbe {
        /// ``"io_uring"``, ``"aio"`` or ``"threads"``.
        name: String,
        /// Whether it was set up and read a file correctly.
        works: bool,
        /// Features that the kernel granted, if it works.
        detail: Option<String>,
        /// The kernel's error number; ``None`` if the backend works, or fails for another reason.
        errno: Option<i32>,
        /// Why it does not work.
        reason: Option<String>,
        /// Steps that would make it work.
        remedy: Option<String>,
    }
}

impl BackendProbe {
    fn new(kind: BackendKind, found: &Availability) -> Self {
        let name = kind.name().to_owned();
        match found.clone() {
            Availability::Works { detail } => {
                Self { name, works: true, detail: Some(detail), errno: None, reason: None, remedy: None }
            }
            Availability::Missing { errno, reason, remedy } => {
                Self { name, works: false, detail: None, errno, reason: Some(reason), remedy: Some(remedy) }
            }
        }
    }
}

/// Backends that work on this machine, found by trying them, and the backend that this engine uses.
///
/// Example:
///     >>> probe = deepnvme.probe()
///     >>> probe.threads.works
///     True
#[pyclass(frozen, get_all, module = "deepnvme")]
pub(crate) struct Probe {
    /// Backend of this engine: ``"io_uring"``, ``"aio"`` or ``"threads"``.
    backend: String,
    /// Reason why this backend was chosen.
    backend_reason: String,
    /// Result for ``io_uring``.
    io_uring: Py<BackendProbe>,
    /// Result for Linux native AIO.
    aio: Py<BackendProbe>,
    /// Result for plain system calls on threads.
    threads: Py<BackendProbe>,
}

#[pymethods]
impl Probe {
    /// Return the fields as a dictionary, ready for JSON.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let found = PyDict::new(py);
        found.set_item("backend", &self.backend)?;
        found.set_item("backend_reason", &self.backend_reason)?;
        for (name, backend) in [("io_uring", &self.io_uring), ("aio", &self.aio), ("threads", &self.threads)] {
            found.set_item(name, backend.get().to_dict(py)?)?;
        }
        Ok(found)
    }

    fn __repr__(&self) -> String {
        let state = |backend: &Py<BackendProbe>| if backend.get().works { "works" } else { "missing" };
        format!(
            "<deepnvme.Probe backend={:?} ({}); io_uring {}, aio {}, threads {}>",
            self.backend,
            self.backend_reason,
            state(&self.io_uring),
            state(&self.aio),
            state(&self.threads)
        )
    }
}

impl Probe {
    pub(crate) fn of(py: Python<'_>, engine: &Engine) -> PyResult<Self> {
        let probe = engine.probe();
        let found = |kind, found| Py::new(py, BackendProbe::new(kind, found));
        Ok(Self {
            backend: engine.backend_kind().name().into(),
            backend_reason: engine.backend_reason().into(),
            io_uring: found(BackendKind::Uring, &probe.uring)?,
            aio: found(BackendKind::Aio, &probe.aio)?,
            threads: found(BackendKind::Threads, &probe.threads)?,
        })
    }
}
