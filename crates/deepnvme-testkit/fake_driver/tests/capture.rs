//! Stream capture prohibits what a real driver prohibits, in each mode and on each thread.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::codes::cuda;
use common::{FakeDriver, NON_BLOCKING, made, pattern};

/// Modes of a capture or a thread.
const GLOBAL: i32 = 0;
const THREAD_LOCAL: i32 = 1;
const RELAXED: i32 = 2;

/// The status of a capture.
const ACTIVE: i32 = 1;
const INVALIDATED: i32 = 2;

/// Queries an event on another thread, whose mode is `mode`. Returns the code.
fn query_elsewhere(fake_driver: &FakeDriver, event: u64, mode: i32) -> i32 {
    std::thread::scope(|scope| {
        let query = scope.spawn(|| {
            fake_driver.enter(0);
            let mut mode = mode;
            assert_eq!((fake_driver.cuThreadExchangeStreamCaptureMode)(&mut mode), 0);
            assert_eq!(mode, GLOBAL, "a new thread has the global mode");
            (fake_driver.cuEventQuery)(event)
        });
        query.join().unwrap()
    })
}

#[test]
fn a_capture_prohibits_calls_of_other_threads_only_in_global_mode() {
    let fake_driver = FakeDriver::with_context();
    let (stream, event) = (fake_driver.stream(NON_BLOCKING), fake_driver.event());
    for capture in [GLOBAL, THREAD_LOCAL, RELAXED] {
        for mode in [GLOBAL, THREAD_LOCAL, RELAXED] {
            assert_eq!((fake_driver.cuStreamBeginCapture_v2)(stream, capture), 0);
            assert_eq!(made(|out| (fake_driver.cuStreamIsCapturing)(stream, out)), ACTIVE);
            let is_prohibited = (capture, mode) == (GLOBAL, GLOBAL);
            let expected = if is_prohibited { cuda::STREAM_CAPTURE_UNSUPPORTED } else { 0 };
            assert_eq!(
                query_elsewhere(&fake_driver, event, mode),
                expected,
                "capture in mode {capture}, thread in mode {mode}"
            );
            let status = made(|out| (fake_driver.cuStreamIsCapturing)(stream, out));
            assert_eq!(status, if is_prohibited { INVALIDATED } else { ACTIVE });
            let mut graph = 7;
            let code = (fake_driver.cuStreamEndCapture)(stream, &mut graph);
            assert_eq!(code, if is_prohibited { cuda::STREAM_CAPTURE_INVALIDATED } else { 0 });
            assert_eq!(graph == 0, is_prohibited, "the graph is {graph}");
        }
    }
}

#[test]
fn a_thread_may_not_wait_during_its_own_capture_unless_it_is_relaxed() {
    let fake_driver = FakeDriver::with_context();
    let (stream, other) = (fake_driver.stream(NON_BLOCKING), fake_driver.stream(NON_BLOCKING));
    for (capture, mut mode) in [(THREAD_LOCAL, THREAD_LOCAL), (THREAD_LOCAL, RELAXED), (RELAXED, THREAD_LOCAL)] {
        let is_prohibited = (capture, mode) == (THREAD_LOCAL, THREAD_LOCAL);
        assert_eq!((fake_driver.cuThreadExchangeStreamCaptureMode)(&mut mode), 0);
        assert_eq!((fake_driver.cuStreamBeginCapture_v2)(stream, capture), 0);
        assert_eq!(
            (fake_driver.cuStreamSynchronize)(other),
            if is_prohibited { cuda::STREAM_CAPTURE_UNSUPPORTED } else { 0 }
        );
        (fake_driver.cuStreamEndCapture)(stream, &mut 0);
        assert_eq!((fake_driver.cuThreadExchangeStreamCaptureMode)(&mut mode), 0);
    }
}

#[test]
fn the_whole_context_cannot_be_waited_for_in_any_mode() {
    let fake_driver = FakeDriver::with_context();
    let stream = fake_driver.stream(NON_BLOCKING);
    let mut mode = RELAXED;
    assert_eq!((fake_driver.cuThreadExchangeStreamCaptureMode)(&mut mode), 0);
    assert_eq!((fake_driver.cuStreamBeginCapture_v2)(stream, RELAXED), 0);
    assert_eq!((fake_driver.cuCtxSynchronize)(), cuda::STREAM_CAPTURE_UNSUPPORTED);
    assert_eq!((fake_driver.cuStreamEndCapture)(stream, &mut 0), cuda::STREAM_CAPTURE_INVALIDATED);
}

#[test]
fn the_capturing_stream_itself_cannot_be_queried_in_any_mode_and_its_work_does_not_run() {
    let fake_driver = FakeDriver::with_context();
    let (stream, memory) = (fake_driver.stream(NON_BLOCKING), fake_driver.alloc_with(64, 3));
    let mut mode = RELAXED;
    assert_eq!((fake_driver.cuThreadExchangeStreamCaptureMode)(&mut mode), 0);
    assert_eq!((fake_driver.cuStreamBeginCapture_v2)(stream, RELAXED), 0);
    assert_eq!((fake_driver.cuMemsetD8Async)(memory, 2, 64, stream), 0);
    assert_eq!(fake_driver.count("captured_ops"), 1);
    assert_eq!((fake_driver.cuStreamQuery)(stream), cuda::STREAM_CAPTURE_UNSUPPORTED);
    assert_eq!((fake_driver.cuStreamEndCapture)(stream, &mut 0), cuda::STREAM_CAPTURE_INVALIDATED);
    assert_eq!((fake_driver.cuStreamSynchronize)(stream), 0);
    assert_eq!(fake_driver.peek(memory, 64), pattern(3, 64));
}

#[test]
fn the_default_stream_is_unusable_while_a_stream_that_waits_for_it_is_captured() {
    let fake_driver = FakeDriver::with_context();
    let (blocking, independent) = (fake_driver.stream(0), fake_driver.stream(NON_BLOCKING));
    for (stream, expected) in [(independent, 0), (blocking, cuda::STREAM_CAPTURE_IMPLICIT)] {
        assert_eq!((fake_driver.cuStreamBeginCapture_v2)(stream, RELAXED), 0);
        let mut status = 0;
        assert_eq!((fake_driver.cuStreamIsCapturing)(0, &mut status), expected);
        assert_eq!(
            made(|out| (fake_driver.cuStreamIsCapturing)(stream, out)),
            ACTIVE,
            "the query of the default stream ended the capture"
        );
        assert_eq!((fake_driver.cuEventRecord)(fake_driver.event(), 0), expected);
        let ended = if expected == 0 { 0 } else { cuda::STREAM_CAPTURE_INVALIDATED };
        assert_eq!((fake_driver.cuStreamEndCapture)(stream, &mut 0), ended);
    }
    assert_eq!((fake_driver.cuStreamBeginCapture_v2)(0, RELAXED), cuda::STREAM_CAPTURE_UNSUPPORTED);
}
