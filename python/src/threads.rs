//! Threads of the extension's own. A process may have as many as it is allowed: none is an error, never a panic.

use pyo3::prelude::*;

use crate::error;

/// Has a thread of its own do that.
pub(crate) fn start(py: Python<'_>, name: &str, work: impl FnOnce() + Send + 'static) -> PyResult<()> {
    let started = std::thread::Builder::new().name(name.into()).spawn(work);
    let refused = |failure| deepnvme_io::Error::from_io("start a thread", &failure);
    started.map(drop).map_err(|failure| error::raise(py, &refused(failure)))
}

/// Drops a value on a thread of its own, since its end waits for the disk; here, where no thread is to be had.
pub(crate) fn let_go<T: Send + 'static>(value: T) {
    let _ = std::thread::Builder::new().name("deepnvme-release".into()).spawn(move || drop(value));
}
