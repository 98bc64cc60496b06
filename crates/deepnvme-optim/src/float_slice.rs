//! Slices of any float type, and tiles of them as fp32.

use crate::TILE;
use deepnvme_codec::Float;
use deepnvme_codec::half::{Bf16, F16, Half};

/// A readable slice of floats.
#[derive(Clone, Copy, Debug)]
pub enum FloatSlice<'a> {
    /// fp32.
    F32(&'a [f32]),
    /// bf16, as bits.
    Bf16(&'a [u16]),
    /// fp16, as bits.
    F16(&'a [u16]),
}

/// A writable slice of floats.
#[derive(Debug)]
pub enum FloatSliceMut<'a> {
    /// fp32.
    F32(&'a mut [f32]),
    /// bf16, as bits.
    Bf16(&'a mut [u16]),
    /// fp16, as bits.
    F16(&'a mut [u16]),
}

/// The rounding of fp32 to a shorter type.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Rounding {
    /// To nearest, ties to even.
    #[default]
    Nearest,
    /// Stochastic: up or down at random, so that the expected value is the number.
    Stochastic,
}

impl<'a> FloatSlice<'a> {
    /// Returns the number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::Bf16(values) | Self::F16(values) => values.len(),
        }
    }

    /// Whether the slice is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn split_at(self, at: usize) -> (Self, Self) {
        match self {
            Self::F32(values) => (Self::F32(&values[..at]), Self::F32(&values[at..])),
            Self::Bf16(values) => (Self::Bf16(&values[..at]), Self::Bf16(&values[at..])),
            Self::F16(values) => (Self::F16(&values[..at]), Self::F16(&values[at..])),
        }
    }

    /// Returns the tile at `at`: the memory itself for a whole tile of fp32, else a copy in the buffer.
    #[inline(always)]
    pub(crate) fn tile<'b>(&'b self, at: usize, buffer: &'b mut [f32; TILE]) -> &'b [f32; TILE] {
        if let Self::F32(values) = self
            && let Some(tile) = values[at..].first_chunk()
        {
            return tile;
        }
        self.load(at, buffer);
        buffer
    }

    /// Loads the elements from `at` on, padded with zeros.
    #[inline(always)]
    pub(crate) fn load(&self, at: usize, out: &mut [f32; TILE]) {
        match self {
            Self::F32(values) => match values[at..].first_chunk::<TILE>() {
                Some(tile) => *out = *tile,
                None => pad(&values[at..], out),
            },
            Self::Bf16(values) => widen::<Bf16>(&values[at..], out),
            Self::F16(values) => widen::<F16>(&values[at..], out),
        }
    }
}

impl<'a> FloatSliceMut<'a> {
    /// Returns the number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.as_slice().len()
    }

    /// Whether the slice is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the type of the elements.
    #[must_use]
    pub fn float(&self) -> Float {
        match self {
            Self::F32(_) => Float::F32,
            Self::Bf16(_) => Float::Bf16,
            Self::F16(_) => Float::F16,
        }
    }

    /// Returns the slice for reading.
    #[must_use]
    pub fn as_slice(&self) -> FloatSlice<'_> {
        match self {
            Self::F32(values) => FloatSlice::F32(values),
            Self::Bf16(values) => FloatSlice::Bf16(values),
            Self::F16(values) => FloatSlice::F16(values),
        }
    }

    pub(crate) fn split_at(self, at: usize) -> (Self, Self) {
        match self {
            Self::F32(values) => split_slice(values, at, Self::F32),
            Self::Bf16(values) => split_slice(values, at, Self::Bf16),
            Self::F16(values) => split_slice(values, at, Self::F16),
        }
    }

    /// Returns the tile at `at`: the memory itself for a whole tile of fp32, else a copy in the buffer.
    #[inline(always)]
    pub(crate) fn tile<'b>(&'b mut self, at: usize, buffer: &'b mut [f32; TILE]) -> &'b mut [f32; TILE] {
        match self {
            Self::F32(values) => return tile_in_place(values, at, buffer),
            Self::Bf16(values) => widen::<Bf16>(&values[at..], buffer),
            Self::F16(values) => widen::<F16>(&values[at..], buffer),
        }
        buffer
    }

    /// Stores a tile from a buffer.
    #[inline(always)]
    pub(crate) fn store(&mut self, at: usize, tile: &[f32; TILE], noise: Option<&[u32; TILE]>) {
        match self {
            Self::F32(values) => store_tile(values, at, tile),
            Self::Bf16(values) => narrow::<Bf16>(&mut values[at..], tile, noise),
            Self::F16(values) => narrow::<F16>(&mut values[at..], tile, noise),
        }
    }
}

/// Splits a slice at `at`, and wraps both parts.
pub(crate) fn split_slice<'a, T, S>(values: &'a mut [T], at: usize, wrap: impl Fn(&'a mut [T]) -> S) -> (S, S) {
    let (head, tail) = values.split_at_mut(at);
    (wrap(head), wrap(tail))
}

/// Returns a whole tile in place; the padded rest of a slice in the buffer.
#[inline(always)]
pub(crate) fn tile_in_place<'b>(values: &'b mut [f32], at: usize, buffer: &'b mut [f32; TILE]) -> &'b mut [f32; TILE] {
    let rest = &mut values[at..];
    if rest.len() < TILE {
        pad(rest, buffer);
        return buffer;
    }
    rest.first_chunk_mut().unwrap_or(buffer)
}

#[inline(always)]
pub(crate) fn store_tile(values: &mut [f32], at: usize, tile: &[f32; TILE]) {
    let count = (values.len() - at).min(TILE);
    values[at..at + count].copy_from_slice(&tile[..count]);
}

#[inline(always)]
fn pad(values: &[f32], out: &mut [f32; TILE]) {
    let (head, tail) = out.split_at_mut(values.len());
    head.copy_from_slice(values);
    tail.fill(0.0);
}

#[inline(always)]
pub(crate) fn widen<H: Half>(values: &[u16], out: &mut [f32; TILE]) {
    if let Some(values) = values.first_chunk::<TILE>() {
        *out = values.map(|half| f32::from_bits(H::widen(half)));
        return;
    }
    out.fill(0.0);
    for (out, value) in out.iter_mut().zip(values) {
        *out = f32::from_bits(H::widen(*value));
    }
}

#[inline(always)]
fn narrow<H: Half>(values: &mut [u16], tile: &[f32; TILE], noise: Option<&[u32; TILE]>) {
    match noise {
        None => {
            for (target, value) in values.iter_mut().zip(tile) {
                *target = H::narrow(value.to_bits());
            }
        }
        Some(noise) => {
            for ((target, value), noise) in values.iter_mut().zip(tile).zip(noise) {
                *target = H::narrow_stochastic(value.to_bits(), *noise);
            }
        }
    }
}
