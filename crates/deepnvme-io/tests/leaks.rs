//! Checks for leaks of descriptors, memory and threads after a thousand opens, reads and closes, and after engines are
//! created and dropped. The counts are per process, so the tests take turns.
#![allow(clippy::expect_used, clippy::panic, reason = "helpers of tests fail like tests")]

mod common;

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use common::{all_real, engine, open, small_config, try_real};
use deepnvme_io::{Config, DirectMode, Engine, ErrorKind, SubmitMode, TensorFile, WriteOptions};
use deepnvme_testkit::data::{TestFile, bytes_of, own_memory_bytes, random_bytes, region_at, region_holding};

const OPENS: usize = 1000;
const FILE_BYTES: usize = 40_000;
/// Allowance for the allocator. A leak of one page per open exceeds it.
const RSS_SLACK_BYTES: u64 = 2 << 20;

fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn entries(folder: &str) -> usize {
    std::fs::read_dir(folder).expect("a folder of /proc").count()
}

fn descriptors() -> usize {
    entries("/proc/self/fd")
}

/// Returns the number of this process's threads with this name prefix (the kernel keeps 15 characters).
fn threads_named(start: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("a folder of /proc");
    let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
    tasks.flatten().map(name).filter(|name| name.starts_with(start)).count()
}

/// Returns the resident memory, or 0 under valgrind, which keeps its own data in the same process.
fn resident_bytes() -> u64 {
    let preloaded = std::env::var("LD_PRELOAD").unwrap_or_default();
    if preloaded.contains("vgpreload") { 0 } else { own_memory_bytes("VmRSS:").expect("resident memory") }
}

/// Returns the lowest count within a moment, since requests without a waiter hold their file until they are done.
fn at_rest(count: impl Fn() -> usize) -> usize {
    let looks = (0..20).map(|_| {
        std::thread::sleep(Duration::from_millis(5));
        count()
    });
    looks.min().unwrap_or_default()
}

/// Waits for a count to fall: the kernel removes a ring's descriptor and a thread's entry with a delay.
fn wait_for_count(what: &str, most: usize, count: impl Fn() -> usize) {
    let started = Instant::now();
    while count() > most {
        assert!(started.elapsed() < Duration::from_secs(5), "{what}: {}, and {most} before", count());
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn open_write_read_close(engine: &Engine, path: &Path, round: usize) {
    let mode = if round.is_multiple_of(2) { DirectMode::Preferred } else { DirectMode::Disabled };
    let file = open(path, mode).expect("the test file");
    let bytes = random_bytes(round as u64, 5000);
    let source = region_holding(round % 64, &bytes).region();
    engine.write(&file, 777, source, WriteOptions::default()).expect("accepted").wait().1.expect("written");
    let (returned, result) = engine.read(&file, 777, region_at(3, 5000)).expect("accepted").wait();
    result.expect("read");
    assert!(bytes_of(&returned.expect("memory is returned").region()) == bytes);
    // Failures must not leak, and neither must requests without a waiter.
    let (_, result) = engine.read(&file, FILE_BYTES as u64, region_at(0, 10)).expect("accepted").wait();
    assert_eq!(result.expect_err("past the end").kind(), ErrorKind::UnexpectedEof);
    drop(engine.read(&file, 0, region_at(1, 9000)).expect("accepted"));
    let missing = path.with_extension("missing");
    let read_only = deepnvme_io::OpenOptions { access: deepnvme_io::Access::Read, create: false, direct: mode };
    let error = TensorFile::open(&missing, read_only).expect_err("there is no such file");
    assert_eq!(error.kind(), ErrorKind::NotFound);
}

#[test]
fn a_thousand_opens_leave_no_descriptor_and_no_memory() {
    let _alone = alone();
    let file = TestFile::holding(&random_bytes(1, FILE_BYTES));
    for (kind, make) in all_real() {
        let engine = engine(small_config(2, SubmitMode::Batch), make);
        // The first rounds fill caches, pools and queues.
        (0..OPENS / 5).for_each(|round| open_write_read_close(&engine, &file.path, round));
        let (fds, rss) = (at_rest(descriptors), resident_bytes());
        (0..OPENS).for_each(|round| open_write_read_close(&engine, &file.path, round));
        wait_for_count(&format!("descriptors, {}", kind.name()), fds, descriptors);
        let grown = resident_bytes().saturating_sub(rss);
        assert!(grown < RSS_SLACK_BYTES, "{}: memory grew by {grown} bytes in {OPENS} rounds", kind.name());
    }
}

#[test]
fn engines_that_are_dropped_leave_no_thread_descriptor_or_memory() {
    let _alone = alone();
    let file = TestFile::holding(&random_bytes(2, FILE_BYTES));
    for (kind, _) in all_real() {
        let come_and_go = |round| {
            let engine = engine(small_config(2, SubmitMode::Batch), try_real(kind).expect("it has just worked"));
            assert!(threads_named("deepnvme") >= 2, "the workers have another name now");
            open_write_read_close(&engine, &file.path, round);
        };
        (0..5).for_each(come_and_go);
        let (fds, rss) = (at_rest(descriptors), resident_bytes());
        (0..40).for_each(come_and_go);
        wait_for_count("threads of engines", 0, || threads_named("deepnvme"));
        wait_for_count(&format!("descriptors, {}", kind.name()), fds, descriptors);
        let grown = resident_bytes().saturating_sub(rss);
        assert!(grown < 2 * RSS_SLACK_BYTES, "{}: memory grew by {grown} bytes in 40 engines", kind.name());
    }
}

#[test]
fn an_engine_that_cannot_start_leaves_nothing() {
    let _alone = alone();
    let broken = || {
        let inner = try_real(deepnvme_io::backend::BackendKind::Threads).expect("threads work everywhere");
        let factory: deepnvme_io::BackendFactory = std::sync::Arc::new(move |setup| {
            if setup.worker_index == 3 {
                return Err(deepnvme_io::Error::new(ErrorKind::Unsupported, "open", "not the fourth"));
            }
            Ok(inner(setup))
        });
        Engine::with_backends(Config { workers: 4, ..Config::default() }, factory).expect_err("the fourth is refused")
    };
    broken();
    let fds = at_rest(descriptors);
    (0..20).for_each(|_| drop(broken()));
    wait_for_count("threads of engines", 0, || threads_named("deepnvme"));
    wait_for_count("descriptors", fds, descriptors);
}
