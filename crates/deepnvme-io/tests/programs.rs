//! Random programs of reads and writes on an engine match a model file byte for byte. They cover every backend and
//! direct I/O mode, threads on adjacent ranges, and sizes and memory of any alignment.
#![allow(clippy::expect_used, clippy::panic, reason = "helpers of tests fail like tests")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::place::Place;
use common::program_run::ProgramRun;
use common::{
    MakeBackend, decorated, direct_works, engine, hidden_faults, open, real, simulated_by, skipped, small_config,
};
use deepnvme_io::backend::BackendKind;
use deepnvme_io::{Config, DirectMode, Durability, Engine, SubmitMode, WriteMode, WriteOptions};
use deepnvme_mem::Buffer;
use deepnvme_testkit::data::{
    TestFile, bytes_of, difference, memory_available_bytes, random_bytes, region_at, region_holding,
};
use deepnvme_testkit::faults::Faults;
use deepnvme_testkit::model::{Model, Program, Scope, pick_bytes, ranges};
use deepnvme_testkit::rng::Rng;
use deepnvme_testkit::watchdog;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

/// Random cases per test. Each is a program on every thread.
const CASES: u32 = 30;
/// Maximum bytes that the last thread may go beyond the end of the file.
const GROWTH_BYTES: u64 = 200_000;
const TIME_MAX: Duration = Duration::from_secs(120);

/// A random case: programs of `length` steps, one per thread.
struct Case {
    seed: u64,
    length: usize,
    threads: usize,
}

/// Runs one program per thread, each on its own range of one file. Ranges begin and end anywhere.
fn run_case(engine: &Engine, place: Place, mode: DirectMode, case: &Case) {
    let Case { seed, length, threads } = *case;
    let block_bytes = engine.config().block_bytes;
    let mut rng = Rng::new(seed);
    let file_bytes = rng.within(100_000..1_500_000);
    let content = random_bytes(seed, file_bytes as usize);
    let file = place.make(engine, &content);
    let shared = file.open(mode);
    let share = rng.chance(500);
    let ranges = ranges(seed, file_bytes, threads);
    let models: Vec<Model> = std::thread::scope(|scope| {
        let run_in_range = |(index, range): (usize, &std::ops::Range<u64>)| {
            let model = Model::new(range.start, content[range.start as usize..range.end as usize].to_vec());
            let own = if share { Arc::clone(&shared) } else { file.open(mode) };
            let growth = if index + 1 == threads { GROWTH_BYTES } else { 0 };
            let program_scope = Scope { range: range.start..range.end + growth, block_bytes, step_bytes_max: 400_000 };
            let label = format!("seed {seed}, length {length}, threads {threads}, {mode:?}, range {index}");
            let mut run = ProgramRun::new(engine, own, model, label);
            scope.spawn(move || {
                run.run(&Program::new(seed, length, &program_scope));
                run.model
            })
        };
        let threads: Vec<_> = ranges.iter().enumerate().map(run_in_range).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|why| std::panic::resume_unwind(why))).collect()
    });
    let expected: Vec<u8> = models.iter().flat_map(|model| model.bytes().iter().copied()).collect();
    let wrong = difference(&file.bytes(engine), &expected);
    assert_eq!(wrong, None, "seed {seed}, length {length}, threads {threads}, {mode:?}: the file is not the model");
}

fn programs(name: &str, make: Option<MakeBackend>, submit: SubmitMode, mode: DirectMode) {
    run_programs(name, make, small_config(2, submit), Place::File, mode);
}

fn run_programs(name: &str, make: Option<MakeBackend>, config: Config, place: Place, mode: DirectMode) {
    let Some(make) = make else { return };
    if mode == DirectMode::Required && !direct_works() {
        return;
    }
    let engine = engine(config, make);
    // The variable PROPTEST_CASES can request fewer.
    let cases = CASES.min(ProptestConfig::default().cases);
    let config = ProptestConfig { cases, failure_persistence: None, max_shrink_iters: 60, ..Default::default() };
    let cases = (any::<u64>(), 1..40_usize, 1..4_usize);
    watchdog::with_time_limit(name, TIME_MAX, || {
        let run = |(seed, length, threads)| {
            run_case(&engine, place, mode, &Case { seed, length, threads });
            Ok(())
        };
        if let Err(failure) = TestRunner::new(config).run(&cases, run) {
            panic!("{name}: (seed, length, threads): {failure}");
        }
    });
}

