//! Shape, strides, dtype and address of torch tensors with one C call each, for work on thousands of them.

use std::ffi::c_void;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use deepnvme_mem::dlpack::{DLDataType, DLDevice, ExchangeApi};
use pyo3::prelude::*;
use pyo3::types::PyType;

use super::capsule::exchange_api;
use super::held_storages::StorageHolds;
use super::layout::{DeviceStream, MemoryAccess, device_stream_of};
use super::tensor_slice::{Plain, TensorSlice};
use crate::once::intern;

/// A tensor. Python code may change it, so the callers drop this before they run any.
pub(crate) struct Described<'a> {
    /// The type of the elements.
    pub(crate) dtype: DLDataType,
    /// The number of elements.
    pub(crate) elements: usize,
    device: DLDevice,
    address: usize,
    shape: &'a [i64],
    strides: &'a [i64],
}

/// A contiguous tensor of real numbers in host memory or on a CUDA GPU.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct PlainTensor {
    /// The addresses of its bytes.
    pub(crate) addresses: Range<usize>,
    pub(crate) dtype: DLDataType,
    pub(crate) shape: Vec<u64>,
    pub(crate) device: DLDevice,
}

/// torch's own two classes of tensors, and the C functions that describe their tensors.
pub(crate) struct PlainClasses {
    exchange: &'static ExchangeApi,
    tensor: Py<PyType>,
    parameter: Py<PyType>,
    /// `torch.int8` and `torch.uint8`. The functions describe tensors of fewer bits an element, such as `torch.int4`,
    /// as tensors of these.
    byte_types: [Py<PyAny>; 2],
}

impl PlainClasses {
    /// `None` before torch 2.10, which does not export the functions.
    pub(crate) fn of(
        tensor: &Bound<'_, PyType>,
        parameter: &Bound<'_, PyType>,
        byte_types: [Bound<'_, PyAny>; 2],
    ) -> Option<Self> {
        let exchange = exchange_api(tensor)?;
        let is_derived = parameter.is_subclass(tensor).unwrap_or(false);
        is_derived.then(|| Self {
            exchange,
            tensor: tensor.clone().unbind(),
            parameter: parameter.clone().unbind(),
            byte_types: byte_types.map(Bound::unbind),
        })
    }

    /// Returns whether an object is of one of the classes. Subclasses may redefine the attributes.
    pub(crate) fn contain(&self, object: &Bound<'_, PyAny>) -> bool {
        let class = object.get_type();
        class.is(&self.tensor) || class.is(&self.parameter)
    }

    /// Describes a CPU tensor of the classes. `None` for all other objects.
    pub(crate) fn describe<'a>(&self, object: &'a Bound<'_, PyAny>) -> Option<Described<'a>> {
        self.describe_anywhere(object).filter(|found| found.device.device_type == DLDevice::CPU)
    }

    /// Describes a tensor of the classes in host memory or on a CUDA GPU. `None` for all other objects.
    pub(crate) fn describe_anywhere<'a>(&self, object: &'a Bound<'_, PyAny>) -> Option<Described<'a>> {
        if !self.contain(object) {
            return None;
        }
        let found = describe(self.exchange, object)?;
        let is_byte = matches!(found.dtype.code, DLDataType::INT | DLDataType::UINT) && found.dtype.bits == 8;
        (!is_byte || self.is_whole_byte(object)).then_some(found)
    }

    /// Returns whether the elements of a tensor are whole bytes. The attribute is torch's own: no Python code runs.
    fn is_whole_byte(&self, object: &Bound<'_, PyAny>) -> bool {
        let dtype = object.getattr(intern!(object.py(), "dtype"));
        dtype.is_ok_and(|dtype| self.byte_types.iter().any(|whole| dtype.is(whole)))
    }

    /// Returns a CUDA GPU, and torch's current stream of this thread there. `None` if torch does not tell.
    pub(crate) fn device_stream_of(&self, device: DLDevice, py: Python<'_>) -> Option<DeviceStream> {
        device_stream_of(self.exchange, device, py)
    }
}

/// Describes a tensor in host memory or on a CUDA GPU. Its class must have exported the functions, or be derived from
/// the class that did.
fn describe<'a>(api: &ExchangeApi, object: &'a Bound<'_, PyAny>) -> Option<Described<'a>> {
    let pointer = ptr::NonNull::new(object.as_ptr().cast::<c_void>())?;
    // SAFETY: `object` is a live reference, and holding it means to hold the GIL. The only caller has checked that its
    // class is one of those in `PlainClasses`, and `PlainClasses::of` that they belong to the functions.
    let Some(tensor) = (unsafe { api.describe(pointer) }) else {
        drop(PyErr::take(object.py()));
        return None;
    };
    let dims = usize::try_from(tensor.ndim).ok()?;
    let extents = |start: *const i64| -> Option<&'a [i64]> {
        if dims == 0 {
            return Some(&[]);
        }
        // SAFETY: both contain `ndim` entries of the tensor, which do not change until Python code runs. The callers
        // drop the description before that.
        (!start.is_null()).then(|| unsafe { std::slice::from_raw_parts(start, dims) })
    };
    let (shape, strides) = (extents(tensor.shape)?, extents(tensor.strides)?);
    let elements = shape.iter().try_fold(1_usize, |count, size| count.checked_mul(usize::try_from(*size).ok()?))?;
    let is_reached = matches!(tensor.device.device_type, DLDevice::CPU | DLDevice::CUDA);
    if !is_reached || (tensor.data.is_null() && elements > 0) {
        return None;
    }
    let address = tensor.data.expose_provenance().checked_add(usize::try_from(tensor.byte_offset).ok()?)?;
    Some(Described { dtype: tensor.dtype, elements, device: tensor.device, address, shape, strides })
}

