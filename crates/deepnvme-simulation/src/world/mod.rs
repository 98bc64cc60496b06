//! The simulated machine: disks, processes, faults and power cuts, all decided by one seed.
//!
//! `tree` contains the files, each an `entry`; `journal` and `folder` track their durable parts. `setup` is drawn from
//! the seed. `state` contains the processes, faults and access rules, and `machine` is the handle to it. `memory`
//! bounds memory use. `watch` chooses moments to try a crash on a copy, which `snapshot` makes. `calls` implements the
//! system calls of the code under test. Every call is a step: before it, the scheduler may switch threads; at it, the
//! process may die, or the power or the call may fail.

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
