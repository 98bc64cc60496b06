//! Noise for stochastic rounding from a counter. The bits depend only on the seed, the step, the use and the position
//! of an element, so neither tasks nor threads matter.

use crate::TILE;
use crate::float_slice::Rounding;

/// The use of the noise. Each use has independent noise.
#[derive(Clone, Copy)]
pub(crate) enum NoiseStream {
    Weights = 1,
    Moments = 2,
}

/// The noise of one step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Noise {
    seed: u64,
    step: u64,
}

impl Noise {
    pub(crate) fn new(seed: u64, step: u64) -> Self {
        Self { seed, step }
    }

    /// Writes the noise of the elements from `index` on.
    #[inline(always)]
    pub(crate) fn fill(self, stream: NoiseStream, index: u64, out: &mut [u32; TILE]) {
        let before_wrap = (u32::MAX - index as u32) as usize + 1;
        if before_wrap >= TILE {
            return self.fill_part(stream, index, out);
        }
        // The lower half wraps inside the tile, once in 2^32 elements.
        let (left, right) = out.split_at_mut(before_wrap);
        self.fill_part(stream, index, left);
        self.fill_part(stream, index + before_wrap as u64, right);
    }

    /// Writes the noise of elements whose indices have the same upper half.
    #[inline(always)]
    fn fill_part(self, stream: NoiseStream, index: u64, out: &mut [u32]) {
        let key = mix(self.seed ^ mix(self.step ^ mix((index >> 32) << 2 | stream as u64)));
        let (first, second) = (key as u32, (key >> 32) as u32);
        for (place, out) in out.iter_mut().enumerate() {
            *out = scramble((index as u32).wrapping_add(place as u32), first, second);
        }
    }
}

/// Returns the noise for weights if they are rounded stochastically.
#[inline(always)]
pub(crate) fn weight_noise(
    rounding: Rounding,
    noise: Noise,
    index: u64,
    buffer: &mut [u32; TILE],
) -> Option<&[u32; TILE]> {
    (rounding == Rounding::Stochastic).then(|| {
        noise.fill(NoiseStream::Weights, index, buffer);
        &*buffer
    })
}

/// The finaliser of `SplitMix64` (Steele, Lea, Flood 2014), after one of its steps.
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ value >> 31
}

/// Two rounds of multiply and shift with a key between them. The constants are Wellons' `lowbias32`.
#[inline(always)]
fn scramble(counter: u32, first: u32, second: u32) -> u32 {
    let value = counter ^ first;
    let value = (value ^ value >> 16).wrapping_mul(0x7feb_352d) ^ second;
    let value = (value ^ value >> 15).wrapping_mul(0x846c_a68b);
    value ^ value >> 16
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(seed: u64, step: u64, stream: NoiseStream, index: u64) -> [u32; TILE] {
        let mut out = [0; TILE];
        Noise::new(seed, step).fill(stream, index, &mut out);
        out
    }

    #[test]
    fn it_is_the_same_wherever_a_tile_begins() {
        for start in [256, (1 << 32) - 30, (1 << 32) - 60, (5 << 32) - 1] {
            let whole = noise(7, 3, NoiseStream::Weights, start);
            let later = noise(7, 3, NoiseStream::Weights, start + 40);
            assert_eq!(whole[40..], later[..TILE - 40]);
        }
    }

    #[test]
    fn everything_that_counts_changes_it() {
        let base = noise(7, 3, NoiseStream::Weights, 0);
        for other in [
            noise(8, 3, NoiseStream::Weights, 0),
            noise(7, 4, NoiseStream::Weights, 0),
            noise(7, 3, NoiseStream::Moments, 0),
            noise(7, 3, NoiseStream::Weights, 1 << 32),
            noise(7, 3, NoiseStream::Weights, TILE as u64),
        ] {
            assert!(base.iter().zip(other).filter(|(one, other)| **one == *other).count() < 2);
        }
    }

    #[test]
    fn every_bit_is_as_often_set_as_not() {
        let mut set = [0_u32; 32];
        let tiles = 400;
        for tile in 0..tiles {
            for bits in noise(1, 2, NoiseStream::Moments, tile * TILE as u64) {
                set.iter_mut().enumerate().for_each(|(bit, count)| *count += bits >> bit & 1);
            }
        }
        // Six standard deviations of as many throws of a coin.
        let throws = f64::from(tiles as u32) * TILE as f64;
        for count in set {
            assert!((f64::from(count) - throws / 2.0).abs() < 3.0 * throws.sqrt(), "{set:?}");
        }
    }
}
