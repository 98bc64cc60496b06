//! The simulated machine: disks, processes, faults and power cuts, all decided by one seed.
//!
//! `tree` has the files, each of them an `entry`, `journal` and `folder` what of them is durable, `setup` what is drawn, `state`
//! the processes, what may fail and who may touch what, `machine` the handle to it, `memory` how much of it may be held, `watch`
//! the moments at which a crash is tried on a copy, which `snapshot` makes, `calls` the system calls that the code under test
//! makes. Every call is a step: the scheduler may switch threads before it, the process may die at it, the power may fail, or
//! the call itself.

#[cfg(simulated)]
pub mod calls;
pub mod entry;
pub mod folder;
pub mod journal;
#[cfg(simulated)]
mod machine;
#[cfg(simulated)]
mod memory;
#[cfg(simulated)]
mod setup;
pub mod snapshot;
#[cfg(simulated)]
mod state;
pub mod tree;
#[cfg(simulated)]
mod watch;

#[cfg(simulated)]
pub use machine::World;
#[cfg(simulated)]
pub use memory::Room;
#[cfg(simulated)]
pub use setup::{Aim, Setup};
#[cfg(simulated)]
pub(crate) use state::Promise;
#[cfg(simulated)]
pub use state::{OUTSIDE, State, USERS_FROM};
#[cfg(simulated)]
pub use watch::{Instant, Looks};
