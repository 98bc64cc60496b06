//! Files that cuFile would copy through the host (its compatibility mode, file by file): their bytes are never counted as
//! direct, and take bounce buffers.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail like tests")]

#[path = "gpu/fake_driver.rs"]
mod fake_driver;
#[path = "gpu/files.rs"]
mod files;

use std::ffi::c_int;

use deepnvme_io::{DirectMode, Engine, ErrorKind, WriteOptions};
use fake_driver::{Gpu, GpuMemory, pattern};
use files::{config, folder, on_host, open, read, write};

const BYTES: usize = 3 << 20;

/// `CUfileError_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Status(c_int, c_int);

/// Another library of the process, which has opened cuFile and allows compatibility mode.
struct OtherUser<'a>(&'a Gpu);

impl<'a> OtherUser<'a> {
    fn new(gpu: &'a Gpu) -> Self {
        let user = Self(gpu);
        user.call("cuFileDriverOpen");
        user
    }

    fn call(&self, symbol: &str) {
        // SAFETY: the functions have this type.
        let status = unsafe { self.0.function::<unsafe extern "C" fn() -> Status>(symbol)() };
        assert_eq!(status, Status(0, 0), "{symbol}");
    }

    fn level(&self) -> c_int {
        let mut level = -1;
        type Get = unsafe extern "C" fn(*mut c_int) -> Status;
        // SAFETY: the function has this type, and the pointer is to a local number.
        let status = unsafe { self.0.function::<Get>("cuFileGetStatsLevel")(&raw mut level) };
        assert_eq!(status, Status(0, 0));
        level
    }
}

impl Drop for OtherUser<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.call("cuFileDriverClose");
        }
    }
}

/// Writes a file and reads it back with the GPU; returns the memory that was read.
fn write_and_read(gpu: &Gpu, engine: &Engine, path: &std::path::Path) -> GpuMemory {
    let file = open(path, DirectMode::Required);
    write(engine, &file, 0, gpu.memory(0, BYTES, 2).region());
    assert!(on_host(engine, &file, 0, BYTES) == pattern(2, BYTES), "{path:?}");
    let target = gpu.memory(1, BYTES, 3);
    read(engine, &file, 0, target.region_mut());
    assert!(gpu.peek(&target) == pattern(2, BYTES), "{path:?}");
    target
}

/// An engine with a library that allows copies, on a file system where cuFile copies.
fn where_cufile_copies(gpu: &Gpu) -> (OtherUser<'_>, Engine) {
    let other = OtherUser::new(gpu);
    gpu.fail_always("cuFileHandleRegister@unsupported", 1);
    (other, Engine::new(config(DirectMode::Preferred)).unwrap())
}

#[test]
fn a_file_that_cufile_would_copy_is_refused_and_bounced() {
    let (gpu, folder) = (Gpu::new(), folder());
    let engine = Engine::new(config(DirectMode::Preferred)).unwrap();
    gpu.fail("cuFileHandleRegister@unsupported", 0, 1);
    write_and_read(&gpu, &engine, &folder.path().join("copied"));
    let stats = engine.stats();
    assert_eq!((stats.bytes_gds, stats.bytes_to_gpu), (0, BYTES as u64));
    let reason = stats.gds_reason.unwrap();
    assert!(reason.contains("not supported by this file or its file system (5008)"), "{reason}");
    // Other files are direct.
    write_and_read(&gpu, &engine, &folder.path().join("direct"));
    assert_eq!(engine.stats().bytes_gds, 2 * BYTES as u64);
    assert_eq!(gpu.calls("cuFileSetStatsLevel"), 0, "there was nothing to try");

    let strict = Engine::new(config(DirectMode::Required)).unwrap();
    gpu.fail("cuFileHandleRegister@unsupported", 0, 1);
    let file = open(&folder.path().join("strict"), DirectMode::Required);
    let memory = gpu.memory(0, BYTES, 2);
    let error = strict.write(&file, 0, memory.region(), WriteOptions::default()).unwrap().wait().1.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("(5008)"), "{error}");
}

#[test]
fn where_another_library_allows_copies_the_first_transfer_shows_them() {
    let (gpu, folder) = (Gpu::new(), folder());
    let (other, engine) = where_cufile_copies(&gpu);
    write_and_read(&gpu, &engine, &folder.path().join("copied"));
    let stats = engine.stats();
    assert_eq!((stats.bytes_gds, stats.bytes_gds_pinned, stats.bytes_to_gpu), (0, 0, BYTES as u64));
    let reason = stats.gds_reason.unwrap();
    assert!(reason.contains("cuFile copies through host memory") && reason.contains("1 by POSIX"), "{reason}");
    assert_eq!((other.level(), gpu.calls("cuFileStatsStart"), gpu.calls("cuFileStatsStop")), (0, 1, 1));
    // The file system is known now.
    let registered = gpu.calls("cuFileHandleRegister");
    write_and_read(&gpu, &engine, &folder.path().join("another"));
    assert_eq!((gpu.calls("cuFileHandleRegister"), engine.stats().bytes_gds), (registered, 0));
    drop(engine);

    let strict = Engine::new(config(DirectMode::Required)).unwrap();
    let file = open(&folder.path().join("strict"), DirectMode::Required);
    let memory = gpu.memory(0, BYTES, 2);
    let error = strict.write(&file, 0, memory.region(), WriteOptions::default()).unwrap().wait().1.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("cuFile copies through host memory"), "{error}");
    drop((strict, file, other));
}

#[test]
fn where_another_library_allows_copies_direct_files_stay_direct() {
    let (gpu, folder) = (Gpu::new(), folder());
    let other = OtherUser::new(&gpu);
    let engine = Engine::new(config(DirectMode::Required)).unwrap();
    for name in ["one", "two"] {
        write_and_read(&gpu, &engine, &folder.path().join(name));
    }
    assert_eq!(engine.stats().bytes_gds, 4 * BYTES as u64);
    assert_eq!(gpu.calls("cuFileStatsStart"), 2, "one trial for each direction");
    assert_eq!(other.level(), 0);
    drop((engine, other));
}

#[test]
fn without_readable_statistics_the_rules_of_file_systems_decide() {
    let (gpu, folder) = (Gpu::new(), folder());
    let (other, engine) = where_cufile_copies(&gpu);
    gpu.fail_always("cuFileGetStatsL3", 5030);
    write_and_read(&gpu, &engine, &folder.path().join("file"));
    if !files::may_be_on_nvme(folder.path()) {
        let stats = engine.stats();
        assert_eq!(stats.bytes_gds, 0);
        let reason = stats.gds_reason.unwrap();
        assert!(files::is_unsuitable_disk_reason(&reason), "{reason}");
    }
    drop((engine, other));
}
