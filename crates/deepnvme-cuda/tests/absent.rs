//! A machine without a GPU: a sentence, the same at every call.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use deepnvme_cuda::{CuFile, Driver};

#[test]
fn where_it_was_looked_for_is_said() {
    // SAFETY: no other thread of this test looks at the environment.
    unsafe { std::env::set_var("DEEPNVME_LIBCUDA", "/nowhere/libcuda.so.1") };
    let absent = Driver::get().unwrap_err().to_string();
    assert!(absent.contains("the CUDA driver could not be loaded"), "{absent}");
    assert!(absent.contains("DEEPNVME_LIBCUDA names /nowhere/libcuda.so.1; mend it, or unset it"), "{absent}");
    assert_eq!(Driver::get().unwrap_err().to_string(), absent);
    assert_eq!(CuFile::open().unwrap_err().to_string(), absent, "without a driver there is no cuFile");
}
