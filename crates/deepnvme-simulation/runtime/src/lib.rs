//! Locks, threads and clocks for code that is compiled with `--cfg simulated`.
//!
//! Each module has the names of its counterpart in `std`, so that a crate switches with one `use`:
//! - [`sync`]: locks, condition variables and cells over `shuttle`'s, whose scheduler decides who runs.
//! - [`thread`]: threads that are coroutines; each belongs to a simulated process, which its children inherit.
//! - [`time`]: a clock that advances with the steps of the simulation.
//!
//! All of it works inside of an execution of `shuttle` only, and on its one operating system thread.
#![forbid(unsafe_code)]

pub mod sync;
pub mod thread;
pub mod time;
