//! Parse a path argument: a file name (`file_name`), an open file descriptor, or a `StripeSet` (`stripes`).

use std::path::PathBuf;
use std::sync::Arc;

use deepnvme_file::Target;
use deepnvme_io::{Access, DirectMode, OpenOptions, TensorFile};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyInt};

use crate::error::InvalidArgumentError;
use crate::memory;

mod file_name;
mod stripes;

pub(crate) use file_name::file_name;
use file_name::file_name_or;
pub(crate) use stripes::StripeSet;

/// A parsed path argument.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) enum PathArgument {
    /// A file name to open.
    Path(PathBuf),
    /// A stripe set: one logical file over several.
    Stripes(deepnvme_file::StripeSet),
    /// A descriptor that the caller opened and will close.
    Descriptor(i32),
}

impl PathArgument {
    /// Parses a path argument.
    pub(crate) fn new(argument: &Bound<'_, PyAny>) -> PyResult<Self> {
        if argument.is_instance_of::<PyInt>() && !argument.is_instance_of::<PyBool>() {
            return descriptor(argument);
        }
        if let Ok(stripes) = argument.cast::<StripeSet>() {
            return Ok(Self::Stripes(stripes.get().set().clone()));
        }
        file_name_or(argument, "str, bytes, os.PathLike, an open file descriptor or a StripeSet").map(Self::Path)
    }

    /// Returns the named file. A descriptor is an error, whose text `refusal` makes of its number.
    pub(crate) fn named(self, refusal: impl FnOnce(i32) -> String) -> PyResult<Target> {
        match self {
            Self::Path(path) => Ok(Target::Path(path)),
            Self::Stripes(set) => Ok(Target::Stripes(set)),
            Self::Descriptor(number) => Err(PyTypeError::new_err(refusal(number))),
        }
    }

    /// Opens the file; a write creates a missing one. A descriptor is duplicated and stays the caller's.
    pub(crate) fn open(self, access: Access, direct: DirectMode) -> deepnvme_io::Result<Arc<TensorFile>> {
        let options = OpenOptions { access, create: access != Access::Read, direct };
        match self {
            Self::Path(path) => deepnvme_file::open(&Target::Path(path), options),
            Self::Stripes(set) => deepnvme_file::open(&Target::Stripes(set), options),
            Self::Descriptor(number) => TensorFile::from_fd(memory::borrow_descriptor(number), None, access, direct),
        }
    }
}

fn descriptor(argument: &Bound<'_, PyAny>) -> PyResult<PathArgument> {
    match argument.extract::<i32>() {
        Ok(number) if number >= 0 => Ok(PathArgument::Descriptor(number)),
        _ => Err(InvalidArgumentError::new_err(format!(
            "{argument} is not a file descriptor; pass the number of an open file"
        ))),
    }
}
