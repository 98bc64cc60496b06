//! Threads and clocks: the standard library's, or those of the simulation.

#[cfg(simulated)]
pub(crate) use deepnvme_simulation_runtime::{thread, time::Instant};
#[cfg(not(simulated))]
pub(crate) use std::{thread, time::Instant};
