//! Several threads at once, as a program that copies through pinned slots does it: nothing is lost, nothing hangs,
//! and no violation is found where there is none.

mod common;

use common::{FakeDriver, NON_BLOCKING, at, pattern, same};

const THREADS: u64 = 4;
const SLOTS: usize = 3;
const ROUNDS: usize = 60;
const BYTES: usize = 20_000;

#[test]
fn threads_with_streams_and_slots_of_their_own() {
    let fake_driver = &FakeDriver::with_context();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || pipeline(fake_driver, thread));
        }
    });
    assert_eq!(fake_driver.violations(), "");
    let kinds = ["streams", "events", "device_allocations", "device_bytes", "host_allocations", "registrations"];
    assert_eq!(kinds.map(|kind| fake_driver.live(kind)), [0; 6]);
}

/// Slots go to the device and, by another stream, back to the host; a slot is used again when its event has come.
fn pipeline(fake_driver: &FakeDriver, thread: u64) {
    fake_driver.enter((thread % 2) as i32);
    let (up, down) = (fake_driver.stream(NON_BLOCKING), fake_driver.stream(NON_BLOCKING));
    let memory: Vec<u64> = (0..SLOTS).map(|_| fake_driver.alloc(BYTES)).collect();
    let arrived: Vec<u64> = (0..SLOTS).map(|_| fake_driver.event()).collect();
    let returned: Vec<u64> = (0..SLOTS).map(|_| fake_driver.event()).collect();
    let mut slots: Vec<(&mut [u8], &mut [u8])> =
        (0..SLOTS).map(|_| (fake_driver.pinned(BYTES), fake_driver.pinned(BYTES))).collect();
    for round in 0..ROUNDS + SLOTS {
        let slot = round % SLOTS;
        let (source, target) = &mut slots[slot];
        assert_eq!((fake_driver.cuEventSynchronize)(returned[slot]), 0);
        if round >= SLOTS {
            same(target, &pattern(thread << 32 | (round - SLOTS) as u64, BYTES));
        }
        source.copy_from_slice(&pattern(thread << 32 | round as u64, BYTES));
        target.fill(0);
        assert_eq!((fake_driver.cuMemcpyHtoDAsync_v2)(memory[slot], at(source), BYTES, up), 0);
        assert_eq!((fake_driver.cuEventRecord)(arrived[slot], up), 0);
        assert_eq!((fake_driver.cuStreamWaitEvent)(down, arrived[slot], 0), 0);
        assert_eq!((fake_driver.cuMemcpyDtoHAsync_v2)(at(target), memory[slot], BYTES, down), 0);
        assert_eq!((fake_driver.cuEventRecord)(returned[slot], down), 0);
    }
    assert_eq!((fake_driver.cuStreamSynchronize)(down), 0);
    memory.iter().for_each(|memory| assert_eq!((fake_driver.cuMemFree_v2)(*memory), 0));
    arrived.iter().chain(&returned).for_each(|event| assert_eq!((fake_driver.cuEventDestroy_v2)(*event), 0));
    for (source, target) in slots {
        assert_eq!(((fake_driver.cuMemFreeHost)(at(source)), (fake_driver.cuMemFreeHost)(at(target))), (0, 0));
    }
    assert_eq!(((fake_driver.cuStreamDestroy_v2)(up), (fake_driver.cuStreamDestroy_v2)(down)), (0, 0));
}
