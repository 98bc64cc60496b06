//! Layer groups in GPU memory: their bytes, and the order of streams. Runs with a fake driver.

#![allow(clippy::unwrap_used)]

#[path = "../../deepnvme-io/tests/gpu/fake_driver.rs"]
mod fake_driver;

use std::path::Path;
use std::sync::Arc;

use deepnvme_codec::{Float, cast};
use deepnvme_file::VersionedFile;
use deepnvme_io::mem::StreamHandle;
use deepnvme_io::{Config, Engine};
use deepnvme_stream::{Conversion, Decoding, Error, LayerGroup, Piece, SlotClass, StreamPlan, Streamer};

use crate::fake_driver::{Gpu, GpuMemory, pattern};

const SLOT_BYTES: usize = 1 << 20;
/// Unchanged bytes of a group.
const PLAIN: usize = 300_001;
/// Offset in memory of the elements that are cast.
const CAST_AT: usize = 303_104;
/// Elements after the unchanged bytes, bf16 on disk and fp32 in memory.
const CAST: usize = 100_000;

/// A file of groups, their expected bytes, and a streamer over GPU memory.
struct World {
    streamer: Streamer,
    expected: Vec<Vec<u8>>,
    arena: GpuMemory,
    _folder: tempfile::TempDir,
}

fn world(gpu: &Gpu, count: usize, slots: usize) -> World {
    let folder = tempfile::tempdir().unwrap();
    let (mut file, mut groups, mut expected) = (vec![0; 77], Vec::new(), Vec::new());
    for index in 0..count {
        let plain = Piece { source: 0, offset: file.len() as u64, bytes: PLAIN, at: 0 };
        let bytes = pattern((index as u64) << 32, PLAIN + 2 * CAST);
        file.extend(&bytes);
        let mut memory = bytes[..PLAIN].to_vec();
        memory.resize(CAST_AT + 4 * CAST, 0);
        cast::convert(Float::Bf16, Float::F32, &bytes[PLAIN..], &mut memory[CAST_AT..]).unwrap();
        let cast = Conversion {
            source: 0,
            offset: plain.offset + PLAIN as u64,
            bytes: 2 * CAST,
            at: CAST_AT,
            target_bytes: 4 * CAST,
            decoding: Decoding::Cast { from: Float::Bf16, to: Float::F32 },
            trim: (0, 0),
            final_cast: None,
        };
        groups.push(LayerGroup { class: 0, pieces: vec![plain], conversions: vec![cast] });
        expected.push(memory);
    }
    let source = write(folder.path(), &file);
    let arena = gpu.memory(0, slots * SLOT_BYTES, 0);
    let class = SlotClass { slots, prefetch: slots - 1, slot_bytes: SLOT_BYTES, shares_memory: false };
    let streamer = Streamer::new(
        engine(),
        StreamPlan { files: vec![source], groups, classes: vec![class], ..StreamPlan::default() },
        arena.region_mut(),
    )
    .unwrap();
    World { streamer, expected, arena, _folder: folder }
}

fn engine() -> Arc<Engine> {
    Arc::new(Engine::new(Config::default()).unwrap())
}

fn write(folder: &Path, bytes: &[u8]) -> VersionedFile {
    let path = folder.join("weights.bin");
    std::fs::write(&path, bytes).unwrap();
    VersionedFile::open(path).unwrap()
}

/// Whether a copy of the arena contains a group at this offset.
fn holds(arena: &[u8], at: usize, expected: &[u8]) -> bool {
    let slot = &arena[at..][..expected.len()];
    slot[..PLAIN] == expected[..PLAIN] && slot[CAST_AT..] == expected[CAST_AT..]
}

#[test]
fn groups_stream_through_gpu_memory() {
    let gpu = Gpu::new();
    for slots in [1, 2, 4] {
        let world = world(&gpu, 6, slots);
        world.streamer.warm_up();
        for step in 0..3 {
            for group in 0..6 {
                let at = world.streamer.acquire(group, None).unwrap().unwrap();
                assert!(holds(&gpu.peek(&world.arena), at, &world.expected[group]), "{slots} slots, {step}, {group}");
                assert!(world.streamer.release(group, StreamHandle::DEFAULT));
            }
        }
        assert!(slots == 1 || world.streamer.stats().fetches_ahead > 0);
        world.streamer.close();
    }
}

#[test]
fn a_slot_is_reused_after_its_stream() {
    let gpu = Gpu::new();
    // A single slot, since the fake driver copies whole allocations.
    let world = world(&gpu, 5, 1);
    let stream = gpu.stream(0);
    let seen: Vec<GpuMemory> = (0..10).map(|index| gpu.memory(0, world.arena.bytes, index)).collect();
    let mut places = Vec::new();
    for (call, seen) in seen.iter().enumerate() {
        let at = world.streamer.acquire(call % 5, None).unwrap().unwrap();
        // The kernel reads the slot long after its release.
        gpu.copy(stream, seen, &world.arena, 20_000);
        assert!(world.streamer.release(call % 5, stream));
        places.push(at);
    }
    world.streamer.close();
    gpu.end_stream(0, stream);
    for (call, seen) in seen.iter().enumerate() {
        assert!(holds(&gpu.peek(seen), places[call], &world.expected[call % 5]), "call {call}");
    }
}

#[test]
fn slots_share_memory_only_on_cpu() {
    let gpu = Gpu::new();
    let folder = tempfile::tempdir().unwrap();
    let source = write(folder.path(), &pattern(1, 20_000));
    let group = |class, bytes| LayerGroup {
        class,
        pieces: vec![Piece { source: 0, offset: 0, bytes, at: 0 }],
        conversions: Vec::new(),
    };
    let large = SlotClass { slots: 1, prefetch: 1, slot_bytes: 16_384, shares_memory: false };
    let small = SlotClass { slots: 4, prefetch: 2, slot_bytes: 4096, shares_memory: true };
    let groups = vec![group(0, 16_000), group(1, 4000)];
    let arena = gpu.memory(0, 16_384, 0);
    let refused = Streamer::new(
        engine(),
        StreamPlan { files: vec![source], groups, classes: vec![large, small], ..StreamPlan::default() },
        arena.region_mut(),
    )
    .unwrap_err();
    assert!(matches!(&refused, Error::Plan(why) if why.contains("on the host only")), "{refused}");
}
