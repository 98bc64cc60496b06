//! Packed, cast and quantised weights arrive decoded, next to unchanged ones.

#![allow(clippy::unwrap_used)]

use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use deepnvme_codec::quant::{CodeType, Scheme, dequantise, quantise};
use deepnvme_codec::{Float, cast, pack};
use deepnvme_file::VersionedFile;
use deepnvme_io::backend::BackendKind;
use deepnvme_io::mem::{Buffer, Region, StreamHandle};
use deepnvme_io::{BackendFactory, Config, Engine};
use deepnvme_stream::{Conversion, Decoding, Error, LayerGroup, Piece, SlotClass, StreamPlan, Streamer};
use deepnvme_testkit::faults::{FaultPlan, Faults};
use proptest::prelude::*;

fn weights(count: usize, random: &mut fastrand::Rng) -> Vec<u8> {
    let mut one = || (((random.f32() + random.f32() + random.f32() - 1.5) * 0.05).to_bits() >> 16) as u16;
    (0..count).flat_map(|_| one().to_le_bytes()).collect()
}

/// Encoding, rows and columns of the tensors of a group.
type Shape = Vec<(u8, usize, usize)>;

/// A file of encoded tensors, and their expected bytes in memory.
struct World {
    streamer: Streamer,
    arena: Region,
    /// For each group, the slot offset and the expected bytes of its tensors.
    expected: Vec<Vec<(usize, Vec<u8>)>>,
    path: std::path::PathBuf,
    _folder: tempfile::TempDir,
}

impl World {
    fn new(engine: Arc<Engine>, shapes: &[Shape], (slots, cache): (usize, u64), seed: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut random = fastrand::Rng::with_seed(seed);
        let mut file = vec![1, 2, 3];
        let (mut groups, mut expected, mut slot_bytes) = (Vec::new(), Vec::new(), 4096);
        for shape in shapes {
            let (mut group, mut tensors, mut at) = (LayerGroup::default(), Vec::new(), 0);
            for (form, rows, columns) in shape {
                let bytes = weights(rows * columns, &mut random);
                let offset = file.len() as u64;
                let (decoding, memory) = store(*form, *columns, &bytes, &mut file);
                let stored = file.len() - offset as usize;
                match decoding {
                    None => group.pieces.push(Piece { source: 0, offset, bytes: stored, at }),
                    Some(decoding) => group.conversions.push(Conversion {
                        source: 0,
                        offset,
                        bytes: stored,
                        at,
                        target_bytes: memory.len(),
                        decoding,
                        trim: (0, 0),
                        final_cast: None,
                    }),
                }
                let end = at + memory.len();
                tensors.push((at, memory));
                at = end.next_multiple_of(64);
            }
            slot_bytes = slot_bytes.max(at.next_multiple_of(4096));
            groups.push(group);
            expected.push(tensors);
        }
        let path = folder.path().join("weights.bin");
        std::fs::write(&path, &file).unwrap();
        let memory = Buffer::zeroed(slots * slot_bytes).unwrap().into_region();
        let arena = memory.region();
        let class = SlotClass { slots, prefetch: slots - 1, slot_bytes, shares_memory: false };
        let source = VersionedFile::open(path.clone()).unwrap();
        let streamer = Streamer::new(
            engine,
            StreamPlan { files: vec![source], groups, classes: vec![class], cache_bytes_max: cache },
            memory,
        )
        .unwrap();
        Self { streamer, arena, expected, path, _folder: folder }
    }

    fn use_group(&self, group: usize) -> Result<(), Error> {
        let slot = self.streamer.acquire(group, None)?.unwrap();
        for (at, expected) in &self.expected[group] {
            let mut bytes = vec![0; expected.len()];
            self.arena.copy_to_slice(slot + at, &mut bytes);
            assert!(bytes == *expected, "group {group}, at {at}");
        }
        self.streamer.release(group, StreamHandle::DEFAULT);
        Ok(())
    }
}

