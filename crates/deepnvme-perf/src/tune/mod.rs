//! Searches for the settings that suit a disk.
//!
//! `options` has the request and `space` the settings to choose from. `search` chooses among them without I/O,
//! `search_loop` makes the trials, and `result` is the outcome. `compare` measures stored settings against the
//! defaults.

use std::path::PathBuf;
use std::time::Instant;

use crate::error::{Error, Result};
use crate::measure::Observer;

pub mod compare;
mod options;
mod result;
pub mod search;
mod search_loop;
pub mod space;

pub use options::{TuneOptions, default_space};
pub use result::{Choice, FolderResult, GpuRoute, Trial, TuneOutcome};
pub use search::{Candidate, SearchResult};
pub use space::SearchSpace;

/// Searches. All files are removed, even on failure. An interrupted search returns the best settings so far.
///
/// # Errors
/// `Usage` for options that make no sense, `Failed`, an error of the engine, or `Interrupted` before the first result.
pub fn run(options: &TuneOptions, observer: &mut dyn Observer) -> Result<TuneOutcome> {
    options.check()?;
    let space = options.space.clone().unwrap_or_else(|| default_space(options));
    space.check()?;
    let began = Instant::now();
    let mut searches: Vec<Vec<PathBuf>> = options.folders.iter().map(|folder| vec![folder.clone()]).collect();
    if searches.len() > 1 {
        searches.push(options.folders.clone());
    }
    let budget = options.budget / searches.len() as u32;
    let mut results = Vec::new();
    let mut searched = space.clone();
    let mut is_interrupted = false;
    for folders in searches {
        match search_loop::search_folders(options, &space, folders, budget, observer) {
            Ok((result, space)) => {
                results.push(result);
                searched = space;
            }
            Err(Error::Interrupted) if !results.is_empty() => is_interrupted = true,
            Err(error) => return Err(error),
        }
        is_interrupted |= observer.is_interrupted();
        if is_interrupted {
            break;
        }
    }
    let space_len = searched.len();
    let (io_bytes, seconds) = (options.io_bytes, began.elapsed().as_secs_f64());
    Ok(TuneOutcome {
        version: env!("CARGO_PKG_VERSION"),
        space: searched,
        space_len,
        io_bytes,
        gpu: options.place.gpu,
        seconds,
        results,
        is_interrupted,
    })
}
