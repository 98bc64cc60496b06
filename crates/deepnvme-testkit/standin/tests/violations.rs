//! What no program may do is found, whether or not it went well; what is in order is not.

mod common;

use std::ffi::c_void;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use common::{NON_BLOCKING, SLOW_US, Standin, at, count_up, in_child};

const BYTES: usize = 4096;

/// Asserts that there is one violation that says `text`, and forgets it.
fn found(standin: &Standin, text: &str) {
    let violations = standin.violations();
    assert_eq!(violations.lines().count(), 1, "{violations}");
    assert!(violations.contains(text), "{violations}");
    assert_eq!(standin.count("violations"), 1);
    (standin.standin_clear)();
}

#[test]
fn memory_that_is_in_use_must_not_go() {
    let standin = Standin::with_context();
    let stream = standin.stream(0);
    let pinned = at(standin.pinned(BYTES));
    let mut own = vec![0; BYTES];
    let registered = at(&mut own);
    assert_eq!((standin.cuMemHostRegister_v2)(registered, BYTES, 0), 0);
    for (target, end) in [(pinned, standin.cuMemFreeHost), (registered, standin.cuMemHostUnregister)] {
        let memory = standin.alloc(BYTES);
        assert_eq!((standin.standin_fill_kernel)(stream, memory, BYTES, 1, SLOW_US), 0);
        assert_eq!((standin.cuMemcpyDtoHAsync_v2)(target, memory, BYTES, stream), 0);
        assert_eq!(end(target), 0);
        found(&standin, "that is not over");
        assert_eq!((standin.cuStreamSynchronize)(stream), 0);
        assert_eq!((standin.cuMemFree_v2)(memory), 0);
        assert_eq!(standin.violations(), "");
    }
    let memory = standin.alloc(BYTES);
    assert_eq!((standin.standin_fill_kernel)(stream, memory, BYTES, 1, SLOW_US), 0);
    assert_eq!((standin.cuMemFree_v2)(memory), 0);
    found(&standin, "cuMemFree");
}

#[test]
fn being_over_is_not_being_waited_for() {
    let standin = Standin::with_context();
    let (stream, event) = (standin.stream(0), standin.event());
    for waits in [false, true] {
        let memory = standin.alloc(BYTES);
        assert_eq!((standin.cuMemsetD8Async)(memory, 1, BYTES, stream), 0);
        assert_eq!((standin.cuEventRecord)(event, stream), 0);
        while standin.peek(memory, 1) != [1] || (waits && (standin.cuEventQuery)(event) != 0) {
            std::thread::yield_now();
        }
        // What it wrote is there a moment before it is over.
        std::thread::sleep(std::time::Duration::from_micros(SLOW_US));
        assert_eq!((standin.cuMemFree_v2)(memory), 0);
        if waits {
            assert_eq!(standin.violations(), "");
        } else {
            found(&standin, "that nobody has waited for");
        }
    }
}

#[test]
fn unordered_streams_race_and_ordered_ones_do_not() {
    let standin = Standin::with_context();
    let (first, second) = (standin.stream(NON_BLOCKING), standin.stream(NON_BLOCKING));
    let memory = standin.alloc(2 * BYTES);
    let set = |stream, from: u64| assert_eq!((standin.cuMemsetD8Async)(memory + from, 1, BYTES, stream), 0);
    set(first, 0);
    set(second, BYTES as u64);
    assert_eq!(standin.violations(), "", "they have no byte in common");
    set(second, BYTES as u64 - 1);
    found(&standin, "race: cuMemsetD8Async");
    let event = standin.event();
    assert_eq!((standin.cuEventRecord)(event, second), 0);
    assert_eq!((standin.cuStreamWaitEvent)(first, event, 0), 0);
    set(first, BYTES as u64);
    assert_eq!(standin.violations(), "", "the event orders them");
    assert_eq!((standin.cuStreamSynchronize)(first), 0);
    set(second, BYTES as u64);
    assert_eq!(standin.violations(), "", "the host has waited");
    assert_eq!((standin.cuStreamDestroy_v2)(second), 0);
    set(first, BYTES as u64);
    found(&standin, "race");
}

#[test]
fn blocking_streams_are_ordered_by_the_legacy_one() {
    let standin = Standin::with_context();
    let (blocking, other) = (standin.stream(0), standin.stream(0));
    let memory = standin.alloc(BYTES);
    let set = |stream| assert_eq!((standin.cuMemsetD8Async)(memory, 1, BYTES, stream), 0);
    set(blocking);
    set(0);
    set(other);
    assert_eq!(standin.violations(), "");
    set(blocking);
    found(&standin, "race");
}

