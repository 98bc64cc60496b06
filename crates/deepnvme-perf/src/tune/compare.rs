//! Stored settings against the defaults, measured again in alternating rounds.

use std::path::{Path, PathBuf};

use deepnvme_io::Config;
use deepnvme_io::shown;
use serde::Serialize;

use super::{Options, workload};
use crate::bench::summary::{self, Ratio, Summary};
use crate::error::Result;
use crate::measure::{Contestant, Direction, Phase, Runner, Sample, Watch};

/// Rounds of each.
pub const ROUNDS: usize = 7;

/// What came of it.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// The file of settings.
    #[serde(serialize_with = "shown::serialize")]
    pub settings: PathBuf,
    /// A line per folder and direction.
    pub lines: Vec<Line>,
}

/// A folder and a direction.
#[derive(Clone, Debug, Serialize)]
pub struct Line {
    /// Where.
    #[serde(serialize_with = "shown::serialize")]
    pub folder: PathBuf,
    /// Which way.
    pub direction: Direction,
    /// The settings of the file.
    pub config: Config,
    /// With them.
    pub stored: Summary,
    /// With the defaults.
    pub usual: Summary,
    /// Stored against default, round by round.
    pub ratio: Ratio,
}

/// Measures the settings of a file, and the defaults beside them. `stored_for` says which settings the file has for a
/// folder and a direction.
///
/// # Errors
/// What is wrong with the file, what the machine refused, or `Interrupted`.
pub fn run(
    options: &Options,
    settings: &Path,
    stored_for: &dyn Fn(&Path, Direction) -> Config,
    watch: &mut dyn Watch,
) -> Result<Comparison> {
    let mut lines = Vec::new();
    for folder in &options.folders {
        let mut runner = Runner::prepare(workload(options, vec![folder.clone()]), watch)?;
        runner.set_phase(Phase::Measuring);
        let place = folder.canonicalize().unwrap_or_else(|_| folder.clone());
        for direction in &options.directions {
            let config = stored_for(&place, *direction);
            let (stored, usual) = rounds(&mut runner, *direction, &config, watch)?;
            let ratio = summary::ratio(&stored, &usual);
            let (stored, usual) = (summary::of(&stored), summary::of(&usual));
            lines.push(Line { folder: folder.clone(), direction: *direction, config, stored, usual, ratio });
        }
    }
    Ok(Comparison { settings: settings.to_path_buf(), lines })
}

/// Both in turn; a first round does not count.
fn rounds(
    runner: &mut Runner,
    direction: Direction,
    config: &Config,
    watch: &mut dyn Watch,
) -> Result<(Vec<Sample>, Vec<Sample>)> {
    let configs = [config.clone(), Config::default()];
    let mut samples = [Vec::new(), Vec::new()];
    for round in 0..=ROUNDS {
        for turn in 0..2 {
            let index = (round + turn) % 2;
            runner.change(direction, &configs[index], watch)?;
            let sample = runner.round(watch)?;
            if round > 0 {
                samples[index].push(sample);
            }
        }
    }
    let [stored, usual] = samples;
    Ok((stored, usual))
}
