//! A clock of the simulation's own: it advances when somebody looks at it, sleeps or waits.

use std::cell::Cell;
use std::ops::{Add, AddAssign, Sub, SubAssign};
pub use std::time::Duration;

/// What one look at the clock takes.
const LOOK_NS: u64 = 1000;

thread_local! {
    static NOW_NS: Cell<u64> = const { Cell::new(0) };
}

/// Sets the clock back to its start, for the next execution.
pub fn reset() {
    NOW_NS.set(0);
}

/// Lets time pass.
pub fn advance(duration: Duration) {
    let passed_ns = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
    NOW_NS.set(NOW_NS.get().saturating_add(passed_ns));
}

/// A moment of the simulated clock.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Instant(Duration);

impl Instant {
    /// The moment of the call.
    #[must_use]
    pub fn now() -> Self {
        NOW_NS.set(NOW_NS.get().saturating_add(LOOK_NS));
        Self(Duration::from_nanos(NOW_NS.get()))
    }

    /// Time that has passed since.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        Self::now().saturating_duration_since(*self)
    }

    /// Time from `earlier` on; none if that is later.
    #[must_use]
    pub fn duration_since(&self, earlier: Self) -> Duration {
        self.saturating_duration_since(earlier)
    }

    /// Time from `earlier` on; none if that is later.
    #[must_use]
    pub fn saturating_duration_since(&self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// Time from `earlier` on; `None` if that is later.
    #[must_use]
    pub fn checked_duration_since(&self, earlier: Self) -> Option<Duration> {
        self.0.checked_sub(earlier.0)
    }

    /// The moment that much later.
    #[must_use]
    pub fn checked_add(&self, duration: Duration) -> Option<Self> {
        self.0.checked_add(duration).map(Self)
    }

    /// The moment that much earlier.
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

impl SubAssign<Duration> for Instant {
    fn sub_assign(&mut self, duration: Duration) {
        *self = *self - duration;
    }
}

impl Sub for Instant {
    type Output = Duration;

    fn sub(self, earlier: Self) -> Duration {
        self.saturating_duration_since(earlier)
    }
}
