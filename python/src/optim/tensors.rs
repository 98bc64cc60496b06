//! Float tensors as slices.

use std::sync::Arc;

use deepnvme_mem::dlpack::DLDataType;
use deepnvme_optim::{Float, FloatSlice, FloatSliceMut, MomentMut, Part};
use pyo3::exceptions::{PyAttributeError, PyTypeError};
use pyo3::prelude::*;

use crate::memory::{AddressRange, Described, MemoryAccess, StorageHolds, TensorSlice};
use crate::once::intern;
use crate::tensor_memory;

/// Weights, gradient, moments, copy of the weights, position of the first element.
pub(super) type PartArgument<'py> =
    (Bound<'py, PyAny>, Bound<'py, PyAny>, Vec<Bound<'py, PyAny>>, Option<Bound<'py, PyAny>>, u64);

/// A float tensor.
pub(super) enum Floats {
    F32(TensorSlice<f32>),
    Bf16(TensorSlice<u16>),
    F16(TensorSlice<u16>),
}

impl Floats {
    pub(super) fn new(tensor: &Bound<'_, PyAny>, access: MemoryAccess) -> PyResult<Self> {
        match dtype(tensor)?.as_str() {
            "torch.float32" => tensor_memory::slice(tensor, access).map(Self::F32),
            "torch.bfloat16" => tensor_memory::slice(tensor, access).map(Self::Bf16),
            "torch.float16" => tensor_memory::slice(tensor, access).map(Self::F16),
            other => {
                Err(PyTypeError::new_err(format!("tensors must be torch.float32, bfloat16 or float16, not {other}")))
            }
        }
    }

    /// Borrow the elements of a tensor whose storage is held. `None` if it is not a dense one of floats.
    pub(super) fn held(tensor: &Described<'_>, held: &Arc<StorageHolds>, access: MemoryAccess) -> Option<Self> {
        match float(tensor)? {
            Float::F32 => tensor.slice(held, access).map(Self::F32),
            Float::Bf16 => tensor.slice(held, access).map(Self::Bf16),
            Float::F16 => tensor.slice(held, access).map(Self::F16),
        }
    }

    /// Borrow the elements from `begin` to `end` as well.
    pub(super) fn part(&self, begin: usize, end: usize) -> Option<Self> {
        match self {
            Self::F32(slice) => slice.part(begin, end).map(Self::F32),
            Self::Bf16(slice) => slice.part(begin, end).map(Self::Bf16),
            Self::F16(slice) => slice.part(begin, end).map(Self::F16),
        }
    }

    pub(super) fn address_range(&self) -> AddressRange {
        match self {
            Self::F32(slice) => slice.address_range(),
            Self::Bf16(slice) | Self::F16(slice) => slice.address_range(),
        }
    }

    /// # Safety
    /// No other tensor of the same work changes these elements.
    pub(super) unsafe fn numbers(&self) -> FloatSlice<'_> {
        // SAFETY: no other tensor of the same work changes these elements, as this function requires.
        unsafe {
            match self {
                Self::F32(slice) => FloatSlice::F32(slice.as_slice()),
                Self::Bf16(slice) => FloatSlice::Bf16(slice.as_slice()),
                Self::F16(slice) => FloatSlice::F16(slice.as_slice()),
            }
        }
    }

    /// # Safety
    /// No other tensor of the same work overlaps these elements.
    pub(super) unsafe fn numbers_mut(&mut self) -> FloatSliceMut<'_> {
        // SAFETY: no other tensor of the same work overlaps these elements, as this function requires.
        unsafe {
            match self {
                Self::F32(slice) => FloatSliceMut::F32(slice.as_mut_slice()),
                Self::Bf16(slice) => FloatSliceMut::Bf16(slice.as_mut_slice()),
                Self::F16(slice) => FloatSliceMut::F16(slice.as_mut_slice()),
            }
        }
    }
}

/// The tensors of a moment.
pub(super) enum Moment {
    F32(TensorSlice<f32>),
    Bf16(TensorSlice<u16>),
    Q8(TensorSlice<u8>, TensorSlice<f32>),
}

