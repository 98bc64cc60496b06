//! What a read or a write of cuFile answers: bytes, an error of the kernel, or one of cuFile.

use std::fmt;
use std::io;

use crate::device::Device;
use crate::error::Error;

/// Why a transfer failed.
#[derive(Debug)]
pub enum IoError {
    /// The kernel's error number.
    Kernel(i32),
    /// cuFile's own, and what it means.
    CuFile(i32, &'static str),
    /// The driver could not even be asked.
    Device(Error),
}

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
    /// What a negative result means: cuFile's own codes are above 5000. Where there is none, an error of the device.
    pub(super) fn of_code(result: isize) -> Self {
        match result.unsigned_abs() as i32 {
            code @ 5001.. => Self::CuFile(code, name(code)),
            errno if result < 0 => Self::Kernel(errno),
            _ => Self::Kernel(5),
        }
    }
}

/// Makes the call with the device's context current, and reads its answer.
pub(super) fn on(device: &Device, call: impl FnOnce() -> isize) -> Result<usize, IoError> {
    let _current = device.enter().map_err(IoError::Device)?;
    outcome(call())
}

/// Reads an answer: minus one says that the kernel's error number tells more.
fn outcome(answer: isize) -> Result<usize, IoError> {
    match answer {
        -1 => Err(IoError::Kernel(io::Error::last_os_error().raw_os_error().unwrap_or(5))),
        ..-1 => {
            let code = answer.unsigned_abs() as i32;
            Err(IoError::CuFile(code, name(code)))
        }
        bytes => Ok(bytes as usize),
    }
}

/// What cuFile's codes mean (`CUfileOpError`), as far as somebody could do something about them.
pub(super) fn name(code: i32) -> &'static str {
    match code {
        5001 => "its driver is not open, or nvidia-fs is not loaded and its configuration forbids to do without",
        5004 | 5005 => "the kernel module nvidia-fs is of another version",
        5006 => "its driver is being closed",
        5007 => "this machine cannot do it",
        5008 => "this file, or its file system, cannot do it",
        5009 => "this GPU cannot do it",
        5010 | 5033 => "the kernel module nvidia-fs refuses",
        5012 | 5013 => "the memory is none of a GPU that it can use",
        5014 | 5016 | 5017 => "the range is longer than what was allocated or registered",
        5015 => "the memory is another context's",
        5018 => "the file is of a kind that it does not know",
        5019 => "the flags of the open file are not right",
        5020 => "the file is not open for direct I/O",
        5022 => "an argument is not right",
        5023 => "the memory is registered already",
        5024 => "the memory is not registered",
        5025 => "the file or the device of nvidia-fs may not be used",
        5027 => "the file is not registered",
        5028 => "the file is registered already",
        5029 => "there is no such GPU",
        5034 => "its configuration forbids it for this file",
        5036 => "no more of the GPU's memory can be pinned",
        5035 | 5038 | 5049 => "it does no batches here",
        5037 => "its batch is full",
        5043 => "it has no memory for it; try again later",
        _ => "refused",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers() {
        assert_eq!(outcome(0).unwrap(), 0);
        assert_eq!(outcome(4096).unwrap(), 4096);
        let error = outcome(-5036).unwrap_err();
        assert_eq!(error.to_string(), "cuFile: no more of the GPU's memory can be pinned (5036)");
        assert!(matches!(outcome(-1).unwrap_err(), IoError::Kernel(_)));
    }
}
