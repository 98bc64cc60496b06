//! Waiting in `reap`, and waking it.
//!
//! A broken contract here is a hang: run these under [`watchdog::with_time_limit`](crate::watchdog::with_time_limit).

use std::time::{Duration, Instant};

use deepnvme_io::op::OpKind;

use super::{Harness, Make};
use crate::data::{TestFile, random_bytes, region_at};

/// Long enough for a thread to be waiting, short enough for a test.
const A_MOMENT: Duration = Duration::from_millis(30);

/// `reap(0)` does not wait, with or without ops in flight.
///
/// # Panics
/// If the backend breaks the contract, like every check.
pub fn reap_zero_does_not_wait(make: Make<'_>) {
    let file = TestFile::holding(&random_bytes(1, 1 << 20));
    let mut harness = Harness::new(make, 4);
    let mut completions = Vec::new();
    for _ in 0..100 {
        harness.backend.reap(0, &mut completions).expect("the queue works");
    }
    assert!(completions.is_empty());
    let op = harness.op(OpKind::Read, &file.file, 0, &[region_at(0, 1 << 20).region()]);
    harness.submit(op);
    // Polling is enough to complete the op, without `flush`.
    while completions.is_empty() {
        harness.backend.reap(0, &mut completions).expect("the queue works");
        std::thread::yield_now();
    }
    assert_eq!(completions[0].result, Ok(1 << 20));
}

/// A wake from another thread ends a `reap` that waits for more than is in flight.
pub fn a_wake_ends_a_reap(make: Make<'_>) {
    let mut harness = Harness::new(make, 4);
    for _ in 0..5 {
        let waker = harness.backend.waker();
        let started = Instant::now();
        let thread = std::thread::spawn(move || {
            std::thread::sleep(A_MOMENT);
            waker.wake();
        });
        let mut completions = Vec::new();
        // A wake of the previous round may end this call early, once. The new one must end the waiting call.
        while started.elapsed() < A_MOMENT {
            harness.backend.reap(1, &mut completions).expect("the queue works");
        }
        assert!(completions.is_empty(), "nothing was in flight");
        thread.join().expect("the waking thread");
    }
}

/// A wake before the `reap` is not lost, even if repeated.
pub fn a_wake_before_the_reap_counts(make: Make<'_>) {
    let mut harness = Harness::new(make, 4);
    let mut completions = Vec::new();
    for wakes in [1, 2, 1000] {
        let waker = harness.backend.waker();
        std::thread::spawn(move || (0..wakes).for_each(|_| waker.wake())).join().expect("the waking thread");
        harness.backend.reap(1, &mut completions).expect("the queue works");
    }
    assert!(completions.is_empty(), "nothing was in flight");
}

/// Wakes neither lose nor duplicate completions.
pub fn a_wake_loses_no_completion(make: Make<'_>) {
    const ROUNDS: u64 = 200;
    let file = TestFile::holding(&random_bytes(2, 64 << 10));
    let mut harness = Harness::new(make, 8);
    let waker = harness.backend.waker();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                waker.wake();
                std::thread::sleep(Duration::from_micros(50));
            }
        });
        let mut returned = std::collections::BTreeSet::new();
        for _ in 0..ROUNDS {
            for index in 0..8 {
                let op = harness.op(OpKind::Read, &file.file, index * 8192, &[region_at(0, 8192).region()]);
                harness.submit(op);
            }
            for completion in harness.reap(8) {
                assert!(returned.insert(completion.op.token), "{:?} came back twice", completion.op.token);
            }
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(returned.len() as u64, 8 * ROUNDS);
    });
}

/// A waker may outlive its backend.
pub fn a_wake_after_the_end_is_harmless(make: Make<'_>) {
    let harness = Harness::new(make, 2);
    let (one, other) = (harness.backend.waker(), harness.backend.waker());
    one.wake();
    drop(harness);
    one.wake();
    other.wake();
    let mut next = Harness::new(make, 2);
    let file = TestFile::holding(b"still works");
    assert_eq!(next.read(&file.file, 0, &region_at(0, 11).region()), Ok(11));
}
