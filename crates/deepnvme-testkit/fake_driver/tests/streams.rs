//! Queued work runs late, in order within a stream, and after its dependencies.

mod common;

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use common::codes::cuda;
use common::{FakeDriver, NON_BLOCKING, SLOW_US, at, count_up, made, pattern, same};

const BYTES: usize = 10_000;

#[test]
fn copies_read_and_write_when_their_turn_comes() {
    let fake_driver = FakeDriver::with_context();
    let stream = fake_driver.stream(NON_BLOCKING);
    let (source, target) = (fake_driver.pinned(BYTES), fake_driver.pinned(BYTES));
    let memory = fake_driver.alloc(BYTES);
    let (from, to) = (at(source), at(target));
    source.fill(1);
    target.fill(2);
    assert_eq!((fake_driver.fake_driver_fill_kernel)(stream, memory, BYTES, 9, SLOW_US), 0);
    assert_eq!((fake_driver.cuMemcpyDtoHAsync_v2)(to, memory, BYTES, stream), 0);
    assert_eq!((fake_driver.cuMemcpyHtoDAsync_v2)(memory, from, BYTES, stream), 0);
    assert_eq!((fake_driver.cuStreamQuery)(stream), cuda::NOT_READY);
    assert!(target.iter().all(|byte| *byte == 2), "the copy ran before its turn");
    source.fill(3);
    assert_eq!((fake_driver.cuStreamSynchronize)(stream), 0);
    assert_eq!((fake_driver.cuStreamQuery)(stream), 0);
    same(target, &pattern(9, BYTES));
    // The copy takes the bytes that are there when it runs.
    same(&fake_driver.peek(memory, BYTES), &[3; BYTES]);
    assert_eq!((fake_driver.violations().as_str(), fake_driver.count("pageable_copies")), ("", 0));
}

#[test]
fn streams_run_independently_and_out_of_order() {
    let fake_driver = FakeDriver::with_context();
    let streams: Vec<u64> = (0..4).map(|_| fake_driver.stream(NON_BLOCKING)).collect();
    let memory: Vec<u64> = (0..4).map(|_| fake_driver.alloc(64)).collect();
    let (mut turns, mut overtaken) = (0, 0);
    while overtaken == 0 && turns < 200 {
        turns += 1;
        let events: Vec<u64> = streams.iter().map(|_| fake_driver.event()).collect();
        for ((stream, memory), event) in streams.iter().zip(&memory).zip(&events) {
            assert_eq!((fake_driver.cuMemsetD8Async)(*memory, 1, 64, *stream), 0);
            assert_eq!((fake_driver.cuEventRecord)(*event, *stream), 0);
        }
        assert_eq!((fake_driver.cuEventSynchronize)(events[3]), 0);
        overtaken += i32::from((fake_driver.cuEventQuery)(events[0]) == cuda::NOT_READY);
        streams.iter().for_each(|stream| assert_eq!((fake_driver.cuStreamSynchronize)(*stream), 0));
    }
    assert!(overtaken > 0, "the stream that got its work first always ended first");
}

#[test]
fn a_stream_waits_for_the_last_record_before_its_wait() {
    let fake_driver = FakeDriver::with_context();
    let (writer, reader) = (fake_driver.stream(NON_BLOCKING), fake_driver.stream(NON_BLOCKING));
    let (memory, event) = (fake_driver.alloc(BYTES), fake_driver.event());
    let target = fake_driver.pinned(BYTES);
    assert_eq!((fake_driver.cuEventQuery)(event), 0, "an event that was never recorded is complete");
    assert_eq!((fake_driver.cuStreamWaitEvent)(reader, event, 0), 0);
    assert_eq!((fake_driver.fake_driver_fill_kernel)(writer, memory, BYTES, 5, SLOW_US), 0);
    assert_eq!((fake_driver.cuEventRecord)(event, writer), 0);
    assert_eq!((fake_driver.cuEventQuery)(event), cuda::NOT_READY);
    assert_eq!((fake_driver.cuStreamWaitEvent)(reader, event, 0), 0);
    assert_eq!((fake_driver.fake_driver_fill_kernel)(writer, fake_driver.alloc(8), 8, 5, 20 * SLOW_US), 0);
    assert_eq!((fake_driver.cuEventRecord)(event, writer), 0, "the reader does not wait for this record");
    assert_eq!((fake_driver.cuMemcpyDtoHAsync_v2)(at(target), memory, BYTES, reader), 0);
    let before = Instant::now();
    assert_eq!((fake_driver.cuStreamSynchronize)(reader), 0);
    assert!(before.elapsed() < Duration::from_micros(15 * SLOW_US));
    same(target, &pattern(5, BYTES));
    assert_eq!((fake_driver.cuEventQuery)(event), cuda::NOT_READY);
    assert_eq!(fake_driver.violations(), "");
}

