//! cuFile in compatibility mode: one question for all engines of the process.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use deepnvme_cuda::CuFile;
use deepnvme_fake_driver::Loaded;

#[test]
fn the_answer_of_the_driver_is_kept() {
    // SAFETY: no other thread of this test reads the environment.
    unsafe { std::env::set_var("DEEPNVME_FAKE_DRIVER_CUFILE_COMPAT", "1") };
    let fake_driver = Loaded::exclusive();
    for _ in 0..3 {
        let reason = CuFile::open().unwrap_err().to_string();
        assert!(reason.starts_with("cuFile is in compatibility mode: the kernel has neither"), "{reason}");
        assert_eq!(fake_driver.calls("cuFileDriverOpen"), 2, "once without copies, and once to learn why it fails");
        fake_driver.assert_released();
    }
}
