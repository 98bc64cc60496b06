//! `ds_nvme_tune`: measure every combination of a sweep, write a log file for each, and print the best as an `"aio"`
//! block.

use std::path::{Path, PathBuf};

use deepnvme_io::{BackendChoice, Config, DirectMode, SubmitMode, WindowMode};
use deepnvme_io::{display, fs};

use deepnvme_perf::measure::{Benchmark, Direction, Memory, MemoryPlace, Observer, Phase, Runner, Sample, Workload};
use deepnvme_perf::tune::space::{self, SearchSpace};
use deepnvme_perf::units::bytes_option;
use deepnvme_perf::{Error, Result};

use super::io::{self, Metrics};
use crate::show::aio_block::AioBlock;

/// The options, by DeepSpeed's names.
#[derive(Clone, Debug)]
pub struct DsTuneOptions {
    /// The folders, measured at the same time.
    pub nvme_dir: Vec<PathBuf>,
    /// JSON lists by the names of `ds_io`.
    pub sweep_config: Option<PathBuf>,
    /// Bytes in each folder.
    pub io_size: u64,
    /// The GPU that holds the memory instead of the host.
    pub gpu: Option<u32>,
    /// The directions.
    pub directions: Vec<Direction>,
    /// The folder of the logs.
    pub log_dir: PathBuf,
    /// Rounds of each combination.
    pub loops: u32,
    /// Whether to print each combination.
    pub verbose: bool,
}

/// Maximum size of a sweep config.
const SWEEP_CONFIG_BYTES_MAX: u64 = 1 << 20;

/// Returns DeepSpeed's default sweep.
fn default_sweep() -> SearchSpace {
    SearchSpace {
        block_bytes: vec![1 << 20, 8 << 20],
        queue_depth: vec![32, 128],
        workers: vec![1, 2, 4, 8],
        submit: vec![SubmitMode::Batch, SubmitMode::Single],
        window: vec![WindowMode::Drain, WindowMode::Sliding],
        backend: vec![BackendChoice::Auto],
        register_pool: vec![true],
        gds: DirectMode::Disabled,
    }
}

/// Reads a `--sweep-config`: the values to try, where they differ from `base`.
///
/// # Errors
/// `Engine` if it is not a regular file, is too large or cannot be read; `Usage` with the setting that is invalid.
pub(crate) fn sweep_config(path: &Path, base: SearchSpace) -> Result<SearchSpace> {
    let text = fs::read_small(path, SWEEP_CONFIG_BYTES_MAX)?;
    let text =
        String::from_utf8(text).map_err(|_| Error::usage(format!("{}: it is not UTF-8", display::path(path))))?;
    space::from_deepspeed(&text, base).map_err(|error| match error {
        Error::Usage(text) => Error::usage(format!("{}: {text}", display::path(path))),
        other => other,
    })
}

/// Runs the sweep, and returns the summary that DeepSpeed's tool prints at its end.
///
/// # Errors
/// `Usage`, `Failed`, an error of the engine, or `Interrupted`. Logs that were written stay.
pub fn run(
    options: &DsTuneOptions,
    observer: &mut dyn Observer,
    print: &mut dyn FnMut(&str) -> Result<()>,
) -> Result<String> {
    let names: Vec<_> = options.nvme_dir.iter().map(|folder| format!("'{}'", display::path(folder))).collect();
    print(&format!("Running DeepNVMe performance tuning on [{}]\n", names.join(", ")))?;
    let space = match &options.sweep_config {
        None => default_sweep(),
        Some(path) => sweep_config(path, default_sweep())?,
    };
    space.check()?;
    let mut runner = Runner::prepare(workload(options), observer)?;
    runner.set_phase(Phase::Measuring);
    let mut best: Option<(f64, Config)> = None;
    let mut best_of = Vec::new();
    let mut sums = vec![0.0; space.len()];
    for direction in &options.directions {
        let folder = log_folder(options, *direction)?;
        let mut fastest = 0.0_f64;
        for (index, config) in space.all().enumerate() {
            let metrics = measure(options, &mut runner, *direction, &config, observer)?;
            let name = log_name(*direction, &config, options.nvme_dir.len());
            let path = folder.join(&name);
            deepnvme_file::replace::replace_small(&path, metrics.text().as_bytes())?;
            if options.verbose {
                print(&format!("{name}: {:.2} GB/sec\n", metrics.e2e_speed()))?;
            }
            fastest = fastest.max(metrics.e2e_speed());
            sums[index] += metrics.e2e_speed();
        }
        best_of.push(format!("{} = {fastest:5.2}", name_of(*direction)));
    }
    for (sum, config) in sums.into_iter().zip(space.all()) {
        if best.as_ref().is_none_or(|(fastest, _)| sum > *fastest) {
            best = Some((sum, config));
        }
    }
    let (_, config) = best.ok_or_else(|| {
        Error::usage("the sweep has no combination of settings; give each setting at least one value")
    })?;
    Ok(format!("Best performance (GB/sec): {}\n{}", best_of.join(", "), AioBlock::of(&config).text()))
}

