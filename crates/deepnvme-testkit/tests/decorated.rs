//! The fault decorator over a real backend: injected faults are visible to the op's owner.
#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, reason = "these are tests")]

use std::time::{Duration, Instant};

use deepnvme_io::backend::{self, Backend, BackendKind, BackendSetup};
use deepnvme_io::op::{Errno, OpKind};
use deepnvme_testkit::conformance::Harness;
use deepnvme_testkit::data::{TestFile, bytes_of, random_bytes, region_holding};
use deepnvme_testkit::faults::{FaultPlan, Faults};

const OPS: u64 = 200;
const OP_BYTES: usize = 3000;

fn harness(faults: &Faults) -> Harness {
    let make = |setup: &BackendSetup| -> Box<dyn Backend> {
        let inner = backend::open(BackendKind::Threads, setup).expect("threads work everywhere");
        Box::new(faults.wrap(inner))
    };
    Harness::new(&make, 16)
}

/// The outcome of a write: its result, its memory, and the bytes in the file.
type Outcome = (Result<usize, Errno>, Vec<u8>, Vec<u8>);

/// Writes `OPS` blocks into a file of 0xee.
fn write_all(faults: &Faults) -> Vec<Outcome> {
    let file = TestFile::holding(&vec![0xee; OPS as usize * OP_BYTES]);
    let mut harness = harness(faults);
    let mut returned = Vec::new();
    for index in 0..OPS {
        let bytes = random_bytes(index, OP_BYTES);
        let (one, other) = (region_holding(3, &bytes[..1000]), region_holding(0, &bytes[1000..]));
        let op = harness.op(OpKind::Write, &file.file, index * OP_BYTES as u64, &[one.region(), other.region()]);
        harness.submit(op);
        if harness.backend.in_flight() == 16 {
            returned.extend(harness.reap_some());
        }
    }
    returned.extend(harness.reap(harness.backend.in_flight() as usize));
    let content = file.bytes();
    returned
        .into_iter()
        .map(|completion| {
            let at = completion.op.offset as usize;
            let memory: Vec<u8> = completion.op.iovecs.iter().flat_map(bytes_of).collect();
            assert_eq!(memory, random_bytes((at / OP_BYTES) as u64, OP_BYTES), "the op completed with other memory");
            (completion.result, memory, content[at..at + OP_BYTES].to_vec())
        })
        .collect()
}

#[test]
fn a_short_transfer_really_moves_less() {
    let faults = Faults::new(FaultPlan { seed: 1, short: 500, ..FaultPlan::default() });
    let mut short = 0;
    for (result, memory, found) in write_all(&faults) {
        let moved = result.expect("only short transfers were asked for");
        assert_eq!(found[..moved], memory[..moved]);
        assert!(found[moved..].iter().all(|byte| *byte == 0xee), "more was moved than reported");
        short += u64::from(moved < OP_BYTES);
    }
    assert!(short > 50);
    assert_eq!(faults.counts().short, short);
}

#[test]
fn an_injected_error_is_reported_and_counted() {
    let plan = FaultPlan { seed: 2, eintr: 100, eagain: 100, eio: 200, enospc: 200, ..FaultPlan::default() };
    let faults = Faults::new(plan);
    let results = write_all(&faults);
    let of = |errno| results.iter().filter(|(result, ..)| *result == Err(errno)).count() as u64;
    let counts = faults.counts();
    assert_eq!((of(Errno::INTR), of(Errno::AGAIN)), (counts.eintr, counts.eagain));
    assert_eq!((of(Errno::IO), of(Errno::NOSPC)), (counts.eio, counts.enospc));
    assert!(counts.eintr > 0 && counts.eagain > 0 && counts.eio > 0 && counts.enospc > 0);
    let (mut done, mut undone) = (0, 0);
    for (_, memory, found) in results.iter().filter(|(result, ..)| *result == Err(Errno::IO)) {
        if found == memory {
            done += 1;
        } else {
            assert!(found.iter().all(|byte| *byte == 0xee));
            undone += 1;
        }
    }
    assert!(done > 0 && undone > 0, "a write that fails with EIO may or may not have changed the file");
}

#[test]
fn a_slow_completion_is_late_and_a_wake_is_not() {
    let slow = Duration::from_millis(1000);
    let faults = Faults::new(FaultPlan { slow: 1000, slow_max: slow, ..FaultPlan::default() });
    let file = TestFile::holding(&random_bytes(1, OP_BYTES));
    let mut harness = harness(&faults);
    let started = Instant::now();
    for index in 0..8 {
        let op = harness.op(OpKind::Read, &file.file, index, &[region_holding(0, &[1; 100]).region()]);
        harness.submit(op);
    }
    let mut returned = Vec::new();
    harness.backend.waker().wake();
    harness.backend.reap(8, &mut returned).expect("the queue works");
    assert!(returned.len() < 8 && started.elapsed() < slow / 2, "the wake did not end the reap");
    harness.reap(8 - returned.len());
    assert!(started.elapsed() > slow / 4, "nothing was held back");
    assert_eq!(faults.counts().slow, 8);
}

#[test]
fn completions_arrive_in_another_order() {
    let faults = Faults::new(FaultPlan { seed: 4, reorder: true, ..FaultPlan::default() });
    let results = write_all(&faults);
    assert!(results.iter().all(|(result, memory, found)| *result == Ok(OP_BYTES) && memory == found));
    assert!(faults.counts().reordered > 10);
}
