//! What cuFile's functions answer, and the error that is made of it.

use std::ffi::c_int;

use super::transfer::name;
use crate::driver::Driver;
use crate::error::{Error, Result};

/// `CU_FILE_SUCCESS`.
const SUCCESS: c_int = 0;
/// `CU_FILE_CUDA_DRIVER_ERROR`: the driver's own code tells the reason.
const CUDA_DRIVER_ERROR: c_int = 5011;

/// `CUfileError_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer {
    pub(super) code: c_int,
    pub(super) cuda_code: c_int,
}

/// Makes an error of any answer but success.
pub(super) fn check(driver: &Driver, call: &'static str, answer: Answer) -> Result<()> {
    match answer.code {
        SUCCESS => Ok(()),
        CUDA_DRIVER_ERROR => driver.check(call, answer.cuda_code),
        code => Err(Error { call, code, text: name(code).to_owned() }),
    }
}
