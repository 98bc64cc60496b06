//! Adagrad: steps shrink with the sum of squared gradients.

use fearless_simd::prelude::*;

use super::operators::{add, addcdiv, addcmul};
use super::tile::{
    StreamAddress, Tiles, line_offsets, load, prefetch_ahead, store, vector_offsets, vector_offsets_in_line,
};
use crate::SqrtMode;

/// Settings of `torch.optim.Adagrad`. The caller fills the sum with the initial accumulator value.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Adagrad {
    /// The learning rate.
    pub lr: f64,
    /// The decay of the learning rate.
    pub lr_decay: f64,
    /// Added to the root.
    pub eps: f64,
    /// L2 penalty on the weights.
    pub weight_decay: f64,
    /// Maximise the objective.
    pub maximize: bool,
}

impl Default for Adagrad {
    fn default() -> Self {
        Self { lr: 1e-2, lr_decay: 0.0, eps: 1e-10, weight_decay: 0.0, maximize: false }
    }
}

/// The scalars of one step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scalars {
    penalty: Option<f32>,
    eps: f32,
    rate: f32,
}

impl Adagrad {
    pub(super) fn at(&self, step: u64) -> Scalars {
        Scalars {
            penalty: (self.weight_decay != 0.0).then_some(self.weight_decay as f32),
            eps: self.eps as f32,
            rate: -(self.lr / (1.0 + (step as f64 - 1.0) * self.lr_decay)) as f32,
        }
    }
}

impl Scalars {
    #[inline(always)]
    pub(super) fn update<S: Simd, const N: usize>(self, simd: S, sqrt_mode: SqrtMode, tiles: Tiles<'_, N>) {
        let Tiles { weights, grad, moments: [sum, ..] } = tiles;
        let (mut grads, mut roots) = (*grad.raw, *sum);
        let streams = [StreamAddress::of(weights), StreamAddress::of(grad.raw), StreamAddress::of(sum)];
        for line in line_offsets::<N>() {
            prefetch_ahead(&streams, line);
            for at in vector_offsets_in_line::<S>(line) {
                let mut grad = grad.load(simd, at);
                if let Some(penalty) = self.penalty {
                    grad = add(simd, grad, load(simd, weights, at), penalty);
                }
                store::<S, N>(grad, &mut grads, at);
                let new = addcmul(simd, load(simd, sum, at), grad, grad, 1.0);
                store::<S, N>(new, sum, at);
                store::<S, N>(new, &mut roots, at);
            }
        }
        match sqrt_mode {
            SqrtMode::Exact => {
                for at in vector_offsets::<S, N>() {
                    store::<S, N>(load(simd, &roots, at).sqrt(), &mut roots, at);
                }
            }
            _ => roots.as_chunks_mut().0.iter_mut().for_each(|roots| sqrt_mode.estimate(roots)),
        }
        for at in vector_offsets::<S, N>() {
            let denominator = load(simd, &roots, at) + S::f32s::splat(simd, self.eps);
            let weight = addcdiv(simd, load(simd, weights, at), load(simd, &grads, at), denominator, self.rate);
            store::<S, N>(weight, weights, at);
        }
    }
}
