//! What happens to gradients before a step: they are added up, and measured.

use fearless_simd::{Level, dispatch};

use crate::crew::Crew;
use crate::error::{Error, Result};
use crate::numbers::{Numbers, NumbersMut};
use crate::{CHUNK, TILE};

/// Sums that are kept apart, so that they can be made at once.
const LANES: usize = 16;

/// Adds `new` to `sum`: as fp32, rounded to the nearest number of the sum's type, like torch's `sum.add_(new)`.
///
/// # Errors
///
/// [`Error::Invalid`] where they do not have as many elements.
pub fn accumulate(crew: &Crew, sum: NumbersMut<'_>, new: Numbers<'_>) -> Result<()> {
    accumulate_at(Level::new(), crew, sum, new)
}

/// [`accumulate`] with the vectors of a level.
///
/// # Errors
///
/// As there.
pub fn accumulate_at(level: Level, crew: &Crew, sum: NumbersMut<'_>, new: Numbers<'_>) -> Result<()> {
    let (elements, other) = (sum.len(), new.len());
    if elements != other {
        return Err(Error::invalid(format!("the gradient has {other} elements; the sum has {elements}")));
    }
    let (mut chunks, mut rest) = (Vec::new(), (sum, new));
    while rest.0.len() > CHUNK {
        let (sums, news) = (rest.0.split_at(CHUNK), rest.1.split_at(CHUNK));
        chunks.push((sums.0, news.0));
        rest = (sums.1, news.1);
    }
    chunks.push(rest);
    crew.each(chunks, |(mut sum, new)| dispatch!(level, _ => add(&mut sum, new)));
    Ok(())
}

#[inline(always)]
fn add(sum: &mut NumbersMut<'_>, new: Numbers<'_>) {
    let (mut sums, mut news) = ([0.0; TILE], [0.0; TILE]);
    for at in (0..sum.len()).step_by(TILE) {
        sum.as_numbers().load(at, &mut sums);
        new.load(at, &mut news);
        for (sum, new) in sums.iter_mut().zip(news) {
            *sum += new;
        }
        sum.store(at, &sums, None);
    }
}

/// How large gradients are.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Measure {
    /// The sum of the squares of all elements, times the square of `unscale`.
    pub squares: f64,
    /// Whether all of them are finite. Squares of fp32 are finite in fp64, so that the sum says it.
    pub is_finite: bool,
}

impl Measure {
    /// The 2-norm.
    #[must_use]
    pub fn norm(&self) -> f64 {
        self.squares.sqrt()
    }
}

/// Measures gradients that are multiplied by `unscale` first (each product rounded to fp32, as a step does it).
///
/// Squares are exact in fp64, and are added up in an order that depends on nothing but the number of elements, so that
/// the same gradients have the same norm on every machine and with any number of threads.
#[must_use]
pub fn measure(crew: &Crew, unscale: f32, grads: &[Numbers<'_>]) -> Measure {
    measure_at(Level::new(), crew, unscale, grads)
}

/// [`measure`] with the vectors of a level.
#[must_use]
pub fn measure_at(level: Level, crew: &Crew, unscale: f32, grads: &[Numbers<'_>]) -> Measure {
    let mut chunks = Vec::new();
    for grad in grads {
        let mut rest = *grad;
        while rest.len() > CHUNK {
            let (head, tail) = rest.split_at(CHUNK);
            chunks.push(head);
            rest = tail;
        }
        chunks.push(rest);
    }
    let sums = crew.map(chunks, |chunk| dispatch!(level, _ => squares(unscale, chunk)));
    let squares: f64 = sums.into_iter().sum();
    Measure { squares, is_finite: squares.is_finite() }
}

#[inline(always)]
fn squares(unscale: f32, grad: Numbers<'_>) -> f64 {
    let (mut sums, mut grads) = ([0.0; LANES], [0.0; TILE]);
    for at in (0..grad.len()).step_by(TILE) {
        grad.load(at, &mut grads);
        for grads in grads.as_chunks::<LANES>().0 {
            for (sum, grad) in sums.iter_mut().zip(grads) {
                let grad = f64::from(*grad * unscale);
                *sum += grad * grad;
            }
        }
    }
    // Halves are added to halves.
    let mut count = LANES;
    while count > 1 {
        count /= 2;
        for lane in 0..count {
            sums[lane] += sums[lane + count];
        }
    }
    sums[0]
}
