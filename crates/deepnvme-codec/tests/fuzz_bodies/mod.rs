//! Checks over arbitrary bytes. One function for each kind of input: the targets in `fuzz/` call them with
//! libFuzzer's inputs, `tests/fuzz.rs` with the seeds and mutations of them.
#![allow(dead_code, unused_imports, reason = "every target uses its own")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a panic is a finding")]

use std::num::NonZeroUsize;

use deepnvme_codec::quant::{CodeType, Scheme, dequantise, quantise};
use deepnvme_codec::{Float, cast, pack};

#[path = "../reference/mod.rs"]
mod reference;

/// A packed block is accepted if the reference reader accepts it, with the same elements, and round-trips.
pub(crate) fn packed(bytes: &[u8]) {
    let decoded = decode(bytes);
    assert_eq!(
        decoded.as_ref().map(|(_, out, used)| (out, *used)),
        reference::decode(bytes).as_ref().map(|(out, used)| (out, *used))
    );
    let Some((float, elements, _)) = decoded else { return };
    round_trip(float, &elements);
}

fn decode(bytes: &[u8]) -> Option<(Float, Vec<u8>, usize)> {
    let block = pack::PackedBlock::parse(bytes).ok()?;
    let header = *block.header();
    assert!(header.encoded_bytes() <= bytes.len());
    assert!(header.encoded_bytes() <= pack::encoded_bytes_max(header.decoded_bytes()));
    assert_eq!(header.decoded_bytes(), header.elements() * header.float().bytes());
    let mut out = vec![0xa5; header.decoded_bytes()];
    block.decode_into(&mut out).ok()?;
    Some((header.float(), out, header.encoded_bytes()))
}

fn round_trip(float: Float, elements: &[u8]) {
    let mut packed = b"before".to_vec();
    pack::encode(float, elements, &mut packed).unwrap();
    let (before, packed) = packed.split_at(6);
    assert_eq!(before, b"before");
    assert!(packed.len() <= pack::encoded_bytes_max(elements.len()));
    let (again, out, used) = decode(packed).unwrap();
    assert!(again == float && out == elements && used == packed.len());
    assert_eq!(reference::decode(packed).unwrap(), (out, used));
}

/// Arbitrary elements: packed, cast and quantised, in any alignment.
pub(crate) fn elements(bytes: &[u8]) {
    let [kind, columns, bytes @ ..] = bytes else { return };
    let float = Float::ALL[usize::from(kind % 3)];
    let bytes = &bytes[..bytes.len() / float.bytes() * float.bytes()];
    round_trip(float, bytes);
    for to in Float::ALL {
        let mut there = vec![0; bytes.len() / float.bytes() * to.bytes()];
        cast::convert(float, to, bytes, &mut there).unwrap();
        let mut back = vec![0; bytes.len()];
        cast::convert(to, float, &there, &mut back).unwrap();
        if to == Float::F32 && !has_nan(float, bytes) {
            assert_eq!(back, bytes, "fp32 holds them all");
        }
    }
    let code = if kind & 0x40 == 0 { CodeType::Int8 } else { CodeType::F8E4m3 };
    let scheme = Scheme { code, group: NonZeroUsize::new(usize::from(kind >> 4 & 3)), scale: float };
    let columns = usize::from(*columns).max(1);
    let count = bytes.len() / float.bytes() / columns * columns;
    let (source, mut codes) = (&bytes[..count * float.bytes()], vec![0; count]);
    let mut scales = vec![0; scheme.scales(count / columns, columns).unwrap() * float.bytes()];
    if quantise(scheme, columns, (float, source), &mut codes, &mut scales).is_ok() {
        let mut again = vec![0; source.len()];
        dequantise(scheme, columns, &codes, &scales, (float, &mut again)).unwrap();
        assert!(!has_nan(float, &again));
    }
}

fn has_nan(float: Float, bytes: &[u8]) -> bool {
    let mut wide = vec![0; bytes.len() / float.bytes() * 4];
    cast::convert(float, Float::F32, bytes, &mut wide).unwrap();
    wide.as_chunks().0.iter().any(|element| f32::from_le_bytes(*element).is_nan())
}
