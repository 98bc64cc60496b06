//! What a step does with weights, gradients and moments: torch's own definitions.
//!
//! Each rule has its settings, as torch's optimizers name them ([`Adam`], [`Lion`], [`Sgd`], [`Adagrad`]), and the
//! arithmetic of one [`tile`] out of torch's [`operators`]. What is the same for all elements of a step is reckoned once,
//! in fp64 as Python does, and rounded to fp32 where torch does that.

mod adagrad;
mod adam;
mod lion;
mod operators;
mod sgd;
mod tile;

pub use adagrad::Adagrad;
pub use adam::Adam;
pub use lion::Lion;
pub use sgd::Sgd;
pub(crate) use tile::{Grad, Tile};

use fearless_simd::prelude::*;

use crate::Root;
use crate::error::{Error, Result};
use crate::moment::Sign;

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
