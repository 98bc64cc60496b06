//! Holds back requests whose GPU memory is in use, until the GPU's streams reach the recorded events.
//!
//! Workers never wait for GPU kernels: all other requests would wait behind them. Held requests are polled, ever more
//! rarely. Polling works for any number of streams, and also ends when a stream fails.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use deepnvme_cuda::{own_this_thread, pause_after};
use deepnvme_mem::ParentOnly;

use super::queue::closed;
use super::{Priority, Request, RequestQueue};
use crate::error::{Error, ErrorKind, Result};
use crate::start::start_thread;
use crate::sync::thread::{self, JoinHandle};
use crate::sync::{Condvar, Instant, Mutex, lock, sleep_or_notified, wait};

/// How long a closed engine waits for streams: as long as the kernel's timeout for a disk. Some streams never reach
/// their event, for instance when a GPU kernel waits for another process.
const STREAM_TIMEOUT: Duration = Duration::from_secs(30);

/// The held requests of one engine.
pub(crate) struct StreamWaitList {
    shared: Arc<Shared>,
    /// Created for the first held request.
    thread: Mutex<Option<ParentOnly<JoinHandle<()>>>>,
    /// Held while closing, so that concurrent closers wait equally long.
    closing: Mutex<()>,
}

/// A held request, and when it was added.
struct HeldRequest {
    request: Arc<Request>,
    priority: Priority,
    since: Instant,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    queue: Arc<RequestQueue>,
    timeout: Duration,
}

#[derive(Default)]
struct State {
    held: Vec<HeldRequest>,
    /// When the list was closed.
    closed: Option<Instant>,
}

impl StreamWaitList {
    pub(crate) fn new(queue: &Arc<RequestQueue>) -> Self {
        Self::with_timeout(queue, STREAM_TIMEOUT)
    }

    fn with_timeout(queue: &Arc<RequestQueue>, timeout: Duration) -> Self {
        let (state, changed) = (Mutex::new(State::default()), Condvar::new());
        let shared = Arc::new(Shared { state, changed, queue: Arc::clone(queue), timeout });
        Self { shared, thread: Mutex::new(None), closing: Mutex::new(()) }
    }

    /// Holds the request, and queues it once its memory is ready.
    pub(crate) fn hold(&self, request: &Arc<Request>, priority: Priority) -> Result<()> {
        let mut thread = lock(&self.thread);
        // Checked under the thread lock: `close` takes the thread under it, and a thread created later would never be
        // joined.
        if lock(&self.shared.state).closed.is_some() {
            return Err(closed(request));
        }
        if thread.is_none() {
            let shared = Arc::clone(&self.shared);
            let builder = thread::Builder::new().name("dnvme-streams".into());
            *thread = Some(ParentOnly::new(start_thread(|| builder.spawn(move || shared.run()))?));
        }
        let held = HeldRequest { request: Arc::clone(request), priority, since: Instant::now() };
        lock(&self.shared.state).held.push(held);
        self.shared.changed.notify_one();
        Ok(())
    }

    /// Waits until no request is held, and ends the thread. Requests whose streams are overdue fail.
    pub(crate) fn close(&self) {
        let _closing = lock(&self.closing);
        lock(&self.shared.state).closed.get_or_insert_with(Instant::now);
        self.shared.changed.notify_one();
        // Joined without the thread lock, so that new requests are refused immediately instead of waiting.
        let thread = lock(&self.thread).take();
        if let Some(thread) = thread.and_then(ParentOnly::into_inner) {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn run(&self) {
        own_this_thread();
        loop {
            let mut state = lock(&self.state);
            while state.held.is_empty() {
                if state.closed.is_some() {
                    return;
                }
                state = wait(&self.changed, state);
            }
            let is_overdue = state.closed.is_some_and(|closed| closed.elapsed() >= self.timeout);
            let held = Held { shared: self, requests: std::mem::take(&mut state.held) };
            drop(state);
            // A panic fails only the requests being polled, since later ones need this thread.
            let _ = catch_unwind(AssertUnwindSafe(|| held.poll(is_overdue)));
            self.pause();
        }
    }

    /// Sleeps until the next poll, or until another request is held. The newest request decides: its stream may be
    /// almost done.
    fn pause(&self) {
        let state = lock(&self.state);
        let Some(newest) = state.held.iter().map(|held| held.since).max() else { return };
        sleep_or_notified(&self.changed, state, pause_after(newest.elapsed()));
    }

    /// Releases the request if it is ready, and fails it if it is overdue. Returns whether it stays held.
    fn stays_held(&self, request: &Arc<Request>, priority: Priority, is_overdue: bool) -> bool {
        // A cancelled request is already done.
        if request.has_failed() {
            return false;
        }
        match request.is_ready() {
            Ok(false) if !is_overdue => return true,
            Ok(false) => Err(self.overdue(request)),
            Ok(true) => self.queue.push(request, priority),
            Err(error) => Err(error),
        }
        .unwrap_or_else(|error| self.fail(request, error));
        false
    }

    fn overdue(&self, request: &Request) -> Error {
        let seconds = self.timeout.as_secs_f32();
        let detail = format!(
            "the engine was closed, and the work that a GPU's stream had been given before this request did not end within \
             {seconds} s; synchronise the stream before you close the engine"
        );
        let error = Error::new(ErrorKind::Closed, request.plan.direction().name(), detail);
        match request.files().first() {
            Some(file) => error.at_path(file.path()),
            None => error,
        }
    }

    /// Fails a request that no worker has. All of it is unclaimed, unless it was cancelled before.
    fn fail(&self, request: &Arc<Request>, error: Error) {
        self.queue.cancel(request, error);
    }
}

/// Requests being polled. If polling panics, dropping this fails them, since nothing else holds them.
struct Held<'a> {
    shared: &'a Shared,
    requests: Vec<HeldRequest>,
}

impl Held<'_> {
    /// Releases the ready requests, and holds the others again.
    fn poll(mut self, is_overdue: bool) {
        self.requests.retain(|held| self.shared.stays_held(&held.request, held.priority, is_overdue));
        let requests = std::mem::take(&mut self.requests);
        lock(&self.shared.state).held.extend(requests);
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        for HeldRequest { request, .. } in self.requests.drain(..) {
            let error = if std::thread::panicking() { panicked(&request) } else { closed(&request) };
            self.shared.fail(&request, error);
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let requests = std::mem::take(&mut lock(&self.state).held);
        drop(Held { shared: self, requests });
    }
}

fn panicked(request: &Request) -> Error {
    let detail = "the thread that waits for streams of GPUs has panicked; report this as a bug";
    Error::new(ErrorKind::Io, request.plan.direction().name(), detail)
}

impl std::fmt::Debug for StreamWaitList {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "StreamWaitList({} held)", lock(&self.shared.state).held.len())
    }
}

