//! torch's operators for a vector, each with torch's own rounding.

use fearless_simd::prelude::*;

/// `value + factor * other`, rounded once: what `value.add(other, alpha=factor)` is.
#[inline(always)]
pub(super) fn add<S: Simd>(simd: S, value: S::f32s, other: S::f32s, factor: f32) -> S::f32s {
    other.mul_add_precise(S::f32s::splat(simd, factor), value)
}

/// `value + factor * one * other`: the first product is rounded, the second is not. `value.addcmul_(one, other, value=factor)`.
#[inline(always)]
pub(super) fn addcmul<S: Simd>(simd: S, value: S::f32s, one: S::f32s, other: S::f32s, factor: f32) -> S::f32s {
    (one * S::f32s::splat(simd, factor)).mul_add_precise(other, value)
}

/// `value + factor * one / other`, each operation rounded. `value.addcdiv_(one, other, value=factor)`.
#[inline(always)]
pub(super) fn addcdiv<S: Simd>(simd: S, value: S::f32s, one: S::f32s, other: S::f32s, factor: f32) -> S::f32s {
    value + one * S::f32s::splat(simd, factor) / other
}

/// A weight between two numbers, as `lerp_` has it: reckoned from the nearer end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lerp {
    factor: f32,
    /// The factor counts from the end.
    is_late: bool,
}

impl Lerp {
    pub(super) fn new(weight: f64) -> Self {
        let weight = weight as f32;
        let is_late = weight.abs() >= 0.5;
        Self { factor: if is_late { -(1.0 - weight) } else { weight }, is_late }
    }

    #[inline(always)]
    pub(super) fn between<S: Simd>(self, simd: S, start: S::f32s, end: S::f32s) -> S::f32s {
        let from = if self.is_late { end } else { start };
        (end - start).mul_add_precise(S::f32s::splat(simd, self.factor), from)
    }
}
