//! The time that verification may take while a file is loaded.

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::sync::{AtomicU64, Instant, thread};

/// Verification may use this fraction of a load's cost. While data arrives: of the time of all CPUs, summed over its
/// threads. Afterwards: of the load's duration.
const LOAD_FRACTION: f64 = 0.03;
/// Always allowed: too short to notice.
const FREE_TIME: Duration = Duration::from_micros(100);

/// The time that verification has used, and its limit.
pub(super) struct TimeBudget {
    began: Instant,
    spent_ns: AtomicU64,
    cpus: f64,
}

impl TimeBudget {
    /// Creates the budget of a load that began at `began`.
    pub(super) fn new(began: Instant) -> Self {
        let cpus = thread::available_parallelism().map_or(1, std::num::NonZero::get) as f64;
        Self { began, spent_ns: AtomicU64::new(0), cpus }
    }

    /// Returns whether time is left while data arrives.
    pub(super) fn is_left(&self) -> bool {
        let allowed = self.began.elapsed().mul_f64(LOAD_FRACTION * self.cpus).max(FREE_TIME);
        u128::from(self.spent_ns.load(Ordering::Relaxed)) < allowed.as_nanos()
    }

    /// Returns the deadline for the remaining chunks once all data has arrived.
    pub(super) fn deadline(&self) -> Instant {
        Instant::now() + self.began.elapsed().mul_f64(LOAD_FRACTION)
    }

    /// Does some work, and counts its time.
    pub(super) fn spend<T>(&self, mut work: impl FnMut() -> T) -> T {
        let began = Instant::now();
        let done = work();
        self.spent_ns.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
        done
    }
}
