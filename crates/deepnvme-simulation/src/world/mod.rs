//! The simulated machine: disks, processes, faults and power cuts, all decided by one seed.
//!
//! `tree` has the files, `journal` and `folder` what of them is durable, `machine` the processes and faults, `calls` the system
//! calls that the code under test makes. Every call is a step: the scheduler may switch threads before it, the process may die
//! at it, the power may fail, or the call itself.

#[cfg(simulated)]
pub mod calls;
pub mod folder;
pub mod journal;
#[cfg(simulated)]
mod machine;
pub mod tree;

#[cfg(simulated)]
pub use machine::{OUTSIDE, Setup, State, USERS_FROM, World};
