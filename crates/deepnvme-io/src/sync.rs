//! Locks, atomics, threads and clocks. The simulation replaces all of them, and `loom` most. The functions here ignore
//! poison, since every critical section leaves its state consistent.

use std::time::Duration;

use deepnvme_mem::sync::ignore_poison;

#[cfg(loom)]
pub(crate) use loom::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU8, AtomicU64},
};
#[cfg(not(any(loom, simulated)))]
pub(crate) use std::{
    sync::{
        Condvar, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU8, AtomicU64},
    },
    thread,
};
#[cfg(not(simulated))]
pub(crate) use std::{
    sync::{OnceLock, RwLock, RwLockReadGuard, mpsc},
    time::Instant,
};

#[cfg(simulated)]
pub(crate) use deepnvme_simulation_runtime::{
    sync::{
        Condvar, Mutex, MutexGuard, OnceLock, RwLock, RwLockReadGuard,
        atomic::{AtomicBool, AtomicU8, AtomicU64},
        mpsc,
    },
    thread,
    time::Instant,
};

/// Threads of `loom`, which has no time: sleeping yields to other threads. `loom`'s own `park` loses an `unpark` that
/// arrives while the thread waits for a lock.
#[cfg(loom)]
pub(crate) mod thread {
    use std::sync::Arc;

    pub(crate) use loom::thread::{Builder, JoinHandle};

    use super::{Condvar, Mutex, lock, wait};

    loom::thread_local! {
        static CURRENT: Thread = Thread(Arc::new((Mutex::new(false), Condvar::new())));
    }

    #[derive(Clone)]
    pub(crate) struct Thread(Arc<(Mutex<bool>, Condvar)>);

    impl Thread {
        pub(crate) fn unpark(&self) {
            *lock(&self.0.0) = true;
            self.0.1.notify_one();
        }
    }

    pub(crate) fn current() -> Thread {
        CURRENT.with(Clone::clone)
    }

    pub(crate) fn park() {
        let Thread(own) = current();
        let mut is_unparked = lock(&own.0);
        while !*is_unparked {
            is_unparked = wait(&own.1, is_unparked);
        }
        *is_unparked = false;
    }

    pub(crate) fn sleep(_: std::time::Duration) {
        loom::thread::yield_now();
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    ignore_poison(mutex.lock())
}

pub(crate) fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    ignore_poison(condvar.wait(guard))
}

pub(crate) fn wait_timeout<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>, timeout: Duration) -> MutexGuard<'a, T> {
    ignore_poison(condvar.wait_timeout(guard, timeout)).0
}

/// Releases the lock, and sleeps for `time` or until the condition variable is notified.
#[cfg(not(loom))]
pub(crate) fn sleep_or_notified<T>(condvar: &Condvar, guard: MutexGuard<'_, T>, time: Duration) {
    drop(wait_timeout(condvar, guard, time));
}

/// Releases the lock and yields: the condition variables of `loom` have no time either.
#[cfg(loom)]
pub(crate) fn sleep_or_notified<T>(_: &Condvar, guard: MutexGuard<'_, T>, time: Duration) {
    drop(guard);
    thread::sleep(time);
}
