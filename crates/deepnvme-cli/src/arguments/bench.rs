//! Options of `deepnvme bench`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use deepnvme_perf::units::parse_bytes;

use super::values::{Backend, Cache, Direct, Direction, Durability, Memory, Submit};

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Baseline {
    /// The installed fio
    Fio,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  deepnvme bench read /mnt/nvme                          read a 1 GiB tensor, not cached, into pinned memory
  deepnvme bench write /mnt/nvme --size 8G --durability data --validate
  deepnvme bench read /mnt/a /mnt/b --stripe-bytes 1M    stripe one file over two disks
  deepnvme bench read /mnt/nvme --random --block-bytes 4K --queue-depth 64
  deepnvme bench read /mnt/nvme --against fio --plot read.svg
  deepnvme bench read /mnt/nvme --gpu=1                  read a tensor to the second GPU

Each run makes files with random contents in the folders, fills them before the timing starts, and removes them at the
end. Existing files are never touched. Sizes: 2GB is 2 x 10^9 bytes, 2GiB and 2G are 2 x 2^30, 4096 is bytes. Speeds are in
GB/s, 10^9 bytes a second.")]
pub(crate) struct BenchArguments {
    /// Direction of the transfers
    pub(crate) direction: Direction,
    /// Folders for the files: one file in each, transferred at the same time
    #[arg(required = true)]
    pub(crate) folders: Vec<PathBuf>,
    /// Bytes of each file
    #[arg(long, value_parser = parse_bytes, default_value = "1G", alias = "io-size")]
    pub(crate) size: u64,
    /// Maximum bytes of an op [default: 2M]
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE")]
    pub(crate) block_bytes: Option<u64>,
    /// Ops in flight per worker [default: 128]
    #[arg(long)]
    pub(crate) queue_depth: Option<u32>,
    /// Threads that submit and reap [default: one per CPU, at most 4]
    #[arg(long)]
    pub(crate) workers: Option<u32>,
    /// Backend
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) backend: Backend,
    /// Ops per system call
    #[arg(long, value_enum, default_value = "batch")]
    pub(crate) submit: Submit,
    /// Whether to bypass the page cache
    #[arg(long, value_enum, default_value = "preferred")]
    pub(crate) direct: Direct,
    /// Kind of host memory
    #[arg(long, value_enum, default_value = "pinned")]
    pub(crate) memory: Memory,
    /// Reuse a buffer of this size block by block, as fio does [default: a buffer as large as the file, as for a
    /// tensor]
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE")]
    pub(crate) buffer: Option<u64>,
    /// Use memory of this GPU, through bounce buffers [without a number: the first]
    #[arg(long, value_name = "INDEX", num_args = 0..=1, require_equals = true, default_missing_value = "0")]
    pub(crate) gpu: Option<u32>,
    /// With --gpu: use cuFile (GPUDirect Storage) instead of bounce buffers, or fail with the reason
    #[arg(long)]
    pub(crate) gds: bool,
    /// Make one request per block, in random order, each block once
    #[arg(long)]
    pub(crate) random: bool,
    /// State of the page cache before a read
    #[arg(long, value_enum, default_value = "cold")]
    pub(crate) cache: Cache,
    /// Durability of a write
    #[arg(long, value_enum, default_value = "none")]
    pub(crate) durability: Durability,
    /// Stripe one file over all folders, with stripes of this size
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE")]
    pub(crate) stripe_bytes: Option<u64>,
    /// Processes, each with its own files
    #[arg(long, default_value_t = 1)]
    pub(crate) processes: u32,
    /// Measured rounds
    #[arg(long, default_value_t = 5)]
    pub(crate) loops: u32,
    /// Warm-up rounds before them
    #[arg(long, default_value_t = 1, value_name = "ROUNDS", alias = "warmup-loops")]
    pub(crate) warm_up: u32,
    /// Compare every byte of every round, outside the timing
    #[arg(long)]
    pub(crate) validate: bool,
    /// Baseline to measure with the same parameters, in alternating rounds
    #[arg(long, value_enum)]
    pub(crate) against: Option<Baseline>,
    /// Draw latencies and bandwidth over time to this .svg or .html file
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,
    /// Print JSON, with every round
    #[arg(long)]
    pub(crate) json: bool,
}
