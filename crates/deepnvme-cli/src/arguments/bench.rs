//! What may be typed of `deepnvme bench`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use deepnvme_perf::units::parse_bytes;

use super::values::{Backend, Cache, Direct, Direction, Durable, Memory};

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Rival {
    /// The fio that is installed
    Fio,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  deepnvme bench read /mnt/nvme                          a cold 1 GiB tensor into page-locked memory
  deepnvme bench write /mnt/nvme --size 8G --durable data --validate
  deepnvme bench read /mnt/a /mnt/b --stripe 1M          one file over two disks
  deepnvme bench read /mnt/nvme --random --block-size 4K --queue-depth 64
  deepnvme bench read /mnt/nvme --against fio --plot read.svg
  deepnvme bench read /mnt/nvme --gpu=1                  a tensor on the second GPU

Contents are random in every run. Files are made in the folders under names of their own, filled before the clock
starts, and removed at the end; nothing else is touched. Sizes are 4096, 512K, 8M, 2G: powers of 1024. Speeds are
GB/s: 10^9 bytes a second.")]
pub(crate) struct BenchOptions {
    /// Which way the bytes go
    pub(crate) direction: Direction,
    /// Where the files are made: one in each folder, moved at the same time
    #[arg(required = true)]
    pub(crate) folders: Vec<PathBuf>,
    /// Bytes of each file
    #[arg(long, value_parser = parse_bytes, default_value = "1G", alias = "io-size")]
    pub(crate) size: u64,
    /// Largest single transfer [default: the engine's, 2M]
    #[arg(long, value_parser = parse_bytes)]
    pub(crate) block_size: Option<u64>,
    /// Transfers in flight per worker [default: the engine's, 16]
    #[arg(long)]
    pub(crate) queue_depth: Option<u32>,
    /// Threads that submit and reap [default: the engine's, one per processor up to 4]
    #[arg(long)]
    pub(crate) workers: Option<u32>,
    /// What moves the bytes
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) backend: Backend,
    /// One system call for each transfer
    #[arg(long)]
    pub(crate) single_submit: bool,
    /// Whether the page cache is bypassed
    #[arg(long, value_enum, default_value = "preferred")]
    pub(crate) direct: Direct,
    /// The memory that bytes come from or go to
    #[arg(long, value_enum, default_value = "pinned")]
    pub(crate) memory: Memory,
    /// Memory that is used again and again, a block at a time, as fio does [default: as much as the file has, as a tensor]
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE")]
    pub(crate) buffer: Option<u64>,
    /// Memory of a GPU, by way of bounce slots: of the first, or of the one with that number
    #[arg(long, value_name = "INDEX", num_args = 0..=1, require_equals = true, default_missing_value = "0")]
    pub(crate) gpu: Option<u32>,
    /// With --gpu: past the host's memory, by way of cuFile (GPUDirect Storage), or an error that says why not
    #[arg(long)]
    pub(crate) gds: bool,
    /// A request per block, in random order, each block once
    #[arg(long)]
    pub(crate) random: bool,
    /// Whether the page cache has the file before a read
    #[arg(long, value_enum, default_value = "cold")]
    pub(crate) cache: Cache,
    /// What a write waits for at its end
    #[arg(long, value_enum, default_value = "none")]
    pub(crate) durable: Durable,
    /// One file striped over all folders, in stripes of that size
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE")]
    pub(crate) stripe: Option<u64>,
    /// Processes that each do it, on files of their own
    #[arg(long, default_value_t = 1)]
    pub(crate) processes: u32,
    /// Rounds that count
    #[arg(long, default_value_t = 5)]
    pub(crate) loops: u32,
    /// Rounds before them that do not count
    #[arg(long, default_value_t = 1, value_name = "ROUNDS", alias = "warmup-loops")]
    pub(crate) warm_up: u32,
    /// Compare every byte of every round, outside of the timing
    #[arg(long)]
    pub(crate) validate: bool,
    /// Measure that with the same parameters, in alternating rounds
    #[arg(long, value_enum)]
    pub(crate) against: Option<Rival>,
    /// Draw latencies and bandwidth over time: a name that ends in .svg or .html
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,
    /// For machines, every round included
    #[arg(long)]
    pub(crate) json: bool,
}
