//! Python exceptions of streaming.

use deepnvme_stream::Error;
use pyo3::exceptions::{PyMemoryError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::error;

/// Converts an error to its Python exception.
pub(super) fn raise(py: Python<'_>, failure: &Error) -> PyErr {
    match failure {
        Error::Io(failure) => error::raise(py, failure),
        Error::Changed { path, .. } => {
            let raised = error::plain(py, "ChangedFileError", failure.to_string());
            let named = raised.value(py).setattr("filename", path.as_os_str());
            named.err().unwrap_or(raised)
        }
        Error::Corrupt { path, offset, .. } => {
            let raised = error::plain(py, "CorruptFileError", failure.to_string());
            let value = raised.value(py);
            let named = value.setattr("filename", path.as_os_str()).and_then(|()| value.setattr("offset", offset));
            named.err().unwrap_or(raised)
        }
        Error::Busy { .. } | Error::TooMany { .. } => PyMemoryError::new_err(failure.to_string()),
        Error::Plan(_) => PyValueError::new_err(failure.to_string()),
        Error::Panicked { .. } => PyRuntimeError::new_err(failure.to_string()),
        Error::Closed => error::plain(py, "ClosedError", failure.to_string()),
    }
}
