//! Asynchronous cuFile: batches, and transfers in streams.

mod common;

use std::ptr::null;
use std::sync::atomic::{AtomicU32, Ordering};

use common::api::{IoEvent, IoParams};
use common::codes::{cuda, cufile, refused};
use common::files::{MIB, Setting, ok, setting, setting_with_stream};
use common::{SLOW_US, count_up, made, pattern, same};

#[test]
fn batches_are_over_late_and_in_any_order() {
    let Setting { fake_driver, file: _file, handle, _folder } = setting();
    let memory = fake_driver.alloc(32 * 4096);
    let batch = made(|out| (fake_driver.cuFileBatchIOSetUp)(out, 32).err);
    let parameters: Vec<IoParams> = (0..32_usize)
        .map(|index| {
            let offset = (index * 4096) as i64;
            let (file_offset, memory_offset) = (offset, offset);
            IoParams {
                mode: 1,
                base: memory,
                file_offset,
                memory_offset,
                bytes: 4096,
                handle,
                opcode: 0,
                cookie: index,
            }
        })
        .collect();
    assert_eq!((fake_driver.cuFileBatchIOSubmit)(batch, 32, parameters.as_ptr(), 0), ok());
    assert_eq!((fake_driver.cuFileBatchIOSubmit)(batch, 1, parameters.as_ptr(), 0).err, cufile::BATCH_FULL);
    let mut seen = Vec::new();
    let mut events = [IoEvent::default(); 8];
    while seen.len() < 32 {
        let mut count = 8;
        assert_eq!((fake_driver.cuFileBatchIOGetStatus)(batch, 1, &mut count, events.as_mut_ptr(), null()), ok());
        assert!((1..=8).contains(&count));
        seen.extend_from_slice(&events[..count as usize]);
    }
    assert!(seen.iter().all(|event| (event.status, event.result) == (16, 4096)));
    let cookies: Vec<usize> = seen.iter().map(|event| event.cookie).collect();
    assert!(!cookies.is_sorted());
    let mut sorted = cookies;
    sorted.sort_unstable();
    assert_eq!(sorted, (0..32).collect::<Vec<_>>());
    same(&fake_driver.peek(memory, 32 * 4096), &pattern(1, 32 * 4096));
    assert_eq!(
        (fake_driver.cuFileBatchIOGetStatus)(batch, 1, &mut 8, events.as_mut_ptr(), null()).err,
        cufile::INVALID_VALUE
    );
    let wrong = [parameters[0], IoParams { handle: 5, ..parameters[1] }];
    assert_eq!((fake_driver.cuFileBatchIOSubmit)(batch, 2, wrong.as_ptr(), 0).err, cufile::HANDLE_NOT_REGISTERED);
    fake_driver.fail("cuFileBatchIO@entry", 0, libc::EIO);
    assert_eq!((fake_driver.cuFileBatchIOSubmit)(batch, 1, parameters.as_ptr(), 0), ok());
    let mut count = 1;
    assert_eq!((fake_driver.cuFileBatchIOGetStatus)(batch, 1, &mut count, events.as_mut_ptr(), null()), ok());
    assert_eq!(events[0], IoEvent { cookie: 0, status: 64, result: -5 });
    (fake_driver.cuFileBatchIODestroy)(batch);
    assert_eq!((fake_driver.live("cufile_batches"), fake_driver.violations().as_str()), (0, ""));
    assert_eq!((fake_driver.cuFileBatchIOSubmit)(batch, 1, parameters.as_ptr(), 0).err, cufile::INVALID_VALUE);
}

#[test]
fn batches_are_canceled_and_waited_for_no_longer_than_asked() {
    let Setting { fake_driver, file: _file, handle, _folder } = setting();
    let memory = fake_driver.alloc(64 * 4096);
    let batch = made(|out| (fake_driver.cuFileBatchIOSetUp)(out, 64).err);
    let entry = |cookie: usize| {
        let (file_offset, memory_offset) = (0, (cookie * 4096) as i64);
        IoParams { mode: 1, base: memory, file_offset, memory_offset, bytes: 4096, handle, opcode: 0, cookie }
    };
    let parameters: Vec<IoParams> = (0..64).map(entry).collect();
    assert_eq!((fake_driver.cuFileBatchIOSubmit)(batch, 64, parameters.as_ptr(), 0), ok());
    let (mut events, mut count) = ([IoEvent::default(); 64], 64);
    let now = libc::timespec { tv_sec: 0, tv_nsec: 1 };
    assert_eq!((fake_driver.cuFileBatchIOGetStatus)(batch, 64, &mut count, events.as_mut_ptr(), &raw const now), ok());
    assert!(count < 64, "64 entries take longer than a nanosecond");
    assert_eq!((fake_driver.cuFileBatchIOCancel)(batch), ok());
    let mut rest = 64 - count;
    let least = rest;
    assert_eq!((fake_driver.cuFileBatchIOGetStatus)(batch, least, &mut rest, events.as_mut_ptr(), null()), ok());
    assert_eq!(rest, least);
    assert!(events[..rest as usize].iter().any(|event| (event.status, event.result) == (8, 0)));
    assert_eq!((fake_driver.cuMemFree_v2)(memory), 0);
    assert_eq!(fake_driver.violations(), "");
    let memory = fake_driver.alloc(64 * 4096);
    let parameters: Vec<IoParams> = (0..64).map(|cookie| IoParams { base: memory, ..entry(cookie) }).collect();
    assert_eq!((fake_driver.cuFileBatchIOSubmit)(batch, 64, parameters.as_ptr(), 0), ok());
    (fake_driver.cuFileBatchIODestroy)(batch);
    assert!(fake_driver.violations().contains("unfinished entries"), "{}", fake_driver.violations());
}

