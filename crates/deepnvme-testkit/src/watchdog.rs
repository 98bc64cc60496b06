//! Turns a hang into a failure: a test that exceeds its time limit ends the process with its name.

use std::sync::mpsc;
use std::time::Duration;

/// Runs the test. If it exceeds `limit`, prints its name and aborts the process.
///
/// There is no gentler way: a thread that waits for the kernel cannot be unwound.
#[allow(clippy::print_stderr, reason = "the last words of a hanging test")]
pub fn with_time_limit<T>(name: &str, limit: Duration, test: impl FnOnce() -> T) -> T {
    let (done, ended) = mpsc::channel::<()>();
    let what = name.to_owned();
    let watcher = std::thread::spawn(move || {
        if ended.recv_timeout(limit) == Err(mpsc::RecvTimeoutError::Timeout) {
            eprintln!("watchdog: {what} hangs: not done after {} s; ending the process", limit.as_secs());
            std::process::abort();
        }
    });
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(test));
    drop(done);
    watcher.join().expect("the watchdog only waits");
    match result {
        Ok(value) => value,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    #[test]
    fn a_test_that_ends_is_left_alone() {
        assert_eq!(super::with_time_limit("quick", Duration::from_secs(60), || 7), 7);
    }

    #[test]
    #[should_panic(expected = "its own words")]
    fn a_panic_passes_through() {
        super::with_time_limit("panics", Duration::from_secs(60), || panic!("its own words"));
    }
}
