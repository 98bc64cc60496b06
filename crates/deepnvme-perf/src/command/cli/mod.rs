//! What may be typed: the program, its commands and their options. `pack` and `python` have the options of their commands.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;

mod pack;
mod python;

pub(super) use self::pack::{Dtype, PackOptions};
use self::python::{GenerateOptions, StreamBenchOptions};
use crate::measure::{Cache, Direction, Memory};
use crate::units::parse_bytes;

/// Tensors between NVMe and memory at the speed of the hardware: what works here, and how fast.
#[derive(Debug, Parser)]
#[command(name = "deepnvme", version, arg_required_else_help = true, max_term_width = 110, args_override_self = true)]
#[command(after_help = "Examples:
  deepnvme report /mnt/nvme              what works here, what costs speed, and what to do about it
  deepnvme bench read /mnt/nvme          how fast a cold 1 GiB tensor comes from that disk
  deepnvme bench write /mnt/nvme --against fio
  deepnvme tune /mnt/nvme                the settings that suit that disk, into deepnvme.toml

Exit status: 0 done, 1 refused by the machine or interrupted, 2 asked wrongly.")]
pub(super) struct Cli {
    #[command(subcommand)]
    pub(super) command: Command,
}

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// What works on this machine and in these folders, why not, and the line to type that mends it
    Report(ReportOptions),
    /// How fast reading or writing is, with the contents checked and beside fio if asked
    Bench(Box<BenchOptions>),
    /// The settings that suit a disk, found in a minute and written to a file that engines read
    Tune(Box<TuneOptions>),
    /// What a checkpoint holds: names, shapes, types and sizes, as a tree with totals
    Inspect(InspectOptions),
    /// Whether every byte of a checkpoint is as it was saved, by its checksums
    Verify(VerifyOptions),
    /// The tensors of a checkpoint in the other format, without the model in memory
    Convert(ConvertOptions),
    /// Text from a model whose weights stay on disk (needs Python's package)
    Generate(Box<GenerateOptions>),
    /// How near to the roofline a model streams from a disk, batch by batch (needs Python's package)
    #[command(name = "stream-bench")]
    StreamBench(Box<StreamBenchOptions>),
    /// A model's weights laid out layer by layer, in fewer bytes where that is asked for or gains
    Pack(PackOptions),
    /// DeepSpeed's ds_io: its options, its output lines
    #[command(name = "ds_io", alias = "ds-io")]
    DsIo(Box<DsIoOptions>),
    /// DeepSpeed's ds_nvme_tune: its options, its output and its log files
    #[command(name = "ds_nvme_tune", alias = "ds-nvme-tune")]
    DsNvmeTune(Box<DsTuneOptions>),
    /// Completions for a shell, on standard output
    #[command(
        after_help = "Example:\n  deepnvme completions bash > ~/.local/share/bash-completion/completions/deepnvme"
    )]
    Completions {
        /// The shell
        shell: Shell,
    },
    /// The manual page, on standard output
    #[command(after_help = "Example:\n  deepnvme man > ~/.local/share/man/man1/deepnvme.1")]
    Man,
    #[command(name = crate::bench::crew::WORKER_COMMAND, hide = true)]
    BenchWorker,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  deepnvme report                        the machine and the current folder
  deepnvme report /mnt/a /mnt/b          two places for data
  deepnvme report --json | jq .findings

