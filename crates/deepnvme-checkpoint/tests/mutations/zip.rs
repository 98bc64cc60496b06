//! Mutate ZIP files.

use crate::json::NUMBERS;

/// Offsets after a structure's signature, and widths, of its fields.
type Fields = (&'static [u8], &'static [(usize, usize)]);

const ZIP_FIELDS: [Fields; 5] = [
    (b"PK\x03\x04", &[(4, 2), (6, 2), (8, 2), (14, 4), (18, 4), (22, 4), (26, 2), (28, 2)]),
    (
        b"PK\x01\x02",
        &[(4, 2), (6, 2), (8, 2), (10, 2), (16, 4), (20, 4), (24, 4), (28, 2), (30, 2), (32, 2), (34, 2), (42, 4)],
    ),
    (b"PK\x06\x06", &[(4, 8), (16, 4), (20, 4), (24, 8), (32, 8), (40, 8), (48, 8)]),
    (b"PK\x06\x07", &[(4, 4), (8, 8), (16, 4)]),
    (b"PK\x05\x06", &[(4, 2), (6, 2), (8, 2), (10, 2), (12, 4), (16, 4), (20, 2)]),
];

/// Finds the structures of a ZIP file by their signatures.
fn structures(file: &[u8]) -> Vec<(usize, &'static [(usize, usize)])> {
    let known =
        |at: usize| ZIP_FIELDS.iter().find(|(mark, _)| file[at..].starts_with(mark)).map(|(_, fields)| (at, *fields));
    (0..file.len()).filter_map(known).collect()
}

/// Mutates a ZIP file: a field, the order or number of its structures, or its end.
pub(crate) fn mutate_zip(file: &mut Vec<u8>, dice: &mut fastrand::Rng) {
    let there = structures(file);
    let Some(&(at, fields)) = there.get(dice.usize(..there.len().max(1))) else { return file.clear() };
    let end_of = |at: usize| there.iter().map(|(other, _)| *other).find(|other| *other > at).unwrap_or(file.len());
    match dice.u8(..10) {
        0..=4 => {
            let (offset, width) = fields[dice.usize(..fields.len())];
            let Some(field) = file.get_mut(at + offset..at + offset + width) else { return };
            let mut wide = [0; 8];
            wide[..width].copy_from_slice(field);
            let number = u64::from_le_bytes(wide);
            let number = match dice.u8(..4) {
                0 => number.wrapping_add(1),
                1 => number.wrapping_sub(1),
                2 => number ^ 1 << dice.usize(..width * 8),
                _ => NUMBERS[dice.usize(..NUMBERS.len())],
            };
            field.copy_from_slice(&number.to_le_bytes()[..width]);
        }
        5 => file.truncate(dice.usize(..=file.len())),
        // Duplicates, removes or swaps a section.
        6 => {
            let section = file[at..end_of(at)].to_vec();
            drop(file.splice(at..at, section));
        }
        7 => drop(file.drain(at..end_of(at))),
        8 => {
            let other = there[dice.usize(..there.len())].0;
            let (first, last) = (at.min(other), at.max(other));
            let (one, two) = (file[first..end_of(first)].to_vec(), file[last..end_of(last)].to_vec());
            if first < last {
                drop(file.splice(last..last + two.len(), one.iter().copied()));
                drop(file.splice(first..first + one.len(), two));
            }
        }
        // Changes a byte of a name or of the data after it.
        _ => {
            let place = (at + 30 + dice.usize(..40)).min(file.len() - 1);
            file[place] = dice.u8(..);
        }
    }
}
