//! GPU memory registered with cuFile: transfers use it, the table is bounded, and nothing leaks.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail like tests")]

#[path = "gpu/fake_driver.rs"]
mod fake_driver;
#[path = "gpu/files.rs"]
mod files;

use std::sync::Arc;

use deepnvme_io::{Config, DirectMode, Engine, ErrorKind, TensorFile, WriteOptions};
use deepnvme_mem::{Region, Strided};
use fake_driver::{Gpu, GpuMemory, pattern};
use files::{read, set_up, write};

const MIB: usize = 1 << 20;
const WINDOW_FULL: i32 = 5036;

fn config(gds: DirectMode) -> Config {
    Config { gds, workers: 2, queue_depth: 8, ..Config::default() }
}

fn there_and_back(gpu: &Gpu, engine: &Engine, file: &Arc<TensorFile>, memory: &GpuMemory) {
    let before = gpu.peek(memory);
    write(engine, file, 0, memory.region());
    gpu.poke(memory, &pattern(99, memory.bytes));
    read(engine, file, 0, memory.region_mut());
    assert!(gpu.peek(memory) == before);
}

#[test]
fn transfers_from_any_part_of_it_profit_whoever_has_pinned() {
    let (gpu, _folder, engine, file) = set_up(config(DirectMode::Required));
    let other = Engine::new(config(DirectMode::Required)).unwrap();
    let memory = gpu.memory(0, 4 * MIB, 1);
    there_and_back(&gpu, &engine, &file, &memory);
    assert!(gpu.count("unregistered_io") > 0);
    assert_eq!(engine.stats().bytes_gds_pinned, 0);

    let pin = engine.register_gpu_memory(memory.region()).unwrap();
    assert_eq!(pin.refusal(), None);
    gpu.clear();
    there_and_back(&gpu, &engine, &file, &memory);
    let part = memory.region().slice(MIB..3 * MIB);
    other.write(&file, 8 << 20, part, WriteOptions::default()).unwrap().wait().1.unwrap();
    assert_eq!(gpu.count("unregistered_io"), 0);
    assert_eq!((engine.stats().bytes_gds_pinned, other.stats().bytes_gds_pinned), (8 << 20, 2 << 20));

    let again = other.register_gpu_memory(memory.region().slice(MIB..2 * MIB)).unwrap();
    assert!(again.refusal().unwrap().contains("registered already"));
    drop(again);
    assert_eq!((gpu.live("cufile_buffers"), pin.refusal()), (1, None), "the first one stays");
    drop(pin);
    assert_eq!(gpu.live("cufile_buffers"), 0);
    there_and_back(&gpu, &engine, &file, &memory);
    assert_eq!((engine.stats().gds_pins, engine.stats().gds_pins_evicted), (1, 0));
}

#[test]
fn a_thousand_cycles_leave_nothing() {
    let (gpu, _folder, engine, file) = set_up(config(DirectMode::Required));
    let memories = [gpu.memory(0, MIB, 1), gpu.memory(1, MIB, 2), gpu.memory(0, MIB, 3)];
    for round in 0..1000 {
        let memory = &memories[round % 3];
        let pin = engine.register_gpu_memory(memory.region()).unwrap();
        assert_eq!(pin.refusal(), None);
        if round % 50 == 0 {
            there_and_back(&gpu, &engine, &file, memory);
        }
        assert_eq!(gpu.live("cufile_buffers"), 1);
    }
    assert_eq!(engine.stats().gds_pins, 1000);
    // GPU memory is also freed once its last reference is dropped.
    let before = gpu.live("device_allocations");
    let memory = gpu.memory(0, MIB, 4);
    let pin = engine.register_gpu_memory(memory.region()).unwrap();
    drop(memory);
    assert_eq!(gpu.live("device_allocations"), before + 1, "a pin keeps what it was given");
    drop(pin);
    assert_eq!((gpu.live("device_allocations"), gpu.live("cufile_buffers")), (before, 0));
}

