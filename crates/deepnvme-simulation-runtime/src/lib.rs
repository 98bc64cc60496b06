//! Locks, threads and clocks for code compiled with `--cfg simulated`.
//!
//! Each module uses the names of its `std` counterpart, so a crate switches with one `use`:
//! - [`sync`]: locks, condition variables and cells over `shuttle`'s, whose scheduler picks the next thread.
//! - [`thread`]: threads as coroutines. Each belongs to a simulated process, which its children inherit.
//! - [`time`]: a clock that advances with the steps of the simulation.
//!
//! All of it works only inside an execution of `shuttle`, on its one operating system thread.
#![forbid(unsafe_code)]

pub mod sync;
pub mod thread;
pub mod time;
