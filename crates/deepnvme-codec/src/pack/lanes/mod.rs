//! From 64 codes to 64 symbols and back, as the processor does it best.
//!
//! Three ways that do the same, which the [`contract`] states: [`Portable`] for any processor, `Avx2` with byte shuffles,
//! `Avx512` with the expansion of bytes. Their callers are compiled for that processor, so that
//! they are inlined ([`widely`]).

mod contract;
mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

pub(super) use contract::{Lanes, WINDOW};
use portable::Portable;

/// Something to be done with the lanes of this processor. `run` has to be `inline(always)`.
pub(super) trait Task {
    /// What comes out.
    type Output;
    /// Does it.
    fn run<L: Lanes>(self, lanes: L) -> Self::Output;
}

/// Does a task with the widest lanes there are.
pub(super) fn widely<T: Task>(task: T) -> T::Output {
    #[cfg(target_arch = "x86_64")]
    {
        use fearless_simd::{Level, Simd};
        if let Some(token) = Level::new().as_avx512() {
            return token.vectorize(
                #[inline(always)]
                || task.run(token),
            );
        }
        if let Some(token) = Level::new().as_avx2() {
            return token.vectorize(
                #[inline(always)]
                || task.run(token),
            );
        }
    }
    crate::widest!(task.run(Portable))
}

#[cfg(test)]
mod tests {
    use super::super::GROUP;
    use super::*;

    /// Calls the test with all lanes that this processor has.
    fn check(lanes: impl Lanes, name: &str) {
        let mut random = fastrand::Rng::with_seed(6);
        for round in 0..20_000 {
            let symbols = [random.u8(..), random.u8(..), random.u8(..)];
            let mut next = [0; WINDOW];
            random.fill(&mut next);
            // From none to all of the elements ask the next layer.
            let dense = |random: &mut fastrand::Rng| match round % 4 {
                0 => random.u64(..),
                1 => random.u64(..) & random.u64(..) & random.u64(..),
                2 => random.u64(..) | random.u64(..) | random.u64(..),
                _ => *random.choice(&[0, u64::MAX, 1, 1 << 63]).unwrap(),
            };
            let (low, high) = (dense(&mut random), dense(&mut random));
            let (mut expected, mut taken) = ([0; GROUP], 0);
            for (index, byte) in expected.iter_mut().enumerate() {
                *byte = match (low >> index & 1) + 2 * (high >> index & 1) {
                    3 => {
                        taken += 1;
                        next[taken - 1]
                    }
                    code => symbols[code as usize],
                };
            }
            let mut bytes = [0xee; GROUP];
            lanes.spread(low, high, symbols, &next, &mut bytes);
            assert_eq!(bytes, expected, "{name}: {low:x} {high:x} {symbols:?}");

            let symbols = [symbols[0], symbols[0] ^ 1, symbols[0] ^ 2];
            let bytes: [u8; GROUP] = std::array::from_fn(|_| symbols[0] ^ random.u8(..5));
            let mut rest = [0; GROUP];
            let (low, high) = lanes.gather(&bytes, symbols, &mut rest);
            let mut asking = rest.iter();
            for (index, byte) in bytes.iter().enumerate() {
                let code = (low >> index & 1) + 2 * (high >> index & 1);
                let symbol = if code == 3 { asking.next().unwrap() } else { &symbols[code as usize] };
                assert_eq!((symbol, code), (byte, u64::from(byte ^ symbols[0]).min(3)), "{name}");
            }
        }
    }

    #[test]
    fn all_lanes_do_the_same() {
        check(Portable, "portable");
        #[cfg(target_arch = "x86_64")]
        {
            use fearless_simd::Level;
            Level::new().as_avx2().into_iter().for_each(|token| check(token, "AVX2"));
            Level::new().as_avx512().into_iter().for_each(|token| check(token, "AVX-512"));
        }
    }
}
