//! Stored settings against the defaults, measured again in alternating rounds.

use std::path::{Path, PathBuf};

use deepnvme_io::shown;
use deepnvme_io::split::Direction as IoDirection;
use deepnvme_io::{Config, SettingsFile};
use serde::Serialize;

use super::{Options, workload};
use crate::bench::summary::{self, Ratio, Summary};
use crate::error::Result;
use crate::measure::{Contestant, Direction, Phase, Runner, Sample, Watch};

/// Rounds of each.
const ROUNDS: usize = 7;

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

/// Measures the settings of a file, and the defaults beside them.
///
/// # Errors
/// What is wrong with the file, what the machine refused, or `Interrupted`.
pub fn run(options: &Options, settings: &Path, watch: &mut dyn Watch) -> Result<Comparison> {
    let file = SettingsFile::load(settings)?;
    let mut lines = Vec::new();
    for folder in &options.folders {
        let mut runner = Runner::prepare(workload(options, vec![folder.clone()]), watch)?;
        runner.set_phase(Phase::Measuring);
        let place = folder.canonicalize().unwrap_or_else(|_| folder.clone());
        for direction in &options.directions {
            let way = match direction {
                Direction::Read => IoDirection::Read,
                Direction::Write => IoDirection::Write,
            };
            let config = file.of(Some(&place), Some(way)).clone();
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

/// Draws it in lines of text.
#[must_use]
pub fn draw(comparison: &Comparison) -> String {
    use std::fmt::Write;
    let mut out = format!("{} against the defaults, {ROUNDS} alternating rounds\n", shown::path(&comparison.settings));
    for line in &comparison.lines {
        let direction = match line.direction {
            Direction::Read => "read",
            Direction::Write => "write",
        };
        let (stored, usual, ratio) = (line.stored.gb_per_s, line.usual.gb_per_s, &line.ratio);
        let _ = writeln!(
            out,
            "\n{} {direction}: {stored:.2} GB/s, default {usual:.2}; {:.2} times as fast ({:.2} to {:.2})\n  {}",
            shown::path(&line.folder),
            ratio.median,
            ratio.min,
            ratio.max,
            super::text::describe(&line.config)
        );
    }
    out
}
