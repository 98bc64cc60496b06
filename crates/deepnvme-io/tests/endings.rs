//! Cancels requests and closes engines at any moment. Each request ends once, and the engine continues or is closed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "helpers of tests fail like tests")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use deepnvme_io::{
    BackendChoice, Config, DirectMode, Engine, ErrorKind, TensorFile, WriteItem, WriteMode, WriteOptions,
};
use deepnvme_mem::{Region, RegionMut};
use deepnvme_testkit::data::TestFile;
use deepnvme_testkit::rng::Rng;
use deepnvme_testkit::watchdog;

const TIME_MAX: Duration = Duration::from_secs(60);
const FILES: usize = 12;
/// Bytes of each file. Large enough to preallocate.
const BYTES: usize = 5 << 20;

fn config(workers: u32) -> Config {
    Config { workers, queue_depth: 4, block_bytes: 16 << 10, backend: BackendChoice::Threads, ..Config::default() }
}

fn files(folder: &TestFile, count: usize) -> Vec<Arc<TensorFile>> {
    let name = |n| folder.path.with_extension(format!("{n}"));
    (0..count).map(|n| common::open(&name(n), DirectMode::Preferred).unwrap()).collect()
}

fn items(files: &[Arc<TensorFile>], bytes: usize) -> Vec<WriteItem> {
    let source = Region::from_vec(vec![7; bytes]);
    let item = |file: &Arc<TensorFile>| WriteItem { file: Arc::clone(file), offset: 0, source: source.clone() };
    files.iter().map(item).collect()
}

const WHOLE: WriteOptions = WriteOptions { mode: WriteMode::WholeFile, durability: deepnvme_io::Durability::None };

#[test]
fn a_write_of_several_files_is_cancelled_at_any_moment() {
    // Both have a preparation: one sets the file's size, the other preallocates.
    let in_place = WriteOptions { mode: WriteMode::InPlace, ..WHOLE };
    for (workers, options) in [(1, WHOLE), (3, WHOLE), (1, in_place), (3, in_place)] {
        watchdog::with_time_limit(&format!("{workers} workers, {options:?}"), TIME_MAX, || {
            let folder = TestFile::holding(&[]);
            let files = files(&folder, FILES);
            let engine = Engine::new(config(workers)).unwrap();
            let mut rng = Rng::new(20261123);
            let mut cancelled = 0;
            for round in 0..80 {
                // Truncated each time, so that the preparation takes time.
                files.iter().for_each(|file| file.truncate(0).unwrap());
                let pending = engine.write_batch(items(&files, BYTES), options).unwrap();
                std::thread::sleep(Duration::from_micros(rng.below(1000)));
                let told = pending.cancel();
                let (returned, result) = pending.wait();
                assert_eq!(returned.expect("memory is returned").len(), FILES, "round {round}");
                match result {
                    Ok(transfer) => assert!(!told && transfer.bytes == (BYTES * FILES) as u64, "round {round}"),
                    Err(error) => assert!(told && error.kind() == ErrorKind::Cancelled, "round {round}: {error}"),
                }
                cancelled += u32::from(told);
            }
            assert!(cancelled > 0, "no cancellation came in time");
            let stats = engine.stats();
            assert_eq!((stats.requests, stats.requests_failed), (80, u64::from(cancelled)));
            assert!(engine.write_batch(items(&files, BYTES), options).unwrap().wait().1.is_ok(), "the engine goes on");
        });
    }
}

#[test]
fn a_request_that_is_not_being_prepared_ends_when_cancelled() {
    let folder = TestFile::holding(&[]);
    let files = files(&folder, 2);
    let slow = Config { queue_depth: 1, block_bytes: 4096, ..config(1) };
    let engine = Engine::new(slow).unwrap();
    let long = engine.write(&files[0], 0, Region::from_vec(vec![1; 64 << 20]), WHOLE).unwrap();
    for bytes in [0, 20_000] {
        let waiting = engine.write_batch(items(&files[1..], bytes), WHOLE).unwrap();
        if waiting.cancel() {
            assert!(waiting.is_done(), "nobody has begun it");
            assert_eq!(waiting.wait().1.unwrap_err().kind(), ErrorKind::Cancelled);
        }
    }
    assert!(!long.is_done(), "too fast to prove anything");
    long.cancel();
    assert!(long.wait().1.is_err());
}

#[test]
fn closing_finishes_submitted_requests_and_refuses_later_ones() {
    watchdog::with_time_limit("closing", TIME_MAX, || {
        let folder = TestFile::holding(&[3; 300_000]);
        let file = common::open(&folder.path, DirectMode::Preferred).unwrap();
        for round in 0..40 {
            let engine = Arc::new(Engine::new(config(1 + round % 3)).unwrap());
            let accepted = AtomicU32::new(0);
            std::thread::scope(|scope| {
                for caller in 0..3_u32 {
                    let (engine, file, accepted) = (&engine, &file, &accepted);
                    scope.spawn(move || {
                        loop {
                            let options = WriteOptions { durability: deepnvme_io::Durability::Data, ..WHOLE };
                            let target = RegionMut::from_vec(vec![0; 1000]);
                            let read = match caller {
                                0 => engine.read(file, 1, target).map(|pending| pending.wait().1),
                                // Run by this thread, with its sync on a worker.
                                1 => engine.read_now(file, 4096, target).map(|pending| pending.wait().1),
                                _ => {
                                    let in_place = WriteOptions { mode: WriteMode::InPlace, ..options };
                                    let source = Region::from_vec(vec![3; (round as usize % 2) * 1000]);
                                    engine.write_now(file, 0, source, in_place).map(|pending| pending.wait().1)
                                }
                            };
                            match read {
                                Ok(result) => {
                                    result.unwrap();
                                    accepted.fetch_add(1, Ordering::Relaxed);
                                }
                                Err(error) => {
                                    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
                                    return;
                                }
                            }
                        }
                    });
                }
                while accepted.load(Ordering::Relaxed) < 5 {
                    std::thread::yield_now();
                }
                engine.close();
                engine.close();
            });
            let stats = engine.stats();
            assert_eq!((stats.requests, stats.requests_failed), (u64::from(accepted.into_inner()), 0));
        }
    });
}

#[test]
fn closing_waits_for_requests_that_nobody_waits_for() {
    let folder = TestFile::holding(&[]);
    let files = files(&folder, 3);
    let engine = Engine::new(Config { queue_depth: 1, block_bytes: 4096, ..config(1) }).unwrap();
    let pending = engine.write_batch(items(&files, 1 << 20), WHOLE).unwrap();
    engine.close();
    assert!(pending.is_done() && pending.wait().1.is_ok());
    assert_eq!(engine.sync(&files[0], deepnvme_io::Durability::Full).unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
fn an_engine_that_is_dropped_in_background_keeps_nobody() {
    let folder = TestFile::holding(&[]);
    let files = files(&folder, 1);
    let slow = Config { queue_depth: 1, block_bytes: 4096, ..config(1) };
    let engine = Engine::new(slow).unwrap().dropped_in_background();
    let pending = engine.write_batch(items(&files, 64 << 20), WHOLE).unwrap();
    drop(engine);
    assert!(!pending.is_done(), "the drop has waited");
    assert_eq!(pending.wait().1.unwrap().bytes, 64 << 20);
}
