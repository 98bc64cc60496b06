//! A path argument: `str`, `bytes`, `os.PathLike`, an open file descriptor or a `StripeSet`.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::sync::Arc;

use deepnvme_io::{Access, DirectMode, OpenOptions, StripeSet, Target, TensorFile};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyInt, PyString};

use crate::{memory, stripes};

/// What a path argument names.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Place {
    /// A file, to be opened by name.
    Path(PathBuf),
    /// One logical file over several.
    Stripes(StripeSet),
    /// A descriptor that the caller opened and will close.
    Descriptor(i32),
}

impl Place {
    /// Understands a path argument.
    pub(crate) fn new(argument: &Bound<'_, PyAny>) -> PyResult<Self> {
        if argument.is_instance_of::<PyInt>() && !argument.is_instance_of::<PyBool>() {
            return descriptor(argument);
        }
        if let Ok(stripes) = argument.cast::<stripes::StripeSet>() {
            return Ok(Self::Stripes(stripes.get().set().clone()));
        }
        file_name(argument).map(Self::Path)
    }

    /// Opens it; a write makes the file where it is missing. A descriptor is duplicated and stays the caller's.
    pub(crate) fn open(self, access: Access, direct: DirectMode) -> deepnvme_io::Result<Arc<TensorFile>> {
        let options = OpenOptions { access, create: access != Access::Read, direct };
        match self {
            Self::Path(path) => TensorFile::open(&Target::Path(path), options),
            Self::Stripes(set) => TensorFile::open(&Target::Stripes(set), options),
            Self::Descriptor(number) => TensorFile::from_fd(memory::borrow_descriptor(number), None, access, direct),
        }
    }
}

/// The name of a file, from `str`, `bytes` or `os.PathLike`.
pub(crate) fn file_name(argument: &Bound<'_, PyAny>) -> PyResult<PathBuf> {
    let py = argument.py();
    let class = argument.get_type();
    let path = if argument.is_instance_of::<PyString>() || argument.is_instance_of::<PyBytes>() {
        argument.clone()
    } else if let Ok(method) = class.getattr(intern!(py, "__fspath__")) {
        method.call1((argument,))?
    } else {
        return Err(PyTypeError::new_err(format!(
            "path must be str, bytes, os.PathLike, an open file descriptor or a StripeSet, not {}",
            class.name()?
        )));
    };
    let name = match path.cast::<PyBytes>() {
        Ok(bytes) => OsString::from_vec(bytes.as_bytes().to_vec()),
        Err(_) => path.extract::<OsString>()?,
    };
    if name.as_bytes().contains(&0) {
        return Err(PyValueError::new_err(format!("the path {name:?} has a null byte in it; no file has such a name")));
    }
    Ok(PathBuf::from(name))
}

fn descriptor(argument: &Bound<'_, PyAny>) -> PyResult<Place> {
    match argument.extract::<i32>() {
        Ok(number) if number >= 0 => Ok(Place::Descriptor(number)),
        _ => Err(PyValueError::new_err(format!("{argument} is no file descriptor; pass the number of an open file"))),
    }
}
