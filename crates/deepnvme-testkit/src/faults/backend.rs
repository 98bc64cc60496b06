//! The decorator: shortens, refuses and delays the ops of another backend.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use deepnvme_io::Result;
use deepnvme_io::backend::{Backend, Wake};
use deepnvme_io::op::{Completion, Iovecs, Op, Submit, Token};
use deepnvme_mem::sync::ignore_poison;

use super::{Faults, InjectedFault};
use crate::forward_to_inner;
use crate::rng::Rng;

/// Polling interval while an op is in the inner backend and another is delayed.
const POLL: Duration = Duration::from_micros(200);
/// The key of the random numbers of a backend.
const BACKEND_KEY: u64 = 0x0bac_0000;

/// A backend with injected faults.
pub struct FaultBackend {
    inner: Box<dyn Backend>,
    faults: Faults,
    rng: Rng,
    /// Ops in the inner backend, by their inner token.
    inside: HashMap<Token, Inside>,
    next_token: u64,
    /// Delayed completions.
    held: Vec<(Instant, Completion)>,
    waker: Arc<FaultWake>,
}

/// The original token and memory of an op, and its fault.
struct Inside {
    token: Token,
    iovecs: Iovecs,
    fault: InjectedFault,
    delay: Option<Duration>,
}

struct FaultWake {
    woken: Mutex<bool>,
    changed: Condvar,
    inner: Arc<dyn Wake>,
}

impl Wake for FaultWake {
    fn wake(&self) {
        *ignore_poison(self.woken.lock()) = true;
        self.changed.notify_all();
        self.inner.wake();
    }
}

impl FaultWake {
    fn take(&self) -> bool {
        std::mem::take(&mut *ignore_poison(self.woken.lock()))
    }

    fn wait(&self, limit: Duration) {
        let guard = ignore_poison(self.woken.lock());
        drop(self.changed.wait_timeout_while(guard, limit, |woken| !*woken));
    }
}

impl FaultBackend {
    pub(super) fn new(inner: Box<dyn Backend>, faults: Faults) -> Self {
        let waker = FaultWake { woken: Mutex::new(false), changed: Condvar::new(), inner: inner.waker() };
        let rng = Rng::keyed(faults.plan().seed, &[BACKEND_KEY]);
        Self { inner, faults, rng, inside: HashMap::new(), next_token: 0, held: Vec::new(), waker: Arc::new(waker) }
    }

    /// Collects completions of the inner backend and restores the original ops.
    fn collect(&mut self, min: u32) -> Result<()> {
        let mut finished = Vec::new();
        self.inner.reap(min, &mut finished)?;
        let now = Instant::now();
        for mut completion in finished {
            let before = self.inside.remove(&completion.op.token).expect("the inner backend returns what it was given");
            completion.op.token = before.token;
            completion.op.iovecs = before.iovecs;
            completion.result = match before.fault {
                InjectedFault::FailAfterwards(errno) => completion.result.and(Err(errno)),
                InjectedFault::Short { reported, .. } => completion.result.map(|moved| moved.min(reported)),
                InjectedFault::Nothing | InjectedFault::Fail(_) => completion.result,
            };
            self.held.push((now + before.delay.unwrap_or_default(), completion));
        }
        Ok(())
    }

    /// Moves due completions to `completions`.
    fn release(&mut self, min: usize, completions: &mut Vec<Completion>) {
        let now = Instant::now();
        let (mut due, later): (Vec<_>, Vec<_>) = std::mem::take(&mut self.held).into_iter().partition(|h| h.0 <= now);
        self.held = later;
        if self.faults.plan().reorder && due.len() > 1 {
            self.rng.shuffle(&mut due);
            self.faults.count_reordered(due.len() as u64);
            // A completion that is not waited for may come a call later.
            let spare = due.len().saturating_sub(min.max(1));
            let keep_back = self.rng.below(spare as u64 + 1) as usize;
            self.held.extend(due.drain(due.len() - keep_back..));
        }
        completions.extend(due.into_iter().map(|(_, completion)| completion));
    }

    /// Waits for a change: an op completes in the inner backend, a delayed one is due, or a wake.
    fn wait(&mut self) -> Result<()> {
        let Some(earliest) = self.held.iter().map(|(due, _)| *due).min() else {
            return self.collect(1);
        };
        let left = earliest.saturating_duration_since(Instant::now());
        let limit = if self.inside.is_empty() { left } else { left.min(POLL) };
        self.waker.wait(limit);
        Ok(())
    }
}

impl Backend for FaultBackend {
    forward_to_inner!(kind, depth, flush, registrations);

    fn in_flight(&self) -> u32 {
        (self.inside.len() + self.held.len()) as u32
    }

    fn submit(&mut self, mut op: Op) -> Submit {
        if self.in_flight() >= self.depth() {
            return Submit::Busy(op);
        }
        let (fault, delay) = self.faults.decide(&op);
        if let InjectedFault::Fail(errno) = fault {
            let due = Instant::now() + delay.unwrap_or_default();
            self.held.push((due, Completion { op, result: Err(errno) }));
            return Submit::Queued;
        }
        let before = Inside { token: op.token, iovecs: op.iovecs.clone(), fault, delay };
        if let InjectedFault::Short { carried, .. } = fault {
            op.iovecs = first_bytes(&op.iovecs, carried);
        }
        op.token = Token(self.next_token);
        self.next_token += 1;
        let token = op.token;
        match self.inner.submit(op) {
            Submit::Queued => {
                self.inside.insert(token, before);
                Submit::Queued
            }
            Submit::Busy(mut op) => {
                op.token = before.token;
                op.iovecs = before.iovecs;
                Submit::Busy(op)
            }
        }
    }

    fn reap(&mut self, min: u32, completions: &mut Vec<Completion>) -> Result<()> {
        let before = completions.len();
        loop {
            self.collect(0)?;
            let missing = (min as usize).saturating_sub(completions.len() - before);
            self.release(missing, completions);
            let enough = completions.len() - before >= min as usize;
            if enough || self.waker.take() {
                return Ok(());
            }
            self.wait()?;
        }
    }

    fn waker(&self) -> Arc<dyn Wake> {
        self.waker.clone()
    }
}

/// Returns the iovecs of the first `bytes` of a transfer.
fn first_bytes(iovecs: &Iovecs, bytes: usize) -> Iovecs {
    let mut left = bytes;
    let mut first = Iovecs::new();
    for iovec in iovecs {
        if left == 0 {
            break;
        }
        let len = iovec.len().min(left);
        first.push(iovec.slice(0..len));
        left -= len;
    }
    first
}
