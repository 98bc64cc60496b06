//! One step over memory: each element is read once and written once.
//!
//! A [`Part`] is cut into chunks, which threads take from a list. A chunk of fp32 alone is worked on where it lies; any
//! other in tiles that stay in the first cache. There a gradient becomes fp32, is unscaled and clipped; weights and moments
//! that are short become fp32, too; the rule changes them; and they go back, rounded, with a copy of the weights in another
//! type where one is asked for.

use fearless_simd::{Level, Simd, dispatch};

use crate::crew::Crew;
use crate::error::{Error, Result};
use crate::moment::{MomentMut, Sign};
use crate::numbers::{Numbers, NumbersMut, Rounding, weight_noise};
use crate::random::{Noise, Stream};
use crate::root::Root;
use crate::rule::{Grad, Rule, Scalars};
use crate::{BLOCK, CHUNK, TILE};

/// Elements that are worked on at once where nothing is converted. A loop over a tile is unrolled to its end, so that each of
/// its loads steps by half a KiB, which the processor does not follow as it follows a stream.
const SPAN: usize = 8 * TILE;

/// More moments than this no rule has.
pub const MOMENTS_MAX: usize = 3;

/// Elements that a step changes.
#[derive(Debug)]
pub struct Part<'a> {
    /// The place of the first element among all that the seed is for: noise depends on it. A part of a parameter that is
    /// worked on alone gets the same noise as in the whole, if it has its own place.
    pub index: u64,
    /// The weights that are changed: fp32 ones (of the model, or its master weights), or short ones.
    pub weights: NumbersMut<'a>,
    /// The gradient.
    pub grad: Numbers<'a>,
    /// As many as [`Rule::moments`] names, in that order.
    pub moments: Vec<MomentMut<'a>>,
    /// Where a copy of the changed weights goes: the model's, beside master weights.
    pub out: Option<NumbersMut<'a>>,
}

/// What a step has besides its rule.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// Which one it is; the first is one.
    pub step: u64,
    /// What gradients are multiplied by first: one divided by the scale of a `GradScaler`.
    pub unscale: f32,
    /// What they are multiplied by then: the clip coefficient.
    pub clip: f32,
    /// How weights that are short are rounded.
    pub rounding: Rounding,
    /// For all that is rounded at random.
    pub seed: u64,
}

impl Default for Step {
    fn default() -> Self {
        Self { step: 1, unscale: 1.0, clip: 1.0, rounding: Rounding::Nearest, seed: 0 }
    }
}

/// A rule, and how it is carried out.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    rule: Rule,
    root: Root,
    level: Level,
}

/// What a chunk needs to know of its step.
struct Order {
    scalars: Scalars,
    signs: &'static [Sign],
    root: Root,
    unscale: f32,
    clip: f32,
    rounding: Rounding,
    noise: Noise,
}

impl Kernel {
    /// The widest vectors of this processor, and that kind of square root.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] where a setting is out of its range, or this processor has no such root.
    pub fn new(rule: Rule, root: Root) -> Result<Self> {
        rule.check()?;
        if !root.is_available() {
            return Err(Error::invalid(format!("this processor has no estimate for the root {root:?}; take Exact")));
        }
        Ok(Self { rule, root, level: Level::new() })
    }

    /// The same with the vectors of that level, which changes nothing but the speed.
    #[must_use]
    pub fn with_level(self, level: Level) -> Self {
        Self { level, ..self }
    }

    /// The rule.
    #[must_use]
    pub fn rule(&self) -> &Rule {
        &self.rule
    }

    /// Changes all parts. Which thread does what, and how parts are cut, does not change a bit of the result.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] where slices do not fit each other or the rule; then nothing has been changed.
    pub fn step(&self, crew: &Crew, step: &Step, parts: Vec<Part<'_>>) -> Result<()> {
        if step.step == 0 {
            return Err(Error::invalid("step is 0; the first one is 1"));
        }
        parts.iter().enumerate().try_for_each(|(index, part)| self.check(index, part))?;
        let order = Order {
            scalars: self.rule.at(step.step),
            signs: self.rule.moments(),
            root: self.root,
            unscale: step.unscale,
            // A sign changes no other bit.
            clip: if self.rule.maximize() { -step.clip } else { step.clip },
            rounding: step.rounding,
            noise: Noise::new(step.seed, step.step),
        };
        let mut chunks = Vec::new();
        parts.into_iter().for_each(|part| part.cut(&mut chunks));
        crew.each(chunks, |mut chunk| dispatch!(self.level, simd => order.run(simd, &mut chunk)));
        Ok(())
    }

