//! Parse a file name from Python.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use pyo3::exceptions::{PyTypeError, PyUnicodeEncodeError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

use crate::error::InvalidArgumentError;
use crate::once::intern;

/// Returns the file name of a `str`, `bytes` or `os.PathLike`.
pub(crate) fn file_name(argument: &Bound<'_, PyAny>) -> PyResult<PathBuf> {
    file_name_or(argument, "str, bytes or os.PathLike")
}

/// Like [`file_name`], for an argument that may also be of other `kinds`, which errors name.
pub(super) fn file_name_or(argument: &Bound<'_, PyAny>, kinds: &str) -> PyResult<PathBuf> {
    let py = argument.py();
    let class = argument.get_type();
    let path = if argument.is_instance_of::<PyString>() || argument.is_instance_of::<PyBytes>() {
        argument.clone()
    } else if let Ok(method) = class.getattr(intern!(py, "__fspath__")) {
        method.call1((argument,))?
    } else {
        return Err(PyTypeError::new_err(format!("path must be {kinds}, not {}", class.name()?)));
    };
    let name = match path.cast::<PyBytes>() {
        Ok(bytes) => OsString::from_vec(bytes.as_bytes().to_vec()),
        Err(_) => path.extract::<OsString>().or_else(|error| {
            if !error.is_instance_of::<PyUnicodeEncodeError>(py) {
                return Err(error);
            }
            let name = path.repr()?;
            let text = format!("the path {name} has a lone surrogate in it; no file has such a name");
            Err(InvalidArgumentError::new_err(text))
        })?,
    };
    if name.is_empty() {
        return Err(InvalidArgumentError::new_err("the path is empty; name a file"));
    }
    if name.as_bytes().contains(&0) {
        return Err(InvalidArgumentError::new_err(format!(
            "the path {name:?} has a null byte in it; no file has such a name"
        )));
    }
    if deepnvme_file::is_url(Path::new(&name)) {
        let text = "deepnvme reads and writes local files: pass the path of a local or mounted folder";
        return Err(InvalidArgumentError::new_err(format!("the path {name:?} is a URL; {text}")));
    }
    Ok(PathBuf::from(name))
}
