//! Error codes of CUDA and cuFile, as their headers number them.

/// Codes of the CUDA driver.
pub(crate) mod cuda {
    pub(crate) const INVALID_VALUE: i32 = 1;
    pub(crate) const OUT_OF_MEMORY: i32 = 2;
    pub(crate) const NOT_INITIALIZED: i32 = 3;
    pub(crate) const NO_DEVICE: i32 = 100;
    pub(crate) const INVALID_DEVICE: i32 = 101;
    pub(crate) const INVALID_CONTEXT: i32 = 201;
    pub(crate) const OPERATING_SYSTEM: i32 = 304;
    pub(crate) const INVALID_HANDLE: i32 = 400;
    pub(crate) const NOT_READY: i32 = 600;
    pub(crate) const ILLEGAL_ADDRESS: i32 = 700;
    pub(crate) const CONTEXT_IS_DESTROYED: i32 = 709;
    pub(crate) const HOST_MEMORY_ALREADY_REGISTERED: i32 = 712;
    pub(crate) const HOST_MEMORY_NOT_REGISTERED: i32 = 713;
    pub(crate) const NOT_PERMITTED: i32 = 800;
    pub(crate) const NOT_SUPPORTED: i32 = 801;
    pub(crate) const STREAM_CAPTURE_UNSUPPORTED: i32 = 900;
    pub(crate) const STREAM_CAPTURE_INVALIDATED: i32 = 901;
    pub(crate) const STREAM_CAPTURE_IMPLICIT: i32 = 906;
}

/// Codes of cuFile.
pub(crate) mod cufile {
    pub(crate) const DRIVER_NOT_INITIALIZED: i32 = 5001;
    pub(crate) const IO_NOT_SUPPORTED: i32 = 5008;
    pub(crate) const CUDA_DRIVER_ERROR: i32 = 5011;
    pub(crate) const CUDA_POINTER_INVALID: i32 = 5012;
    pub(crate) const CUDA_POINTER_RANGE_ERROR: i32 = 5014;
    pub(crate) const CUDA_CONTEXT_MISMATCH: i32 = 5015;
    pub(crate) const INVALID_MAPPING_RANGE: i32 = 5017;
    pub(crate) const INVALID_FILE_TYPE: i32 = 5018;
    pub(crate) const INVALID_VALUE: i32 = 5022;
    pub(crate) const MEMORY_ALREADY_REGISTERED: i32 = 5023;
    pub(crate) const DRIVER_ALREADY_OPEN: i32 = 5026;
    pub(crate) const HANDLE_NOT_REGISTERED: i32 = 5027;
    pub(crate) const HANDLE_ALREADY_REGISTERED: i32 = 5028;
    pub(crate) const INTERNAL_ERROR: i32 = 5030;
    pub(crate) const GPU_MEMORY_PINNING_FAILED: i32 = 5036;
    pub(crate) const BATCH_FULL: i32 = 5037;
    pub(crate) const INVALID_CONTEXT_ERROR: i32 = 5047;
}

/// The result of a cuFile transfer that failed with this code.
pub(crate) fn refused(code: i32) -> isize {
    -(code as isize)
}
