//! Registered memory, and ownership of an op's memory.

use deepnvme_io::op::OpKind;
use deepnvme_mem::{Buffer, Region, RegionMut, RegistrableRange};

use super::{Harness, Make};
use crate::data::{TestFile, bytes_of, difference, open_direct, random_bytes, region_at, region_holding};

const SLOT_BYTES: usize = 16 << 10;

/// Reads and writes through slices of registered memory, next to ops on other memory, move the right bytes, whether
/// or not the backend accepted the registration.
///
/// # Panics
/// If the backend breaks the contract, like every check.
pub fn registered_memory_works_like_any(make: Make<'_>) {
    let content = random_bytes(1, 8 * SLOT_BYTES);
    let file = TestFile::holding(&content);
    let mut harness = Harness::new(make, 8);
    let arena = region_at(0, 8 * SLOT_BYTES);
    harness.backend.register(&RegistrableRange::from(&arena));
    exercise(&mut harness, &file, &content, &arena);
    harness.backend.unregister(&RegistrableRange::from(&arena));
    exercise(&mut harness, &file, &content, &arena);
}

/// The same memory can be registered, unregistered and registered again. After unregistering, the backend does not
/// hold it.
pub fn memory_can_be_registered_again(make: Make<'_>) {
    let content = random_bytes(2, 8 * SLOT_BYTES);
    let file = TestFile::holding(&content);
    let mut harness = Harness::new(make, 8);
    let arena = region_at(0, 8 * SLOT_BYTES);
    let first = harness.backend.register(&RegistrableRange::from(&arena));
    for _ in 0..20 {
        exercise(&mut harness, &file, &content, &arena);
        harness.backend.unregister(&RegistrableRange::from(&arena));
        assert_eq!(
            harness.backend.register(&RegistrableRange::from(&arena)),
            first,
            "a registration cannot be repeated"
        );
    }
    harness.backend.unregister(&RegistrableRange::from(&arena));
    harness.backend.unregister(&RegistrableRange::from(&arena));
    assert!(arena.into_buffer().is_ok(), "forgotten memory is still held by the backend");
    let other = region_at(0, 8 * SLOT_BYTES);
    exercise(&mut harness, &file, &content, &other);
}

/// More registrations than any backend supports are accepted or refused, and all memory works.
pub fn many_registrations_are_harmless(make: Make<'_>) {
    let content = random_bytes(3, 8 * SLOT_BYTES);
    let file = TestFile::holding(&content);
    let mut harness = Harness::new(make, 8);
    let arenas: Vec<RegionMut> = (0..100).map(|_| region_at(0, 8 * SLOT_BYTES)).collect();
    for arena in &arenas {
        harness.backend.register(&RegistrableRange::from(arena));
    }
    for arena in arenas.iter().step_by(33) {
        exercise(&mut harness, &file, &content, arena);
    }
    drop(harness);
    assert!(arenas.into_iter().all(|arena| arena.into_buffer().is_ok()), "memory outlived its backend");
}

/// The memory of an op in flight, and of its completion, has an owner.
pub fn ops_in_flight_hold_their_memory(make: Make<'_>) {
    let content = random_bytes(4, 1 << 20);
    let file = TestFile::holding(&content);
    let mut harness = Harness::new(make, 2);
    let target = Buffer::zeroed(1 << 20).expect("memory").into_region();
    let op = harness.op(OpKind::Read, &file.file, 0, &[target.region()]);
    harness.submit(op);
    let target = target.into_buffer().expect_err("memory with I/O in flight was given away");
    let completions = harness.reap(1);
    let target = target.into_buffer().expect_err("memory in a completion was given away");
    assert!(bytes_of(&completions[0].op.iovecs[0]) == content);
    drop(completions);
    let buffer = target.into_buffer().expect("the backend still holds memory of an op that was returned");
    assert!(buffer.as_slice() == content);
}

