//! The exported functions of `libcuda.so.1`, by what they are about.
//!
//! A function here checks its arguments and calls what does the work; `calls` has the gate that they all pass.

mod contexts;
mod copies;
mod copies_2d;
mod devices;
mod errors;
mod events;
mod memory;
mod pointers;
mod streams;
