//! Regions of the memory of objects: whoever may say where the bytes lie is asked, one after the other.

use std::ptr;
use std::sync::Arc;

use deepnvme_mem::dlpack::Imported;
use deepnvme_mem::{Region, RegionMut, StreamHandle, Strided};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyMemoryView;

use super::buffer;
use super::layout::{Layout, Place, Use, refusal};
use crate::{array, dlpack, torch};

/// The memory that a write takes its bytes from.
pub(crate) fn source(object: &Bound<'_, PyAny>) -> PyResult<Region> {
    let layout = match find(object, Use::Take)? {
        Found::Imported(tensor, stream) => return Ok(tensor.into_region().map_err(refusal)?.after(stream)),
        Found::Layout(layout) => layout,
    };
    let (start, owner) = (ptr::with_exposed_provenance_mut(layout.address), Arc::new(layout.keep));
    let Place { device, stream } = layout.place;
    let region = match layout.strided {
        // SAFETY: the object said where its bytes are, and the owner is the reference that keeps them there.
        None => unsafe { Region::from_raw(start, layout.bytes, device, owner) },
        // SAFETY: as above, for a layout that was checked.
        Some(strided) => unsafe { Region::from_strided(start, strided, device, owner) },
    };
    Ok(region.after(stream))
}

/// Contiguous memory that stays its owner's: the answer does not keep it.
///
/// What is made of the answer may name addresses and look at no byte: only a registration is, which the package gives up
/// before the storage of the tensor dies.
pub(crate) fn unowned(object: &Bound<'_, PyAny>) -> PyResult<Region> {
    let Found::Layout(Layout { place, address, bytes, strided: None, .. }) = find(object, Use::Take)? else {
        return Err(PyTypeError::new_err("a contiguous tensor is wanted"));
    };
    // SAFETY: the object said where its bytes are; nobody looks at them through this region.
    Ok(unsafe { Region::from_raw(ptr::with_exposed_provenance_mut(address), bytes, place.device, Arc::new(())) })
}

/// The bytes of a `torch.UntypedStorage`.
pub(crate) fn storage(storage: &Bound<'_, PyAny>) -> PyResult<Region> {
    let Some((Place { device, stream }, address, bytes, keep)) = torch::storage_place(storage)? else {
        return Err(PyTypeError::new_err("a storage in memory of the host or of a CUDA device is wanted"));
    };
    let (start, owner) = (ptr::with_exposed_provenance_mut(address), Arc::new(keep));
    // SAFETY: torch said where the storage's bytes are, and the owner is the storage, which keeps them there.
    Ok(unsafe { Region::from_raw(start, bytes, device, owner) }.after(stream))
}

/// The memory that a read fills.
pub(crate) fn target(object: &Bound<'_, PyAny>) -> PyResult<RegionMut> {
    let layout = match find(object, Use::Fill)? {
        Found::Imported(tensor, stream) => {
            check_overlap(Some(tensor.layout()))?;
            return Ok(tensor.into_region_mut().map_err(refusal)?.after(stream));
        }
        Found::Layout(layout) => layout,
    };
    check_overlap(layout.strided.as_ref())?;
    let (start, owner) = (ptr::with_exposed_provenance_mut(layout.address), Arc::new(layout.keep));
    let Place { device, stream } = layout.place;
    let target = match layout.strided {
        // SAFETY: the object said where its bytes are and that they may change, the owner keeps them there, and
        // no Rust reference to them exists while Python code can reach them.
        None => unsafe { RegionMut::from_raw(start, layout.bytes, device, owner) },
        // SAFETY: as above, for a layout that was checked and has each byte once.
        Some(strided) => unsafe { RegionMut::from_strided(start, strided, device, owner) },
    };
    Ok(target.after(stream))
}

pub(super) enum Found {
    Layout(Layout),
    /// With the CUDA stream whose work so far comes first.
    Imported(Imported, StreamHandle),
}

pub(super) fn find(object: &Bound<'_, PyAny>, usage: Use) -> PyResult<Found> {
    let layout = if let Some(layout) = torch::layout(object, usage)? {
        layout
    } else if let Some(layout) = array::layout(object, usage)? {
        layout
    } else if let Ok(view) = PyMemoryView::from(object) {
        array::from_view(object, &buffer::exported(&view)?, view.into_any(), usage)?
    } else if let Some((tensor, stream)) = dlpack::tensor(object, usage)? {
        return Ok(Found::Imported(tensor, stream));
    } else {
        return Err(PyTypeError::new_err(format!(
            "tensor must be a torch tensor, a numpy array, or an object with the buffer protocol or DLPack, not {}",
            object.get_type().name()?
        )));
    };
    layout.strided.as_ref().map_or(Ok(()), Strided::check).map_err(refusal)?;
    Ok(Found::Layout(layout))
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
