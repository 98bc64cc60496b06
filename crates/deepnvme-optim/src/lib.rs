//! Optimizer steps on the processor: pure kernels over slices, without I/O or unsafe code.
//!
//! - [`Kernel::step`] is one pass over memory: gradients are unscaled and clipped, a [`Rule`] changes weights and moments,
//!   and a copy of the weights is written in the type that the model has.
//! - [`accumulate`] and [`measure`] are what comes before: sums of gradients, and their norm.
//! - [`MomentMut`] says how state can lie in memory; its module says why 8 bits are enough. [`pack`] and [`unpack`] are for
//!   those who have it from elsewhere, or take it there.
//! - [`Crew`] has the threads.
//!
//! # Torch's bits
//!
//! With fp32 weights, gradients and moments a step gives, bit for bit, what torch's optimizers give on x86-64 with
//! `foreach=False, fused=False`, for any number of elements. What was found about torch 2.15 by trying its operators
//! against all orders of rounding, and what this crate does on every processor:
//!
//! | operator | rounding |
//! |---|---|
//! | scalars | reckoned in fp64, rounded to fp32 when an operator gets them |
//! | `mul_`, `div`, `add_` of a scalar | once; `div` divides, it does not multiply by the reciprocal |
//! | `add_(x, alpha=a)` | `fma(x, a, self)`: once |
//! | `addcmul_(x, y, value=a)` | `fma(a * x, y, self)`: the first product is rounded |
//! | `addcdiv_(x, y, value=a)` | `self + (a * x) / y`: each operation |
//! | `lerp_(x, w)`, `w` below a half | `fma(w, x - self, self)` |
//! | `lerp_(x, w)` otherwise | `fma(-(x - self), 1 - w, x)` |
//! | `sqrt` | depends on MKL and the maker of the processor: see [`Root`] |
//!
//! The compiler fused them, in vectors and in what is left at the end of one alike, so that neither lengths nor threads
//! matter. torch has these kernels in two builds. The one for AVX2 is the one of the table, and processors with AVX-512 run
//! it, too (with `ATEN_CPU_CAPABILITY=avx512` it runs where there is no AVX-512). Processors without AVX2, and
//! `ATEN_CPU_CAPABILITY=default`, run one that rounds products and sums apart: one unit of the sum away at each `fma`.
//! `fused=True` is another definition again (`beta * mean + (1 - beta) * grad`), one or two units away per step.
//!
//! What is not torch's, bit for bit: [`measure`] is exact to the last bit or so of fp64, where torch's norms are fp32 sums
//! (relative distance up to 1e-6); gradients of fp16 are unscaled in fp32, where torch rounds the product to fp16; and NaNs
//! are NaNs without the same payload.
//!
//! # The same on every machine
//!
//! All of it is written once, for vectors of any width, and compiled for SSE2, SSE4.2, AVX2, AVX-512 and NEON; the widest
//! is taken at run time. Every element's operations are the same at every width, fused ones are fused everywhere (in
//! software where the processor cannot, which is slow), so that all levels give the same bits. Only the roots that begin
//! with an estimate belong to a machine.
#![forbid(unsafe_code)]

mod crew;
mod error;
mod float;
mod gradient;
mod moment;
mod numbers;
mod random;
mod root;
mod rule;
mod step;
mod stored;

pub use crew::{Crew, THREADS_MAX};
pub use error::{Error, Result};
pub use fearless_simd::Level;
pub use float::Float;
pub use gradient::{Measure, accumulate, accumulate_at, measure, measure_at};
pub use moment::{MomentMut, Sign};
pub use numbers::{Numbers, NumbersMut, Rounding};
pub use root::Root;
pub use rule::{Adagrad, Adam, Lion, Rule, Sgd};
pub use step::{Kernel, MOMENTS_MAX, Part, Step};
pub use stored::{pack, unpack};

/// Elements that share a scale where moments have 8 bits.
pub const BLOCK: usize = 128;
/// Elements that are worked on together, in the first cache.
const TILE: usize = BLOCK;
/// Elements that a thread takes at once: enough to be worth the taking, few enough that all threads end together.
const CHUNK: usize = 512 * BLOCK;
