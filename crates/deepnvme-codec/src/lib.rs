//! Weights in fewer bytes, and back: pure functions over slices, without I/O, threads or unsafe code.
//!
//! - [`pack`]: lossless packing of floats. The exponents of weights carry less than three bits each; [`pack::encode`] stores
//!   them so, [`pack::Block`] gives back every bit.
//! - [`cast`]: bf16, fp16 and fp32 to each other.
//! - [`quant`]: int8 and fp8 with scales.
//! - [`Float`]: the three types that the others speak of.
//!
//! All of it works on bytes of any alignment, little-endian, and takes the widest vectors that the processor has, found
//! out at run time; the results do not depend on which. What comes from a disk is checked before it is believed.
#![forbid(unsafe_code)]

pub mod cast;
mod error;
mod float;
pub mod pack;
pub mod quant;

pub use error::{Error, Result};
pub use float::Float;

/// Runs an expression as it was compiled for the widest vectors of this processor. What it calls has to be
/// `inline(always)`: only what is inlined is compiled again.
macro_rules! widest {
    ($body:expr) => {
        fearless_simd::dispatch!(fearless_simd::Level::new(), _ => $body)
    };
}
use widest;
