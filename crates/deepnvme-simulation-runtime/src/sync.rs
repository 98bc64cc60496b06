//! Locks over `shuttle`'s, condition variables that time out by the simulated clock, and cells that are set once.

use std::ops::{Deref, DerefMut};
use std::sync::PoisonError;
use std::time::Duration;

pub use shuttle::sync::{
    LockResult, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError, TryLockResult, atomic, mpsc,
};

use crate::{thread, time};

/// Checks of a timed wait before it times out.
const WAKEUPS_PER_WAIT: u32 = 8;

/// As `std::sync::Mutex`.
#[derive(Debug, Default)]
pub struct Mutex<T: ?Sized>(shuttle::sync::Mutex<T>);

/// As `std::sync::MutexGuard`.
#[derive(Debug)]
pub struct MutexGuard<'a, T: ?Sized> {
    guard: shuttle::sync::MutexGuard<'a, T>,
    mutex: &'a Mutex<T>,
}

impl<T> Mutex<T> {
    /// Creates a lock around a value.
    pub const fn new(value: T) -> Self {
        Self(shuttle::sync::Mutex::new(value))
    }

    /// Returns the value.
    ///
    /// # Errors
    /// If a holder panicked.
    pub fn into_inner(self) -> LockResult<T> {
        self.0.into_inner()
    }
}

impl<T: ?Sized> Mutex<T> {
    /// Waits for the lock.
    ///
    /// # Errors
    /// If a holder panicked.
    pub fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
        match self.0.lock() {
            Ok(guard) => Ok(MutexGuard { guard, mutex: self }),
            Err(error) => Err(PoisonError::new(MutexGuard { guard: error.into_inner(), mutex: self })),
        }
    }

    /// Takes the lock if it is free.
    ///
    /// # Errors
    /// If it is not free, or a holder panicked.
    pub fn try_lock(&self) -> TryLockResult<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(guard) => Ok(MutexGuard { guard, mutex: self }),
            Err(TryLockError::WouldBlock) => Err(TryLockError::WouldBlock),
            Err(TryLockError::Poisoned(error)) => {
                let guard = MutexGuard { guard: error.into_inner(), mutex: self };
                Err(TryLockError::Poisoned(PoisonError::new(guard)))
            }
        }
    }

    /// Accesses the value through an exclusive reference, without locking.
    ///
    /// # Errors
    /// If a holder panicked.
    pub fn get_mut(&mut self) -> LockResult<&mut T> {
        self.0.get_mut()
    }
}

impl<T: ?Sized> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T: ?Sized> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

/// As `std::sync::Condvar`. A timed wait ends by the simulated clock, or spuriously.
#[derive(Debug, Default)]
pub struct Condvar(shuttle::sync::Condvar);

/// Whether a wait timed out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WaitTimeoutResult(bool);

impl WaitTimeoutResult {
    /// Returns whether the limit was reached.
    #[must_use]
    pub fn timed_out(&self) -> bool {
        self.0
    }
}

impl Condvar {
    /// Creates a condition variable.
    #[must_use]
    pub const fn new() -> Self {
        Self(shuttle::sync::Condvar::new())
    }

    /// Waits for a notification.
    ///
    /// # Errors
    /// If a holder of the lock panicked.
    pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> LockResult<MutexGuard<'a, T>> {
        let MutexGuard { guard, mutex } = guard;
        match self.0.wait(guard) {
            Ok(guard) => Ok(MutexGuard { guard, mutex }),
            Err(error) => Err(PoisonError::new(MutexGuard { guard: error.into_inner(), mutex })),
        }
    }

    /// Waits until the condition no longer holds.
    ///
    /// # Errors
    /// If a holder of the lock panicked.
    pub fn wait_while<'a, T>(
        &self,
        mut guard: MutexGuard<'a, T>,
        mut condition: impl FnMut(&mut T) -> bool,
    ) -> LockResult<MutexGuard<'a, T>> {
        while condition(&mut guard) {
            guard = self.wait(guard)?;
        }
        Ok(guard)
    }

    /// Releases the lock for a part of the limit. Returns spuriously, as the real one may, and never reports a timeout.
    ///
    /// # Errors
    /// If a holder of the lock panicked.
    pub fn wait_timeout<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        limit: Duration,
    ) -> LockResult<(MutexGuard<'a, T>, WaitTimeoutResult)> {
        let mutex = guard.mutex;
        drop(guard);
        time::advance(limit / WAKEUPS_PER_WAIT);
        thread::yield_now();
        match mutex.lock() {
            Ok(guard) => Ok((guard, WaitTimeoutResult(false))),
            Err(error) => Err(PoisonError::new((error.into_inner(), WaitTimeoutResult(false)))),
        }
    }

    /// Waits until the condition no longer holds or the limit is reached.
    ///
    /// # Errors
    /// If a holder of the lock panicked.
    pub fn wait_timeout_while<'a, T>(
        &self,
        mut guard: MutexGuard<'a, T>,
        limit: Duration,
        mut condition: impl FnMut(&mut T) -> bool,
    ) -> LockResult<(MutexGuard<'a, T>, WaitTimeoutResult)> {
        for _ in 0..WAKEUPS_PER_WAIT {
            if !condition(&mut guard) {
                return Ok((guard, WaitTimeoutResult(false)));
            }
            (guard, _) = self.wait_timeout(guard, limit)?;
        }
        let is_over = condition(&mut guard);
        Ok((guard, WaitTimeoutResult(is_over)))
    }

    /// Wakes one waiter without a limit.
    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    /// Wakes all waiters without a limit.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }
}

/// As `std::sync::OnceLock`, for initialisers that may switch threads.
#[derive(Debug)]
pub struct OnceLock<T> {
    cell: std::sync::OnceLock<T>,
    turn: Mutex<()>,
}

impl<T> OnceLock<T> {
    /// Creates an empty cell.
    #[must_use]
    pub const fn new() -> Self {
        Self { cell: std::sync::OnceLock::new(), turn: Mutex::new(()) }
    }

    /// Returns the value, if it is set.
    pub fn get(&self) -> Option<&T> {
        self.cell.get()
    }

    /// Sets the value.
    ///
    /// # Errors
    /// Returns the value if the cell is already set.
    pub fn set(&self, value: T) -> Result<(), T> {
        self.cell.set(value)
    }

    /// Returns the value. The first caller creates it, and the others wait.
    pub fn get_or_init(&self, make: impl FnOnce() -> T) -> &T {
        if let Some(value) = self.cell.get() {
            return value;
        }
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        match self.cell.get() {
            Some(value) => value,
            None => {
                let value = make();
                self.cell.get_or_init(|| value)
            }
        }
    }
}

impl<T> Default for OnceLock<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> From<T> for OnceLock<T> {
    fn from(value: T) -> Self {
        Self { cell: value.into(), turn: Mutex::new(()) }
    }
}
