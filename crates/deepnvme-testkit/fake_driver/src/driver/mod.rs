//! The exported functions of `libcuda.so.1`, by subject.
//!
//! A function here checks its arguments and calls the implementation; `calls` has the entry checks.

mod contexts;
mod copies;
mod copies_2d;
mod devices;
mod errors;
mod events;
mod memory;
mod pointers;
mod streams;