    fn check(&self, index: usize, part: &Part<'_>) -> Result<()> {
        let (elements, wanted) = (part.weights.len(), self.rule.moments().len());
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
            return Err(Error::invalid(format!("part {index}: has {count} moments; the rule has {wanted}")));
        }
        let names = ["the first moment", "the second moment", "the largest second moment"];
        part.moments
            .iter()
            .zip(names)
            .try_for_each(|(moment, name)| moment.check(&format!("part {index}: {name}"), elements))
    }
}

impl<'a> Part<'a> {
    /// Into chunks.
    fn cut(self, chunks: &mut Vec<Part<'a>>) {
        let mut rest = self;
        while rest.weights.len() > CHUNK {
            let (head, tail) = rest.split_at(CHUNK);
            chunks.push(head);
            rest = tail;
        }
        if !rest.weights.is_empty() {
            chunks.push(rest);
        }
    }

    /// Two parts: the elements before `at`, and the others.
    ///
    /// # Panics
    ///
    /// When `at` is neither a multiple of [`BLOCK`] nor the end.
    #[must_use]
    pub fn split_at(self, at: usize) -> (Self, Self) {
        assert!(at.is_multiple_of(BLOCK) || at == self.weights.len(), "a block is not cut");
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

impl Order {
    /// All in fp32, as it lies in memory, but for the end; how many elements that was.
    #[inline(always)]
    fn spans<S: Simd>(&self, simd: S, weights: &mut [f32], grad: &[f32], moments: &mut [MomentMut<'_>]) -> usize {
        let mut unused = [[0.0; SPAN]; MOMENTS_MAX];
        let mut left = moments.iter_mut().map(|moment| match moment {
            MomentMut::F32(values) => values.as_chunks_mut().0,
            _ => &mut [],
        });
        let mut next = || left.next().unwrap_or_default();
        let (first, second, third) = (next(), next(), next());
        let (weights, grads) = (weights.as_chunks_mut().0, grad.as_chunks().0);
        let spans = weights.len();
        for (index, (weights, raw)) in weights.iter_mut().zip(grads).enumerate() {
            let [one, two, three] = &mut unused;
            let moments = [
                first.get_mut(index).unwrap_or(one),
                second.get_mut(index).unwrap_or(two),
                third.get_mut(index).unwrap_or(three),
            ];
            let grad = Grad { raw, unscale: self.unscale, clip: self.clip };
            self.scalars.tile::<S, SPAN>(simd, self.root, weights, grad, moments);
        }
        spans * SPAN
    }

    #[inline(always)]
    fn run<S: Simd>(&self, simd: S, part: &mut Part<'_>) {
        let Part { index, weights, grad, moments, out } = part;
        let mut noise = [0; TILE];
        let (mut grads, mut weights_buffer) = ([0.0; TILE], [0.0; TILE]);
        let mut buffers = [[0.0; TILE]; MOMENTS_MAX];
        let is_noisy = moments.iter().any(MomentMut::is_rounded);
        let begin = match (&mut *weights, &*grad, &*out) {
            (NumbersMut::F32(weights), Numbers::F32(grad), None) if !is_noisy => {
                self.spans(simd, weights, grad, moments)
            }
            _ => 0,
        };
        for at in (begin..weights.len()).step_by(TILE) {
            let grad = Grad { raw: grad.tile(at, &mut grads), unscale: self.unscale, clip: self.clip };
            let is_ragged = weights.len() - at < TILE;
            let place = *index + at as u64;
            {
                let weights = weights.tile(at, &mut weights_buffer);
                let [first, second, third] = &mut buffers;
                let mut left = moments.iter_mut().zip(self.signs);
                let mut next = |buffer| match left.next() {
                    Some((moment, sign)) => moment.tile(*sign, at, buffer),
                    None => buffer,
                };
                let tiles = [next(first), next(second), next(third)];
                self.scalars.tile(simd, self.root, weights, grad, tiles);
                if let Some(out) = out {
                    let noise = weight_noise(self.rounding, self.noise, place, &mut noise);
                    out.store(at, weights, noise);
                }
            }
            if is_ragged || !matches!(weights, NumbersMut::F32(_)) {
                let noise = weight_noise(self.rounding, self.noise, place, &mut noise);
                weights.store(at, &weights_buffer, noise);
            }
            if is_noisy {
                self.noise.fill(Stream::Moments, place, &mut noise);
            }
            for ((moment, sign), buffer) in moments.iter_mut().zip(self.signs).zip(&buffers) {
                if is_ragged || moment.is_rounded() {
                    moment.store(*sign, at, buffer, &noise);
                }
            }
        }
    }
}
