//! Optimizer steps on the CPU: pure kernels over slices, without I/O or unsafe code.
//!
//! - [`Kernel::step`] is one pass over memory. It unscales and clips gradients, applies an [`Algorithm`] to weights and
//!   moments, and can write a copy of the weights in the model's type.
//! - [`accumulate`] sums gradients, and [`gradient_norm`] computes their norm.
//! - [`MomentMut`] is optimizer state in memory, with 32, 16 or 8 bits per element. [`encode_moment`] and
//!   [`decode_moment`] convert it from and to fp32.
//! - [`ThreadPool`] runs the work.
//!
//! # Equality with torch
//!
//! With fp32 weights, gradients and moments, a step equals torch's optimizers on x86-64 with
//! `foreach=False, fused=False` bit for bit, for any number of elements. The exception is a weight of 1 (`beta1` is 0)
//! with an `x` of -0.0: at the end of each thread's part, torch's `lerp_` gives up to 15 zeros the other sign. This
//! crate always has the sign of torch's vectors.
//!
//! The rounding of torch 2.15's operators was found by testing them against all orders of rounding. This crate uses it
//! on every CPU:
//!
//! | operator | rounding |
//! |---|---|
//! | scalars | computed in fp64, rounded to fp32 when passed to an operator |
//! | `mul_`, `div`, `add_` of a scalar | once; `div` divides, it does not multiply by the reciprocal |
//! | `add_(x, alpha=a)` | `fma(x, a, self)`: once |
//! | `addcmul_(x, y, value=a)` | `fma(a * x, y, self)`: the first product is rounded |
//! | `addcdiv_(x, y, value=a)` | `self + (a * x) / y`: each operation |
//! | `lerp_(x, w)`, `w` below a half | `fma(w, x - self, self)` |
//! | `lerp_(x, w)` otherwise | `fma(w - 1, x - self, x)` |
//! | `sqrt` | depends on MKL and the vendor of the CPU: see [`SqrtMode`] |
//!
//! The C++ compiler that built torch fused these operations both in vectors and in the remainder, so neither lengths
//! nor threads matter. torch has two builds of these kernels:
//!
//! | CPU | `ATEN_CPU_CAPABILITY` | build |
//! |---|---|---|
//! | with AVX2, with or without AVX-512 | not set, `avx2` or `avx512` | AVX2: rounds as in the table above |
//! | with AVX2 | `default` | baseline: rounds products and sums separately |
//! | without AVX2 | not set | baseline |
//!
//! The baseline build differs by one unit in the last place of the sum per `fma`. `fused=True` is another definition
//! (`beta * mean + (1 - beta) * grad`), which differs by one or two units per step.
//!
//! Known differences: [`gradient_norm`] is exact to about the last bit of fp64, while torch's norms are fp32 sums
//! (relative difference up to 1e-6). fp16 gradients are unscaled in fp32, while torch rounds the product to fp16. NaNs
//! may have other payloads.
//!
//! # Determinism
//!
//! The code is written once for vectors of any width and compiled for SSE2, SSE4.2, AVX2, AVX-512 and NEON; the widest
//! is selected at run time. An element's operations are the same at every width, and fused ones are fused everywhere
//! (in software if the CPU cannot, which is slow). All levels therefore give the same bits. Only square roots
//! that start from an estimate depend on the machine.
#![forbid(unsafe_code)]

mod algorithm;
mod error;
mod float_slice;
mod gradient;
mod moment;
mod moment_convert;
mod random;
mod sqrt;
mod step;
mod thread_pool;

pub use algorithm::{Adagrad, Adam, Algorithm, Lion, MOMENTS_MAX, Sgd};
pub use deepnvme_codec::Float;
pub use error::{Error, Result};
pub use fearless_simd::Level;
pub use float_slice::{FloatSlice, FloatSliceMut, Rounding};
pub use gradient::{GradientNorm, accumulate, accumulate_with_level, gradient_norm, gradient_norm_with_level};
pub use moment::{MomentMut, Sign};
pub use moment_convert::{decode_moment, encode_moment};
pub use sqrt::SqrtMode;
pub use step::{Kernel, Part, StepOptions};
pub use thread_pool::{THREADS_MAX, ThreadPool};

/// Elements that share a scale in 8-bit moments.
pub const SCALE_ELEMENTS: usize = 128;
/// Elements that are processed together, in the L1 cache.
const TILE: usize = SCALE_ELEMENTS;
/// The most elements of a task, which one thread does: enough to amortise the lock, few enough that all threads finish
/// together.
const TASK_ELEMENTS_MAX: usize = 512 * SCALE_ELEMENTS;
/// Small tasks are grouped up to this many elements.
const BATCH_ELEMENTS_MAX: usize = TASK_ELEMENTS_MAX / 4;
