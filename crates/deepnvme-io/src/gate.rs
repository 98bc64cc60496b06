//! The stream barrier: holds back requests whose GPU memory is in use, until their streams reach the recorded points.
//!
//! Workers never wait for GPU kernels: all other requests would wait behind them. Held requests are polled, which works
//! for any number of streams and also ends when a stream fails.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, ErrorKind, Result};
use crate::job::Job;
use crate::queue::{Queue, Turn};
use crate::start::start_thread;
use crate::sync::thread::{self, JoinHandle};
use crate::sync::{Condvar, Instant, Mutex, lock, wait};

/// Polling interval: short compared with GPU kernels worth waiting for, long compared with one poll.
const PAUSE: Duration = Duration::from_micros(50);

/// How long a closed engine waits for streams. As long as the kernel's timeout for a disk. Some streams never reach
/// their point, for instance when a GPU kernel waits for another process.
const PATIENCE: Duration = Duration::from_secs(30);

/// The held requests of one engine.
pub(crate) struct Gate {
    shared: Arc<Shared>,
    /// Created for the first held request.
    thread: Mutex<Option<JoinHandle<()>>>,
    /// Held while closing, so that concurrent closers wait equally long.
    closing: Mutex<()>,
}

struct Shared {
    state: Mutex<State>,
    came: Condvar,
    queue: Arc<Queue>,
    patience: Duration,
}

#[derive(Default)]
struct State {
    held: Vec<(Arc<Job>, Turn)>,
    /// When the gate was closed.
    closed: Option<Instant>,
}

impl Gate {
    pub(crate) fn new(queue: &Arc<Queue>) -> Self {
        Self::with_patience(queue, PATIENCE)
    }

    fn with_patience(queue: &Arc<Queue>, patience: Duration) -> Self {
        let (state, came) = (Mutex::new(State::default()), Condvar::new());
        let shared = Arc::new(Shared { state, came, queue: Arc::clone(queue), patience });
        Self { shared, thread: Mutex::new(None), closing: Mutex::new(()) }
    }

    /// Queues the request once its memory is ready.
    pub(crate) fn hold(&self, job: &Arc<Job>, turn: Turn) -> Result<()> {
        let mut thread = lock(&self.thread);
        // Checked under the thread lock: `close` takes the thread under it, and a thread created later would never be
        // joined.
        if lock(&self.shared.state).closed.is_some() {
            return Err(closed(job));
        }
        if thread.is_none() {
            let shared = Arc::clone(&self.shared);
            let builder = thread::Builder::new().name("deepnvme-gate".into());
            *thread = Some(start_thread(|| builder.spawn(move || shared.run()))?);
        }
        lock(&self.shared.state).held.push((Arc::clone(job), turn));
        self.shared.came.notify_one();
        Ok(())
    }

    /// Waits until no request is held, and ends the thread. Requests whose streams are late fail.
    pub(crate) fn close(&self) {
        let _closing = lock(&self.closing);
        lock(&self.shared.state).closed.get_or_insert_with(Instant::now);
        self.shared.came.notify_one();
        // Joined without the thread lock, so that new requests are refused immediately instead of waiting.
        let thread = lock(&self.thread).take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn run(&self) {
        loop {
            let mut state = lock(&self.state);
            while state.held.is_empty() {
                if state.closed.is_some() {
                    return;
                }
                state = wait(&self.came, state);
            }
            let is_late = state.closed.is_some_and(|closed| closed.elapsed() >= self.patience);
            let held = Held { shared: self, jobs: std::mem::take(&mut state.held) };
            drop(state);
            // A panic fails only the requests being polled, since later ones need this thread.
            if catch_unwind(AssertUnwindSafe(|| held.look(is_late))).unwrap_or_default() {
                thread::sleep(PAUSE);
            }
        }
    }

    /// Releases the request if it is ready, and fails it if it is late. Returns whether it stays.
    fn is_held(&self, job: &Arc<Job>, turn: Turn, is_late: bool) -> bool {
        // A cancelled request is already done.
        if job.has_failed() {
            return false;
        }
        match job.is_ready() {
            Ok(false) if !is_late => return true,
            Ok(false) => Err(self.late(job)),
            Ok(true) => self.queue.push(job, turn),
            Err(error) => Err(error),
        }
        .unwrap_or_else(|error| self.give_up(job, error));
        false
    }

    fn late(&self, job: &Job) -> Error {
        let seconds = self.patience.as_secs_f32();
        let detail = format!(
            "the engine was closed, and the work that a GPU's stream had been given before this request did not end within \
             {seconds} s; synchronize the stream before you close the engine"
        );
        let error = Error::new(ErrorKind::Closed, job.plan.direction().name(), detail);
        match job.files().first() {
            Some(file) => error.at_path(file.path()),
            None => error,
        }
    }

    /// Ends a request that no worker has. All of it is unclaimed, unless it was cancelled before.
    fn give_up(&self, job: &Arc<Job>, error: Error) {
        self.queue.cancel(job, error);
    }
}

/// Requests being polled. If polling panics, dropping this fails them, since nothing else holds them.
struct Held<'a> {
    shared: &'a Shared,
    jobs: Vec<(Arc<Job>, Turn)>,
}