#[test]
fn the_least_recently_used_pin_gives_way() {
    let (gpu, _folder, engine, file) = set_up(config(DirectMode::Required));
    let memories: Vec<_> = (0..4).map(|seed| gpu.memory(0, MIB, seed)).collect();
    let elsewhere = gpu.memory(1, MIB, 9);
    let mut pins: Vec<_> = [&elsewhere, &memories[0], &memories[1], &memories[2]]
        .map(|memory| engine.register_gpu_memory(memory.region()).unwrap())
        .into();
    there_and_back(&gpu, &engine, &file, &memories[0]);
    gpu.fail("cuFileBufRegister", 0, WINDOW_FULL);
    pins.push(engine.register_gpu_memory(memories[3].region()).unwrap());
    let refused = pins.iter().map(|pin| pin.refusal().is_some()).collect::<Vec<_>>();
    assert_eq!(refused, [false, false, true, false, false], "not the one that was used since, nor another GPU's");
    assert!(pins[2].refusal().unwrap().contains("later registrations"));
    assert_eq!(engine.stats().gds_pins_evicted, 1);
    there_and_back(&gpu, &engine, &file, &memories[1]);
    // Evicted memory may be pinned again. Dropping its first pin does not end the second.
    let again = engine.register_gpu_memory(memories[1].region()).unwrap();
    pins.remove(2);
    assert_eq!((again.refusal(), gpu.live("cufile_buffers")), (None, 5));

    // Without any room, all pins are evicted, and the new pin reports the reason.
    gpu.fail_always("cuFileBufRegister", WINDOW_FULL);
    drop(again);
    let none = engine.register_gpu_memory(memories[1].region()).unwrap();
    assert!(none.refusal().unwrap().contains("5036"), "{:?}", none.refusal());
    gpu.clear();
    there_and_back(&gpu, &engine, &file, &memories[1]);
}

#[test]
fn a_pin_that_ends_during_a_transfer_ends_after_it() {
    let (gpu, _folder, engine, file) = set_up(config(DirectMode::Required));
    for round in 0..30 {
        let memory = gpu.memory(0, 2 * MIB, round);
        let pin = engine.register_gpu_memory(memory.region()).unwrap();
        let pending = engine.write(&file, 0, memory.region(), WriteOptions::default()).unwrap();
        std::thread::sleep(std::time::Duration::from_micros(100 * (round % 7)));
        drop((pin, memory));
        pending.wait().1.unwrap();
    }
    drop(engine);
    assert_eq!(gpu.live("device_allocations"), 0);
}

#[test]
fn a_refused_pin_has_a_reason() {
    let gpu = Gpu::new();
    let engine = Engine::new(config(DirectMode::Preferred)).unwrap();
    let error = engine.register_gpu_memory(Region::from_vec(vec![1; 4096])).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    let memory = gpu.memory(0, MIB, 1);
    let layout = Strided { shape: vec![100, 10], stride_bytes: vec![1000, 1], item_bytes: 1 };
    assert_eq!(engine.register_gpu_memory(memory.strided(0, layout)).unwrap_err().kind(), ErrorKind::InvalidInput);
    assert_eq!(engine.register_gpu_memory(memory.on_device(7)).unwrap_err().kind(), ErrorKind::Device);
    gpu.fail("cuFileBufRegister", 0, 5012);
    let pin = engine.register_gpu_memory(memory.region()).unwrap();
    assert!(pin.refusal().unwrap().contains("5012"), "{:?}", pin.refusal());
    assert_eq!(engine.stats().gds_pins, 0);
    drop((pin, engine));
    // Without cuFile.
    gpu.fail("cuFileDriverOpen", 0, 5001);
    let engine = Engine::new(config(DirectMode::Preferred)).unwrap();
    let pin = engine.register_gpu_memory(memory.region()).unwrap();
    assert!(pin.refusal().unwrap().contains("cuFile does not start"), "{:?}", pin.refusal());
}
