//! Square roots as torch computes them.
//!
//! torch's optimizers with `foreach=False, fused=False` use MKL's vector library if torch was built with it. MKL has a
//! kernel for each vendor of CPUs, and not all of them round to nearest. Comparing all mantissas, subnormals and
//! every 97th other number gave:
//!
//! | mode | used by | result |
//! |---|---|---|
//! | [`SqrtMode::Exact`] | `fused=True`, builds without MKL | IEEE: rounded to nearest |
//! | [`SqrtMode::TwoStep`] | MKL on AMD CPUs | off by one unit in the last place for 17% of mantissas |
//! | [`SqrtMode::TwoStepFused`] | MKL's AVX2 kernel | rounded to nearest, except some below 3e-34 |
//! | [`SqrtMode::OneStep`] | MKL's AVX-512 kernel | off by one unit in the last place for 0.6% of mantissas |
//!
//! The two-step modes start from the CPU's estimate of the reciprocal root (`rsqrtps`), refine the root and half
//! of the reciprocal together, and correct the root once by the residual of its square. One rounds products and sums
//! separately, the other fuses them. The one-step mode starts from the better estimate of AVX-512 (`vrsqrt14ps`) and
//! corrects the root only. Estimates differ between vendors, so these results depend on the machine.

use fearless_simd::Level;

use crate::TILE;

/// The rounding of square roots.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum SqrtMode {
    /// Rounded to nearest.
    #[default]
    Exact,
    /// Refined from the CPU's estimate in two steps, each operation rounded.
    TwoStep,
    /// Refined from the CPU's estimate in two steps with fused multiply-adds.
    TwoStepFused,
    /// Refined from the 14-bit estimate of AVX-512 in one step with fused multiply-adds.
    OneStep,
}

impl SqrtMode {
    /// All modes.
    pub const ALL: [Self; 4] = [Self::Exact, Self::TwoStep, Self::TwoStepFused, Self::OneStep];

