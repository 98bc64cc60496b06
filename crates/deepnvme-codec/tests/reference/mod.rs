//! A bit-by-bit reader of the packed format, written from `docs/reference/packed-format.md`. It shares no code with the
//! crate.
#![allow(dead_code, reason = "every test takes what it needs")]

/// Returns the elements of the block at the start of `bytes` and its length, or `None` if it is invalid.
pub(crate) fn decode(bytes: &[u8]) -> Option<(Vec<u8>, usize)> {
    if bytes.get(..4)? != b"DNP\x01" || bytes.get(6..8)? != [0, 0] {
        return None;
    }
    let (float, count) = (*bytes.get(4)?, usize::from(*bytes.get(5)?));
    let (elements, length) = (word(bytes, 8)?, word(bytes, 12)?);
    let width = match float {
        1 | 2 => 2,
        3 => 4,
        _ => return None,
    };
    if elements > 1 << 20 || count > 8 {
        return None;
    }
    let block = bytes.get(..length)?;
    if count == 0 {
        return (length == 16 + width * elements).then(|| (block[16..].to_vec(), length));
    }
    if length >= 16 + width * elements {
        return None;
    }
    let mut layers = Vec::new();
    let (mut at, mut left) = (16, elements);
    for _ in 0..count {
        let symbols = block.get(at..at + 3)?;
        let rest = word(block, at + 4)?;
        if *block.get(at + 3)? != 0 || rest > left {
            return None;
        }
        layers.push((symbols, left, rest));
        (at, left) = (at + 8, rest);
    }
    let others = at;
    at += match float {
        1 => elements,
        2 => elements + 24 * elements.div_ceil(64),
        _ => 3 * elements,
    };
    let mut planes = Vec::new();
    for (_, elements, _) in &layers {
        planes.push(at);
        at += 16 * elements.div_ceil(64);
    }
    if at + left != length {
        return None;
    }
    let mut symbols = block.get(at..)?.to_vec();
    for ((known, elements, rest), planes) in layers.iter().zip(planes).rev() {
        if symbols.len() != *rest {
            return None;
        }
        let mut next = symbols.into_iter();
        symbols = Vec::new();
        for index in 0..elements.next_multiple_of(64) {
            let group = planes + index / 64 * 16;
            let code = bit(block, group, index % 64) + 2 * bit(block, group + 8, index % 64);
            if index >= *elements {
                if code != 0 {
                    return None;
                }
            } else {
                symbols.push(if code == 3 { next.next()? } else { known[code] });
            }
        }
        if next.next().is_some() {
            return None;
        }
    }
    let others = &block[others..];
    let mut out = Vec::new();
    for (index, exponent) in symbols.into_iter().enumerate() {
        let exponent = u32::from(exponent);
        match float {
            1 => {
                let other = u32::from(others[index]);
                out.extend(((other >> 7 << 15 | exponent << 7 | other & 127) as u16).to_le_bytes());
            }
            2 => {
                let words = elements + index / 64 * 24;
                let of = |which: usize| bit(others, words + 8 * which, index % 64) as u32;
                let number = of(2) << 15 | (exponent & 31) << 10 | of(1) << 9 | of(0) << 8 | u32::from(others[index]);
                out.extend((number as u16).to_le_bytes());
            }
            _ => {
                let low = u32::from(others[2 * index]) | u32::from(others[2 * index + 1]) << 8;
                let high = u32::from(others[2 * elements + index]);
                out.extend((high >> 7 << 31 | exponent << 23 | (high & 127) << 16 | low).to_le_bytes());
            }
        }
    }
    Some((out, length))
}

fn word(bytes: &[u8], at: usize) -> Option<usize> {
    let bytes = bytes.get(at..at + 4)?;
    Some(bytes.iter().rev().fold(0, |word, byte| word << 8 | usize::from(*byte)))
}

/// Returns bit `index` of the little-endian number at `at`.
fn bit(bytes: &[u8], at: usize, index: usize) -> usize {
    usize::from(bytes[at + index / 8] >> (index % 8) & 1)
}
