//! Every borrow finds an item's latest bytes: over any disk, from any thread, in bounded memory.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use deepnvme_io::backend::BackendKind;
use deepnvme_io::mem::{Buffer, Region};
use deepnvme_io::{BackendFactory, Config, Engine, ErrorKind};
use deepnvme_swap::{AttachedRange, Borrowed, Error, FileRange, Options, Swapper};
use deepnvme_testkit::faults::{FaultPlan, Faults};
use deepnvme_testkit::watchdog::guard;
use proptest::prelude::*;

const KIB: usize = 1 << 10;
const LIMIT: Duration = Duration::from_secs(240);

fn engine() -> Arc<Engine> {
    Arc::new(Engine::new(Config { workers: 2, block_bytes: 16 << 10, ..Config::default() }).unwrap())
}

fn faulty(plan: FaultPlan) -> (Arc<Engine>, Faults) {
    let faults = Faults::new(plan);
    let wrap = faults.clone();
    let factory: BackendFactory =
        Arc::new(move |setup| Ok(Box::new(wrap.wrap(deepnvme_io::backend::open(BackendKind::Threads, setup)?))));
    let config = Config { workers: 2, block_bytes: 16 << 10, ..Config::default() };
    (Arc::new(Engine::with_backends(config, factory).unwrap()), faults)
}

fn random(seed: u64, bytes: usize) -> Vec<u8> {
    let mut data = vec![0; bytes];
    fastrand_fill(seed, &mut data);
    data
}

fn fastrand_fill(seed: u64, data: &mut [u8]) {
    let mut rng = deepnvme_testkit::rng::Rng::keyed(seed, &[data.len() as u64]);
    for chunk in data.chunks_mut(8) {
        let word = rng.below(u64::MAX).to_ne_bytes();
        chunk.copy_from_slice(&word[..chunk.len()]);
    }
}

fn never() -> impl FnMut() -> bool {
    || false
}

fn bytes_of(borrowed: &Borrowed) -> Vec<u8> {
    let mut bytes = vec![0; borrowed.len()];
    borrowed.region().copy_to_slice(0, &mut bytes);
    bytes
}

fn read(swapper: &Swapper, key: &str) -> Vec<u8> {
    bytes_of(&swapper.borrow(key, false, &mut never()).unwrap())
}

fn change(swapper: &Swapper, key: &str, data: &[u8]) {
    swapper.borrow(key, true, &mut never()).unwrap().target().copy_from_slice(0, data);
}

struct World {
    swapper: Arc<Swapper>,
    folder: tempfile::TempDir,
}

fn world(engine: Arc<Engine>, memory_bytes: usize, adjust: impl FnOnce(&mut Options)) -> World {
    let folder = tempfile::tempdir().unwrap();
    let mut options = Options::new(folder.path(), memory_bytes);
    adjust(&mut options);
    World { swapper: Arc::new(Swapper::new(engine, &options).unwrap()), folder }
}

#[derive(Clone, Debug)]
enum Step {
    Put(usize, usize),
    Change(usize),
    Read(usize),
    Leave(usize),
    Delete(usize),
    ReadAt(usize, usize, usize),
    WriteAt(usize, usize, usize),
    Prefetch(Vec<usize>),
    Schedule(Vec<usize>),
    Flush,
    Export(usize),
    Import(usize, usize),
}

fn step() -> impl Strategy<Value = Step> {
    let key = 0_usize..8;
    prop_oneof![
        4 => (key.clone(), 0_usize..40_000).prop_map(|(key, bytes)| Step::Put(key, bytes)),
        4 => key.clone().prop_map(Step::Change),
        4 => key.clone().prop_map(Step::Read),
        1 => key.clone().prop_map(Step::Leave),
        1 => key.clone().prop_map(Step::Delete),
        3 => (key.clone(), any::<usize>(), any::<usize>()).prop_map(|(key, from, bytes)| Step::ReadAt(key, from, bytes)),
        3 => (key.clone(), any::<usize>(), any::<usize>()).prop_map(|(key, from, bytes)| Step::WriteAt(key, from, bytes)),
        1 => prop::collection::vec(key.clone(), 0..5).prop_map(Step::Prefetch),
        1 => prop::collection::vec(key.clone(), 0..12).prop_map(Step::Schedule),
        1 => Just(Step::Flush),
        1 => key.clone().prop_map(Step::Export),
        1 => (key, 0_usize..30_000).prop_map(|(key, bytes)| Step::Import(key, bytes)),
    ]
}