    /// Whether this CPU supports the mode.
    #[must_use]
    pub fn is_available(self) -> bool {
        match self {
            Self::Exact => true,
            #[cfg(target_arch = "x86_64")]
            Self::TwoStep => true,
            #[cfg(target_arch = "x86_64")]
            Self::TwoStepFused => Level::new().as_avx2().is_some(),
            #[cfg(target_arch = "x86_64")]
            Self::OneStep => Level::new().as_avx512().is_some(),
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// Replaces all values by their roots. Exact if this CPU does not support the mode.
    pub fn apply(self, values: &mut [f32]) {
        for values in values.chunks_mut(TILE) {
            let mut tile = [0.0; TILE];
            tile[..values.len()].copy_from_slice(values);
            match self {
                Self::Exact => tile.iter_mut().for_each(|value| *value = value.sqrt()),
                _ => self.estimate(&mut tile),
            }
            values.copy_from_slice(&tile[..values.len()]);
        }
    }

    /// Computes roots from an estimate. Exact if this CPU has none.
    pub(crate) fn estimate(self, values: &mut [f32; TILE]) {
        let before = *values;
        #[cfg(target_arch = "x86_64")]
        {
            let level = Level::new();
            match (self, level.as_avx512(), level.as_avx2(), level.as_sse2()) {
                (Self::OneStep, Some(token), ..) => x86::one_step(token, values),
                (Self::TwoStepFused, _, Some(token), _) => x86::two_step_fused(token, values),
                (Self::TwoStep, _, Some(token), _) => x86::two_step_256(token, values),
                (Self::TwoStep, _, None, Some(token)) => x86::two_step_128(token, values),
                _ => values.iter_mut().for_each(|value| *value = value.sqrt()),
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        values.iter_mut().for_each(|value| *value = value.sqrt());
        // Values without an estimate: zeros, infinities, NaNs and negative numbers; subnormals, except in the one-step
        // mode, which scales them; and in the two-step mode those from 0x7f7f_f000 on, since the square of their root
        // overflows.
        let end = if self == Self::TwoStep { 0x7f7f_f000 } else { 0x7f80_0000 };
        let start = if self == Self::OneStep { 1 } else { 0x0080_0000 };
        let has_estimate = |value: f32| (start..end).contains(&value.to_bits());
        if !before.iter().fold(true, |all, value| all & has_estimate(*value)) {
            for (value, before) in values.iter_mut().zip(before).filter(|(_, before)| !has_estimate(*before)) {
                *value = before.sqrt();
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::ops::{Add, Mul, Sub};

    use fearless_simd::prelude::*;
    use fearless_simd::{f32x4, f32x8, f32x16, kernel};

    use crate::TILE;

    /// Numbers below this are scaled, so that the residual is no subnormal.
    const SCALED_BELOW: f32 = f32::from_bits(0x1000_0000);
    const SCALE: f32 = f32::from_bits((127 + 64) << 23);
    const ROOT_UNSCALE: f32 = f32::from_bits((127 - 32) << 23);

    kernel! {
        pub(super) fn one_step(token: Avx512, values: &mut [f32; TILE]) {
            let half = _mm512_set1_ps(0.5);
            let (scaled_below, scale) = (_mm512_set1_ps(SCALED_BELOW), _mm512_set1_ps(SCALE));
            let root_unscale = _mm512_set1_ps(ROOT_UNSCALE);
            for sixteen in values.as_chunks_mut::<16>().0 {
                let value: __m512 = f32x16::from_slice(token, sixteen).into();
                let is_tiny = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(value, scaled_below);
                let value = _mm512_mask_mul_ps(value, is_tiny, value, scale);
                let estimate = _mm512_rsqrt14_ps(value);
                let (root, halved) = (_mm512_mul_ps(value, estimate), _mm512_mul_ps(half, estimate));
                let rest = _mm512_fnmadd_ps(root, root, value);
                let root = _mm512_fmadd_ps(rest, halved, root);
                let root: f32x16<_> = _mm512_mask_mul_ps(root, is_tiny, root, root_unscale).simd_into(token);
                root.store_slice(sixteen);
            }
        }
    }

    kernel! {
        pub(super) fn two_step_fused(token: Avx2, values: &mut [f32; TILE]) {
            let half = _mm256_set1_ps(0.5);
            for eight in values.as_chunks_mut::<8>().0 {
                let value: __m256 = f32x8::from_slice(token, eight).into();
                let estimate = _mm256_rsqrt_ps(value);
                let (root, halved) = (_mm256_mul_ps(value, estimate), _mm256_mul_ps(estimate, half));
                let error = _mm256_fnmadd_ps(root, halved, half);
                let (root, halved) = (_mm256_fmadd_ps(root, error, root), _mm256_fmadd_ps(halved, error, halved));
                let rest = _mm256_fnmadd_ps(root, root, value);
                let root: f32x8<_> = _mm256_fmadd_ps(rest, halved, root).simd_into(token);
                root.store_slice(eight);
            }
        }
    }

    macro_rules! two_step {
        ($name:ident: $token:ident, $vector:ident, $lanes:literal, $estimate:ident) => {
            kernel! {
                pub(super) fn $name(token: $token, values: &mut [f32; TILE]) {
                    let half = $vector::splat(token, 0.5);
                    for lanes in values.as_chunks_mut::<$lanes>().0 {
                        let value = $vector::from_slice(token, lanes);
                        let estimate = $estimate(value.into()).simd_into(token);
                        two_steps(value, estimate, half).store_slice(lanes);
                    }
                }
            }
        };
    }

    two_step!(two_step_256: Avx2, f32x8, 8, _mm256_rsqrt_ps);
    two_step!(two_step_128: Sse2, f32x4, 4, _mm_rsqrt_ps);

    /// Returns roots, refined from estimates of their reciprocals. Each operation is rounded.
    #[inline(always)]
    fn two_steps<V>(value: V, estimate: V, half: V) -> V
    where
        V: Copy + Add<Output = V> + Sub<Output = V> + Mul<Output = V>,
    {
        let (root, halved) = (value * estimate, estimate * half);
        let error = half - root * halved;
        let (root, halved) = (root * error + root, halved * error + halved);
        (value - root * root) * halved + root
    }

    #[cfg(test)]
    mod tests {
        use fearless_simd::Level;

        use super::*;

        #[test]
        fn four_and_eight_lanes_give_the_same() {
            let level = Level::new();
            let (Some(wide), Some(narrow)) = (level.as_avx2(), level.as_sse2()) else { return };
            let mut random = fastrand::Rng::with_seed(3);
            for _ in 0..5_000 {
                let values: [f32; TILE] = std::array::from_fn(|_| f32::from_bits(random.u32(0x0080_0000..0x7f7f_f000)));
                let (mut one, mut other) = (values, values);
                two_step_256(wide, &mut one);
                two_step_128(narrow, &mut other);
                assert_eq!(one.map(f32::to_bits), other.map(f32::to_bits));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn distance(sqrt_mode: SqrtMode, bits: u32) -> i64 {
        let mut value = [f32::from_bits(bits)];
        sqrt_mode.apply(&mut value);
        i64::from(value[0].to_bits()) - i64::from(f32::from_bits(bits).sqrt().to_bits())
    }

    #[test]
    fn no_root_is_further_than_a_unit_from_the_nearest() {
        let mut random = fastrand::Rng::with_seed(4);
        for sqrt_mode in SqrtMode::ALL {
            for _ in 0..200_000 {
                let bits = random.u32(0..=0x7f80_0000);
                assert!(distance(sqrt_mode, bits).abs() <= 1, "{sqrt_mode:?} of {bits:08x}");
            }
        }
    }

    #[test]
    fn numbers_without_an_estimate_have_exact_roots() {
        for sqrt_mode in SqrtMode::ALL {
            for bits in [0, 0x7f80_0000, 0x8000_0000] {
                assert_eq!(distance(sqrt_mode, bits), 0, "{sqrt_mode:?} of {bits:08x}");
            }
            let mut none = [-1.0, f32::NAN, f32::NEG_INFINITY];
            sqrt_mode.apply(&mut none);
            assert!(none.iter().all(|value| value.is_nan()));
        }
    }

    #[test]
    fn two_step_roots_of_subnormals_are_exact() {
        for sqrt_mode in [SqrtMode::TwoStep, SqrtMode::TwoStepFused] {
            for bits in [1, 77, 0x007f_ffff] {
                assert_eq!(distance(sqrt_mode, bits), 0, "{sqrt_mode:?} of {bits:08x}");
            }
        }
    }

    /// A factor of 4 doubles the root and changes no digit of it.
    #[test]
    fn one_step_roots_have_the_same_digits_at_every_exponent() {
        let mut random = fastrand::Rng::with_seed(6);
        for _ in 0..20_000 {
            // Its top bit is the lowest of the exponent.
            let mantissa = random.u32(0..1 << 24);
            let value = |step: u32| f32::from_bits(mantissa + (step << 24));
            let mut roots: Vec<f32> = (0..127).map(value).filter(|value| value.is_normal()).collect();
            SqrtMode::OneStep.apply(&mut roots);
            let digits = |root: &f32| root.to_bits() & 0x007f_ffff;
            assert!(roots.iter().all(|root| digits(root) == digits(&roots[0])), "{mantissa:06x}");
        }
    }

    #[test]
    fn roots_do_not_depend_on_their_place() {
        let mut random = fastrand::Rng::with_seed(5);
        let values: Vec<f32> = (0..1000).map(|_| f32::from_bits(random.u32(0..=0x7f80_0000))).collect();
        for sqrt_mode in SqrtMode::ALL {
            let mut whole = values.clone();
            sqrt_mode.apply(&mut whole);
            for begin in [1, 3, 8, 127, 130, 999] {
                let mut part = values[begin..].to_vec();
                sqrt_mode.apply(&mut part);
                assert_eq!(part, whole[begin..], "{sqrt_mode:?}");
            }
        }
    }
}