impl Described<'_> {
    /// Returns what a plain tensor is; `None` for complex and strided ones.
    pub(crate) fn plain(&self) -> Option<PlainTensor> {
        let mut expected = 1_i64;
        let is_row_major = self.strides.iter().zip(self.shape).rev().all(|(stride, size)| {
            let fits = *size <= 1 || *stride == expected;
            expected = expected.saturating_mul(*size);
            fits
        });
        if !is_row_major || self.dtype.code == DLDataType::COMPLEX {
            return None;
        }
        let bytes = self.elements.checked_mul(self.dtype.item_bytes()?)?;
        let shape = self.shape.iter().map(|size| *size as u64).collect();
        let addresses = self.address..self.address.checked_add(bytes)?;
        Some(PlainTensor { addresses, dtype: self.dtype, shape, device: self.device })
    }

    /// Returns whether the elements lie in one piece, in any order of dimensions. Those of an empty tensor do.
    pub(crate) fn is_dense(&self) -> bool {
        if self.elements == 0 {
            return true;
        }
        let mut dims: Vec<(i64, i64)> =
            self.strides.iter().copied().zip(self.shape.iter().copied()).filter(|(_, size)| *size != 1).collect();
        // Usually they are in this order.
        dims.reverse();
        if !dims.is_sorted() {
            dims.sort_unstable();
        }
        let mut expected = 1;
        dims.into_iter().all(|(stride, size)| {
            let is_next = stride == expected;
            expected = expected.saturating_mul(size);
            is_next
        })
    }

    /// Returns a hash of the shape and memory order.
    pub(crate) fn order_hash(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for (&size, &stride) in self.shape.iter().zip(self.strides) {
            // The stride of a dimension with one element may be anything.
            (size, if size == 1 { 0 } else { stride }).hash(&mut hasher);
        }
        hasher.finish()
    }

    /// Returns whether both have the same shape and memory order.
    pub(crate) fn has_order_of(&self, other: &Self) -> bool {
        let mut strides = self.strides.iter().zip(other.strides).zip(self.shape);
        self.shape == other.shape && strides.all(|((one, other), size)| *size == 1 || one == other)
    }

    /// Returns the address of the only element, if it is in host memory, has the size of this type and is aligned.
    /// Unlike [`Self::slice`], it does not compare the element with the storage.
    fn scalar<T: Plain>(&self) -> Option<*mut T> {
        let is_one = self.elements == 1 && self.device.device_type == DLDevice::CPU;
        let fits = is_one && self.dtype.item_bytes() == Some(size_of::<T>());
        (fits && self.address.is_multiple_of(align_of::<T>()))
            .then(|| ptr::with_exposed_provenance_mut::<T>(self.address))
    }

    /// Reads the element of a CPU tensor that has one, of the size of this type. `None` for other tensors.
    pub(crate) fn read_scalar<T: Plain>(&self) -> Option<T> {
        // SAFETY: torch has stated the address, which is aligned and in host memory, and any bits are valid. The callers
        // run no Python code after they describe the tensor, so the memory is still there. The Python program must not
        // have made the storage smaller than the tensor.
        self.scalar::<T>().map(|address| unsafe { address.read() })
    }

    /// Writes the element of a CPU tensor that has one, of the size of this type. Other tensors stay as they are.
    pub(crate) fn write_scalar<T: Plain>(&self, value: T) {
        if let Some(address) = self.scalar::<T>() {
            // SAFETY: torch has stated the address, which is aligned and in host memory. The callers run no Python code
            // after they describe the tensor, so the memory is still there. The Python program must not have made the
            // storage smaller than the tensor. The callers drop the slices of their kernels first and hold the GIL: no Rust
            // reference to the element exists.
            unsafe { address.write(value) };
        }
    }

    /// Borrows the elements of a tensor whose storage is held. `None` if it is not dense, its dtype has another size,
    /// its elements are not aligned, or the storage does not have all of them.
    pub(crate) fn slice<T: Plain>(&self, held: &Arc<StorageHolds>, access: MemoryAccess) -> Option<TensorSlice<T>> {
        let bytes = self.elements.checked_mul(size_of::<T>())?;
        let is_inside = self.elements == 0 || held.contain(self.address, bytes);
        if self.dtype.item_bytes() != Some(size_of::<T>()) || !self.is_dense() || !is_inside {
            return None;
        }
        // SAFETY: `held` keeps its storages in place, and they contain all elements.
        unsafe { TensorSlice::kept(self.address, self.elements, access, Arc::<StorageHolds>::clone(held)) }
    }
}
