//! Mutate pickles.

/// Instructions, counted arguments, and prefixes of both.
const INSTRUCTIONS: [&[u8]; 28] = [
    b"(",
    b"t",
    b"]",
    b"}",
    b")",
    b"R",
    b"Q",
    b"b",
    b"s",
    b"u",
    b"e",
    b"a",
    b"0",
    b"2",
    b"N",
    b"q\x00",
    b"h\x00",
    b"j\xff\xff\xff\xff",
    b"K\x00",
    b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"X\xff\xff\xff\xff",
    b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"cos\nsystem\n",
    b"\x93",
    b"\x91",
    b"\x90",
    b"\x81",
    b".",
];

pub(crate) fn mutate_pickle(pickle: &mut Vec<u8>, dice: &mut fastrand::Rng) {
    let at = dice.usize(..pickle.len().max(1)).min(pickle.len());
    let end = (at + dice.usize(1..20)).min(pickle.len());
    match dice.u8(..6) {
        0 | 1 => drop(pickle.splice(at..at, INSTRUCTIONS[dice.usize(..INSTRUCTIONS.len())].iter().copied())),
        2 => drop(pickle.splice(at..end, INSTRUCTIONS[dice.usize(..INSTRUCTIONS.len())].iter().copied())),
        3 => drop(pickle.drain(at..end)),
        4 => {
            let repeated = pickle[at..end].repeat(dice.usize(2..50));
            drop(pickle.splice(at..at, repeated));
        }
        _ => {
            if let Some(byte) = pickle.get_mut(at) {
                *byte = dice.u8(..);
            }
        }
    }
}
