//! One step over memory: each element is read once and written once.
//!
//! A [`Part`] is divided into tasks. Threads take batches of tasks from a list, so that they share the elements evenly,
//! however small the parameters are.
//!
//! A task of fp32 only, without a copy of the weights, is updated in place. Any other task is updated in tiles that stay
//! in the L1 cache:
//!
//! 1. Gradients, weights and moments are converted to fp32.
//! 2. Gradients are unscaled and clipped.
//! 3. The algorithm updates the tile.
//! 4. The results are rounded and stored, optionally with a copy of the weights in another type.

use fearless_simd::{Level, Simd, dispatch};

use crate::algorithm::{Algorithm, Grad, MOMENTS_MAX, Scalars, Tiles};
use crate::error::{Error, Result};
use crate::float_slice::{FloatSlice, FloatSliceMut, Rounding};
use crate::moment::{MomentMut, Sign};
use crate::random::{Noise, NoiseStream, weight_noise};
use crate::sqrt::SqrtMode;
use crate::thread_pool::ThreadPool;
use crate::{BATCH_ELEMENTS_MAX, SCALE_ELEMENTS, TASK_ELEMENTS_MAX, TILE};

/// Elements that are processed at once if nothing is converted. A loop over a [`TILE`] is fully unrolled, so each of
/// its loads advances by half a KiB, which the hardware prefetcher does not follow.
const WIDE_TILE: usize = 8 * TILE;

/// Some elements of a parameter, with their gradient and moments.
#[derive(Debug)]
pub struct Part<'a> {
    /// Position of the first element among all elements of the seed. Noise depends on it, so
    /// that results do not depend on how a parameter is divided.
    pub index: u64,
    /// The weights to update: fp32 (the model's or master weights) or 16 bits.
    pub weights: FloatSliceMut<'a>,
    /// The gradient.
    pub grad: FloatSlice<'a>,
    /// The moments that [`Algorithm::moments`] lists, in that order.
    pub moments: Vec<MomentMut<'a>>,
    /// Receives a copy of the updated weights: the model's weights if there are master weights.
    pub out: Option<FloatSliceMut<'a>>,
}

/// Options of a step.
#[derive(Clone, Copy, Debug)]
pub struct StepOptions {
    /// Number of the step, from one on.
    pub step: u64,
    /// Multiplies gradients first: the inverse of a `GradScaler`'s scale.
    pub unscale: f32,
    /// Multiplies gradients second: the clip coefficient.
    pub clip: f32,
    /// Rounding of 16-bit weights.
    pub rounding: Rounding,
    /// Seed of stochastic rounding.
    pub seed: u64,
}

impl Default for StepOptions {
    fn default() -> Self {
        Self { step: 1, unscale: 1.0, clip: 1.0, rounding: Rounding::Nearest, seed: 0 }
    }
}

/// An algorithm and how it is executed.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    algorithm: Algorithm,
    sqrt_mode: SqrtMode,
    level: Level,
}

/// A task, and the context of its step.
type Task<'c, 'a> = (&'c StepContext, Part<'a>);

/// Tasks in batches: small tasks together have at most [`BATCH_ELEMENTS_MAX`] elements, and a larger task is a batch of
/// its own.
#[derive(Default)]
struct Batches<'c, 'a> {
    full: Vec<Vec<Task<'c, 'a>>>,
    open: Vec<Task<'c, 'a>>,
    open_elements: usize,
}

/// Buffers of a thread. Each tile overwrites them.
struct Scratch {
    noise: [u32; TILE],
    grads: [f32; TILE],
    weights: [f32; TILE],
    moments: [[f32; TILE]; MOMENTS_MAX],
    /// Stands in for moments that the algorithm does not have.
    unused: [[f32; WIDE_TILE]; MOMENTS_MAX],
}

/// The values of a step that all tasks share.
struct StepContext {
    scalars: Scalars,
    signs: &'static [Sign],
    sqrt_mode: SqrtMode,
    unscale: f32,
    clip: f32,
    rounding: Rounding,
    noise: Noise,
}

impl Kernel {
    /// Creates a kernel with the widest SIMD instructions of this CPU.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if a setting is out of range, or this CPU does not support the mode.
    pub fn new(algorithm: Algorithm, sqrt_mode: SqrtMode) -> Result<Self> {
        algorithm.check()?;
        if !sqrt_mode.is_available() {
            return Err(Error::invalid(format!(
                "this CPU does not support the square root mode {sqrt_mode:?}; use Exact"
            )));
        }
        Ok(Self { algorithm, sqrt_mode, level: Level::new() })
    }