impl Held<'_> {
    /// Releases the ready requests. Holds the others again, and returns whether there are any.
    fn look(mut self, is_late: bool) -> bool {
        self.jobs.retain(|(job, turn)| self.shared.is_held(job, *turn, is_late));
        let jobs = std::mem::take(&mut self.jobs);
        let is_waiting = !jobs.is_empty();
        lock(&self.shared.state).held.extend(jobs);
        is_waiting
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        for (job, _) in self.jobs.drain(..) {
            let error = if std::thread::panicking() { panicked(&job) } else { closed(&job) };
            self.shared.give_up(&job, error);
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let jobs = std::mem::take(&mut lock(&self.state).held);
        drop(Held { shared: self, jobs });
    }
}

fn panicked(job: &Job) -> Error {
    let detail = "the thread that waits for streams of GPUs has panicked; report this as a bug";
    Error::new(ErrorKind::Io, job.plan.direction().name(), detail)
}

fn closed(job: &Job) -> Error {
    Error::new(ErrorKind::Closed, job.plan.direction().name(), "the engine is closed")
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Gate({} held)", lock(&self.shared.state).held.len())
    }
}

#[cfg(all(test, not(loom), not(simulated)))]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use deepnvme_mem::StreamHandle;

    use super::*;
    use crate::backend::device::GpuEvent;
    use crate::job::{Memory, WriteOptions};
    use crate::layout::Layout;
    use crate::pending::Pending;
    use crate::split::{BlockSizes, Direction, Geometry, Plan, Segment};
    use crate::trace::Recorder;

    /// A point that a stream never reaches, and one whose driver panics.
    #[derive(Debug)]
    enum Odd {
        Never,
        Panics,
    }

    impl GpuEvent for Odd {
        fn record(&self, _: StreamHandle) -> Result<()> {
            Ok(())
        }

        fn is_over(&self) -> Result<bool> {
            assert!(matches!(self, Self::Never), "a test of panics");
            Ok(false)
        }

        fn wait(&self) -> Result<()> {
            Ok(())
        }
    }

    fn job(point: Odd) -> Arc<Job> {
        let segment = Segment { file: 0, item: 0, offset: 0, len: 4096, address: None, is_flat_gpu: false };
        let geometry = Geometry { direct: None, layout: Layout::SINGLE, has_gds: false };
        let sizes = BlockSizes { block_bytes: 4096, slot_bytes: 4096, gds_bytes: 4096 };
        let plan = Plan::new(Direction::Write, &[geometry], vec![segment], sizes).unwrap();
        let memory = (Memory::Sources(Vec::new()), false);
        let points: Vec<Box<dyn GpuEvent>> = vec![Box::new(point)];
        let (files, options) = ((Vec::new(), Vec::new()), WriteOptions::default());
        Arc::new(Job::new(plan, files, memory, points, options, tracing::Span::none()))
    }

    #[test]
    fn a_stream_that_never_comes_holds_nobody_for_ever() {
        let queue = Arc::new(Queue::new(1, &Arc::new(Recorder::new())));
        let patience = Duration::from_millis(300);
        let gate = Arc::new(Gate::with_patience(&queue, patience));
        let (held, refused) = (job(Odd::Never), job(Odd::Never));
        gate.hold(&held, Turn::Now).unwrap();
        let pending = Pending::<Vec<deepnvme_mem::Region>>::new(Arc::clone(&held), Arc::clone(&queue));
        let began = Instant::now();
        let closers: Vec<_> = (0..2)
            .map(|_| {
                let gate = Arc::clone(&gate);
                thread::spawn(move || gate.close())
            })
            .collect();
        while lock(&gate.shared.state).closed.is_none() {
            thread::sleep(PAUSE);
        }
        // A request that arrives while the first one waits is refused immediately.
        assert_eq!(gate.hold(&refused, Turn::Now).unwrap_err().kind(), ErrorKind::Closed);
        assert!(began.elapsed() < patience || held.outcome.get().is_some());
        closers.into_iter().for_each(|closer| closer.join().unwrap());
        assert!(began.elapsed() >= patience, "it had its time");
        let error = pending.wait().1.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Closed);
        assert!(error.to_string().contains("synchronize the stream"), "{error}");
    }

    #[test]
    fn a_panic_fails_its_request_and_the_next_one_is_held_as_ever() {
        let queue = Arc::new(Queue::new(1, &Arc::new(Recorder::new())));
        let gate = Gate::with_patience(&queue, Duration::from_millis(50));
        for _ in 0..2 {
            let job = job(Odd::Panics);
            gate.hold(&job, Turn::Now).unwrap();
            let pending = Pending::<Vec<deepnvme_mem::Region>>::new(Arc::clone(&job), Arc::clone(&queue));
            assert!(pending.wait_timeout(Duration::from_secs(60)), "nobody waits for ever");
            assert_eq!(pending.wait().1.unwrap_err().kind(), ErrorKind::Io);
        }
        let job = job(Odd::Never);
        gate.hold(&job, Turn::Now).unwrap();
        gate.close();
        assert!(job.outcome.get().is_some());
    }
}
