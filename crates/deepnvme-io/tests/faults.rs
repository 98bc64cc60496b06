//! An engine over failing backends. Every request either moves exactly its bytes or reports the injected failure with
//! path and offset. Memory always returns, and nothing hangs. Failures print their seed.
#![allow(clippy::expect_used, clippy::panic, reason = "helpers of tests fail like tests")]

mod common;

use std::time::{Duration, Instant};

use common::storm::Storm;
use common::{MakeBackend, decorated, hidden_faults, open, simulated_by};
use deepnvme_io::backend::BackendKind;
use deepnvme_io::{Config, DirectMode, Durability, Engine, ErrorKind, SubmitMode, WriteMode, WriteOptions};
use deepnvme_mem::RegionMut;
use deepnvme_testkit::data::{TestFile, bytes_of, difference, random_bytes, region_at, region_holding};
use deepnvme_testkit::faults::{FaultPlan, Faults};
use deepnvme_testkit::rng::Rng;
use deepnvme_testkit::share::fewer;
use deepnvme_testkit::watchdog;

const SEEDS: u64 = 100;
const SEED_TIME_MAX: Duration = Duration::from_secs(30);
const BLOCK_BYTES: u64 = 16 << 10;

/// Returns the faults of a seed. A quarter of the seeds has only faults that an engine hides.
fn plan_of(seed: u64) -> FaultPlan {
    let mut rng = Rng::keyed(seed, &[1]);
    let mut often = |per_mille: u64| rng.below(per_mille) as u32;
    let hidden = FaultPlan {
        seed,
        short: often(400),
        eintr: often(150),
        eagain: often(150),
        slow: often(60),
        slow_max: Duration::from_millis(3),
        reorder: seed.is_multiple_of(2),
        ..FaultPlan::default()
    };
    match seed % 4 {
        0 => hidden,
        1 => FaultPlan { eio: often(20), enospc: often(20), sync_eio: often(300), ..hidden },
        2 => FaultPlan { eio: often(300), enospc: often(300), sync_eio: often(1000), ..hidden },
        _ => FaultPlan { eio_after_ops: Some(u64::from(often(120))), ..hidden },
    }
}

fn config_of(seed: u64) -> Config {
    let workers = 1 + (seed / 3 % 3) as u32;
    let submit = if seed % 5 < 3 { SubmitMode::Batch } else { SubmitMode::Single };
    let pool_bytes = Some(u64::from(workers) * BLOCK_BYTES * 2);
    Config { workers, queue_depth: 6, block_bytes: BLOCK_BYTES, submit, pool_bytes, ..Config::default() }
}

fn backend_of(seed: u64, faults: &Faults) -> Option<MakeBackend> {
    match seed / 4 % 4 {
        0 => decorated(BackendKind::Uring, faults),
        1 => decorated(BackendKind::Aio, faults),
        2 => decorated(BackendKind::Threads, faults),
        _ => {
            let (inner, faults) = (simulated_by(seed)?, faults.clone());
            Some(Box::new(move |setup| Box::new(faults.wrap(inner(setup)))))
        }
    }
}

fn run_seed(seed: u64) -> Option<bool> {
    let faults = Faults::new(plan_of(seed));
    let engine = common::engine(config_of(seed), backend_of(seed, &faults)?);
    let mut rng = Rng::keyed(seed, &[2]);
    let file = TestFile::holding(&random_bytes(seed, rng.within(200_000..600_000) as usize));
    let mode = if seed.is_multiple_of(3) { DirectMode::Disabled } else { DirectMode::Preferred };
    let target = open(&file.path, mode).expect("the test file");
    let storm = Storm { seed, engine: &engine, file: &file, opened: &target };
    let failures = storm.write(&mut rng) + storm.read(&mut rng);
    let counts = faults.counts();
    let what = format!("seed {seed}: {failures} requests failed, and these faults were injected: {counts:?}");
    assert_eq!(failures > 0, counts.fatal() > 0, "{what}");
    let stats = engine.stats();
    assert_eq!(stats.requests_failed, failures, "{what}");
    assert!(stats.retries >= counts.eintr + counts.eagain || failures > 0, "{what}; {} retries", stats.retries);
    Some(failures > 0)
}

