//! What the driver says when it refuses, and what is said where there is no driver.

use std::fmt;

/// A result of the driver.
pub type Result<T> = std::result::Result<T, Error>;

/// Why there is no library: where it was looked for, and what the loader said.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Absent {
    pub(crate) text: String,
}

impl fmt::Display for Absent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Absent {}

/// A call that the driver refused.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Error {
    pub(crate) call: &'static str,
    pub(crate) code: i32,
    pub(crate) text: String,
}

impl Error {
    /// The function that was called.
    #[must_use]
    pub fn call(&self) -> &'static str {
        self.call
    }

    /// The driver's number for what went wrong (`CUresult`).
    #[must_use]
    pub fn code(&self) -> i32 {
        self.code
    }

    /// Whether cuFile could pin no more of the GPU's memory (`CU_FILE_GPU_MEMORY_PINNING_FAILED`).
    #[must_use]
    pub fn is_window_full(&self) -> bool {
        self.code == 5036
    }

    /// Whether there was no memory for it.
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
