//! Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms"): steps of one size, in the direction of a mean.
//!
//! torch has none. The arithmetic is that of these lines of torch:
//!
//! ```text
//! param.mul_(1 - lr * weight_decay)
//! param.add_(exp_avg.lerp(grad, 1 - beta1).sign(), alpha=-lr)
//! exp_avg.lerp_(grad, 1 - beta2)
//! ```

use fearless_simd::prelude::*;

use super::operators::Lerp;
use super::tile::{Grad, Place, Tile, lines, load, look_ahead, store, vectors};

/// Settings of Lion.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Lion {
    /// The learning rate: the size of every step.
    pub lr: f64,
    /// How much of the mean the direction has.
    pub beta1: f64,
    /// How much of the mean is kept.
    pub beta2: f64,
    /// Of the weights.
    pub weight_decay: f64,
    /// Gradients are climbed.
    pub maximize: bool,
}

impl Default for Lion {
    fn default() -> Self {
        Self { lr: 1e-4, beta1: 0.9, beta2: 0.99, weight_decay: 0.0, maximize: false }
    }
}

/// The rule at a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scalars {
    decay: Option<f32>,
    direction: Lerp,
    mean: Lerp,
    rate: f32,
}

impl Lion {
    pub(super) fn at(&self) -> Scalars {
        Scalars {
            decay: (self.weight_decay != 0.0).then_some((1.0 - self.lr * self.weight_decay) as f32),
            direction: Lerp::new(1.0 - self.beta1),
            mean: Lerp::new(1.0 - self.beta2),
            rate: -self.lr as f32,
        }
    }
}

impl Scalars {
    #[inline(always)]
    pub(super) fn tile<S: Simd, const N: usize>(
        self,
        simd: S,
        weights: &mut Tile<N>,
        grad: Grad<'_, N>,
        mean: &mut Tile<N>,
    ) {
        let (zero, rate) = (S::f32s::splat(simd, 0.0), S::f32s::splat(simd, self.rate));
        let streams = [Place::of(weights), Place::of(grad.raw), Place::of(mean)];
        for line in lines::<N>() {
            look_ahead(&streams, line);
            for at in vectors::<S>(line) {
                let (mut weight, grad, old) = (load(simd, weights, at), grad.load(simd, at), load(simd, mean, at));
                if let Some(decay) = self.decay {
                    weight *= S::f32s::splat(simd, decay);
                }
                let direction = self.direction.between(simd, old, grad);
                // Neither zero nor a NaN has a sign.
                let step = direction.simd_gt(zero).select(rate, zero);
                let step = direction.simd_lt(zero).select(-rate, step);
                store::<S, N>(weight + step, weights, at);
                store::<S, N>(self.mean.between(simd, old, grad), mean, at);
            }
        }
    }
}
