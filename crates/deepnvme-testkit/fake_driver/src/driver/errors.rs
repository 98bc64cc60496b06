//! Names and descriptions of result codes.

use std::ffi::{CStr, c_char};
use std::ptr::null;

use crate::abi::{Code, INVALID_VALUE, Out, Outcome, SUCCESS};
use crate::calls::{Needs, driver};
use crate::state::is_forked;

/// Returns the name of a code. It works in a forked child as well, which has no state.
// SAFETY: the name is the driver's own, and nothing else in this library has it.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
extern "C" fn cuGetErrorName(code: Code, out: Out<*const c_char>) -> Code {
    answer("cuGetErrorName", out, known(code).map(|(_, name, _)| *name))
}

/// Returns the description of a code.
// SAFETY: the name is the driver's own, and nothing else in this library has it.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
extern "C" fn cuGetErrorString(code: Code, out: Out<*const c_char>) -> Code {
    answer("cuGetErrorString", out, known(code).map(|(_, _, sentence)| *sentence))
}

fn answer(symbol: &str, out: Out<*const c_char>, text: Option<&'static CStr>) -> Code {
    if is_forked() {
        return put(out, text).err().unwrap_or(SUCCESS);
    }
    driver(symbol, Needs::Nothing, |_, _| put(out, text))
}

fn put(out: Out<*const c_char>, text: Option<&'static CStr>) -> Outcome {
    out.put(text.map_or(null(), CStr::as_ptr))?;
    text.map(drop).ok_or(INVALID_VALUE)
}

fn known(code: Code) -> Option<&'static (Code, &'static CStr, &'static CStr)> {
    CODES.iter().find(|(known, _, _)| *known == code)
}

/// The codes that the fake driver returns by itself, and others that tests may inject.
static CODES: &[(Code, &CStr, &CStr)] = &[
    (0, c"CUDA_SUCCESS", c"it worked"),
    (1, c"CUDA_ERROR_INVALID_VALUE", c"an argument is out of range"),
    (2, c"CUDA_ERROR_OUT_OF_MEMORY", c"not enough memory"),
    (3, c"CUDA_ERROR_NOT_INITIALIZED", c"the driver was not initialised in this process"),
    (4, c"CUDA_ERROR_DEINITIALIZED", c"the driver is shutting down"),
    (34, c"CUDA_ERROR_STUB_LIBRARY", c"this library is a stub"),
    (46, c"CUDA_ERROR_DEVICE_UNAVAILABLE", c"the device is busy or unavailable"),
    (100, c"CUDA_ERROR_NO_DEVICE", c"there is no device"),
    (101, c"CUDA_ERROR_INVALID_DEVICE", c"there is no device of this ordinal"),
    (200, c"CUDA_ERROR_INVALID_IMAGE", c"the kernel image is invalid"),
    (201, c"CUDA_ERROR_INVALID_CONTEXT", c"no context is current"),
    (205, c"CUDA_ERROR_MAP_FAILED", c"mapping failed"),
    (214, c"CUDA_ERROR_ECC_UNCORRECTABLE", c"memory error that could not be corrected"),
    (304, c"CUDA_ERROR_OPERATING_SYSTEM", c"a call to the operating system failed"),
    (400, c"CUDA_ERROR_INVALID_HANDLE", c"the handle means nothing here"),
    (401, c"CUDA_ERROR_ILLEGAL_STATE", c"the resource is in the wrong state"),
    (500, c"CUDA_ERROR_NOT_FOUND", c"not found"),
    (600, c"CUDA_ERROR_NOT_READY", c"not over yet"),
    (700, c"CUDA_ERROR_ILLEGAL_ADDRESS", c"a kernel used an illegal address"),
    (702, c"CUDA_ERROR_LAUNCH_TIMEOUT", c"a kernel took too long"),
    (708, c"CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE", c"the primary context is in use"),
    (709, c"CUDA_ERROR_CONTEXT_IS_DESTROYED", c"the current context was destroyed"),
    (712, c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", c"pages of the range are registered already"),
    (713, c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", c"no registration begins here"),
    (719, c"CUDA_ERROR_LAUNCH_FAILED", c"a kernel failed"),
    (800, c"CUDA_ERROR_NOT_PERMITTED", c"not permitted here"),
    (801, c"CUDA_ERROR_NOT_SUPPORTED", c"not supported"),
    (802, c"CUDA_ERROR_SYSTEM_NOT_READY", c"the system is not ready for CUDA"),
    (803, c"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", c"library and kernel driver do not match"),
    (900, c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", c"not permitted while a stream is captured"),
    (901, c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", c"the capture was invalidated"),
    (906, c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", c"the legacy stream would depend on a captured one"),
    (999, c"CUDA_ERROR_UNKNOWN", c"unknown error"),
];
