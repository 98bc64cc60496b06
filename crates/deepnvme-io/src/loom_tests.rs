//! Checks every interleaving of a request's completion. Covers work items on workers, cancellation from another thread,
//! lost workers, an engine that closes during a submission, callers that run requests themselves, and the barrier. Uses
//! the real queue, jobs, claims, oneshot and barrier, with requests that move nothing:
//! `RUSTFLAGS="--cfg loom" cargo test -p deepnvme-io --lib loom_`

use std::sync::Arc;

use loom::thread;

use crate::claim::{Claim, Work};
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::GpuEvent;
use crate::gpu::StreamBarrier;
use crate::job::{Job, Memory, WriteExtent, WriteOptions};
use crate::layout::Layout;
use crate::pending::Pending;
use crate::queue::{Duty, Queue, SyncTarget, Turn};
use crate::split::{BlockSizes, Direction, Geometry, Plan, Segment};
use crate::trace::Recorder;

/// Maximum voluntary thread switches. Three find the known kinds of races.
const PREEMPTIONS_MAX: usize = 3;

fn model(check: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS_MAX);
    builder.check(check);
}

fn queue(workers: u32) -> Arc<Queue> {
    Arc::new(Queue::new(workers, &Arc::new(Recorder::new())))
}

/// A request of `blocks` blocks, with or without a preparation. It has no file and no memory, so only its work items
/// can fail.
fn job(blocks: u64, is_prepared: bool, starts_after: Vec<Box<dyn GpuEvent>>) -> Arc<Job> {
    const BLOCK_BYTES: u64 = 4096;
    let segment = |n| Segment {
        file: 0,
        item: 0,
        offset: n * 2 * BLOCK_BYTES,
        len: BLOCK_BYTES,
        address: None,
        is_flat_gpu: false,
    };
    let geometry = Geometry { direct: None, layout: Layout::SINGLE, has_gds: false };
    let sizes = BlockSizes { block_bytes: BLOCK_BYTES, slot_bytes: BLOCK_BYTES, gds_bytes: BLOCK_BYTES };
    let plan = Plan::new(Direction::Write, &[geometry], (0..blocks).map(segment).collect(), sizes).unwrap();
    assert_eq!(plan.block_count(), blocks);
    let extent = if is_prepared { WriteExtent::WholeFile } else { WriteExtent::InPlace };
    let options = WriteOptions { extent, ..WriteOptions::default() };
    let memory = (Memory::Sources(Vec::new()), false);
    Arc::new(Job::new(plan, (Vec::new(), Vec::new()), memory, starts_after, options, tracing::Span::none()))
}

fn broken() -> Error {
    Error::new(ErrorKind::Io, "write", "the queue was taken away")
}

/// Runs a worker until the queue is closed, or fails after `pieces_max` work items.
fn work(queue: &Arc<Queue>, pieces_max: usize) {
    let seat = queue.seat(0);
    let mut pieces = 0;
    loop {
        seat.run();
        while let Some(work) = Work::next(queue) {
            if pieces == pieces_max {
                // Drops its claim, as a panic does.
                drop(work);
                return queue.worker_lost(&broken());
            }
            pieces += 1;
            match work {
                Work::Prepare(claim) => super::worker::prepare(claim),
                Work::Block(claim, _) | Work::Sync(claim, SyncTarget { .. }) => claim.end(Ok(1)),
            }
        }
        if queue.leave() {
            return;
        }
        seat.park();
    }
}

fn worker(queue: &Arc<Queue>, pieces_max: usize) -> thread::JoinHandle<()> {
    let queue = Arc::clone(queue);
    thread::spawn(move || {
        queue.seat(0).sit(Arc::new(NoWake));
        work(&queue, pieces_max);
    })
}

struct NoWake;

impl crate::backend::Wake for NoWake {
    fn wake(&self) {}
}

fn pending(job: &Arc<Job>, queue: &Arc<Queue>) -> Pending<deepnvme_mem::Region> {
    Pending::new(Arc::clone(job), Arc::clone(queue))
}

fn kind(result: Option<Result<crate::job::Transfer>>) -> Option<ErrorKind> {
    result.expect("whoever has waited finds the end").err().map(|error| error.kind())
}

/// Cancels from another thread at any moment. The request ends once, with the reported outcome.
fn cancelled(blocks: u64, is_prepared: bool) {
    model(move || {
        let queue = queue(1);
        let worker = worker(&queue, usize::MAX);
        let job = job(blocks, is_prepared, Vec::new());
        queue.push(&job, Turn::Now).unwrap();
        let cancelling = pending(&job, &queue);
        let canceller = thread::spawn(move || cancelling.cancel());
        let outcome = job.outcome.wait();
        let told = canceller.join().unwrap();
        assert_eq!(outcome.is_err(), told);
        queue.close();
        worker.join().unwrap();
        assert_eq!(queue.ended(), (1, u64::from(told)), "it ended once");
    });
}

#[test]
fn loom_a_request_is_cancelled_while_it_is_prepared() {
    cancelled(1, true);
}

#[test]
fn loom_a_request_of_nothing_is_cancelled_while_it_is_prepared() {
    cancelled(0, true);
}

#[test]
fn loom_a_request_is_cancelled_between_its_blocks() {
    cancelled(2, false);
}