/// Appends an encoded tensor. Returns how it is decoded, and its expected bytes.
fn store(form: u8, columns: usize, bytes: &[u8], file: &mut Vec<u8>) -> (Option<Decoding>, Vec<u8>) {
    match form {
        0 => {
            file.extend(bytes);
            (None, bytes.to_vec())
        }
        1 => {
            for block in bytes.chunks(2 * 10_000) {
                pack::encode(Float::Bf16, block, file).unwrap();
            }
            (Some(Decoding::Unpack), bytes.to_vec())
        }
        2 => {
            file.extend(bytes);
            let mut wide = vec![0; bytes.len() * 2];
            cast::convert(Float::Bf16, Float::F32, bytes, &mut wide).unwrap();
            (Some(Decoding::Cast { from: Float::Bf16, to: Float::F32 }), wide)
        }
        _ => {
            let scheme = Scheme { code: CodeType::Int8, group: NonZeroUsize::new(64), scale: Float::Bf16 };
            let rows = bytes.len() / 2 / columns;
            let mut stored = vec![0; scheme.scales(rows, columns).unwrap() * 2 + rows * columns];
            let (scales, codes) = stored.split_at_mut(scheme.scales(rows, columns).unwrap() * 2);
            quantise(scheme, columns, (Float::Bf16, bytes), codes, scales).unwrap();
            let mut memory = vec![0; bytes.len()];
            dequantise(scheme, columns, codes, scales, (Float::Bf16, &mut memory)).unwrap();
            file.extend(stored);
            (Some(Decoding::Dequantise { scheme, columns, part_rows: rows, to: Float::Bf16 }), memory)
        }
    }
}

fn engine(plan: Option<FaultPlan>) -> Arc<Engine> {
    let Some(plan) = plan else { return Arc::new(Engine::new(Config::default()).unwrap()) };
    let wrap = Faults::new(plan);
    let factory: BackendFactory =
        Arc::new(move |setup| Ok(Box::new(wrap.wrap(deepnvme_io::backend::open(BackendKind::Threads, setup)?))));
    Arc::new(Engine::with_backends(Config { workers: 2, ..Config::default() }, factory).unwrap())
}

fn shapes() -> impl Strategy<Value = Vec<Shape>> {
    let tensor = (0..4u8, 1..40usize, 1..2000usize);
    proptest::collection::vec(proptest::collection::vec(tensor, 1..5), 1..6)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn every_form_arrives(
        shapes in shapes(), slots in 1..4usize, cache in 0..400_000u64, seed: u64,
        order in proptest::collection::vec(any::<prop::sample::Index>(), 1..40),
    ) {
        let world = World::new(engine(None), &shapes, (slots, cache), seed);
        world.streamer.warm_up();
        for pick in order {
            world.use_group(pick.index(shapes.len())).unwrap();
        }
    }

    #[test]
    fn a_failing_disk_is_an_error_and_the_slot_is_reused(
        shapes in shapes(), cache in 0..400_000u64, seed: u64, eio in 0..300u32,
        order in proptest::collection::vec(any::<prop::sample::Index>(), 1..30),
    ) {
        let plan = FaultPlan {
            seed, eio, short: 200, slow: 100, slow_max: Duration::from_millis(2), reorder: true, ..FaultPlan::default()
        };
        let world = World::new(engine(Some(plan)), &shapes, (2, cache), seed);
        for pick in order {
            if let Err(error) = world.use_group(pick.index(shapes.len())) {
                prop_assert!(eio > 0 && matches!(error, Error::Io(_)), "{error}");
            }
        }
    }
}

/// Six groups, each with two encoded tensors and a plain one.
fn six_units() -> Vec<Shape> {
    (1..=6).map(|index| vec![(2, 40, 1000), (0, 10, 10), (1 + index % 3, 30, 1000)]).collect()
}

