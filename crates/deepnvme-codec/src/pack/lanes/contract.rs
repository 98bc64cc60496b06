//! The trait of all lanes: one group of 64, from codes to symbols and back.

use crate::pack::GROUP;

/// Bytes of the next layer that [`Lanes::spread`] may look at: 64 that may be needed, and as many again, so that it
/// can load more than it needs.
pub(in crate::pack) const WINDOW: usize = 2 * GROUP;

/// The two directions, for one group.
pub(in crate::pack) trait Lanes: Copy {
    /// The symbols of 64 codes. A code is a bit of `low` and one of `high`; 0 to 2 are the `symbols`, and 3 is the next
    /// byte of `next`.
    fn spread(self, low: u64, high: u64, symbols: [u8; 3], next: &[u8; WINDOW], out: &mut [u8; GROUP]);

    /// The codes of 64 bytes, as (low, high). The bytes with code 3 come to the beginning of `rest`, in order; what is
    /// behind them there may be anything.
    fn gather(self, bytes: &[u8; GROUP], symbols: [u8; 3], rest: &mut [u8; GROUP]) -> (u64, u64);
}
