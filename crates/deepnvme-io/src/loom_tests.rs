//! Checks the interleavings of a request's completion, with at most [`PREEMPTIONS_MAX`] preemptions. Covers work items
//! on workers, cancellation from another thread, lost workers, an engine that closes during a submission, callers that
//! run requests themselves, and requests that wait for streams. Uses the real queue, requests, work items, oneshot and
//! wait list, with requests that move nothing: `RUSTFLAGS="--cfg loom" cargo test -p deepnvme-io --lib loom_`

use std::sync::Arc;

use loom::thread;

use crate::error::{Error, ErrorKind, Result};
use crate::gpu::GpuEvent;
use crate::op::Direction;
use crate::request::{
    PlannedRequest, Priority, Request, RequestMemory, RequestQueue, StreamWaitList, SyncTarget, Transfer, WorkGuard,
    WorkItem, WorkKind, WriteMode, WriteOptions,
};
use crate::split::{BlockPlan, BlockSizes, FileGeometry, Segment};
use crate::stripe_layout::StripeLayout;
use crate::trace::Recorder;

/// Maximum preemptions: thread switches at a point where the thread could go on. Three find the known kinds of races.
const PREEMPTIONS_MAX: usize = 3;

fn model(check: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS_MAX);
    builder.check(check);
}

fn queue(workers: u32) -> Arc<RequestQueue> {
    Arc::new(RequestQueue::new(workers, &Arc::new(Recorder::new())))
}

/// A request of `blocks` blocks, with or without a preparation. It has no file and no memory, so only its work items
/// can fail.
fn request(blocks: u64, is_prepared: bool, starts_after: Vec<Box<dyn GpuEvent>>) -> Arc<Request> {
    const BLOCK_BYTES: u64 = 4096;
    let segment = |n| Segment {
        file: 0,
        item: 0,
        offset: n * 2 * BLOCK_BYTES,
        len: BLOCK_BYTES,
        address: None,
        is_contiguous_gpu: false,
    };
    let geometry = FileGeometry { direct: None, layout: StripeLayout::SINGLE, has_gds: false };
    let sizes = BlockSizes { block_bytes: BLOCK_BYTES, bounce_bytes: BLOCK_BYTES, gds_bytes: BLOCK_BYTES };
    let plan = BlockPlan::new(Direction::Write, &[geometry], (0..blocks).map(segment).collect(), sizes).unwrap();
    assert_eq!(plan.block_count(), blocks);
    let mode = if is_prepared { WriteMode::WholeFile } else { WriteMode::InPlace };
    let options = WriteOptions { mode, ..WriteOptions::default() };
    let planned = PlannedRequest::without_files(plan, starts_after);
    Arc::new(Request::new(planned, RequestMemory::Sources(Vec::new()), options))
}

fn broken() -> Error {
    Error::new(ErrorKind::Io, "write", "the queue was taken away")
}

/// Runs a worker until the queue is closed, or fails after `items_max` work items.
fn work(queue: &Arc<RequestQueue>, items_max: usize) {
    let handle = queue.handle(0);
    let mut items = 0;
    loop {
        handle.run();
        while let Some(work) = WorkItem::next(queue) {
            if items == items_max {
                // Drops its guard, as a panic does.
                drop(work);
                return queue.worker_failed(&broken());
            }
            items += 1;
            match work {
                WorkItem::Prepare(guard) => super::worker::prepare(guard),
                WorkItem::Block(guard, _) | WorkItem::Sync(guard, SyncTarget { .. }) => guard.end(Ok(1)),
            }
        }
        if queue.try_exit() {
            return;
        }
        handle.park();
    }
}

fn worker(queue: &Arc<RequestQueue>, items_max: usize) -> thread::JoinHandle<()> {
    let queue = Arc::clone(queue);
    thread::spawn(move || {
        queue.handle(0).register(Arc::new(NoWake));
        work(&queue, items_max);
    })
}

struct NoWake;

impl crate::backend::Wake for NoWake {
    fn wake(&self) {}
}

fn transfer(request: &Arc<Request>, queue: &Arc<RequestQueue>) -> Transfer<deepnvme_mem::Region> {
    Transfer::new(Arc::clone(request), Arc::clone(queue))
}

fn kind(result: Option<Result<crate::request::Transferred>>) -> Option<ErrorKind> {
    result.expect("a result after waiting").err().map(|error| error.kind())
}

/// Cancels from another thread at any moment. The request ends once, with the reported outcome.
fn cancelled(blocks: u64, is_prepared: bool) {
    model(move || {
        let queue = queue(1);
        let worker = worker(&queue, usize::MAX);
        let request = request(blocks, is_prepared, Vec::new());
        queue.push(&request, Priority::Normal).unwrap();
        let cancelling = transfer(&request, &queue);
        let canceller = thread::spawn(move || cancelling.cancel());
        let outcome = request.result.wait();
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
        let request = request(1, true, Vec::new());
        queue.push(&request, Priority::Normal).unwrap();
        let (one, two) = (transfer(&request, &queue), transfer(&request, &queue));
        let other = thread::spawn(move || one.cancel());
        let told = two.cancel();
        assert!(told != other.join().unwrap(), "one of them has given it up");
        assert_eq!(kind(two.result()), Some(ErrorKind::Cancelled));
        assert_eq!(queue.ended(), (1, 1));
    });
}