fn part(len: usize, from: usize, bytes: usize) -> std::ops::Range<usize> {
    let from = from % (len + 1);
    from..from + bytes % (len - from + 1)
}

fn play(world: &World, steps: Vec<Step>) {
    let swapper = &world.swapper;
    let mut model: HashMap<String, Vec<u8>> = HashMap::new();
    for (turn, step) in steps.into_iter().enumerate() {
        let seed = turn as u64;
        match step {
            Step::Put(key, bytes) => {
                let data = random(seed, bytes);
                swapper.put(&key.to_string(), &Region::from_vec(data.clone())).unwrap();
                model.insert(key.to_string(), data);
            }
            Step::Change(key) => {
                if let Some(data) = model.get_mut(&key.to_string()) {
                    *data = random(seed, data.len());
                    change(swapper, &key.to_string(), data);
                }
            }
            Step::Read(key) => {
                let key = key.to_string();
                match model.get(&key) {
                    Some(data) => assert!(read(swapper, &key) == *data, "{key} in turn {turn}"),
                    None => assert!(matches!(swapper.borrow(&key, false, &mut never()), Err(Error::NotFound { .. }))),
                }
            }
            Step::Leave(key) => {
                if model.contains_key(&key.to_string()) {
                    swapper.borrow(&key.to_string(), true, &mut never()).unwrap().mark_clean();
                }
            }
            Step::Delete(key) => {
                let is_there = model.remove(&key.to_string()).is_some();
                assert_eq!(swapper.delete(&key.to_string()).is_ok(), is_there);
            }
            Step::ReadAt(key, from, bytes) => {
                if let Some(data) = model.get(&key.to_string()) {
                    let range = part(data.len(), from, bytes);
                    let out = Buffer::zeroed(range.len()).unwrap().into_region();
                    let seen = out.region();
                    let borrowed = swapper.access(&key.to_string(), false, &mut never()).unwrap();
                    borrowed.read_at(range.start, out).unwrap();
                    let mut found = vec![0; range.len()];
                    seen.copy_to_slice(0, &mut found);
                    assert!(found == data[range]);
                }
            }
            Step::WriteAt(key, from, bytes) => {
                if let Some(data) = model.get_mut(&key.to_string()) {
                    let range = part(data.len(), from, bytes);
                    data[range.clone()].copy_from_slice(&random(seed, range.len()));
                    let borrowed = swapper.access(&key.to_string(), true, &mut never()).unwrap();
                    borrowed.write_at(range.start, &Region::from_vec(data[range.clone()].to_vec())).unwrap();
                }
            }
            Step::Prefetch(keys) => {
                let keys: Vec<String> = keys.iter().map(usize::to_string).collect();
                let are_there = keys.iter().all(|key| model.contains_key(key));
                assert_eq!(swapper.prefetch(keys.iter().map(String::as_str)).is_ok(), are_there);
            }
            Step::Schedule(keys) => {
                let keys: Vec<String> = keys.iter().map(usize::to_string).collect();
                swapper.schedule(keys.iter().map(String::as_str), turn % 2 == 0).unwrap();
            }
            Step::Flush => swapper.flush(None, &mut never()).unwrap(),
            Step::Export(key) => {
                if let Some(data) = model.get(&key.to_string()) {
                    let path = world.folder.path().join("export");
                    let file = std::fs::File::create(&path).unwrap();
                    let at = [0, 4096, 77][turn % 3];
                    let copied = swapper.export(&key.to_string(), file.as_fd(), at, &mut never()).unwrap();
                    assert_eq!(copied.shared_bytes + copied.kernel_bytes + copied.memory_bytes, data.len() as u64);
                    let found = std::fs::read(&path).unwrap();
                    assert!(found.get(at as usize..).unwrap_or_default() == *data);
                }
            }
            Step::Import(key, bytes) => {
                let path = world.folder.path().join("import");
                let data = random(seed, bytes + 100);
                std::fs::write(&path, &data).unwrap();
                let file = std::fs::File::open(&path).unwrap();
                let range = FileRange { file: file.as_fd(), offset: 100, bytes };
                swapper.import(&key.to_string(), "", &range, &mut never()).unwrap();
                model.insert(key.to_string(), data[100..].to_vec());
            }
        }
        let stats = swapper.stats();
        assert!(stats.resident_bytes_peak <= stats.memory_bytes);
        assert_eq!(stats.items, model.len() as u64);
    }
    for (key, data) in &model {
        assert!(read(swapper, key) == *data, "{key} in the end");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn it_behaves_like_a_map(steps in prop::collection::vec(step(), 1..70), pages in 10_usize..30, has_checksums: bool, prefetch in 0_usize..20, headroom in 0_usize..20) {
        guard("it_behaves_like_a_map", LIMIT, || {
            let world = world(engine(), pages * 4096, |options| {
                options.has_checksums = has_checksums;
                options.prefetch_bytes = Some(prefetch * 4096);
                options.headroom_bytes = Some(headroom * 4096);
            });
            play(&world, steps);
        });
    }

    /// Interruptions and short transfers, which the engine hides, in any order.
    #[test]
    fn short_and_interrupted_transfers_change_nothing(steps in prop::collection::vec(step(), 1..40), seed: u64) {
        guard("short_and_interrupted_transfers_change_nothing", LIMIT, || {
            let plan = FaultPlan { seed, short: 200, eintr: 50, eagain: 50, reorder: true, slow: 100, slow_max: Duration::from_millis(2), ..FaultPlan::default() };
            play(&world(faulty(plan).0, 14 * 4096, |_| {}), steps);
        });
    }
}

/// Every call succeeds or fails as the disk did; no accepted byte is lost.
#[test]
fn a_failing_disk_loses_nothing_in_memory() {
    guard("a_failing_disk_loses_nothing", LIMIT, || {
        let mut failures = 0;
        for seed in 0..25 {
            let plan = FaultPlan { seed, eio: 120, enospc: 60, ..FaultPlan::default() };
            let (engine, faults) = faulty(plan);
            let world = world(engine, 6 * 4096, |options| options.has_checksums = seed % 2 == 0);
            let swapper = &world.swapper;
            let mut model: HashMap<String, Vec<u8>> = HashMap::new();
            for turn in 0..120_u64 {
                let mut rng = deepnvme_testkit::rng::Rng::keyed(seed, &[turn]);
                let key = rng.below(10).to_string();
                let data = random(turn, 5000);
                match rng.below(4) {
                    // A failed put leaves the old item or none.
                    0 => match swapper.put(&key, &Region::from_vec(data.clone())) {
                        Ok(()) => drop(model.insert(key, data)),
                        Err(error) => check_failure(&error, &mut failures),
                    },
                    1 => match swapper.borrow(&key, true, &mut never()) {
                        Ok(borrowed) => {
                            assert!(bytes_of(&borrowed) == model[&key], "seed {seed}, turn {turn}");
                            borrowed.target().copy_from_slice(0, &data);
                            model.insert(key, data);
                        }
                        Err(Error::NotFound { .. }) => assert!(!model.contains_key(&key)),
                        Err(error) => check_failure(&error, &mut failures),
                    },
                    2 => match swapper.borrow(&key, false, &mut never()) {
                        Ok(borrowed) => assert!(bytes_of(&borrowed) == model[&key], "seed {seed}, turn {turn}"),
                        Err(Error::NotFound { .. }) => assert!(!model.contains_key(&key)),
                        Err(error) => check_failure(&error, &mut failures),
                    },
                    _ => {
                        if let Err(error) = swapper.flush(None, &mut never()) {
                            check_failure(&error, &mut failures);
                        }
                    }
                }
            }
            // The disk fails only sometimes, so every item can be read in the end.
            for (key, data) in &model {
                let borrowed = (0..200).find_map(|_| swapper.borrow(key, false, &mut never()).ok());
                assert!(bytes_of(&borrowed.expect("it is readable in the end")) == *data, "seed {seed}");
            }
            assert!(faults.counts().fatal() > 0, "seed {seed} injected nothing");
        }
        assert!(failures > 20, "only {failures} calls failed");
    });
}

fn check_failure(error: &Error, failures: &mut u32) {
    let Error::Io(error) = error else { panic!("{error}") };
    assert!(matches!(error.kind(), ErrorKind::Io | ErrorKind::NoSpace) && error.path().is_some(), "{error}");
    *failures += 1;
}

#[test]
fn a_dead_disk_is_an_error_and_blocks_nobody() {
    guard("a_dead_disk", LIMIT, || {
        let (engine, _) = faulty(FaultPlan { eio_after_ops: Some(0), ..FaultPlan::default() });
        let world = world(engine, 4 * 4096, |_| {});
        for key in ["a", "b", "c", "d"] {
            world.swapper.put(key, &Region::from_vec(random(1, 4096))).unwrap();
        }
        for _ in 0..3 {
            let refused = world.swapper.put("e", &Region::from_vec(random(2, 4096))).unwrap_err();
            assert!(matches!(refused, Error::Io(_)), "{refused}");
            assert!(matches!(world.swapper.flush(None, &mut never()), Err(Error::Io(_))));
            assert!(read(&world.swapper, "a") == random(1, 4096), "items in memory stay readable");
        }
        assert!(!world.swapper.contains("e"));
    });
}

#[test]
fn damage_on_disk_is_found() {
    let world = world(engine(), 4 * 4096, |options| (options.has_checksums, options.is_named) = (true, true));
    let swapper = &world.swapper;
    swapper.put("victim", &Region::from_vec(random(1, 10_000))).unwrap();
    let part = swapper.extents("victim", &mut never()).unwrap().remove(0);
    swapper.put("other", &Region::from_vec(random(2, 16_000))).unwrap();
    assert!(swapper.stats().evictions > 0, "the victim is on disk only");
    use std::os::unix::fs::FileExt;
    std::fs::File::options().write(true).open(&part.path).unwrap().write_all_at(b"!", part.offset + 5000).unwrap();
    let Err(Error::Corrupt { path, key, offset, .. }) = swapper.borrow("victim", false, &mut never()) else { panic!() };
    assert_eq!((path, key.as_str(), offset), (part.path, "victim", part.offset));
    swapper.put("victim", &Region::from_vec(random(3, 10_000))).unwrap();
    assert!(read(swapper, "victim") == random(3, 10_000), "the key can be put again");
}

#[test]
fn borrowing_too_much_is_a_deadlock() {
    let world = world(engine(), 4 * 4096, |_| {});
    let swapper = &world.swapper;
    for key in 0..6 {
        swapper.put(&key.to_string(), &Region::from_vec(vec![key; 4096])).unwrap();
    }
    let held: Vec<Borrowed> =
        (0..4).map(|key| swapper.borrow(&key.to_string(), key % 2 == 0, &mut never()).unwrap()).collect();
    let Err(Error::Deadlock(text)) = swapper.borrow("4", false, &mut never()) else { panic!() };
    assert!(text.contains("4 items are borrowed, 4 of them by this thread"), "{text}");
    let Err(Error::Deadlock(text)) = swapper.borrow("0", false, &mut never()) else { panic!() };
    assert!(text.contains("return it first"), "{text}");
    assert!(matches!(swapper.put("7", &Region::from_vec(vec![0])), Err(Error::Deadlock(_))));
    assert!(matches!(swapper.flush(None, &mut never()), Err(Error::Deadlock(_))));
    drop(swapper.borrow("1", false, &mut never()).unwrap());
    drop(held);
    assert_eq!(read(swapper, "4"), [4; 4096]);
    swapper.flush(None, &mut never()).unwrap();
}

#[test]
fn a_thread_without_borrows_waits_for_memory() {
    guard("a_thread_without_borrows_waits", LIMIT, || {
        let world = world(engine(), 2 * 4096, |_| {});
        for key in 0..4_u8 {
            world.swapper.put(&key.to_string(), &Region::from_vec(vec![key; 4096])).unwrap();
        }
        let held = [0, 1].map(|key| world.swapper.borrow(&key.to_string(), true, &mut never()).unwrap());
        let (swapper, (begun, begins)) = (Arc::clone(&world.swapper), std::sync::mpsc::channel());
        let waits = std::thread::spawn(move || {
            let borrowed = swapper.borrow("2", false, &mut || {
                let _ = begun.send(());
                false
            });
            bytes_of(&borrowed.unwrap())
        });
        begins.recv().unwrap();
        drop(held);
        assert_eq!(waits.join().unwrap(), [2; 4096]);
    });
}

#[test]
fn no_increment_of_a_thread_is_lost() {
    guard("no_increment_of_a_thread_is_lost", LIMIT, || {
        let world = world(engine(), 5 * 4096, |_| {});
        let swapper = &world.swapper;
        for key in 0..9 {
            swapper.put(&key.to_string(), &Region::from_vec(vec![0; 4096 + key])).unwrap();
        }
        std::thread::scope(|scope| {
            for thread in 0..4_u64 {
                scope.spawn(move || {
                    for turn in 0..120 {
                        let key = deepnvme_testkit::rng::Rng::keyed(thread, &[turn]).below(9).to_string();
                        if turn % 5 == 0 {
                            swapper.prefetch([key.as_str()]).unwrap();
                        }
                        let borrowed = swapper.borrow(&key, true, &mut never()).unwrap();
                        let mut count = [0; 4];
                        borrowed.region().copy_to_slice(0, &mut count);
                        borrowed.target().copy_from_slice(0, &(u32::from_ne_bytes(count) + 1).to_ne_bytes());
                    }
                });
            }
        });
        let count = |key: usize| u32::from_ne_bytes(read(swapper, &key.to_string())[..4].try_into().unwrap());
        assert_eq!((0..9).map(count).sum::<u32>(), 4 * 120);
        let stats = swapper.stats();
        assert!(stats.resident_bytes_peak <= 5 * 4096 && stats.evictions > 0 && stats.write_backs > 0, "{stats:?}");
        assert_eq!(stats.hits + stats.waits, 9 + 480 + 9);
    });
}

#[test]
fn attached_items_are_read_in_place_and_never_written() {
    let world = world(engine(), 8 * 4096, |_| {});
    let swapper = &world.swapper;
    let (path, data) = (world.folder.path().join("weights"), random(5, 60_000));
    std::fs::write(&path, &data).unwrap();
    let target = path.clone().into();
    let attach = |key: &str, offset: usize, bytes| {
        swapper.attach(
            key,
            "a label",
            &AttachedRange { target: &target, offset: offset as u64, bytes, element_bytes: 8 },
        )
    };
    for (index, offset) in [0, 4096, 12_344, 20_001].into_iter().enumerate() {
        attach(&index.to_string(), offset, 17_000).unwrap();
    }
    for _ in 0..2 {
        for (index, offset) in [0, 4096, 12_344, 20_001].into_iter().enumerate() {
            let borrowed = swapper.borrow(&index.to_string(), false, &mut never()).unwrap();
            assert!(bytes_of(&borrowed) == data[offset..offset + 17_000]);
            assert_eq!(borrowed.offset().unwrap() % 8, 0, "elements are aligned");
        }
    }
    assert!(matches!(swapper.borrow("1", true, &mut never()), Err(Error::ReadOnly { .. })));
    assert!(matches!(attach("beyond", 50_000, 10_001), Err(Error::Invalid(_))));
    assert!(swapper.stats().bytes_written == 0 && swapper.stats().stored_bytes == 0);
    let part = swapper.extents("2", &mut never()).unwrap().remove(0);
    assert_eq!((part.path.as_path(), part.offset, part.bytes), (path.as_path(), 12_344, 17_000));
    swapper.put("1", &Region::from_vec(vec![1; 10])).unwrap();
    assert_eq!(read(swapper, "1"), [1; 10]);
    assert!(std::fs::read(&path).unwrap() == data);
}

#[test]
fn too_large_items_name_the_memory_needed() {
    let world = world(engine(), 4 * 4096, |_| {});
    let Err(Error::TooLarge { enough_bytes, .. }) =
        world.swapper.put("large", &Region::from_vec(vec![0; 5 * 4096 - 1]))
    else {
        panic!()
    };
    assert_eq!(enough_bytes, 5 * 4096);
    assert!(Swapper::new(engine(), &Options::new(world.folder.path(), 4095)).is_err());
}

#[test]
fn deleting_an_item_frees_its_space_at_once() {
    let world = world(engine(), 4 * 4096, |_| {});
    for turn in 0..200_u64 {
        world.swapper.put("a", &Region::from_vec(random(turn, 3 * 4096))).unwrap();
        world.swapper.put("b", &Region::from_vec(random(turn, 2 * 4096))).unwrap();
        world.swapper.delete("a").unwrap();
        world.swapper.delete("b").unwrap();
        assert!(world.swapper.stats().file_bytes <= 16 * 4096);
    }
}

#[test]
fn several_folders_stripe_the_items() {
    let second = tempfile::tempdir().unwrap();
    let world = world(engine(), 8 * 4096, |options| {
        options.folders.push(second.path().to_path_buf());
        options.stripe_bytes = 4096;
    });
    for key in 0..8_u64 {
        world.swapper.put(&key.to_string(), &Region::from_vec(random(key, 20 * KIB))).unwrap();
    }
    assert!(world.swapper.extents("0", &mut never()).unwrap().len() > 1);
    for key in 0..8_u64 {
        assert!(read(&world.swapper, &key.to_string()) == random(key, 20 * KIB));
    }
}

#[test]
fn closing_ends_waits() {
    guard("closing_ends_waits", LIMIT, || {
        let world = world(engine(), 4096, |_| {});
        for key in ["a", "b"] {
            world.swapper.put(key, &Region::from_vec(vec![1; 4096])).unwrap();
        }
        let held = world.swapper.borrow("a", false, &mut never()).unwrap();
        let (swapper, (begun, begins)) = (Arc::clone(&world.swapper), std::sync::mpsc::channel());
        let waits = std::thread::spawn(move || swapper.borrow("b", false, &mut || begun.send(()).is_err()).map(drop));
        begins.recv().unwrap();
        world.swapper.close();
        assert!(matches!(waits.join().unwrap(), Err(Error::Closed(_))));
        assert_eq!(bytes_of(&held)[0], 1, "borrowed memory stays valid");
        drop(held);
        assert!(matches!(world.swapper.put("c", &Region::from_vec(vec![1])), Err(Error::Closed(_))));
        assert_eq!(std::fs::read_dir(world.folder.path()).unwrap().count(), 0);
    });
}

#[test]
fn created_items_exist_only_after_their_commit() {
    let world = world(engine(), 256 * KIB, |_| {});
    let swapper = &world.swapper;
    let (first, second) = (random(1, 20_000), random(2, 20_000));
    for bytes in [20_000, 30_000] {
        // Over no item, and over one of the same or another size.
        swapper.create("a", bytes, &mut never()).unwrap().target().copy_from_slice(0, &first);
        assert!(matches!(swapper.borrow("a", false, &mut never()), Err(Error::NotFound { .. })));
        swapper.put("a", &Region::from_vec(first.clone())).unwrap();
        drop(swapper.create("a", bytes, &mut never()).unwrap());
        assert!(!swapper.contains("a") && swapper.keys().is_empty());
    }
    let filled = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let borrowed = swapper.create("a", 20_000, &mut never()).unwrap();
        borrowed.target().copy_from_slice(0, &first);
        panic!("half way");
    }));
    assert!(filled.is_err() && !swapper.contains("a"));
    let borrowed = swapper.create("a", 20_000, &mut never()).unwrap();
    borrowed.target().copy_from_slice(0, &second);
    borrowed.commit_as("bytes of mine");
    assert_eq!(&*swapper.borrow("a", false, &mut never()).unwrap().label(), "bytes of mine");
    assert_eq!(read(swapper, "a"), second);
    swapper.flush(None, &mut never()).unwrap();
    assert_eq!((swapper.stats().items, swapper.stats().stored_bytes), (1, 20_480), "all other space was freed");
}