/// Runs seeds of faults, each on one of the backends.
#[test]
fn requests_succeed_exactly_or_report_the_injected_fault() {
    let (mut clean, mut failed) = (0, 0);
    let seeds = fewer(SEEDS);
    for seed in 0..seeds {
        match watchdog::with_time_limit(&format!("faults, seed {seed}"), SEED_TIME_MAX, || run_seed(seed)) {
            Some(true) => failed += 1,
            Some(false) => clean += 1,
            None => {}
        }
    }
    assert!(clean >= seeds / 5 && failed >= seeds / 5, "{clean} clean and {failed} failed seeds prove little");
}

/// Creates an engine over threads with these faults.
fn failing(plan: FaultPlan) -> (Engine, Faults) {
    let faults = Faults::new(plan);
    let make = decorated(BackendKind::Threads, &faults).expect("threads work everywhere");
    (common::engine(config_of(3), make), faults)
}

const TIME_MAX: Duration = Duration::from_secs(60);
const LEN: usize = 300_000;

#[test]
fn refusals_without_end_end_in_an_error() {
    watchdog::with_time_limit("endless EAGAIN and EINTR", TIME_MAX, || {
        let file = TestFile::holding(&random_bytes(1, LEN));
        for (plan, errno) in [
            (FaultPlan { eagain: 1000, ..FaultPlan::default() }, 11),
            (FaultPlan { eintr: 1000, ..FaultPlan::default() }, 4),
        ] {
            let (engine, _) = failing(plan);
            let target = open(&file.path, DirectMode::Preferred).expect("the test file");
            let (returned, result) = engine.read(&target, 5, region_at(1, 1000)).expect("accepted").wait();
            let error = result.expect_err("nothing can have been read");
            assert_eq!((error.errno(), error.path()), (Some(errno), Some(file.path.as_path())), "{error}");
            assert!(error.to_string().contains("retries"), "it does not say that it tried: {error}");
            assert_eq!(returned.map(|returned| returned.len()), Some(1000));
            let full = WriteOptions { durability: Durability::Full, ..WriteOptions::default() };
            let write = engine.write(&target, 0, region_holding(0, &[]).region(), full).expect("accepted");
            assert_eq!(write.wait().1.expect_err("no sync can have worked").errno(), Some(errno));
        }
    });
}

#[test]
fn a_bad_sector_is_named_and_the_rest_of_the_file_is_not_affected() {
    let content = random_bytes(2, LEN);
    let file = TestFile::holding(&content);
    let (engine, _) = failing(FaultPlan { eio_at_byte: Some(123_456), ..FaultPlan::default() });
    for mode in [DirectMode::Preferred, DirectMode::Disabled] {
        let target = open(&file.path, mode).expect("the test file");
        let (returned, result) = engine.read(&target, 0, region_at(0, LEN)).expect("accepted").wait();
        let error = result.expect_err("the sector cannot be read");
        let offset = error.offset().expect("an offset");
        assert!((123_456 - BLOCK_BYTES..=123_456).contains(&offset), "the sector is not there: {error}");
        assert!(error.bytes_done() < LEN as u64);
        assert!(returned.is_some());
        for (offset, len) in [(0, 114_688), (131_072, LEN - 131_072)] {
            let (returned, result) = engine.read(&target, offset, region_at(3, len)).expect("accepted").wait();
            result.expect("this part is readable");
            let found = bytes_of(&returned.expect("memory is returned").region());
            assert_eq!(difference(&found, &content[offset as usize..offset as usize + len]), None);
        }
    }
}

#[test]
fn a_failed_sync_fails_the_write_that_asked_for_it() {
    let file = TestFile::holding(&random_bytes(3, LEN));
    let (engine, faults) = failing(FaultPlan { sync_eio: 1000, ..FaultPlan::default() });
    let target = open(&file.path, DirectMode::Preferred).expect("the test file");
    for (durability, fails) in [(Durability::None, false), (Durability::Data, true), (Durability::Full, true)] {
        let source = region_holding(0, &random_bytes(4, 10_000)).region();
        let options = WriteOptions { mode: WriteMode::InPlace, durability };
        let (_, result) = engine.write(&target, 77, source, options).expect("accepted").wait();
        assert_eq!(result.is_err(), fails, "{durability:?}");
        if let Err(error) = result {
            assert_eq!((error.kind(), error.operation(), error.errno()), (ErrorKind::Io, "sync", Some(5)));
        }
    }
    assert!(faults.counts().sync_eio >= 2);
}

