//! torch's operators on SIMD vectors, with torch's rounding.

use fearless_simd::prelude::*;

/// `value.add(other, alpha=factor)`: `value + factor * other`, rounded once.
#[inline(always)]
pub(super) fn add<S: Simd>(simd: S, value: S::f32s, other: S::f32s, factor: f32) -> S::f32s {
    other.mul_add_precise(S::f32s::splat(simd, factor), value)
}

/// `value.addcmul_(one, other, value=factor)`: `value + factor * one * other`, where `factor * one`
/// is rounded, and then the fused multiply-add.
#[inline(always)]
pub(super) fn addcmul<S: Simd>(simd: S, value: S::f32s, one: S::f32s, other: S::f32s, factor: f32) -> S::f32s {
    (one * S::f32s::splat(simd, factor)).mul_add_precise(other, value)
}

/// `value.addcdiv_(one, other, value=factor)`: `value + factor * one / other`, each operation rounded.
#[inline(always)]
pub(super) fn addcdiv<S: Simd>(simd: S, value: S::f32s, one: S::f32s, other: S::f32s, factor: f32) -> S::f32s {
    value + one * S::f32s::splat(simd, factor) / other
}

/// `lerp_`, computed from the nearer end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lerp {
    factor: f32,
    /// The factor applies from the end.
    from_end: bool,
}

impl Lerp {
    pub(super) fn new(weight: f64) -> Self {
        let weight = weight as f32;
        let from_end = weight.abs() >= 0.5;
        // Not `-(1 - weight)`: for a weight of 1, the sign of this zero decides the sign of a result of zero.
        Self { factor: if from_end { weight - 1.0 } else { weight }, from_end }
    }

    #[inline(always)]
    pub(super) fn apply<S: Simd>(self, simd: S, start: S::f32s, end: S::f32s) -> S::f32s {
        let from = if self.from_end { end } else { start };
        (end - start).mul_add_precise(S::f32s::splat(simd, self.factor), from)
    }
}
