//! A tile as rules walk over it: vectors that come and go, and memory that is asked for ahead of them.

use fearless_simd::prelude::*;

/// fp32 of a line of memory.
const LINE: usize = 16;
/// How far ahead memory is asked for.
const AHEAD: usize = 8 * LINE;

/// Numbers of a tile.
pub(crate) type Tile<const N: usize> = [f32; N];

/// A tile of a gradient, and what it is multiplied by when it is looked at: each product is rounded.
#[derive(Clone, Copy)]
pub(crate) struct Grad<'a, const N: usize> {
    pub(crate) raw: &'a Tile<N>,
    pub(crate) unscale: f32,
    /// Negative where the gradient is climbed; a sign changes no other bit.
    pub(crate) clip: f32,
}

impl<const N: usize> Grad<'_, N> {
    #[inline(always)]
    pub(super) fn load<S: Simd>(&self, simd: S, at: usize) -> S::f32s {
        load(simd, self.raw, at) * S::f32s::splat(simd, self.unscale) * S::f32s::splat(simd, self.clip)
    }
}

/// The places of a tile where lines of memory begin.
#[inline(always)]
pub(super) fn lines<const N: usize>() -> impl Iterator<Item = usize> {
    (0..N).step_by(LINE)
}

/// The places of a line where vectors begin.
#[inline(always)]
pub(super) fn vectors<S: Simd>(line: usize) -> impl Iterator<Item = usize> {
    (line..line + LINE).step_by(S::f32s::LEN)
}

/// The places of a tile where vectors begin.
#[inline(always)]
pub(super) fn places<S: Simd, const N: usize>() -> impl Iterator<Item = usize> {
    (0..N / S::f32s::LEN).map(|vector| vector * S::f32s::LEN)
}

/// Where a tile lies, and with it what comes after it.
#[derive(Clone, Copy)]
pub(super) struct Place(*const f32);

impl Place {
    pub(super) fn of<const N: usize>(tile: &Tile<N>) -> Self {
        Self(tile.as_ptr())
    }
}

/// Asks for what lies [`AHEAD`] of that line in each of them, a line of memory at a time, between computing: the processor
/// stops following a stream at the end of every page, and asked for a whole tile at once, it has no room for the answers.
#[inline(always)]
pub(super) fn look_ahead(places: &[Place], line: usize) {
    places.iter().for_each(|place| deepnvme_mem::prefetch(place.0.wrapping_add(line + AHEAD)));
}

/// The vector that begins at a place of a tile.
#[inline(always)]
pub(super) fn load<S: Simd, const N: usize>(simd: S, tile: &Tile<N>, at: usize) -> S::f32s {
    S::f32s::from_slice(simd, &tile[at..at + S::f32s::LEN])
}

#[inline(always)]
pub(super) fn store<S: Simd, const N: usize>(vector: S::f32s, tile: &mut Tile<N>, at: usize) {
    vector.store_slice(&mut tile[at..at + S::f32s::LEN]);
}
