//! The simulated machine: disks, processes, faults and power cuts, all decided by one seed.
//!
//! `tree` has the files, `journal` and `folder` what of them is durable, `setup` what is drawn, `machine` the
//! processes and faults, `watch` the moments at which a crash is tried on a copy, `calls` the system
//! calls that the code under test makes. Every call is a step: the scheduler may switch threads before it, the process may die
//! at it, the power may fail, or the call itself.

#[cfg(simulated)]
pub mod calls;
pub mod folder;
pub mod journal;
#[cfg(simulated)]
mod machine;
#[cfg(simulated)]
mod setup;
pub mod tree;
#[cfg(simulated)]
mod watch;

#[cfg(simulated)]
pub use machine::{OUTSIDE, State, USERS_FROM, World};
#[cfg(simulated)]
pub use setup::{Aim, Setup};
