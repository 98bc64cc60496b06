//! Runs the fuzz body over its seeds and thousands of reproducible mutations of each.

mod fuzz_bodies;

use deepnvme_testkit::text_mutations;

#[test]
fn sweep_configs() {
    text_mutations::check("sweep", fuzz_bodies::sweep);
}
