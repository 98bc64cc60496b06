//! Buffers for reads in flight, of one size and bounded number.

use std::time::Duration;

use deepnvme_io::mem::Buffer;

use crate::sync::{Condvar, Mutex, lock};

/// How often a thread that waits for a buffer asks whether to stop.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The buffers of a table.
#[derive(Debug)]
pub(crate) struct Staging<B = Buffer> {
    free: Mutex<Free<B>>,
    returned: Condvar,
    buffer_bytes: usize,
    make: fn(usize) -> std::io::Result<B>,
}

#[derive(Debug)]
struct Free<B> {
    buffers: Vec<B>,
    /// How many may still be allocated.
    unmade: usize,
    waiters: usize,
}

impl<B> Staging<B> {
    /// Creates up to `buffers` buffers, each when it is first needed.
    pub(crate) fn new(buffer_bytes: usize, buffers: usize, make: fn(usize) -> std::io::Result<B>) -> Self {
        let free = Free { buffers: Vec::with_capacity(buffers), unmade: buffers, waiters: 0 };
        Self { free: Mutex::new(free), returned: Condvar::default(), buffer_bytes, make }
    }

    pub(crate) fn buffer_bytes(&self) -> usize {
        self.buffer_bytes
    }

    /// Takes a buffer if, after that, `rest` others are free.
    pub(crate) fn try_take(&self, rest: usize) -> std::io::Result<Option<B>> {
        let mut free = lock(&self.free);
        if free.buffers.len() + free.unmade <= rest {
            return Ok(None);
        }
        if let Some(buffer) = free.buffers.pop() {
            return Ok(Some(buffer));
        }
        free.unmade -= 1;
        drop(free);
        (self.make)(self.buffer_bytes).map(Some).inspect_err(|_| self.put_back(None))
    }

    /// Waits until more than `rest` buffers are free, at most for [`POLL_INTERVAL`].
    pub(crate) fn wait(&self, rest: usize) {
        let mut free = lock(&self.free);
        if free.buffers.len() + free.unmade <= rest {
            free.waiters += 1;
            let waited = self.returned.wait_timeout(free, POLL_INTERVAL);
            free = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
            free.waiters -= 1;
        }
    }

    /// Returns a buffer. Without one, for a buffer that was lost, another may be allocated.
    pub(crate) fn put_back(&self, buffer: Option<B>) {
        let mut free = lock(&self.free);
        match buffer {
            Some(buffer) => free.buffers.push(buffer),
            None => free.unmade += 1,
        }
        // Each leaves another number of buffers to others.
        if free.waiters > 0 {
            self.returned.notify_all();
        }
    }
}

#[cfg(all(test, not(simulated)))]
mod tests {
    use std::time::Instant;

    use super::*;

    /// A wait that ends at once makes its caller spin.
    #[test]
    fn a_caller_that_leaves_buffers_to_others_waits_for_more() {
        let staging = Staging::new(4096, 2, Buffer::zeroed);
        let taken = staging.try_take(0).unwrap();
        assert!(staging.try_take(1).unwrap().is_none());
        let began = Instant::now();
        staging.wait(1);
        assert!(began.elapsed() >= POLL_INTERVAL);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while staging.try_take(1).unwrap().is_none() {
                    staging.wait(1);
                }
            });
            staging.put_back(taken);
        });
    }
}
