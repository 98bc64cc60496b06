//! The error codes of cuFile (`CUfileOpError` in `cufile.h`) that `cufile::error` has a text for.

pub(crate) const DRIVER_NOT_INITIALIZED: i32 = 5001;
pub(crate) const DRIVER_VERSION_MISMATCH: i32 = 5004;
pub(crate) const DRIVER_VERSION_READ_ERROR: i32 = 5005;
pub(crate) const DRIVER_CLOSING: i32 = 5006;
pub(crate) const PLATFORM_NOT_SUPPORTED: i32 = 5007;
pub(crate) const IO_NOT_SUPPORTED: i32 = 5008;
pub(crate) const DEVICE_NOT_SUPPORTED: i32 = 5009;
pub(crate) const NVFS_DRIVER_ERROR: i32 = 5010;
/// The status has the CUDA driver's code as well.
pub(crate) const CUDA_DRIVER_ERROR: i32 = 5011;
pub(crate) const CUDA_POINTER_INVALID: i32 = 5012;
pub(crate) const CUDA_MEMORY_TYPE_INVALID: i32 = 5013;
pub(crate) const CUDA_POINTER_RANGE_ERROR: i32 = 5014;
pub(crate) const CUDA_CONTEXT_MISMATCH: i32 = 5015;
pub(crate) const INVALID_MAPPING_SIZE: i32 = 5016;
pub(crate) const INVALID_MAPPING_RANGE: i32 = 5017;
pub(crate) const INVALID_FILE_TYPE: i32 = 5018;
pub(crate) const INVALID_FILE_OPEN_FLAG: i32 = 5019;
pub(crate) const DIO_NOT_SET: i32 = 5020;
pub(crate) const INVALID_VALUE: i32 = 5022;
pub(crate) const MEMORY_ALREADY_REGISTERED: i32 = 5023;
pub(crate) const MEMORY_NOT_REGISTERED: i32 = 5024;
pub(crate) const PERMISSION_DENIED: i32 = 5025;
pub(crate) const HANDLE_NOT_REGISTERED: i32 = 5027;
pub(crate) const HANDLE_ALREADY_REGISTERED: i32 = 5028;
pub(crate) const DEVICE_NOT_FOUND: i32 = 5029;
pub(crate) const NVFS_SETUP_ERROR: i32 = 5033;
pub(crate) const IO_DISABLED: i32 = 5034;
pub(crate) const BATCH_SUBMIT_FAILED: i32 = 5035;
pub(crate) const GPU_MEMORY_PINNING_FAILED: i32 = 5036;
pub(crate) const BATCH_FULL: i32 = 5037;
pub(crate) const ASYNC_NOT_SUPPORTED: i32 = 5038;
pub(crate) const NOMEM_ERROR: i32 = 5043;
pub(crate) const BATCH_NOCOMPAT_ERROR: i32 = 5049;