    /// Uses the SIMD instructions of a level. Affects speed only.
    #[must_use]
    pub fn with_level(self, level: Level) -> Self {
        Self { level, ..self }
    }

    /// Returns the algorithm.
    #[must_use]
    pub fn algorithm(&self) -> &Algorithm {
        &self.algorithm
    }

    /// Updates all parts. The result does not depend on threads or on how parameters are divided into parts.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if a part's tensors differ in length, its moments are not the algorithm's, or the step is 0.
    /// Then nothing was changed.
    pub fn step(&self, pool: &ThreadPool, step: &StepOptions, parts: Vec<Part<'_>>) -> Result<()> {
        self.step_all(pool, vec![(*step, parts)])
    }

    /// As [`Kernel::step`], for several lists of parts, each with options of its own. The threads share all lists.
    ///
    /// # Errors
    ///
    /// As [`Kernel::step`].
    pub fn step_all(&self, pool: &ThreadPool, lists: Vec<(StepOptions, Vec<Part<'_>>)>) -> Result<()> {
        for (step, parts) in &lists {
            if step.step == 0 {
                return Err(Error::invalid("step is 0; the first one is 1"));
            }
            parts.iter().enumerate().try_for_each(|(index, part)| self.check(index, part))?;
        }
        let contexts: Vec<StepContext> = lists.iter().map(|(step, _)| self.context(step)).collect();
        let mut batches = Batches::default();
        for ((_, parts), context) in lists.into_iter().zip(&contexts) {
            parts.into_iter().for_each(|part| part.split_into_tasks(|task| batches.push(context, task)));
        }
        pool.for_each(batches.finish(), |batch| {
            let mut scratch = Scratch::default();
            for (context, mut task) in batch {
                dispatch!(self.level, simd => context.run(simd, &mut task, &mut scratch));
            }
        });
        Ok(())
    }

    fn context(&self, step: &StepOptions) -> StepContext {
        StepContext {
            scalars: self.algorithm.at(step.step),
            signs: self.algorithm.moments(),
            sqrt_mode: self.sqrt_mode,
            unscale: step.unscale,
            // To maximise is to negate the gradient. A negated factor does that exactly: only the sign bit changes.
            clip: if self.algorithm.maximize() { -step.clip } else { step.clip },
            rounding: step.rounding,
            noise: Noise::new(step.seed, step.step),
        }
    }

    fn check(&self, index: usize, part: &Part<'_>) -> Result<()> {
        let (elements, wanted) = (part.weights.len(), self.algorithm.moments().len());
        let same = |name: &str, len: usize| {
            if len == elements {
                return Ok(());
            }
            Err(Error::invalid(format!("part {index}: {name} has {len} elements; the weights have {elements}")))
        };
        same("grad", part.grad.len())?;
        part.out.as_ref().map_or(Ok(()), |out| same("out", out.len()))?;
        if part.moments.len() != wanted {
            let count = part.moments.len();
            return Err(Error::invalid(format!("part {index}: has {count} moments; the algorithm has {wanted}")));
        }
        let names = ["the first moment", "the second moment", "the largest second moment"];
        part.moments
            .iter()
            .zip(names)
            .try_for_each(|(moment, name)| moment.check(&format!("part {index}: {name}"), elements))
    }
}

impl<'c, 'a> Batches<'c, 'a> {
    fn push(&mut self, context: &'c StepContext, task: Part<'a>) {
        let elements = task.weights.len();
        if self.open_elements > 0 && self.open_elements + elements > BATCH_ELEMENTS_MAX {
            self.full.push(std::mem::take(&mut self.open));
            self.open_elements = 0;
        }
        self.open_elements += elements;
        self.open.push((context, task));
    }

