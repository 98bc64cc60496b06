//! What a step does with weights, gradients and moments: torch's own definitions.
//!
//! Each rule has its settings, as torch's optimizers name them ([`Adam`], [`Lion`], [`Sgd`], [`Adagrad`]), and the
//! arithmetic of one tile. What is the same for all elements of a step is reckoned once, in fp64 as Python does, and
//! rounded to fp32 where torch does that.

mod adagrad;
mod adam;
mod lion;
mod sgd;

pub use adagrad::Adagrad;
pub use adam::Adam;
pub use lion::Lion;
pub use sgd::Sgd;

use fearless_simd::prelude::*;

use crate::Root;
use crate::error::{Error, Result};
use crate::moment::Sign;

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
    fn load<S: Simd>(&self, simd: S, at: usize) -> S::f32s {
        load(simd, self.raw, at) * S::f32s::splat(simd, self.unscale) * S::f32s::splat(simd, self.clip)
    }
}

/// An optimizer's rule and its settings.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Rule {
    /// `torch.optim.Adam` and `AdamW`.
    Adam(Adam),
    /// Lion, which torch has not.
    Lion(Lion),
    /// `torch.optim.SGD`.
    Sgd(Sgd),
    /// `torch.optim.Adagrad`.
    Adagrad(Adagrad),
}

/// A rule at a step, as far as it is the same for all elements.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Scalars {
    Adam(adam::Scalars),
    Lion(lion::Scalars),
    Sgd(sgd::Scalars),
    Adagrad(adagrad::Scalars),
}

