//! Python exceptions of streaming.

use deepnvme_stream::Error;
use pyo3::exceptions::{PyMemoryError, PyRuntimeError};
use pyo3::prelude::*;

use crate::error::{self, InvalidArgumentError};

/// Converts an error to its Python exception.
pub(super) fn to_exception(py: Python<'_>, error: &Error) -> PyErr {
    match error {
        Error::Io(error) => error::to_exception(py, error),
        Error::Changed { path, .. } => error::plain_of_file(py, "ChangedFileError", error.to_string(), path),
        Error::Corrupt { path, offset, .. } => {
            let raised = error::plain(py, "CorruptFileError", error.to_string());
            let value = raised.value(py);
            let named = value.setattr("filename", path.as_os_str()).and_then(|()| value.setattr("offset", offset));
            named.err().unwrap_or(raised)
        }
        Error::Busy { .. } | Error::TooMany { .. } => PyMemoryError::new_err(error.to_string()),
        Error::Plan(_) => InvalidArgumentError::new_err(error.to_string()),
        Error::Panicked { .. } => PyRuntimeError::new_err(error.to_string()),
        Error::Closed => error::plain(py, "ClosedError", error.to_string()),
    }
}