#[cfg(all(test, not(loom), not(simulated)))]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use deepnvme_mem::StreamHandle;

    use super::*;
    use crate::gpu::GpuEvent;
    use crate::op::Direction;
    use crate::request::{PlannedRequest, RequestMemory, Transfer, WriteOptions};
    use crate::split::{BlockPlan, BlockSizes, FileGeometry, Segment};
    use crate::stripe_layout::StripeLayout;
    use crate::trace::Recorder;

    /// An event that a stream never reaches, and one whose driver panics.
    #[derive(Debug)]
    enum Odd {
        Never,
        Panics,
    }

    impl GpuEvent for Odd {
        fn record(&self, _: StreamHandle) -> Result<()> {
            Ok(())
        }

        fn is_complete(&self) -> Result<bool> {
            assert!(matches!(self, Self::Never), "a test of panics");
            Ok(false)
        }

        fn wait(&self, _: Duration) -> Result<()> {
            Ok(())
        }
    }

    fn request(event: Odd) -> Arc<Request> {
        let segment = Segment { file: 0, item: 0, offset: 0, len: 4096, address: None, is_contiguous_gpu: false };
        let geometry = FileGeometry { direct: None, layout: StripeLayout::SINGLE, has_gds: false };
        let sizes = BlockSizes { block_bytes: 4096, bounce_bytes: 4096, gds_bytes: 4096 };
        let plan = BlockPlan::new(Direction::Write, &[geometry], vec![segment], sizes).unwrap();
        let planned = PlannedRequest::without_files(plan, vec![Box::new(event)]);
        Arc::new(Request::new(planned, RequestMemory::Sources(Vec::new()), WriteOptions::default()))
    }

    #[test]
    fn a_stream_that_never_comes_holds_nobody_forever() {
        let queue = Arc::new(RequestQueue::new(1, &Arc::new(Recorder::new())));
        let timeout = Duration::from_millis(300);
        let list = Arc::new(StreamWaitList::with_timeout(&queue, timeout));
        let (held, refused) = (request(Odd::Never), request(Odd::Never));
        list.hold(&held, Priority::Normal).unwrap();
        let transfer = Transfer::<Vec<deepnvme_mem::Region>>::new(Arc::clone(&held), Arc::clone(&queue));
        let began = Instant::now();
        let closers: Vec<_> = (0..2)
            .map(|_| {
                let list = Arc::clone(&list);
                thread::spawn(move || list.close())
            })
            .collect();
        while lock(&list.shared.state).closed.is_none() {
            thread::sleep(Duration::from_micros(50));
        }
        // A request that arrives while the first one waits is refused immediately.
        assert_eq!(list.hold(&refused, Priority::Normal).unwrap_err().kind(), ErrorKind::Closed);
        assert!(began.elapsed() < timeout || held.result.get().is_some());
        closers.into_iter().for_each(|closer| closer.join().unwrap());
        assert!(began.elapsed() >= timeout, "it had its time");
        let error = transfer.wait().1.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Closed);
        assert!(error.to_string().contains("synchronise the stream"), "{error}");
    }

    #[test]
    fn a_panic_fails_its_request_and_the_next_one_is_held_as_usual() {
        let queue = Arc::new(RequestQueue::new(1, &Arc::new(Recorder::new())));
        let list = StreamWaitList::with_timeout(&queue, Duration::from_millis(50));
        for _ in 0..2 {
            let request = request(Odd::Panics);
            list.hold(&request, Priority::Normal).unwrap();
            let transfer = Transfer::<Vec<deepnvme_mem::Region>>::new(Arc::clone(&request), Arc::clone(&queue));
            assert!(transfer.wait_timeout(Duration::from_secs(60)), "no caller waits forever");
            assert_eq!(transfer.wait().1.unwrap_err().kind(), ErrorKind::Io);
        }
        let request = request(Odd::Never);
        list.hold(&request, Priority::Normal).unwrap();
        list.close();
        assert!(request.result.get().is_some());
    }
}
