//! Simulates a crash at a chosen step, for tests. After that, the changes that `kernel` counts fail on this thread.

use std::cell::{Cell, RefCell};

use crate::op::Errno;

thread_local! {
    static STEPS_LEFT: Cell<Option<usize>> = const { Cell::new(None) };
    static STEPS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// Runs `work`, and fails each change to the file system after the first `steps`. Returns the result of `work`, and the
/// changes that were made, in order.
pub fn after<T>(steps: usize, work: impl FnOnce() -> T) -> (T, Vec<String>) {
    STEPS_LEFT.set(Some(steps));
    STEPS.with_borrow_mut(Vec::clear);
    let result = work();
    STEPS_LEFT.set(None);
    (result, STEPS.with_borrow_mut(std::mem::take))
}

/// Calls `run` with every number of steps, from zero on, until it returns true: the work was over before the crash.
/// Returns that number.
pub fn at_each_step(mut run: impl FnMut(usize) -> bool) -> usize {
    let mut steps = 0;
    while !run(steps) {
        steps += 1;
    }
    steps
}

/// Counts one change. Fails with `EIO` after the crash.
pub(super) fn step(what: &str, path: impl FnOnce() -> std::path::PathBuf) -> Result<(), Errno> {
    match STEPS_LEFT.get() {
        None => Ok(()),
        Some(0) => Err(Errno::IO),
        Some(left) => {
            STEPS_LEFT.set(Some(left - 1));
            STEPS.with_borrow_mut(|steps| steps.push(format!("{what} {}", path().display())));
            Ok(())
        }
    }
}
