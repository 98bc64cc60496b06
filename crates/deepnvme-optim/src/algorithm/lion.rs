//! Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms"): steps of constant size in the direction
//! of the sign of a mean.
//!
//! torch has no Lion. The arithmetic is that of these lines of torch:
//!
//! ```text
//! param.mul_(1 - lr * weight_decay)
//! param.add_(exp_avg.lerp(grad, 1 - beta1).sign(), alpha=-lr)
//! exp_avg.lerp_(grad, 1 - beta2)
//! ```

use fearless_simd::prelude::*;

use super::operators::Lerp;
use super::tile::{StreamAddress, Tiles, line_offsets, load, prefetch_ahead, store, vector_offsets_in_line};

/// Settings of Lion.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Lion {
    /// The learning rate: the size of every step.
    pub lr: f64,
    /// Weight of the mean in the direction.
    pub beta1: f64,
    /// Decay of the mean.
    pub beta2: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// Maximise the objective.
    pub maximize: bool,
}

impl Default for Lion {
    fn default() -> Self {
        Self { lr: 1e-4, beta1: 0.9, beta2: 0.99, weight_decay: 0.0, maximize: false }
    }
}

/// The scalars of one step.
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
    pub(super) fn update<S: Simd, const N: usize>(self, simd: S, tiles: Tiles<'_, N>) {
        let Tiles { weights, grad, moments: [mean, ..] } = tiles;
        // A sign of zero times the negative rate is -0.0, which leaves a weight of -0.0 as it is.
        let (zero, rate) = (S::f32s::splat(simd, -0.0), S::f32s::splat(simd, self.rate));
        let streams = [StreamAddress::of(weights), StreamAddress::of(grad.raw), StreamAddress::of(mean)];
        for line in line_offsets::<N>() {
            prefetch_ahead(&streams, line);
            for at in vector_offsets_in_line::<S>(line) {
                let (mut weight, grad, old) = (load(simd, weights, at), grad.load(simd, at), load(simd, mean, at));
                if let Some(decay) = self.decay {
                    weight *= S::f32s::splat(simd, decay);
                }
                let direction = self.direction.apply(simd, old, grad);
                // The sign of zero and NaN is zero.
                let step = direction.simd_gt(zero).select(rate, zero);
                let step = direction.simd_lt(zero).select(-rate, step);
                store::<S, N>(weight + step, weights, at);
                store::<S, N>(self.mean.apply(simd, old, grad), mean, at);
            }
        }
    }
}
