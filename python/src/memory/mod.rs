//! From Python objects to the engine's regions: the one folder of the binding with unsafe code.
//!
//! `torch` and `array` ask an object where its bytes lie, in plain attribute calls; here those answers become
//! addresses. Every region owns a Python reference that keeps its bytes alive and in place: of a tensor its storage, which
//! is not resized meanwhile (`resizable`), of a numpy array the array, of anything else an exported buffer or a DLPack
//! capsule. The engine may let go of that
//! reference on a thread of its own; PyO3 then keeps it until a thread that holds the GIL comes by, and no fork comes in
//! between (`forks`).
//!
//! `buffer` has the buffer protocol and numpy's array struct, `capsule` DLPack, `interpreter` what is asked of CPython
//! itself, `lend` slices for kernels.

use std::os::fd::BorrowedFd;
use std::ptr;
use std::sync::Arc;

use deepnvme_mem::dlpack::Imported;
use deepnvme_mem::{Device, Region, RegionMut, StreamHandle, Strided};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyMemoryView;

use crate::{array, dlpack, torch};

mod buffer;
mod capsule;
mod forks;
mod interpreter;
mod lend;
mod resizable;

pub(crate) use buffer::{Exported, array_struct, is_buffer, new_bytes, with_bytes};
pub(crate) use capsule::{capsule, exchange_api, glance, has_name, take};
pub(crate) use forks::watch as watch_forks;
pub(crate) use interpreter::{Uncollected, call_soon};
pub(crate) use lend::{Extent, Lent, check_apart};
pub(crate) use resizable::{_is_held, Keep};

/// What a request does with the memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Use {
    /// A read fills it.
    Fill,
    /// A write takes its bytes.
    Take,
}

/// Where an object's bytes lie, and what keeps them there.
pub(crate) struct Layout {
    pub(crate) place: Place,
    pub(crate) address: usize,
    pub(crate) bytes: usize,
    /// `None` where they lie side by side.
    pub(crate) strided: Option<Strided>,
    pub(crate) keep: Keep,
}

/// Whose memory it is, and the CUDA stream whose work so far comes first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Place {
    pub(crate) device: Device,
    pub(crate) stream: StreamHandle,
}

impl Place {
    /// The processor's.
    pub(crate) const HOST: Self = Self { device: Device::Host, stream: StreamHandle::DEFAULT };
}

/// CUDA's default stream, as DLPack numbers it, and the driver.
pub(crate) const LEGACY_STREAM: StreamHandle = {
    // SAFETY: the driver knows the default stream by this number as well.
    unsafe { StreamHandle::from_raw(1) }
};

/// A `torch.cuda.Stream`.
pub(crate) fn stream(stream: &Bound<'_, PyAny>) -> PyResult<StreamHandle> {
    let handle = stream.getattr(intern!(stream.py(), "cuda_stream"))?.extract()?;
    // SAFETY: torch ends no stream of its own before the process ends, and has whoever gives it another one keep that.
    Ok(unsafe { StreamHandle::from_raw(handle) })
}

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

enum Found {
    Layout(Layout),
    /// With the CUDA stream whose work so far comes first.
    Imported(Imported, StreamHandle),
}

fn find(object: &Bound<'_, PyAny>, usage: Use) -> PyResult<Found> {
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

#[expect(clippy::needless_pass_by_value, reason = "so that `map_err` takes it by name")]
fn refusal(error: std::io::Error) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// The descriptor of that number, which the caller has promised to be open.
pub(crate) fn borrow_descriptor(number: i32) -> BorrowedFd<'static> {
    assert!(number >= 0, "a file descriptor is not negative");
    // SAFETY: the kernel checks the number at each use and answers EBADF where it is not open; the engine
    // duplicates it before it keeps anything.
    unsafe { BorrowedFd::borrow_raw(number) }
}
