//! Threads that work through a list together with whoever waits for them.
//!
//! A crew is a value: its threads end with it. Work is handed out piece by piece, so that a thread that the system
//! keeps waiting holds up nobody else; which thread does a piece never matters to the result.

use std::mem::ManuallyDrop;
use std::sync::{Mutex, PoisonError};

use rayon_core::{ThreadPool, ThreadPoolBuilder};

use crate::error::{Error, Result};

/// More threads than this gain nothing: memory is what an optimizer waits for.
pub const THREADS_MAX: usize = 256;

/// Some threads.
#[derive(Debug)]
pub struct Crew {
    threads: usize,
    /// None where the caller's own thread does it all.
    pool: Option<ManuallyDrop<ThreadPool>>,
    pid: u32,
}

impl Crew {
    /// A crew of that many threads; zero means one for each processor that this process may use.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] above [`THREADS_MAX`], [`Error::Threads`] where the system has none to give.
    pub fn new(threads: usize) -> Result<Self> {
        if threads > THREADS_MAX {
            return Err(Error::invalid(format!("threads is {threads}; it must be at most {THREADS_MAX}")));
        }
        let cores = || std::thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX);
        let threads = if threads == 0 { cores() } else { threads };
        let build = || {
            // The pool's threads are started by rayon, which cannot say that one had no memory for its own data.
            deepnvme_mem::check_thread_memory(threads).map_err(|error| error.to_string())?;
            let builder = ThreadPoolBuilder::new().num_threads(threads);
            builder.thread_name(|index| format!("deepnvme-optim-{index}")).build().map_err(|error| error.to_string())
        };
        let pool = if threads == 1 { None } else { Some(build()) };
        let pool = pool.transpose().map_err(|reason| Error::Threads { threads, reason })?;
        Ok(Self { threads, pool: pool.map(ManuallyDrop::new), pid: std::process::id() })
    }

    /// How many threads work at once.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Does the work for each item, on any thread and in any order, and returns when all is done.
    pub fn each<T: Send>(&self, items: Vec<T>, work: impl Fn(T) + Sync) {
        let hands = self.threads.min(items.len());
        let Some(pool) = self.pool.as_ref().filter(|_| hands > 1) else {
            return items.into_iter().for_each(work);
        };
        let left = Mutex::new(items.into_iter());
        let drain = || {
            // The guard is gone before the work begins.
            let next = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
            while let Some(item) = next() {
                work(item);
            }
        };
        let drain = &drain;
        if self.pid == std::process::id() {
            pool.scope(|scope| (0..hands).for_each(|_| scope.spawn(move |_| drain())));
        } else {
            // A fork left the pool's threads with the parent. Where there are none to be had, this one does it all.
            std::thread::scope(|scope| {
                let _ = (1..hands).try_for_each(|_| {
                    deepnvme_mem::check_thread_memory(1)?;
                    std::thread::Builder::new().spawn_scoped(scope, drain).map(drop)
                });
                drain();
            });
        }
    }

    /// The answers for all items, in their order.
    pub fn map<T: Send, R: Send + Default>(&self, items: Vec<T>, work: impl Fn(T) -> R + Sync) -> Vec<R> {
        let mut answers: Vec<R> = items.iter().map(|_| R::default()).collect();
        let pairs = items.into_iter().zip(answers.iter_mut()).collect();
        self.each(pairs, |(item, answer)| *answer = work(item));
        answers
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        if self.pid == std::process::id() {
            // In a forked child nobody is left to hear that it is over, and a lock may be held for ever.
            self.pool.take().map(ManuallyDrop::into_inner);
        }
    }
}
