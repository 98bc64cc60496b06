//! Threads and clocks: from the standard library, or simulated.

#[cfg(simulated)]
pub(crate) use deepnvme_simulation_runtime::{thread, time::Instant};
#[cfg(not(simulated))]
pub(crate) use std::{thread, time::Instant};
