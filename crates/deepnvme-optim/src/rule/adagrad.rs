//! Adagrad: each weight's steps become smaller with all that its gradients have been.

use fearless_simd::prelude::*;

use super::operators::{add, addcdiv, addcmul};
use super::tile::{Grad, Place, Tile, lines, load, look_ahead, places, store, vectors};
use crate::Root;

/// Settings of `torch.optim.Adagrad`. The initial accumulator value is what the caller fills the sum with.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Adagrad {
    /// The learning rate.
    pub lr: f64,
    /// How the learning rate becomes smaller with the steps.
    pub lr_decay: f64,
    /// What is added to the root.
    pub eps: f64,
    /// A penalty on the weights.
    pub weight_decay: f64,
    /// Gradients are climbed.
    pub maximize: bool,
}

impl Default for Adagrad {
    fn default() -> Self {
        Self { lr: 1e-2, lr_decay: 0.0, eps: 1e-10, weight_decay: 0.0, maximize: false }
    }
}

/// The rule at a step.
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
    pub(super) fn tile<S: Simd, const N: usize>(
        self,
        simd: S,
        root: Root,
        weights: &mut Tile<N>,
        grad: Grad<'_, N>,
        sum: &mut Tile<N>,
    ) {
        let (mut grads, mut roots) = (*grad.raw, *sum);
        let streams = [Place::of(weights), Place::of(grad.raw), Place::of(sum)];
        for line in lines::<N>() {
            look_ahead(&streams, line);
            for at in vectors::<S>(line) {
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
        match root {
            Root::Exact => {
                for at in places::<S, N>() {
                    store::<S, N>(load(simd, &roots, at).sqrt(), &mut roots, at);
                }
            }
            _ => roots.as_chunks_mut().0.iter_mut().for_each(|roots| root.estimated(roots)),
        }
        for at in places::<S, N>() {
            let below = load(simd, &roots, at) + S::f32s::splat(simd, self.eps);
            let weight = addcdiv(simd, load(simd, weights, at), load(simd, &grads, at), below, self.rate);
            store::<S, N>(weight, weights, at);
        }
    }
}
