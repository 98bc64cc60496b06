//! Durable writes on a disk with simulated power cuts: once a write is reported, its bytes survive every crash.
#![allow(clippy::expect_used, clippy::panic, reason = "helpers of tests fail like tests")]

mod common;

use std::time::Duration;

use common::{engine, open, small_config, try_real};
use deepnvme_io::backend::BackendKind;
use deepnvme_io::{DirectMode, Durability, Engine, SubmitMode, WriteItem, WriteMode, WriteOptions};
use deepnvme_testkit::data::{TestFile, difference, random_bytes, region_holding};
use deepnvme_testkit::model::pick_bytes;
use deepnvme_testkit::rng::Rng;
use deepnvme_testkit::scheduled_backend::SimDisk;
use deepnvme_testkit::share::fewer;
use deepnvme_testkit::watchdog;

const SEEDS: u64 = 40;
const CRASHES: u64 = 20;
const FILE_BYTES: u64 = 300_000;

fn simulated_engine(seed: u64) -> (Engine, SimDisk) {
    let disk = SimDisk::new(seed);
    let make_real = try_real(BackendKind::Threads).expect("threads work everywhere");
    let drive = disk.clone();
    let make: common::MakeBackend = Box::new(move |setup| Box::new(drive.backend(setup, make_real(setup))));
    (engine(small_config(1 + (seed % 3) as u32, SubmitMode::Batch), make), disk)
}

/// Writes some ranges in order, some of them durably. Cuts the power many times after each durable one.
fn run_seed(seed: u64, mode: DirectMode) {
    let (engine, disk) = simulated_engine(seed);
    let mut rng = Rng::keyed(seed, &[3]);
    let mut expected = random_bytes(seed, FILE_BYTES as usize);
    let file = TestFile::holding(&expected);
    let target = open(&file.path, mode).expect("the test file");
    for round in 0..8 {
        let durability = rng.pick(&[Durability::None, Durability::Data, Durability::Full]);
        let options = WriteOptions { mode: WriteMode::InPlace, durability };
        let len = pick_bytes(&mut rng, 32 << 10, 150_000);
        let offset = rng.below(FILE_BYTES + 10_000 - len);
        let bytes = random_bytes(rng.next_u64(), len as usize);
        let end = (offset + len) as usize;
        if len > 0 && expected.len() < end {
            expected.resize(end, 0);
        }
        expected[offset as usize..][..len as usize].copy_from_slice(&bytes);
        // As one range, or as a batch of two adjacent ones.
        let cut = if rng.chance(500) { rng.below(len + 1) } else { 0 };
        let item = |offset: u64, bytes: &[u8]| WriteItem {
            file: std::sync::Arc::clone(&target),
            offset,
            source: region_holding(round, bytes).region(),
        };
        let (first, second) = bytes.split_at(cut as usize);
        let items = vec![item(offset, first), item(offset + cut, second)];
        engine.write_batch(items, options).expect("accepted").wait().1.expect("written");
        if durability == Durability::None || len == 0 {
            continue;
        }
        for crash in 0..CRASHES {
            let image = disk.crash_image(target.descriptor(), crash).expect("the file was written");
            let range = offset as usize..end;
            assert!(image.len() >= end, "seed {seed}, round {round}, crash {crash}: the end of the file was lost");
            let wrong = difference(&image[range.clone()], &expected[range]);
            assert_eq!(wrong, None, "seed {seed}, round {round}, crash {crash}, {durability:?}, {mode:?}");
        }
    }
    assert_eq!(difference(&file.bytes(), &expected), None, "seed {seed}");
}

#[test]
fn a_durable_write_survives_every_crash() {
    for seed in 0..fewer(SEEDS) {
        for mode in [DirectMode::Preferred, DirectMode::Disabled] {
            let name = format!("durability, seed {seed}, {mode:?}");
            watchdog::with_time_limit(&name, Duration::from_secs(60), || run_seed(seed, mode));
        }
    }
}

#[test]
fn a_durable_whole_file_is_exactly_the_memory_after_a_crash() {
    for seed in 0..fewer(SEEDS) {
        let (engine, disk) = simulated_engine(seed);
        let mut rng = Rng::keyed(seed, &[4]);
        let file = TestFile::holding(&random_bytes(seed, 200_000));
        let target = open(&file.path, DirectMode::Preferred).expect("the test file");
        for round in 0..4 {
            let bytes = random_bytes(rng.next_u64(), 1 + pick_bytes(&mut rng, 32 << 10, 400_000) as usize);
            let options = WriteOptions { mode: WriteMode::WholeFile, durability: Durability::Full };
            let source = region_holding(1, &bytes).region();
            engine.write(&target, 0, source, options).expect("accepted").wait().1.expect("written");
            for crash in 0..CRASHES {
                let image = disk.crash_image(target.descriptor(), crash).expect("the file was written");
                assert_eq!(difference(&image, &bytes), None, "seed {seed}, round {round}, crash {crash}");
            }
        }
    }
}

/// Checks the simulator itself: without a sync, some crash loses or tears the write.
#[test]
fn a_write_without_a_sync_does_not_survive_every_crash() {
    let (engine, disk) = simulated_engine(1);
    let file = TestFile::holding(&random_bytes(1, 100_000));
    let target = open(&file.path, DirectMode::Preferred).expect("the test file");
    let bytes = random_bytes(2, 100_000);
    let source = region_holding(0, &bytes).region();
    engine.write(&target, 0, source, WriteOptions::default()).expect("accepted").wait().1.expect("written");
    let survived = (0..CRASHES).filter(|crash| disk.crash_image(target.descriptor(), *crash) == Some(bytes.clone()));
    assert!((survived.count() as u64) < CRASHES / 2);
}

/// An unnamed file has no directory entry to lose, so full durability only covers its bytes.
#[test]
fn a_file_without_a_name_can_be_written_durably() {
    use std::os::fd::AsFd;
    let folder = deepnvme_testkit::data::temp_dir();
    let inner = folder.path().join("inner");
    std::fs::create_dir(&inner).expect("a folder");
    let options = std::fs::OpenOptions::new().read(true).write(true).create_new(true).clone();
    let file = options.open(inner.join("file")).expect("a file");
    std::fs::remove_dir_all(&inner).expect("the folder goes, the file stays open");
    let target =
        deepnvme_io::TensorFile::from_fd(file.as_fd(), None, deepnvme_io::Access::ReadWrite, DirectMode::Preferred)
            .expect("an open descriptor");
    let engine = Engine::new(deepnvme_io::Config::default()).expect("some backend works");
    let options = WriteOptions { mode: WriteMode::WholeFile, durability: Durability::Full };
    let bytes = random_bytes(11, 100_001);
    let source = region_holding(3, &bytes).region();
    engine.write(&target, 0, source, options).expect("accepted").wait().1.expect("written and synced");
    let mut found = vec![0; bytes.len()];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut found, 0).expect("the bytes");
    assert_eq!(difference(&found, &bytes), None);
}
