//! Values that are made once for the process, in cells that no fork finds locked.
//!
//! A cell of PyO3 lets go of the GIL after it has locked itself. If another thread forks at that moment, the child's
//! copy stays locked, and its next call waits forever. The same is true of `pyo3::intern!`, which `intern!` of this
//! module replaces.

use std::convert::Infallible;
use std::path::Path;
use std::sync::OnceLock;

use pyo3::prelude::*;
use pyo3::types::{PyList, PyString};

/// A value that is made once, by a thread that holds the GIL.
pub(crate) struct GilOnce<T>(OnceLock<T>);

impl<T> GilOnce<T> {
    pub(crate) const fn new() -> Self {
        Self(OnceLock::new())
    }

    /// Returns the value, if it was made.
    pub(crate) fn get(&self, _py: Python<'_>) -> Option<&T> {
        self.0.get()
    }

    /// Returns the value. If several threads make it at once, all get the first that was finished.
    pub(crate) fn get_or_try_init<E>(&self, py: Python<'_>, make: impl FnOnce() -> Result<T, E>) -> Result<&T, E> {
        if let Some(made) = self.get(py) {
            return Ok(made);
        }
        // This may let go of the GIL. Nothing is locked yet.
        let mut made = Some(make()?);
        // Nothing in here lets go of the GIL, so nobody forks while the cell is locked.
        Ok(self.0.get_or_init(|| made.take().unwrap_or_else(|| unreachable!("it is called once"))))
    }

    /// Returns the value. If several threads make it at once, all get the first that was finished.
    pub(crate) fn get_or_init(&self, py: Python<'_>, make: impl FnOnce() -> T) -> &T {
        let Ok(made) = self.get_or_try_init(py, || Ok::<_, Infallible>(make()));
        made
    }
}

/// A text that is made once, as a string of Python.
pub(crate) struct Interned {
    text: &'static str,
    made: GilOnce<Py<PyString>>,
}

impl Interned {
    pub(crate) const fn new(text: &'static str) -> Self {
        Self { text, made: GilOnce::new() }
    }

    pub(crate) fn get<'py>(&self, py: Python<'py>) -> &Bound<'py, PyString> {
        self.made.get_or_init(py, || PyString::intern(py, self.text).unbind()).bind(py)
    }
}

/// Returns a text as a string of Python, made once.
macro_rules! intern {
    ($py:expr, $text:expr) => {{
        static TEXT: $crate::once::Interned = $crate::once::Interned::new($text);
        TEXT.get($py)
    }};
}
pub(crate) use intern;

/// Makes the values that PyO3 keeps in cells of its own and that this package uses. Called while the module is
/// imported.
pub(crate) fn fill_cells_of_pyo3(py: Python<'_>) -> PyResult<()> {
    let class = py.get_type::<PyString>();
    class.name()?;
    Path::new("").into_pyobject(py)?;
    PyList::empty(py).try_iter()?.size_hint();
    Ok(())
}
