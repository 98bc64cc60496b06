//! One workload, measured round by round.
//!
//! `workload` says what is done, `plan` (pure) cuts it into requests, `rounds` does it with an engine: over scratch
//! `files` with random `contents`, from or to `memory` of the host or of a `gpu`, `cold` or not, giving a `sample` per
//! round. Whoever watches (`watch`) sees the bytes arrive and may stop it.

mod cold;
mod contents;
mod files;
pub mod gpu;
mod memory;
mod plan;
mod rounds;
pub mod sample;
pub mod watch;
pub mod workload;

pub use rounds::Runner;
pub use sample::Sample;
pub use watch::{Moment, Phase, Unwatched, Watch};
pub use workload::{Cache, Direction, Memory, Order, Workload};

pub(crate) use cold::{make_cold, make_warm};
pub(crate) use files::{ScratchFiles, check_room};

use crate::error::Result;

/// Something that does the same work again and again: our engine, or a rival.
pub trait Contestant {
    /// As tables call it.
    fn name(&self) -> &str;

    /// Does the work once, from the same state of the files each time.
    ///
    /// # Errors
    /// What the machine refused, or `Interrupted`.
    fn round(&mut self, watch: &mut dyn Watch) -> Result<Sample>;
}
