//! Pinned memory and the CUDA driver: it learns of the memory with the first use of a GPU, and forgets it in time.
#![cfg(not(any(loom, simulated)))]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::ffi::c_int;
use std::sync::Arc;

use deepnvme_fake_driver::Loaded;
use deepnvme_io::{
    Access, Config, DirectMode, Engine, OpenOptions, TensorFile, WriteOptions, register_waiting, register_with_driver,
};
use deepnvme_mem::{Arena, Buffer, Device, Region, RegionMut};

type Retain = unsafe extern "C" fn(*mut u64, c_int) -> c_int;
type Release = unsafe extern "C" fn(c_int) -> c_int;
type SetCurrent = unsafe extern "C" fn(u64) -> c_int;
type Alloc = unsafe extern "C" fn(*mut u64, usize) -> c_int;
type Free = unsafe extern "C" fn(u64) -> c_int;

fn pinned(bytes: usize) -> RegionMut {
    register_with_driver(Buffer::zeroed(bytes).unwrap().into_region())
}

/// One test, since the contexts belong to the process.
#[test]
fn the_driver_knows_memory_from_the_first_use_of_a_gpu_until_it_is_freed() {
    let driver = Loaded::exclusive();
    // SAFETY: the functions have these types.
    let (retain, release, set_current, alloc, free) = unsafe {
        (
            driver.function::<Retain>("cuDevicePrimaryCtxRetain"),
            driver.function::<Release>("cuDevicePrimaryCtxRelease_v2"),
            driver.function::<SetCurrent>("cuCtxSetCurrent"),
            driver.function::<Alloc>("cuMemAlloc_v2"),
            driver.function::<Free>("cuMemFree_v2"),
        )
    };
    // No GPU is in use: no context is created for the memory.
    let early = pinned(10_000);
    let freed = pinned(10_000);
    assert_eq!((driver.live("registrations"), driver.live("contexts")), (0, 0));
    drop(freed);

    // The engine's first transfer of a GPU tells the driver.
    let (mut context, mut at) = (0, 0);
    // SAFETY: the pointers are to local values, and the context stays until the end.
    unsafe {
        assert_eq!(retain(&raw mut context, 1), 0);
        assert_eq!(set_current(context), 0);
        assert_eq!(alloc(&raw mut at, 5000), 0);
    }
    driver.poke(at, &[7; 5000]);
    let folder = tempfile::tempdir().unwrap();
    let options = OpenOptions { access: Access::ReadWrite, create: true, direct: DirectMode::Preferred };
    let file = TensorFile::open(&folder.path().join("file"), options).unwrap();
    let engine = Engine::new(Config { workers: 1, ..Config::default() }).unwrap();
    let start = std::ptr::without_provenance_mut(at as usize);
    // SAFETY: it is memory of that device, freed below.
    let memory = unsafe { Region::from_raw(start, 5000, Device::Cuda { index: 1 }, Arc::new(())) };
    engine.write(&file, 0, memory, WriteOptions::default()).unwrap().wait().1.unwrap();
    drop(engine);
    assert_eq!(driver.live("registrations"), 1, "the early memory; the engine has ended");

    // Now memory is known at once, also an arena, and until its last region is gone.
    let late = pinned(10_000);
    let arena = Arena::new(20_000, false).unwrap().with_owner(register_with_driver);
    assert_eq!((driver.live("registrations"), driver.live("registered_bytes")), (3, 40_000));
    let (part, clone) = (arena.region_mut(100..200), late.region());
    drop((arena, late));
    assert_eq!(driver.live("registrations"), 3);
    drop(part);
    assert_eq!(driver.live("registrations"), 2);
    drop(clone);
    assert_eq!(driver.live("registrations"), 1);

    // A refusal is no error, and is not asked for again.
    driver.fail("cuMemHostRegister_v2", 0, 2);
    let refused = pinned(10_000);
    refused.copy_from_slice(0, &[1; 10_000]);
    let calls = driver.calls("cuMemHostRegister_v2");
    let empty = pinned(0);
    let last = pinned(1);
    assert_eq!(driver.calls("cuMemHostRegister_v2"), calls + 1, "the last one only");
    assert_eq!(driver.live("registrations"), 2);
    drop((refused, early, empty, last));
    // SAFETY: it was allocated and retained above.
    unsafe {
        assert_eq!(free(at), 0);
        assert_eq!(release(1), 0);
    }
    driver.assert_released();
    assert_eq!(driver.live("contexts"), 0);
}

/// Another library creates the context, and no engine opens the GPU.
#[test]
fn the_driver_is_told_of_waiting_memory_once_a_context_exists() {
    let driver = Loaded::exclusive();
    let early = pinned(10_000);
    register_waiting();
    assert_eq!((driver.live("registrations"), driver.live("contexts")), (0, 0));
    let mut context = 0;
    // SAFETY: the function has this type, and the pointer is to a local value.
    assert_eq!(unsafe { driver.function::<Retain>("cuDevicePrimaryCtxRetain")(&raw mut context, 0) }, 0);
    register_waiting();
    assert_eq!(driver.live("registrations"), 1);
    let calls = driver.calls("cuDevicePrimaryCtxGetState");
    register_waiting();
    assert_eq!(driver.calls("cuDevicePrimaryCtxGetState"), calls, "nothing waits");
    drop(early);
    // SAFETY: it was retained above.
    assert_eq!(unsafe { driver.function::<Release>("cuDevicePrimaryCtxRelease_v2")(0) }, 0);
    driver.assert_released();
}

/// Memory is made and freed while others make and free theirs.
#[test]
fn threads_do_not_register_memory_that_another_one_frees() {
    let driver = Loaded::exclusive();
    let mut context = 0;
    // SAFETY: the function has this type, and the pointer is to a local value.
    assert_eq!(unsafe { driver.function::<Retain>("cuDevicePrimaryCtxRetain")(&raw mut context, 0) }, 0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for round in 1..200 {
                    drop(pinned(round * 100));
                }
            });
        }
    });
    // SAFETY: it was retained above.
    assert_eq!(unsafe { driver.function::<Release>("cuDevicePrimaryCtxRelease_v2")(0) }, 0);
    driver.assert_released();
}
