//! A batch whose completion cuFile never reports: its memory is leaked. This is a separate binary, since other tests of
//! the fake driver check for leaks.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail like tests")]

#[path = "gpu/fake_driver.rs"]
mod fake_driver;
#[path = "gpu/files.rs"]
mod files;

use deepnvme_io::{Config, DirectMode, Engine, WriteOptions};
use fake_driver::Gpu;
use files::{config, folder, open};

#[test]
fn a_batch_that_is_never_reported_fails_its_request_and_keeps_its_memory() {
    let (gpu, folder) = (Gpu::leaky(), folder());
    let engine = Engine::new(Config { workers: 1, queue_depth: 32, ..config(DirectMode::Required) }).unwrap();
    let file = open(&folder.path().join("file"), DirectMode::Required);
    let memory = gpu.memory(0, 8 << 20, 3);
    let before = gpu.live("device_allocations");
    gpu.fail_always("cuFileBatchIOGetStatus", 5041);
    let error = engine.write(&file, 0, memory.region(), WriteOptions::default()).unwrap().wait().1.unwrap_err();
    assert!(error.to_string().contains("5041"), "{error}");
    drop((engine, file, memory));
    assert_eq!(gpu.live("device_allocations"), before, "nobody knows that it is no longer used");
    assert_eq!(gpu.violations(), "");
}
