//! Slices of floats, whichever kind they are, and tiles of them as fp32.

use crate::TILE;
use crate::float::{Bf16, F16, Float, Short};
use crate::random::{Noise, Stream};

/// Numbers to be read.
#[derive(Clone, Copy, Debug)]
pub enum Numbers<'a> {
    /// fp32.
    F32(&'a [f32]),
    /// bf16, as bits.
    Bf16(&'a [u16]),
    /// fp16, as bits.
    F16(&'a [u16]),
}

/// Numbers to be changed.
#[derive(Debug)]
pub enum NumbersMut<'a> {
    /// fp32.
    F32(&'a mut [f32]),
    /// bf16, as bits.
    Bf16(&'a mut [u16]),
    /// fp16, as bits.
    F16(&'a mut [u16]),
}

/// How numbers become shorter.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Rounding {
    /// To the nearest, the even one of two.
    #[default]
    Nearest,
    /// To one of the two around, each as often as it is near.
    Stochastic,
}

impl<'a> Numbers<'a> {
    /// Elements.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::Bf16(values) | Self::F16(values) => values.len(),
        }
    }

    /// Whether there are none.
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

    /// The tile that begins at `at`: the memory itself where it can be, else a copy in the buffer.
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

    /// The elements from `at` on; zeros where there are no more.
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

impl<'a> NumbersMut<'a> {
    /// Elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.as_numbers().len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Their type.
    #[must_use]
    pub fn float(&self) -> Float {
        match self {
            Self::F32(_) => Float::F32,
            Self::Bf16(_) => Float::Bf16,
            Self::F16(_) => Float::F16,
        }
    }

    /// The same, to be read.
    #[must_use]
    pub fn as_numbers(&self) -> Numbers<'_> {
        match self {
            Self::F32(values) => Numbers::F32(values),
            Self::Bf16(values) => Numbers::Bf16(values),
            Self::F16(values) => Numbers::F16(values),
        }
    }

    pub(crate) fn split_at(self, at: usize) -> (Self, Self) {
        match self {
            Self::F32(values) => {
                let (head, tail) = values.split_at_mut(at);
                (Self::F32(head), Self::F32(tail))
            }
            Self::Bf16(values) => {
                let (head, tail) = values.split_at_mut(at);
                (Self::Bf16(head), Self::Bf16(tail))
            }
            Self::F16(values) => {
                let (head, tail) = values.split_at_mut(at);
                (Self::F16(head), Self::F16(tail))
            }
        }
    }

    /// The tile that begins at `at`: the memory itself where it can be, else a copy in the buffer.
    #[inline(always)]
    pub(crate) fn tile<'b>(&'b mut self, at: usize, buffer: &'b mut [f32; TILE]) -> &'b mut [f32; TILE] {
        match self {
            Self::F32(values) => return direct(values, at, buffer),
            Self::Bf16(values) => widen::<Bf16>(&values[at..], buffer),
            Self::F16(values) => widen::<F16>(&values[at..], buffer),
        }
        buffer
    }

    /// Writes a tile that lies in a buffer.
    #[inline(always)]
    pub(crate) fn store(&mut self, at: usize, tile: &[f32; TILE], noise: Option<&[u32; TILE]>) {
        match self {
            Self::F32(values) => put_back(values, at, tile),
            Self::Bf16(values) => narrow::<Bf16>(&mut values[at..], tile, noise),
            Self::F16(values) => narrow::<F16>(&mut values[at..], tile, noise),
        }
    }
}

/// Noise for weights, where they are to be rounded at random at all.
#[inline(always)]
pub(crate) fn weight_noise(
    rounding: Rounding,
    noise: Noise,
    index: u64,
    buffer: &mut [u32; TILE],
) -> Option<&[u32; TILE]> {
    (rounding == Rounding::Stochastic).then(|| {
        noise.fill(Stream::Weights, index, buffer);
        &*buffer
    })
}

/// Whole tiles are worked on where they are; the rest of a slice in a buffer, with zeros behind it.
#[inline(always)]
pub(crate) fn direct<'b>(values: &'b mut [f32], at: usize, buffer: &'b mut [f32; TILE]) -> &'b mut [f32; TILE] {
    let rest = &mut values[at..];
    if rest.len() < TILE {
        pad(rest, buffer);
        return buffer;
    }
    rest.first_chunk_mut().unwrap_or(buffer)
}

#[inline(always)]
pub(crate) fn put_back(values: &mut [f32], at: usize, tile: &[f32; TILE]) {
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
pub(crate) fn widen<S: Short>(values: &[u16], out: &mut [f32; TILE]) {
    if let Some(values) = values.first_chunk::<TILE>() {
        *out = values.map(S::widen);
        return;
    }
    out.fill(0.0);
    for (out, value) in out.iter_mut().zip(values) {
        *out = S::widen(*value);
    }
}

#[inline(always)]
fn narrow<S: Short>(values: &mut [u16], tile: &[f32; TILE], noise: Option<&[u32; TILE]>) {
    match noise {
        None => {
            for (target, value) in values.iter_mut().zip(tile) {
                *target = S::nearest(*value);
            }
        }
        Some(noise) => {
            for ((target, value), noise) in values.iter_mut().zip(tile).zip(noise) {
                *target = S::stochastic(*value, *noise);
            }
        }
    }
}
