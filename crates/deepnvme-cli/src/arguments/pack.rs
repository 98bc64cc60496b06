//! What may be typed of `deepnvme pack`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::Serialize;

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Dtype {
    /// Packed without loss where that is measured to gain time, else kept
    Auto,
    /// Packed without loss where that makes fewer bytes
    Lossless,
    /// As they are
    Keep,
    /// Cast
    Bf16,
    /// Cast
    Fp16,
    /// Cast
    Fp32,
    /// Matrices in eight bits: integers
    Int8,
    /// Matrices in eight bits: floats, e4m3
    Fp8,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  deepnvme pack llama llama-packed --dry-run            what it would gain, in some seconds
  deepnvme pack llama llama-packed                      without loss, where that gains
  deepnvme pack llama llama-int8 --dtype int8           half of bf16's bytes, and a little error
  deepnvme pack llama llama-packed --disks /mnt/a /mnt/b

The new folder has the weights, and the other files of the old one; what is left out is named. It appears when it is
whole; nothing is overwritten. deepnvme.stream reads it as any other. Where no tensor is in another form, its weights are
model.safetensors, which everybody reads.")]
pub(crate) struct PackOptions {
    /// A folder with a model, an index, or a safetensors file
    pub(crate) source: PathBuf,
    /// The new folder
    pub(crate) target: PathBuf,
    /// What becomes of the weights
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) dtype: Dtype,
    /// Weights that share a scale, with int8 and fp8
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..), value_name = "WEIGHTS")]
    pub(crate) group: u32,
    /// Stripe the weights over these folders, one on each disk
    #[arg(long, num_args = 1.., value_name = "FOLDER")]
    pub(crate) disks: Vec<PathBuf>,
    /// Only say what it would gain
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// For machines
    #[arg(long)]
    pub(crate) json: bool,
}
