//! C types of the driver's functions, from `cuda.h`.

use std::ffi::c_void;
use std::ptr;

use crate::rows::Rows;

/// `CUdeviceptr`.
pub(crate) type DevicePointer = u64;
/// `CUcontext`, `CUstream`, `CUevent`: opaque handles.
pub(crate) type Handle = *mut c_void;

/// `CU_MEMORYTYPE_HOST` and `CU_MEMORYTYPE_DEVICE`.
const HOST: u32 = 1;
const DEVICE: u32 = 2;

/// `CUDA_MEMCPY2D`: a 2-D copy.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Copy2d {
    source_x: usize,
    source_y: usize,
    source_kind: u32,
    source_host: *const c_void,
    source_device: DevicePointer,
    source_array: *mut c_void,
    source_pitch: usize,
    target_x: usize,
    target_y: usize,
    target_kind: u32,
    target_host: *mut c_void,
    target_device: DevicePointer,
    target_array: *mut c_void,
    target_pitch: usize,
    row_bytes: usize,
    rows: usize,
}

impl Copy2d {
    const ZERO: Self = Self {
        source_x: 0,
        source_y: 0,
        source_kind: 0,
        source_host: ptr::null(),
        source_device: 0,
        source_array: ptr::null_mut(),
        source_pitch: 0,
        target_x: 0,
        target_y: 0,
        target_kind: 0,
        target_host: ptr::null_mut(),
        target_device: 0,
        target_array: ptr::null_mut(),
        target_pitch: 0,
        row_bytes: 0,
        rows: 0,
    };

    /// Copies contiguous rows on the host to the device.
    pub(crate) fn to_device(target: &Rows, source: *const u8) -> Self {
        Self {
            source_kind: HOST,
            source_host: source.cast(),
            source_pitch: target.bytes,
            target_kind: DEVICE,
            target_device: target.address as DevicePointer,
            target_pitch: target.pitch as usize,
            row_bytes: target.bytes,
            rows: target.count,
            ..Self::ZERO
        }
    }

    /// Copies from the device to contiguous rows on the host.
    pub(crate) fn to_host(target: *mut u8, source: &Rows) -> Self {
        Self {
            source_kind: DEVICE,
            source_device: source.address as DevicePointer,
            source_pitch: source.pitch as usize,
            target_kind: HOST,
            target_host: target.cast(),
            target_pitch: source.bytes,
            row_bytes: source.bytes,
            rows: source.count,
            ..Self::ZERO
        }
    }
}
