//! Find the memory of objects, asking each supported protocol in turn.

use deepnvme_mem::{Region, RegionMut, TensorPlace};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyMemoryView;

use crate::memory::{self, MemoryAccess, ObjectMemory, Plain, TensorSlice};
use crate::{array, dlpack, torch};

/// Returns the memory that a write reads.
pub(crate) fn source(object: &Bound<'_, PyAny>) -> PyResult<Region> {
    find(object, MemoryAccess::Read)?.into_source()
}

/// Returns the memory that a read fills.
pub(crate) fn target(object: &Bound<'_, PyAny>) -> PyResult<RegionMut> {
    find(object, MemoryAccess::Write)?.into_target()
}

/// Returns the memory that a read fills, and its place if it is not contiguous.
pub(crate) fn target_and_place(object: &Bound<'_, PyAny>) -> PyResult<(RegionMut, Option<TensorPlace>)> {
    let memory = find(object, MemoryAccess::Write)?;
    let place = memory.strided_place();
    Ok((memory.into_target()?, place))
}

/// Returns contiguous memory without keeping it alive: see [`ObjectMemory::into_unowned`].
pub(crate) fn unowned(object: &Bound<'_, PyAny>) -> PyResult<Region> {
    find(object, MemoryAccess::Read)?.into_unowned()
}

/// Borrows the elements of a contiguous host tensor. Its bytes are read as `T`, whatever its dtype.
pub(crate) fn slice<T: Plain>(object: &Bound<'_, PyAny>, access: MemoryAccess) -> PyResult<TensorSlice<T>> {
    TensorSlice::new(find(object, access)?, access)
}

/// Returns the bytes of each `torch.UntypedStorage`.
pub(crate) fn storages(py: Python<'_>, storages: Vec<Bound<'_, PyAny>>) -> PyResult<Vec<Region>> {
    let Some(device_streams) = torch::storage_devices(&storages)? else {
        return Err(PyTypeError::new_err(
            "this storage is not in memory of the host or of a CUDA device; copy its tensor to the CPU first",
        ));
    };
    memory::storage_regions(py, storages, device_streams)
}

fn find(object: &Bound<'_, PyAny>, access: MemoryAccess) -> PyResult<ObjectMemory> {
    let layout = if let Some(layout) = torch::layout(object, access)? {
        layout
    } else if let Some(layout) = array::layout(object, access)? {
        layout
    } else if let Ok(view) = PyMemoryView::from(object) {
        array::from_view(object, &memory::exported(&view)?, view.into_any(), access)?
    } else if let Some((tensor, stream)) = dlpack::tensor(object, access)? {
        return Ok(ObjectMemory::Imported(tensor, stream));
    } else {
        return Err(PyTypeError::new_err(format!(
            "tensor must be a torch tensor, a numpy array, or an object with the buffer protocol or DLPack, not {}",
            object.get_type().name()?
        )));
    };
    ObjectMemory::checked(layout)
}