impl Moment {
    pub(super) fn new(argument: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok((codes, scales)) = argument.extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>() {
            let (codes_dtype, scales_dtype) = (dtype(&codes)?, dtype(&scales)?);
            if codes_dtype != "torch.uint8" || scales_dtype != "torch.float32" {
                return Err(PyTypeError::new_err(format!(
                    "an 8-bit moment is (codes, scales) of torch.uint8 and torch.float32, not {codes_dtype} and {scales_dtype}"
                )));
            }
            return Ok(Self::Q8(
                tensor_memory::slice(&codes, MemoryAccess::Write)?,
                tensor_memory::slice(&scales, MemoryAccess::Write)?,
            ));
        }
        match dtype(argument)?.as_str() {
            "torch.float32" => tensor_memory::slice(argument, MemoryAccess::Write).map(Self::F32),
            "torch.bfloat16" => tensor_memory::slice(argument, MemoryAccess::Write).map(Self::Bf16),
            other => Err(PyTypeError::new_err(format!(
                "a moment has dtype torch.float32 or bfloat16, or is (codes, scales), not {other}"
            ))),
        }
    }

    pub(super) fn address_ranges(&self) -> Vec<AddressRange> {
        match self {
            Self::F32(values) => vec![values.address_range()],
            Self::Bf16(values) => vec![values.address_range()],
            Self::Q8(codes, scales) => vec![codes.address_range(), scales.address_range()],
        }
    }

    /// # Safety
    /// No other tensor of the same work overlaps these, nor does one of these the other.
    pub(super) unsafe fn moment(&mut self) -> MomentMut<'_> {
        // SAFETY: these tensors are disjoint from each other and from the others, as this function requires.
        unsafe {
            match self {
                Self::F32(values) => MomentMut::F32(values.as_mut_slice()),
                Self::Bf16(values) => MomentMut::Bf16(values.as_mut_slice()),
                Self::Q8(codes, scales) => MomentMut::Q8 { codes: codes.as_mut_slice(), scales: scales.as_mut_slice() },
            }
        }
    }
}

/// The tensors of a part.
pub(super) struct PartTensors {
    pub(super) weights: Floats,
    pub(super) grad: Floats,
    pub(super) moments: Vec<Moment>,
    pub(super) out: Option<Floats>,
    pub(super) index: u64,
}

impl PartTensors {
    pub(super) fn new((weights, grad, moments, out, index): PartArgument<'_>) -> PyResult<Self> {
        Ok(Self {
            weights: Floats::new(&weights, MemoryAccess::Write)?,
            grad: Floats::new(&grad, MemoryAccess::Read)?,
            moments: moments.iter().map(Moment::new).collect::<PyResult<_>>()?,
            out: out.map(|out| Floats::new(&out, MemoryAccess::Write)).transpose()?,
            index,
        })
    }

    /// The number of weights.
    pub(super) fn len(&self) -> usize {
        match &self.weights {
            Floats::F32(slice) => slice.len(),
            Floats::Bf16(slice) | Floats::F16(slice) => slice.len(),
        }
    }

    pub(super) fn address_ranges(&self) -> Vec<AddressRange> {
        let mut address_ranges = vec![self.weights.address_range(), self.grad.address_range()];
        address_ranges.extend(self.out.iter().map(Floats::address_range));
        address_ranges.extend(self.moments.iter().flat_map(Moment::address_ranges));
        address_ranges
    }

    /// # Safety
    /// `check_disjoint` of the tensors of all parts of the step has succeeded.
    pub(super) unsafe fn part(&mut self) -> Part<'_> {
        // SAFETY: the tensors that a step changes overlap no other, as this function requires.
        unsafe {
            Part {
                index: self.index,
                weights: self.weights.numbers_mut(),
                grad: self.grad.numbers(),
                moments: self.moments.iter_mut().map(|moment| moment.moment()).collect(),
                out: self.out.as_mut().map(|out| out.numbers_mut()),
            }
        }
    }
}

/// Return the float type of a tensor; `None` for others.
pub(super) fn float(tensor: &Described<'_>) -> Option<Float> {
    let DLDataType { code, bits, lanes } = tensor.dtype;
    match (code, bits, lanes) {
        (DLDataType::FLOAT, 32, 1) => Some(Float::F32),
        (DLDataType::FLOAT, 16, 1) => Some(Float::F16),
        (DLDataType::BFLOAT, 16, 1) => Some(Float::Bf16),
        _ => None,
    }
}

fn dtype(tensor: &Bound<'_, PyAny>) -> PyResult<String> {
    let named = tensor.getattr(intern!(tensor.py(), "dtype")).and_then(|dtype| dtype.str()?.extract());
    named.map_err(|error| {
        // A signal handler may raise any exception here. It must not become a TypeError.
        let is_error = error.is_instance_of::<PyAttributeError>(tensor.py());
        if is_error { PyTypeError::new_err("expected a torch tensor") } else { error }
    })
}
