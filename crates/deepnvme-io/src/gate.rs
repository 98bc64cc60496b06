//! Requests whose memory a GPU still works on: held back until their streams have come as far as they had been given.
//!
//! Workers never wait for somebody else's kernels: behind such a wait the requests of all others would stand. Who waits here
//! is looked at from time to time, which works for any number of streams, and also ends when a stream fails.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use crate::error::{Error, ErrorKind, Result};
use crate::job::Job;
use crate::queue::{Queue, Turn};
use crate::sync::{Condvar, Mutex, lock, wait};

/// Between two looks: short against the kernels that are worth waiting for, long against a look.
const PAUSE: Duration = Duration::from_micros(50);

/// The requests of one engine that wait.
pub(crate) struct Gate {
    shared: Arc<Shared>,
    /// Made with the first request that has to wait.
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    state: Mutex<State>,
    came: Condvar,
    queue: Arc<Queue>,
}

#[derive(Default)]
struct State {
    held: Vec<(Arc<Job>, Turn)>,
    is_closed: bool,
}

impl Gate {
    pub(crate) fn new(queue: &Arc<Queue>) -> Self {
        let (state, came) = (Mutex::new(State::default()), Condvar::new());
        Self { shared: Arc::new(Shared { state, came, queue: Arc::clone(queue) }), thread: Mutex::new(None) }
    }

    /// Hands the request to the workers when its memory is ready.
    pub(crate) fn hold(&self, job: &Arc<Job>, turn: Turn) -> Result<()> {
        let mut thread = lock(&self.thread);
        if thread.is_none() {
            let shared = Arc::clone(&self.shared);
            let made = std::thread::Builder::new().name("deepnvme-gate".into()).spawn(move || shared.run());
            *thread = Some(made.map_err(|error| Error::from_io("start a thread", &error))?);
        }
        lock(&self.shared.state).held.push((Arc::clone(job), turn));
        self.shared.came.notify_one();
        Ok(())
    }

    /// Waits until nothing is held any more, and ends the thread.
    pub(crate) fn close(&self) {
        lock(&self.shared.state).is_closed = true;
        self.shared.came.notify_one();
        if let Some(thread) = lock(&self.thread).take() {
            // It does not panic; and if it did, it has dropped what it held, which fails those requests.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn run(&self) {
        loop {
            let mut state = lock(&self.state);
            while state.held.is_empty() {
                if state.is_closed {
                    return;
                }
                state = wait(&self.came, state);
            }
            let mut held = std::mem::take(&mut state.held);
            drop(state);
            held.retain(|(job, turn)| self.is_held(job, *turn));
            let is_waiting = !held.is_empty();
            lock(&self.state).held.extend(held);
            if is_waiting {
                std::thread::sleep(PAUSE);
            }
        }
    }

    /// Lets the request go if it may; whether it stays.
    fn is_held(&self, job: &Arc<Job>, turn: Turn) -> bool {
        // Who has been cancelled is over.
        if job.has_failed() {
            return false;
        }
        match job.is_ready() {
            Ok(false) => return true,
            Ok(true) => self.queue.push(job, turn),
            Err(error) => Err(error),
        }
        .unwrap_or_else(|error| self.give_up(job, error));
        false
    }

    fn give_up(&self, job: &Arc<Job>, error: Error) {
        if job.plan.block_count() > 0 {
            self.queue.cancel(job, error);
        } else {
            job.fail(error);
            self.queue.complete(job);
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let held = std::mem::take(&mut lock(&self.state).held);
        for (job, _) in held {
            self.give_up(&job, Error::new(ErrorKind::Closed, job.plan.direction().name(), "the engine is closed"));
        }
    }
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Gate({} held)", lock(&self.shared.state).held.len())
    }
}
