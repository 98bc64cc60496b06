//! A oneshot value: set once, awaited by any number of threads. It carries the result of a request to its owner.
//!
//! `tests/loom.rs` checks the interleavings.

use std::os::fd::OwnedFd;
use std::time::Duration;

use crate::sync::{Condvar, Instant, Mutex, lock, wait, wait_timeout};

/// A value that is set at most once.
#[derive(Debug)]
pub struct Oneshot<T> {
    state: Mutex<State<T>>,
    is_set: Condvar,
}

struct State<T> {
    value: Option<T>,
    /// Threads that wait. Without this count, each small request would cost a system call that wakes nobody.
    waiters: usize,
    /// Called once when the value is set.
    watchers: Vec<Box<dyn FnOnce() + Send>>,
}

impl<T: std::fmt::Debug> std::fmt::Debug for State<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").field("value", &self.value).field("watchers", &self.watchers.len()).finish()
    }
}

impl<T: Clone> Oneshot<T> {
    /// Creates an empty oneshot.
    #[must_use]
    pub fn new() -> Self {
        Self { state: Mutex::new(State { value: None, waiters: 0, watchers: Vec::new() }), is_set: Condvar::new() }
    }

    /// Sets the value and wakes all waiters. Only the first call has an effect.
    pub fn set(&self, value: T) {
        let (is_awaited, watchers) = {
            let mut state = lock(&self.state);
            if state.value.is_some() {
                return;
            }
            state.value = Some(value);
            (state.waiters > 0, std::mem::take(&mut state.watchers))
        };
        if is_awaited {
            self.is_set.notify_all();
        }
        watchers.into_iter().for_each(|watcher| watcher());
    }

    /// Returns the value, if it is set.
    pub fn get(&self) -> Option<T> {
        lock(&self.state).value.clone()
    }

    /// Waits for the value.
    pub fn wait(&self) -> T {
        let mut state = lock(&self.state);
        loop {
            if let Some(value) = &state.value {
                return value.clone();
            }
            state.waiters += 1;
            state = wait(&self.is_set, state);
            state.waiters -= 1;
        }
    }

    /// Waits for the value, up to `timeout`.
    pub fn wait_timeout(&self, timeout: Duration) -> Option<T> {
        let deadline = Instant::now().checked_add(timeout);
        let mut state = lock(&self.state);
        loop {
            if let Some(value) = &state.value {
                return Some(value.clone());
            }
            let left = match deadline {
                Some(deadline) => deadline.checked_duration_since(Instant::now())?,
                None => Duration::from_secs(3600),
            };
            state.waiters += 1;
            state = wait_timeout(&self.is_set, state, left);
            state.waiters -= 1;
        }
    }

    /// Writes to this eventfd once, when the value is set (immediately, if it is set already).
    pub fn notify(&self, eventfd: OwnedFd) {
        // A full counter already signals the reader, and no caller could receive other errors.
        self.on_set(move || {
            let _ = rustix::io::write(&eventfd, &1u64.to_ne_bytes());
        });
    }

    /// Calls `watcher` once, on the thread that sets the value. If the value is set already, calls it here and now.
    pub fn on_set(&self, watcher: impl FnOnce() + Send + 'static) {
        let mut state = lock(&self.state);
        if state.value.is_none() {
            state.watchers.push(Box::new(watcher));
            return;
        }
        drop(state);
        watcher();
    }
}

impl<T: Clone> Default for Oneshot<T> {
    fn default() -> Self {
        Self::new()
    }
}
