//! Runs the fuzz bodies over their seeds and thousands of reproducible mutations of each.

mod fuzz_bodies;

use deepnvme_testkit::text_mutations;

#[test]
fn lists_of_parts() {
    text_mutations::check("stripes", fuzz_bodies::stripes);
}

#[test]
fn intents_of_killed_saves() {
    text_mutations::check_files("intent", fuzz_bodies::intent);
}

#[test]
fn records_of_indexes() {
    text_mutations::check_files("record", fuzz_bodies::record);
}

#[test]
fn contents_of_private_folders() {
    text_mutations::check_files("contents", fuzz_bodies::contents);
}
