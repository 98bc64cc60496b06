//! torch's optimizers, and Lion.
//!
//! Each algorithm has settings named as in torch ([`Adam`], [`Lion`], [`Sgd`], [`Adagrad`]) and updates one [`tile`]
//! with torch's [`operators`]. Values that are the same for all elements of a step are computed once, in fp64 as in
//! Python, and rounded to fp32 where torch rounds them.

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
pub use tile::MOMENTS_MAX;
pub(crate) use tile::{Grad, Tiles};

use fearless_simd::prelude::*;

use crate::SqrtMode;
use crate::error::{Error, Result};
use crate::moment::Sign;

/// An optimizer algorithm and its settings.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Algorithm {
    /// `torch.optim.Adam` and `AdamW`.
    Adam(Adam),
    /// Lion, which torch does not have.
    Lion(Lion),
    /// `torch.optim.SGD`.
    Sgd(Sgd),
    /// `torch.optim.Adagrad`.
    Adagrad(Adagrad),
}

/// The scalars of one step, shared by all elements.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Scalars {
    Adam(adam::Scalars),
    Lion(lion::Scalars),
    Sgd(sgd::Scalars),
    Adagrad(adagrad::Scalars),
}

impl Algorithm {
    /// Returns which moments are signed, in order. Adam: the means of gradients and of their squares, and with
    /// `amsgrad` the maximum of the latter. Lion: the mean. SGD: the momentum buffer, if there is momentum. Adagrad:
    /// the sum of squares.
    #[must_use]
    pub fn moments(&self) -> &'static [Sign] {
        match self {
            Self::Adam(algorithm) if algorithm.amsgrad => &[Sign::Signed, Sign::Unsigned, Sign::Unsigned],
            Self::Adam(_) => &[Sign::Signed, Sign::Unsigned],
            Self::Lion(_) => &[Sign::Signed],
            Self::Sgd(algorithm) if algorithm.momentum == 0.0 => &[],
            Self::Sgd(_) => &[Sign::Signed],
            Self::Adagrad(_) => &[Sign::Unsigned],
        }
    }

    /// Returns whether the objective is maximised.
    #[must_use]
    pub fn maximize(&self) -> bool {
        match self {
            Self::Adam(algorithm) => algorithm.maximize,
            Self::Lion(algorithm) => algorithm.maximize,
            Self::Sgd(algorithm) => algorithm.maximize,
            Self::Adagrad(algorithm) => algorithm.maximize,
        }
    }

    /// Checks the ranges of all settings.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] names the first setting that is out of its range.
    pub fn check(&self) -> Result<()> {
        match self {
            Self::Adam(algorithm) => {
                let Adam { lr, beta1, beta2, eps, weight_decay, .. } = *algorithm;
                at_least_zero(&[("lr", lr), ("eps", eps), ("weight_decay", weight_decay)])?;
                below_one(&[("beta1", beta1), ("beta2", beta2)])
            }
            Self::Lion(algorithm) => {
                let Lion { lr, beta1, beta2, weight_decay, .. } = *algorithm;
                at_least_zero(&[("lr", lr), ("weight_decay", weight_decay)])?;
                below_one(&[("beta1", beta1), ("beta2", beta2)])
            }
            Self::Sgd(algorithm) => {
                let Sgd { lr, momentum, dampening, weight_decay, nesterov, .. } = *algorithm;
                at_least_zero(&[("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)])?;
                if !dampening.is_finite() {
                    return Err(Error::invalid(format!("dampening is {dampening}; it must be finite")));
                }
                if nesterov && (momentum == 0.0 || dampening != 0.0) {
                    return Err(Error::invalid("nesterov needs a momentum, and a dampening of zero"));
                }
                Ok(())
            }
            Self::Adagrad(algorithm) => {
                let Adagrad { lr, lr_decay, eps, weight_decay, .. } = *algorithm;
                at_least_zero(&[("lr", lr), ("lr_decay", lr_decay), ("eps", eps), ("weight_decay", weight_decay)])
            }
        }
    }

    /// Returns the scalars of a step. The first step is one.
    pub(crate) fn at(&self, step: u64) -> Scalars {
        match self {
            Self::Adam(algorithm) => Scalars::Adam(algorithm.at(step)),
            Self::Lion(algorithm) => Scalars::Lion(algorithm.at()),
            Self::Sgd(algorithm) => Scalars::Sgd(algorithm.at(step)),
            Self::Adagrad(algorithm) => Scalars::Adagrad(algorithm.at(step)),
        }
    }
}

impl Scalars {
    /// Updates a tile of weights and its moments.
    #[inline(always)]
    pub(crate) fn update<S: Simd, const N: usize>(&self, simd: S, sqrt_mode: SqrtMode, tiles: Tiles<'_, N>) {
        // By value: scalars behind a reference would be reloaded for every vector, since tiles are written in
        // between.
        match *self {
            Self::Adam(algorithm) => algorithm.update(simd, sqrt_mode, tiles),
            Self::Lion(algorithm) => algorithm.update(simd, tiles),
            Self::Sgd(algorithm) => algorithm.update(simd, tiles),
            Self::Adagrad(algorithm) => algorithm.update(simd, sqrt_mode, tiles),
        }
    }
}

fn at_least_zero(settings: &[(&str, f64)]) -> Result<()> {
    match settings.iter().find(|(_, value)| !(*value >= 0.0 && value.is_finite())) {
        Some((name, value)) => Err(Error::invalid(format!("{name} is {value}; it must be finite, and zero or more"))),
        None => Ok(()),
    }
}

fn below_one(settings: &[(&str, f64)]) -> Result<()> {
    match settings.iter().find(|(_, value)| !(0.0..1.0).contains(value)) {
        Some((name, value)) => Err(Error::invalid(format!("{name} is {value}; it must be from 0 to below 1"))),
        None => Ok(()),
    }
}
