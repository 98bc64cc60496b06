//! A scoped work queue: threads take items until all are done or one of them fails.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;

use crate::error::{Error, Result};
use crate::sync::{AtomicBool, AtomicUsize, Mutex, lock, thread};
use deepnvme_io::mem::sync::ignore_poison;
use deepnvme_io::start_thread;

/// Maximum number of threads that hash. Each copies and hashes several gigabytes a second.
pub(crate) const THREADS_MAX: usize = 8;

/// Returns how many threads to use for `items` items.
pub(crate) fn thread_count(items: usize) -> usize {
    let cores = thread::available_parallelism().map_or(1, std::num::NonZero::get);
    cores.min(THREADS_MAX).min(items).max(1)
}

/// Returns how many threads to use next to the engine's workers: half of [`thread_count`]. A worker that waits for a
/// core lets the device idle, most of all in a virtual machine. One thread fills buffers faster than most disks empty
/// them.
pub(crate) fn thread_count_with_engine(items: usize) -> usize {
    (thread_count(usize::MAX) / 2).min(items).max(1)
}

/// Runs `work` for each item, in order, on `threads` threads including this one. Each thread has its own `scratch`.
/// After the first failure, which is returned, no new item starts. If threads cannot be started, fewer do all the work.
pub(crate) fn for_each<T: Sync, S>(
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
            // Handle a panic as an error: the other threads stop, and the caller gets it.
            let done = catch_unwind(AssertUnwindSafe(|| work(&mut scratch, item)));
            if let Err(error) = done.unwrap_or_else(|panic| Err(panicked(&*panic))) {
                is_over.store(true, Ordering::Relaxed);
                lock(&failed).get_or_insert(error);
                return;
            }
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads {
            let builder = thread::Builder::new().name("deepnvme-queue".into());
            let started = start_thread(|| builder.spawn_scoped(scope, run));
            if started.is_err() {
                break;
            }
        }
        run();
    });
    ignore_poison(failed.into_inner()).map_or(Ok(()), Err)
}

fn panicked(panic: &(dyn Any + Send)) -> Error {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    Error::Panicked(text.unwrap_or("without a message").to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_done_once_and_a_failure_ends_it() {
        let items: Vec<u64> = (0..1000).collect();
        let sum = Mutex::new(0);
        for_each(
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
        let failed = for_each(4, &items, || (), |(), item| if *item == 500 { Err(Error::Interrupted) } else { Ok(()) });
        assert!(matches!(failed, Err(Error::Interrupted)));
        assert!(for_each(4, &Vec::<u64>::new(), || (), |(), _| Err(Error::Interrupted)).is_ok());
    }

    #[test]
    fn a_panic_is_an_error_and_ends_the_others() {
        let items: Vec<u64> = (0..1000).collect();
        let done = Mutex::new(0);
        let failed = for_each(
            4,
            &items,
            || (),
            |(), item| {
                assert!(*item != 20, "a test of panics");
                *done.lock().unwrap() += 1;
                Ok(())
            },
        );
        assert!(matches!(failed, Err(Error::Panicked(ref text)) if text == "a test of panics"), "{failed:?}");
        assert!(*done.lock().unwrap() < 1000);
    }
}
