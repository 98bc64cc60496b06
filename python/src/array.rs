//! Find the bytes of numpy arrays and of objects with the buffer protocol.

use deepnvme_mem::Strided;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyList, PyType, PyWeakrefReference};

use crate::error::InvalidArgumentError;
use crate::imported;
use crate::memory::{self, DeviceStream, Exported, KeepAlive, Layout, MemoryAccess};
use crate::once::{GilOnce, intern};

/// Reads the layout of a numpy array; `None` for anything else. Unlike the buffer protocol, numpy's layout covers every
/// dtype.
pub(crate) fn layout(object: &Bound<'_, PyAny>, access: MemoryAccess) -> PyResult<Option<Layout>> {
    static NDARRAY: GilOnce<Py<PyType>> = GilOnce::new();
    let py = object.py();
    let class = match NDARRAY.get(py) {
        Some(class) => class,
        None => {
            let Some(numpy) = imported::module(py, "numpy")? else { return Ok(None) };
            let Ok(class) = numpy.getattr("ndarray") else { return Ok(None) };
            let class = class.cast_into::<PyType>()?.unbind();
            NDARRAY.get_or_init(py, || class)
        }
    };
    if !object.is_instance(class.bind(py))? {
        return Ok(None);
    }
    let dtype = object.getattr(intern!(py, "dtype"))?;
    if dtype.getattr(intern!(py, "hasobject"))?.is_truthy()? {
        return Err(PyTypeError::new_err(format!(
            "an array of dtype {dtype} holds references to Python objects, not values; pickle it instead"
        )));
    }
    let keep = unresized(object, class.bind(py))?;
    let capsule = object.getattr(intern!(py, "__array_struct__"))?.cast_into::<PyCapsule>()?;
    let readonly = !object.getattr(intern!(py, "flags"))?.getattr(intern!(py, "writeable"))?.is_truthy()?;
    let exported = memory::array_struct(&capsule, readonly)?;
    from_view(object, &exported, keep, access).map(Some)
}

/// Returns the array with a weak reference to each array that may own its memory. numpy never resizes an array that has
/// weak references, even with `refcheck=False`.
fn unresized<'py>(array: &Bound<'py, PyAny>, class: &Bound<'py, PyType>) -> PyResult<Bound<'py, PyAny>> {
    let py = array.py();
    let keep = PyList::new(py, [array])?;
    let mut owner = array.clone();
    while owner.is_instance(class)? {
        keep.append(PyWeakrefReference::new(&owner)?)?;
        owner = owner.getattr(intern!(py, "base"))?;
    }
    Ok(keep.into_any())
}

/// Converts an exporter's description to a layout; `keep` keeps its memory alive.
pub(crate) fn from_view(
    object: &Bound<'_, PyAny>,
    exported: &Exported,
    keep: Bound<'_, PyAny>,
    access: MemoryAccess,
) -> PyResult<Layout> {
    let class = object.get_type();
    let class = class.name()?;
    if exported.holds_objects || exported.indirect {
        return Err(PyTypeError::new_err(format!(
            "the buffer of this {class} holds references or pointers, not values; copy the values into an array first"
        )));
    }
    if access == MemoryAccess::Write && exported.readonly {
        return Err(InvalidArgumentError::new_err(format!(
            "this {class} is read-only, so nothing can be read into it; use a writable array, tensor or bytearray"
        )));
    }
    let strided = exported.stride_bytes.clone().map(|stride_bytes| Strided {
        shape: exported.shape.clone(),
        stride_bytes,
        item_bytes: exported.item_bytes,
    });
    Ok(Layout {
        device_stream: DeviceStream::HOST,
        address: exported.address,
        bytes: exported.bytes,
        strided,
        keep: KeepAlive::object(keep.unbind()),
    })
}
