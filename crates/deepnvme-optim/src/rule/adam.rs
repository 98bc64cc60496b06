//! Adam, with L2 regularisation or with decoupled weight decay (AdamW).

use fearless_simd::prelude::*;

use super::{Lerp, Tile, add, addcdiv, addcmul, load, store};
use crate::{Root, TILE};

/// Settings of `torch.optim.Adam` and `AdamW`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Adam {
    /// The learning rate.
    pub lr: f64,
    /// How much of the mean of gradients is kept.
    pub beta1: f64,
    /// How much of the mean of squares is kept.
    pub beta2: f64,
    /// What is added to the root.
    pub eps: f64,
    /// Of the weights, or of the gradients' penalty.
    pub weight_decay: f64,
    /// Weights decay by themselves: AdamW.
    pub decoupled: bool,
    /// The largest mean of squares so far counts.
    pub amsgrad: bool,
    /// Gradients are climbed.
    pub maximize: bool,
}

impl Default for Adam {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.0,
            decoupled: false,
            amsgrad: false,
            maximize: false,
        }
    }
}

/// The rule at a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scalars {
    decay: Option<f32>,
    penalty: Option<f32>,
    mean: Lerp,
    kept: f32,
    added: f32,
    correction: f32,
    eps: f32,
    rate: f32,
    amsgrad: bool,
}

impl Adam {
    pub(super) fn at(&self, step: u64) -> Scalars {
        let step = step as f64;
        let (first, second) = (1.0 - self.beta1.powf(step), 1.0 - self.beta2.powf(step));
        let decays = self.weight_decay != 0.0;
        Scalars {
            decay: (decays && self.decoupled).then_some((1.0 - self.lr * self.weight_decay) as f32),
            penalty: (decays && !self.decoupled).then_some(self.weight_decay as f32),
            mean: Lerp::new(1.0 - self.beta1),
            kept: self.beta2 as f32,
            added: (1.0 - self.beta2) as f32,
            correction: second.powf(0.5) as f32,
            eps: self.eps as f32,
            rate: -(self.lr / first) as f32,
            amsgrad: self.amsgrad,
        }
    }
}

impl Scalars {
    #[inline(always)]
    #[expect(clippy::too_many_arguments, reason = "one slice for each thing that a step has")]
    pub(super) fn tile<S: Simd>(
        &self,
        simd: S,
        root: Root,
        weights: &mut Tile,
        grad: &Tile,
        mean: &mut Tile,
        square: &mut Tile,
        largest: &mut Tile,
    ) {
        if root == Root::Exact {
            for at in (0..TILE).step_by(S::f32s::LEN) {
                let (weight, new, under) = self.moments(simd, at, weights, grad, mean, square, largest);
                store::<S>(self.update(simd, weight, new, under.sqrt()), weights, at);
            }
            return;
        }
        let mut roots = [0.0; TILE];
        for at in (0..TILE).step_by(S::f32s::LEN) {
            let (weight, _, under) = self.moments(simd, at, weights, grad, mean, square, largest);
            store::<S>(weight, weights, at);
            store::<S>(under, &mut roots, at);
        }
        root.estimated(&mut roots);
        for at in (0..TILE).step_by(S::f32s::LEN) {
            let (weight, new) = (load(simd, weights, at), load(simd, mean, at));
            store::<S>(self.update(simd, weight, new, load(simd, &roots, at)), weights, at);
        }
    }

    /// Changes the moments; the weight that is left, the mean, and what the root is taken of.
    #[inline(always)]
    #[expect(clippy::too_many_arguments, reason = "as above")]
    fn moments<S: Simd>(
        &self,
        simd: S,
        at: usize,
        weights: &Tile,
        grad: &Tile,
        mean: &mut Tile,
        square: &mut Tile,
        largest: &mut Tile,
    ) -> (S::f32s, S::f32s, S::f32s) {
        let (mut weight, mut grad) = (load(simd, weights, at), load(simd, grad, at));
        if let Some(decay) = self.decay {
            weight = weight * S::f32s::splat(simd, decay);
        }
        if let Some(penalty) = self.penalty {
            grad = add(simd, grad, weight, penalty);
        }
        let new = self.mean.between(simd, load(simd, mean, at), grad);
        store::<S>(new, mean, at);
        let kept = load(simd, square, at) * S::f32s::splat(simd, self.kept);
        let mut under = addcmul(simd, kept, grad, grad, self.added);
        store::<S>(under, square, at);
        if self.amsgrad {
            let most = load(simd, largest, at);
            // A NaN stays, whichever of them it is.
            under = (most.simd_gt(under) | most.is_nan()).select(most, under);
            store::<S>(under, largest, at);
        }
        (weight, new, under)
    }

    #[inline(always)]
    fn update<S: Simd>(&self, simd: S, weight: S::f32s, mean: S::f32s, root: S::f32s) -> S::f32s {
        let below = root / S::f32s::splat(simd, self.correction) + S::f32s::splat(simd, self.eps);
        addcdiv(simd, weight, mean, below, self.rate)
    }
}
