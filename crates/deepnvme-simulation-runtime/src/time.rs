//! The simulation's clock. It advances with each reading, sleep or timed wait.

use std::cell::Cell;
use std::ops::{Add, AddAssign, Sub};
pub use std::time::Duration;

/// Time that one reading takes.
const CLOCK_STEP_NS: u64 = 1000;

thread_local! {
    static NOW_NS: Cell<u64> = const { Cell::new(0) };
}

/// Resets the clock for the next execution.
pub fn reset() {
    NOW_NS.set(0);
}

/// Lets time pass.
pub fn advance(duration: Duration) {
    let passed_ns = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
    NOW_NS.set(NOW_NS.get().saturating_add(passed_ns));
}

/// A time of the simulated clock.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Instant(Duration);

impl Instant {
    /// Returns the current time.
    #[must_use]
    pub fn now() -> Self {
        NOW_NS.set(NOW_NS.get().saturating_add(CLOCK_STEP_NS));
        Self(Duration::from_nanos(NOW_NS.get()))
    }

    /// Returns the time elapsed since then.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        Self::now().saturating_duration_since(*self)
    }

    /// Returns the time since `earlier`, or zero if that is later.
    #[must_use]
    pub fn duration_since(&self, earlier: Self) -> Duration {
        self.saturating_duration_since(earlier)
    }

    /// Returns the time since `earlier`, or zero if that is later.
    #[must_use]
    pub fn saturating_duration_since(&self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// Returns the time since `earlier`; `None` if that is later.
    #[must_use]
    pub fn checked_duration_since(&self, earlier: Self) -> Option<Duration> {
        self.0.checked_sub(earlier.0)
    }

    /// Adds a duration.
    #[must_use]
    pub fn checked_add(&self, duration: Duration) -> Option<Self> {
        self.0.checked_add(duration).map(Self)
    }

    /// Subtracts a duration.
    #[must_use]
    pub fn checked_sub(&self, duration: Duration) -> Option<Self> {
        self.0.checked_sub(duration).map(Self)
    }
}

impl Add<Duration> for Instant {
    type Output = Self;

    fn add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(duration))
    }
}

impl AddAssign<Duration> for Instant {
    fn add_assign(&mut self, duration: Duration) {
        *self = *self + duration;
    }
}

impl Sub<Duration> for Instant {
    type Output = Self;

    fn sub(self, duration: Duration) -> Self {
        Self(self.0.saturating_sub(duration))
    }
}

impl Sub for Instant {
    type Output = Duration;

    fn sub(self, earlier: Self) -> Duration {
        self.saturating_duration_since(earlier)
    }
}
