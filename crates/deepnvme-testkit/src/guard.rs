//! A child process for thousands of malicious inputs, limited to 1 GiB of additional memory and ten seconds per
//! input.

use std::process::{Command, abort};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{Builder, park_timeout};
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Additional address space of the child.
const BYTES_MAX: u64 = 1 << 30;
/// Time limit per input.
const TIME_MAX: Duration = Duration::from_secs(10);
/// Interval of the time checks.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
const CHILD: &str = "DEEPNVME_TEST_GUARDED";

/// Tells the watching thread which input the test works on.
#[derive(Debug)]
pub struct InputReporter {
    began: Instant,
    /// Number of the input, and the milliseconds from `began` to its start.
    current: Arc<[AtomicU64; 2]>,
}

impl InputReporter {
    /// Reports that the test begins with an input.
    pub fn begin(&self, number: u64) {
        self.current[1].store(self.began.elapsed().as_millis() as u64, Ordering::Relaxed);
        self.current[0].store(number, Ordering::Relaxed);
    }
}

/// Runs the named test in a process of its own, with the limits. A panic, an abort on a failed allocation and a slow
/// input are failures.
///
/// # Panics
/// If it fails.
pub fn run_limited(test: &str, body: impl FnOnce(&InputReporter)) {
    if std::env::var_os(CHILD).is_none_or(|named| named != test) {
        let mut child = Command::new(std::env::current_exe().expect("the test's own program"));
        let output =
            child.args(["--exact", test, "--nocapture"]).env(CHILD, test).output().expect("a process of our own");
        let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.contains("1 passed"), "{}:\n{said}", output.status);
        return;
    }
    let reporter = InputReporter { began: Instant::now(), current: Arc::default() };
    let (began, current) = (reporter.began, Arc::clone(&reporter.current));
    let watch = move || {
        loop {
            park_timeout(CHECK_INTERVAL);
            let since = Duration::from_millis(current[1].load(Ordering::Relaxed));
            if began.elapsed().saturating_sub(since) > TIME_MAX {
                let _ = std::io::Write::write_all(
                    &mut std::io::stderr(),
                    format!("input {} took too long\n", current[0].load(Ordering::Relaxed)).as_bytes(),
                );
                abort();
            }
        }
    };
    Builder::new().name("guard".into()).spawn(watch).expect("a thread");
    let pages = std::fs::read_to_string("/proc/self/statm").expect("statm");
    let pages: u64 = pages.split(' ').next().and_then(|pages| pages.parse().ok()).expect("a number of pages");
    let limit = Some(pages * rustix::param::page_size() as u64 + BYTES_MAX);
    setrlimit(Resource::As, Rlimit { current: limit, maximum: getrlimit(Resource::As).maximum }).expect("a limit");
    body(&reporter);
}
