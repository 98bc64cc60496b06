//! What may be typed: the program, its commands and their options. `pack` and `python` have the options of their commands.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;
use deepnvme_perf::bench::processes::WORKER_COMMAND;

mod bench;
mod checkpoint;
mod deepspeed;
mod pack;
mod python;
mod tune;
mod values;

pub(crate) use self::bench::BenchOptions;
pub(crate) use self::checkpoint::{ConvertOptions, InspectOptions, VerifyOptions};
pub(crate) use self::deepspeed::{DsIoOptions, DsTuneOptions};
pub(crate) use self::pack::{Dtype, PackOptions};
use self::python::{GenerateOptions, StreamBenchOptions};
pub(crate) use self::tune::TuneOptions;

/// Tensors between NVMe and memory at the speed of the hardware: what works here, and how fast.
#[derive(Debug, Parser)]
#[command(name = "deepnvme", version, arg_required_else_help = true, max_term_width = 110, args_override_self = true)]
#[command(after_help = "Examples:
  deepnvme report /mnt/nvme              what works here, what costs speed, and what to do about it
  deepnvme bench read /mnt/nvme          how fast a cold 1 GiB tensor comes from that disk
  deepnvme bench write /mnt/nvme --against fio
  deepnvme tune /mnt/nvme                the settings that suit that disk, into deepnvme.toml

Exit status: 0 done, 1 refused by the machine or interrupted, 2 asked wrongly.")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
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
    #[command(name = WORKER_COMMAND, hide = true)]
    BenchWorker,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  deepnvme report                        the machine and the current folder
  deepnvme report /mnt/a /mnt/b          two places for data
  deepnvme report --json | jq .findings

Findings are broken (it does not work), slow (it could be faster) or a note; the line after > mends it.")]
pub(crate) struct ReportOptions {
    /// Places for data [default: the current folder]
    pub(crate) folders: Vec<PathBuf>,
    /// For machines
    #[arg(long)]
    pub(crate) json: bool,
}