#[test]
fn a_full_disk_is_no_space() {
    let content = random_bytes(5, LEN);
    let file = TestFile::holding(&content);
    let (engine, _) = failing(FaultPlan { enospc: 1000, ..FaultPlan::default() });
    let target = open(&file.path, DirectMode::Preferred).expect("the test file");
    let source = region_holding(0, &random_bytes(6, LEN)).region();
    let (returned, result) = engine.write(&target, 1000, source, WriteOptions::default()).expect("accepted").wait();
    let error = result.expect_err("the disk is full");
    assert_eq!((error.kind(), error.errno(), error.bytes_done()), (ErrorKind::NoSpace, Some(28), 0));
    assert_eq!(returned.map(|returned| returned.len()), Some(LEN));
    assert!(file.bytes() == content);
    // Reads are unaffected.
    engine.read(&target, 0, region_at(0, LEN)).expect("accepted").wait().1.expect("read");
}

#[test]
fn short_transfers_of_any_length_are_continued() {
    watchdog::with_time_limit("ragged short transfers", TIME_MAX, || {
        for seed in 0..20 {
            let content = random_bytes(seed, LEN);
            let file = TestFile::holding(&content);
            let plan = FaultPlan { seed, short: 700, short_anywhere: true, ..FaultPlan::default() };
            let (engine, faults) = failing(plan);
            let target = open(&file.path, DirectMode::Preferred).expect("the test file");
            let (returned, result) = engine.read(&target, 0, region_at(0, LEN)).expect("accepted").wait();
            result.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            let found = bytes_of(&returned.expect("memory is returned").region());
            assert_eq!(difference(&found, &content), None, "seed {seed}");
            let bytes = random_bytes(seed + 1000, LEN - 4096);
            let source = region_holding(0, &bytes).region();
            let (_, result) = engine.write(&target, 4096, source, WriteOptions::default()).expect("accepted").wait();
            result.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            assert_eq!(difference(&file.bytes()[4096..], &bytes), None, "seed {seed}");
            assert!(faults.counts().short > 10, "seed {seed}: {:?}", faults.counts());
        }
    });
}

/// Blocks larger than a bounce buffer, with separate ragged edges, and with short transfers anywhere.
#[test]
fn long_requests_are_continued_too() {
    const LONG: usize = (21 << 20) + 77;
    watchdog::with_time_limit("long requests, cut short", TIME_MAX, || {
        for (seed, kind) in [BackendKind::Uring, BackendKind::Aio, BackendKind::Threads].into_iter().enumerate() {
            for offset in [0, 4096 - 100, 4096] {
                let seed = seed as u64 * 10_000 + offset as u64;
                let plan = FaultPlan { seed, short: 300, short_anywhere: true, ..hidden_faults(seed) };
                let faults = Faults::new(plan);
                let Some(make) = decorated(kind, &faults) else { continue };
                let engine = common::engine(Config { workers: 2, queue_depth: 4, ..Config::default() }, make);
                let mut expected = random_bytes(seed, LONG + 3 * 4096);
                let file = TestFile::holding(&expected);
                let target = open(&file.path, DirectMode::Preferred).expect("the test file");
                let place = offset..offset + LONG;
                let bytes = random_bytes(seed + 1, LONG);
                expected[place.clone()].copy_from_slice(&bytes);
                // Memory and file have the same misalignment, so the middle needs no copy.
                let source = region_holding(offset % 4096, &bytes).region();
                let write = engine.write(&target, offset as u64, source, WriteOptions::default()).expect("accepted");
                write.wait().1.unwrap_or_else(|error| panic!("{kind:?} {offset}: {error}"));
                assert_eq!(difference(&file.bytes(), &expected), None, "{kind:?} {offset}");
                let read = engine.read(&target, offset as u64, region_at(offset % 4096, LONG)).expect("accepted");
                let (returned, result) = read.wait();
                result.unwrap_or_else(|error| panic!("{kind:?} {offset}: {error}"));
                let found = bytes_of(&returned.expect("memory is returned").region());
                assert_eq!(difference(&found, &expected[place]), None, "{kind:?} {offset}");
                let (stats, counts) = (engine.stats(), faults.counts());
                assert!(counts.short > 3, "{kind:?} {offset}: {counts:?}");
                if matches!(target.direct(), deepnvme_io::DirectState::Direct { .. }) {
                    assert!(stats.bytes_bounced < 1 << 20, "{kind:?} {offset}: the middle went through bounce buffers");
                }
            }
        }
    });
}