/// Defines a test per backend and mode.
macro_rules! program_tests {
    ($($name:ident: $make:expr, $submit:ident, $mode:ident;)*) => {
        $(
            #[test]
            fn $name() {
                programs(stringify!($name), $make, SubmitMode::$submit, DirectMode::$mode);
            }
        )*
    };
}

program_tests! {
    uring_direct: real(BackendKind::Uring), Batch, Required;
    uring_preferred: real(BackendKind::Uring), Single, Preferred;
    uring_buffered: real(BackendKind::Uring), Batch, Disabled;
    aio_direct: real(BackendKind::Aio), Batch, Required;
    aio_preferred: real(BackendKind::Aio), Single, Preferred;
    aio_buffered: real(BackendKind::Aio), Batch, Disabled;
    threads_direct: real(BackendKind::Threads), Batch, Required;
    threads_preferred: real(BackendKind::Threads), Single, Preferred;
    threads_buffered: real(BackendKind::Threads), Batch, Disabled;
    simulated_direct: simulated_by(11), Batch, Required;
    simulated_buffered: simulated_by(12), Batch, Disabled;
    faulty_direct: decorated(BackendKind::Uring, &Faults::new(hidden_faults(1))), Batch, Required;
    faulty_preferred: decorated(BackendKind::Aio, &Faults::new(hidden_faults(2))), Single, Preferred;
    faulty_buffered: decorated(BackendKind::Threads, &Faults::new(hidden_faults(3))), Batch, Disabled;
}

/// Stripe sets behave like files, whether the stripe is smaller than a block, larger, or not a multiple of it.
macro_rules! stripe_tests {
    ($($name:ident: $make:expr, $parts:literal of $stripe_bytes:expr, $mode:ident;)*) => {
        $(
            #[test]
            fn $name() {
                let place = Place::Stripes { parts: $parts, stripe_bytes: $stripe_bytes };
                run_programs(stringify!($name), $make, small_config(2, SubmitMode::Batch), place, DirectMode::$mode);
            }
        )*
    };
}

stripe_tests! {
    small_stripes: real(BackendKind::Uring), 3 of 4096, Preferred;
    odd_stripes: real(BackendKind::Aio), 2 of 36 << 10, Preferred;
    large_stripes: real(BackendKind::Threads), 4 of 256 << 10, Disabled;
    faulty_stripes: decorated(BackendKind::Uring, &Faults::new(hidden_faults(4))), 3 of 64 << 10, Preferred;
}

/// Settings at their limits, in different combinations.
macro_rules! settings_tests {
    ($($name:ident: $workers:literal x $depth:literal x $block_bytes:expr, pool $pool_bytes:expr;)*) => {
        $(
            #[test]
            fn $name() {
                let config = Config {
                    workers: $workers,
                    queue_depth: $depth,
                    block_bytes: $block_bytes,
                    pool_bytes: $pool_bytes,
                    ..Config::default()
                };
                run_programs(stringify!($name), real(BackendKind::Uring), config, Place::File, DirectMode::Preferred);
            }
        )*
    };
}

settings_tests! {
    one_small_block_at_a_time: 1 x 1 x 4096, pool Some(4096);
    many_workers_with_one_slot_each: 8 x 4 x 8192, pool Some(8 * 8192);
    a_deep_queue_with_few_slots: 1 x 256 x 4096, pool Some(3 * 4096);
    blocks_larger_than_most_requests: 2 x 4 x (2 << 20), pool None;
}

/// A whole-file write makes the file equal to the memory, whatever its earlier content.
#[test]
fn whole_files_become_exactly_the_memory() {
    let engine = Engine::new(small_config(2, SubmitMode::Batch)).expect("some backend works");
    let mut rng = Rng::new(77);
    for mode in [DirectMode::Preferred, DirectMode::Disabled] {
        let file = TestFile::holding(&random_bytes(1, 300_000));
        let target = open(&file.path, mode).expect("the test file");
        for seed in 0..60 {
            let len = pick_bytes(&mut rng, 32 << 10, 500_000) as usize;
            let bytes = random_bytes(seed, len);
            let durability = if seed % 20 == 0 { Durability::Full } else { Durability::None };
            let options = WriteOptions { mode: WriteMode::WholeFile, durability };
            let source = region_holding(rng.below(600) as usize, &bytes).region();
            let (_, result) = engine.write(&target, 0, source, options).expect("accepted").wait();
            assert_eq!(result.expect("written").bytes, len as u64, "seed {seed}");
            assert_eq!(difference(&file.bytes(), &bytes), None, "seed {seed}, {len} bytes, {mode:?}");
        }
    }
}

