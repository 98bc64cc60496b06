//! Adam, with L2 regularisation or with decoupled weight decay (AdamW).

use fearless_simd::prelude::*;

use super::operators::{Lerp, add, addcdiv, addcmul};
use super::tile::{
    StreamAddress, Tiles, line_offsets, load, prefetch_ahead, store, vector_offsets, vector_offsets_in_line,
};
use crate::SqrtMode;

/// Settings of `torch.optim.Adam` and `AdamW`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Adam {
    /// The learning rate.
    pub lr: f64,
    /// Decay of the mean of gradients.
    pub beta1: f64,
    /// Decay of the mean of squares.
    pub beta2: f64,
    /// Added to the root.
    pub eps: f64,
    /// Weight decay, or L2 penalty if not `decoupled`.
    pub weight_decay: f64,
    /// Decoupled weight decay (AdamW).
    pub decoupled: bool,
    /// Use the maximum of all means of squares so far.
    pub amsgrad: bool,
    /// Maximise the objective.
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

/// The scalars of one step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scalars {
    /// Factor of the weight.
    decay: f32,
    /// Factor of the weight that is added to the gradient.
    penalty: Option<f32>,
    mean: Lerp,
    /// Factors of the mean of squares, and of the new square.
    kept: f32,
    added: f32,
    /// Divides the root, since means start at zero.
    correction: f32,
    eps: f32,
    /// The negative learning rate, corrected likewise.
    rate: f32,
    amsgrad: bool,
}

impl Adam {
    pub(super) fn at(&self, step: u64) -> Scalars {
        let step = step as f64;
        let (first, second) = (1.0 - self.beta1.powf(step), 1.0 - self.beta2.powf(step));
        let decays = self.weight_decay != 0.0;
        Scalars {
            // A decay of 1 changes nothing.
            decay: if decays && self.decoupled { (1.0 - self.lr * self.weight_decay) as f32 } else { 1.0 },
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
    pub(super) fn update<S: Simd, const N: usize>(self, simd: S, sqrt_mode: SqrtMode, tiles: Tiles<'_, N>) {
        // A copy for the usual settings, whose loop has no branches.
        let usual = Self { penalty: None, amsgrad: false, ..self };
        match (sqrt_mode, self.penalty, self.amsgrad) {
            (SqrtMode::Exact, None, false) => usual.exact(simd, tiles),
            (SqrtMode::Exact, ..) => self.exact(simd, tiles),
            (_, None, false) => usual.estimated(simd, sqrt_mode, tiles),
            _ => self.estimated(simd, sqrt_mode, tiles),
        }
    }

    #[inline(always)]
    fn exact<S: Simd, const N: usize>(self, simd: S, mut tiles: Tiles<'_, N>) {
        let streams = streams(&tiles);
        for line in line_offsets::<N>() {
            prefetch_ahead(&streams, line);
            for at in vector_offsets_in_line::<S>(line) {
                let (weight, mean, radicand) = self.moments(simd, at, &mut tiles);
                store::<S, N>(self.weight(simd, weight, mean, radicand.sqrt()), tiles.weights, at);
            }
        }
    }

    #[inline(always)]
    fn estimated<S: Simd, const N: usize>(self, simd: S, sqrt_mode: SqrtMode, mut tiles: Tiles<'_, N>) {
        let streams = streams(&tiles);
        let mut roots = [0.0; N];
        for line in line_offsets::<N>() {
            prefetch_ahead(&streams, line);
            for at in vector_offsets_in_line::<S>(line) {
                let (weight, _, radicand) = self.moments(simd, at, &mut tiles);
                store::<S, N>(weight, tiles.weights, at);
                store::<S, N>(radicand, &mut roots, at);
            }
        }
        roots.as_chunks_mut().0.iter_mut().for_each(|roots| sqrt_mode.estimate(roots));
        let Tiles { weights, moments: [mean, ..], .. } = tiles;
        for at in vector_offsets::<S, N>() {
            let (weight, mean) = (load(simd, weights, at), load(simd, mean, at));
            store::<S, N>(self.weight(simd, weight, mean, load(simd, &roots, at)), weights, at);
        }
    }

    /// Updates the moments. Returns the decayed weight, the mean, and the radicand.
    #[inline(always)]
    fn moments<S: Simd, const N: usize>(
        self,
        simd: S,
        at: usize,
        tiles: &mut Tiles<'_, N>,
    ) -> (S::f32s, S::f32s, S::f32s) {
        let [mean, square, largest] = &mut tiles.moments;
        let weight = load(simd, tiles.weights, at) * S::f32s::splat(simd, self.decay);
        let mut grad = tiles.grad.load(simd, at);
        if let Some(penalty) = self.penalty {
            grad = add(simd, grad, weight, penalty);
        }
        let new = self.mean.apply(simd, load(simd, mean, at), grad);
        store::<S, N>(new, mean, at);
        let kept = load(simd, square, at) * S::f32s::splat(simd, self.kept);
        let mut radicand = addcmul(simd, kept, grad, grad, self.added);
        store::<S, N>(radicand, square, at);
        if self.amsgrad {
            let largest_before = load(simd, largest, at);
            // A NaN on either side propagates.
            radicand = (largest_before.simd_gt(radicand) | largest_before.is_nan()).select(largest_before, radicand);
            store::<S, N>(radicand, largest, at);
        }
        (weight, new, radicand)
    }

    /// Returns the new weight.
    #[inline(always)]
    fn weight<S: Simd>(self, simd: S, weight: S::f32s, mean: S::f32s, root: S::f32s) -> S::f32s {
        let denominator = root / S::f32s::splat(simd, self.correction) + S::f32s::splat(simd, self.eps);
        addcdiv(simd, weight, mean, denominator, self.rate)
    }
}

/// Returns the streams to prefetch. The maximum of squares is rarely among the moments.
fn streams<const N: usize>(tiles: &Tiles<'_, N>) -> [StreamAddress; 4] {
    let [mean, square, _] = &tiles.moments;
    [&*tiles.weights, tiles.grad.raw, mean, square].map(StreamAddress::of)
}
