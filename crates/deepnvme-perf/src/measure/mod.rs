//! One workload, measured round by round.
//!
//! `workload` describes the work, `plan` cuts it into requests without I/O, and `runner` runs them: over scratch
//! `files` with random `contents`, in `memory` of the host or of a `gpu`, with the `page_cache` cold or warm.
//! `engine_run` keeps requests in flight. Each round gives a `sample`. An `observer` sees the progress and may stop the
//! work.

mod contents;
mod engine_run;
mod files;
pub mod gpu;
mod memory;
pub mod observer;
mod page_cache;
mod plan;
mod runner;
pub mod sample;
pub mod workload;

pub use observer::{NoObserver, Observer, Phase, ProgressUpdate};
pub use runner::Runner;
pub use sample::{RouteBytes, Sample};
pub use workload::{AccessOrder, Cache, Direction, Memory, MemoryPlace, Workload};

pub(crate) use files::{ScratchFiles, check_free_space};
pub(crate) use page_cache::{drop_from_page_cache, load_into_page_cache};

use crate::error::Result;

/// Work that can be repeated: on the engine, or on a baseline.
pub trait Benchmark {
    /// Its name in tables.
    fn name(&self) -> &str;

    /// Does the work once, from the same state of the files each time.
    ///
    /// # Errors
    /// `Failed`, an error of the engine, or `Interrupted`.
    fn round(&mut self, observer: &mut dyn Observer) -> Result<Sample>;
}
