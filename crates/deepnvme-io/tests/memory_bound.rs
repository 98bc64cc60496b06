//! Memory is bounded: whatever the size of a transfer, the engine allocates its pool and little else. Measured as the
//! peak of a separate process.
#![allow(clippy::expect_used, clippy::panic, clippy::print_stdout, reason = "helpers of tests fail like tests")]

mod common;

use std::process::Command;

use common::{REAL_BACKENDS, all_real, engine, open, try_real};
use deepnvme_io::backend::BackendKind;
use deepnvme_io::{Config, DirectMode, Transfer, WriteOptions};
use deepnvme_mem::Buffer;
use deepnvme_testkit::data::{TestFile, own_memory_bytes};
use deepnvme_testkit::rng::Rng;

/// Bytes of each of the caller's tensors. [`REQUESTS`] of them are in flight at once.
const TENSOR_BYTES: usize = 48 << 20;
const REQUESTS: usize = 4;
const POOL_BYTES: u64 = 8 << 20;
/// Allowance besides the pool: thread stacks, queues, tables of requests, and this test itself.
const SLACK_BYTES: u64 = 6 << 20;
const CHILD_BACKEND: &str = "DEEPNVME_TEST_CHILD_BACKEND";

#[test]
fn a_bounced_transfer_stays_within_the_pool() {
    for (kind, _) in all_real() {
        for mode in ["direct", "buffered"] {
            let output = Command::new(std::env::current_exe().expect("the test's own program"))
                .args(["--exact", "child_that_bounces", "--ignored", "--nocapture"])
                .env(CHILD_BACKEND, format!("{} {mode}", kind.name()))
                .output()
                .expect("a process of our own");
            let said =
                format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
            assert!(output.status.success() && said.contains("1 passed"), "{} {mode}:\n{said}", kind.name());
            println!("{}", said.lines().find(|line| line.contains("KiB")).unwrap_or_default());
        }
    }
}

#[test]
#[ignore = "run by a_bounced_transfer_stays_within_the_pool, in a process of its own"]
fn child_that_bounces() {
    let asked = std::env::var(CHILD_BACKEND).expect("only its parent runs this");
    let (name, mode) = asked.split_once(' ').expect("a backend and a mode");
    let kind: BackendKind = *REAL_BACKENDS.iter().find(|kind| kind.name() == name).expect("a backend");
    let mode = if mode == "direct" { DirectMode::Preferred } else { DirectMode::Disabled };

    let config =
        Config { workers: 2, queue_depth: 16, block_bytes: 1 << 20, pool_bytes: Some(POOL_BYTES), ..Config::default() };
    assert!(config.pool_bound_bytes() <= POOL_BYTES);
    let file = TestFile::holding(&[]);
    let target = open(&file.path, mode).expect("the test file");
    // One extra byte breaks every alignment, so that all transfers are bounced.
    let tensor = |seed: usize| {
        let mut buffer = Buffer::zeroed(TENSOR_BYTES + 1).expect("memory");
        Rng::new(seed as u64).fill(buffer.as_mut_slice());
        buffer.into_region().split_at(1).1
    };
    let tensors: Vec<_> = (0..REQUESTS).map(tensor).collect();
    let before = own_memory_bytes("VmHWM:").expect("a peak");
    assert!(before > (REQUESTS * TENSOR_BYTES) as u64, "the caller's memory is not there yet");

    let engine = engine(config, try_real(kind).expect("the parent has checked"));
    let write = |(index, tensor): (usize, &deepnvme_mem::RegionMut)| {
        let offset = (index * TENSOR_BYTES) as u64;
        engine.write(&target, offset, tensor.region(), WriteOptions::default()).expect("accepted")
    };
    let writes: Vec<_> = tensors.iter().enumerate().map(write).collect();
    writes.into_iter().map(Transfer::wait).for_each(|(_, result)| assert!(result.is_ok(), "{result:?}"));
    let read = |(index, tensor): (usize, deepnvme_mem::RegionMut)| {
        engine.read(&target, (index * TENSOR_BYTES) as u64, tensor).expect("accepted")
    };
    let reads: Vec<_> = tensors.into_iter().enumerate().map(read).collect();
    reads.into_iter().map(Transfer::wait).for_each(|(_, result)| assert!(result.is_ok(), "{result:?}"));

    let stats = engine.stats();
    let moved = (2 * REQUESTS * TENSOR_BYTES) as u64;
    assert_eq!(stats.bytes_read + stats.bytes_written, moved);
    if matches!(target.direct(), deepnvme_io::DirectState::Direct { .. }) {
        assert!(stats.bytes_bounced > moved / 2, "hardly anything was bounced: {stats:?}");
    }
    assert!(stats.pool_bytes <= POOL_BYTES, "the pool is larger than its bound: {stats:?}");
    let grown = own_memory_bytes("VmHWM:").expect("a peak") - before;
    println!("{asked}: {} KiB beyond the caller's memory", grown >> 10);
    let bound = POOL_BYTES + SLACK_BYTES;
    assert!(grown <= bound, "{asked}: the peak grew by {grown} bytes, of {bound} allowed");
}
