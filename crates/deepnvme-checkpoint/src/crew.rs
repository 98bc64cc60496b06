//! Work that several threads share, until it is done or one of them fails.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::error::{Error, Result};

/// Threads at most: each copies and hashes several gigabytes a second.
pub(crate) const THREADS_MAX: usize = 8;

/// How many threads so many items are worth.
pub(crate) fn threads(items: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    cores.min(THREADS_MAX).min(items).max(1)
}

/// How many beside those of the engine: half of the processors. A device of a virtual machine has nothing to do while a
/// worker of the engine waits for a processor, and one thread fills buffers faster than most disks empty them.
pub(crate) fn threads_beside_workers(items: usize) -> usize {
    (threads(usize::MAX) / 2).min(items).max(1)
}

/// Has `threads` threads, this one among them, take the items in their order. Each has a `scratch` of its own. The
/// first failure is returned, and nothing new is begun after it. Where no more threads are to be had, fewer do it all.
pub(crate) fn each<T: Sync, S>(
    threads: usize,
    items: &[T],
    scratch: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, &T) -> Result<()> + Sync,
) -> Result<()> {
    let (next, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
    let failed: Mutex<Option<Error>> = Mutex::new(None);
    let run = || {
        let mut scratch = scratch();
        while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
            if is_over.load(Ordering::Relaxed) {
                return;
            }
            if let Err(error) = work(&mut scratch, item) {
                is_over.store(true, Ordering::Relaxed);
                failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                return;
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            let started = std::thread::Builder::new().name("deepnvme-crew".into()).spawn_scoped(scope, run);
            if started.is_err() {
                break;
            }
        }
        run();
    });
    failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_done_once_and_a_failure_ends_it() {
        let items: Vec<u64> = (0..1000).collect();
        let sum = Mutex::new(0);
        each(
            4,
            &items,
            || (),
            |(), item| {
                *sum.lock().unwrap() += item;
                Ok(())
            },
        )
        .unwrap();
        assert_eq!(*sum.lock().unwrap(), 499_500);
        let failed = each(4, &items, || (), |(), item| if *item == 500 { Err(Error::Interrupted) } else { Ok(()) });
        assert!(matches!(failed, Err(Error::Interrupted)));
        assert!(each(4, &Vec::<u64>::new(), || (), |(), _| Err(Error::Interrupted)).is_ok());
    }
}
