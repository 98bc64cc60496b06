//! Calls in which an optimizer's param groups have only some of their parameters.

use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::once::intern;

/// Call ``function`` while each param group has the parameters of its list in ``params``, or none if there is no list.
/// Afterwards the groups have their own lists again, however the call ends: Ctrl-C cannot come in between.
#[pyfunction]
pub(crate) fn _call_with_params<'py>(
    groups: &Bound<'py, PyAny>,
    params: Vec<Bound<'py, PyList>>,
    function: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = function.py();
    let name = intern!(py, "params");
    let groups = groups.try_iter()?.collect::<PyResult<Vec<_>>>()?;
    let own = groups.iter().map(|group| group.get_item(name)).collect::<PyResult<Vec<_>>>()?;
    let mut lists = params.into_iter();
    let narrowed =
        groups.iter().try_for_each(|group| group.set_item(name, lists.next().unwrap_or_else(|| PyList::empty(py))));
    let result = narrowed.and_then(|()| function.call0());
    // All of them, even if one refuses.
    let restored: Vec<_> = groups.iter().zip(own).map(|(group, list)| group.set_item(name, list)).collect();
    let result = result?;
    restored.into_iter().collect::<PyResult<()>>()?;
    Ok(result)
}