#[test]
fn loom_two_cancel_at_once() {
    model(|| {
        let queue = queue(1);
        let job = job(1, true, Vec::new());
        queue.push(&job, Turn::Now).unwrap();
        let (one, two) = (pending(&job, &queue), pending(&job, &queue));
        let other = thread::spawn(move || one.cancel());
        let told = two.cancel();
        assert!(told != other.join().unwrap(), "one of them has given it up");
        assert_eq!(kind(two.result()), Some(ErrorKind::Cancelled));
        assert_eq!(queue.ended(), (1, 1));
    });
}

#[test]
fn loom_the_last_worker_is_lost_while_a_request_comes() {
    for pieces in 0..3 {
        model(move || {
            let queue = queue(1);
            let worker = worker(&queue, pieces);
            let job = job(1, true, Vec::new());
            let pushed = queue.push(&job, Turn::Now);
            if pushed.is_ok() {
                let outcome = job.outcome.wait();
                assert_eq!(outcome.is_err(), pieces < 2, "nobody waits for ever");
                assert_eq!(queue.ended().0, 1);
            }
            queue.close();
            worker.join().unwrap();
        });
    }
}

#[test]
fn loom_an_engine_is_closed_while_a_request_comes() {
    model(|| {
        let queue = queue(1);
        let worker = worker(&queue, usize::MAX);
        let closing = Arc::clone(&queue);
        let closer = thread::spawn(move || closing.close());
        let job = job(1, true, Vec::new());
        match queue.push(&job, Turn::Now) {
            Ok(()) => assert!(job.outcome.wait().is_ok(), "what was taken is finished"),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Closed),
        }
        closer.join().unwrap();
        worker.join().unwrap();
    });
}

/// A caller that runs a request itself leaves work to the workers. They are alive, or it gets an error.
#[test]
fn loom_workers_stay_for_callers() {
    model(|| {
        let queue = queue(1);
        let worker = worker(&queue, usize::MAX);
        let closing = Arc::clone(&queue);
        let closer = thread::spawn(move || closing.close());
        let job = job(1, false, Vec::new());
        if let Ok(caller) = queue.enter(&job) {
            // Its block stays unclaimed, and is offered like the blocks after a preparation.
            queue.prepared(&job);
            drop(caller);
            assert!(job.outcome.wait().is_ok());
        }
        closer.join().unwrap();
        worker.join().unwrap();
    });
}

#[test]
fn loom_the_last_worker_is_lost_while_a_caller_works_itself() {
    model(|| {
        let queue = queue(1);
        let worker = worker(&queue, 0);
        let other = job(1, false, Vec::new());
        queue.push(&other, Turn::Now).unwrap();
        let job = job(1, false, Vec::new());
        if let Ok(caller) = queue.enter(&job) {
            queue.prepared(&job);
            drop(caller);
            assert_eq!(kind(Some(job.outcome.wait())), Some(ErrorKind::Io));
        }
        assert_eq!(kind(Some(other.outcome.wait())), Some(ErrorKind::Io));
        worker.join().unwrap();
    });
}

#[test]
fn loom_a_claim_that_is_dropped_fails_its_request() {
    model(|| {
        let queue = queue(1);
        let job = job(2, false, Vec::new());
        let claims = [job.claim(), job.claim()].map(|_| Claim::new(Arc::clone(&job), Arc::clone(&queue), Duty::Block));
        let [one, two] = claims;
        let other = thread::spawn(move || drop(one));
        two.end(Ok(1));
        other.join().unwrap();
        assert_eq!(kind(job.outcome.get()), Some(ErrorKind::Io));
        assert_eq!(queue.ended(), (1, 1));
    });
}

/// Dropping a pending does not affect its request.
#[test]
fn loom_a_pending_is_dropped_while_its_request_ends() {
    model(|| {
        let queue = queue(1);
        let worker = worker(&queue, usize::MAX);
        let job = job(1, false, Vec::new());
        queue.push(&job, Turn::Now).unwrap();
        let dropped = pending(&job, &queue);
        let dropper = thread::spawn(move || drop(dropped));
        queue.close();
        worker.join().unwrap();
        dropper.join().unwrap();
        assert_eq!(kind(job.outcome.get()), None);
    });
}

/// A stream point that another thread completes.
#[derive(Debug)]
struct Point(Arc<loom::sync::atomic::AtomicBool>);

impl GpuEvent for Point {
    fn record(&self, _: deepnvme_mem::StreamHandle) -> Result<()> {
        Ok(())
    }

    fn is_complete(&self) -> Result<bool> {
        Ok(self.0.load(loom::sync::atomic::Ordering::SeqCst))
    }

    fn wait(&self) -> Result<()> {
        Ok(())
    }
}

#[test]
fn loom_the_gate_is_closed_while_a_request_is_held_and_cancelled() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(|| {
        let queue = queue(1);
        let barrier = Arc::new(StreamBarrier::new(&queue));
        let come = Arc::new(loom::sync::atomic::AtomicBool::new(true));
        let job = job(1, false, vec![Box::new(Point(come))]);
        let cancelling = pending(&job, &queue);
        let held = barrier.hold(&job, Turn::Now);
        let canceller = thread::spawn(move || cancelling.cancel());
        barrier.close();
        let told = canceller.join().unwrap();
        assert!(held.is_ok());
        assert_eq!(barrier.hold(&job, Turn::Now).unwrap_err().kind(), ErrorKind::Closed);
        // Requests released by the barrier are in the queue, and no worker has started them.
        queue.close();
        if !told {
            assert!(matches!(Work::next(&queue), Some(Work::Block(..))));
        }
        assert!(job.outcome.get().is_some());
        assert_eq!(queue.ended().0, 1);
    });
}
