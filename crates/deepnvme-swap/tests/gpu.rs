//! GPU tensors go into the swapper and come out of it in stream order. Runs with a fake driver.

#![allow(clippy::unwrap_used)]

#[path = "../../deepnvme-io/tests/gpu/fake_driver.rs"]
mod fake_driver;

use std::sync::Arc;

use deepnvme_io::{Config, Engine};
use deepnvme_swap::{Swapper, SwapperOptions};

use crate::fake_driver::{Gpu, pattern};

const BYTES: usize = 3_000_000;
/// Duration of a kernel that changes or reads the memory.
const DELAY_US: u64 = 40_000;

struct World {
    swapper: Swapper,
    _folder: tempfile::TempDir,
}

fn world() -> World {
    let folder = tempfile::tempdir().unwrap();
    let engine = Arc::new(Engine::new(Config::default()).unwrap());
    let swapper = Swapper::new(engine, &SwapperOptions::new(folder.path(), 16 << 20)).unwrap();
    World { swapper, _folder: folder }
}

fn stored(swapper: &Swapper, key: &str) -> Vec<u8> {
    let borrowed = swapper.borrow(key, false, &mut || false).unwrap();
    let mut bytes = vec![0; borrowed.len()];
    borrowed.region().copy_to_slice(0, &mut bytes);
    bytes
}

#[test]
fn put_waits_for_the_stream() {
    let gpu = Gpu::new();
    let (world, stream) = (world(), gpu.stream(0));
    let memory = gpu.memory(0, BYTES, 1);
    gpu.fill(stream, &memory, 2, DELAY_US);
    world.swapper.put("a", &memory.region().after(stream)).unwrap();
    assert!(stored(&world.swapper, "a") == pattern(2, BYTES), "put did not wait for the kernel");
    gpu.end_stream(0, stream);
}

#[test]
fn a_write_waits_for_the_stream() {
    let gpu = Gpu::new();
    let (world, stream) = (world(), gpu.stream(0));
    let memory = gpu.memory(0, BYTES, 1);
    world.swapper.put("a", &memory.region()).unwrap();
    for (seed, is_in_memory) in [(2, true), (3, false)] {
        if !is_in_memory {
            evict(&world.swapper);
        }
        let borrowed = world.swapper.access("a", true, &mut || false).unwrap();
        assert_eq!(borrowed.offset().is_some(), is_in_memory);
        gpu.fill(stream, &memory, seed, DELAY_US);
        borrowed.write_at(0, &memory.region().after(stream), &mut || false).unwrap();
        drop(borrowed);
        assert!(stored(&world.swapper, "a") == pattern(seed, BYTES), "the write did not wait for the kernel");
    }
    gpu.end_stream(0, stream);
}

#[test]
fn a_read_waits_for_the_stream() {
    let gpu = Gpu::new();
    let (world, stream) = (world(), gpu.stream(0));
    let (kept, used) = (gpu.memory(0, BYTES, 1), gpu.memory(0, BYTES, 2));
    world.swapper.put("a", &kept.region()).unwrap();
    for is_in_memory in [true, false] {
        if !is_in_memory {
            evict(&world.swapper);
        }
        gpu.poke(&used, &pattern(2, BYTES));
        let seen = gpu.memory(0, BYTES, 3);
        let borrowed = world.swapper.access("a", false, &mut || false).unwrap();
        assert_eq!(borrowed.offset().is_some(), is_in_memory);
        gpu.copy(stream, &seen, &used, DELAY_US);
        borrowed.read_at(0, used.region_mut().after(stream), &mut || false).unwrap();
        drop(borrowed);
        assert!(gpu.peek(&used) == pattern(1, BYTES));
        assert!(gpu.peek(&seen) == pattern(2, BYTES), "the read did not wait for the kernel");
    }
    gpu.end_stream(0, stream);
}

/// Evicts everything from memory.
fn evict(swapper: &Swapper) {
    swapper.flush(None, &mut || false).unwrap();
    for key in ["one", "two", "three", "four", "five"] {
        swapper.create(key, 4 << 20, &mut || false).unwrap().commit();
    }
    let whole = swapper.create("six", 16 << 20, &mut || false).unwrap();
    drop(whole);
}