impl Rule {
    /// The moments that it keeps, in order: for Adam the means of gradients and of their squares, and with `amsgrad` the
    /// largest of the latter; for Lion the mean; for SGD the momentum buffer, if there is momentum; for Adagrad the sum
    /// of squares.
    #[must_use]
    pub fn moments(&self) -> &'static [Sign] {
        match self {
            Self::Adam(rule) if rule.amsgrad => &[Sign::Signed, Sign::Unsigned, Sign::Unsigned],
            Self::Adam(_) => &[Sign::Signed, Sign::Unsigned],
            Self::Lion(_) => &[Sign::Signed],
            Self::Sgd(rule) if rule.momentum == 0.0 => &[],
            Self::Sgd(_) => &[Sign::Signed],
            Self::Adagrad(_) => &[Sign::Unsigned],
        }
    }

    /// Whether gradients are climbed.
    #[must_use]
    pub fn maximize(&self) -> bool {
        match self {
            Self::Adam(rule) => rule.maximize,
            Self::Lion(rule) => rule.maximize,
            Self::Sgd(rule) => rule.maximize,
            Self::Adagrad(rule) => rule.maximize,
        }
    }

    /// Whether all settings are where torch would have them.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] names the first that is not.
    pub fn check(&self) -> Result<()> {
        match self {
            Self::Adam(rule) => {
                let Adam { lr, beta1, beta2, eps, weight_decay, .. } = *rule;
                at_least_zero(&[("lr", lr), ("eps", eps), ("weight_decay", weight_decay)])?;
                below_one(&[("beta1", beta1), ("beta2", beta2)])
            }
            Self::Lion(rule) => {
                let Lion { lr, beta1, beta2, weight_decay, .. } = *rule;
                at_least_zero(&[("lr", lr), ("weight_decay", weight_decay)])?;
                below_one(&[("beta1", beta1), ("beta2", beta2)])
            }
            Self::Sgd(rule) => {
                let Sgd { lr, momentum, dampening, weight_decay, nesterov, .. } = *rule;
                at_least_zero(&[("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)])?;
                if dampening.is_nan() || (nesterov && (momentum == 0.0 || dampening != 0.0)) {
                    return Err(Error::invalid("nesterov needs a momentum, and a dampening of zero"));
                }
                Ok(())
            }
            Self::Adagrad(rule) => {
                let Adagrad { lr, lr_decay, eps, weight_decay, .. } = *rule;
                at_least_zero(&[("lr", lr), ("lr_decay", lr_decay), ("eps", eps), ("weight_decay", weight_decay)])
            }
        }
    }

    /// The rule at a step; the first is one.
    pub(crate) fn at(&self, step: u64) -> Scalars {
        match self {
            Self::Adam(rule) => Scalars::Adam(rule.at(step)),
            Self::Lion(rule) => Scalars::Lion(rule.at()),
            Self::Sgd(rule) => Scalars::Sgd(rule.at(step)),
            Self::Adagrad(rule) => Scalars::Adagrad(rule.at(step)),
        }
    }
}

impl Scalars {
    /// Changes a tile of weights and its moments.
    #[inline(always)]
    pub(crate) fn tile<S: Simd, const N: usize>(
        &self,
        simd: S,
        root: Root,
        weights: &mut Tile<N>,
        grad: Grad<'_, N>,
        [first, second, third]: [&mut Tile<N>; 3],
    ) {
        // By value: what is behind a reference would be read again for every vector, since tiles are written meanwhile.
        match *self {
            Self::Adam(rule) => rule.tile(simd, root, weights, grad, first, second, third),
            Self::Lion(rule) => rule.tile(simd, weights, grad, first),
            Self::Sgd(rule) => rule.tile(simd, weights, grad, first),
            Self::Adagrad(rule) => rule.tile(simd, root, weights, grad, first),
        }
    }
}

fn at_least_zero(settings: &[(&str, f64)]) -> Result<()> {
    match settings.iter().find(|(_, value)| !(*value >= 0.0 && value.is_finite())) {
        Some((name, value)) => Err(Error::invalid(format!("{name} is {value}; it must be zero or more"))),
        None => Ok(()),
    }
}

fn below_one(settings: &[(&str, f64)]) -> Result<()> {
    match settings.iter().find(|(_, value)| !(0.0..1.0).contains(value)) {
        Some((name, value)) => Err(Error::invalid(format!("{name} is {value}; it must be from 0 to below 1"))),
        None => Ok(()),
    }
}

/// The places of a tile where lines of memory begin.
#[inline(always)]
fn lines<const N: usize>() -> impl Iterator<Item = usize> {
    (0..N).step_by(LINE)
}

/// The places of a line where vectors begin.
#[inline(always)]
fn vectors<S: Simd>(line: usize) -> impl Iterator<Item = usize> {
    (line..line + LINE).step_by(S::f32s::LEN)
}

/// The places of a tile where vectors begin.
#[inline(always)]
fn places<S: Simd, const N: usize>() -> impl Iterator<Item = usize> {
    (0..N / S::f32s::LEN).map(|vector| vector * S::f32s::LEN)
}

/// Where a tile lies, and with it what comes after it.
#[derive(Clone, Copy)]
struct Place(*const f32);

impl Place {
    fn of<const N: usize>(tile: &Tile<N>) -> Self {
        Self(tile.as_ptr())
    }
}

/// Asks for what lies [`AHEAD`] of that line in each of them, a line of memory at a time, between computing: the processor
/// stops following a stream at the end of every page, and asked for a whole tile at once, it has no room for the answers.
#[inline(always)]
fn look_ahead(places: &[Place], line: usize) {
    places.iter().for_each(|place| deepnvme_mem::prefetch(place.0.wrapping_add(line + AHEAD)));
}

/// The vector that begins at a place of a tile.
#[inline(always)]
fn load<S: Simd, const N: usize>(simd: S, tile: &Tile<N>, at: usize) -> S::f32s {
    S::f32s::from_slice(simd, &tile[at..at + S::f32s::LEN])
}

#[inline(always)]
fn store<S: Simd, const N: usize>(vector: S::f32s, tile: &mut Tile<N>, at: usize) {
    vector.store_slice(&mut tile[at..at + S::f32s::LEN]);
}

/// `value + factor * other`, rounded once: what `value.add(other, alpha=factor)` is.
#[inline(always)]
fn add<S: Simd>(simd: S, value: S::f32s, other: S::f32s, factor: f32) -> S::f32s {
    other.mul_add_precise(S::f32s::splat(simd, factor), value)
}

/// `value + factor * one * other`: the first product is rounded, the second is not. `value.addcmul_(one, other, value=factor)`.
#[inline(always)]
fn addcmul<S: Simd>(simd: S, value: S::f32s, one: S::f32s, other: S::f32s, factor: f32) -> S::f32s {
    (one * S::f32s::splat(simd, factor)).mul_add_precise(other, value)
}

/// `value + factor * one / other`, each operation rounded. `value.addcdiv_(one, other, value=factor)`.
#[inline(always)]
fn addcdiv<S: Simd>(simd: S, value: S::f32s, one: S::f32s, other: S::f32s, factor: f32) -> S::f32s {
    value + one * S::f32s::splat(simd, factor) / other
}

/// A weight between two numbers, as `lerp_` has it: reckoned from the nearer end.
#[derive(Clone, Copy, Debug)]
struct Lerp {
    factor: f32,
    /// The factor counts from the end.
    is_late: bool,
}

impl Lerp {
    fn new(weight: f64) -> Self {
        let weight = weight as f32;
        let is_late = weight.abs() >= 0.5;
        Self { factor: if is_late { -(1.0 - weight) } else { weight }, is_late }
    }

    #[inline(always)]
    fn between<S: Simd>(self, simd: S, start: S::f32s, end: S::f32s) -> S::f32s {
        let from = if self.is_late { end } else { start };
        (end - start).mul_add_precise(S::f32s::splat(simd, self.factor), from)
    }
}
