//! The simulated machine: disks, processes, faults and power cuts, all decided by one seed.
//!
//! `tree` contains the files, each an `entry`; `journal` and `folder` track their durable parts. `setup` is drawn from
//! the seed. `state` contains the processes, faults and access rules, and `machine` is the handle to it. `memory`
//! bounds memory use. `crash_points` chooses moments to try a crash on a copy, which `snapshot` makes. `calls`
//! implements the system calls of the code under test. Every call is a step: before it, the scheduler may switch
//! threads; at it, the process may die, or the power or the call may fail.

#[cfg(simulated)]
pub mod calls;
#[cfg(simulated)]
mod crash_points;
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
pub use crash_points::{CrashPoints, MachineSnapshot};
#[cfg(simulated)]
pub use machine::World;
#[cfg(simulated)]
pub use memory::MemoryAllowance;
#[cfg(simulated)]
pub use setup::{FaultTrigger, Setup};
#[cfg(simulated)]
pub(crate) use state::Promise;
#[cfg(simulated)]
pub use state::{FIRST_USER, SIMULATOR, WorldState};
