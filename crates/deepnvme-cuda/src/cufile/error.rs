//! Errors and status codes of cuFile.

use std::ffi::c_int;
use std::fmt;
use std::io;

use crate::driver::Driver;
use crate::error::{Error, ErrorCode, Result};

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
    /// Converts a negative result: cuFile's codes are above 5000. Other results are I/O errors.
    pub(super) fn of_code(result: isize) -> Self {
        match result.unsigned_abs() as i32 {
            code @ 5001.. => Self::CuFile(code, name(code)),
            errno if result < 0 => Self::Kernel(errno),
            _ => Self::Kernel(5),
        }
    }
}

/// `CU_FILE_SUCCESS`.
const SUCCESS: c_int = 0;
/// `CU_FILE_CUDA_DRIVER_ERROR`: the driver's code has the reason.
const CUDA_DRIVER_ERROR: c_int = 5011;

/// `CUfileError_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Status {
    pub(super) code: c_int,
    pub(super) cuda_code: c_int,
}

/// Turns any status except success into an error.
pub(super) fn check(driver: &Driver, call: &'static str, status: Status) -> Result<()> {
    match status.code {
        SUCCESS => Ok(()),
        CUDA_DRIVER_ERROR => driver.check(call, status.cuda_code),
        code => Err(Error { call, code: ErrorCode::CuFile(code), text: name(code).to_owned() }),
    }
}

/// Describes cuFile's codes (`CUfileOpError`), as far as users can act on them.
pub(super) fn name(code: i32) -> &'static str {
    match code {
        5001 => "its driver is not open, or nvidia-fs is not loaded and the configuration requires it",
        5004 | 5005 => "the kernel module nvidia-fs has another version",
        5006 => "its driver is being closed",
        5007 => "not supported on this machine",
        5008 => "not supported by this file or its file system",
        5009 => "not supported by this GPU",
        5010 | 5033 => "the kernel module nvidia-fs failed",
        5012 | 5013 => "the memory does not belong to a supported GPU",
        5014 | 5016 | 5017 => "the range exceeds the allocated or registered memory",
        5015 => "the memory belongs to another context",
        5018 => "the type of the file is not supported",
        5019 => "the file was opened with invalid flags",
        5020 => "the file is not open for direct I/O",
        5022 => "an argument is invalid",
        5023 => "the memory is already registered",
        5024 => "the memory is not registered",
        5025 => "no permission for the file or the device of nvidia-fs",
        5027 => "the file is not registered",
        5028 => "the file is already registered",
        5029 => "there is no such GPU",
        5034 => "the configuration forbids it for this file",
        5036 => "no more GPU memory can be pinned",
        5035 | 5038 | 5049 => "batches are not supported here",
        5037 => "the batch is full",
        5043 => "out of memory; try again later",
        _ => "unknown error",
    }
}
