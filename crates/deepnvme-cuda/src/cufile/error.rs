//! Errors and status codes of cuFile.

use std::ffi::c_int;
use std::fmt;
use std::io;

use crate::cufile_codes as codes;
use crate::driver::Driver;
use crate::error::{Error, ErrorCode, Result};

/// `EIO`, for a failure without a reason.
const EIO: i32 = 5;

/// A failed transfer.
#[derive(Debug)]
pub enum IoError {
    /// The kernel's error number.
    Kernel(i32),
    /// cuFile's code and its meaning.
    CuFile(i32, &'static str),
    /// The device's context could not be made current.
    Device(Error),
}

/// The bytes that were moved, or the error.
pub type IoResult = std::result::Result<usize, IoError>;

impl fmt::Display for IoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kernel(errno) => write!(f, "{}", io::Error::from_raw_os_error(*errno)),
            Self::CuFile(code, text) => write!(f, "cuFile: {text} ({code})"),
            Self::Device(error) => write!(f, "{error}"),
        }
    }
}

impl std::error::Error for IoError {}

impl IoError {
    /// Converts the result of a failed transfer. It is negative: a code of cuFile (above 5000), or the kernel's error
    /// number. A failed entry of a batch may have no reason: its result is not negative.
    pub(super) fn of_code(result: isize) -> Self {
        if result >= 0 {
            return Self::Kernel(EIO);
        }
        match result.unsigned_abs() as i32 {
            code @ 5001.. => Self::CuFile(code, describe(code)),
            errno => Self::Kernel(errno),
        }
    }
}

/// `CU_FILE_SUCCESS`.
const SUCCESS: c_int = 0;

/// `CUfileError_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Status {
    pub(super) code: c_int,
    pub(super) cuda_code: c_int,
}

/// Turns any status except success into an error.
pub(super) fn check(driver: &Driver, call: &'static str, status: Status) -> Result<()> {
    match (status.code, status.cuda_code) {
        (SUCCESS, _) => Ok(()),
        (codes::CUDA_DRIVER_ERROR, cuda_code) if cuda_code != SUCCESS => driver.check(call, cuda_code),
        (code, _) => Err(Error { call, code: ErrorCode::CuFile(code), text: describe(code).to_owned() }),
    }
}

/// Describes cuFile's codes, as far as users can act on them.
pub(super) fn describe(code: i32) -> &'static str {
    match code {
        codes::DRIVER_NOT_INITIALIZED => {
            "the driver of cuFile is not open, or nvidia-fs is not loaded and the configuration requires it"
        }
        codes::DRIVER_VERSION_MISMATCH | codes::DRIVER_VERSION_READ_ERROR => {
            "the kernel module nvidia-fs has another version"
        }
        codes::DRIVER_CLOSING => "the driver of cuFile is being closed",
        codes::PLATFORM_NOT_SUPPORTED => "not supported on this machine",
        codes::IO_NOT_SUPPORTED => "not supported by this file or its file system",
        codes::DEVICE_NOT_SUPPORTED => "not supported by this GPU",
        codes::NVFS_DRIVER_ERROR | codes::NVFS_SETUP_ERROR => "the kernel module nvidia-fs failed",
        codes::CUDA_DRIVER_ERROR => "the CUDA driver failed, without a reason",
        codes::CUDA_POINTER_INVALID | codes::CUDA_MEMORY_TYPE_INVALID => {
            "the memory does not belong to a supported GPU"
        }
        codes::CUDA_POINTER_RANGE_ERROR | codes::INVALID_MAPPING_SIZE | codes::INVALID_MAPPING_RANGE => {
            "the range exceeds the allocated or registered memory"
        }
        codes::CUDA_CONTEXT_MISMATCH => "the memory belongs to another context",
        codes::INVALID_FILE_TYPE => "the type of the file is not supported",
        codes::INVALID_FILE_OPEN_FLAG => "the file was opened with invalid flags",
        codes::DIO_NOT_SET => "the file is not open for direct I/O",
        codes::INVALID_VALUE => "an argument is invalid",
        codes::MEMORY_ALREADY_REGISTERED => "the memory is already registered",
        codes::MEMORY_NOT_REGISTERED => "the memory is not registered",
        codes::PERMISSION_DENIED => "no permission for the file or the device of nvidia-fs",
        codes::HANDLE_NOT_REGISTERED => "the file is not registered",
        codes::HANDLE_ALREADY_REGISTERED => "the file is already registered",
        codes::DEVICE_NOT_FOUND => "there is no such GPU",
        codes::IO_DISABLED => "the configuration forbids it for this file",
        codes::BATCH_SUBMIT_FAILED => "the batch could not be submitted",
        codes::GPU_MEMORY_PINNING_FAILED => "no more GPU memory can be pinned",
        codes::BATCH_FULL => "the batch is full",
        codes::ASYNC_NOT_SUPPORTED => "transfers on a stream are not supported here",
        codes::BATCH_NOCOMPAT_ERROR => "batches are not supported here",
        codes::NOMEM_ERROR => "out of memory; try again later",
        _ => "unknown error",
    }
}