#[test]
fn the_legacy_stream_and_blocking_streams_wait_for_each_other() {
    let fake_driver = FakeDriver::with_context();
    let (blocking, other) = (fake_driver.stream(0), fake_driver.stream(NON_BLOCKING));
    let (memory, target) = (fake_driver.alloc(BYTES), fake_driver.pinned(BYTES));
    assert_eq!((fake_driver.fake_driver_fill_kernel)(blocking, memory, BYTES, 1, SLOW_US), 0);
    assert_eq!((fake_driver.cuMemcpyDtoHAsync_v2)(at(target), memory, BYTES, 0), 0);
    assert_eq!((fake_driver.cuStreamSynchronize)(1), 0);
    same(target, &pattern(1, BYTES));
    assert_eq!((fake_driver.fake_driver_fill_kernel)(1, memory, BYTES, 2, SLOW_US), 0);
    assert_eq!((fake_driver.cuMemcpyDtoHAsync_v2)(at(target), memory, BYTES, blocking), 0);
    assert_eq!((fake_driver.cuStreamSynchronize)(blocking), 0);
    same(target, &pattern(2, BYTES));
    assert_eq!((fake_driver.fake_driver_fill_kernel)(2, memory, BYTES, 3, SLOW_US), 0);
    assert_eq!((fake_driver.cuMemcpyDtoH_v2)(at(target), memory, BYTES), 0);
    // The synchronous copy has waited for the default stream of this thread.
    same(target, &pattern(3, BYTES));
    assert_eq!(fake_driver.violations(), "");
    let quick = fake_driver.alloc(8);
    assert_eq!((fake_driver.fake_driver_fill_kernel)(0, memory, BYTES, 4, 20 * SLOW_US), 0);
    let before = Instant::now();
    assert_eq!((fake_driver.cuMemsetD8Async)(quick, 1, 8, other), 0);
    assert_eq!((fake_driver.cuStreamSynchronize)(other), 0);
    assert!(
        before.elapsed() < Duration::from_micros(15 * SLOW_US),
        "a non-blocking stream waited for the default stream"
    );
}

#[test]
fn pageable_memory_is_copied_before_the_call_returns() {
    let fake_driver = FakeDriver::with_context();
    let stream = fake_driver.stream(0);
    let memory = fake_driver.alloc(BYTES);
    let mut target = vec![0; BYTES];
    assert_eq!((fake_driver.fake_driver_fill_kernel)(stream, memory, BYTES, 5, SLOW_US), 0);
    assert_eq!((fake_driver.cuMemcpyDtoHAsync_v2)(at(&mut target), memory, BYTES, stream), 0);
    same(&target, &pattern(5, BYTES));
    assert_eq!(fake_driver.count("pageable_copies"), 1);
    assert_eq!((fake_driver.cuMemHostRegister_v2)(at(&mut target), 5000, 0), 0);
    assert_eq!(
        (fake_driver.cuMemcpyDtoHAsync_v2)(at(&mut target), memory, BYTES, stream),
        cuda::INVALID_VALUE,
        "a copy to memory of which only half is registered is refused"
    );
    assert_eq!(
        (fake_driver.cuMemcpyHtoDAsync_v2)(memory + 1, at(&mut target), BYTES, stream),
        cuda::INVALID_VALUE,
        "a copy beyond the allocation is refused"
    );
    assert_eq!((fake_driver.cuMemcpyHtoD_v2)(memory, at(&mut target), 5000), 0);
}

