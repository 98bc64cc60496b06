//! Compressed weights: pure functions over slices, without I/O, threads or unsafe code.
//!
//! - [`pack`]: lossless compression of floats. The exponents of weights carry less than three bits of information each;
//!   [`pack::encode`] stores them in about as many bits, and [`pack::PackedBlock`] restores every bit.
//! - [`cast`]: casts between bf16, fp16 and fp32.
//! - [`quant`]: int8 and fp8 with scales.
//! - [`half`]: conversions of single 16-bit floats, for kernels that work on them.
//! - [`Float`]: the three floating-point types. [`Float8`] has the values of those with 8 bits.
//!
//! Functions over slices take little-endian bytes of any alignment. They use the widest SIMD instructions of the
//! CPU, detected at run time; the results are the same on every CPU. Packed blocks are validated.
#![forbid(unsafe_code)]

pub mod cast;
mod error;
mod float;
mod float8;
pub mod half;
pub mod pack;
pub mod quant;

pub use error::{Error, Result};
pub use float::Float;
pub use float8::Float8;

/// Evaluates an expression compiled for the widest SIMD instructions of this CPU. Its callees must be
/// `inline(always)`: only inlined code is compiled for them.
macro_rules! vectorise {
    ($body:expr) => {
        fearless_simd::dispatch!(fearless_simd::Level::new(), _ => $body)
    };
}
use vectorise;
