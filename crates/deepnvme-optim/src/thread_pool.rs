//! A thread pool that works through a list while the caller waits.
//!
//! A pool is a value: its threads end with it. Threads take items one at a time, so a thread that the scheduler
//! preempts delays no other. The result does not depend on which thread processes an item.

use std::sync::Mutex;

use deepnvme_mem::sync::ignore_poison;
use deepnvme_mem::{ParentOnly, check_thread_memory};
use rayon_core::ThreadPoolBuilder;

use crate::error::{Error, Result};

/// The maximum number of threads. An optimizer step is limited by memory bandwidth, so more gain nothing.
pub const THREADS_MAX: usize = 256;

/// A fixed number of threads.
#[derive(Debug)]
pub struct ThreadPool {
    threads: usize,
    /// `None` if the caller's thread does all the work.
    pool: Option<ParentOnly<rayon_core::ThreadPool>>,
}

impl ThreadPool {
    /// Starts a pool of `threads` threads. Zero means one for each CPU that this process may use, at most
    /// [`THREADS_MAX`].
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] above [`THREADS_MAX`], [`Error::Threads`] if the threads cannot be started.
    pub fn new(threads: usize) -> Result<Self> {
        if threads > THREADS_MAX {
            return Err(Error::invalid(format!("threads is {threads}; it must be at most {THREADS_MAX}")));
        }
        let cores = || std::thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX);
        let threads = if threads == 0 { cores() } else { threads };
        let build = || {
            // rayon starts the threads and cannot report that one had no memory for its own data.
            check_thread_memory(threads).map_err(|error| error.to_string())?;
            let builder = ThreadPoolBuilder::new().num_threads(threads);
            builder.thread_name(|index| format!("deepnvme-optim-{index}")).build().map_err(|error| error.to_string())
        };
        let pool = if threads == 1 { None } else { Some(build()) };
        let pool = pool.transpose().map_err(|reason| Error::Threads { threads, reason })?;
        Ok(Self { threads, pool: pool.map(ParentOnly::new) })
    }

    /// Returns the number of threads.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Calls `work` for each item, on any thread and in any order. Returns when all calls are done.
    pub fn for_each<T: Send>(&self, items: Vec<T>, work: impl Fn(T) + Sync) {
        let threads = self.threads.min(items.len());
        let Some(pool) = self.pool.as_ref().filter(|_| threads > 1) else {
            return items.into_iter().for_each(work);
        };
        let left = Mutex::new(items.into_iter());
        let drain = || {
            // The lock is released before the work starts.
            let next = || ignore_poison(left.lock()).next();
            while let Some(item) = next() {
                work(item);
            }
        };
        let drain = &drain;
        if let Some(pool) = pool.get() {
            pool.scope(|scope| (0..threads).for_each(|_| scope.spawn(move |_| drain())));
        } else {
            // After a fork the pool's threads are missing. Start new ones; without any, this thread does all the work.
            std::thread::scope(|scope| {
                let _ = (1..threads).try_for_each(|_| {
                    check_thread_memory(1)?;
                    std::thread::Builder::new().spawn_scoped(scope, drain).map(drop)
                });
                drain();
            });
        }
    }

    /// Returns the results of `work` for all items, in their order.
    pub fn map<T: Send, R: Send + Default>(&self, items: Vec<T>, work: impl Fn(T) -> R + Sync) -> Vec<R> {
        let mut results: Vec<R> = items.iter().map(|_| R::default()).collect();
        let pairs = items.into_iter().zip(results.iter_mut()).collect();
        self.for_each(pairs, |(item, result)| *result = work(item));
        results
    }
}
