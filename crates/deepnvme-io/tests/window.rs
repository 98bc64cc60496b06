//! When a worker refills its queue: after each completion, or once all ops are complete. And its depth.
#![allow(clippy::expect_used, reason = "helpers of tests fail like tests")]

mod common;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{decorated, open};
use deepnvme_io::backend::{Backend, BackendKind};
use deepnvme_io::op::{Completion, Op, Submit};
use deepnvme_io::{Config, DirectMode, Result, WindowMode};
use deepnvme_testkit::data::{TestFile, bytes_of, difference, random_bytes, region_at};
use deepnvme_testkit::faults::{FaultPlan, Faults};
use deepnvme_testkit::forward_to_inner;

/// Counts the ops that were submitted while some, but not all, of those in flight with them had completed.
struct Recorder {
    inner: Box<dyn Backend>,
    is_batch_split: bool,
    refills: Arc<AtomicU32>,
}

impl Backend for Recorder {
    forward_to_inner!(kind, depth, in_flight, flush, waker);

    fn submit(&mut self, op: Op) -> Submit {
        self.refills.fetch_add(u32::from(self.is_batch_split), Ordering::SeqCst);
        self.inner.submit(op)
    }

    fn reap(&mut self, min: u32, completions: &mut Vec<Completion>) -> Result<()> {
        let before = completions.len();
        self.inner.reap(min, completions)?;
        self.is_batch_split = self.inner.in_flight() > 0 && (self.is_batch_split || completions.len() > before);
        Ok(())
    }
}

#[test]
fn a_window_slides_or_drains_first() {
    let content = random_bytes(1, 1 << 20);
    let file = TestFile::holding(&content);
    for (window, mode) in [
        (WindowMode::Sliding, DirectMode::Preferred),
        (WindowMode::Drain, DirectMode::Preferred),
        (WindowMode::Drain, DirectMode::Disabled),
    ] {
        // Ops of unequal times, so that completions arrive one by one.
        let slow = FaultPlan { seed: 7, slow: 700, slow_max: Duration::from_millis(3), ..FaultPlan::default() };
        let faults = Faults::new(slow);
        let refills = Arc::new(AtomicU32::new(0));
        let (inner, counted) =
            (decorated(BackendKind::Threads, &faults).expect("works everywhere"), Arc::clone(&refills));
        let config = Config { workers: 2, queue_depth: 6, block_bytes: 8192, window, ..Config::default() };
        let make = move |setup: &_| -> Box<dyn Backend> {
            Box::new(Recorder { inner: inner(setup), is_batch_split: false, refills: Arc::clone(&counted) })
        };
        let engine = common::engine(config, Box::new(make));
        let target = open(&file.path, mode).expect("the test file");
        for skew in [0, 1] {
            let (returned, result) = engine.read(&target, 0, region_at(skew, content.len())).expect("accepted").wait();
            result.expect("read");
            let found = bytes_of(&returned.expect("memory is returned").region());
            assert_eq!(difference(&found, &content), None, "{window:?}");
        }
        let refills = refills.load(Ordering::SeqCst);
        assert_eq!(refills == 0, window == WindowMode::Drain, "{window:?}: {refills} ops joined others in flight");
    }
}

/// A device that does one op at a time, and records the queue depth at each submission.
struct OneByOne {
    inner: Box<dyn Backend>,
    per_op: Duration,
    done: VecDeque<Completion>,
    depths: Arc<Mutex<Vec<u32>>>,
}

impl Backend for OneByOne {
    forward_to_inner!(kind, depth, flush, waker);

    fn in_flight(&self) -> u32 {
        self.inner.in_flight() + self.done.len() as u32
    }

    fn submit(&mut self, op: Op) -> Submit {
        self.depths.lock().expect("nobody panics with it").push(self.in_flight() + 1);
        self.inner.submit(op)
    }

    fn reap(&mut self, min: u32, completions: &mut Vec<Completion>) -> Result<()> {
        let mut fresh = Vec::new();
        self.inner.reap(if self.done.is_empty() { min } else { 0 }, &mut fresh)?;
        self.done.extend(fresh);
        if let Some(completion) = self.done.pop_front() {
            std::thread::sleep(self.per_op);
            completions.push(completion);
        }
        Ok(())
    }
}

#[test]
fn a_slow_device_is_not_given_more_than_it_does_in_a_moment() {
    let content = random_bytes(2, 150 * 4096);
    let file = TestFile::holding(&content);
    let deepest = |per_op: Duration, window: WindowMode| {
        let faults = Faults::new(FaultPlan::default());
        let inner = decorated(BackendKind::Threads, &faults).expect("works everywhere");
        let depths = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&depths);
        let make = move |setup: &_| -> Box<dyn Backend> {
            Box::new(OneByOne { inner: inner(setup), per_op, done: VecDeque::new(), depths: Arc::clone(&seen) })
        };
        let config = Config { workers: 1, queue_depth: 64, block_bytes: 4096, window, ..Config::default() };
        let engine = common::engine(config, Box::new(make));
        let target = open(&file.path, DirectMode::Preferred).expect("the test file");
        let (returned, result) = engine.read(&target, 0, region_at(0, content.len())).expect("accepted").wait();
        result.expect("read");
        assert_eq!(difference(&bytes_of(&returned.expect("memory is returned").region()), &content), None);
        let depths = depths.lock().expect("nobody panics with it");
        // Of the later half, when the device's speed is known.
        depths[75..].iter().copied().max().expect("half of the ops")
    };
    assert_eq!(deepest(Duration::ZERO, WindowMode::Sliding), 64);
    // A loaded machine makes it even slower.
    let slow = deepest(Duration::from_millis(8), WindowMode::Sliding);
    assert!((16..=48).contains(&slow), "about 25 of 8 ms each: {slow}");
    assert_eq!(deepest(Duration::from_millis(2), WindowMode::Drain), 64, "a drained queue is refilled to its depth");
}
