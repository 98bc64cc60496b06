//! Mutate pickles.

/// Opcodes with their arguments. `BINUNICODE` and `BINUNICODE8` lack the text that their lengths announce.
const OPCODES: [&[u8]; 28] = [
    b"(",                                        // MARK
    b"t",                                        // TUPLE
    b"]",                                        // EMPTY_LIST
    b"}",                                        // EMPTY_DICT
    b")",                                        // EMPTY_TUPLE
    b"R",                                        // REDUCE
    b"Q",                                        // BINPERSID
    b"b",                                        // BUILD
    b"s",                                        // SETITEM
    b"u",                                        // SETITEMS
    b"e",                                        // APPENDS
    b"a",                                        // APPEND
    b"0",                                        // POP
    b"2",                                        // DUP
    b"N",                                        // NONE
    b"q\x00",                                    // BINPUT
    b"h\x00",                                    // BINGET
    b"j\xff\xff\xff\xff",                        // LONG_BINGET
    b"K\x00",                                    // BININT1
    b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f", // LONG1
    b"X\xff\xff\xff\xff",                        // BINUNICODE
    b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7f",     // BINUNICODE8
    b"cos\nsystem\n",                            // GLOBAL
    b"\x93",                                     // STACK_GLOBAL
    b"\x91",                                     // FROZENSET
    b"\x90",                                     // ADDITEMS
    b"\x81",                                     // NEWOBJ
    b".",                                        // STOP
];

pub(crate) fn mutate_pickle(pickle: &mut Vec<u8>, dice: &mut fastrand::Rng) {
    let at = dice.usize(..pickle.len().max(1)).min(pickle.len());
    let end = (at + dice.usize(1..20)).min(pickle.len());
    match dice.u8(..6) {
        0 | 1 => drop(pickle.splice(at..at, OPCODES[dice.usize(..OPCODES.len())].iter().copied())),
        2 => drop(pickle.splice(at..end, OPCODES[dice.usize(..OPCODES.len())].iter().copied())),
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
