//! The layout of a striped file. This module does no I/O.

/// Maps logical bytes to part files. One part is the identity.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StripeLayout {
    /// The number of part files, at least 1.
    pub parts: u64,
    /// Bytes of one stripe. `u64::MAX` with one part.
    pub stripe_bytes: u64,
}

impl StripeLayout {
    /// A plain file.
    pub const SINGLE: Self = Self { parts: 1, stripe_bytes: u64::MAX };

    /// Returns the part that contains the byte at `offset`, and its offset there.
    #[must_use]
    pub fn locate(self, offset: u64) -> (usize, u64) {
        if self.parts == 1 {
            return (0, offset);
        }
        let stripe = offset / self.stripe_bytes;
        let within = offset % self.stripe_bytes;
        ((stripe % self.parts) as usize, stripe / self.parts * self.stripe_bytes + within)
    }

    /// Returns how many bytes from `offset` on are contiguous in one part.
    #[must_use]
    pub fn contiguous_bytes(self, offset: u64) -> u64 {
        if self.parts == 1 { u64::MAX - offset } else { self.stripe_bytes - offset % self.stripe_bytes }
    }

    /// Returns the bytes of part `part` if the logical file has `bytes`.
    #[must_use]
    pub fn part_bytes(self, bytes: u64, part: usize) -> u64 {
        if self.parts == 1 {
            return bytes;
        }
        let row = self.stripe_bytes * self.parts;
        let rest = bytes % row;
        let before = self.stripe_bytes * part as u64;
        bytes / row * self.stripe_bytes + rest.saturating_sub(before).min(self.stripe_bytes)
    }

    /// Returns the logical end of the last byte of part `part`, if that part has `part_bytes`.
    #[must_use]
    pub fn logical_end(self, part: usize, part_bytes: u64) -> u64 {
        if self.parts == 1 || part_bytes == 0 {
            return part_bytes;
        }
        let last = part_bytes - 1;
        let stripe = last / self.stripe_bytes * self.parts + part as u64;
        stripe * self.stripe_bytes + last % self.stripe_bytes + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_byte_has_one_place_and_sizes_add_up(parts in 1u64..9, stripes in 1u64..5, bytes in 0u64..400_000) {
            let layout = if parts == 1 { StripeLayout::SINGLE } else { StripeLayout { parts, stripe_bytes: stripes * 4096 } };
            let sizes: Vec<u64> = (0..parts as usize).map(|part| layout.part_bytes(bytes, part)).collect();
            prop_assert_eq!(sizes.iter().sum::<u64>(), bytes);
            let logical = sizes.iter().enumerate().map(|(part, size)| layout.logical_end(part, *size)).max();
            prop_assert_eq!(logical, Some(bytes));
            for offset in (0..bytes).step_by(1733) {
                let (part, at) = layout.locate(offset);
                prop_assert!(at < sizes[part]);
                prop_assert_eq!(layout.logical_end(part, at + 1), offset + 1);
            }
        }
    }
}
