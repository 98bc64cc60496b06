//! Accumulation and norms of gradients.

use fearless_simd::{Level, dispatch};

use crate::error::{Error, Result};
use crate::float_slice::{FloatSlice, FloatSliceMut};
use crate::thread_pool::ThreadPool;
use crate::{BATCH_ELEMENTS_MAX, TASK_ELEMENTS_MAX, TILE};

/// Independent partial sums, to use the whole width of the CPU.
const LANES: usize = 16;

/// Adds `new` to `sum` in fp32, rounded to nearest in the type of the sum, as torch's `sum.add_(new)`.
///
/// # Errors
///
/// [`Error::Invalid`] if the numbers of elements differ.
pub fn accumulate(pool: &ThreadPool, sum: FloatSliceMut<'_>, new: FloatSlice<'_>) -> Result<()> {
    accumulate_with_level(Level::new(), pool, sum, new)
}

/// As [`accumulate`], with the SIMD instructions of a level.
///
/// # Errors
///
/// As [`accumulate`].
pub fn accumulate_with_level(
    level: Level,
    pool: &ThreadPool,
    sum: FloatSliceMut<'_>,
    new: FloatSlice<'_>,
) -> Result<()> {
    let (elements, other) = (sum.len(), new.len());
    if elements != other {
        return Err(Error::invalid(format!("the gradient has {other} elements; the sum has {elements}")));
    }
    let (mut tasks, mut rest) = (Vec::new(), (sum, new));
    while rest.0.len() > TASK_ELEMENTS_MAX {
        let (sums, news) = (rest.0.split_at(TASK_ELEMENTS_MAX), rest.1.split_at(TASK_ELEMENTS_MAX));
        tasks.push((sums.0, news.0));
        rest = (sums.1, news.1);
    }
    tasks.push(rest);
    pool.for_each(tasks, |(mut sum, new)| dispatch!(level, _ => add(&mut sum, new)));
    Ok(())
}

#[inline(always)]
fn add(sum: &mut FloatSliceMut<'_>, new: FloatSlice<'_>) {
    let (mut sums, mut news) = ([0.0; TILE], [0.0; TILE]);
    for at in (0..sum.len()).step_by(TILE) {
        sum.as_slice().load(at, &mut sums);
        new.load(at, &mut news);
        for (sum, new) in sums.iter_mut().zip(news) {
            *sum += new;
        }
        sum.store(at, &sums, None);
    }
}

/// The norm of gradients.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct GradientNorm {
    /// The sum of the squares of all elements, times the square of `unscale`.
    pub squares: f64,
    /// Whether all elements are finite. Squares of fp32 are finite in fp64, so the sum tells.
    pub is_finite: bool,
}

impl GradientNorm {
    /// Returns the L2 norm.
    #[must_use]
    pub fn norm(&self) -> f64 {
        self.squares.sqrt()
    }
}

/// Computes the norm of gradients, multiplied by `unscale` first (each product rounded to fp32, as in a step).
///
/// Squares are exact in fp64. The order of additions depends only on the lengths of the slices, so the norm is the same
/// on every machine and with any number of threads.
#[must_use]
pub fn gradient_norm(pool: &ThreadPool, unscale: f32, grads: &[FloatSlice<'_>]) -> GradientNorm {
    gradient_norm_with_level(Level::new(), pool, unscale, grads)
}

/// As [`gradient_norm`], with the SIMD instructions of a level.
#[must_use]
pub fn gradient_norm_with_level(
    level: Level,
    pool: &ThreadPool,
    unscale: f32,
    grads: &[FloatSlice<'_>],
) -> GradientNorm {
    let (mut batches, mut open, mut elements) = (Vec::new(), Vec::new(), 0);
    for grad in grads {
        let mut rest = *grad;
        loop {
            let (head, tail) = rest.split_at(rest.len().min(TASK_ELEMENTS_MAX));
            if elements > 0 && elements + head.len() > BATCH_ELEMENTS_MAX {
                batches.push(std::mem::take(&mut open));
                elements = 0;
            }
            elements += head.len();
            open.push(head);
            rest = tail;
            if rest.is_empty() {
                break;
            }
        }
    }
    batches.push(open);
    let sums = pool.map(batches, |batch| {
        let squares = batch.into_iter().map(|task| dispatch!(level, _ => squares(unscale, task)));
        squares.collect::<Vec<f64>>()
    });
    // In the order of the tasks.
    let sums = sums.into_iter().flatten();
    let squares: f64 = sums.sum();
    GradientNorm { squares, is_finite: squares.is_finite() }
}

#[inline(always)]
fn squares(unscale: f32, grad: FloatSlice<'_>) -> f64 {
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
    // Pairwise summation.
    let mut count = LANES;
    while count > 1 {
        count /= 2;
        for lane in 0..count {
            sums[lane] += sums[lane + count];
        }
    }
    sums[0]
}
