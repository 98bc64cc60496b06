//! A seeded decorator that makes any backend fail, shorten, delay and reorder operations.
//!
//! [`FaultPlan`] has the frequencies of faults, [`FaultBackend`] injects them, [`Faults`] counts them. The fault of an
//! op is a function of the seed, of the op's kind, offset and size, and of the attempts at it. So it does not depend on
//! the schedule of threads unless two ops have the same kind, offset and size, as syncs do. Only
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

/// Defines the counts, the atomic counters behind them, and their copy.
macro_rules! define_counts {
    ($($(#[$documentation:meta])* $name:ident),* $(,)?) => {
        /// Ops and injected faults so far, of all backends of one [`Faults`].
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        pub struct FaultCounts {
            $($(#[$documentation])* pub $name: u64,)*
        }

        #[derive(Debug, Default)]
        struct Counters {
            $($name: AtomicU64,)*
        }

        impl Counters {
            fn read(&self) -> FaultCounts {
                FaultCounts { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

define_counts! {
    /// Ops submitted.
    ops,
    /// Short transfers.
    short,
    /// EINTR.
    eintr,
    /// EAGAIN.
    eagain,
    /// EIO of a transfer.
    eio,
    /// ENOSPC.
    enospc,
    /// EIO of a sync.
    sync_eio,
    /// Delayed completions.
    slow,
    /// Reordered completions.
    reordered,
}

impl FaultCounts {
    /// Returns the number of faults that retries must not hide from the caller.
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
    attempts: Mutex<HashMap<(OpKind, u64, usize), u64>>,
}

impl Faults {
    /// Creates counters for a plan.
    #[must_use]
    pub fn new(plan: FaultPlan) -> Self {
        Self(Arc::new(Inner { plan, counters: Counters::default(), attempts: Mutex::default() }))
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
        self.0.counters.read()
    }

    /// Draws the fault of an op and the delay of its completion, and counts them.
    fn decide(&self, op: &Op) -> (InjectedFault, Option<Duration>) {
        let Inner { plan, counters, attempts } = &*self.0;
        let bytes = op.bytes();
        let nth_op = counters.ops.fetch_add(1, Ordering::Relaxed);
        let attempt = {
            let mut attempts = ignore_poison(attempts.lock());
            let count = attempts.entry((op.kind, op.offset, bytes)).or_default();
            *count += 1;
            *count
        };
        let mut rng = Rng::keyed(plan.seed, &[op.kind as u64, op.offset, bytes as u64, attempt]);
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
