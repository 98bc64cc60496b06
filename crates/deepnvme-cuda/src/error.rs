//! Errors of the driver, and of its absence.

use std::fmt;

/// The result of driver calls.
pub type Result<T> = std::result::Result<T, Error>;

/// The library is not available: the places searched and the loader's errors.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Unavailable {
    pub(crate) text: String,
}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Unavailable {}

/// A failed call of the driver.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Error {
    pub(crate) call: &'static str,
    pub(crate) code: i32,
    pub(crate) text: String,
}

impl Error {
    /// Returns the name of the called function.
    #[must_use]
    pub fn call(&self) -> &'static str {
        self.call
    }

    /// Returns the driver's error code (`CUresult`), or cuFile's.
    #[must_use]
    pub fn code(&self) -> i32 {
        self.code
    }

    /// Whether cuFile could not pin more GPU memory (`CU_FILE_GPU_MEMORY_PINNING_FAILED`).
    #[must_use]
    pub fn is_pinning_failed(&self) -> bool {
        self.code == 5036
    }

    /// Whether the device is out of memory.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        self.code == OUT_OF_MEMORY
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} ({})", self.call, self.text, self.code)
    }
}

impl std::error::Error for Error {}

pub(crate) const SUCCESS: i32 = 0;
const OUT_OF_MEMORY: i32 = 2;
pub(crate) const NOT_READY: i32 = 600;
