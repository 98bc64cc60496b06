//! Runs the fuzz body over its seeds and thousands of reproducible mutations of each.

mod fuzz_bodies;

use deepnvme_testkit::{fuzz_targets, text_mutations};

fuzz_targets! {
    text_mutations::mutate;
    sweep_configs: "sweep", fuzz_bodies::sweep;
}
