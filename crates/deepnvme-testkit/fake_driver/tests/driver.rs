//! Initialisation, devices, contexts, memory and pointers.

mod common;

use std::ffi::{CStr, c_void};
use std::ptr::null;

use common::codes::cuda;
use common::{FakeDriver, at, in_child, made, signal_of};

#[test]
fn nothing_works_before_init_and_little_without_a_context() {
    let fake_driver = FakeDriver::load();
    let mut count = 0;
    assert_eq!((fake_driver.cuDeviceGetCount)(&mut count), cuda::NOT_INITIALIZED);
    assert_eq!((fake_driver.cuInit)(1), cuda::INVALID_VALUE);
    assert_eq!(made(|out| (fake_driver.cuDriverGetVersion)(out)), 13000);
    assert_eq!((fake_driver.cuInit)(0), 0);
    assert_eq!(made(|out| (fake_driver.cuDeviceGetCount)(out)), 2);
    assert_eq!((fake_driver.cuMemAlloc_v2)(&mut 0, 100), cuda::INVALID_CONTEXT);
    assert_eq!((fake_driver.cuStreamSynchronize)(0), cuda::INVALID_CONTEXT);
    assert_eq!((fake_driver.cuCtxPopCurrent_v2)(&mut 0), cuda::INVALID_CONTEXT);
    let first = fake_driver.enter(0);
    assert_eq!(made(|out| (fake_driver.cuCtxGetCurrent)(out)), first);
    let second = made(|out| (fake_driver.cuDevicePrimaryCtxRetain)(out, 1));
    assert_eq!((fake_driver.cuCtxPushCurrent_v2)(second), 0);
    assert_eq!(made(|out: &mut i32| (fake_driver.cuCtxGetDevice)(out)), 1);
    assert_eq!(made(|out| (fake_driver.cuCtxPopCurrent_v2)(out)), second);
    assert_eq!(made(|out: &mut i32| (fake_driver.cuCtxGetDevice)(out)), 0);
    std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!((fake_driver.cuCtxGetDevice)(&mut 0), cuda::INVALID_CONTEXT));
    });
    assert_eq!((fake_driver.cuDevicePrimaryCtxRetain)(&mut 0, 2), cuda::INVALID_DEVICE);
}

#[test]
fn a_context_lives_from_the_first_retain_to_the_last_release() {
    let fake_driver = FakeDriver::with_context();
    let context = fake_driver.enter(0);
    assert_eq!(fake_driver.live("contexts"), 1);
    assert_eq!((fake_driver.cuDevicePrimaryCtxRelease_v2)(0), 0);
    let (mut flags, mut active) = (0, 0);
    assert_eq!((fake_driver.cuDevicePrimaryCtxGetState)(0, &mut flags, &mut active), 0);
    assert_eq!((active, fake_driver.live("contexts")), (1, 1));
    let (stream, memory) = (fake_driver.stream(0), fake_driver.alloc(100));
    assert_eq!((fake_driver.cuDevicePrimaryCtxRelease_v2)(0), 0);
    assert_eq!((fake_driver.cuDevicePrimaryCtxRelease_v2)(0), cuda::INVALID_CONTEXT);
    assert_eq!((fake_driver.cuMemFree_v2)(memory), cuda::CONTEXT_IS_DESTROYED);
    assert_eq!((fake_driver.cuCtxPushCurrent_v2)(context), cuda::CONTEXT_IS_DESTROYED);
    assert_eq!(fake_driver.count("objects_left_at_release"), 2);
    assert_ne!(fake_driver.enter(0), context);
    assert_eq!(((fake_driver.cuMemFree_v2)(memory), (fake_driver.cuStreamQuery)(stream)), (1, cuda::INVALID_HANDLE));
    assert_eq!(fake_driver.violations(), "");
}

