//! A machine without a GPU: the same error for every call.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use deepnvme_cuda::{CuFile, Driver};

#[test]
fn the_error_lists_the_places_searched() {
    // SAFETY: no other thread of this test reads the environment.
    unsafe { std::env::set_var("DEEPNVME_LIBCUDA", "/nowhere/libcuda.so.1") };
    let absent = Driver::get().unwrap_err().to_string();
    assert!(absent.contains("the CUDA driver could not be loaded"), "{absent}");
    assert!(absent.contains("DEEPNVME_LIBCUDA is /nowhere/libcuda.so.1; correct or unset it"), "{absent}");
    assert_eq!(Driver::get().unwrap_err().to_string(), absent);
    assert_eq!(CuFile::open().unwrap_err().to_string(), absent, "without a driver there is no cuFile");
}
