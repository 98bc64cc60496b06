//! An argument that Python passes and a method ignores.

use std::convert::Infallible;

use pyo3::prelude::*;

/// Any object. `__exit__` gets three, and most methods need none of them.
pub(crate) struct Ignored;

impl<'py> FromPyObject<'_, 'py> for Ignored {
    type Error = Infallible;

    fn extract(_: Borrowed<'_, 'py, PyAny>) -> Result<Self, Infallible> {
        Ok(Self)
    }
}
