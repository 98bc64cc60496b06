//! Whoever acquires a unit finds its bytes, in any order, from any thread, over disks that fail and files that change.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use deepnvme_io::backend::BackendKind;
use deepnvme_io::mem::{Buffer, Region, StreamHandle};
use deepnvme_io::{BackendFactory, Config, Engine, ErrorKind};
use deepnvme_stream::{Error, Piece, SlotClass, Source, Streamer, Unit};
use deepnvme_testkit::faults::{FaultPlan, Faults};
use proptest::prelude::*;

fn engine() -> Arc<Engine> {
    Arc::new(Engine::new(Config::default()).unwrap())
}

fn faulty(plan: FaultPlan) -> Arc<Engine> {
    let wrap = Faults::new(plan);
    let factory: BackendFactory =
        Arc::new(move |setup| Ok(Box::new(wrap.wrap(deepnvme_io::backend::open(BackendKind::Threads, setup)?))));
    Arc::new(Engine::with_backends(Config { workers: 2, ..Config::default() }, factory).unwrap())
}

fn random_file(folder: &Path, name: &str, bytes: usize) -> (PathBuf, Vec<u8>) {
    let mut data = vec![0; bytes];
    fastrand::Rng::with_seed(bytes as u64).fill(&mut data);
    let path = folder.join(name);
    std::fs::write(&path, &data).unwrap();
    (path, data)
}

/// The pieces of a unit: gap before it in the file, bytes, gap before it in the slot.
type Shape = Vec<(u64, usize, usize)>;

/// A model of random pieces of a file, and a streamer for it.
struct World {
    streamer: Arc<Streamer>,
    units: Vec<Unit>,
    arena: Region,
    data: Vec<u8>,
    path: PathBuf,
    _folder: tempfile::TempDir,
}

impl World {
    /// Units of those shapes.
    fn new(engine: Arc<Engine>, shapes: &[Shape], slots: usize, ahead: usize) -> Self {
        Self::in_turns(engine, &[(shapes, slots, ahead)])
    }

