//! Errors of calls, and of libraries that cannot be used.

use std::fmt;
use std::time::Duration;

use crate::cufile_codes::GPU_MEMORY_PINNING_FAILED;

/// `CUDA_SUCCESS`.
pub(crate) const SUCCESS: i32 = 0;
/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: i32 = 2;
/// `CUDA_ERROR_NOT_INITIALIZED`.
const NOT_INITIALIZED: i32 = 3;
/// `CUDA_ERROR_NOT_READY`: work is not complete yet.
pub(crate) const NOT_READY: i32 = 600;
/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`: the call is not permitted while a stream is captured.
pub(crate) const CAPTURE_UNSUPPORTED: i32 = 900;
/// `CUDA_ERROR_STREAM_CAPTURE_IMPLICIT`: the default stream, while a stream that synchronises with it is captured.
const CAPTURE_IMPLICIT: i32 = 906;

/// The result of a call of the driver or of cuFile.
pub type Result<T> = std::result::Result<T, Error>;

/// The number of an error, by the library that it belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ErrorCode {
    /// The driver's (`CUresult`).
    Driver(i32),
    /// cuFile's (`CUfileOpError`).
    CuFile(i32),
    /// The operating system's (`errno`).
    Os(i32),
    /// No number: the time limit passed.
    TimedOut,
}

/// A failed call of the driver, of cuFile or of the operating system.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Error {
    pub(crate) call: &'static str,
    pub(crate) code: ErrorCode,
    pub(crate) text: String,
}

impl Error {
    /// Creates the error of a `call` whose work was not complete within `limit`.
    pub(crate) fn timed_out(call: &'static str, limit: Duration) -> Self {
        let text = format!("its work was not complete within {} s", limit.as_secs_f32());
        Self { call, code: ErrorCode::TimedOut, text }
    }

    /// Returns the name of the called function.
    #[must_use]
    pub fn call(&self) -> &'static str {
        self.call
    }

    /// Returns the number of the error.
    #[must_use]
    pub fn code(&self) -> ErrorCode {
        self.code
    }

    /// Returns whether cuFile could not pin more GPU memory (`CU_FILE_GPU_MEMORY_PINNING_FAILED`).
    #[must_use]
    pub fn is_pinning_failure(&self) -> bool {
        self.code == ErrorCode::CuFile(GPU_MEMORY_PINNING_FAILED)
    }

    /// Returns whether the device is out of memory.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        self.code == ErrorCode::Driver(OUT_OF_MEMORY)
    }

    /// Returns whether the driver is not initialised in this process: it is a forked child of one that has initialised
    /// it.
    #[must_use]
    pub fn is_not_initialised(&self) -> bool {
        self.code == ErrorCode::Driver(NOT_INITIALIZED)
    }

    /// Returns whether a stream is being captured into a CUDA graph, so that it cannot be queried or waited for.
    #[must_use]
    pub fn is_capturing(&self) -> bool {
        matches!(self.code, ErrorCode::Driver(CAPTURE_UNSUPPORTED | CAPTURE_IMPLICIT))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { call, code, text } = self;
        match code {
            ErrorCode::Driver(code) | ErrorCode::CuFile(code) | ErrorCode::Os(code) => {
                write!(f, "{call}: {text} ({code})")
            }
            ErrorCode::TimedOut => write!(f, "{call}: {text}"),
        }
    }
}

impl std::error::Error for Error {}

/// The reason why a library cannot be used, such as the loader's errors for all places searched.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Unavailable {
    pub(crate) text: String,
    pub(crate) is_missing: bool,
}

impl Unavailable {
    /// Creates the error of a library that is installed but cannot be used.
    pub(crate) fn unusable(text: String) -> Self {
        Self { text, is_missing: false }
    }

    /// Returns whether the library could not be loaded. cuFile may be found later, once the process has loaded other
    /// libraries.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        self.is_missing
    }
}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Unavailable {}
