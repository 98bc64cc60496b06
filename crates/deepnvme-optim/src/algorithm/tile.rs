//! Loads, stores and prefetches of a tile.

use fearless_simd::prelude::*;

/// Elements of a cache line.
const LINE: usize = 16;
/// Distance of prefetches, in elements.
const AHEAD: usize = 8 * LINE;

/// The maximum number of moments of an algorithm.
pub const MOMENTS_MAX: usize = 3;

/// A tile of fp32.
pub(crate) type Tile<const N: usize> = [f32; N];

/// A tile of a gradient and its factors, multiplied when loaded. Each product is rounded.
#[derive(Clone, Copy)]
pub(crate) struct Grad<'a, const N: usize> {
    pub(crate) raw: &'a Tile<N>,
    pub(crate) unscale: f32,
    /// Negative to maximise the objective. Negation changes only the sign bit.
    pub(crate) clip: f32,
}

impl<const N: usize> Grad<'_, N> {
    #[inline(always)]
    pub(super) fn load<S: Simd>(&self, simd: S, at: usize) -> S::f32s {
        load(simd, self.raw, at) * S::f32s::splat(simd, self.unscale) * S::f32s::splat(simd, self.clip)
    }
}

/// The tiles that an algorithm updates together. It leaves the moments that it does not have as they are.
pub(crate) struct Tiles<'a, const N: usize> {
    pub(crate) weights: &'a mut Tile<N>,
    pub(crate) grad: Grad<'a, N>,
    pub(crate) moments: [&'a mut Tile<N>; MOMENTS_MAX],
}

/// Returns the offsets of cache lines in a tile.
#[inline(always)]
pub(super) fn line_offsets<const N: usize>() -> impl Iterator<Item = usize> {
    (0..N).step_by(LINE)
}

/// Returns the offsets of vectors in a cache line.
#[inline(always)]
pub(super) fn vector_offsets_in_line<S: Simd>(line: usize) -> impl Iterator<Item = usize> {
    (line..line + LINE).step_by(S::f32s::LEN)
}

/// Returns the offsets of vectors in a tile.
#[inline(always)]
pub(super) fn vector_offsets<S: Simd, const N: usize>() -> impl Iterator<Item = usize> {
    (0..N / S::f32s::LEN).map(|vector| vector * S::f32s::LEN)
}

/// The address of a tile of one of the arrays that a step reads or writes.
#[derive(Clone, Copy)]
pub(super) struct StreamAddress(*const f32);

impl StreamAddress {
    pub(super) fn of<const N: usize>(tile: &Tile<N>) -> Self {
        Self(tile.as_ptr())
    }
}

/// Prefetches the cache line [`AHEAD`] of `line` in each stream, between computations. The hardware prefetcher stops
/// at the end of every page, and a whole tile of prefetches at once would exceed the CPU's miss buffers.
#[inline(always)]
pub(super) fn prefetch_ahead(places: &[StreamAddress], line: usize) {
    places.iter().for_each(|place| deepnvme_mem::prefetch(place.0.wrapping_add(line + AHEAD)));
}

/// Loads the vector at an offset of a tile.
#[inline(always)]
pub(super) fn load<S: Simd, const N: usize>(simd: S, tile: &Tile<N>, at: usize) -> S::f32s {
    S::f32s::from_slice(simd, &tile[at..at + S::f32s::LEN])
}

#[inline(always)]
pub(super) fn store<S: Simd, const N: usize>(vector: S::f32s, tile: &mut Tile<N>, at: usize) {
    vector.store_slice(&mut tile[at..at + S::f32s::LEN]);
}