#[test]
fn calls_refuse_handles_of_other_devices_and_destroyed_ones() {
    let fake_driver = FakeDriver::with_context();
    let (stream, event, memory) = (fake_driver.stream(0), fake_driver.event(), fake_driver.alloc(64));
    let counter = AtomicU32::new(0);
    assert_eq!((fake_driver.fake_driver_fill_kernel)(stream, memory, 64, 5, SLOW_US), 0);
    assert_eq!((fake_driver.cuLaunchHostFunc)(stream, count_up, (&raw const counter).cast_mut().cast()), 0);
    fake_driver.enter(1);
    assert_eq!((fake_driver.cuMemsetD8Async)(memory, 0, 64, stream), cuda::INVALID_HANDLE);
    assert_eq!((fake_driver.cuEventRecord)(event, 0), cuda::INVALID_HANDLE, "an event belongs to one device");
    assert_eq!(made(|out| (fake_driver.cuStreamGetCtx)(stream, out)), fake_driver.enter(0));
    assert_eq!((fake_driver.cuStreamDestroy_v2)(stream), 0);
    assert_eq!(
        ((fake_driver.cuStreamDestroy_v2)(stream), (fake_driver.cuStreamQuery)(stream)),
        (cuda::INVALID_HANDLE, cuda::INVALID_HANDLE)
    );
    assert_eq!((fake_driver.cuStreamDestroy_v2)(0), cuda::INVALID_HANDLE);
    assert_eq!(((fake_driver.cuEventDestroy_v2)(event), (fake_driver.cuEventQuery)(event)), (0, cuda::INVALID_HANDLE));
    assert_eq!((fake_driver.live("streams"), fake_driver.live("events")), (0, 0));
    assert_eq!((fake_driver.cuCtxSynchronize)(), 0);
    assert_eq!((counter.load(Ordering::SeqCst), fake_driver.count("device_synchronises")), (1, 1));
    assert_eq!(fake_driver.peek(memory, 64), pattern(5, 64), "queued work runs although its stream was destroyed");
}

#[test]
fn time_passes_between_events() {
    let fake_driver = FakeDriver::with_context();
    let (stream, events) = (fake_driver.stream(0), [fake_driver.event(), fake_driver.event()]);
    let memory = fake_driver.alloc(8);
    assert_eq!((fake_driver.cuEventElapsedTime)(&mut 0.0, events[0], events[1]), cuda::INVALID_HANDLE);
    assert_eq!((fake_driver.cuEventRecord)(events[0], stream), 0);
    assert_eq!((fake_driver.fake_driver_fill_kernel)(stream, memory, 8, 5, SLOW_US), 0);
    assert_eq!((fake_driver.cuEventRecord)(events[1], stream), 0);
    assert_eq!((fake_driver.cuEventElapsedTime)(&mut 0.0, events[0], events[1]), cuda::NOT_READY);
    assert_eq!((fake_driver.cuEventSynchronize)(events[1]), 0);
    assert!(made(|out: &mut f32| (fake_driver.cuEventElapsedTime)(out, events[0], events[1])) >= 150.0);
    let untimed = made(|out| (fake_driver.cuEventCreate)(out, 2));
    assert_eq!((fake_driver.cuEventRecord)(untimed, stream), 0);
    assert_eq!((fake_driver.cuEventSynchronize)(untimed), 0);
    assert_eq!((fake_driver.cuEventElapsedTime)(&mut 0.0, events[0], untimed), cuda::INVALID_HANDLE);
    assert_eq!((fake_driver.cuEventCreate)(&mut 0, 8), cuda::INVALID_VALUE);
}

#[test]
fn rows_are_copied_with_their_pitch() {
    let fake_driver = FakeDriver::with_context();
    let stream = fake_driver.stream(0);
    let memory = fake_driver.alloc_with(100 * 30, 3);
    let expected = pattern(3, 100 * 30);
    let target = fake_driver.pinned(20 * 30);
    let copy = common::api::Memcpy2D {
        src_x: 7,
        src_y: 4,
        src_type: 2,
        src_device: memory,
        src_pitch: 100,
        dst_type: 1,
        dst_host: at(target),
        dst_pitch: 20,
        width: 15,
        height: 26,
        ..Default::default()
    };
    target.fill(0);
    assert_eq!((fake_driver.cuMemcpy2DAsync_v2)(&copy, stream), 0);
    assert_eq!((fake_driver.cuStreamSynchronize)(stream), 0);
    for row in 0..26 {
        assert_eq!(target[row * 20..row * 20 + 15], expected[(row + 4) * 100 + 7..(row + 4) * 100 + 22]);
        assert_eq!(target[row * 20 + 15..(row + 1) * 20], [0; 5]);
    }
    let bad = |change: fn(&mut common::api::Memcpy2D)| {
        let mut copy = copy;
        change(&mut copy);
        (fake_driver.cuMemcpy2DAsync_v2)(&copy, stream)
    };
    assert_eq!(bad(|copy| copy.height = 27), cuda::INVALID_VALUE);
    assert_eq!(bad(|copy| copy.src_pitch = 21), cuda::INVALID_VALUE);
    assert_eq!(bad(|copy| copy.dst_pitch = 14), cuda::INVALID_VALUE);
    assert_eq!(bad(|copy| copy.src_type = 3), cuda::NOT_SUPPORTED);
}
