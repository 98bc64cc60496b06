//! A cuFile that is too old to refuse files that it copies through the host, and to count its transfers. A binary of its own,
//! since a process loads one cuFile.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail like tests")]

#[path = "gpu/fake_driver.rs"]
mod fake_driver;
#[path = "gpu/files.rs"]
mod files;

use deepnvme_io::{DirectMode, Engine};
use fake_driver::{Gpu, pattern};
use files::{config, folder, on_host, open, write};

#[test]
fn the_rules_of_file_systems_decide() {
    let folder = folder();
    let library = deepnvme_fake_driver::old_copy(folder.path()).unwrap();
    // SAFETY: no other thread of this test reads the environment.
    unsafe { std::env::set_var("DEEPNVME_FAKE_DRIVER", library) };
    let gpu = Gpu::new();
    let engine = Engine::new(config(DirectMode::Preferred)).unwrap();
    let file = open(&folder.path().join("file"), DirectMode::Required);
    gpu.fail_always("cuFileHandleRegister@unsupported", 1);
    write(&engine, &file, 0, gpu.memory(0, 3 << 20, 2).region());
    assert!(on_host(&engine, &file, 0, 3 << 20) == pattern(2, 3 << 20));
    assert_eq!(gpu.calls("cuFileDriverOpen"), 1);
    if !files::may_be_on_nvme(folder.path()) {
        let stats = engine.stats();
        assert_eq!((stats.bytes_gds, gpu.calls("cuFileHandleRegister")), (0, 0));
        let reason = stats.gds_reason.unwrap();
        assert!(files::is_unsuitable_disk_reason(&reason), "{reason}");
    }
}
