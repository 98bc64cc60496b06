//! The fake driver reports violations even if they cause no harm, and none for valid programs.

mod common;

use std::ffi::c_void;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use common::codes::cuda;
use common::{FakeDriver, NON_BLOCKING, SLOW_US, at, count_up};

const BYTES: usize = 4096;

/// Asserts that there is one violation, whose text contains `text`, and clears it.
fn assert_one_violation(fake_driver: &FakeDriver, text: &str) {
    let violations = fake_driver.violations();
    assert_eq!(violations.lines().count(), 1, "{violations}");
    assert!(violations.contains(text), "{violations}");
    assert_eq!(fake_driver.count("violations"), 1);
    (fake_driver.fake_driver_clear)();
}

#[test]
fn memory_in_use_must_not_be_freed() {
    let fake_driver = FakeDriver::with_context();
    let stream = fake_driver.stream(0);
    let pinned = at(fake_driver.pinned(BYTES));
    let mut own = vec![0; BYTES];
    let registered = at(&mut own);
    assert_eq!((fake_driver.cuMemHostRegister_v2)(registered, BYTES, 0), 0);
    for (target, end) in [(pinned, fake_driver.cuMemFreeHost), (registered, fake_driver.cuMemHostUnregister)] {
        let memory = fake_driver.alloc(BYTES);
        assert_eq!((fake_driver.fake_driver_fill_kernel)(stream, memory, BYTES, 1, SLOW_US), 0);
        assert_eq!((fake_driver.cuMemcpyDtoHAsync_v2)(target, memory, BYTES, stream), 0);
        assert_eq!(end(target), 0);
        assert_one_violation(&fake_driver, "that is not over");
        assert_eq!((fake_driver.cuStreamSynchronize)(stream), 0);
        assert_eq!((fake_driver.cuMemFree_v2)(memory), 0);
        assert_eq!(fake_driver.violations(), "");
    }
    let memory = fake_driver.alloc(BYTES);
    assert_eq!((fake_driver.fake_driver_fill_kernel)(stream, memory, BYTES, 1, SLOW_US), 0);
    assert_eq!((fake_driver.cuMemFree_v2)(memory), 0);
    assert_one_violation(&fake_driver, "cuMemFree");
}

#[test]
fn work_that_has_ended_must_be_waited_for_all_the_same() {
    let fake_driver = FakeDriver::with_context();
    let (stream, event) = (fake_driver.stream(0), fake_driver.event());
    for waits in [false, true] {
        let memory = fake_driver.alloc(BYTES);
        assert_eq!((fake_driver.cuMemsetD8Async)(memory, 1, BYTES, stream), 0);
        assert_eq!((fake_driver.cuEventRecord)(event, stream), 0);
        while fake_driver.peek(memory, 1) != [1] || (waits && (fake_driver.cuEventQuery)(event) != 0) {
            std::thread::yield_now();
        }
        // The bytes are visible a moment before the work is complete.
        std::thread::sleep(std::time::Duration::from_micros(SLOW_US));
        assert_eq!((fake_driver.cuMemFree_v2)(memory), 0);
        if waits {
            assert_eq!(fake_driver.violations(), "");
        } else {
            assert_one_violation(&fake_driver, "that nobody has waited for");
        }
    }
}

#[test]
fn unordered_streams_race_and_ordered_ones_do_not() {
    let fake_driver = FakeDriver::with_context();
    let (first, second) = (fake_driver.stream(NON_BLOCKING), fake_driver.stream(NON_BLOCKING));
    let memory = fake_driver.alloc(2 * BYTES);
    let set = |stream, from: u64| assert_eq!((fake_driver.cuMemsetD8Async)(memory + from, 1, BYTES, stream), 0);
    set(first, 0);
    set(second, BYTES as u64);
    assert_eq!(fake_driver.violations(), "", "the ranges share no byte");
    set(second, BYTES as u64 - 1);
    assert_one_violation(&fake_driver, "race: cuMemsetD8Async");
    let event = fake_driver.event();
    assert_eq!((fake_driver.cuEventRecord)(event, second), 0);
    assert_eq!((fake_driver.cuStreamWaitEvent)(first, event, 0), 0);
    set(first, BYTES as u64);
    assert_eq!(fake_driver.violations(), "", "the event orders them");
    assert_eq!((fake_driver.cuStreamSynchronize)(first), 0);
    set(second, BYTES as u64);
    assert_eq!(fake_driver.violations(), "", "the host has waited");
    assert_eq!((fake_driver.cuStreamDestroy_v2)(second), 0);
    set(first, BYTES as u64);
    assert_one_violation(&fake_driver, "race");
}

#[test]
fn blocking_streams_are_ordered_by_the_legacy_one() {
    let fake_driver = FakeDriver::with_context();
    let (blocking, other) = (fake_driver.stream(0), fake_driver.stream(0));
    let memory = fake_driver.alloc(BYTES);
    let set = |stream| assert_eq!((fake_driver.cuMemsetD8Async)(memory, 1, BYTES, stream), 0);
    set(blocking);
    set(0);
    set(other);
    assert_eq!(fake_driver.violations(), "");
    set(blocking);
    assert_one_violation(&fake_driver, "race");
}

static FAKE_DRIVER: OnceLock<FakeDriver> = OnceLock::new();

extern "C" fn calls_back(code: *mut c_void) {
    let Some(fake_driver) = FAKE_DRIVER.get() else { return };
    // SAFETY: the test hands over a number that outlives its wait for the stream.
    unsafe { *code.cast::<i32>() = (fake_driver.cuStreamQuery)(0) };
}

#[test]
fn host_functions_must_not_call_the_driver() {
    let fake_driver = FAKE_DRIVER.get_or_init(FakeDriver::with_context);
    let stream = fake_driver.stream(0);
    let mut code = 0;
    assert_eq!((fake_driver.cuLaunchHostFunc)(stream, calls_back, (&raw mut code).cast()), 0);
    assert_eq!((fake_driver.cuStreamSynchronize)(stream), 0);
    assert_eq!(code, cuda::NOT_PERMITTED);
    assert_one_violation(fake_driver, "callback: a host function called cuStreamQuery");
}

#[test]
fn a_host_function_counts_as_a_wait_for_the_work_before_it() {
    let fake_driver = FakeDriver::with_context();
    let (stream, memory) = (fake_driver.stream(0), fake_driver.alloc(BYTES));
    let counter = AtomicU32::new(0);
    assert_eq!((fake_driver.cuMemsetD8Async)(memory, 1, BYTES, stream), 0);
    assert_eq!((fake_driver.cuLaunchHostFunc)(stream, count_up, (&raw const counter).cast_mut().cast()), 0);
    while counter.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    assert_eq!((fake_driver.cuMemFree_v2)(memory), 0);
    assert_eq!(fake_driver.violations(), "");
}

#[test]
fn a_context_must_not_be_released_with_work_in_it() {
    let fake_driver = FakeDriver::with_context();
    let stream = fake_driver.stream(0);
    assert_eq!((fake_driver.fake_driver_fill_kernel)(stream, fake_driver.alloc(8), 8, 1, SLOW_US), 0);
    assert_eq!((fake_driver.cuDevicePrimaryCtxRelease_v2)(0), 0);
    assert_one_violation(&fake_driver, "released with work left");
}