    fn finish(mut self) -> Vec<Vec<Task<'c, 'a>>> {
        self.full.push(self.open);
        self.full
    }
}

impl Default for Scratch {
    fn default() -> Self {
        Self {
            noise: [0; TILE],
            grads: [0.0; TILE],
            weights: [0.0; TILE],
            moments: [[0.0; TILE]; MOMENTS_MAX],
            unused: [[0.0; WIDE_TILE]; MOMENTS_MAX],
        }
    }
}

impl<'a> Part<'a> {
    /// Calls `push` with each task of at most [`TASK_ELEMENTS_MAX`] elements.
    fn split_into_tasks(self, mut push: impl FnMut(Part<'a>)) {
        let mut rest = self;
        while rest.weights.len() > TASK_ELEMENTS_MAX {
            let (head, tail) = rest.split_at(TASK_ELEMENTS_MAX);
            push(head);
            rest = tail;
        }
        if !rest.weights.is_empty() {
            push(rest);
        }
    }

    /// Splits into the elements before `at` and the others.
    ///
    /// # Panics
    ///
    /// If `at` is neither a multiple of [`SCALE_ELEMENTS`] nor the end, or is beyond the end.
    #[must_use]
    pub fn split_at(self, at: usize) -> (Self, Self) {
        assert!(
            at.is_multiple_of(SCALE_ELEMENTS) || at == self.weights.len(),
            "a part is split between blocks, not inside one"
        );
        let (weights, grad) = (self.weights.split_at(at), self.grad.split_at(at));
        let (heads, tails) = self.moments.into_iter().map(|moment| moment.split_at(at)).unzip();
        let (head, tail) = self.out.map(|out| out.split_at(at)).unzip();
        let index = self.index;
        (
            Self { index, weights: weights.0, grad: grad.0, moments: heads, out: head },
            Self { index: index + at as u64, weights: weights.1, grad: grad.1, moments: tails, out: tail },
        )
    }
}

impl StepContext {
    /// Updates whole wide tiles of fp32 in place. Returns the number of elements updated.
    #[inline(always)]
    fn run_wide_tiles<S: Simd>(
        &self,
        simd: S,
        weights: &mut [f32],
        grad: &[f32],
        moments: &mut [MomentMut<'_>],
        unused: &mut [[f32; WIDE_TILE]; MOMENTS_MAX],
    ) -> usize {
        let mut left = moments.iter_mut().map(|moment| match moment {
            MomentMut::F32(values) => values.as_chunks_mut().0,
            _ => &mut [],
        });
        let mut next = || left.next().unwrap_or_default();
        let (first, second, third) = (next(), next(), next());
        let (weights, grads) = (weights.as_chunks_mut().0, grad.as_chunks().0);
        let wide_tiles = weights.len();
        for (index, (weights, raw)) in weights.iter_mut().zip(grads).enumerate() {
            let [one, two, three] = &mut *unused;
            let moments = [
                first.get_mut(index).unwrap_or(one),
                second.get_mut(index).unwrap_or(two),
                third.get_mut(index).unwrap_or(three),
            ];
            let grad = Grad { raw, unscale: self.unscale, clip: self.clip };
            self.scalars.update::<S, WIDE_TILE>(simd, self.sqrt_mode, Tiles { weights, grad, moments });
        }
        wide_tiles * WIDE_TILE
    }

    #[inline(always)]
    fn run<S: Simd>(&self, simd: S, part: &mut Part<'_>, scratch: &mut Scratch) {
        let Part { index, weights, grad, moments, out } = part;
        let Scratch { noise, grads, weights: weights_buffer, moments: buffers, unused } = scratch;
        let is_noisy = moments.iter().any(MomentMut::is_rounded);
        let begin = match (&mut *weights, &*grad, &*out) {
            (FloatSliceMut::F32(weights), FloatSlice::F32(grad), None) if !is_noisy => {
                self.run_wide_tiles(simd, weights, grad, moments, unused)
            }
            _ => 0,
        };
        for at in (begin..weights.len()).step_by(TILE) {
            let grad = Grad { raw: grad.tile(at, grads), unscale: self.unscale, clip: self.clip };
            let is_ragged = weights.len() - at < TILE;
            let position = *index + at as u64;
            {
                let weights = weights.tile(at, weights_buffer);
                let [first, second, third] = &mut *buffers;
                let mut left = moments.iter_mut().zip(self.signs);
                let mut next = |buffer| match left.next() {
                    Some((moment, sign)) => moment.tile(*sign, at, buffer),
                    None => buffer,
                };
                let moments = [next(first), next(second), next(third)];
                self.scalars.update(simd, self.sqrt_mode, Tiles { weights: &mut *weights, grad, moments });
                if let Some(out) = out {
                    let noise = weight_noise(self.rounding, self.noise, position, noise);
                    out.store(at, weights, noise);
                }
            }
            if is_ragged || !matches!(weights, FloatSliceMut::F32(_)) {
                let noise = weight_noise(self.rounding, self.noise, position, noise);
                weights.store(at, weights_buffer, noise);
            }
            if is_noisy {
                self.noise.fill(NoiseStream::Moments, position, noise);
            }
            for ((moment, sign), buffer) in moments.iter_mut().zip(self.signs).zip(&*buffers) {
                if is_ragged || moment.is_rounded() {
                    moment.store(*sign, at, buffer, noise);
                }
            }
        }
    }
}