Findings are broken (it does not work), slow (it could be faster) or a note; the line after > mends it.")]
pub(super) struct ReportOptions {
    /// Places for data [default: the current folder]
    pub(super) folders: Vec<PathBuf>,
    /// For machines
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  deepnvme inspect model.pt              the upper levels of the names, with totals
  deepnvme inspect model.safetensors --all
  deepnvme inspect ./my-model --json | jq '.[].tensors[] | select(.bytes > 1e8) | .name'

A folder or an index.json means all its files. No tensor is read, and no code of the file is run.")]
pub(super) struct InspectOptions {
    /// A torch archive, a safetensors file, an index of several, or a folder with one of these
    pub(super) path: PathBuf,
    /// How many levels of the names
    #[arg(long, default_value_t = 2)]
    pub(super) depth: usize,
    /// Every tensor
    #[arg(long, conflicts_with = "depth")]
    pub(super) all: bool,
    /// For machines
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  deepnvme verify model.pt
  deepnvme verify run-7 && rsync -a run-7 backup:

Exit status: 0 all is as it was saved; 1 something is damaged (what and where is said), cannot be verified, or cannot
be read. Archives of torch.save are compared with their CRC-32; safetensors of others have nothing to compare with.")]
pub(super) struct VerifyOptions {
    /// Torch archives, safetensors files, indexes, folders of a model, and folders of a `Checkpointer`
    #[arg(required = true)]
    pub(super) paths: Vec<PathBuf>,
    /// For machines
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  deepnvme convert pytorch_model.bin model.safetensors
  deepnvme convert ./my-model one-file.safetensors      all shards of a folder
  deepnvme convert model.safetensors model.pt           for torch.load

The new file appears when it is whole, with checksums; the old one is compared with its own on the way. Tensors that share
memory share it in a torch archive, and are there each by itself in a safetensors file. What is no tensor is left out,
and named.")]
pub(super) struct ConvertOptions {
    /// A torch archive, a safetensors file, an index of several, or a folder with one of these
    pub(super) source: PathBuf,
    /// The new file: safetensors if it is called so, else a torch archive
    pub(super) target: PathBuf,
    /// For machines
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(super) enum Backend {
    /// The first that works
    Auto,
    /// io_uring
    #[value(name = "io_uring", alias = "uring")]
    Uring,
    /// Linux native AIO
    #[value(alias = "libaio")]
    Aio,
    /// preadv and pwritev on threads
    Threads,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(super) enum Direct {
    /// Past the page cache, or fail
    Required,
    /// Past the page cache where the file system can
    Preferred,
    /// Through the page cache
    Disabled,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(super) enum Durable {
    /// Do not wait for the disk's word
    None,
    /// Wait until the bytes are on the disk
    Data,
    /// Wait until the bytes and the file's name are on the disk
    Full,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(super) enum Rival {
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
pub(super) struct BenchOptions {
    /// Which way the bytes go
    pub(super) direction: Direction,
    /// Where the files are made: one in each folder, moved at the same time
    #[arg(required = true)]
    pub(super) folders: Vec<PathBuf>,
    /// Bytes of each file
    #[arg(long, value_parser = parse_bytes, default_value = "1G", alias = "io-size")]
    pub(super) size: u64,
    /// Largest single transfer [default: the engine's, 2M]
    #[arg(long, value_parser = parse_bytes)]
    pub(super) block_size: Option<u64>,
    /// Transfers in flight per worker [default: the engine's, 16]
    #[arg(long)]
    pub(super) queue_depth: Option<u32>,
    /// Threads that submit and reap [default: the engine's, one per processor up to 4]
    #[arg(long)]
    pub(super) workers: Option<u32>,
    /// What moves the bytes
    #[arg(long, value_enum, default_value = "auto")]
    pub(super) backend: Backend,
    /// One system call for each transfer
    #[arg(long)]
    pub(super) single_submit: bool,
    /// Whether the page cache is bypassed
    #[arg(long, value_enum, default_value = "preferred")]
    pub(super) direct: Direct,
    /// The memory that bytes come from or go to
    #[arg(long, value_enum, default_value = "pinned")]
    pub(super) memory: Memory,
    /// Memory that is used again and again, a block at a time, as fio does [default: as much as the file has, as a tensor]
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE")]
    pub(super) buffer: Option<u64>,
    /// Memory of a GPU, by way of bounce slots: of the first, or of the one with that number
    #[arg(long, value_name = "INDEX", num_args = 0..=1, require_equals = true, default_missing_value = "0")]
    pub(super) gpu: Option<u32>,
    /// With --gpu: past the host's memory, by way of cuFile (GPUDirect Storage), or an error that says why not
    #[arg(long)]
    pub(super) gds: bool,
    /// A request per block, in random order, each block once
    #[arg(long)]
    pub(super) random: bool,
    /// Whether the page cache has the file before a read
    #[arg(long, value_enum, default_value = "cold")]
    pub(super) cache: Cache,
    /// What a write waits for at its end
    #[arg(long, value_enum, default_value = "none")]
    pub(super) durable: Durable,
    /// One file striped over all folders, in stripes of that size
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE")]
    pub(super) stripe: Option<u64>,
    /// Processes that each do it, on files of their own
    #[arg(long, default_value_t = 1)]
    pub(super) processes: u32,
    /// Rounds that count
    #[arg(long, default_value_t = 5)]
    pub(super) loops: u32,
    /// Rounds before them that do not count
    #[arg(long, default_value_t = 1, value_name = "ROUNDS", alias = "warmup-loops")]
    pub(super) warm_up: u32,
    /// Compare every byte of every round, outside of the timing
    #[arg(long)]
    pub(super) validate: bool,
    /// Measure that with the same parameters, in alternating rounds
    #[arg(long, value_enum)]
    pub(super) against: Option<Rival>,
    /// Draw latencies and bandwidth over time: a name that ends in .svg or .html
    #[arg(long, value_name = "FILE")]
    pub(super) plot: Option<PathBuf>,
    /// For machines, every round included
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  deepnvme tune /mnt/nvme                          a minute; the settings go to deepnvme.toml
  deepnvme tune /mnt/a /mnt/b --budget 3m          each on its own, and both at the same time
  deepnvme tune /mnt/nvme --no-write --plot map.html
  deepnvme tune /mnt/nvme --compare deepnvme.toml  stored settings against the defaults

Candidates are tried in turn, again and again, and the worse half is dropped each time; of those that cannot be told
apart the smallest is chosen. Ctrl-C keeps the best so far. Python: deepnvme.Engine.from_file(\"deepnvme.toml\"), or
DEEPNVME_CONFIG=deepnvme.toml for programs that name no engine.")]
pub(super) struct TuneOptions {
    /// The folders to tune for
    #[arg(required_unless_present = "nvme_dir")]
    pub(super) folders: Vec<PathBuf>,
    /// The same, by DeepSpeed's name
    #[arg(long, alias = "nvme_dir", num_args = 1.., value_name = "FOLDER", hide = true)]
    pub(super) nvme_dir: Vec<PathBuf>,
    /// How long all searches together may take: 60s, 2m
    #[arg(long, value_parser = parse_budget, default_value = "60s")]
    pub(super) budget: Duration,
    /// Bytes of each trial
    #[arg(long, value_parser = parse_bytes, default_value = "400M", aliases = ["io-size", "io_size"])]
    pub(super) size: u64,
    /// Do not tune for reading
    #[arg(long, alias = "no_read")]
    pub(super) no_read: bool,
    /// Do not tune for writing
    #[arg(long, alias = "no_write")]
    pub(super) no_write: bool,
    /// The memory that bytes come from or go to
    #[arg(long, value_enum, default_value = "pinned")]
    pub(super) memory: Memory,
    /// What a write waits for at its end
    #[arg(long, value_enum, default_value = "none")]
    pub(super) durable: Durable,
    /// Memory of a GPU, by way of bounce slots: of the first, or of the one with that number
    #[arg(long, value_name = "INDEX", num_args = 0..=1, require_equals = true, default_missing_value = "0")]
    pub(super) gpu: Option<u32>,
    /// With --gpu: by way of cuFile (GPUDirect Storage) in folders where it does without the host's memory; else it is said
    /// why not, and the way through bounce slots is tuned
    #[arg(long)]
    pub(super) gds: bool,
    /// The values to choose from, as JSON lists by ds_io's names: block_size, queue_depth, io_parallel, ...
    #[arg(long, alias = "sweep_config", value_name = "FILE")]
    pub(super) sweep_config: Option<PathBuf>,
    /// Where the settings go [default: deepnvme.toml]
    #[arg(long, value_name = "FILE")]
    pub(super) output: Option<PathBuf>,
    /// Measure the settings of that file against the defaults, and search nothing
    #[arg(long, value_name = "FILE", conflicts_with_all = ["output", "sweep_config", "plot"])]
    pub(super) compare: Option<PathBuf>,
    /// Draw the trials as a heat map: a name that ends in .svg or .html
    #[arg(long, value_name = "FILE")]
    pub(super) plot: Option<PathBuf>,
    /// For machines, every trial included
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:
  deepnvme ds_io --folder /mnt/nvme --io_size 1G --read --io_parallel 4

A GB is 2^30 bytes here, as DeepSpeed counts. Files are removed at the end. deepnvme bench does the same and more.")]
pub(super) struct DsIoOptions {
    /// Folder of all processes
    #[arg(long)]
    pub(super) folder: Option<PathBuf>,
    /// Folder and device of each process
    #[arg(long = "folder_to_device_mapping", num_args = 1.., value_name = "FOLDER:DEVICE")]
    pub(super) folder_to_device_mapping: Vec<String>,
    /// Bytes of each process
    #[arg(long = "io_size", value_parser = parse_bytes)]
    pub(super) io_size: u64,
    /// Bytes of the buffer of torch_fastio, which is not measured here
    #[arg(long = "fast_io_size", value_parser = parse_bytes, default_value = "64M")]
    pub(super) fast_io_size: u64,
    /// Read, instead of writing
    #[arg(long)]
    pub(super) read: bool,
    /// Processes, with --folder
    #[arg(long = "multi_process", default_value_t = 1)]
    pub(super) multi_process: u32,
    /// Bytes of a request
    #[arg(long = "block_size", value_parser = parse_bytes, default_value = "1M")]
    pub(super) block_size: u64,
    /// Requests in flight
    #[arg(long = "queue_depth", default_value_t = 32)]
    pub(super) queue_depth: u32,
    /// One request per system call
    #[arg(long = "single_submit")]
    pub(super) single_submit: bool,
    /// Requests in waves
    #[arg(long = "sequential_requests")]
    pub(super) sequential_requests: bool,
    /// Compare every byte
    #[arg(long)]
    pub(super) validate: bool,
    /// aio_handle or aio_basic; both are this engine
    #[arg(long, default_value = "aio_handle")]
    pub(super) engine: String,
    /// Rounds
    #[arg(long, default_value_t = 3)]
    pub(super) loops: u32,
    /// Workers [default: 1]
    #[arg(long = "io_parallel")]
    pub(super) io_parallel: Option<u32>,
    /// Memory of GPUs: of the process's number with --folder, of the device of the mapping without
    #[arg(long)]
    pub(super) gpu: bool,
    /// With --gpu: past the host's memory, by way of cuFile (GPUDirect Storage), or an error that says why not
    #[arg(long = "use_gds")]
    pub(super) use_gds: bool,
    /// Memory that is not page-locked; without effect with --gpu, whose bytes go by way of the engine's own
    #[arg(long = "slow_bounce_buffer")]
    pub(super) slow_bounce_buffer: bool,
    /// For torch_io, which is not measured here
    #[arg(long = "torch_legacy_save")]
    pub(super) torch_legacy_save: bool,
    /// Page-locked memory of the accelerator; all memory is page-locked unless --slow_bounce_buffer says otherwise
    #[arg(long = "use_accelerator_pin_memory")]
    pub(super) use_accelerator_pin_memory: bool,
    /// Rounds before those that count
    #[arg(long = "warmup_loops", default_value_t = 1)]
    pub(super) warmup_loops: u32,
    /// Count the warm-up, too
    #[arg(long = "include_warmup_time")]
    pub(super) include_warmup_time: bool,
    /// A new file each time; files are laid out before every measurement in any case
    #[arg(long = "different_file_each_iteration")]
    pub(super) different_file_each_iteration: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:
  deepnvme ds_nvme_tune --nvme_dir /mnt/nvme

Every combination of the sweep is measured, 64 by default, with a log file each. deepnvme tune finds better settings in
less time, and writes them where engines read them.")]
pub(super) struct DsTuneOptions {
    /// Folders, measured at the same time
    #[arg(long = "nvme_dir", num_args = 1.., required = true, value_name = "FOLDER")]
    pub(super) nvme_dir: Vec<PathBuf>,
    /// The values of each option of ds_io, as JSON lists
    #[arg(long = "sweep_config", value_name = "FILE")]
    pub(super) sweep_config: Option<PathBuf>,
    /// Do not measure reading
    #[arg(long = "no_read", conflicts_with = "no_write")]
    pub(super) no_read: bool,
    /// Do not measure writing
    #[arg(long = "no_write")]
    pub(super) no_write: bool,
    /// Bytes in each folder
    #[arg(long = "io_size", value_parser = parse_bytes, default_value = "400M")]
    pub(super) io_size: u64,
    /// Memory of the first GPU
    #[arg(long)]
    pub(super) gpu: bool,
    /// Not here: ds_io --gpu --use_gds measures GPUDirect Storage, and deepnvme tune --gpu --gds tunes it
    #[arg(long)]
    pub(super) gds: bool,
    /// Drop the page cache before each measurement; the files are always dropped from it
    #[arg(long = "flush_page_cache")]
    pub(super) flush_page_cache: bool,
    /// Where the logs go [default: _aio_bench_logs]
    #[arg(long = "log_dir")]
    pub(super) log_dir: Option<PathBuf>,
    /// Rounds of each combination
    #[arg(long, default_value_t = 1)]
    pub(super) loops: u32,
    /// Print every combination as it is measured
    #[arg(long)]
    pub(super) verbose: bool,
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
