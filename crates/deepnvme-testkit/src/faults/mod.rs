//! A seeded decorator that makes any backend fail, shorten, delay and reorder operations.
//!
//! [`FaultPlan`] has the frequencies of faults, [`FaultBackend`] injects them, [`Faults`] counts them. The fault of an
//! op is a function of the seed, of the op's kind, offset and size, and of the attempts at it. So it does not depend on
//! the schedule of threads unless two ops have the same kind, offset and size, as syncs have. Only
//! [`FaultPlan::eio_after_ops`] counts the ops of all threads.

mod backend;
mod plan;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub use backend::FaultBackend;
use deepnvme_io::backend::Backend;
use deepnvme_io::op::{Errno, Op, OpKind};
use deepnvme_mem::sync::ignore_poison;
pub use plan::FaultPlan;
use plan::InjectedFault;

use crate::rng::Rng;

/// Faults injected so far by all backends of one [`Faults`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FaultCounts {
    /// Ops submitted.
    pub ops: u64,
    /// Short transfers.
    pub short: u64,
    /// EINTR.
    pub eintr: u64,
    /// EAGAIN.
    pub eagain: u64,
    /// EIO of a transfer.
    pub eio: u64,
    /// ENOSPC.
    pub enospc: u64,
    /// EIO of a sync.
    pub sync_eio: u64,
    /// Delayed completions.
    pub slow: u64,
    /// Reordered completions.
    pub reordered: u64,
}

impl FaultCounts {
    /// Returns the faults that retries must not hide from the caller.
    #[must_use]
    pub const fn fatal(&self) -> u64 {
        self.eio + self.enospc + self.sync_eio
    }
}

/// A plan and its counters, shared by the backends of one engine. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Faults(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    plan: FaultPlan,
    counters: Counters,
    /// Attempts by kind, offset and size of an op.
    tries: Mutex<HashMap<(OpKind, u64, usize), u64>>,
}

#[derive(Debug, Default)]
struct Counters {
    ops: AtomicU64,
    short: AtomicU64,
    eintr: AtomicU64,
    eagain: AtomicU64,
    eio: AtomicU64,
    enospc: AtomicU64,
    sync_eio: AtomicU64,
    slow: AtomicU64,
    reordered: AtomicU64,
}

impl Faults {
    /// Creates counters for a plan.
    #[must_use]
    pub fn new(plan: FaultPlan) -> Self {
        Self(Arc::new(Inner { plan, counters: Counters::default(), tries: Mutex::default() }))
    }

    /// Wraps a backend with faults.
    pub fn wrap(&self, inner: Box<dyn Backend>) -> FaultBackend {
        FaultBackend::new(inner, self.clone())
    }

    /// Returns the plan.
    #[must_use]
    pub fn plan(&self) -> &FaultPlan {
        &self.0.plan
    }

    /// Returns the counts so far.
    #[must_use]
    pub fn counts(&self) -> FaultCounts {
        let counters = &self.0.counters;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        FaultCounts {
            ops: read(&counters.ops),
            short: read(&counters.short),
            eintr: read(&counters.eintr),
            eagain: read(&counters.eagain),
            eio: read(&counters.eio),
            enospc: read(&counters.enospc),
            sync_eio: read(&counters.sync_eio),
            slow: read(&counters.slow),
            reordered: read(&counters.reordered),
        }
    }

    /// Draws the fault of an op and the delay of its completion, and counts them.
    fn decide(&self, op: &Op) -> (InjectedFault, Option<Duration>) {
        let Inner { plan, counters, tries } = &*self.0;
        let bytes = op.bytes();
        let nth_op = counters.ops.fetch_add(1, Ordering::Relaxed);
        let nth_try = {
            let mut tries = ignore_poison(tries.lock());
            let count = tries.entry((op.kind, op.offset, bytes)).or_default();
            *count += 1;
            *count
        };
        let mut rng = Rng::keyed(plan.seed, &[op.kind as u64, op.offset, bytes as u64, nth_try]);
        let delay = rng.chance(plan.slow).then(|| plan.slow_max.mul_f64(rng.below(1001) as f64 / 1000.0));
        if delay.is_some() {
            counters.slow.fetch_add(1, Ordering::Relaxed);
        }
        let fault = if plan.eio_after_ops.is_some_and(|limit| nth_op >= limit) || plan.hits_bad_sector(op) {
            InjectedFault::Fail(Errno::IO)
        } else {
            plan.draw(op, bytes, &mut rng)
        };
        counters.count(op.kind, fault);
        (fault, delay)
    }

    fn count_reordered(&self, completions: u64) {
        self.0.counters.reordered.fetch_add(completions, Ordering::Relaxed);
    }
}

impl Counters {
    fn count(&self, kind: OpKind, fault: InjectedFault) {
        let sync = matches!(kind, OpKind::SyncData | OpKind::SyncAll);
        let counter = match fault {
            InjectedFault::Nothing => return,
            InjectedFault::Short { .. } => &self.short,
            InjectedFault::Fail(Errno::INTR) => &self.eintr,
            InjectedFault::Fail(Errno::AGAIN) => &self.eagain,
            InjectedFault::Fail(Errno::NOSPC) => &self.enospc,
            InjectedFault::Fail(_) | InjectedFault::FailAfterwards(_) if sync => &self.sync_eio,
            InjectedFault::Fail(_) | InjectedFault::FailAfterwards(_) => &self.eio,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;
