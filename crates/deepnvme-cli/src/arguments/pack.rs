//! Options of `deepnvme pack`.

use std::path::PathBuf;

use clap::builder::{PathBufValueParser, TypedValueParser as _};
use clap::{Args, ValueEnum};
use serde::Serialize;

/// Form of the weights in the new files.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum PackedForm {
    /// Compress without loss where that is measured to save time
    Auto,
    /// Compress without loss where that saves bytes
    Lossless,
    /// Keep the weights as they are
    Keep,
    /// Cast to bfloat16
    #[value(alias = "bfloat16")]
    Bf16,
    /// Cast to float16
    #[value(alias = "float16")]
    Fp16,
    /// Cast to float32
    #[value(alias = "float32")]
    Fp32,
    /// Quantise matrices to 8-bit integers
    Int8,
    /// Quantise matrices to 8-bit floats, e4m3
    Fp8,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  deepnvme pack llama llama-packed --dry-run            estimate the gain, in a few seconds
  deepnvme pack llama llama-packed                      compress without loss where that saves time
  deepnvme pack llama llama-int8 --dtype int8           halve the bytes of bf16, with a small error
  deepnvme pack llama llama-packed --disks /mnt/a /mnt/b

The new folder has the weights and the other files of the old one; omitted files are listed. It appears when it is
complete, and nothing is overwritten. deepnvme.stream reads it like any model. If no tensor is compressed or quantised,
the weights are a standard model.safetensors.")]
pub(crate) struct PackArguments {
    /// Model folder, index, or safetensors file
    pub(crate) source: PathBuf,
    /// New folder
    #[arg(value_parser = PathBufValueParser::new().try_map(local))]
    pub(crate) target: PathBuf,
    /// Form of the weights
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) dtype: PackedForm,
    /// Weights that share a scale, with int8 and fp8
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..), value_name = "WEIGHTS")]
    pub(crate) group: u32,
    /// Stripe the weights over these folders, one on each disk
    #[arg(long, num_args = 1.., value_name = "FOLDER", value_parser = PathBufValueParser::new().try_map(local))]
    pub(crate) disks: Vec<PathBuf>,
    /// Only estimate the gain
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Refuses a URL, of which a local folder would be made.
fn local(path: PathBuf) -> Result<PathBuf, String> {
    if deepnvme_file::is_url(&path) {
        return Err("it is a URL, and deepnvme writes local files: pass the path of a local or mounted folder".into());
    }
    Ok(path)
}
