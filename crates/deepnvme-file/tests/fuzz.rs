//! Runs the fuzz body over its seeds and thousands of reproducible mutations of each.

mod fuzz_bodies;

use deepnvme_testkit::text_mutations;

#[test]
fn lists_of_parts() {
    text_mutations::check("stripes", fuzz_bodies::stripes);
}
