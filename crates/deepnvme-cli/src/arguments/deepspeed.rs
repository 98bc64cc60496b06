//! Options of `deepnvme ds_io` and `deepnvme ds_nvme_tune`.

use std::path::PathBuf;

use clap::Args;
use deepnvme_perf::units::parse_bytes;

use crate::deepspeed::io::DsIoOptions;

#[derive(Debug, Args)]
#[command(after_help = "Example:
  deepnvme ds_io --folder /mnt/nvme --io_size 1G --read --io_parallel 4

Speeds are in GB of 2^30 bytes here, as in DeepSpeed. Files are removed at the end. deepnvme bench has more options.")]
pub(crate) struct DsIoArguments {
    #[command(flatten)]
    pub(crate) options: DsIoOptions,
    /// Accepted without effect: the buffer of torch_fastio, which is not measured here
    #[arg(long = "fast_io_size", value_parser = parse_bytes, default_value = "64M")]
    pub(crate) fast_io_size: u64,
    /// Accepted without effect: an option of torch_io, which is not measured here
    #[arg(long = "torch_legacy_save")]
    pub(crate) torch_legacy_save: bool,
    /// Accepted without effect: all memory is pinned unless --slow_bounce_buffer is set
    #[arg(long = "use_accelerator_pin_memory")]
    pub(crate) use_accelerator_pin_memory: bool,
    /// Accepted without effect: files are always laid out before the measurement
    #[arg(long = "different_file_each_iteration")]
    pub(crate) different_file_each_iteration: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:
  deepnvme ds_nvme_tune --nvme_dir /mnt/nvme

Measures every combination of the sweep, 64 by default, and writes a log file for each. deepnvme tune finds better
settings in less time, and writes them to a file that engines read.")]
pub(crate) struct DsTuneArguments {
    /// Folders, measured at the same time
    #[arg(long = "nvme_dir", num_args = 1.., required = true, value_name = "FOLDER")]
    pub(crate) nvme_dir: Vec<PathBuf>,
    /// JSON file with a list of values for each option of ds_io [default: DeepSpeed's sweep: block_size 1M 8M, queue_depth
    /// 32 128, io_parallel 1 2 4 8, single and batch, sequential and overlapped]
    #[arg(long = "sweep_config", value_name = "FILE")]
    pub(crate) sweep_config: Option<PathBuf>,
    /// Do not measure reading
    #[arg(long = "no_read", conflicts_with = "no_write")]
    pub(crate) no_read: bool,
    /// Do not measure writing
    #[arg(long = "no_write")]
    pub(crate) no_write: bool,
    /// Bytes in each folder
    #[arg(long = "io_size", value_parser = parse_bytes, default_value = "400M")]
    pub(crate) io_size: u64,
    /// Use memory of the first GPU
    #[arg(long)]
    pub(crate) gpu: bool,
    /// Not supported: use ds_io --gpu --use_gds to measure GPUDirect Storage, or deepnvme tune --gpu --gds to tune it
    #[arg(long)]
    pub(crate) gds: bool,
    /// Accepted without effect: the files are always dropped from the page cache
    #[arg(long = "flush_page_cache")]
    pub(crate) flush_page_cache: bool,
    /// Folder for the logs [default: _aio_bench_logs]
    #[arg(long = "log_dir")]
    pub(crate) log_dir: Option<PathBuf>,
    /// Rounds of each combination
    #[arg(long, default_value_t = 1)]
    pub(crate) loops: u32,
    /// Print every combination as it is measured
    #[arg(long)]
    pub(crate) verbose: bool,
}
