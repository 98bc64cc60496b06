//! The codec of a group: the codes of 64 elements to symbols and back, as `docs/reference/packed-format.md` defines them.

use crate::pack::GROUP;

/// Bytes of escaped symbols that [`GroupCodec::expand`] may read: the 64 that it may need, and 64 more so that it can
/// use wide loads.
pub(in crate::pack) const WINDOW: usize = 2 * GROUP;

/// Expands and compresses one group.
pub(in crate::pack) trait GroupCodec: Copy {
    /// Writes the symbols of 64 codes. A code is a bit of `low` and a bit of `high`: 0 to 2 are the `symbols`, and 3 is
    /// the next byte of `next`.
    fn expand(self, low: u64, high: u64, symbols: [u8; 3], next: &[u8; WINDOW], out: &mut [u8; GROUP]);

    /// Returns the codes of 64 bytes, as (low, high). The bytes with code 3 are written to the start of `escaped`, in
    /// order; the rest of `escaped` is unspecified.
    fn compress(self, bytes: &[u8; GROUP], symbols: [u8; 3], escaped: &mut [u8; GROUP]) -> (u64, u64);
}

/// Copies the bytes whose bits are set to the front of `escaped`, in order.
#[inline(always)]
pub(super) fn collect_escaped(bytes: &[u8; GROUP], mut escapes: u64, escaped: &mut [u8; GROUP]) {
    let mut taken = 0;
    while escapes != 0 {
        // The remainders change nothing: they remove the checks of bounds.
        escaped[taken % GROUP] = bytes[escapes.trailing_zeros() as usize % GROUP];
        escapes &= escapes - 1;
        taken += 1;
    }
}