#[test]
fn cached_weights_are_read_once() {
    let plain = World::new(engine(None), &six_units(), (1, 0), 9);
    let bytes = |world: &World| {
        let before = world.streamer.stats().bytes_read;
        (0..6).for_each(|group| world.use_group(group).unwrap());
        world.streamer.stats().bytes_read - before
    };
    let all = bytes(&plain);
    assert_eq!(
        (plain.streamer.cache_bytes(), plain.streamer.groups().iter().map(LayerGroup::bytes).sum::<u64>()),
        (0, all)
    );
    for memory in [100_000, 400_000, u64::MAX] {
        let world = World::new(engine(None), &six_units(), (1, memory), 9);
        assert!(world.streamer.cache_bytes() <= memory);
        assert_eq!(bytes(&world), all, "everything once");
        let (second, third) = (bytes(&world), bytes(&world));
        // Cache entries are whole blocks, plus one if the range begins inside a block.
        let kept = world.streamer.cache_bytes();
        let spared = |read: u64| (kept.saturating_sub(12 * 2 * 4096)..=kept).contains(&(all - read));
        assert!(spared(second) && second == third, "{memory}: {second} and {third} of {all} for {kept}");
        if memory == u64::MAX {
            assert_eq!(third, 6 * 200, "what is not converted");
        }
    }
}

#[test]
fn a_replaced_file_is_noticed_even_if_fully_cached() {
    let shapes: Vec<Shape> = (0..4).map(|_| vec![(2, 20, 1000)]).collect();
    let world = World::new(engine(None), &shapes, (1, u64::MAX), 3);
    for group in [0, 1, 2, 3, 0, 1] {
        world.use_group(group).unwrap();
    }
    overwrite(&world.path, &std::fs::read(&world.path).unwrap());
    let changed = world.use_group(2).unwrap_err();
    assert!(matches!(changed, Error::Changed { .. }), "{changed}");
}

#[test]
fn several_threads_use_one_cache() {
    let world = World::new(engine(None), &six_units(), (4, 300_000), 11);
    std::thread::scope(|scope| {
        for first in 0..3 {
            let world = &world;
            scope.spawn(move || (0..30).for_each(|step| world.use_group((first * 2 + step) % 6).unwrap()));
        }
    });
}

#[test]
fn damaged_weights_are_an_error_with_their_place() {
    let world = World::new(engine(None), &[vec![(1, 30, 1000)], vec![(0, 10, 10)]], (1, 0), 5);
    let mut file = std::fs::read(&world.path).unwrap();
    file[3] ^= 0xff; // the first byte of the first block's header
    let again = World::new(engine(None), &[vec![(1, 30, 1000)], vec![(0, 10, 10)]], (1, 0), 5);
    overwrite(&again.path, &file);
    let damaged = again.use_group(0).unwrap_err();
    let text = damaged.to_string();
    // Either the changed file is detected or the damage; here, the change is detected first.
    assert!(text.contains("it was written to"), "{text}");
    let source = VersionedFile::open(again.path).unwrap();
    let group = LayerGroup {
        conversions: vec![Conversion {
            source: 0,
            offset: 3,
            bytes: file.len() - 3 - 200,
            at: 0,
            target_bytes: 60_000,
            decoding: Decoding::Unpack,
            trim: (0, 0),
            final_cast: None,
        }],
        ..LayerGroup::default()
    };
    let class = SlotClass { slots: 1, prefetch: 0, slot_bytes: 61_440, shares_memory: false };
    let arena = Buffer::zeroed(61_440).unwrap().into_region();
    let streamer = Streamer::new(
        engine(None),
        StreamPlan { files: vec![source], groups: vec![group], classes: vec![class], ..StreamPlan::default() },
        arena,
    )
    .unwrap();
    let damaged = streamer.acquire(0, None).unwrap_err();
    assert!(matches!(damaged, Error::Corrupt { offset: 3, .. }), "{damaged}");
    assert!(damaged.to_string().contains("weights.bin") && damaged.to_string().contains("restore"), "{damaged}");
}

fn overwrite(path: &Path, bytes: &[u8]) {
    std::thread::sleep(Duration::from_millis(20)); // longer than the resolution of file times
    std::fs::write(path, bytes).unwrap();
}