#[test]
fn devices_describe_themselves() {
    let fake_driver = FakeDriver::with_context();
    let attribute = |id, device| made(|out| (fake_driver.cuDeviceGetAttribute)(out, id, device));
    assert_eq!([33, 34, 50].map(|id| attribute(id, 1)), [0x11, 0, 0]);
    assert_eq!((attribute(75, 0), attribute(76, 0), attribute(41, 0)), (9, 0, 1));
    assert_eq!((fake_driver.cuDeviceGetAttribute)(&mut 0, 9999, 0), cuda::INVALID_VALUE);
    let mut name = [0xff_u8; 32];
    assert_eq!((fake_driver.cuDeviceGetPCIBusId)(name.as_mut_ptr(), 12, 1), cuda::INVALID_VALUE);
    assert_eq!((fake_driver.cuDeviceGetPCIBusId)(name.as_mut_ptr(), 13, 1), 0);
    assert_eq!(CStr::from_bytes_until_nul(&name).unwrap(), c"0000:11:00.0");
    assert_eq!((fake_driver.cuDeviceGetName)(name.as_mut_ptr(), 9, 1), 0);
    assert_eq!(CStr::from_bytes_until_nul(&name).unwrap(), c"Fake GPU");
    let uuids = [0, 1].map(|device| made(|out| (fake_driver.cuDeviceGetUuid)(out, device)));
    assert_ne!(uuids[0], uuids[1]);
    let mut text = std::ptr::null();
    assert_eq!((fake_driver.cuGetErrorName)(cuda::HOST_MEMORY_ALREADY_REGISTERED, &mut text), 0);
    // SAFETY: the function has answered with a string of the library's.
    assert_eq!(unsafe { CStr::from_ptr(text) }, c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED");
    assert_eq!((fake_driver.cuGetErrorString)(12345, &mut text), cuda::INVALID_VALUE);
}

#[test]
fn memory_is_counted_bounded_and_traps() {
    let fake_driver = FakeDriver::with_context();
    let (free, mut total) = (|| made(|out| (fake_driver.cuMemGetInfo_v2)(out, &mut 0)), 0_usize);
    let before: usize = free();
    let memory = fake_driver.alloc(5000);
    assert_eq!((fake_driver.cuMemGetInfo_v2)(&mut 0, &mut total), 0);
    assert_eq!((before - free(), before), (5000, total));
    assert_eq!((fake_driver.cuMemAlloc_v2)(&mut 0, total), cuda::OUT_OF_MEMORY);
    assert_eq!((fake_driver.cuMemAlloc_v2)(&mut 0, 0), cuda::INVALID_VALUE);
    assert!(fake_driver.peek(memory, 5000).iter().any(|byte| *byte != 0), "fresh memory is no zeros");
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let line = maps.lines().find(|line| line.starts_with(&format!("{memory:x}-"))).unwrap();
    assert!(line.contains(" ---s "), "{line}");
    assert_eq!((fake_driver.live("device_allocations"), fake_driver.live("device_bytes")), (1, 5000));
    assert_eq!((fake_driver.cuMemFree_v2)(memory + 1), cuda::INVALID_VALUE);
    assert_eq!(((fake_driver.cuMemFree_v2)(memory), (fake_driver.cuMemFree_v2)(memory)), (0, 1));
    assert_eq!((fake_driver.cuMemFree_v2)(0), 0);
    assert_ne!(fake_driver.alloc(5000), memory);
}

#[test]
fn the_host_cannot_touch_device_memory() {
    let status = in_child("child_touches_device_memory", &[]);
    assert!(matches!(signal_of(status), Some(libc::SIGSEGV | libc::SIGBUS)), "{status:?}");
}

#[test]
#[ignore = "run by the_host_cannot_touch_device_memory, in a process of its own"]
fn child_touches_device_memory() {
    let memory = FakeDriver::with_context().alloc(100);
    // SAFETY: none; this is to end the process.
    let _ = unsafe { std::ptr::with_exposed_provenance::<u8>(memory as usize).read_volatile() };
}

#[test]
fn registrations_do_not_overlap_and_end_where_they_began() {
    let fake_driver = FakeDriver::with_context();
    let mut memory = vec![0; 100_000];
    let start = at(&mut memory);
    assert_eq!((fake_driver.cuMemHostRegister_v2)(start, 50_000, 0), 0);
    assert_eq!((fake_driver.cuMemHostRegister_v2)(start + 49_999, 50_000, 0), cuda::HOST_MEMORY_ALREADY_REGISTERED);
    assert_eq!((fake_driver.live("registrations"), fake_driver.live("registered_bytes")), (1, 50_000));
    assert_eq!((fake_driver.cuMemHostUnregister)(start + 1), cuda::HOST_MEMORY_NOT_REGISTERED);
    assert_eq!((fake_driver.cuMemFreeHost)(start), cuda::INVALID_VALUE);
    assert_eq!(
        ((fake_driver.cuMemHostUnregister)(start), (fake_driver.cuMemHostUnregister)(start)),
        (0, cuda::HOST_MEMORY_NOT_REGISTERED)
    );
    assert_eq!((fake_driver.cuMemHostRegister_v2)(start, 0, 0), cuda::INVALID_VALUE);
    assert_eq!((fake_driver.cuMemHostRegister_v2)(0, 10, 0), cuda::INVALID_VALUE);
    let allocated = at(fake_driver.pinned(1000));
    assert_eq!((fake_driver.cuMemHostUnregister)(allocated), cuda::HOST_MEMORY_NOT_REGISTERED);
    assert_eq!((fake_driver.live("host_allocations"), (fake_driver.cuMemFreeHost)(allocated)), (1, 0));
    assert_eq!(fake_driver.violations(), "");
}

#[test]
fn pointers_have_attributes() {
    let fake_driver = FakeDriver::with_context();
    let context = fake_driver.enter(1);
    let memory = fake_driver.alloc(1000);
    let ask = |attribute, address| {
        let mut answer = 0_u64;
        let out: *mut c_void = (&raw mut answer).cast();
        ((fake_driver.cuPointerGetAttribute)(out, attribute, address), answer)
    };
    assert_eq!([2, 9, 1, 11, 12].map(|attribute| ask(attribute, memory + 999).1), [2, 1, context, memory, 1000]);
    assert_eq!(ask(2, memory + 1000).0, 1);
    let mut base = 0;
    let mut bytes = 0;
    assert_eq!((fake_driver.cuMemGetRegistrableRange_v2)(&mut base, &mut bytes, memory + 10), 0);
    assert_eq!((base, bytes), (memory, 1000));
    assert_eq!((fake_driver.cuMemGetRegistrableRange_v2)(&mut base, &mut bytes, memory + 1000), 500);
    let host = at(fake_driver.pinned(10)) as u64;
    assert_eq!(ask(2, host), (0, 1));
    let (mut kind, mut device) = (7_u32, 7_i32);
    let out: [*mut c_void; 2] = [(&raw mut kind).cast(), (&raw mut device).cast()];
    assert_eq!((fake_driver.cuPointerGetAttributes)(2, [2, 9].as_ptr(), out.as_ptr(), 64), 0);
    assert_eq!((kind, device), (0, -2), "an unknown attribute is not an error of cuPointerGetAttributes");
}

#[test]
fn a_fork_has_no_driver() {
    let fake_driver = FakeDriver::with_context();
    // SAFETY: the child calls functions that return before they take a lock, and ends at once.
    let status = unsafe {
        let child = libc::fork();
        if child == 0 {
            let named = (fake_driver.cuGetErrorName)(3, &mut null());
            libc::_exit(100 + (fake_driver.cuInit)(0) * 10 + (fake_driver.cuStreamSynchronize)(0) + named);
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
        status
    };
    assert_eq!(libc::WEXITSTATUS(status), 133);
}
