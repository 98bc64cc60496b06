//! Codecs that turn 64 codes into 64 symbols and back, with and without SIMD.
//!
//! They implement [`GroupCodec`]: [`Portable`] for any CPU, `Avx2` with byte shuffles, `Avx512`
//! with byte expansion. [`dispatch`] compiles the task for the CPU, with the codec inlined into it.

mod group_codec;
mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

pub(super) use group_codec::{GroupCodec, WINDOW};
use portable::Portable;

/// Work that uses a codec. `run` must be `inline(always)`.
pub(super) trait SimdTask {
    /// The result.
    type Output;
    /// Does the work.
    fn run<C: GroupCodec>(self, codec: C) -> Self::Output;
}

/// Runs a task with the widest codec of this CPU.
pub(super) fn dispatch<T: SimdTask>(task: T) -> T::Output {
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
    crate::vectorise!(task.run(Portable))
}

#[cfg(test)]
mod tests {
    use super::super::GROUP;
    use super::*;

    /// Tests one codec.
    fn check(codec: impl GroupCodec, name: &str) {
        let mut random = fastrand::Rng::with_seed(6);
        for round in 0..20_000 {
            let symbols = [random.u8(..), random.u8(..), random.u8(..)];
            let mut next = [0; WINDOW];
            random.fill(&mut next);
            // From none to all of the elements escape to the next layer.
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
            codec.expand(low, high, symbols, &next, &mut bytes);
            assert_eq!(bytes, expected, "{name}: {low:x} {high:x} {symbols:?}");

            let symbols = [symbols[0], symbols[0] ^ 1, symbols[0] ^ 2];
            let bytes: [u8; GROUP] = std::array::from_fn(|_| symbols[0] ^ random.u8(..5));
            let mut rest = [0; GROUP];
            let (low, high) = codec.compress(&bytes, symbols, &mut rest);
            let mut escaped = rest.iter();
            for (index, byte) in bytes.iter().enumerate() {
                let code = (low >> index & 1) + 2 * (high >> index & 1);
                let symbol = if code == 3 { escaped.next().unwrap() } else { &symbols[code as usize] };
                assert_eq!((symbol, code), (byte, u64::from(byte ^ symbols[0]).min(3)), "{name}");
            }
        }
    }

    #[test]
    fn all_codecs_agree() {
        check(Portable, "portable");
        #[cfg(target_arch = "x86_64")]
        {
            use fearless_simd::Level;
            Level::new().as_avx2().into_iter().for_each(|token| check(token, "AVX2"));
            Level::new().as_avx512().into_iter().for_each(|token| check(token, "AVX-512"));
        }
    }
}
