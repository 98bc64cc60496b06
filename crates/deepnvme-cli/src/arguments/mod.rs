//! The command line: the program and its commands. Each command's options have a file.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;
use deepnvme_perf::bench::processes::PROCESS_COMMAND;

mod bench;
mod checkpoint;
mod deepspeed;
mod pack;
mod python;
mod rows;
mod tune;
mod values;

pub(crate) use self::bench::BenchArguments;
pub(crate) use self::checkpoint::{ConvertArguments, InspectArguments, VerifyArguments};
pub(crate) use self::deepspeed::{DsIoArguments, DsTuneArguments};
pub(crate) use self::pack::{PackArguments, PackedForm};
use self::python::{DemoArguments, GenerateArguments, StreamBenchArguments};
use self::rows::RowsArguments;
pub(crate) use self::tune::TuneArguments;

/// Move tensors between NVMe drives and memory at the speed of the drive
#[derive(Debug, Parser)]
#[command(name = "deepnvme", version, arg_required_else_help = true, max_term_width = 110, args_override_self = true)]
#[command(after_help = "Examples:
  deepnvme report /mnt/nvme              diagnose the machine and a folder
  deepnvme bench read /mnt/nvme          measure reading a 1 GiB tensor, not cached
  deepnvme bench write /mnt/nvme --against fio
  deepnvme tune /mnt/nvme                find the best settings, write deepnvme.toml

Exit status: 0 success, 1 failure, 2 usage error.")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Diagnose this machine and these folders, with a remedy for each problem
    Report(ReportArguments),
    /// Measure reading or writing, optionally against fio
    Bench(Box<BenchArguments>),
    /// Find the best engine settings for a disk in a minute, and write them to a file
    Tune(Box<TuneArguments>),
    /// List the tensors of a checkpoint: names, dtypes, shapes and sizes
    Inspect(InspectArguments),
    /// Verify every byte of a checkpoint by its checksums
    Verify(VerifyArguments),
    /// Convert a checkpoint to the format of the target's name, without loading the model into memory
    Convert(ConvertArguments),
    /// Save, load, generate and train, compared with torch and accelerate (needs the Python package)
    Demo(DemoArguments),
    /// Generate text with a model whose weights stay on disk (needs the Python package)
    Generate(Box<GenerateArguments>),
    /// Compare the speed of streaming a model with its roofline, for several batch sizes (needs the Python package)
    #[command(name = "stream-bench")]
    StreamBench(Box<StreamBenchArguments>),
    /// Pack a model's weights layer by layer, and compress or quantise them
    Pack(PackArguments),
    /// Inspect, pack and measure tables of rows on disk (needs the Python package)
    Rows(Box<RowsArguments>),
    /// Run DeepSpeed's ds_io: the same options and output lines
    #[command(name = "ds_io", alias = "ds-io")]
    DsIo(Box<DsIoArguments>),
    /// Run DeepSpeed's ds_nvme_tune: the same options, output and log files
    #[command(name = "ds_nvme_tune", alias = "ds-nvme-tune")]
    DsNvmeTune(Box<DsTuneArguments>),
    /// Print shell completions
    #[command(
        after_help = "Example:\n  deepnvme completions bash > ~/.local/share/bash-completion/completions/deepnvme"
    )]
    Completions {
        /// Shell
        shell: Shell,
    },
    /// Print the manual page
    #[command(after_help = "Example:\n  deepnvme man > ~/.local/share/man/man1/deepnvme.1")]
    Man,
    #[command(name = PROCESS_COMMAND, hide = true)]
    BenchProcess,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  deepnvme report                        diagnose the machine and the current folder
  deepnvme report /mnt/a /mnt/b          diagnose two folders for data
  deepnvme report --json | jq .findings

A finding is broken (does not work), slow (could be faster) or a note. The line after > is its remedy.
Exit status: 0 whatever the findings, 1 failure, 2 usage error. Scripts read the findings with --json.")]
pub(crate) struct ReportArguments {
    /// Folders for data [default: the current folder]
    pub(crate) folders: Vec<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}
