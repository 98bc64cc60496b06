//! Detects values that a forked child inherited from its parent.
//!
//! A child has its parent's memory, but only the thread that called `fork`: worker threads are missing, locks may be
//! held forever, and files on disk belong to the parent.
//!
//! Each operation asks which process it is in, and the system call would take a tenth of the time of a small operation.
//! So the answer is kept in a page that the kernel clears in a forked child (`MADV_WIPEONFORK`, since Linux 4.14).

use std::process;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::alignment::PAGE_BYTES;

/// The process that created a value.
///
/// ```
/// let creator = deepnvme_mem::CreatorProcess::current();
/// assert!(creator.is_current());
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CreatorProcess {
    id: u32,
}

impl CreatorProcess {
    /// Returns the calling process.
    #[must_use]
    pub fn current() -> Self {
        Self { id: process_id() }
    }

    /// Returns whether the calling process is the creator, and not a child forked from it.
    #[must_use]
    pub fn is_current(self) -> bool {
        self.id == process_id()
    }
}

/// A value that is not dropped in a forked child, such as the handle of a thread. Dropping that would detach a thread
/// that the child does not have, and whose stack the child may have freed. A pool of threads would wait for its
/// threads.
#[derive(Debug)]
pub struct ParentOnly<T> {
    value: Option<T>,
    creator: CreatorProcess,
}

impl<T> ParentOnly<T> {
    /// Wraps a value of the calling process.
    #[must_use]
    pub fn new(value: T) -> Self {
        Self { value: Some(value), creator: CreatorProcess::current() }
    }

    /// Borrows the value, or returns `None` in a forked child.
    #[must_use]
    pub fn get(&self) -> Option<&T> {
        if self.creator.is_current() { self.value.as_ref() } else { None }
    }

    /// Returns the value, or `None` in a forked child.
    #[must_use]
    pub fn into_inner(mut self) -> Option<T> {
        if self.creator.is_current() { self.value.take() } else { None }
    }
}

impl<T> Drop for ParentOnly<T> {
    fn drop(&mut self) {
        if !self.creator.is_current() {
            std::mem::forget(self.value.take());
        }
    }
}

/// The page with the id, once there is one; [`NO_PAGE`] if the kernel has no such pages.
static PAGE: AtomicPtr<AtomicU32> = AtomicPtr::new(ptr::null_mut());
static NO_PAGE: AtomicU32 = AtomicU32::new(0);

/// Returns the id of the calling process, as `std::process::id` does, but mostly without a system call.
#[must_use]
pub fn process_id() -> u32 {
    let Some(known) = page() else { return process::id() };
    // Zero in a new page, and in a child.
    match known.load(Ordering::Relaxed) {
        0 => {
            let id = process::id();
            known.store(id, Ordering::Relaxed);
            id
        }
        id => id,
    }
}

/// Returns the page. Takes no lock, since a forked child might find it held for ever.
fn page() -> Option<&'static AtomicU32> {
    let no_page = (&raw const NO_PAGE).cast_mut();
    let mut found = PAGE.load(Ordering::Acquire);
    if found.is_null() {
        let made = if cfg!(miri) { None } else { make() };
        let new = made.unwrap_or(no_page);
        match PAGE.compare_exchange(ptr::null_mut(), new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => found = new,
            Err(earlier) => {
                found = earlier;
                if let Some(made) = made {
                    // SAFETY: this thread has just mapped the page, and no other one has seen it.
                    let _ = unsafe { munmap(made.cast(), PAGE_BYTES as usize) };
                }
            }
        }
    }
    // SAFETY: the pointer is to a static, or to a page that is never unmapped once `PAGE` has it. Both are aligned, and
    // only ever used as an atomic number.
    (found != no_page).then(|| unsafe { &*found })
}

fn make() -> Option<*mut AtomicU32> {
    let bytes = PAGE_BYTES as usize;
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new private mapping at an address that the kernel chooses overlaps nothing.
    let page = unsafe { mmap_anonymous(ptr::null_mut(), bytes, protection, MapFlags::PRIVATE) }.ok()?;
    // SAFETY: this thread has just mapped the page, and nothing else uses it.
    if unsafe { madvise(page, bytes, Advice::LinuxWipeOnFork) }.is_err() {
        // SAFETY: this thread has just mapped the page, and nobody else has its address.
        let _ = unsafe { munmap(page, bytes) };
        return None;
    }
    Some(page.cast())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_id_is_that_of_the_system_in_all_threads() {
        let ids: Vec<u32> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(process_id)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(ids.iter().all(|id| *id == process::id()));
    }

    /// Fails a child that drops it.
    struct Dropped;

    impl Drop for Dropped {
        fn drop(&mut self) {
            // SAFETY: it ends this process.
            unsafe { libc::_exit(3) };
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "miri cannot fork")]
    fn a_child_drops_nothing_of_its_parent() {
        let (one, other) = (ParentOnly::new(Dropped), ParentOnly::new(Dropped));
        // SAFETY: the child takes no lock, and ends at once.
        let child = unsafe { libc::fork() };
        if child == 0 {
            drop(one);
            let is_none = other.get().is_none() && other.into_inner().is_none();
            // SAFETY: it ends this process, without running what the parent has registered.
            unsafe { libc::_exit(i32::from(!is_none)) };
        }
        let mut status = -1;
        // SAFETY: the child is this process's, and `status` is a number of its own.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        [one, other].into_iter().for_each(|kept| kept.into_inner().into_iter().for_each(std::mem::forget));
        let kept = ParentOnly::new(5);
        assert_eq!(kept.get(), Some(&5));
        assert_eq!(kept.into_inner(), Some(5));
    }

    #[test]
    #[cfg_attr(miri, ignore = "miri cannot fork")]
    fn a_forked_child_is_another_process() {
        let creator = CreatorProcess::current();
        // SAFETY: the child makes no call but these, none of which takes a lock, and ends at once.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let is_told =
                !creator.is_current() && process_id() == process::id() && CreatorProcess::current().is_current();
            // SAFETY: it ends this process, without running what the parent has registered.
            unsafe { libc::_exit(i32::from(!is_told)) };
        }
        let mut status = -1;
        // SAFETY: the child is this process's, and `status` is a number of its own.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        assert!(creator.is_current());
    }
}
