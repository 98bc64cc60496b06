//! What may be typed of `deepnvme tune`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use deepnvme_perf::units::parse_bytes;

use super::values::{Durable, Memory};

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  deepnvme tune /mnt/nvme                          a minute; the settings go to deepnvme.toml
  deepnvme tune /mnt/a /mnt/b --budget 3m          each on its own, and both at the same time
  deepnvme tune /mnt/nvme --no-write --plot map.html
  deepnvme tune /mnt/nvme --compare deepnvme.toml  stored settings against the defaults

Candidates are tried in turn, again and again, and the worse half is dropped each time; of those that cannot be told
apart the smallest is chosen. Ctrl-C keeps the best so far. Python: deepnvme.Engine.from_file(\"deepnvme.toml\"), or
DEEPNVME_CONFIG=deepnvme.toml for programs that name no engine.")]
pub(crate) struct TuneOptions {
    /// The folders to tune for
    #[arg(required_unless_present = "nvme_dir")]
    pub(crate) folders: Vec<PathBuf>,
    /// The same, by DeepSpeed's name
    #[arg(long, alias = "nvme_dir", num_args = 1.., value_name = "FOLDER", hide = true)]
    pub(crate) nvme_dir: Vec<PathBuf>,
    /// How long all searches together may take: 60s, 2m
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
    /// The memory that bytes come from or go to
    #[arg(long, value_enum, default_value = "pinned")]
    pub(crate) memory: Memory,
    /// What a write waits for at its end
    #[arg(long, value_enum, default_value = "none")]
    pub(crate) durable: Durable,
    /// Memory of a GPU, by way of bounce slots: of the first, or of the one with that number
    #[arg(long, value_name = "INDEX", num_args = 0..=1, require_equals = true, default_missing_value = "0")]
    pub(crate) gpu: Option<u32>,
    /// With --gpu: by way of cuFile (GPUDirect Storage) in folders where it does without the host's memory; else it is said
    /// why not, and the way through bounce slots is tuned
    #[arg(long)]
    pub(crate) gds: bool,
    /// The values to choose from, as JSON lists by ds_io's names: block_size, queue_depth, io_parallel, ...
    #[arg(long, alias = "sweep_config", value_name = "FILE")]
    pub(crate) sweep_config: Option<PathBuf>,
    /// Where the settings go [default: deepnvme.toml]
    #[arg(long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Measure the settings of that file against the defaults, and search nothing
    #[arg(long, value_name = "FILE", conflicts_with_all = ["output", "sweep_config", "plot"])]
    pub(crate) compare: Option<PathBuf>,
    /// Draw the trials as a heat map: a name that ends in .svg or .html
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,
    /// For machines, every trial included
    #[arg(long)]
    pub(crate) json: bool,
}

/// `60s`, `2m`, or a number of seconds.
fn parse_budget(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is no time; write for example 60s or 2m");
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
    fn budgets_are_read_as_people_write_them() {
        let seconds = ["60s", "2m", "1.5", "90"].map(|text| parse_budget(text).unwrap().as_secs_f64());
        assert_eq!(seconds.map(|s| (s * 10.0) as u32), [600, 1200, 15, 900]);
        for text in ["", "s", "-1", "1h", "nan", "soon"] {
            assert!(parse_budget(text).is_err(), "{text}");
        }
    }
}