#[test]
fn loom_the_last_worker_is_lost_while_a_request_comes() {
    for items in 0..3 {
        model(move || {
            let queue = queue(1);
            let worker = worker(&queue, items);
            let request = request(1, true, Vec::new());
            let pushed = queue.push(&request, Priority::Normal);
            if pushed.is_ok() {
                let outcome = request.result.wait();
                assert_eq!(outcome.is_err(), items < 2, "no caller waits forever");
                assert_eq!(queue.ended().0, 1);
            }
            queue.close();
            worker.join().unwrap();
        });
    }
}

/// Closes the queue from another thread, at any moment of `check`.
fn closed_during(check: fn(&Arc<RequestQueue>)) {
    model(move || {
        let queue = queue(1);
        let worker = worker(&queue, usize::MAX);
        let closing = Arc::clone(&queue);
        let closer = thread::spawn(move || closing.close());
        check(&queue);
        closer.join().unwrap();
        worker.join().unwrap();
    });
}

#[test]
fn loom_an_engine_is_closed_while_a_request_comes() {
    closed_during(|queue| {
        let request = request(1, true, Vec::new());
        match queue.push(&request, Priority::Normal) {
            Ok(()) => assert!(request.result.wait().is_ok(), "what was taken is finished"),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Closed),
        }
    });
}

/// A caller that runs a request itself leaves work to the workers. They are alive, or it gets an error.
#[test]
fn loom_workers_stay_for_callers() {
    closed_during(|queue| {
        let request = request(1, false, Vec::new());
        if let Ok(caller) = queue.enter_inline(&request) {
            // Its block stays unclaimed, and is offered like the blocks after a preparation.
            queue.offer_blocks(&request);
            drop(caller);
            assert!(request.result.wait().is_ok());
        }
    });
}

#[test]
fn loom_the_last_worker_is_lost_while_a_caller_works_itself() {
    model(|| {
        let queue = queue(1);
        let worker = worker(&queue, 0);
        let other = request(1, false, Vec::new());
        queue.push(&other, Priority::Normal).unwrap();
        let request = request(1, false, Vec::new());
        if let Ok(caller) = queue.enter_inline(&request) {
            queue.offer_blocks(&request);
            drop(caller);
            assert_eq!(kind(Some(request.result.wait())), Some(ErrorKind::Io));
        }
        assert_eq!(kind(Some(other.result.wait())), Some(ErrorKind::Io));
        worker.join().unwrap();
    });
}

#[test]
fn loom_a_work_item_that_is_dropped_fails_its_request() {
    model(|| {
        let queue = queue(1);
        let request = request(2, false, Vec::new());
        let guards = [request.claim_block(), request.claim_block()]
            .map(|_| WorkGuard::new(Arc::clone(&request), Arc::clone(&queue), WorkKind::Block));
        let [one, two] = guards;
        let other = thread::spawn(move || drop(one));
        two.end(Ok(1));
        other.join().unwrap();
        assert_eq!(kind(request.result.get()), Some(ErrorKind::Io));
        assert_eq!(queue.ended(), (1, 1));
    });
}

/// Dropping a transfer does not affect its request.
#[test]
fn loom_a_transfer_is_dropped_while_its_request_ends() {
    model(|| {
        let queue = queue(1);
        let worker = worker(&queue, usize::MAX);
        let request = request(1, false, Vec::new());
        queue.push(&request, Priority::Normal).unwrap();
        let dropped = transfer(&request, &queue);
        let dropper = thread::spawn(move || drop(dropped));
        queue.close();
        worker.join().unwrap();
        dropper.join().unwrap();
        assert_eq!(kind(request.result.get()), None);
    });
}

/// An event that another thread completes.
#[derive(Debug)]
struct FlagEvent(Arc<loom::sync::atomic::AtomicBool>);

impl GpuEvent for FlagEvent {
    fn record(&self, _: deepnvme_mem::StreamHandle) -> Result<()> {
        Ok(())
    }

    fn is_complete(&self) -> Result<bool> {
        Ok(self.0.load(loom::sync::atomic::Ordering::SeqCst))
    }

    fn wait(&self, _: std::time::Duration) -> Result<()> {
        Ok(())
    }
}

#[test]
fn loom_the_stream_wait_list_is_closed_while_a_request_is_held_and_cancelled() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(|| {
        let queue = queue(1);
        let list = Arc::new(StreamWaitList::new(&queue));
        let come = Arc::new(loom::sync::atomic::AtomicBool::new(true));
        let request = request(1, false, vec![Box::new(FlagEvent(come))]);
        let cancelling = transfer(&request, &queue);
        let held = list.hold(&request, Priority::Normal);
        let canceller = thread::spawn(move || cancelling.cancel());
        list.close();
        let told = canceller.join().unwrap();
        assert!(held.is_ok());
        assert_eq!(list.hold(&request, Priority::Normal).unwrap_err().kind(), ErrorKind::Closed);
        // Requests released by the list are in the queue, and no worker has started them.
        queue.close();
        if !told {
            assert!(matches!(WorkItem::next(&queue), Some(WorkItem::Block(..))));
        }
        assert!(request.result.get().is_some());
        assert_eq!(queue.ended().0, 1);
    });
}