/// Dropping the backend waits for its ops in flight. Afterwards the memory is free and does not change, and every
/// such write is in the file.
pub fn drop_waits_for_ops_in_flight(make: Make<'_>) {
    const OP_BYTES: usize = 1 << 20;
    let mut expected = random_bytes(5, 8 * OP_BYTES);
    let file = TestFile::holding(&expected);
    let fd = open_direct(&file.path).unwrap_or_else(|| file.file.clone());
    for round in 0..3 {
        let mut harness = Harness::new(make, 16);
        let mut targets = Vec::new();
        for index in 0..4 {
            let target = Buffer::zeroed(OP_BYTES).expect("memory").into_region();
            let op = harness.op(OpKind::Read, &fd, index * OP_BYTES as u64, &[target.region()]);
            harness.submit(op);
            targets.push(target);
        }
        for index in 4..8 {
            let bytes = random_bytes(100 * round + index, OP_BYTES);
            let at = index as usize * OP_BYTES;
            let op = harness.op(OpKind::Write, &fd, at as u64, &[region_holding(0, &bytes).region()]);
            harness.submit(op);
            expected[at..at + OP_BYTES].copy_from_slice(&bytes);
        }
        harness.backend.flush().expect("the queue works");
        drop(harness);
        for (index, target) in targets.into_iter().enumerate() {
            let mut buffer = target.into_buffer().expect("memory outlived its backend");
            let at = index * OP_BYTES;
            assert_eq!(difference(buffer.as_slice(), &expected[at..at + OP_BYTES]), None, "a read was abandoned");
            buffer.as_mut_slice().fill(0xee);
            std::thread::sleep(std::time::Duration::from_millis(2));
            assert!(buffer.as_slice().iter().all(|byte| *byte == 0xee), "the kernel wrote after the drop");
        }
        assert_eq!(difference(&file.bytes(), &expected), None, "a write was abandoned");
    }
}

/// Ops that were accepted and never flushed are released when the backend is dropped.
pub fn drop_releases_unflushed_ops(make: Make<'_>) {
    let file = TestFile::holding(&random_bytes(6, 4096));
    let mut harness = Harness::new(make, 4);
    let target = Buffer::zeroed(4096).expect("memory").into_region();
    let op = harness.op(OpKind::Read, &file.file, 0, &[target.region()]);
    harness.submit(op);
    drop(harness);
    assert!(target.into_buffer().is_ok(), "memory outlived its backend");
    assert_eq!(std::sync::Arc::strong_count(&file.file), 1, "a file outlived its backend");
}

/// Reads the file into slots of the arena and into other memory at once, and writes from the arena.
fn exercise(harness: &mut Harness, file: &TestFile, content: &[u8], arena: &RegionMut) {
    let slot = |index: usize| arena.region().slice(index * SLOT_BYTES..(index + 1) * SLOT_BYTES);
    let outside = region_at(64, SLOT_BYTES).region();
    for index in 0..7 {
        let op = harness.op(OpKind::Read, &file.file, (index * SLOT_BYTES) as u64, &[slot(index)]);
        harness.submit(op);
    }
    let op = harness.op(OpKind::Read, &file.file, 99, std::slice::from_ref(&outside));
    harness.submit(op);
    for completion in harness.reap(8) {
        assert_eq!(completion.result, Ok(SLOT_BYTES));
    }
    for index in 0..7 {
        let expected = &content[index * SLOT_BYTES..(index + 1) * SLOT_BYTES];
        assert_eq!(difference(&bytes_of(&slot(index)), expected), None, "slot {index}");
    }
    assert_eq!(difference(&bytes_of(&outside), &content[99..99 + SLOT_BYTES]), None);

    let bytes = random_bytes(77, 1000);
    arena.copy_from_slice(7 * SLOT_BYTES + 5, &bytes);
    let end = content.len() as u64;
    let source: Region = arena.region().slice(7 * SLOT_BYTES + 5..7 * SLOT_BYTES + 1005);
    assert_eq!(harness.write(&file.file, end, &source), Ok(1000));
    // Two slices of the arena and one of other memory, in one op.
    let iovecs = [slot(0).slice(0..100), outside.slice(0..100), slot(2).slice(7..107)];
    let op = harness.op(OpKind::Read, &file.file, end, &iovecs);
    assert_eq!(harness.run(op).result, Ok(300));
    let found: Vec<u8> = iovecs.iter().flat_map(bytes_of).collect();
    assert_eq!(difference(&found, &bytes[..300]), None, "a vectored read into registered memory");
}
