//! Visible skips. `scripts/run_tests.py` counts a test that reports one as skipped.

use std::io::Write;

/// Reports that the calling test is skipped, and why. Bypasses the test harness's capture, so that skips are counted.
pub fn skipped(why: &str) {
    say("skipped", why);
}

/// Reports that a part of the calling test does not run here. Bypasses the test harness's capture.
pub fn left_out(why: &str) {
    say("left out", why);
}

fn say(what: &str, why: &str) {
    // The harness captures the printing macros, but not the stream.
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    let _ = writeln!(std::io::stderr(), "{what}: {test}: {}", why.replace('\n', " "));
}