fn workload(options: &DsTuneOptions) -> Workload {
    let direction = options.directions.first().copied().unwrap_or(Direction::Read);
    Workload {
        place: MemoryPlace { memory: Memory::Pinned, gpu: options.gpu },
        ..Workload::new(direction, options.nvme_dir.clone(), options.io_size)
    }
}

fn measure(
    options: &DsTuneOptions,
    runner: &mut Runner,
    direction: Direction,
    config: &Config,
    observer: &mut dyn Observer,
) -> Result<Metrics> {
    runner.reconfigure(direction, config, observer)?;
    // One warm-up round, as in ds_io.
    runner.round(observer)?;
    let samples: Vec<Sample> = (0..options.loops.max(1)).map(|_| runner.round(observer)).collect::<Result<_>>()?;
    Ok(io::Metrics::of(direction, &samples))
}

fn log_folder(options: &DsTuneOptions, direction: Direction) -> Result<PathBuf> {
    let folder = options.log_dir.join(format!("_aio_bench_{}_logs", name_of(direction)));
    std::fs::create_dir_all(&folder).map_err(|error| Error::at(&folder, "cannot create the log folder", &error))?;
    Ok(folder)
}

fn name_of(direction: Direction) -> &'static str {
    match direction {
        Direction::Read => "read",
        Direction::Write => "write",
    }
}

/// Returns a log's name: `read_single_overlap_ftd1_d32_bs1M_p4.txt`.
fn log_name(direction: Direction, config: &Config, folders: usize) -> String {
    let submit = if config.submit == SubmitMode::Single { "single" } else { "block" };
    let window = if config.window == WindowMode::Drain { "sequential" } else { "overlap" };
    let (depth, block, workers) = (config.queue_depth, bytes_option(config.block_bytes), config.workers);
    format!("{}_{submit}_{window}_ftd{folders}_d{depth}_bs{block}_p{workers}.txt", name_of(direction))
}

/// Returns the default log folder of DeepSpeed's tool.
#[must_use]
pub fn default_log_dir() -> &'static Path {
    Path::new("_aio_bench_logs")
}

#[cfg(test)]
mod tests {
    use super::*;
    use deepnvme_perf::measure::NoObserver;

    #[test]
    fn a_sweep_leaves_a_log_per_combination_and_prints_a_block() {
        let (folder, logs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let sweep = logs.path().join("sweep.json");
        std::fs::write(&sweep, r#"{"block_size": ["64K"], "queue_depth": [4, 8], "io_parallel": [1]}"#).unwrap();
        let options = DsTuneOptions {
            nvme_dir: vec![folder.path().into()],
            sweep_config: Some(sweep),
            io_size: 1 << 20,
            gpu: None,
            directions: vec![Direction::Read, Direction::Write],
            log_dir: logs.path().join("logs"),
            loops: 1,
            verbose: false,
        };
        let mut printed = String::new();
        let mut print = |text: &str| {
            printed.push_str(text);
            Ok(())
        };
        let end = run(&options, &mut NoObserver, &mut print).unwrap();
        assert_eq!(printed, format!("Running DeepNVMe performance tuning on ['{}']\n", folder.path().display()));
        assert!(end.starts_with("Best performance (GB/sec): read = ") && end.contains(", write = "), "{end}");
        let block: serde_json::Value = serde_json::from_str(&end[end.find('{').unwrap()..]).unwrap();
        assert_eq!(block["aio"]["intra_op_parallelism"], 1);
        for direction in ["read", "write"] {
            let logs = logs.path().join(format!("logs/_aio_bench_{direction}_logs"));
            let one = std::fs::read_to_string(logs.join(format!("{direction}_single_overlap_ftd1_d8_bs64K_p1.txt")));
            assert!(one.unwrap().contains("Speed = "), "{direction}");
            assert_eq!(std::fs::read_dir(logs).unwrap().count(), 8);
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        assert_eq!(default_sweep().len(), 64);
    }

    #[test]
    fn errors_of_a_sweep_config_name_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sweep.json");
        for text in ["", "[]", "{\"depth\": [1]}", "{\"queue_depth\": [0]}", "{\"single_submit\": [1]}"] {
            std::fs::write(&path, text).unwrap();
            let error = sweep_config(&path, default_sweep()).unwrap_err();
            assert!(matches!(error, Error::Usage(_)), "{text}");
            assert!(error.to_string().starts_with(&format!("{}: ", path.display())), "{error}");
        }
    }
}
