//! Runs the fuzz bodies over their seeds and thousands of reproducible mutations of each.

mod fuzz_bodies;

use deepnvme_testkit::{fuzz_targets, text_mutations};

fuzz_targets! {
    text_mutations::mutate;
    lists_of_parts: "stripes", fuzz_bodies::stripes;
}

fuzz_targets! {
    text_mutations::FILE_MUTATIONS, text_mutations::mutate;
    intents_of_killed_saves: "intent", fuzz_bodies::intent;
    records_of_indexes: "record", fuzz_bodies::record;
    contents_of_private_folders: "contents", fuzz_bodies::contents;
}
