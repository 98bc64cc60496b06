//! Options of `deepnvme rows`, and their JSON for the Python package.

use std::path::PathBuf;

use clap::{ArgGroup, Args, Subcommand, ValueEnum};
use serde::Serialize;

use super::python::{checked_size, serialize_path, serialize_path_if_any};

/// The commands for tables of rows on disk.
#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  deepnvme rows inspect model.safetensors                  list the tensors that can be a table
  deepnvme rows pack model.safetensors rows.safetensors --tensor table
  deepnvme rows bench rows.safetensors --memory 4MB

Exit status: 0 success, 1 failure, 2 usage error.")]
pub(crate) struct RowsArguments {
    #[command(subcommand)]
    pub(crate) command: RowsCommand,
}

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum RowsCommand {
    /// Describe a table, or list the tensors of a checkpoint that can be one
    Inspect(RowsInspectArguments),
    /// Pack a table into a new file, in which each row is one read, and verify it
    Pack(RowsPackArguments),
    /// Measure gathers of random rows, optionally against fio and mmap
    Bench(RowsBenchArguments),
}

/// The dtype of a raw file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub(crate) enum TableDtype {
    #[value(alias = "bf16")]
    Bfloat16,
    #[value(alias = "fp16")]
    Float16,
    #[value(alias = "fp32")]
    Float32,
    Float64,
    #[value(name = "float8_e4m3fn")]
    #[serde(rename = "float8_e4m3fn")]
    Float8E4m3fn,
    #[value(name = "float8_e5m2")]
    #[serde(rename = "float8_e5m2")]
    Float8E5m2,
    Int8,
    Uint8,
    Int16,
    Int32,
    Int64,
}

/// The table, as the arguments of `RowStore` describe it.
#[derive(Clone, Debug, Args, Serialize)]
pub(crate) struct TableArguments {
    /// Safetensors file, torch archive, index of several, model folder, manifest of a stripe set, or raw file
    #[serde(serialize_with = "serialize_path")]
    pub(crate) source: PathBuf,
    /// Tensor of a checkpoint; may be repeated, for a table in several tensors in the order of their rows
    #[arg(long, value_name = "NAME")]
    pub(crate) tensor: Vec<String>,
    /// Tensor with the scales of quantised rows; may be repeated
    #[arg(long, value_name = "NAME", requires = "tensor")]
    pub(crate) scales: Vec<String>,
    /// Shape of a raw file: the number of rows, and the shape of a row
    #[arg(long, value_delimiter = ',', value_name = "ROWS,COLUMNS", requires = "dtype", conflicts_with = "tensor")]
    pub(crate) shape: Vec<u64>,
    /// Dtype of a raw file
    #[arg(long, value_enum, requires = "shape")]
    pub(crate) dtype: Option<TableDtype>,
    /// Bytes of a raw file before its first row [default: 0]
    #[arg(long, value_name = "BYTES", requires = "shape")]
    pub(crate) offset: Option<u64>,
}

#[derive(Clone, Debug, Args, Serialize)]
#[command(after_help = "Examples:
  deepnvme rows inspect model.safetensors                  list the tensors that can be a table
  deepnvme rows inspect model.safetensors --tensor table
  deepnvme rows inspect table.bin --shape 50000,160 --dtype bfloat16
  deepnvme rows inspect rows.safetensors                   describe a packed table

No row is read. Scales that are not packed are read. Exit status: 0 success, 1 failure, 2 usage error.")]
pub(crate) struct RowsInspectArguments {
    #[command(flatten)]
    #[serde(flatten)]
    pub(crate) table: TableArguments,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Clone, Debug, Args, Serialize)]
#[command(group = ArgGroup::new("described").args(["tensor", "shape"]).required(true))]
#[command(after_help = "Examples:
  deepnvme rows pack model.safetensors rows.safetensors --tensor table
  deepnvme rows pack model.safetensors rows.safetensors --tensor codes --scales scales
  deepnvme rows pack table.bin rows.safetensors --shape 50000,160 --dtype bfloat16
  deepnvme rows pack model.safetensors rows.safetensors --tensor table --trace ids.npy

The new file appears when it is complete. Then every block is read and compared with its checksum.

Exit status: 0 success, 1 failure, 2 usage error.")]
pub(crate) struct RowsPackArguments {
    #[command(flatten)]
    #[serde(flatten)]
    pub(crate) table: TableArguments,
    /// File to write, replaced if it exists
    #[serde(serialize_with = "serialize_path")]
    pub(crate) target: PathBuf,
    /// Trace of ids, those that were requested before in their order: a .npy file, or a file of one tensor. The most
    /// frequent rows are copied together
    #[arg(long, value_name = "FILE")]
    #[serde(serialize_with = "serialize_path_if_any")]
    pub(crate) trace: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Another way to read rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum RowsBaseline {
    /// Random direct reads with io_uring, as large as the read of one row
    Fio,
    /// torch.index_select on a mapped file, for rows that are read in place
    Mmap,
}

#[derive(Clone, Debug, Args, Serialize)]
#[command(after_help = "Examples:
  deepnvme rows bench rows.safetensors                     a packed table
  deepnvme rows bench model.safetensors --tensor table --memory 1GB --zipf 1
  deepnvme rows bench table.bin --shape 50000,160 --dtype bfloat16 --against fio,mmap

deepnvme and mmap gather the same rows in alternating rounds, other rows in each round. fio makes as many random
reads. Before each turn, the file leaves the page cache. Rows in --memory stay there.

Sizes: 2GB is 2 x 10^9 bytes, 2GiB and 2G are 2 x 2^30.

Exit status: 0 success, 1 failure, 2 usage error.")]
pub(crate) struct RowsBenchArguments {
    #[command(flatten)]
    #[serde(flatten)]
    pub(crate) table: TableArguments,
    /// Memory of the table: cached rows, and reads in flight
    #[arg(long, default_value = "64MB", value_parser = checked_size)]
    pub(crate) memory: String,
    /// Rows per gather, separated by commas [default: 16,4096,32768]
    #[arg(
        long,
        value_name = "COUNTS",
        value_delimiter = ',',
        default_values_t = [16, 4096, 32768],
        hide_default_value = true,
        value_parser = clap::value_parser!(u64).range(1..=ROWS_MAX)
    )]
    pub(crate) rows: Vec<u64>,
    /// Draw ids from a Zipf distribution with this exponent [default: uniform]
    #[arg(long, value_name = "EXPONENT", value_parser = parse_exponent)]
    pub(crate) zipf: Option<f64>,
    /// Measured rounds
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub(crate) rounds: u64,
    /// Baselines to measure in the same rounds, separated by commas
    #[arg(long, value_enum, value_delimiter = ',')]
    pub(crate) against: Vec<RowsBaseline>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// The most rows of a measured gather.
const ROWS_MAX: u64 = 1 << 24;

fn parse_exponent(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|number| (0.0..=10.0).contains(number));
    number.ok_or_else(|| "it must be a number between 0 and 10".into())
}

impl RowsCommand {
    /// Returns the name and the options, as JSON, for Python.
    pub(crate) fn for_python(&self) -> (&'static str, serde_json::Result<String>) {
        match self {
            Self::Inspect(options) => ("rows inspect", serde_json::to_string(options)),
            Self::Pack(options) => ("rows pack", serde_json::to_string(options)),
            Self::Bench(options) => ("rows bench", serde_json::to_string(options)),
        }
    }
}