#[test]
fn queued_transfers_look_at_their_parameters_when_their_turn_comes() {
    let (Setting { fake_driver, file: _file, handle, _folder }, stream, memory) = setting_with_stream(2 * MIB);
    let slow = fake_driver.alloc(8);
    let (bytes, offset, skip, done) = (&mut MIB.clone(), &mut 0_i64, &mut 0_i64, &mut 0_isize);
    let read = |bytes: &mut usize, offset: &mut i64, skip: &mut i64, done: &mut isize| {
        (fake_driver.cuFileReadAsync)(handle, memory, bytes, offset, skip, done, stream)
    };
    let counter = AtomicU32::new(0);
    assert_eq!((fake_driver.fake_driver_fill_kernel)(stream, slow, 8, 3, SLOW_US), 0);
    assert_eq!(read(bytes, offset, skip, done), ok());
    assert_eq!((fake_driver.cuLaunchHostFunc)(stream, count_up, (&raw const counter).cast_mut().cast()), 0);
    (*bytes, *offset, *skip) = (5000, 8192, 100);
    assert_eq!(((fake_driver.cuStreamQuery)(stream), *done), (cuda::NOT_READY, 0));
    assert_eq!((fake_driver.cuStreamSynchronize)(stream), 0);
    assert_eq!((*done, counter.load(Ordering::SeqCst)), (5000, 1));
    same(&fake_driver.peek(memory + 100, 5000), &pattern(1, 2 * MIB)[8192..13192]);
    assert_eq!((fake_driver.cuFileStreamRegister)(stream, 4), ok());
    assert_eq!((fake_driver.fake_driver_fill_kernel)(stream, slow, 8, 3, SLOW_US), 0);
    assert_eq!(read(bytes, offset, skip, done), ok());
    (*bytes, *offset) = (1, 0);
    assert_eq!((fake_driver.cuStreamSynchronize)(stream), 0);
    assert_eq!(*done, 5000, "the size was fixed");
    same(&fake_driver.peek(memory + 100, 5000), &pattern(1, 5000));
    *skip = 3 * MIB as i64;
    assert_eq!(read(bytes, offset, skip, done), ok());
    assert_eq!((fake_driver.cuStreamSynchronize)(stream), 0);
    assert_eq!(*done, refused(cufile::CUDA_POINTER_INVALID));
    fake_driver.fail("cuFileReadAsync@stream", 0, libc::EIO);
    assert_eq!(read(bytes, offset, skip, done), ok());
    assert_eq!((fake_driver.cuStreamSynchronize)(stream), 0);
    assert_eq!(*done, -1);
    assert_eq!((fake_driver.cuFileStreamDeregister)(stream), ok());
    assert_eq!((fake_driver.cuFileStreamDeregister)(stream).err, cufile::INVALID_VALUE);
    let gone = fake_driver.stream(0);
    assert_eq!((fake_driver.cuStreamDestroy_v2)(gone), 0);
    assert_eq!(
        (fake_driver.cuFileReadAsync)(handle, memory, bytes, offset, skip, done, gone).cu_err,
        cuda::INVALID_HANDLE
    );
    assert_eq!(fake_driver.violations(), "");
}

#[test]
fn queued_transfers_write_in_the_order_of_their_stream() {
    let (Setting { fake_driver, file: _file, handle, _folder }, stream, memory) = setting_with_stream(MIB);
    let (bytes, offset, skip, done) = (&mut MIB.clone(), &mut 0_i64, &mut 0_i64, &mut 0_isize);
    assert_eq!((fake_driver.fake_driver_fill_kernel)(stream, memory, MIB, 8, SLOW_US), 0);
    assert_eq!((fake_driver.cuFileWriteAsync)(handle, memory, bytes, offset, skip, done, stream), ok());
    assert_eq!((fake_driver.cuMemsetD8Async)(memory, 0, MIB, stream), 0);
    assert_eq!((fake_driver.cuFileReadAsync)(handle, memory, bytes, offset, skip, done, stream), ok());
    assert_eq!((fake_driver.cuStreamSynchronize)(stream), 0);
    assert_eq!(*done, MIB as isize);
    same(&fake_driver.peek(memory, MIB), &pattern(8, MIB));
    assert_eq!(fake_driver.violations(), "");
}

#[test]
fn registrations_must_stay_until_all_transfers_end() {
    let (Setting { fake_driver, file: _file, handle, _folder }, stream, memory) = setting_with_stream(MIB);
    let (bytes, offset, skip, done) = (&mut MIB.clone(), &mut 0_i64, &mut 0_i64, &mut 0_isize);
    assert_eq!((fake_driver.cuFileBufRegister)(memory, MIB, 0), ok());
    assert_eq!((fake_driver.fake_driver_fill_kernel)(stream, memory, MIB, 8, SLOW_US), 0);
    assert_eq!((fake_driver.cuFileWriteAsync)(handle, memory, bytes, offset, skip, done, stream), ok());
    assert_eq!((fake_driver.cuFileBufDeregister)(memory), ok());
    (fake_driver.cuFileHandleDeregister)(handle);
    assert_eq!((fake_driver.cuStreamSynchronize)(stream), 0);
    assert_eq!(*done, refused(cufile::HANDLE_NOT_REGISTERED));
    let violations = fake_driver.violations();
    let found: Vec<&str> = violations.lines().collect();
    assert_eq!(found.len(), 2, "{violations}");
    assert!(found[0].contains("cuFileBufDeregister") && found[1].contains("during a transfer"), "{violations}");
}
