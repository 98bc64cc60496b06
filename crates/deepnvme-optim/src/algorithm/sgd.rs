//! Stochastic gradient descent, with or without momentum.

use fearless_simd::prelude::*;

use super::operators::add;
use super::tile::{StreamAddress, Tiles, line_offsets, load, prefetch_ahead, store, vector_offsets_in_line};

/// Settings of `torch.optim.SGD`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sgd {
    /// The learning rate.
    pub lr: f64,
    /// Decay of the momentum buffer.
    pub momentum: f64,
    /// Reduction of the gradient that is added to the buffer.
    pub dampening: f64,
    /// Nesterov momentum.
    pub nesterov: bool,
    /// L2 penalty on the weights.
    pub weight_decay: f64,
    /// Maximise the objective.
    pub maximize: bool,
}

impl Default for Sgd {
    fn default() -> Self {
        Self { lr: 1e-3, momentum: 0.0, dampening: 0.0, nesterov: false, weight_decay: 0.0, maximize: false }
    }
}

/// The scalars of one step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scalars {
    penalty: Option<f32>,
    momentum: Option<f32>,
    added: f32,
    nesterov: bool,
    is_first: bool,
    rate: f32,
}

impl Sgd {
    pub(super) fn at(&self, step: u64) -> Scalars {
        Scalars {
            penalty: (self.weight_decay != 0.0).then_some(self.weight_decay as f32),
            momentum: (self.momentum != 0.0).then_some(self.momentum as f32),
            added: (1.0 - self.dampening) as f32,
            nesterov: self.nesterov,
            // The buffer starts as the first gradient, regardless of dampening.
            is_first: step <= 1,
            rate: -self.lr as f32,
        }
    }
}

impl Scalars {
    #[inline(always)]
    pub(super) fn update<S: Simd, const N: usize>(self, simd: S, tiles: Tiles<'_, N>) {
        let Tiles { weights, grad, moments: [buffer, ..] } = tiles;
        let streams = [StreamAddress::of(weights), StreamAddress::of(grad.raw), StreamAddress::of(buffer)];
        for line in line_offsets::<N>() {
            prefetch_ahead(&streams, line);
            for at in vector_offsets_in_line::<S>(line) {
                let (weight, mut grad) = (load(simd, weights, at), grad.load(simd, at));
                if let Some(penalty) = self.penalty {
                    grad = add(simd, grad, weight, penalty);
                }
                if let Some(momentum) = self.momentum {
                    let mut kept = grad;
                    if !self.is_first {
                        let old = load(simd, buffer, at) * S::f32s::splat(simd, momentum);
                        kept = add(simd, old, grad, self.added);
                    }
                    store::<S, N>(kept, buffer, at);
                    grad = if self.nesterov { add(simd, grad, kept, momentum) } else { kept };
                }
                store::<S, N>(add(simd, weight, grad, self.rate), weights, at);
            }
        }
    }
}
