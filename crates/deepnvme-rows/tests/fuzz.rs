//! Runs the fuzz bodies over their seeds and thousands of reproducible mutations of each.

mod fuzz_bodies;

use deepnvme_testkit::{fuzz_targets, text_mutations};

/// Changes a number of a list, repeats one, or cuts the list.
fn mutate_list(input: &mut Vec<u8>, _: &[Vec<u8>], random: &mut fastrand::Rng) {
    let at = random.usize(..=input.len() / 4) * 4;
    match random.u32(..4) {
        0 => input.truncate(at + random.usize(..4)),
        1 => input.extend_from_within(at.saturating_sub(4)..at.min(input.len())),
        2 => input.extend(random.u32(..).to_le_bytes()),
        _ => {
            if let Some(byte) = input.get_mut(at + random.usize(..4)) {
                *byte ^= 1 << random.u32(..8);
            }
        }
    }
}

fuzz_targets! {
    text_mutations::mutate;
    descriptions_of_packed_tables: "packed_rows", fuzz_bodies::packed_rows;
}

fuzz_targets! {
    text_mutations::FILE_MUTATIONS, mutate_list;
    lists_of_hot_rows: "hot_rows", fuzz_bodies::hot_rows;
}
