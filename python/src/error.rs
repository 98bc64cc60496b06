//! Convert the engine's errors to Python exceptions: the classes of `deepnvme.errors`.

use std::path::Path;

use deepnvme_io::{Error, ErrorKind, kernel_words};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use rustix::io::Errno;

use crate::once::{GilOnce, intern};

pyo3::import_exception!(deepnvme.errors, InvalidArgumentError);

/// Converts a failed call to the exception that Python code expects.
pub(crate) fn to_exception(py: Python<'_>, error: &Error) -> PyErr {
    build(py, error).map_or_else(|error| error, PyErr::from_value)
}

/// Converts an error result to its exception.
pub(crate) fn check<T>(py: Python<'_>, result: Result<T, Error>) -> PyResult<T> {
    result.map_err(|error| to_exception(py, &error))
}

/// Creates an exception of the class `name` of `deepnvme.errors` that no system call caused.
pub(crate) fn plain(py: Python<'_>, name: &str, message: String) -> PyErr {
    class(py, name).and_then(|class| class.call1((message,))).map_or_else(|error| error, PyErr::from_value)
}

/// Like `plain`, with the name of a file.
pub(crate) fn plain_of_file(py: Python<'_>, name: &str, message: String, path: &Path) -> PyErr {
    let error = plain(py, name, message);
    let set = error.value(py).setattr(intern!(py, "filename"), path.as_os_str());
    set.err().unwrap_or(error)
}

/// Like `plain`, with the request's progress.
pub(crate) fn plain_after(py: Python<'_>, name: &str, message: String, bytes_done: u64) -> PyErr {
    let error = plain(py, name, message);
    let set = error.value(py).setattr(intern!(py, "bytes_done"), bytes_done);
    set.err().unwrap_or(error)
}

fn build<'py>(py: Python<'py>, error: &Error) -> PyResult<Bound<'py, PyAny>> {
    let class = class(py, class_name(error))?;
    let path = error.path().map(|path| path.as_os_str());
    let value = match error.errno() {
        Some(errno) => class.call1((errno, strerror(error, errno), path))?,
        None => {
            let value = class.call1((error.to_string(),))?;
            value.setattr(intern!(py, "filename"), path)?;
            value
        }
    };
    value.setattr(intern!(py, "offset"), error.offset())?;
    value.setattr(intern!(py, "bytes_done"), error.bytes_done())?;
    Ok(value)
}

/// Returns the module with the classes. It is kept: objects that outlive the import system may also fail.
pub(crate) fn module<'py>(py: Python<'py>) -> PyResult<&'py Bound<'py, PyModule>> {
    static MODULE: GilOnce<Py<PyModule>> = GilOnce::new();
    Ok(MODULE.get_or_try_init(py, || py.import("deepnvme.errors").map(Bound::unbind))?.bind(py))
}

fn class<'py>(py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
    module(py)?.getattr(name).map_err(|_| PyRuntimeError::new_err(format!("deepnvme.errors has no class {name}")))
}

fn class_name(error: &Error) -> &'static str {
    match error.kind() {
        ErrorKind::NotFound => "NotFoundError",
        ErrorKind::PermissionDenied => "PermissionDeniedError",
        ErrorKind::UnexpectedEof => "EndOfFileError",
        ErrorKind::InvalidInput => "InvalidArgumentError",
        ErrorKind::Unsupported => "UnsupportedError",
        ErrorKind::Cancelled => "CancelledError",
        ErrorKind::Closed => "ClosedError",
        ErrorKind::Device => "DeviceError",
        ErrorKind::Corrupt => "CorruptFileError",
        ErrorKind::NoSpace | ErrorKind::Busy | ErrorKind::Io => match error.errno().map(Errno::from_raw_os_error) {
            Some(Errno::ISDIR) => "IsFolderError",
            Some(Errno::NOTDIR) => "NotFolderError",
            Some(Errno::NOMEM) => "OutOfMemoryError",
            _ => "Error",
        },
    }
}

/// Formats the text between error number and file name: verb, offset, the kernel's message, remedy.
fn strerror(error: &Error, errno: i32) -> String {
    let words = kernel_words(Errno::from_raw_os_error(errno));
    let location = error.offset().map_or_else(String::new, |offset| format!(" at offset {offset}"));
    let remedy = if error.detail().is_empty() { String::new() } else { format!("; {}", error.explanation()) };
    format!("{}{location}: {words}{remedy}", error.operation())
}