    /// Units of several classes, with slots and how far ahead, which share one piece of memory.
    fn in_turns(engine: Arc<Engine>, kinds: &[(&[Shape], usize, usize)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut offset = 0;
        let (mut units, mut classes) = (Vec::new(), Vec::new());
        for (class, (shapes, slots, ahead)) in kinds.iter().enumerate() {
            let mut slot_bytes = 4096;
            for shape in *shapes {
                let (mut pieces, mut at) = (Vec::new(), 0);
                for (gap, bytes, gap_in_slot) in shape {
                    offset += gap;
                    at += gap_in_slot;
                    pieces.push(Piece { source: 0, offset, bytes: *bytes, at });
                    offset += *bytes as u64;
                    at += bytes;
                }
                slot_bytes = slot_bytes.max(at.next_multiple_of(4096));
                units.push(Unit { class, pieces, conversions: Vec::new() });
            }
            classes.push(SlotClass { slots: *slots, ahead: *ahead, slot_bytes, shares: class > 0 });
        }
        let (path, data) = random_file(folder.path(), "weights.bin", offset as usize + 1);
        let bytes = classes.iter().map(|class| class.slots * class.slot_bytes).max().unwrap();
        let memory = Buffer::zeroed(bytes).unwrap().into_region();
        let arena = memory.region();
        let source = Source::open(path.clone()).unwrap();
        let streamer = Streamer::new(engine, vec![source], units.clone(), &classes, memory, 0).unwrap();
        Self { streamer: Arc::new(streamer), units, arena, data, path, _folder: folder }
    }

    /// Whether the slot at that place holds the unit.
    fn holds(&self, unit: usize, slot: usize) -> bool {
        self.units[unit].pieces.iter().all(|piece| {
            let mut bytes = vec![0; piece.bytes];
            self.arena.copy_to_slice(slot + piece.at, &mut bytes);
            bytes == self.data[piece.offset as usize..][..piece.bytes]
        })
    }

    fn use_unit(&self, unit: usize) -> Result<(), Error> {
        let slot = self.streamer.acquire(unit, None)?.unwrap();
        assert!(self.holds(unit, slot), "unit {unit}");
        assert!(self.streamer.release(unit, StreamHandle::DEFAULT));
        Ok(())
    }
}

fn shapes() -> impl Strategy<Value = Vec<Shape>> {
    let piece = (0..5000u64, prop_oneof![0..3000usize, 0..300_000usize], prop_oneof![Just(0usize), 0..5000usize]);
    proptest::collection::vec(proptest::collection::vec(piece, 0..5), 1..8)
}

#[test]
fn small_units_come_ahead_in_the_memory_of_a_large_one() {
    let (large, small) = (layers(1, 900_000), layers(12, 200_000));
    let world = World::in_turns(engine(), &[(&large, 1, 1), (&small, 4, 2)]);
    let mut before = 0;
    for step in 0..6 {
        // The large one is the first of the file and the last to be called for.
        for unit in (1..13).chain([0]) {
            world.use_unit(unit).unwrap();
        }
        let fetches = world.streamer.stats().fetches;
        assert!(step < 2 || fetches - before == 13, "each once in a step: {}", fetches - before);
        before = fetches;
    }
    let stats = world.streamer.stats();
    assert!(stats.fetches_ahead > 5 * 11, "{stats:?}");
}

fn layers(count: usize, bytes: usize) -> Vec<Shape> {
    vec![vec![(7, bytes, 0)]; count]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_units_in_any_order(
        shapes in shapes(), slots in 1..5usize, ahead in 0..4usize,
        order in proptest::collection::vec(any::<prop::sample::Index>(), 1..60),
    ) {
        let world = World::new(engine(), &shapes, slots, ahead.min(slots - 1));
        world.streamer.warm_up();
        for pick in order {
            world.use_unit(pick.index(shapes.len())).unwrap();
        }
    }

    #[test]
    fn units_that_have_memory_by_turns(
        large in shapes(), small in shapes(), slots in 1..5usize, ahead in 0..4usize, seed: u64, eio in prop_oneof![Just(0u32), 1..300u32],
        order in proptest::collection::vec(any::<prop::sample::Index>(), 1..60),
    ) {
        let plan = FaultPlan { seed, eio, short: 100, short_anywhere: true, slow: 50, reorder: true, ..FaultPlan::default() };
        let kinds = [(&large[..], 1, ahead.min(1)), (&small[..], slots, ahead.min(slots - 1))];
        let world = World::in_turns(faulty(plan), &kinds);
        for pick in order {
            match world.use_unit(pick.index(large.len() + small.len())) {
                Ok(()) => {}
                Err(error) => prop_assert!(eio > 0 && matches!(error, Error::Io(_)), "{error}"),
            }
        }
    }

    #[test]
    fn a_disk_that_stutters_is_waited_for_and_one_that_fails_is_an_error(
        shapes in shapes(), seed: u64, eio in prop_oneof![Just(0u32), 1..400u32],
        order in proptest::collection::vec(any::<prop::sample::Index>(), 1..40),
    ) {
        let plan = FaultPlan {
            seed, eio, short: 200, short_anywhere: true, eintr: 50, slow: 100, slow_max: Duration::from_millis(2),
            reorder: true, ..FaultPlan::default()
        };
        let world = World::new(faulty(plan), &shapes, 3, 2);
        for pick in order {
            match world.use_unit(pick.index(shapes.len())) {
                Ok(()) => {}
                Err(error) => prop_assert!(eio > 0 && matches!(error, Error::Io(_)), "{error}"),
            }
        }
    }
}

#[test]
fn threads_share_the_slots() {
    let world = Arc::new(World::new(engine(), &layers(9, 100_000), 6, 2));
    let threads: Vec<_> = (0..4)
        .map(|thread| {
            let world = Arc::clone(&world);
            std::thread::spawn(move || {
                for step in 0..60 {
                    world.use_unit((step * (thread + 1) + thread) % 9).unwrap();
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn what_stays_is_read_once_and_the_rest_once_a_step() {
    let world = World::new(engine(), &layers(10, 50_000), 6, 2);
    for _ in 0..5 {
        (0..10).for_each(|unit| world.use_unit(unit).unwrap());
    }
    let stats = world.streamer.stats();
    // 3 of 10 stay. Of the others, a few may have been fetched for the step that does not come, and a few more than
    // once where the processor was busy with something else.
    let steady = 5 * 7 + 3;
    assert!((steady - 3..=steady + 6).contains(&(stats.bytes_read / 50_000)), "{stats:?}");
    assert_eq!(stats.hits + stats.waits, 50);
    assert!(stats.fetches_ahead > 20 && stats.disk_busy > Duration::ZERO, "{stats:?}");
}

#[test]
fn a_unit_that_is_held_twice_is_released_twice() {
    let world = World::new(engine(), &layers(3, 10_000), 1, 0);
    let first = world.streamer.acquire(0, None).unwrap().unwrap();
    assert_eq!(world.streamer.acquire(0, None).unwrap(), Some(first));
    assert!(world.streamer.release(0, StreamHandle::DEFAULT));
    let busy = world.streamer.acquire(1, None).unwrap_err();
    assert!(busy.to_string().contains("unit 1 is called while all 1 slots"), "{busy}");
    assert!(world.streamer.release(0, StreamHandle::DEFAULT));
    assert!(!world.streamer.release(0, StreamHandle::DEFAULT), "that was one too many");
    world.use_unit(1).unwrap();
}

#[test]
fn a_file_that_changes_is_noticed() {
    type Change = fn(&Path);
    let changes: [(Change, &str); 3] = [
        (|path| std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(30_000).unwrap(), "it had"),
        (
            |path| {
                let copy = path.with_extension("new");
                std::fs::copy(path, &copy).unwrap();
                std::fs::rename(copy, path).unwrap();
            },
            "another file has its name",
        ),
        (
            |path| {
                let mut data = std::fs::read(path).unwrap();
                data[10] ^= 1;
                std::thread::sleep(Duration::from_millis(20)); // beyond the clock's grain for times of files
                std::fs::write(path, data).unwrap();
            },
            "it was written to",
        ),
    ];
    for (change, said) in changes {
        let world = World::new(engine(), &layers(4, 20_000), 2, 1);
        world.use_unit(0).unwrap();
        change(&world.path);
        let failed = (0..8).find_map(|call| world.use_unit((call + 2) % 4).err()).unwrap();
        let text = failed.to_string();
        assert!(text.contains(said) && text.contains("weights.bin") && text.contains("open the model again"), "{text}");
        assert!(world.use_unit(3).is_err(), "it does not come back");
    }
}

#[test]
fn a_missing_file_names_its_path() {
    let missing = Source::open(PathBuf::from("no/such/weights.bin")).unwrap_err();
    assert!(missing.to_string().contains("no/such/weights.bin"), "{missing}");
}

#[test]
fn a_plan_that_does_not_fit_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (path, _) = random_file(folder.path(), "weights.bin", 10_000);
    let unit = |at, bytes| Unit { pieces: vec![Piece { source: 0, offset: 0, bytes, at }], ..Unit::default() };
    let class = SlotClass { slots: 2, ahead: 1, slot_bytes: 8192, shares: false };
    let plans = [
        (vec![unit(0, 8193)], class, 16_384),
        (vec![unit(usize::MAX, 2)], class, 16_384),
        (vec![Unit { class: 1, ..unit(0, 1) }], class, 16_384),
        (vec![unit(0, 1)], class, 16_383),
        (vec![unit(0, 1)], SlotClass { ahead: 2, ..class }, 16_384),
        (vec![unit(0, 1)], SlotClass { slots: 0, ahead: 0, ..class }, 0),
        (vec![unit(0, 1)], SlotClass { slot_bytes: 8191, ..class }, 16_382),
        (vec![unit(0, 1)], SlotClass { slots: 1 << 60, ..class }, 16_384),
    ];
    for (units, class, bytes) in plans {
        let arena = Buffer::zeroed(bytes).unwrap().into_region();
        let source = Source::open(path.clone()).unwrap();
        let refused = Streamer::new(engine(), vec![source], units, &[class], arena, 0).unwrap_err();
        assert!(matches!(refused, Error::Plan(_)), "{refused}");
    }
}

#[test]
fn who_waits_may_stop_waiting_and_who_closes_ends_it() {
    let plan = FaultPlan { seed: 3, slow: 1000, slow_max: Duration::from_millis(200), ..FaultPlan::default() };
    let world = World::new(faulty(plan), &layers(4, 20_000), 2, 1);
    let mut slots = 0;
    while world.streamer.acquire(0, Some(Duration::from_millis(1))).unwrap().is_none() {
        slots += 1;
    }
    assert!(slots < 1000, "it comes in the end");
    world.streamer.close();
    assert!(matches!(world.streamer.acquire(1, None), Err(Error::Closed)));
    assert!(world.streamer.release(0, StreamHandle::DEFAULT), "what was held is released still");
}

#[test]
fn a_relative_name_means_the_same_file_after_a_change_of_folder() {
    // In a process of its own: the working folder is everybody's.
    if let Some(folder) = std::env::var_os("DEEPNVME_TEST_FOLDER") {
        std::env::set_current_dir(&folder).unwrap();
        let source = Source::open(PathBuf::from("weights.bin")).unwrap();
        let unit = Unit {
            class: 0,
            pieces: vec![Piece { source: 0, offset: 0, bytes: 4096, at: 0 }],
            conversions: Vec::new(),
        };
        let class = SlotClass { slots: 1, ahead: 0, slot_bytes: 4096, shares: false };
        let memory = Buffer::zeroed(4096).unwrap().into_region();
        let streamer = Streamer::new(engine(), vec![source], vec![unit], &[class], memory, 0).unwrap();
        std::env::set_current_dir("/").unwrap();
        streamer.acquire(0, None).unwrap();
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    random_file(folder.path(), "weights.bin", 5000);
    let mut again = std::process::Command::new(std::env::current_exe().unwrap());
    again.args(["--exact", "a_relative_name_means_the_same_file_after_a_change_of_folder"]);
    assert!(again.env("DEEPNVME_TEST_FOLDER", folder.path()).output().unwrap().status.success());
}

#[test]
fn what_failed_before_anybody_called_for_it_is_tried_again() {
    let folder = tempfile::tempdir().unwrap();
    let (path, data) = random_file(folder.path(), "weights.bin", 4 * 4096);
    let hidden = folder.path().join("hidden");
    let source = Source::open(path.clone()).unwrap();
    let piece = |unit: usize| Piece { source: 0, offset: (unit * 4096) as u64, bytes: 4096, at: 0 };
    let units = (0..4).map(|unit| Unit { class: 0, pieces: vec![piece(unit)], conversions: Vec::new() }).collect();
    let class = SlotClass { slots: 3, ahead: 2, slot_bytes: 4096, shares: false };
    let memory = Buffer::zeroed(3 * 4096).unwrap().into_region();
    let arena = memory.region();
    let streamer = Streamer::new(engine(), vec![source], units, &[class], memory, 0).unwrap();
    // For a moment the name is gone, as on a network file system that stutters.
    std::fs::rename(&path, &hidden).unwrap();
    streamer.warm_up();
    std::fs::rename(&hidden, &path).unwrap();
    for unit in 0..4 {
        let at = streamer.acquire(unit, None).unwrap().unwrap();
        let mut bytes = vec![0; 4096];
        arena.copy_to_slice(at, &mut bytes);
        assert!(bytes == data[unit * 4096..][..4096]);
        streamer.release(unit, StreamHandle::DEFAULT);
    }
}

#[test]
fn a_read_that_is_refused_gives_the_slot_back() {
    let folder = tempfile::tempdir().unwrap();
    let (path, _) = random_file(folder.path(), "weights", 4 * 4096);
    let engine = engine();
    let source = Source::open(path).unwrap();
    let piece = |unit: usize| Piece { source: 0, offset: (unit * 4096) as u64, bytes: 4096, at: 0 };
    let units = (0..4).map(|unit| Unit { class: 0, pieces: vec![piece(unit)], conversions: Vec::new() }).collect();
    let class = SlotClass { slots: 1, ahead: 0, slot_bytes: 8192, shares: false };
    let memory = Buffer::zeroed(8192).unwrap().into_region();
    let streamer = Streamer::new(Arc::clone(&engine), vec![source], units, &[class], memory, 0).unwrap();
    engine.close();
    for unit in [0, 1, 0] {
        let Err(Error::Io(refused)) = streamer.acquire(unit, None) else { panic!("the engine is closed") };
        assert_eq!(refused.kind(), ErrorKind::Closed, "{refused}");
    }
}
