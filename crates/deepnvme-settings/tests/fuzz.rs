//! Runs the fuzz body over its seeds and thousands of reproducible mutations of each.

mod fuzz_bodies;

use deepnvme_testkit::text_mutations;

#[test]
fn settings() {
    text_mutations::check("settings", fuzz_bodies::settings);
}
