//! The hash of a row number.

/// Mixes the bits of a row number (the finaliser of SplitMix64), so that neighbouring rows spread over all places.
#[inline]
#[must_use]
pub fn hash_row(row: u64) -> u64 {
    let mut mixed = row.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