static STANDIN: OnceLock<Standin> = OnceLock::new();

extern "C" fn calls_back(code: *mut c_void) {
    let Some(standin) = STANDIN.get() else { return };
    // SAFETY: the test hands over a number that outlives its wait for the stream.
    unsafe { *code.cast::<i32>() = (standin.cuStreamQuery)(0) };
}

#[test]
fn host_functions_call_nothing() {
    let standin = STANDIN.get_or_init(Standin::with_context);
    let stream = standin.stream(0);
    let mut code = 0;
    assert_eq!((standin.cuLaunchHostFunc)(stream, calls_back, (&raw mut code).cast()), 0);
    assert_eq!((standin.cuStreamSynchronize)(stream), 0);
    assert_eq!(code, 800);
    found(standin, "callback: a host function called cuStreamQuery");
}

#[test]
fn a_host_function_has_waited_for_all_before_it() {
    let standin = Standin::with_context();
    let (stream, memory) = (standin.stream(0), standin.alloc(BYTES));
    let counter = AtomicU32::new(0);
    assert_eq!((standin.cuMemsetD8Async)(memory, 1, BYTES, stream), 0);
    assert_eq!((standin.cuLaunchHostFunc)(stream, count_up, (&raw const counter).cast_mut().cast()), 0);
    while counter.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    assert_eq!((standin.cuMemFree_v2)(memory), 0);
    assert_eq!(standin.violations(), "");
}

#[test]
fn a_context_is_released_without_work_in_it() {
    let standin = Standin::with_context();
    let stream = standin.stream(0);
    assert_eq!((standin.standin_fill_kernel)(stream, standin.alloc(8), 8, 1, SLOW_US), 0);
    assert_eq!((standin.cuDevicePrimaryCtxRelease_v2)(0), 0);
    found(&standin, "released with work left");
}

#[test]
fn faults_hit_the_call_that_they_name() {
    let standin = Standin::with_context();
    standin.fail("cuMemAlloc_v2", 1, 2);
    let codes = [0, 1, 2].map(|_| (standin.cuMemAlloc_v2)(&mut 0, 100));
    assert_eq!((codes, standin.calls("cuMemAlloc_v2")), ([0, 2, 0], 3));
    assert_eq!(standin.live("device_allocations"), 2);
    (standin.standin_fail_always)(common::c("cuStreamSynchronize").as_ptr(), 700);
    assert_eq!([0, 1].map(|_| (standin.cuStreamSynchronize)(0)), [700, 700]);
    (standin.standin_clear)();
    assert_eq!(((standin.cuStreamSynchronize)(0), standin.calls("cuMemAlloc_v2")), (0, 0));
    assert_eq!((standin.live("nonsense"), standin.count("nonsense"), standin.calls("nonsense")), (-1, 0, 0));
}

#[test]
fn the_environment_is_heard() {
    let environment = [
        ("DEEPNVME_STANDIN_DEVICES", "3"),
        ("DEEPNVME_STANDIN_MEMORY", "100000"),
        ("DEEPNVME_STANDIN_DELAY_US", "0"),
        ("DEEPNVME_STANDIN_CUFILE_COMPAT", "1"),
        ("DEEPNVME_STANDIN_FAIL", "cuEventCreate:1:2,cuMemHostAlloc:always:304"),
    ];
    assert!(in_child("child_hears_the_environment", &environment).success());
    assert!(!in_child("child_hears_the_environment", &[]).success());
    assert!(in_child("child_has_no_device", &[("DEEPNVME_STANDIN_DEVICES", "0")]).success());
}

#[test]
#[ignore = "run by the_environment_is_heard, in a process of its own"]
fn child_hears_the_environment() {
    let standin = Standin::with_context();
    let mut count = 0;
    assert_eq!(((standin.cuDeviceGetCount)(&mut count), count), (0, 3));
    assert_eq!((standin.cuMemAlloc_v2)(&mut 0, 100_001), 2);
    assert_eq!([0, 1, 2].map(|_| (standin.cuEventCreate)(&mut 0, 0)), [0, 2, 0]);
    assert_eq!([0, 1].map(|_| (standin.cuMemHostAlloc)(&mut 0, 10, 0)), [304, 304]);
    let mut properties = common::api::DriverProperties::default();
    assert_eq!((standin.cuFileDriverGetProperties)(&mut properties).err, 0);
    assert_eq!((properties.major, properties.status_flags, properties.control_flags), (0, 0, 2));
}

#[test]
#[ignore = "run by the_environment_is_heard, in a process of its own"]
fn child_has_no_device() {
    assert_eq!((Standin::load().cuInit)(0), 100);
}