/// Requests in random order write adjacent ranges that share pages. No range loses a byte.
#[test]
fn adjacent_ranges_that_share_pages_do_not_disturb_each_other() {
    const SLIVERS: usize = 64;
    const ROUNDS: usize = 20;
    let engine = Engine::new(small_config(4, SubmitMode::Batch)).expect("some backend works");
    for mode in [DirectMode::Preferred, DirectMode::Disabled] {
        let mut rng = Rng::new(3);
        let cuts: Vec<u64> = std::iter::once(4000)
            .chain((0..SLIVERS).scan(4000, |at, _| {
                *at += pick_bytes(&mut rng, 4096, 9000).max(1);
                Some(*at)
            }))
            .collect();
        let end = cuts[SLIVERS];
        let mut expected = random_bytes(1, end as usize + 777);
        let file = TestFile::holding(&expected);
        let target = open(&file.path, mode).expect("the test file");
        for round in 0..ROUNDS {
            let mut order: Vec<usize> = (0..SLIVERS).collect();
            rng.shuffle(&mut order);
            let mut pendings = Vec::new();
            for sliver in order {
                let range = cuts[sliver] as usize..cuts[sliver + 1] as usize;
                let bytes = random_bytes((round * SLIVERS + sliver) as u64, range.len());
                let source = region_holding(sliver, &bytes).region();
                let pending = engine.write(&target, range.start as u64, source, WriteOptions::default());
                pendings.push(pending.expect("accepted"));
                expected[range].copy_from_slice(&bytes);
            }
            for pending in pendings {
                pending.wait().1.expect("written");
            }
            let back = region_at(1, expected.len());
            let (back, result) = engine.read(&target, 0, back).expect("accepted").wait();
            result.expect("read");
            let back = bytes_of(&back.expect("memory is returned").region());
            assert_eq!(difference(&back, &expected), None, "round {round}, {mode:?}, through the engine");
            assert_eq!(difference(&file.bytes(), &expected), None, "round {round}, {mode:?}");
        }
    }
}

/// One request moves more than one system call can (2 GiB minus a page).
#[test]
fn one_call_reads_more_than_two_gibibytes() {
    const BYTES: u64 = (2 << 30) + (64 << 20) + 4097;
    const MARK_BYTES: usize = 100_000;
    let needed = BYTES + (1 << 30);
    if memory_available_bytes() < needed {
        return skipped(&format!("more than 2 GiB in one call: {needed} bytes of memory are not available"));
    }
    let file = TestFile::holding(&[]);
    let target = open(&file.path, DirectMode::Preferred).expect("the test file");
    let engine = Engine::new(Config::default()).expect("some backend works");
    let at_last = BYTES - MARK_BYTES as u64;
    let marks: Vec<(u64, Vec<u8>)> = [0, (1 << 31) - 4097, 1 << 31, at_last]
        .into_iter()
        .enumerate()
        .map(|(seed, offset)| (offset, random_bytes(seed as u64, if seed == 1 { 4097 } else { MARK_BYTES })))
        .collect();
    for (offset, bytes) in &marks {
        let source = region_holding(0, bytes).region();
        engine.write(&target, *offset, source, WriteOptions::default()).expect("accepted").wait().1.expect("written");
    }
    let memory = Buffer::zeroed(BYTES as usize).expect("memory").into_region();
    let (memory, result) = engine.read(&target, 0, memory).expect("accepted").wait();
    assert_eq!(result.expect("read").bytes, BYTES);
    let buffer = memory.expect("memory is returned").into_buffer().expect("nothing else holds it");
    let mut at = 0;
    for (offset, bytes) in &marks {
        let offset = *offset as usize;
        assert!(buffer.as_slice()[at..offset].iter().all(|byte| *byte == 0), "the hole before {offset}");
        assert_eq!(difference(&buffer.as_slice()[offset..offset + bytes.len()], bytes), None, "at {offset}");
        at = offset + bytes.len();
    }
    assert_eq!(at as u64, BYTES);
}
