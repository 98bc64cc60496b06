//! The C structs of DLPack 1.x, under DLPack's own names.

use std::ffi::c_void;

/// The device of a tensor's memory.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DLDevice {
    /// One of the constants below, or of DLPack's many others.
    pub device_type: i32,
    /// Index of the device among those of its type; 0 for the CPU.
    pub device_id: i32,
}

impl DLDevice {
    /// `kDLCPU`.
    pub const CPU: i32 = 1;
    /// `kDLCUDA`.
    pub const CUDA: i32 = 2;
    /// `kDLCUDAHost`: host memory, pinned by CUDA.
    pub const CUDA_HOST: i32 = 3;
}

/// The type of an element: `lanes` values of `bits` each. `lanes` is 1 except for vectors.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DLDataType {
    /// One of the constants below, or another of DLPack's.
    pub code: u8,
    /// Bits of one value.
    pub bits: u8,
    /// Values in one element.
    pub lanes: u16,
}

impl DLDataType {
    /// `kDLInt`.
    pub const INT: u8 = 0;
    /// `kDLUInt`.
    pub const UINT: u8 = 1;
    /// `kDLFloat`.
    pub const FLOAT: u8 = 2;
    /// `kDLBfloat`.
    pub const BFLOAT: u8 = 4;
    /// `kDLComplex`.
    pub const COMPLEX: u8 = 5;
    /// `kDLBool`.
    pub const BOOL: u8 = 6;
    /// `kDLFloat8_e4m3fn`.
    pub const FLOAT8_E4M3FN: u8 = 10;
    /// `kDLFloat8_e4m3fnuz`.
    pub const FLOAT8_E4M3FNUZ: u8 = 11;
    /// `kDLFloat8_e5m2`.
    pub const FLOAT8_E5M2: u8 = 12;
    /// `kDLFloat8_e5m2fnuz`.
    pub const FLOAT8_E5M2FNUZ: u8 = 13;
    /// `kDLFloat8_e8m0fnu`.
    pub const FLOAT8_E8M0FNU: u8 = 14;
    /// Bytes.
    pub const U8: Self = Self { code: Self::UINT, bits: 8, lanes: 1 };

    /// Returns the bytes of one element, or `None` if it does not fill whole bytes.
    #[must_use]
    pub const fn item_bytes(self) -> Option<usize> {
        let bits = self.bits as usize * self.lanes as usize;
        if bits > 0 && bits.is_multiple_of(8) { Some(bits / 8) } else { None }
    }
}

/// A tensor, without its owner.
#[repr(C)]
#[derive(Debug)]
pub struct DLTensor {
    /// The memory. The first element is `byte_offset` further on.
    pub data: *mut c_void,
    /// The device of the memory.
    pub device: DLDevice,
    /// Dimensions.
    pub ndim: i32,
    /// The type of an element.
    pub dtype: DLDataType,
    /// `ndim` counts of elements.
    pub shape: *mut i64,
    /// `ndim` strides, in elements; null for a contiguous row-major tensor.
    pub strides: *mut i64,
    /// Bytes from `data` to the first element.
    pub byte_offset: u64,
}

/// A tensor with its owner, as before DLPack 1.0.
#[repr(C)]
#[derive(Debug)]
pub struct DLManagedTensor {
    /// The tensor.
    pub dl_tensor: DLTensor,
    /// The owner, for the deleter.
    pub manager_ctx: *mut c_void,
    /// Frees the tensor and this struct. If null, nothing is freed.
    pub deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

/// The version of DLPack that a struct follows.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DLPackVersion {
    /// Structs of another major version are laid out differently.
    pub major: u32,
    /// Increases as constants are added.
    pub minor: u32,
}

/// A tensor with its owner, since DLPack 1.0.
#[repr(C)]
#[derive(Debug)]
pub struct DLManagedTensorVersioned {
    /// Comes first in every version.
    pub version: DLPackVersion,
    /// The owner, for the deleter.
    pub manager_ctx: *mut c_void,
    /// Frees the tensor and this struct. If null, nothing is freed.
    pub deleter: Option<unsafe extern "C" fn(*mut Self)>,
    /// The `FLAG_*` bits.
    pub flags: u64,
    /// The tensor.
    pub dl_tensor: DLTensor,
}

/// Flag of a read-only tensor.
pub const FLAG_READ_ONLY: u64 = 1 << 0;
/// Flag of sub-byte elements that take a whole byte each instead of being packed.
pub const FLAG_SUBBYTE_PADDED: u64 = 1 << 2;
/// The version of these structs.
pub const VERSION: DLPackVersion = DLPackVersion { major: 1, minor: 1 };

#[cfg(test)]
mod tests {
    use std::mem::size_of;

    use super::*;

    /// The offsets that a C compiler gives the structs of `dlpack.h` on a 64-bit machine.
    #[test]
    #[cfg(target_pointer_width = "64")]
    fn the_layout_matches_c() {
        assert_eq!((size_of::<DLDevice>(), size_of::<DLDataType>()), (8, 4));
        let fields = offsets!(DLTensor: data, device, ndim, dtype, shape, strides, byte_offset);
        assert_eq!((fields, size_of::<DLTensor>()), ([0, 8, 16, 20, 24, 32, 40], 48));
        let fields = offsets!(DLManagedTensor: dl_tensor, manager_ctx, deleter);
        assert_eq!((fields, size_of::<DLManagedTensor>()), ([0, 48, 56], 64));
        let fields = offsets!(DLManagedTensorVersioned: version, manager_ctx, deleter, flags, dl_tensor);
        assert_eq!((fields, size_of::<DLManagedTensorVersioned>()), ([0, 8, 16, 24, 32], 80));
    }

    #[test]
    fn partial_bytes_have_no_size() {
        let bytes = |bits, lanes| DLDataType { code: DLDataType::FLOAT, bits, lanes }.item_bytes();
        assert_eq!((bytes(8, 1), bytes(16, 4), bytes(128, 1)), (Some(1), Some(8), Some(16)));
        assert_eq!((bytes(4, 2), bytes(4, 1), bytes(0, 1), bytes(8, 0)), (Some(1), None, None, None));
        assert_eq!(bytes(255, u16::MAX), None);
    }
}
