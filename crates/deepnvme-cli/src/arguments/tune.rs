//! Options of `deepnvme tune`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use deepnvme_perf::units::parse_bytes;

use super::values::{Durability, Memory};

#[derive(Debug, Args)]
#[command(
    override_usage = "deepnvme tune [OPTIONS] <FOLDERS>...",
    after_help = "Examples:
  deepnvme tune /mnt/nvme                          search for a minute, write deepnvme.toml
  deepnvme tune /mnt/a /mnt/b --budget 3m          tune each disk, and both at the same time
  deepnvme tune /mnt/nvme --no-write --plot map.html
  deepnvme tune /mnt/nvme --compare deepnvme.toml  measure stored settings against the defaults

The search tries all candidates in turn and drops the worse half after each round. Among indistinguishable candidates it
keeps the defaults, or else chooses the one with the fewest bytes in flight. Ctrl-C keeps the best so far. Use the
settings in Python with deepnvme.Engine.from_file(\"deepnvme.toml\"), or with DEEPNVME_CONFIG=deepnvme.toml for the
default engine."
)]
pub(crate) struct TuneArguments {
    /// Folders to tune for; at least one
    #[arg(required_unless_present = "nvme_dir")]
    pub(crate) folders: Vec<PathBuf>,
    /// Folders, by DeepSpeed's name
    #[arg(long, alias = "nvme_dir", num_args = 1.., value_name = "FOLDER", hide = true)]
    pub(crate) nvme_dir: Vec<PathBuf>,
    /// Time for all searches: 60s, 2m; at least 1s. Writing the files and the last comparison come on top
    #[arg(long, value_parser = parse_budget, default_value = "60s")]
    pub(crate) budget: Duration,
    /// Bytes of each trial
    #[arg(long, value_parser = parse_bytes, default_value = "400M", aliases = ["io-size", "io_size"])]
    pub(crate) size: u64,
    /// Do not tune for reading
    #[arg(long, alias = "no_read")]
    pub(crate) no_read: bool,
    /// Do not tune for writing
    #[arg(long, alias = "no_write")]
    pub(crate) no_write: bool,
    /// Kind of host memory
    #[arg(long, value_enum, default_value = "pinned")]
    pub(crate) memory: Memory,
    /// Durability of a write
    #[arg(long, value_enum, default_value = "none")]
    pub(crate) durability: Durability,
    /// Use memory of this GPU, through bounce buffers [without a number: the first]
    #[arg(long, value_name = "INDEX", num_args = 0..=1, require_equals = true, default_missing_value = "0")]
    pub(crate) gpu: Option<u32>,
    /// With --gpu: use cuFile (GPUDirect Storage) in folders where it avoids host memory; elsewhere print the reason
    /// and tune the bounce buffers
    #[arg(long)]
    pub(crate) gds: bool,
    /// JSON file with a list of values for each setting, by ds_io's names: block_size, queue_depth, io_parallel, ...
    #[arg(long, alias = "sweep_config", value_name = "FILE")]
    pub(crate) sweep_config: Option<PathBuf>,
    /// File for the settings [default: deepnvme.toml]
    #[arg(long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Measure the settings of this file against the defaults, without a search
    #[arg(long, value_name = "FILE", conflicts_with_all = ["output", "sweep_config", "plot"])]
    pub(crate) compare: Option<PathBuf>,
    /// Draw the trials as a heat map to this .svg or .html file
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,
    /// Print JSON, with every trial
    #[arg(long)]
    pub(crate) json: bool,
}

/// Parses `60s`, `2m`, or a number of seconds.
fn parse_budget(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is not a time; write for example 60s or 2m");
    let (number, unit) = match text.strip_suffix('m') {
        Some(minutes) => (minutes, 60.0),
        None => (text.strip_suffix('s').unwrap_or(text), 1.0),
    };
    let seconds = number.parse::<f64>().map_err(|_| wrong())? * unit;
    Duration::try_from_secs_f64(seconds).map_err(|_| wrong())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_are_parsed() {
        let seconds = ["60s", "2m", "1.5", "90"].map(|text| parse_budget(text).unwrap().as_secs_f64());
        assert_eq!(seconds.map(|s| (s * 10.0) as u32), [600, 1200, 15, 900]);
        for text in ["", "s", "-1", "1h", "nan", "soon"] {
            assert!(parse_budget(text).is_err(), "{text}");
        }
    }
}
