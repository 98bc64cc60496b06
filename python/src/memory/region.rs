//! Turn located memory into regions of the engine.

use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use deepnvme_mem::dlpack::Imported;
use deepnvme_mem::{Region, RegionMut, StreamHandle, Strided, TensorPlace};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use super::held_storages::StorageHolds;
use super::layout::{DeviceStream, Layout, to_value_error};

use crate::error::InvalidArgumentError;

/// The memory of an object, by the protocol that located it.
pub(crate) enum ObjectMemory {
    Layout(Layout),
    /// A DLPack tensor, and the CUDA stream to wait for.
    Imported(Imported, StreamHandle),
}

impl ObjectMemory {
    /// Checks a layout's strides.
    pub(crate) fn checked(layout: Layout) -> PyResult<Self> {
        layout.strided.as_ref().map_or(Ok(()), Strided::check).map_err(to_value_error)?;
        Ok(Self::Layout(layout))
    }

    /// Returns where the bytes are, if they are not contiguous.
    pub(crate) fn strided_place(&self) -> Option<TensorPlace> {
        let (address, layout) = match self {
            Self::Imported(tensor, _) => (tensor.addr(), tensor.layout()),
            Self::Layout(layout) => (layout.address, layout.strided.as_ref()?),
        };
        Some(TensorPlace { address, layout: layout.clone() })
    }

    /// Returns the memory that a write reads.
    pub(crate) fn into_source(self) -> PyResult<Region> {
        let layout = match self {
            Self::Imported(tensor, stream) => return Ok(tensor.into_region().map_err(to_value_error)?.after(stream)),
            Self::Layout(layout) => layout,
        };
        let (start, owner) = (ptr::with_exposed_provenance_mut(layout.address), Arc::new(layout.keep));
        let DeviceStream { device, stream } = layout.device_stream;
        let region = match layout.strided {
            // SAFETY: the object stated its address, and the owner's reference keeps the bytes there.
            None => unsafe { Region::from_raw(start, layout.bytes, device, owner) },
            // SAFETY: the object stated its address, shape and strides, `checked` has checked them, and the owner's
            // reference keeps the bytes there.
            Some(strided) => unsafe { Region::from_strided(start, strided, device, owner) },
        };
        Ok(region.after(stream))
    }

    /// Returns the memory that a read fills.
    pub(crate) fn into_target(self) -> PyResult<RegionMut> {
        match self {
            Self::Imported(tensor, stream) => {
                check_overlap(Some(tensor.layout()))?;
                Ok(tensor.into_region_mut().map_err(to_value_error)?.after(stream))
            }
            Self::Layout(layout) => {
                check_overlap(layout.strided.as_ref())?;
                let region = Self::Layout(layout).into_source()?;
                // SAFETY: the object stated that the bytes may change, and `check_overlap` has checked that the layout
                // contains each byte once. Rust references to such bytes exist only in optimizer kernels and while a
                // writer copies a buffer. The Python program must not use an object for two calls at once if one of
                // them changes it.
                Ok(unsafe { RegionMut::from_region(region) })
            }
        }
    }

    /// Returns contiguous memory without keeping it alive.
    ///
    /// Code that uses the region may read addresses, but no bytes. It is only used for registrations, which the package
    /// drops before the tensor's storage dies.
    pub(crate) fn into_unowned(self) -> PyResult<Region> {
        let Self::Layout(Layout { device_stream, address, bytes, strided: None, .. }) = self else {
            return Err(PyTypeError::new_err(
                "this tensor is not contiguous, or is not torch's; pass a contiguous torch tensor",
            ));
        };
        // SAFETY: the object stated its address, and no byte is accessed through this region.
        Ok(unsafe {
            Region::from_raw(ptr::with_exposed_provenance_mut(address), bytes, device_stream.device, Arc::new(()))
        })
    }
}

/// Returns the bytes of storages, each with its device, and keeps them in place.
pub(crate) fn storage_regions(
    py: Python<'_>,
    storages: Vec<Bound<'_, PyAny>>,
    device_streams: Vec<DeviceStream>,
) -> PyResult<Vec<Region>> {
    let (held, places) = StorageHolds::of_storages(py, storages)?;
    let held = Arc::new(held);
    let region = |(place, device_stream): (Range<usize>, DeviceStream)| {
        let (start, owner) = (ptr::with_exposed_provenance_mut(place.start), Arc::<StorageHolds>::clone(&held));
        // SAFETY: torch stated the addresses of a storage that `held` keeps in place.
        unsafe { Region::from_raw(start, place.len(), device_stream.device, owner) }.after(device_stream.stream)
    };
    Ok(places.into_iter().zip(device_streams).map(region).collect())
}

/// Returns the bytes of a tensor whose storage is held. `None` if the storage does not have all of them.
pub(crate) fn held_region(
    addresses: &Range<usize>,
    device_stream: DeviceStream,
    held: &Arc<StorageHolds>,
) -> Option<Region> {
    let bytes = addresses.len();
    if bytes > 0 && !held.contain(addresses.start, bytes) {
        return None;
    }
    let (start, owner) = (ptr::with_exposed_provenance_mut(addresses.start), Arc::<StorageHolds>::clone(held));
    // SAFETY: `held` keeps its storages in place, and they contain all bytes.
    Some(unsafe { Region::from_raw(start, bytes, device_stream.device, owner) }.after(device_stream.stream))
}

fn check_overlap(strided: Option<&Strided>) -> PyResult<()> {
    if !strided.is_some_and(Strided::may_overlap) {
        return Ok(());
    }
    Err(InvalidArgumentError::new_err(
        "several elements of this tensor share their memory (expand() and as_strided() make such tensors), so that a \
         read has no place of its own for each; read into a tensor of its own, such as tensor.contiguous()",
    ))
}