#[test]
fn waiters_for_an_abandoned_item_find_nothing() {
    guard("waiters_for_an_abandoned_item", LIMIT, || {
        let world = world(engine(), 256 * KIB, |_| {});
        let borrowed = world.swapper.create("a", 20_000, &mut never()).unwrap();
        let (swapper, (begun, begins)) = (Arc::clone(&world.swapper), std::sync::mpsc::channel());
        let mut is_cancelled = move || begun.send(()).is_err();
        let waits = std::thread::spawn(move || swapper.borrow("a", false, &mut is_cancelled).map(drop));
        begins.recv().unwrap();
        drop(borrowed);
        assert!(matches!(waits.join().unwrap(), Err(Error::NotFound { .. })));
    });
}

/// A flush that waits for a state that has passed would wait until some other call happens to write the item.
#[test]
fn a_flush_beside_other_threads_ends() {
    guard("a_flush_beside_other_threads_ends", LIMIT, || {
        for turn in 0..60_u8 {
            let world = world(engine(), 64 * 4096, |options| options.has_checksums = turn % 3 == 2);
            let swapper = &world.swapper;
            let keys: Vec<String> = (0..10).map(|key| key.to_string()).collect();
            for key in &keys {
                swapper.put(key, &Region::from_vec(vec![turn; 12_000])).unwrap();
            }
            std::thread::scope(|scope| {
                // Another thread may end while the flush waits, and no call of anybody follows.
                scope.spawn(|| {
                    for use_index in 0..300 {
                        let key = &keys[use_index % keys.len()];
                        match use_index % 7 {
                            5 => swapper.put(key, &Region::from_vec(vec![turn; 12_000])).unwrap(),
                            6 => swapper.prefetch([key.as_str()]).unwrap(),
                            _ => drop(swapper.borrow(key, true, &mut never()).unwrap()),
                        }
                    }
                });
                swapper.flush(None, &mut never()).unwrap();
            });
        }
    });
}

#[test]
fn threads_that_never_pause_do_not_hold_up_a_flush() {
    guard("threads_that_never_pause", LIMIT, || {
        for has_checksums in [false, true] {
            let world = world(engine(), 64 * 4096, |options| options.has_checksums = has_checksums);
            let swapper = &world.swapper;
            for key in ["a", "b"] {
                swapper.put(key, &Region::from_vec(vec![0; 12_000])).unwrap();
            }
            let is_over = std::sync::atomic::AtomicBool::new(false);
            std::thread::scope(|scope| {
                for key in ["a", "b"] {
                    let is_over = &is_over;
                    scope.spawn(move || {
                        while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                            change(swapper, key, &[1; 12_000]);
                        }
                    });
                }
                for _ in 0..100 {
                    swapper.flush(None, &mut never()).unwrap();
                }
                is_over.store(true, std::sync::atomic::Ordering::Relaxed);
            });
        }
    });
}
