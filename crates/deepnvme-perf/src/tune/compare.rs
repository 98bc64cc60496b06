//! Stored settings against the defaults, in alternating rounds.

use std::path::{Path, PathBuf};

use deepnvme_io::Config;
use deepnvme_io::display;
use serde::Serialize;

use super::options::{TuneOptions, workload};
use crate::bench::summary::{self, Ratio, Summary};
use crate::error::Result;
use crate::measure::{Benchmark, Direction, Observer, Phase, Runner, Sample};

/// Counted rounds of each of the two settings.
pub const ROUNDS: usize = 7;

/// The outcome of a comparison.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// The file of settings.
    #[serde(serialize_with = "display::serialize")]
    pub settings: PathBuf,
    /// One comparison for each folder and direction.
    pub comparisons: Vec<FolderComparison>,
}

/// The comparison for one folder and direction.
#[derive(Clone, Debug, Serialize)]
pub struct FolderComparison {
    /// The folder.
    #[serde(serialize_with = "display::serialize")]
    pub folder: PathBuf,
    /// The direction.
    pub direction: Direction,
    /// The settings of the file.
    pub config: Config,
    /// The metrics with these settings.
    pub stored: Summary,
    /// The metrics with the defaults.
    pub default: Summary,
    /// Stored relative to default, round by round.
    pub ratio: Ratio,
}

/// Measures the settings of a file and the defaults. `stored_for` returns the file's settings for a folder and a
/// direction.
///
/// # Errors
/// `Failed`, an error of the engine, or `Interrupted`.
pub fn run(
    options: &TuneOptions,
    settings: &Path,
    stored_for: &dyn Fn(&Path, Direction) -> Config,
    observer: &mut dyn Observer,
) -> Result<Comparison> {
    let mut comparisons = Vec::new();
    for folder in &options.folders {
        let mut runner = Runner::prepare(workload(options, vec![folder.clone()]), observer)?;
        runner.set_phase(Phase::Measuring);
        let real_path = folder.canonicalize().unwrap_or_else(|_| folder.clone());
        for direction in &options.directions {
            let config = stored_for(&real_path, *direction);
            let (stored, default) = rounds(&mut runner, *direction, &config, observer)?;
            let ratio = summary::ratio(&stored, &default);
            let (stored, default) = (summary::summarise(&stored), summary::summarise(&default));
            let (folder, direction) = (folder.clone(), *direction);
            comparisons.push(FolderComparison { folder, direction, config, stored, default, ratio });
        }
    }
    Ok(Comparison { settings: settings.to_path_buf(), comparisons })
}

/// Runs both in turn. The first round does not count.
fn rounds(
    runner: &mut Runner,
    direction: Direction,
    config: &Config,
    observer: &mut dyn Observer,
) -> Result<(Vec<Sample>, Vec<Sample>)> {
    let configs = [config.clone(), Config::default()];
    let mut samples = [Vec::new(), Vec::new()];
    for round in 0..=ROUNDS {
        for turn in 0..2 {
            let index = (round + turn) % 2;
            runner.reconfigure(direction, &configs[index], observer)?;
            let sample = runner.round(observer)?;
            if round > 0 {
                samples[index].push(sample);
            }
        }
    }
    let [stored, default] = samples;
    Ok((stored, default))
}