#[test]
fn a_device_that_dies_ends_every_request() {
    watchdog::with_time_limit("a dying device", TIME_MAX, || {
        let file = TestFile::holding(&random_bytes(7, LEN));
        let (engine, faults) = failing(FaultPlan { eio_after_ops: Some(100), ..FaultPlan::default() });
        let target = open(&file.path, DirectMode::Preferred).expect("the test file");
        let read = || engine.read(&target, 100, RegionMut::from_vec(vec![0; 50_000])).expect("accepted");
        for _ in 0..5 {
            read().wait().1.expect("the device is still alive");
        }
        let pendings: Vec<_> = (0..300).map(|_| read()).collect();
        let outcomes: Vec<_> = pendings.into_iter().map(deepnvme_io::Transfer::wait).collect();
        assert!(outcomes.iter().all(|(returned, _)| returned.is_some()), "memory was not returned");
        // Each read takes several ops, and at most 100 have succeeded.
        let failed = outcomes.iter().filter(|(_, result)| result.is_err()).count();
        assert!(failed >= 270, "{failed} of 300 failed: {:?}", faults.counts());
        assert_eq!(read().wait().1.expect_err("the device is dead").errno(), Some(5));
    });
}

#[test]
fn pending_requests_finish_although_nobody_waits() {
    watchdog::with_time_limit("dropped pendings", TIME_MAX, || {
        let expected = random_bytes(8, LEN);
        let file = TestFile::holding(&vec![0; LEN]);
        let plan = FaultPlan { slow: 1000, slow_max: Duration::from_millis(5), ..hidden_faults(8) };
        let (engine, _) = failing(plan);
        let target = open(&file.path, DirectMode::Preferred).expect("the test file");
        for (index, bytes) in expected.chunks(7001).enumerate() {
            let source = region_holding(index, bytes).region();
            let write = engine.write(&target, index as u64 * 7001, source, WriteOptions::default());
            drop(write.expect("accepted"));
        }
        drop(target);
        drop(engine);
        assert_eq!(difference(&file.bytes(), &expected), None);
    });
}

#[test]
fn a_cancelled_request_ends_and_gives_its_memory_back() {
    watchdog::with_time_limit("cancel", TIME_MAX, || {
        let file = TestFile::holding(&random_bytes(9, 4 << 20));
        let plan = FaultPlan { slow: 1000, slow_max: Duration::from_millis(40), ..FaultPlan::default() };
        let (engine, faults) = failing(plan);
        let target = open(&file.path, DirectMode::Disabled).expect("the test file");
        let pending = engine.read(&target, 0, region_at(0, 4 << 20)).expect("accepted");
        assert!(!pending.wait_timeout(Duration::from_millis(5)), "256 slow blocks took no time");
        assert!(pending.cancel(), "nothing was left to cancel");
        let (returned, result) = pending.wait();
        let error = result.expect_err("cancelled");
        assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}");
        assert!(faults.counts().ops < 200, "a cancelled request went on: {:?}", faults.counts());
        assert!(returned.expect("memory is returned").into_buffer().is_ok(), "I/O still holds the memory");
        let again = engine.read(&target, 0, region_at(0, 100)).expect("accepted");
        again.wait().1.expect("the engine goes on");
    });
}

#[test]
fn progress_grows_while_the_request_is_in_flight() {
    let file = TestFile::holding(&random_bytes(10, 2 << 20));
    let plan = FaultPlan { slow: 1000, slow_max: Duration::from_millis(30), ..FaultPlan::default() };
    let (engine, _) = failing(plan);
    let target = open(&file.path, DirectMode::Disabled).expect("the test file");
    let started = Instant::now();
    let pending = engine.read(&target, 0, region_at(0, 2 << 20)).expect("accepted");
    let submitted = started.elapsed();
    let mut seen = vec![0];
    while !pending.wait_timeout(Duration::from_millis(1)) {
        let progress = pending.progress();
        assert_eq!(progress.bytes_total, 2 << 20);
        assert!(progress.bytes_done >= seen[seen.len() - 1] && progress.bytes_done <= 2 << 20);
        seen.push(progress.bytes_done);
    }
    seen.dedup();
    assert!(seen.len() > 5, "progress came in {} steps", seen.len());
    assert!(submitted < started.elapsed() / 2, "submitting took {submitted:?}: it waited for the transfer");
    assert_eq!(pending.progress().bytes_done, 2 << 20);
    pending.wait().1.expect("read");
}
