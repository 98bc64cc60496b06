//! Create regions of objects' memory, asking each supported protocol in turn.

use std::ptr;
use std::sync::Arc;

use deepnvme_mem::dlpack::Imported;
use deepnvme_mem::{Region, RegionMut, StreamHandle, Strided};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyMemoryView;

use super::buffer;
use super::layout::{Layout, Location, MemoryAccess, refusal};
use crate::{array, dlpack, torch};

/// Return the memory that a write reads.
pub(crate) fn source(object: &Bound<'_, PyAny>) -> PyResult<Region> {
    let layout = match find(object, MemoryAccess::Read)? {
        ObjectMemory::Imported(tensor, stream) => return Ok(tensor.into_region().map_err(refusal)?.after(stream)),
        ObjectMemory::Layout(layout) => layout,
    };
    let (start, owner) = (ptr::with_exposed_provenance_mut(layout.address), Arc::new(layout.keep));
    let Location { device, stream } = layout.location;
    let region = match layout.strided {
        // SAFETY: the object stated its address, and the owner's reference keeps the bytes there.
        None => unsafe { Region::from_raw(start, layout.bytes, device, owner) },
        // SAFETY: as above, for a checked layout.
        Some(strided) => unsafe { Region::from_strided(start, strided, device, owner) },
    };
    Ok(region.after(stream))
}

/// Return contiguous memory without keeping it alive.
///
/// Code that uses the region may read addresses, but no bytes. It is only used for registrations, which the package
/// drops before the tensor's storage dies.
pub(crate) fn unowned(object: &Bound<'_, PyAny>) -> PyResult<Region> {
    let ObjectMemory::Layout(Layout { location, address, bytes, strided: None, .. }) =
        find(object, MemoryAccess::Read)?
    else {
        return Err(PyTypeError::new_err("a contiguous tensor is wanted"));
    };
    // SAFETY: the object stated its address, and no byte is accessed through this region.
    Ok(unsafe { Region::from_raw(ptr::with_exposed_provenance_mut(address), bytes, location.device, Arc::new(())) })
}

/// Return the bytes of a `torch.UntypedStorage`.
pub(crate) fn storage(storage: &Bound<'_, PyAny>) -> PyResult<Region> {
    let Some((Location { device, stream }, address, bytes, keep)) = torch::storage_location(storage)? else {
        return Err(PyTypeError::new_err("a storage in memory of the host or of a CUDA device is wanted"));
    };
    let (start, owner) = (ptr::with_exposed_provenance_mut(address), Arc::new(keep));
    // SAFETY: torch stated the storage's address, and the owner is the storage, which keeps the bytes there.
    Ok(unsafe { Region::from_raw(start, bytes, device, owner) }.after(stream))
}

/// Return the memory that a read fills.
pub(crate) fn target(object: &Bound<'_, PyAny>) -> PyResult<RegionMut> {
    let layout = match find(object, MemoryAccess::Write)? {
        ObjectMemory::Imported(tensor, stream) => {
            check_overlap(Some(tensor.layout()))?;
            return Ok(tensor.into_region_mut().map_err(refusal)?.after(stream));
        }
        ObjectMemory::Layout(layout) => layout,
    };
    check_overlap(layout.strided.as_ref())?;
    let (start, owner) = (ptr::with_exposed_provenance_mut(layout.address), Arc::new(layout.keep));
    let Location { device, stream } = layout.location;
    let target = match layout.strided {
        // SAFETY: the object stated its address and that the bytes may change. The owner keeps them there, and no Rust
        // reference to them exists while Python code can reach them.
        None => unsafe { RegionMut::from_raw(start, layout.bytes, device, owner) },
        // SAFETY: as above, for a checked layout that contains each byte once.
        Some(strided) => unsafe { RegionMut::from_strided(start, strided, device, owner) },
    };
    Ok(target.after(stream))
}

pub(super) enum ObjectMemory {
    Layout(Layout),
    /// A DLPack tensor, and the CUDA stream to wait for.
    Imported(Imported, StreamHandle),
}

pub(super) fn find(object: &Bound<'_, PyAny>, access: MemoryAccess) -> PyResult<ObjectMemory> {
    let layout = if let Some(layout) = torch::layout(object, access)? {
        layout
    } else if let Some(layout) = array::layout(object, access)? {
        layout
    } else if let Ok(view) = PyMemoryView::from(object) {
        array::from_view(object, &buffer::exported(&view)?, view.into_any(), access)?
    } else if let Some((tensor, stream)) = dlpack::tensor(object, access)? {
        return Ok(ObjectMemory::Imported(tensor, stream));
    } else {
        return Err(PyTypeError::new_err(format!(
            "tensor must be a torch tensor, a numpy array, or an object with the buffer protocol or DLPack, not {}",
            object.get_type().name()?
        )));
    };
    layout.strided.as_ref().map_or(Ok(()), Strided::check).map_err(refusal)?;
    Ok(ObjectMemory::Layout(layout))
}

fn check_overlap(strided: Option<&Strided>) -> PyResult<()> {
    if !strided.is_some_and(Strided::may_overlap) {
        return Ok(());
    }
    Err(PyValueError::new_err(
        "several elements of this tensor share their memory (expand() and as_strided() make such tensors), so that a \
         read has no place of its own for each; read into a tensor of its own, such as tensor.contiguous()",
    ))
}
